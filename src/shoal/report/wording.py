"""Incidents in words, for the live view, the closing report and errors. Pure."""

import signal
import time
from collections.abc import Iterator

from shoal.report import human
from shoal.report.events import DriverChanged, ProcessPaused
from shoal.report.incidents import Incident


def exit_text(code: int | None, *, guess: bool = False) -> str:
    """How a process ended, by its exit code; `guess` adds the usual cause of SIGKILL."""
    if code is None:
        return "ended, exit code unknown"
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed ({name}{': often out of memory' if guess and name == 'SIGKILL' else ''})"


def end_text(incident: Incident) -> str:
    """How a worker ended: by signal or exit code if known, else how its loss was detected."""
    if incident.out_of_memory:
        return "killed (SIGKILL: out of memory)"
    if incident.unresponsive:
        return incident.unresponsive
    if incident.code is None:
        return f"lost ({incident.detected_by})" if incident.detected_by else "lost"
    return exit_text(incident.code)


def sentence(incident: Incident, *, place: bool = False) -> str:
    """The incident and how the run went on, as far as known; `place` adds host and process."""
    return "; ".join(sentence_parts(incident, place=place))


def replacement_text(incident: Incident) -> str | None:
    """When the worker's replacement joined; None: not yet."""
    if incident.rejoin_step is None or incident.rejoin_seconds is None:
        return None
    same = incident.next_incarnation == incident.incarnation
    joins = "the same process joins again" if same else f"incarnation {incident.next_incarnation} joins"
    return f"{joins} at step {incident.rejoin_step + 1:,}, after {human.duration(incident.rejoin_seconds)}"


def full_text(incident: Incident) -> str:
    """The incident in one line, for the closing report."""
    text = sentence(incident, place=True)
    if incident.kind not in ("lost", "left") or incident.next_incarnation is None:
        return text
    return f"{text}; {replacement_text(incident) or f'incarnation {incident.next_incarnation} never joined'}"


def paused_text(event: ProcessPaused) -> str:
    """A process of the run is stopped, or goes on."""
    which = "the process that starts workers" if event.rank is None else f"worker {event.rank}"
    if event.seconds is not None:
        return f"{which} (pid {event.pid}) goes on, after {human.duration(event.seconds)}"
    costs = "no worker can be started until it goes on" if event.rank is None else "the run waits for it"
    way_on = f"kill -CONT {event.pid} continues it"
    return f"{which} (pid {event.pid}) is stopped, by SIGSTOP or a debugger: {costs}; {way_on}"


