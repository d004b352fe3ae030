"""The stack of a process that executes any script, from outside: without a thread in it, also where it is stuck in C.

The process registers a signal with `faulthandler`, which writes to a file in memory. Whoever asks sends the signal and
reads that file under /proc.
"""

import faulthandler
import fcntl
import linecache
import os
import re
import signal
import time
from contextlib import suppress

from shoal.numerics.user_frames import MAX_FRAMES, format_line, is_user_file

STACK_SIGNAL = signal.SIGRTMAX - 3  # one that scripts hardly use
POLL_SECONDS = 0.01
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(Current thread|Thread) 0x")
_BASE = "run_script"  # the frame of this package below which the script's own frames begin


def offer_stack() -> int:
    """Answers STACK_SIGNAL from now on. Returns the descriptor of the file; -1: this system has none."""
    with suppress(OSError, AttributeError, ValueError, RuntimeError):
        descriptor = os.memfd_create("shoal-stack")
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND | fcntl.fcntl(descriptor, fcntl.F_GETFL))
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
        return descriptor
    return -1


def ask_stack(pid: int, descriptor: int, seconds: float) -> tuple[str, list[str]]:
    """The user's line at which the script in that process is, and its stack, innermost first; empty where it does not
    answer in time."""
    text = ""
    with suppress(OSError), open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
        file.truncate(0)
        os.kill(pid, STACK_SIGNAL)
        deadline, size = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            before, size = size, os.fstat(file.fileno()).st_size
            if size and size == before:  # it is written in many small pieces
                break
        file.seek(0)
        text = file.read().decode(errors="replace")
    return script_stack(text)


def script_stack(text: str) -> tuple[str, list[str]]:
    """The user's line and the stack of the thread that executes the script, from what `faulthandler` writes of all."""
    threads: list[list[re.Match[str]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.fullmatch(line)):
            threads[-1].append(frame)
    found = [frames for frames in threads if any(frame["function"] == _BASE for frame in frames)] or threads[-1:]
    frames = found[0] if found else []
    names = [frame["function"] for frame in frames]
    frames = [each for each in frames[: names.index(_BASE) if _BASE in names else None] if _is_shown(each["file"])]
    own = next((frame for frame in frames if is_user_file(frame["file"])), None)
    return "" if own is None else _line(own), [_line(frame) for frame in frames[:MAX_FRAMES]]


def _is_shown(filename: str) -> bool:
    return not filename.startswith("<frozen importlib")


def _line(frame: re.Match[str]) -> str:
    number = int(frame["line"])
    return format_line(frame["file"], number, frame["function"], linecache.getline(frame["file"], number).strip())
