"""What is known of a run so far, added up from its events. No I/O; live view and closing report are drawn from it."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.report.events import (
    AnyEvent,
    Dealt,
    Evaluated,
    Failed,
    Finished,
    LaneCost,
    Printed,
    Resumed,
    RunFinished,
    RunStarted,
    Saved,
    SaveFailed,
    Skipped,
    Spent,
    Steps,
    Travelled,
    WorkerExited,
    WorkerStarted,
)

RECENT_STEPS = 100
LOSSES_KEPT = 256


class Recent:
    """The last messages of a worker that together cover about `RECENT_STEPS` steps."""

    def __init__(self) -> None:
        self._messages: deque[Steps] = deque()
        self._spent: Spent | None = Spent()  # the sum, once asked for
        self.steps = 0

    def add(self, message: Steps) -> None:
        self._messages.append(message)
        self._spent = None
        self.steps += message.count
        while self.steps - self._messages[0].count >= RECENT_STEPS:
            self.steps -= self._messages.popleft().count

    @property
    def spent(self) -> Spent:
        if self._spent is None:
            self._spent = sum((message.spent for message in self._messages), Spent())
        return self._spent

    @property
    def samples(self) -> int:
        return sum(message.samples for message in self._messages)

    @property
    def slowest(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for message in self._messages:
            counts.update(message.slowest)
        return counts

    @property
    def seconds_per_lane(self) -> float | None:
        held = sum(message.count * _held(message) for message in self._messages)
        spent = self.spent
        return (spent.data + spent.compute) / held if held else None


@dataclass(kw_only=True)
class WorkerTally:
    rank: int
    host: str = ""
    pid: int | None = None
    fingerprint: str | None = None
    lanes: tuple[int, int] = (0, 0)
    steps: int = 0
    lane_steps: int = 0  # lanes computed, over all steps; the deal may change on the way
    spent: Spent = field(default_factory=Spent)
    recent: Recent = field(default_factory=Recent)
    memory: int = 0
    peak_memory: int = 0
    slowest: int = 0  # steps to which it came last
    exit_code: int | None = None

    @property
    def seconds_per_lane(self) -> float | None:
        return (self.spent.data + self.spent.compute) / self.lane_steps if self.lane_steps else None


class Losses:
    """The whole history of the loss in a bounded number of points: when full, every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []  # (step, loss)
        self._stride = 1
        self._seen = 0

    def add(self, step: int, loss: float) -> None:
        if self._seen % self._stride == 0:
            self.points.append((step, loss))
            if len(self.points) >= LOSSES_KEPT:
                self.points = self.points[::2]
                self._stride *= 2
        self._seen += 1


class Tally:
    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.workers: dict[int, WorkerTally] = {}
        self.step = 0
        self.epoch = 0
        self.steps = 0  # committed in this sitting, told by rank 0; a resumed run has more
        self.samples = 0  # likewise
        self.loss: float | None = None
        self.losses = Losses()
        self.rate: float | None = None
        self.training_began: float | None = None
        self.evaluated: Evaluated | None = None
        self.target_reached: Evaluated | None = None
        self.deals: list[Dealt] = []
        self.saved: list[Saved] = []
        self.save_failed: list[SaveFailed] = []
        self.skipped: list[Skipped] = []
        self.resumed: Resumed | None = None
        self.travelled: dict[int, Travelled] = {}  # by rank, the last word of each
        self.lane_cost: LaneCost | None = None
        self.failures: list[Failed] = []
        self.exits: list[WorkerExited] = []
        self.finished: dict[int, Finished] = {}
        self.outcome: str | None = None  # told by the driver, at the end
        self.prints = 0
        self.last_time: float | None = None

    def add(self, event: AnyEvent) -> None:
        self.last_time = max(event.time, self.last_time or event.time)
        match event:
            case RunStarted():
                self.started = event
            case WorkerStarted():
                worker = self._worker(event.rank)
                worker.host, worker.pid, worker.fingerprint = event.host, event.pid, event.fingerprint
            case Steps():
                self._add_steps(event)
            case Evaluated():
                self.evaluated = event
                if event.target_reached and self.target_reached is None:
                    self.target_reached = event
            case Dealt():
                self.deals.append(event)
                for rank, lanes in enumerate(event.deal):
                    self._worker(rank).lanes = lanes
            case Saved():
                self.saved.append(event)
            case SaveFailed():
                self.save_failed.append(event)
            case Resumed():
                self.resumed = event
                self.step = max(self.step, event.step)
            case Skipped():
                self.skipped.append(event)
            case Travelled():
                self.travelled[event.rank] = event
            case LaneCost():
                self.lane_cost = event
            case Failed():
                self.failures.append(event)
            case Finished():
                self.finished[event.rank] = event
                self.step = max(self.step, event.step)
            case WorkerExited():
                self._worker(event.rank).exit_code = event.code
                self.exits.append(event)
            case Printed():
                self.prints += 1
            case RunFinished():
                self.outcome = event.outcome

    @property
    def ranks(self) -> list[WorkerTally]:
        return [self.workers[rank] for rank in sorted(self.workers)]

    @property
    def num_workers(self) -> int:
        return self.started.workers if self.started else len(self.workers)

    @property
    def seconds(self) -> float:
        """Time of training: what rank 0's steps took."""
        return self.workers[0].spent.total if 0 in self.workers else 0.0

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    @property
    def recent_samples_per_second(self) -> float | None:
        if 0 not in self.workers:
            return None
        recent = self.workers[0].recent
        seconds = recent.spent.total
        return recent.samples / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        if self.started is None or self.started.steps is None or 0 not in self.workers:
            return None
        recent = self.workers[0].recent
        if not recent.steps:
            return None
        return max(0, self.started.steps - self.step) * recent.spent.total / recent.steps

    @property
    def metrics(self) -> Mapping[str, float | None]:
        return self.evaluated.metrics if self.evaluated else {}

    def _worker(self, rank: int) -> WorkerTally:
        return self.workers.setdefault(rank, WorkerTally(rank=rank))

    def _add_steps(self, event: Steps) -> None:
        worker = self._worker(event.rank)
        worker.lanes = event.lanes
        worker.steps += event.count
        worker.lane_steps += event.count * _held(event)
        worker.spent += event.spent
        worker.recent.add(event)
        worker.memory = event.memory
        worker.peak_memory = max(worker.peak_memory, event.memory)
        self.step = max(self.step, event.step)
        if event.rank != 0:
            return
        if self.training_began is None:
            self.training_began = event.time - event.spent.total
        self.steps += event.count
        self.samples += event.samples
        self.epoch = event.epoch
        self.loss = event.loss
        self.rate = event.rate
        if event.loss is not None:
            self.losses.add(event.step, event.loss)
        for rank, count in event.slowest.items():
            self._worker(rank).slowest += count


def _held(event: Steps) -> int:
    return event.lanes[1] - event.lanes[0]
