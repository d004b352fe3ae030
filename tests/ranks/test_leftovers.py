"""The watch that every test stands under: whatever a block leaves behind is named, and nothing else is."""

import os
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from helpers.command import forked
from shoal.testing.leftovers import end_detached, leftovers

watch = import_module("shoal.testing.leftovers")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is told without waiting for its end."""
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.0)


def test_nothing_is_left_of_what_has_ended() -> None:
    with leftovers() as left, socket.create_server(("127.0.0.1", 0)):
        os.waitpid(forked(lambda: None), 0)
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    assert left == []


@pytest.mark.usefixtures("at_once")
def test_processes_that_run_or_were_not_waited_for() -> None:
    with leftovers() as left:
        running, ended = forked(signal.pause), forked(lambda: None)
        os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
    os.kill(running, signal.SIGKILL)
    for pid in (running, ended):
        os.waitpid(pid, 0)
    assert len(left) == 2
    assert any(text.startswith(f"process {running} (") and text.endswith(" still runs") for text in left)
    assert any(text.startswith(f"process {ended} (") and "its parent did not wait for it" in text for text in left)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("program", [True, False], ids=["a program", "a fork"])
def test_a_process_that_left_its_parent_and_its_session(program: bool) -> None:
    def away() -> None:
        os.setsid()
        if program:
            child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]).pid
        else:
            child = forked(signal.pause)
        Path("child").write_text(f"{child}")

    with leftovers() as left:
        os.waitpid(forked(away), 0)
        child = int(Path("child").read_text())
    os.kill(child, signal.SIGKILL)
    assert len(left) == 1 and left[0].startswith(f"process {child} (")


def test_what_is_detached_can_be_ended() -> None:
    with leftovers() as left:
        os.waitpid(forked(lambda: forked(signal.pause)), 0)
        end_detached()
    assert left == []
