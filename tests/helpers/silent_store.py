"""A run's store that runs and does not answer from a moment that a test declares: its loop hangs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.recovery.membership import sqlite_process
from shoal.recovery.membership.sqlite_messages import read_server_info

# The server itself, but for its loop: it looks for a file with the number of its own process.
PROGRAM = """\
import os
import runpy
import selectors
import time

usual = selectors.DefaultSelector.select


def select(self, timeout=None):
    found = usual(self, timeout)
    while os.path.exists(os.path.join({marks!r}, str(os.getpid()))):
        time.sleep(0.01)
    return found


selectors.DefaultSelector.select = select
runpy.run_path({server!r}, run_name="__main__")
"""


def store_that_may_hang(marks: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """Stores that are started from here on hang when the returned function is called with their run's folder; it
    returns the process. One that is started after that answers."""
    marks.mkdir()
    program = marks / "store.py"
    program.write_text(PROGRAM.format(marks=str(marks), server=sqlite_process.__file__))
    monkeypatch.setattr(sqlite_process, "__file__", str(program))

    def hang(folder: Path) -> int:
        serving = read_server_info(folder)
        assert serving is not None
        (marks / str(serving.pid)).touch()
        return serving.pid

    return hang
