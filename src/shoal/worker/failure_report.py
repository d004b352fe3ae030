"""How a worker reports an error: one plain sentence with the user's line, and what to change where that is known."""

import re

from shoal.errors import PeerLost, RunError, ShoalError
from shoal.job.cuda_errors import explain_cuda_error
from shoal.job.missing_package import install_command
from shoal.numerics.user_frames import format_line, is_user_file, user_line
from shoal.report import human
from shoal.report.events import WorkerFailed
from shoal.worker.compiled_model import compiler_error
from shoal.worker.memory import is_out_of_memory
from shoal.worker.run import Run

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n    (?P<code>.+)')


def failure_event(error: BaseException, rank: int, run: Run | None, log: str, limit: int | None = None) -> WorkerFailed:
    """`limit`: bytes that the worker may use."""
    if is_out_of_memory(error):
        error = _out_of_memory(error, limit)
    error = compiler_error(error) or error
    step = None if run is None else run.step
    lane = None if run is None else run.strategy.current_lane
    if isinstance(error, ShoalError):
        kind = "PeerLost" if isinstance(error, PeerLost) else type(error).__name__
        message, where, fix, code = error.message, list(error.where), error.fix, error.exit_code
    else:
        kind, fix, code = type(error).__name__, install_command(error), 1
        text = _first_line(error)
        message = f"{kind}: {text}" if text else kind
        line = child_line(str(error)) or user_line(error)
        where = line + list(getattr(error, "__notes__", ()))
        explained = explain_cuda_error(error, "".join(line))
        if explained is not None:
            message, fix = explained
        if run is not None and run.applied_step == step:
            where.append(f"nothing of step {step} was applied")
    return WorkerFailed(
        rank=rank, kind=kind, message=message, exit_code=code, step=step, lane=lane, where=where,
        fix=fix, log=log,
    )  # fmt: skip


def child_line(text: str) -> list[str]:
    """The innermost line of the user's own code in the traceback of a process that the script started (mp.spawn)."""
    if "-- Process " not in text:
        return []
    own = [frame for frame in _FRAME.finditer(text) if is_user_file(frame["file"])]
    if not own:
        return []
    last = own[-1]
    return [format_line(last["file"], int(last["line"]), last["function"], last["code"].strip())]


def _first_line(error: BaseException) -> str:
    """Of an error in a process that the script started, the last line: the first says only which process it was."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("-- Process ") else lines[0]


def _out_of_memory(error: BaseException, memory: int | None) -> RunError:
    has = "the machine has no more" if memory is None else f"it may use {human.size(memory)} (--memory), and no more"
    return RunError(
        f"out of memory: {has}",
        where=[*user_line(error), str(error).split("\n")[0][:200]],
        fix="a layout that gives a worker less to hold (more stages or slices, zero=3), --recompute, more microbatches,"
        " or more memory",
    )
