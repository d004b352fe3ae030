"""The text of `shoal why`: which workers wait for which, in which operation, since when, and at which line. Pure.

Waits are arrows between workers. A worker that others wait for and that does not wait itself holds up the run:

    0 ──► 2    1 ──► 2    3 ──► 2        worker 2 holds up 0 1 3
    0 ──► 1    1 ──► 2                   worker 2 holds up 0 1, the former through worker 1
    0 ──► 1    1 ──► 0                   they wait for each other
"""

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import structs

from shoal.report import human

RUNNING, WAITING, STOPPED, SILENT, GONE = "running", "waiting", "stopped", "silent", "gone"
AT_WORK = ("works", "")  # phases without further detail
NO_DRIVER = "trains"  # the phase of a joined worker that no driver started: who waits for whom is not known
IN_SCRIPT = "runs the script"  # the phase of a worker that has not joined: nothing but its line is known
_LINE = re.compile(r"(?P<at>\S+:\d+)\s+in (?P<function>[^:]+):\s*(?P<code>.*)")


class WorkerActivity(msgspec.Struct, frozen=True, kw_only=True):
    worker: int  # of a server: its rank, after those of the workers
    shard: int | None = None  # of a parameter server
    incarnation: int = 0
    host: str = ""
    pid: int | None = None
    state: str  # running; waiting: for other workers; stopped: by a signal; silent: does not answer; gone
    operation: str = ""  # "merge, number 18204"
    waits_for: list[int] = []
    since: float = 0.0  # seconds in this operation or phase
    step: int = 0  # committed
    phase: str = ""  # "computing lane 3", "between steps", "recovering: waits for worker 2's position"
    user_line: str = ""  # "train.py:88  in tokenize:  json.loads(line)"
    stack: list[str] = []  # innermost first
    silent_seconds: float = 0.0


def with_silence(activities: Sequence[WorkerActivity], asked_seconds: float) -> list[WorkerActivity]:
    """Of those that did not answer within `asked_seconds`: for how long they have been silent, as far as those that
    wait for them know."""
    waited: dict[int, float] = {}
    for each in activities:
        for other in each.waits_for:
            waited[other] = max(waited.get(other, 0.0), each.since)
    return [
        structs.replace(each, silent_seconds=max(asked_seconds, waited.get(each.worker, 0.0)))
        if each.state in (STOPPED, SILENT)
        else each
        for each in activities
    ]


def render(activities: Sequence[WorkerActivity], *, run: str = "RUN") -> str:
    """The conclusion, then a line for every worker."""
    if not activities:
        return "no worker of this run is known to be alive"
    return "\n".join([*conclusion(activities, run=run), "", *table(activities)])


# -- the conclusion ---------------------------------------------------------------------------------------------------


def conclusion(activities: Sequence[WorkerActivity], *, run: str = "RUN") -> list[str]:
    workers = newest(activities)
    waits = _waits(workers)
    blocked = find_blockers(waits)
    lines: list[str] = []
    for blocker in sorted(blocked, key=lambda each: (-len(blocked[each]), each)):
        lines += _blocked_lines(workers, waits, blocker, blocked[blocker], run)
    for cycle in find_wait_cycles(waits):
        lines += _cycle_lines(workers, waits, cycle)
    for each in workers.values():
        if each.state in (STOPPED, SILENT, GONE) and each.worker not in blocked:
            unknown = all(other.phase in (IN_SCRIPT, NO_DRIVER) for other in workers.values())
            lines.append(f"{_title(each)}: {_doing(each)}{'' if unknown else '; no worker waits for it'}")
            lines += [f"  {line}" for line in _advice(each, run)]
    others = [each for each in workers.values() if each.state == WAITING and not waits.get(each.worker)]
    lines += [f"{_title(each)} {_phase(each)}, for {human.duration(each.since)}" for each in others]
    busy = [each for each in workers.values() if each.state == RUNNING and each.phase not in AT_WORK]
    if lines:
        return lines
    if busy and any(each.phase.startswith(("wait", "form", "propose", "recover", "enter")) for each in busy):
        return [f"{_title(each)} {each.phase}, for {human.duration(each.since)}" for each in busy]
    if all(each.phase == NO_DRIVER for each in workers.values()):
        alive = "is alive, and not stopped" if len(workers) == 1 else "are alive, and none is stopped"
        return [f"{human.plural(len(workers), 'worker')} {alive}; without a driver no more is known of them"]
    if all(each.phase == IN_SCRIPT for each in workers.values()):
        run_it = "runs" if len(workers) == 1 else "run"
        return [f"{human.plural(len(workers), 'worker')} {run_it} a script that has not joined: their lines are known"]
    workers = {number: each for number, each in workers.items() if each.shard is None}
    if len(workers) == 1:
        (only,) = workers.values()
        return [f"no worker waits: worker {only.worker} is alone{_at(only, ' and at ')}"]
    return [f"no worker waits: all {len(workers)} compute"]


