"""Faults in words: for the lines of a view, for the closing report and for errors. Pure."""

import signal
import time
from collections.abc import Iterator

from shoal.report import human
from shoal.report.incidents import Fault


def exit_text(code: int | None, *, guess: bool = False) -> str:
    """How a process ended, by its exit code; `guess`: with what is often behind it, if nobody has looked."""
    if code is None:
        return "ended, nobody knows how"
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed ({name}{': often out of memory' if guess and name == 'SIGKILL' else ''})"


def how(fault: Fault) -> str:
    """Its end: by signal or code if it is known, else how it was noticed."""
    if fault.out_of_memory:
        return "killed (SIGKILL: out of memory)"
    if fault.unresponsive:
        return fault.unresponsive
    if fault.code is None:
        return f"lost ({fault.noticed})" if fault.noticed else "lost"
    return exit_text(fault.code)


def sentence(fault: Fault, *, place: bool = False) -> str:
    """What happened and what the others did, as far as it is known; with host and process if `place` is asked for."""
    return "; ".join(parts_of(fault, place=place))


def outcome(fault: Fault) -> str | None:
    """What became of its place."""
    if fault.back_step is None or fault.back_seconds is None:
        return None
    by = "came back" if fault.next_life == fault.life else f"life {fault.next_life}"
    return f"{by} took part again from step {fault.back_step + 1:,}, after {human.duration(fault.back_seconds)}"


def whole(fault: Fault) -> str:
    """The story in one line, for the closing report."""
    parts = [sentence(fault, place=True)]
    if fault.kind in ("lost", "left"):
        parts += [outcome(fault) or ("" if fault.next_life is None else f"life {fault.next_life} never took part")]
    return "; ".join(part for part in parts if part)


def stamp(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def parts_of(fault: Fault, *, place: bool) -> Iterator[str]:
    match fault.kind:
        case "lost":
            yield f"{_who(fault, place=place)} {how(fault)}{' before it took part' if fault.outside else ''}"
            if place and fault.code is not None and fault.noticed and not fault.unresponsive:
                yield f"noticed: {fault.noticed}"
            yield from _aftermath(fault)
        case "left":
            yield f"{_who(fault, place=place)} left after step {fault.step or 0:,}: {fault.reason}"
            if not fault.redone:
                yield "nothing is done again"
            yield from _aftermath(fault)
        case "joined":
            at = "" if fault.step is None else f" at step {fault.step:,}"
            came = "is on its way" if fault.epoch is None and not fault.free else "joined"
            yield f"{_who(fault, place=place)} {came}{at}: {fault.reason}"
            if not fault.free:
                yield from _commit(fault)
        case "regrouped":
            yield fault.reason
            yield from _aftermath(fault)
        case "back":
            if fault.reason:
                yield fault.reason
            if fault.step is not None:
                yield f"on from the checkpoint of step {fault.step:,}"
                yield f"{human.plural(fault.repeated, 'step')} done again"
        case "relaid":
            yield fault.reason
        case "store":
            yield f"store {fault.reason} cannot be reached: training goes on, changes of membership wait"
            if fault.seconds is not None:
                yield f"back after {human.duration(fault.seconds)}"
        case "server":
            at = f" (pid {fault.pid})" if place and fault.pid is not None else ""
            yield f"server {fault.shard}{at} {exit_text(fault.code)}"
            yield from _server(fault)
        case "away":
            yield f"{_waiting(fault)} server {fault.shard} at {fault.reason} since {stamp(fault.time)}"
            if fault.seconds is not None:
                yield f"reached again after {human.duration(fault.seconds)}"
        case "driver":
            yield f"process {fault.pid} on {fault.host} watches over the run now"


def _who(fault: Fault, *, place: bool) -> str:
    notes = [] if fault.life == 0 else [f"life {fault.life}"]
    if place:
        notes += [fault.host] if fault.host else []
        notes += [f"pid {fault.pid}"] if fault.pid is not None else []
    return f"worker {fault.worker} ({', '.join(notes)})" if notes else f"worker {fault.worker}"


def _server(fault: Fault) -> Iterator[str]:
    if fault.seconds is None:
        if fault.action:
            yield fault.action
        if fault.members and not fault.ends_the_run:
            yield f"{_waiting(fault)} it at {fault.reason}"
        return
    having = "" if fault.version is None else f" with {human.plural(fault.version, 'update')}"
    yield f"back after {human.duration(fault.seconds)}{having}"
    if fault.repeated:
        again = human.plural(fault.repeated, "step")
        yield f"all servers went on from step {fault.step or 0:,}, {again} done again"
    if fault.pushes_lost:
        yield f"{human.plural(fault.pushes_lost, 'acknowledged update')} lost with it, since its snapshot was older"


def _waiting(fault: Fault) -> str:
    workers = " ".join(map(str, fault.members))
    if fault.seconds is not None:
        return f"worker{'s' if len(fault.members) > 1 else ''} {workers} waited for"
    return f"worker {workers} waits for" if len(fault.members) == 1 else f"workers {workers} wait for"


def _aftermath(fault: Fault) -> Iterator[str]:
    if fault.outside:
        return
    if fault.epoch is None or fault.ends_the_run:
        if fault.action:
            yield fault.action
        if fault.free:
            yield from _commit(fault)
        return
    members = " ".join(str(worker) for worker in fault.members)
    if fault.redone:
        yield f"step {(fault.step or 0) + 1:,} done again by {members}"
    elif members:
        yield f"{members} go{'es' if len(fault.members) == 1 else ''} on"
    yield from _commit(fault)


def _commit(fault: Fault) -> Iterator[str]:
    if fault.seconds is not None:
        yield f"next commit after {human.duration(fault.seconds)}"
