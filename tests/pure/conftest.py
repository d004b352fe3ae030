"""What starts no process: `make quick` runs it. A test here that starts one fails."""

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
HERE = os.getpid()

at_work: list[str] = []  # the test, if it is one of this folder


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if at_work and event in STARTS and os.getpid() == HERE and not _lists_fonts(event, arguments):
        pytest.fail(f"{at_work[0]} starts a process ({event}): it belongs into another folder than tests/pure")


def _lists_fonts(event: str, arguments: tuple[Any, ...]) -> bool:
    """What matplotlib starts when it is used for the first time on a machine."""
    return event == "subprocess.Popen" and "fc-list" in list(arguments[1])[:1]


sys.addaudithook(refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.path.parent == Path(__file__).parent:  # pytest calls this for the tests of every folder
        at_work.append(item.name)
    try:
        return (yield)
    finally:
        at_work.clear()
