"""Workers that execute a script and have not joined: which of them run, what they use, and their lines on the screen.

Nothing is known of such a script's steps. A worker that calls `shoal.join` is not of these any more. Pure.
"""

from collections.abc import Mapping, Sequence

from shoal.report import events, human


class ScriptTally:
    """The workers of a plain script, from the events of its run."""

    def __init__(self) -> None:
        self.running: dict[int, events.ScriptStarted] = {}  # by rank
        self.used: dict[int, events.ProcessUse] = {}  # at the last look
        self.started = 0  # workers that ever began
        self.joined = False  # any worker: the run is followed by its steps

    @property
    def plain(self) -> bool:
        """Whether the run is that of a script none of whose workers has joined."""
        return self.started > 0 and not self.joined

    def add(self, event: events.AnyEvent) -> None:
        match event:
            case events.ScriptStarted():
                self.running[event.rank] = event
                self.started += 1
            case events.ProcessesObserved():
                self.used = {each.rank: each for each in event.workers}
            case events.WorkerStarted():
                self.joined = True
                self._forget(event.rank)
            case events.WorkerExited() if self._incarnation(event.rank) <= event.incarnation:
                self._forget(event.rank)

    def _incarnation(self, rank: int) -> int:
        return self.running[rank].incarnation if rank in self.running else 0

    def _forget(self, rank: int) -> None:
        self.running.pop(rank, None)
        self.used.pop(rank, None)


def newest_scripts(history: Sequence[events.AnyEvent]) -> Mapping[int, events.ScriptStarted]:
    """The workers of a run that began a script and neither joined nor ended, by rank."""
    tally = ScriptTally()
    for event in history:
        tally = ScriptTally() if isinstance(event, events.RunStarted) else tally  # a former sitting's are gone
        tally.add(event)
    return tally.running


def state_text(tally: ScriptTally, workers: int, *, now: float) -> str:
    """How many workers are alive, and since when."""
    alive = len(tally.running)
    count = human.plural(workers, "worker") if alive == workers else f"{alive} of {human.plural(workers, 'worker')}"
    began = min((each.time for each in tally.running.values()), default=now)
    return f"{count} alive, running {human.clock(now - began)}"


def use_text(each: events.ProcessUse) -> str:
    return f"worker {each.rank}: cpu {human.percent(each.cpu)}, {human.size(each.memory_bytes)}"


def progress_text(tally: ScriptTally, workers: int, *, now: float) -> str:
    """A plain line."""
    used = (use_text(tally.used[rank]) for rank in sorted(tally.used))
    return "    ".join([state_text(tally, workers, now=now), *used])


def table(tally: ScriptTally, *, now: float, rows: int) -> list[str]:
    """A line for each worker, those that use most of the machine first where there is no room for all."""
    order = sorted(tally.running)
    if len(order) > rows:
        order = sorted(order, key=lambda rank: -tally.used[rank].cpu if rank in tally.used else 0.0)[: max(1, rows - 1)]
    lines: list[tuple[str, ...]] = [("worker", "pid", "running", "cpu", "memory")]
    for rank in sorted(order):
        each, use = tally.running[rank], tally.used.get(rank)
        cpu, memory = ("", "") if use is None else (human.percent(use.cpu), human.size(use.memory_bytes))
        lines.append((str(rank), str(each.pid), human.clock(now - each.time), cpu, memory))
    more = len(tally.running) - len(order)
    return [*human.columns(lines), *([f"and {more} more"] if more else [])]