def stamp(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def sentence_parts(incident: Incident, *, place: bool) -> Iterator[str]:
    match incident.kind:
        case "lost":
            early = " before it joined" if incident.not_member else ""
            yield f"{_worker_text(incident, place=place)} {end_text(incident)}{early}"
            if place and incident.code is not None and incident.detected_by and not incident.unresponsive:
                yield f"detected: {incident.detected_by}"
            yield from _recovery(incident)
        case "left":
            yield f"{_worker_text(incident, place=place)} left after step {incident.step or 0:,}: {incident.reason}"
            if not incident.redone:
                yield "no step is redone"
            yield from _recovery(incident)
        case "joined":
            at = "" if incident.step is None else f" at step {incident.step:,}"
            state = "is starting" if incident.generation is None and not incident.with_servers else "joined"
            yield f"{_worker_text(incident, place=place)} {state}{at}: {incident.reason}"
            if not incident.with_servers:
                yield from _commit(incident)
        case "regrouped":
            yield incident.reason
            yield from _recovery(incident)
        case "rolled-back":
            if incident.reason:
                yield incident.reason
            if incident.step is not None:
                fresh, checkpoint = "begins again from the fresh model", f"the checkpoint of step {incident.step:,}"
                yield f"the run {f'continues from {checkpoint}' if incident.step else fresh}"
                yield f"{human.plural(incident.repeated, 'step')} repeated"
        case "layout-changed":
            yield incident.reason
        case "paused":
            which = "the process that starts workers" if incident.worker is None else f"worker {incident.worker}"
            yield f"{which} (pid {incident.pid}) was stopped, by a signal or a debugger"
            if incident.seconds is not None:
                yield f"it went on after {human.duration(incident.seconds)}"
        case "store-outage":
            yield _cut_off_text(incident)
            if incident.seconds is not None:
                yield f"back after {human.duration(incident.seconds)}"
        case "server-lost":
            at = f" (pid {incident.pid})" if place and incident.pid is not None else ""
            yield f"server {incident.shard}{at} {incident.unresponsive or exit_text(incident.code)}"
            yield from _server_recovery(incident)
        case "server-outage":
            yield f"{_waiting(incident)} server {incident.shard} at {incident.reason} since {stamp(incident.time)}"
            if incident.seconds is not None:
                yield f"reached again after {human.duration(incident.seconds)}"
        case "stalled":
            yield incident.reason
            yield from _commit(incident)
        case "driver-changed":
            yield driver_text(incident)


def _cut_off_text(incident: Incident) -> str:
    if not incident.host:
        return f"store {incident.reason} cannot be reached: training goes on, changes of membership wait"
    away = f"cannot reach the store at {incident.reason}: look at the"
    go_on = "away longer than a lease (--lease)"
    if len(incident.members) > 1:
        who = f"workers {' '.join(map(str, incident.members))}"
        return f"{who} {away} links between them; the others go on without those that are {go_on}"
    return (
        f"worker {incident.members[0]} on {incident.host} {away} link between them; "
        f"the others go on without it while it is {go_on}"
    )


def driver_text(driver: Incident | DriverChanged) -> str:
    return f"process {driver.pid} on {driver.host} is the driver now"


def _worker_text(incident: Incident, *, place: bool) -> str:
    notes = [] if incident.incarnation == 0 else [f"incarnation {incident.incarnation}"]
    if place:
        notes += [incident.host] if incident.host else []
        notes += [f"pid {incident.pid}"] if incident.pid is not None else []
    return f"worker {incident.worker} ({', '.join(notes)})" if notes else f"worker {incident.worker}"


def _server_recovery(incident: Incident) -> Iterator[str]:
    if incident.seconds is None:
        if incident.action:
            yield incident.action
        if incident.members and not incident.ends_the_run:
            yield f"{_waiting(incident)} it at {incident.reason}"
        return
    updates = "" if incident.version is None else f" with {human.plural(incident.version, 'update')}"
    yield f"back after {human.duration(incident.seconds)}{updates}"
    if incident.repeated:
        steps = human.plural(incident.repeated, "step")
        yield f"all servers continue from step {incident.step or 0:,}, {steps} repeated"
    if incident.pushes_lost:
        yield f"{human.plural(incident.pushes_lost, 'acknowledged update')} lost, since its snapshot is older"


def _waiting(incident: Incident) -> str:
    several = len(incident.members) > 1
    verb = "waited for" if incident.seconds is not None else "wait for" if several else "waits for"
    return f"worker{'s' if several else ''} {' '.join(map(str, incident.members))} {verb}"


def _recovery(incident: Incident) -> Iterator[str]:
    if incident.not_member:
        return
    if incident.generation is None or incident.ends_the_run:
        if incident.action:
            yield incident.action
        if incident.with_servers:
            yield from _commit(incident)
        return
    members = " ".join(str(worker) for worker in incident.members)
    one = len(incident.members) == 1
    if incident.redone:
        yield f"{members} redo{'es' if one else ''} step {(incident.step or 0) + 1:,}"
    elif members:
        yield f"{members} go{'es' if one else ''} on"
    yield from _commit(incident)


def _commit(incident: Incident) -> Iterator[str]:
    if incident.seconds is not None:
        yield f"next commit after {human.duration(incident.seconds)}"
