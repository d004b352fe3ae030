"""Finds the line of the user's own code, outside Shoal and libraries, at which a thread or an exception is."""

import linecache
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

PACKAGE_ROOT = str(Path(__file__).parents[1])
MAX_FRAMES = 12


def is_user_file(filename: str) -> bool:
    library = (PACKAGE_ROOT, "<frozen", "<string", sys.base_prefix + "/lib/python")
    return not filename.startswith(library) and "site-packages" not in filename


def format_line(filename: str, number: int | None, function: str, text: str | None) -> str:
    return f"{Path(filename).name}:{number}  in {function}:  {text or ''}".rstrip()


def user_line(error: BaseException) -> list[str]:
    """The innermost line of the user's own code that an exception passed through."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return [format_line(own[-1].filename, own[-1].lineno, own[-1].name, own[-1].line)] if own else []


def user_stack(thread: int) -> tuple[str, list[str]]:
    """The line of the user's code at which a thread is, and its stack, innermost first."""
    frame = sys._current_frames().get(thread)
    frames = [] if frame is None else _outwards(frame)
    lines = [format_line(each.f_code.co_filename, each.f_lineno, each.f_code.co_name, _text(each)) for each in frames]
    own = [line for each, line in zip(frames, lines, strict=True) if is_user_file(each.f_code.co_filename)]
    return own[0] if own else "", lines[:MAX_FRAMES]


def _outwards(frame: FrameType) -> Sequence[FrameType]:
    """The frames of the worker, innermost first: a forked process has the driver's stack below its own."""
    found: list[FrameType] = []
    here: FrameType | None = frame
    while here is not None and here.f_code.co_name != "_become_worker":
        found.append(here)
        here = here.f_back
    return found


def _text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
