"""Imports point one way, a class name stands for one class, and nothing runs code that arrived as data."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent

# A room, and the rooms that it may import. `docs/architecture.md` has their charters.
LEAVES = {"errors", "numerics"}
WIRE = LEAVES | {"transport"}
TENSORS = WIRE | {"collectives", "paramserver"}
WORKER = TENSORS | {"job", "parallel", "recovery", "report"}
DRIVER = WORKER | {"worker", "planner"}
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "numerics": {"errors"},
    "transport": LEAVES,
    "job": LEAVES,
    "collectives": WIRE,
    "paramserver": WIRE | {"collectives"},
    "parallel": TENSORS,
    "recovery": WIRE,
    "report": WIRE | {"recovery"},
    "worker": WORKER,
    "planner": WORKER | {"worker"},
    "driver": DRIVER,
    "testing": DRIVER | {"driver"},
    "cli": DRIVER | {"driver", "__init__"},
    "__init__": DRIVER | {"driver"},
    "__main__": {"cli"},
}
ROOMS = {room: below | {room} for room, below in BELOW.items()}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of everything that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_rooms(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(ast.parse(path.read_text()))]
    return {name[1] if name[1] in ROOMS else "__init__" for name in names if name[0] == "shoal" and len(name) > 1} | {
        "__init__" for name in names if name == ["shoal"]
    }


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_what_lies_below_it(name: str) -> None:
    found = {str(path.relative_to(SOURCE)): imported_rooms(path) for path in files() if room(path) == name}
    assert found, f"there is no room {name}"
    assert {file: sorted(rooms - ROOMS[name]) for file, rooms in found.items() if rooms - ROOMS[name]} == {}


def test_every_file_is_in_a_listed_room() -> None:
    assert {room(path) for path in files()} == set(ROOMS), "a new room says in BELOW what it may import"


def test_only_three_files_are_at_the_top_level() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_only_the_command_line_reads_arguments() -> None:
    users = {room(path) for path in files() if "argparse" in set(imported(ast.parse(path.read_text())))}
    assert users <= {
        "cli",
        "testing",
        "recovery",
    }  # the simulation, and the process of the store, are commands of their own


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(["shoal", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def test_there_are_no_import_cycles() -> None:
    """Among all modules: imports inside functions and for type checkers count, too."""
    modules = {module_of(path): path for path in files()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = set(imported(ast.parse(path.read_text())))
        named = {name if name in modules else name.rpartition(".")[0] for name in found}
        graph[module] = (named & set(modules)) - {module}
    while leaves := [module for module, others in graph.items() if not others]:
        for leaf in leaves:
            del graph[leaf]
        for others in graph.values():
            others.difference_update(leaves)
    assert sorted(graph) == []


def test_a_class_name_stands_for_one_class() -> None:
    found: dict[str, list[str]] = {}
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_public_names_exist() -> None:
    assert [name for name in shoal.__all__ if not hasattr(shoal, name)] == []
    assert len(set(shoal.__all__)) == len(shoal.__all__)


def dangerous(tree: ast.AST) -> Iterator[str]:
    for name in imported(tree):
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save", "os.system"):
            yield ast.unparse(node)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield node.func.id
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value):
                    yield "shell=True"
                if keyword.arg == "allow_pickle" or (keyword.arg == "weights_only"):
                    yield keyword.arg


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
    ],
)
def test_the_watch_for_dangerous_code_sees_it(code: str) -> None:
    assert list(dangerous(ast.parse(code)))


def test_nothing_in_the_package_runs_code_that_arrived_as_data() -> None:
    found = {str(path.relative_to(SOURCE)): list(dangerous(ast.parse(path.read_text()))) for path in files()}
    assert {file: names for file, names in found.items() if names} == {}
