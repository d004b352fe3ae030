"""What a Python file is, read from its source: a job, a loop that joins, another script. Nothing of it is executed.

A job is found by executing its file. A file with a loop of its own would train while it is looked at, so commands that
want a job ask here first.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FileKind = Literal["job", "joins", "script", "unknown"]

LOOP_CALLS = ("backward", "init_process_group", "Trainer", "Accelerator")  # of scripts that train by themselves
MOST_FILES = 100  # that are read for one answer


@dataclass(frozen=True, kw_only=True)
class SourceSigns:
    """What one file refers to."""

    job: bool = False  # shoal.Job
    joins: bool = False  # it calls shoal.join
    trains: bool = False  # it calls what a loop of its own calls


def file_kind(path: Path) -> FileKind:
    """What to do with a file: load its job, run its loop, or (unknown) load it and see. Modules beside the file count
    where the file itself shows nothing: they may hold the job, or the loop."""
    own, *others = list(_signs_of(path))
    if own.job:
        return "job"
    if own.joins:
        return "joins"
    if any(each.job for each in others):
        return "job" if not own.trains else "unknown"
    if any(each.joins for each in others):
        return "joins"
    return "script" if own.trains or any(each.trains for each in others) else "unknown"


def has_own_loop(path: Path) -> bool:
    """Whether a file calls `shoal.join` and has no job."""
    return file_kind(path) == "joins"


def _signs_of(path: Path) -> Iterator[SourceSigns]:
    """The signs of the file, then those of the modules beside it that it imports, each once."""
    waiting, seen = [path], {path.resolve()}
    while waiting and len(seen) <= MOST_FILES:
        current = waiting.pop(0)
        try:
            tree = ast.parse(current.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):  # the one who loads it says what is wrong
            yield SourceSigns()
            continue
        yield _signs(tree)
        for module in _imported(tree):
            for beside in _files_of(path.parent, module):
                if beside.resolve() not in seen:
                    seen.add(beside.resolve())
                    waiting.append(beside)


def _signs(tree: ast.Module) -> SourceSigns:
    nodes = list(ast.walk(tree))
    modules, joins = _names_of_shoal(nodes)
    names = [each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names]
    names += [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return SourceSigns(
        job="Job" in names,
        joins=any(_is_join(call, modules, joins) for call in calls),
        trains=any(_last_name(call) in LOOP_CALLS for call in calls),
    )


def _names_of_shoal(nodes: list[ast.AST]) -> tuple[set[str], set[str]]:
    """The names that a file has for the package, and those that it has for `shoal.join`."""
    modules, joins = {"shoal"}, set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {each.asname for each in node.names if each.name == "shoal" and each.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shoal":
            joins |= {each.asname or "join" for each in node.names if each.name in ("join", "*")}
    return modules, joins


def _is_join(call: ast.expr, modules: set[str], joins: set[str]) -> bool:
    if isinstance(call, ast.Name):
        return call.id in joins
    return isinstance(call, ast.Attribute) and call.attr == "join" and _last_name(call.value) in modules


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{each.name}".strip(".") for each in node.names)


def _files_of(folder: Path, module: str) -> Iterator[Path]:
    """The file of a module, if it lies in this folder or below."""
    if not module:
        return
    stem = folder.joinpath(*module.split("."))
    for file in (stem.with_suffix(".py"), stem / "__init__.py"):
        if file.is_file():
            yield file
