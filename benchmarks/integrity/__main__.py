"""Damaged and forged stores that are found, sound ones that pass, odd texts that survive.

python -m benchmarks.integrity [--flips N] [--stores N] [--forgeries N] [--launderings N]
                               [--edits N] [--tokenizers N] [--networks N] [--texts N]
"""

from __future__ import annotations

import click

from benchmarks.common.results import publish
from benchmarks.integrity.trials import checked
from teachonce.support.console import command_errors
from teachonce.support.errors import UserError


@click.command()
@click.option("--flips", default=1000, help="Flipped bits for each format.")
@click.option("--stores", default=50, help="Sound stores.")
@click.option("--forgeries", default=2000, help="Forged stores.")
@click.option("--launderings", default=1000, help="Altered stores that are copied, at most all.")
@click.option("--edits", default=500, help="Corpora that are edited while they are dumped.")
@click.option("--tokenizers", default=200, help="Stores with a stranger's tokenizer or settings.")
@click.option("--networks", default=200, help="Networks that lose and alter answers of S3.")
@click.option("--characters", default=0x110000, help="Code points of Unicode, from the first.")
@click.option("--texts", default=100_000, help="Odd texts.")
@click.option("--seed", default=0)
@command_errors
def main(seed: int, **counts: int) -> None:
    """Print the table and put it into RESULTS.md; exit code 1 if anything is not as it must be."""
    rows, wrong = checked(counts, seed)
    publish("Integrity", f"`python -m benchmarks.integrity`; seed {seed}.", rows)
    for line in wrong[:20]:
        click.echo(line)
    if wrong:
        raise UserError(f"{len(wrong)} case(s) are not as they must be")


if __name__ == "__main__":
    main()
