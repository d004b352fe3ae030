"""Faults in words: for the lines of a view, for the closing report and for errors. Pure."""

import signal
import time
from collections.abc import Iterator

from shoal.report import human
from shoal.report.incidents import Incident


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


def end_text(incident: Incident) -> str:
    """Its end: by signal or code if it is known, else how it was noticed."""
    if incident.out_of_memory:
        return "killed (SIGKILL: out of memory)"
    if incident.unresponsive:
        return incident.unresponsive
    if incident.code is None:
        return f"lost ({incident.detected_by})" if incident.detected_by else "lost"
    return exit_text(incident.code)


def sentence(incident: Incident, *, place: bool = False) -> str:
    """What happened and what the others did, as far as it is known; with host and process if `place` is asked for."""
    return "; ".join(sentence_parts(incident, place=place))


def replacement_text(incident: Incident) -> str | None:
    """What became of its place."""
    if incident.rejoin_step is None or incident.rejoin_seconds is None:
        return None
    by = "came back" if incident.next_incarnation == incident.incarnation else f"life {incident.next_incarnation}"
    return (
        f"{by} took part again from step {incident.rejoin_step + 1:,}, after {human.duration(incident.rejoin_seconds)}"
    )


def full_text(incident: Incident) -> str:
    """The story in one line, for the closing report."""
    parts = [sentence(incident, place=True)]
    if incident.kind in ("lost", "left"):
        parts += [
            replacement_text(incident)
            or ("" if incident.next_incarnation is None else f"life {incident.next_incarnation} never took part")
        ]
    return "; ".join(part for part in parts if part)


def stamp(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def sentence_parts(incident: Incident, *, place: bool) -> Iterator[str]:
    match incident.kind:
        case "lost":
            early = " before it took part" if incident.not_member else ""
            yield f"{_who(incident, place=place)} {end_text(incident)}{early}"
            if place and incident.code is not None and incident.detected_by and not incident.unresponsive:
                yield f"noticed: {incident.detected_by}"
            yield from _aftermath(incident)
        case "left":
            yield f"{_who(incident, place=place)} left after step {incident.step or 0:,}: {incident.reason}"
            if not incident.redone:
                yield "nothing is done again"
            yield from _aftermath(incident)
        case "joined":
            at = "" if incident.step is None else f" at step {incident.step:,}"
            came = "is on its way" if incident.generation is None and not incident.with_servers else "joined"
            yield f"{_who(incident, place=place)} {came}{at}: {incident.reason}"
            if not incident.with_servers:
                yield from _commit(incident)
        case "regrouped":
            yield incident.reason
            yield from _aftermath(incident)
        case "back":
            if incident.reason:
                yield incident.reason
            if incident.step is not None:
                yield f"on from the checkpoint of step {incident.step:,}"
                yield f"{human.plural(incident.repeated, 'step')} done again"
        case "relaid":
            yield incident.reason
        case "store":
            yield f"store {incident.reason} cannot be reached: training goes on, changes of membership wait"
            if incident.seconds is not None:
                yield f"back after {human.duration(incident.seconds)}"
        case "server":
            at = f" (pid {incident.pid})" if place and incident.pid is not None else ""
            yield f"server {incident.shard}{at} {exit_text(incident.code)}"
            yield from _server(incident)
        case "away":
            yield f"{_waiting(incident)} server {incident.shard} at {incident.reason} since {stamp(incident.time)}"
            if incident.seconds is not None:
                yield f"reached again after {human.duration(incident.seconds)}"
        case "driver":
            yield f"process {incident.pid} on {incident.host} watches over the run now"


def _who(incident: Incident, *, place: bool) -> str:
    notes = [] if incident.incarnation == 0 else [f"life {incident.incarnation}"]
    if place:
        notes += [incident.host] if incident.host else []
        notes += [f"pid {incident.pid}"] if incident.pid is not None else []
    return f"worker {incident.worker} ({', '.join(notes)})" if notes else f"worker {incident.worker}"


def _server(incident: Incident) -> Iterator[str]:
    if incident.seconds is None:
        if incident.action:
            yield incident.action
        if incident.members and not incident.ends_the_run:
            yield f"{_waiting(incident)} it at {incident.reason}"
        return
    having = "" if incident.version is None else f" with {human.plural(incident.version, 'update')}"
    yield f"back after {human.duration(incident.seconds)}{having}"
    if incident.repeated:
        again = human.plural(incident.repeated, "step")
        yield f"all servers went on from step {incident.step or 0:,}, {again} done again"
    if incident.pushes_lost:
        yield f"{human.plural(incident.pushes_lost, 'acknowledged update')} lost with it, since its snapshot was older"


def _waiting(incident: Incident) -> str:
    workers = " ".join(map(str, incident.members))
    if incident.seconds is not None:
        return f"worker{'s' if len(incident.members) > 1 else ''} {workers} waited for"
    return f"worker {workers} waits for" if len(incident.members) == 1 else f"workers {workers} wait for"


def _aftermath(incident: Incident) -> Iterator[str]:
    if incident.not_member:
        return
    if incident.generation is None or incident.ends_the_run:
        if incident.action:
            yield incident.action
        if incident.with_servers:
            yield from _commit(incident)
        return
    members = " ".join(str(worker) for worker in incident.members)
    if incident.redone:
        yield f"step {(incident.step or 0) + 1:,} done again by {members}"
    elif members:
        yield f"{members} go{'es' if len(incident.members) == 1 else ''} on"
    yield from _commit(incident)


def _commit(incident: Incident) -> Iterator[str]:
    if incident.seconds is not None:
        yield f"next commit after {human.duration(incident.seconds)}"
