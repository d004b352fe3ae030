"""The walks of docs/architecture.md lead through files, classes and functions that exist."""

import ast
import re
from pathlib import Path

import shoal
from helpers.places import ROOT

SOURCE = Path(shoal.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def definitions() -> dict[str, set[str]]:
    """By file: its functions and classes, and "Class.method" for methods."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        names = found.setdefault(str(path.relative_to(SOURCE)), set())
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
                names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


DEFINED = definitions()
EVERYWHERE = set().union(*DEFINED.values())


def test_the_page_is_read() -> None:
    assert len(re.findall(r"\b[a-z_]+/[a-z_/]+\.py", PAGE)) > 40


def test_every_file_exists() -> None:
    named = {name.removeprefix("tests/") for name in re.findall(r"(?<![\w/])[a-z_]+(?:/[a-z_]+)+\.py", PAGE)}
    missing = {name for name in named if name not in DEFINED and not (ROOT / "tests" / name).exists()}
    assert missing == set()


def test_a_function_beside_a_file_is_in_it() -> None:
    """In the walks: `path.py  name ─► Class.method, name`."""
    wrong = []
    for block in re.findall(r"```\n(.*?)```", PAGE, flags=re.S):
        for path, rest in re.findall(r"([a-z_/]+/[a-z_]+\.py)((?:  +| ─► |, |\w|\.|│| )*)", block):
            words = re.match(r"(?:\s|─►|│|,)*((?:[\w.]+(?:\s*(?:─►|,|│)\s*)?)+)", rest)
            for name in re.split(r"\s*(?:─►|,|│)\s*|\s{2,}", words[1].strip() if words else ""):
                known = name == "train" or re.fullmatch(r"[A-Z]\w*(?:\.\w+)?|[a-z]+_\w+", name)
                if known:
                    wrong += [] if name in DEFINED[path] else [f"{path}: {name}"]
    assert wrong == []


def test_every_class_and_function_in_backquotes_exists() -> None:
    names = set(re.findall(r"`([A-Z][A-Za-z]+(?:\.\w+)?|[a-z_]+_[a-z_]+)`", PAGE))
    unknown = {name for name in names if name not in EVERYWHERE}
    assert len(names) > 25
    assert unknown == set()
