"""How a run ended: done, stopped or failed; the first cause of a failure; and the error to raise. Pure."""

import shlex
import signal
from collections.abc import Sequence
from typing import Any

from shoal.driver.failure_policy import NO_STARTER
from shoal.errors import MismatchError, ShoalError, Stopped, WorkerError
from shoal.report.aggregate import RunTally, unsaved_reason
from shoal.report.events import WorkerExited, WorkerFailed
from shoal.report.human import plural
from shoal.report.incidents import Incident
from shoal.report.wording import end_text, exit_text, sentence

NO_CHECKPOINT = "no checkpoint was written"
NEEDS_CHECKPOINTS = "--checkpoint 10 saves every 10 steps, from which lost workers are replaced"
LOG_LINES = 3  # of a lost worker's log
LOST_CONNECTIONS = ("Connection closed by peer", "Connection reset by peer")  # what gloo says of a peer that is gone
# Kinds whose message names the place.
SELF_EXPLAINING = ("CheckpointError", "JobError", "MismatchError", "NonFiniteError", "ServerLost")


class RunFailed(WorkerError):
    def __init__(self, message: str, *, report: dict[str, Any], **more: Any) -> None:
        super().__init__(message, **more)
        self.report = report


class RunInterrupted(Stopped):
    def __init__(self, message: str, *, report: dict[str, Any], **more: Any) -> None:
        super().__init__(message, **more)
        self.report = report


def outcome(tally: RunTally, *, size: int, interrupted: bool) -> str:
    """Done if all members finished, even if others were lost. `size`: workers of a script that never joins."""
    finished = tally.finished
    if finished and not tally.unfinished and not tally.open_failures:
        if not any(each.resumable for each in finished.values()):
            return "done"
        return "failed" if any(fault.ends_the_run for fault in tally.incidents) else "stopped"
    if interrupted:
        return "stopped"
    joined = any(worker.fingerprint for worker in tally.ranks)
    if not joined and len(tally.exits) == size and all(each.code == 0 for each in tally.exits):
        return "done"  # a script that never joined
    return "failed"


def first_cause(tally: RunTally) -> WorkerFailed | None:
    """The first cause: a worker's own error, else a death by signal, else a lost peer."""
    failures = sorted(tally.open_failures, key=lambda failure: (_names_a_peer(failure), failure.time))
    if failures and not _names_a_peer(failures[0]):
        return failures[0]
    server = next((fault for fault in tally.incidents if fault.kind == "server-lost" and fault.ends_the_run), None)
    if server is not None:
        return _fatal_server(server, tally)
    fatal = _fatal(tally)
    if fatal is not None:
        return _fatal_loss(fatal, tally)
    silent = [leave for leave in tally.silent_exits if all(each.rank != leave.rank for each in failures)]
    if silent:
        return _silent_death(silent[0], tally.step)
    return failures[0] if failures else None


def _names_a_peer(failure: WorkerFailed) -> bool:
    """Whether a worker failed because another one was gone: by Shoal's own error, or by gloo's."""
    return failure.kind == "PeerLost" or any(words in failure.message for words in LOST_CONNECTIONS)


def _fatal(tally: RunTally) -> Incident | None:
    """The loss that ended the run: the one that the driver marked, else the first that no worker recovered from."""
    lost = [fault for fault in tally.incidents if fault.kind == "lost"]
    ends = [fault for fault in lost if fault.ends_the_run]
    stuck = [fault for fault in lost if fault.seconds is None and not fault.not_member and not fault.with_servers]
    return next(iter(ends or stuck), None)


def _fatal_loss(incident: Incident, tally: RunTally) -> WorkerFailed:
    rank, place = incident.worker or 0, ", ".join(part for part in (incident.host, f"pid {incident.pid}") if part)
    before = sum(each.kind == "lost" for each in tally.incidents) - 1
    where = [f"on {place}" if incident.host else place] if incident.pid is not None else []
    where += [f"noticed: {incident.detected_by}"] if incident.detected_by and incident.code is not None else []
    where += [f"last report after step {tally.step}"] if tally.step else []
    where += [f"lost before it: {plural(before, 'worker')}"] if before else []
    where += [f"its log: {line}" for line in incident.log[-LOG_LINES:]]
    return WorkerFailed(
        time=incident.time,
        rank=rank,
        kind="WorkerLost",
        message="; ".join([end_text(incident), *([incident.action] if incident.ends_the_run else [])]),
        where=where,
        fix=_way_on(incident.action),
    )


def _way_on(action: str) -> str:
    """What to do about a loss that ended the run."""
    if action.endswith(NO_CHECKPOINT):
        return NEEDS_CHECKPOINTS
    if action.endswith(NO_STARTER):
        return "the kernel's log (dmesg) may say what killed that process"
    return "--on-failure replace starts another in its place, --on-failure shrink goes on without it"