def held_up_by(activities: Sequence[WorkerActivity]) -> list[int]:
    """The processes that the run waits for, by rank: they hold up others, or do not answer."""
    workers = newest(activities)
    blockers = find_blockers(_waits(workers))
    cycles = [worker for cycle in find_wait_cycles(_waits(workers)) for worker in cycle]
    mute = [each.worker for each in workers.values() if each.state in (STOPPED, SILENT, GONE)]
    return sorted({*blockers, *cycles, *mute})


def newest(activities: Sequence[WorkerActivity]) -> dict[int, WorkerActivity]:
    """The newest incarnation of each worker, by number."""
    return {each.worker: each for each in sorted(activities, key=lambda each: (each.worker, each.incarnation))}


def find_blockers(waits: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Workers that do not wait, with all that wait for them, directly or through others."""
    found: dict[int, set[int]] = {}
    for worker in waits:
        for end in _reached(waits, worker):
            if not waits.get(end):
                found.setdefault(end, set()).add(worker)
    return {end: sorted(waiting) for end, waiting in found.items()}


def find_wait_cycles(waits: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Groups of workers that wait for each other, and for no worker outside that does not wait."""
    found: list[list[int]] = []
    for worker in sorted(waits):
        reached = _reached(waits, worker)
        if all(waits.get(end) for end in reached):
            cycle = sorted(each for each in reached if worker in _reached(waits, each)) or sorted(reached)
            if cycle and cycle not in found:
                found.append(cycle)
    return found


def longest_wait_chain(waits: Mapping[int, Sequence[int]], end: int) -> list[int]:
    """A chain of workers, each waiting for the next, that leads to this one."""
    chain = [end]
    while longer := [each for each in sorted(waits) if chain[0] in waits[each] and each not in chain]:
        chain.insert(0, longer[0])
    return chain


def _waits(workers: Mapping[int, WorkerActivity]) -> dict[int, list[int]]:
    waiting = (each for each in workers.values() if each.state == WAITING and each.waits_for)
    return {each.worker: [other for other in each.waits_for if other != each.worker] for each in waiting}


def _reached(waits: Mapping[int, Sequence[int]], worker: int) -> set[int]:
    reached: set[int] = set()
    pending = list(waits.get(worker, ()))
    while pending:
        each = pending.pop()
        if each not in reached:
            reached.add(each)
            pending += waits.get(each, ())
    return reached


def _blocked_lines(
    workers: Mapping[int, WorkerActivity],
    waits: Mapping[int, Sequence[int]],
    blocker: int,
    waiting: Sequence[int],
    run: str,
) -> list[str]:
    activity = workers.get(blocker)
    waiting = [each for each in waiting if workers[each].shard is None] or waiting
    number = sum(each.shard is None for each in workers.values())
    whom = "the others" if len(waiting) == number - 1 > 1 else _names(waiting, workers)
    longest = max((workers[each] for each in waiting), key=lambda each: each.since)
    have = "has" if len(waiting) == 1 else "have"
    inside = f", in {_number(longest.operation)}" if longest.operation else ""
    waited = f"{_names(waiting, workers)} {have} waited for {human.duration(longest.since)}{inside}"
    lines = [f"{_names([blocker], workers)} holds up {whom}: {_doing(activity)}; {waited}"]
    chain = longest_wait_chain(waits, blocker)
    if len(chain) > 2:
        links = ", which waits for ".join(_names([each], workers) for each in chain[1:])
        lines.append(f"  {_names(chain[:1], workers)} waits for {links}")
    return lines + [f"  {line}" for line in _advice(activity, run)]


def _cycle_lines(
    workers: Mapping[int, WorkerActivity], waits: Mapping[int, Sequence[int]], cycle: Sequence[int]
) -> list[str]:
    inside = {each: workers[each].operation for each in cycle}
    longest = max(workers[each].since for each in cycle)
    lines = [f"{_names(cycle, workers)} wait for each other, for {human.duration(longest)}: none of them can go on"]
    for each in cycle:
        whom = f"{_names([each], workers)} waits for {_names(waits[each], workers)}"
        lines.append(f"  {whom} in {_number(inside[each]) or 'no operation'}")
    if len(set(inside.values())) > 1:
        lines.append("  they are not in the same operation: the code depends on the worker")
    return lines


def _doing(each: WorkerActivity | None) -> str:
    if each is None:
        return "its state is unknown"
    place = ", ".join([*([each.host] if each.host else []), *([f"pid {each.pid}"] if each.pid is not None else [])])
    place = f" ({place})" if place else ""
    match each.state:
        case "stopped":
            return f"its process{place} is stopped, by SIGSTOP or a debugger{_at(each, '; it is at ')}"
        case "silent":
            silent = human.duration(each.silent_seconds)
            return f"its process{place} has been silent for {silent}{_at(each, '; it was at ')}"
        case "gone":
            return f"its process{place} has ended"
    if each.user_line:
        return f"it is at {_code(each.user_line)}"
    if each.operation:
        return f"it is in {_number(each.operation)}"
    return f"it {each.phase}" if each.phase not in AT_WORK else "it computes"


def _advice(each: WorkerActivity | None, run: str) -> list[str]:
    """Commands to type. `kill` on the host itself, since a stopped process answers no request."""
    if each is None or each.pid is None:
        return []
    on_host = f" on {each.host}" if each.host else ""
    match each.state:
        case "stopped":
            return [f"continue it: kill -CONT {each.pid}    end it: kill -KILL {each.pid}{on_host}"]
        case "silent":
            return [f"end it: kill -KILL {each.pid}{on_host}    its last lines: shoal report {run}"]
    return []


def _phase(each: WorkerActivity) -> str:
    return each.phase if each.phase not in AT_WORK else f"waits in {_number(each.operation)}"


def _at(each: WorkerActivity, before: str) -> str:
    return f"{before}{_code(each.user_line)}" if each.user_line else ""


def _code(line: str) -> str:
    found = _LINE.fullmatch(line)
    if found is None:
        return line
    code = f": {found['code']}" if found["code"] else ""
    return f"{found['at']} in {found['function'].strip()}(){code}"


def _number(operation: str) -> str:
    """Writes long numbers with commas: 18,204."""
    return re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", operation)


def _title(each: WorkerActivity) -> str:
    return f"worker {each.worker}" if each.shard is None else f"server {each.shard}"


def _names(numbers: Sequence[int], known: Mapping[int, WorkerActivity]) -> str:
    """Workers 0 2 and server 1."""
    shards = {number: each.shard for number, each in known.items() if each.shard is not None}
    kinds = {
        "worker": [number for number in numbers if number not in shards],
        "server": [shards[number] for number in numbers if number in shards],
    }
    return " and ".join(
        f"{kind}{'s' if len(found) != 1 else ''} {' '.join(map(str, found))}" for kind, found in kinds.items() if found
    )


# -- the table --------------------------------------------------------------------------------------------------------


def table(activities: Sequence[WorkerActivity]) -> list[str]:
    """One line per worker, in columns as wide as needed."""
    rows: list[tuple[str, ...]] = [("worker", "host", "pid", "step", "does", "for", "own code")]
    known = newest(activities)
    rows += [_row(each, known) for each in known.values()]
    return human.columns(rows)


def _row(each: WorkerActivity, known: Mapping[int, WorkerActivity]) -> tuple[str, ...]:
    name = str(each.worker) if each.shard is None else _title(each)
    return (
        name if each.incarnation == 0 else f"{name} (incarnation {each.incarnation})",
        each.host,
        "" if each.pid is None else str(each.pid),
        f"{each.step:,}" if each.step >= 0 else "",
        _does(each, known),
        human.duration(each.silent_seconds if each.state in (SILENT, STOPPED) else each.since),
        _code(each.user_line) if each.user_line else "",
    )


def _does(each: WorkerActivity, known: Mapping[int, WorkerActivity]) -> str:
    if each.state in (STOPPED, SILENT, GONE):
        return each.state
    if each.state == WAITING and each.waits_for:
        served = any(other in known and known[other].shard is not None for other in each.waits_for)
        whom = _names(each.waits_for, known) if served else " ".join(str(worker) for worker in each.waits_for)
        inside = f" in {_number(each.operation)}" if each.operation else ""
        return f"waits for {whom}{inside}"
    if each.phase not in AT_WORK:
        return each.phase
    return _number(each.operation) or "computes"
