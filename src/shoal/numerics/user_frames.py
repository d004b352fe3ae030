"""Where in the user's own code a thread or an exception is: neither in Shoal nor in a library."""

import linecache
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[1])
MOST_FRAMES = 12


def is_own(filename: str) -> bool:
    """Whether a file belongs to the user."""
    return not (
        filename.startswith((OURS, "<frozen", "<string", sys.base_prefix + "/lib/python"))
        or "site-packages" in filename
    )


def line_of(filename: str, number: int | None, function: str, text: str | None) -> str:
    return f"{Path(filename).name}:{number}  in {function}:  {text or ''}".rstrip()


def own_line(error: BaseException) -> list[str]:
    """The innermost line of the user's own code that an exception passed through."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return [line_of(own[-1].filename, own[-1].lineno, own[-1].name, own[-1].line)] if own else []


def own_frames(thread: int) -> tuple[str, list[str]]:
    """The line of the user's code that a thread is at, and its stack, innermost first."""
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else _outwards(frame)
    lines = [line_of(each.f_code.co_filename, each.f_lineno, each.f_code.co_name, _text(each)) for each in frames]
    own = [line for each, line in zip(frames, lines, strict=True) if is_own(each.f_code.co_filename)]
    return own[0] if own else "", lines[:MOST_FRAMES]


def _outwards(frame: FrameType) -> Sequence[FrameType]:
    """Up to where the worker began: a forked one has the driver's stack below its own."""
    found: list[FrameType] = []
    here: FrameType | None = frame
    while here is not None and here.f_code.co_name != "_become_worker":
        found.append(here)
        here = here.f_back
    return found


def _text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
