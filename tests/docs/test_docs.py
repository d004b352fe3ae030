"""The README and the docs are run: each Python block that names its file is saved, each console line is executed,
in a fork: it need not import torch again."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.command import Forked, Result, as_python
from helpers.places import ROOT
from shoal.cli.main import main

PAGES = [
    "README.md",
    "docs/tutorial.md",
    "docs/howto.md",
    "docs/collectives.md",
    "docs/gpt.md",
    "docs/estimate.md",
    "docs/simulate.md",
    "docs/servers.md",
]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_EXAMPLES = re.compile(r"\$ (python|shoal estimate) examples/\w+\.py")  # on each page the same, and leaves nothing
MADE_ELSEWHERE = ("make ", "pip ", "git ")  # the test suite itself runs under `make test`


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Lines that need not be executed for another page."""
    return set()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(180)
def test_what_a_page_shows_works(page: str, tmp_path: Path, seen: set[str]) -> None:
    if not (ROOT / "examples").exists():
        pytest.skip("not in a checkout")
    os.symlink(ROOT / "examples", tmp_path / "examples")
    ran = 0
    for kind, text in BLOCK.findall((ROOT / page).read_text()):
        named = re.match(r"# (\S+\.py)\n", text)
        if kind == "python":
            compile(text, page, "exec")
            if named:
                (tmp_path / named[1]).write_text(text)
            continue
        for line in text.splitlines():
            if line.startswith("$ ") and not line[2:].startswith(MADE_ELSEWHERE):
                ran += 1
                if line not in seen:
                    execute(line[2:], tmp_path)
                if OF_EXAMPLES.fullmatch(line):
                    seen.add(line)
    assert ran > 0


def execute(line: str, folder: Path) -> None:
    text, _, remark = line.partition("#")
    expected = re.search(r"exits with (\d)", remark)
    words = shlex.split(text)
    program, *arguments = words
    if program == "shoal":
        result = forked(lambda: main(arguments), folder)
    else:
        assert program == "python"
        result = forked(lambda: as_python(*arguments), folder)
    assert result.code == (int(expected[1]) if expected else 0), f"$ {line}\n{result.out}\n{result.err}"


def forked(does: Callable[[], int], folder: Path) -> Result:
    def call() -> int:
        os.chdir(folder)
        os.environ["SHOAL_PREDICT"] = "on"  # as a reader has it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return does()

    with Forked(call=call) as child:
        return child.end()