def _fatal_server(incident: Incident, tally: RunTally) -> WorkerFailed:
    where = [f"after step {tally.step}"] if tally.step else []
    return WorkerFailed(
        time=incident.time,
        rank=0,
        kind="ServerLost",
        message=sentence(incident, place=True),
        where=where + [f"its log: {line}" for line in incident.log[-LOG_LINES:]],
        fix="shoal report shows what was saved; --resume goes on from there",
    )


def _silent_death(leave: WorkerExited, step: int) -> WorkerFailed:
    return WorkerFailed(
        time=leave.time,
        rank=leave.rank,
        kind="WorkerError",
        message=f"{'the process was ' if (leave.code or 0) < 0 else ''}{exit_text(leave.code, guess=True)}",
        # Workers report steps a few times a second, so the step of the death is not known.
        where=[f"last report after step {step}"] if step else [],
    )


def final_error(tally: RunTally, ended: str, report: dict[str, Any]) -> ShoalError | None:
    """What to raise at the end of a run; None for a good end."""
    if ended == "done":
        return _unequal(tally) or _unsaved(tally, report)
    saved = _saved_steps(tally)
    at = f"checkpoint: step {max(saved)}" if saved else NO_CHECKPOINT
    if ended == "stopped":
        return RunInterrupted(
            f"stopped after step {tally.step}: {report['stopped'] or 'interrupted'}",
            where=at,
            fix=_resume_text(report, saved),
            report=report,
        )
    failure = first_cause(tally)
    if failure is None:
        unknown = "the run ended before it was done"
        return RunFailed(unknown, where=at, fix=_resume_text(report, saved), report=report)
    message, where = failure.message, list(failure.where)
    if failure.kind not in SELF_EXPLAINING:
        place = [_process(failure.rank, tally)]
        place += [] if failure.step is None else [f"step {failure.step}"]
        place += [] if failure.lane is None else [f"lane {failure.lane}"]
        message = f"{', '.join(place)}: {message}"
    if failure.kind not in SELF_EXPLAINING or failure.kind == "NonFiniteError":
        where += [at, f"log: {report['folder']}/{_process(failure.rank, tally).replace(' ', '-')}.log"]
    fix = failure.fix
    if failure.kind == "WorkerLost":
        fix = f"{_resume_text(report, saved)}; {fix}"
    elif fix is None and saved and failure.kind not in SELF_EXPLAINING:
        fix = f"mend it, then go on with --resume {shlex.quote(report['folder'])}"
        if report["command"] == "train":
            fix += " (and --accept loss, or model, if that is what you mend)"
    found = RunFailed(message, where=where, fix=fix, report=report)
    found.exit_code = failure.exit_code
    return found


def script_stopped(number: int, report: dict[str, Any]) -> RunInterrupted:
    """The end of a script that never joined, by a signal to its driver. The exit code is a shell's for that signal: 3
    would promise that the run can be resumed."""
    name = signal.Signals(number).name
    found = RunInterrupted(
        f"{name}: the script's workers were ended",
        where="the script never joined (shoal.join), so Shoal saved nothing and there is nothing to resume",
        report=report,
    )
    found.exit_code = 128 + number
    return found


def _process(rank: int, tally: RunTally) -> str:
    """The name of a process. Servers are numbered after the workers."""
    workers = tally.started.workers if tally.started is not None and tally.started.servers else rank + 1
    return f"worker {rank}" if rank < workers else f"server {rank - workers}"


def _unequal(tally: RunTally) -> ShoalError | None:
    members = tally.membership.members
    found = [each.weights_sha256 for rank, each in tally.finished.items() if rank in members or not members]
    hashes = {digest for digest in found if digest}  # where workers are not in step, only one reports a digest
    if len(hashes) < 2:
        return None
    return MismatchError(f"workers ended with different weights: {', '.join(sorted(hashes))}")


def _unsaved(tally: RunTally, report: dict[str, Any]) -> ShoalError | None:
    """An error where a run ended well but its last weights were not saved."""
    lost = unsaved_reason(tally)
    if not lost:
        return None
    reason, *where = (line.strip() for line in lost.split("\n"))
    return RunFailed(f"trained to step {tally.step}, but not saved: {reason}", where=where, report=report)


def _saved_steps(tally: RunTally) -> list[int]:
    return [event.step for event in (*tally.saved, tally.resumed) if event is not None and event.path]


def _resume_text(report: dict[str, Any], saved: Sequence[int]) -> str:
    resume = f"--resume {shlex.quote(report['folder'])}"
    return f"go on with {resume}" if saved else f"{resume} begins again, from the fresh model"
