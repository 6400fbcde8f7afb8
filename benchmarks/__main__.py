"""List the benchmarks, or run some of them, each in a process of its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import click

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Return the modules here that are commands: the first line of the docstring by the name after
    `python -m benchmarks.`."""
    docstrings = {}
    for file in sorted(FOLDER.rglob("*.py")):
        source = file.read_text("utf-8")
        if file == Path(__file__) or "@click.command" not in source:
            continue
        name = ".".join(file.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__main__")
        docstrings[name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return docstrings


def listing() -> str:
    """Return a line for each benchmark."""
    docstrings = benchmarks()
    width = max(map(len, docstrings))
    return "\n".join(f"{name:{width}}  {line}" for name, line in docstrings.items())


@click.command(epilog=f"\b\n{listing()}", context_settings={"max_content_width": 120})
@click.argument(
    "names", nargs=-1, required=True, type=click.Choice(list(benchmarks())), metavar="NAME..."
)
def main(names: tuple[str, ...]) -> None:
    """Run the benchmarks with these names, one after another.

    For options, run a single benchmark: `python -m benchmarks.NAME --help`.
    """
    for name in names:
        # Separate processes, so that no benchmark's figures include the memory of another.
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode
        if code:
            raise click.ClickException(f"benchmarks.{name} ended with exit code {code}")


if __name__ == "__main__":
    main()
