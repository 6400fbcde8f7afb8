"""No input can execute code: no pickle, no eval, no code of a model's repository."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    ROOT / "benchmarks",
    *sorted(path.parent for path in (ROOT / "teachonce").glob("*/__init__.py")),
]
MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__", "load_pickle", "read_pickle", "unsafe_load"}
LOADERS = {"pickle", "_pickle", "pickletools", "yaml"}


def dangers(source: str) -> Iterator[str]:
    """List the calls of a program that could execute their input, each in a few words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            MODULES | LOADERS
        ):
            yield f"from {node.module}"
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            if ast.unparse(node.value) not in ("False", "model.trusted"):  # the user requests it
                yield "trust_remote_code"
        elif isinstance(node, ast.Subscript):
            if ast.unparse(node.slice) == "'trust_remote_code'":
                yield "trust_remote_code"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                # in a table of options, {} marks an option without changes
                if key and ast.unparse(key) == "'trust_remote_code'" and ast.unparse(value) != "{}":
                    yield "trust_remote_code"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield "allow_pickle"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    module, _, function = name.rpartition(".")
    if function in CALLS and module in ("", "builtins", "pandas", "pd", "yaml"):
        yield name
    if module in LOADERS and function in ("load", "loads", "Unpickler", "full_load"):
        yield name
    if name == "torch.load" and not any(
        keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
        for keyword in node.keywords
    ):
        yield "torch.load without weights_only=True"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_nothing_that_is_read_can_run(folder: Path) -> None:
    files = sorted(folder.rglob("*.py"))
    assert files
    for file in [*files, *(ROOT / "teachonce").glob("*.py")]:
        assert list(dangers(file.read_text("utf-8"))) == [], file


@pytest.mark.parametrize(
    "line",
    [
        "import dill",
        "from pickle import loads",
        "pickle.load(file)",
        "pickle.Unpickler(file).load()",
        "eval(text)",
        "yaml.load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "options['trust_remote_code'] = True",
        "load(**{'trust_remote_code': True})",
        "{'a': {}, 'trust_remote_code': given}",
    ],
)
def test_what_is_looked_for(line: str) -> None:
    assert list(dangers(line))


def test_what_is_no_danger() -> None:
    assert not list(dangers("torch.load(p, weights_only=True); re.compile(x); model.eval()"))
