"""What is known of a run so far, added up from its events. No I/O; live view and closing report are drawn from it."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.report.commits import CommitLog
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    LaneCost,
    LanesAssigned,
    MembershipChanged,
    ModelEvaluated,
    ModelShardReported,
    PushesLost,
    RunFinished,
    RunPredicted,
    RunRecovered,
    RunResumed,
    RunStarted,
    SaveFailed,
    ServerLost,
    ServerReported,
    ServersRolledBack,
    ServerStarted,
    StateTransferred,
    StepsCommitted,
    StepSkipped,
    TimeSpent,
    TrafficReported,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerPrinted,
    WorkerStarted,
)
from shoal.report.incidents import Incident, IncidentLog
from shoal.report.participation import TAKES_PART, MembershipHistory, participation_span
from shoal.report.servers import ServerTally
from shoal.report.updates import UpdateLog, is_queue_mode

RECENT_STEPS = 100
LOSSES_KEPT = 256


class RecentSteps:
    """The last messages of a worker that together cover about `RECENT_STEPS` steps."""

    def __init__(self) -> None:
        self._messages: deque[StepsCommitted] = deque()
        self._spent: TimeSpent | None = TimeSpent()  # the sum, once asked for
        self.steps = 0

    def add(self, message: StepsCommitted) -> None:
        self._messages.append(message)
        self._spent = None
        self.steps += message.count
        while self.steps - self._messages[0].count >= RECENT_STEPS:
            self.steps -= self._messages.popleft().count

    @property
    def time_spent(self) -> TimeSpent:
        if self._spent is None:
            self._spent = sum((message.spent for message in self._messages), TimeSpent())
        return self._spent

    @property
    def seconds(self) -> float:
        """With what was lost."""
        return self.time_spent.total + sum(message.lost_seconds for message in self._messages)

    @property
    def wall_seconds(self) -> float:
        """By the clock: where several tell at once, their seconds overlap."""
        begins = (message.time - message.spent.total - message.lost_seconds for message in self._messages)
        ends = (message.time for message in self._messages)
        return max(ends, default=0.0) - min(begins, default=0.0)

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
        held = sum(message.count * _num_lanes(message) for message in self._messages)
        spent = self.time_spent
        return (spent.data + spent.compute) / held if held else None


@dataclass(kw_only=True)
class WorkerTally:
    rank: int
    host: str = ""
    pid: int | None = None
    fingerprint: str | None = None
    incarnation: int = 0
    lanes: tuple[int, int] = (0, 0)
    steps: int = 0
    lane_steps: int = 0  # lanes computed, over all steps; the deal may change on the way
    time_spent: TimeSpent = field(default_factory=TimeSpent)
    recent: RecentSteps = field(default_factory=RecentSteps)
    memory: int = 0
    peak_memory: int = 0
    times_slowest: int = 0  # steps to which it came last
    exit_code: int | None = None

    @property
    def seconds_per_lane(self) -> float | None:
        return (self.time_spent.data + self.time_spent.compute) / self.lane_steps if self.lane_steps else None


class LossHistory:
    """The whole history of the loss in a bounded number of points: when full, every second one is dropped."""

    def __init__(self) -> None:
        self.timed: list[tuple[float, int, float]] = []  # (time, step, loss), as they were told
        self._stride = 1
        self._seen = 0

    @property
    def points(self) -> list[tuple[int, float]]:
        """(step, loss)."""
        return [(step, loss) for _, step, loss in self.timed]

    def add(self, time: float, step: int, loss: float) -> None:
        if self._seen % self._stride == 0:
            self.timed.append((time, step, loss))
            if len(self.timed) >= LOSSES_KEPT:
                self.timed = self.timed[::2]
                self._stride *= 2
        self._seen += 1


class RunTally:
    """The whole of a run, whoever spoke for it. Counted apart: who is alive, who takes part, what was committed."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.started: RunStarted | None = None
        self.predicted: RunPredicted | None = None
        self.workers: dict[int, WorkerTally] = {}
        self.commits: CommitLog | UpdateLog = CommitLog()
        self.servers = ServerTally()
        self.incident_log = IncidentLog()
        self.recent = RecentSteps()  # of the leaders
        self.leader: int | None = None  # the worker that spoke for the run last
        self.epoch = 0
        self.loss: float | None = None
        self.losses = LossHistory()
        self.learning_rate: float | None = None
        self.training_began: float | None = None
        self.evaluated: ModelEvaluated | None = None
        self.evaluation_seconds = 0.0  # of all of them
        self.target_reached: ModelEvaluated | None = None
        self.assignments: list[LanesAssigned] = []
        self.saved: list[CheckpointSaved] = []
        self.save_failed: list[SaveFailed] = []
        self.skipped: list[StepSkipped] = []
        self.resumed: RunResumed | None = None
        self.traffic: dict[int, TrafficReported] = {}  # by rank, the last word of each
        self.lane_cost: LaneCost | None = None
        self.model_shards: dict[int, ModelShardReported] = {}
        self.failures: list[WorkerFailed] = []
        self.exits: list[WorkerExited] = []
        self.finished: dict[int, WorkerFinished] = {}
        self.outcome: str | None = None  # told by the driver, at the end
        self.prints = 0
        self.last_time: float | None = None

    def add(self, event: AnyEvent) -> None:
        if isinstance(event, RunStarted) and self.started is not None:
            if event.previous_layout:
                self._change_layout()
            else:
                self._clear()  # a run that was taken up again, read from its file: only the last sitting counts
        self.last_time = max(event.time, self.last_time or event.time)
        self.incident_log.add(event)
        match event:
            case RunStarted():
                if self.started is None and is_queue_mode(event.sync_mode):
                    self.commits = UpdateLog()
                self.started = event
                self.servers.count = event.servers
            case RunPredicted():
                self.predicted = event
            case WorkerStarted():
                worker = self._worker(event.rank)
                worker.host, worker.pid, worker.fingerprint = event.host, event.pid, event.fingerprint
                worker.incarnation, worker.exit_code = event.incarnation, None
                self.commits.add(event)
            case StepsCommitted():
                self._add_steps(event)
            case ModelEvaluated():
                if (
                    self.evaluated is None or event.step >= self.evaluated.step or not self.is_queue
                ):  # the last one done
                    self.evaluated = event
                self.evaluation_seconds += event.seconds
                if event.target_reached and self.target_reached is None:
                    self.target_reached = event
            case LanesAssigned():
                self.assignments.append(event)
                for rank, lanes in zip(event.members or range(len(event.assignment)), event.assignment, strict=True):
                    self._worker(rank).lanes = lanes
            case CheckpointSaved():
                self.saved.append(event)
            case SaveFailed():
                self.save_failed.append(event)
            case RunResumed():
                self.resumed = event
                self.commits.add(event)
            case StepSkipped():
                self.skipped.append(event)
            case TrafficReported():
                self.traffic[event.rank] = event
            case ModelShardReported():
                self.model_shards[event.rank] = event
            case LaneCost():
                self.lane_cost = event
            case WorkerFailed():
                self.failures.append(event)
            case WorkerFinished():
                self.finished[event.rank] = event
                self.commits.add(event)
            case MembershipChanged() | StateTransferred():
                self.commits.add(event)
            case ServerStarted() | PushesLost() | ServerReported():
                self.servers.add(event)
            case ServersRolledBack() | ServerLost():
                self.servers.add(event)
                self.commits.add(event)
            case RunRecovered():
                self.commits.recovered(event.seconds)
            case WorkerExited():
                worker = self._worker(event.rank)
                if event.incarnation >= worker.incarnation:
                    worker.exit_code = event.code
                self.exits.append(event)
            case WorkerPrinted():
                self.prints += 1
            case RunFinished():
                self.outcome = event.outcome

    def _change_layout(self) -> None:
        """Another layout: what was committed and what happened stays; what workers held and took begins anew."""
        self.workers, self.recent, self.leader, self.evaluation_seconds = {}, RecentSteps(), None, 0.0
        self.assignments, self.traffic, self.model_shards, self.lane_cost, self.predicted = [], {}, {}, None, None
        self.failures, self.exits, self.finished = [], [], {}

    @property
    def step(self) -> int:
        """Committed so far; falls only when the state was lost with all who had it."""
        return self.commits.step

    @property
    def steps(self) -> int:
        """Committed in this sitting; a resumed run has more."""
        return self.commits.steps

    @property
    def samples(self) -> int:
        """Of these steps."""
        return self.commits.samples

    @property
    def ranks(self) -> list[WorkerTally]:
        """All that ever took part."""
        return [self.workers[rank] for rank in sorted(self.workers)]

    @property
    def members(self) -> list[WorkerTally]:
        """The members of the epoch: those that take part, or did at the end."""
        members = self.incident_log.membership.members
        return [worker for worker in self.ranks if worker.rank in members]

    @property
    def membership(self) -> MembershipHistory:
        return self.incident_log.membership

    @property
    def incidents(self) -> list[Incident]:
        return self.incident_log.incidents

    @property
    def num_workers(self) -> int:
        """How many the run should have."""
        return self.membership.wanted or len(self.workers)

    @property
    def num_alive(self) -> int:
        return len(self.membership.alive)

    @property
    def num_participating(self) -> int:
        return len(self.membership.participating)

    @property
    def participation(self) -> float | None:
        if self.training_began is None or self.last_time is None:
            return None
        taken = participation_span(self.membership.spans, self.training_began, self.last_time)
        return None if taken is None else self.membership.share(*taken)

    def state(self, rank: int) -> str:
        return self.membership.states.get(rank, TAKES_PART)

    @property
    def unfinished(self) -> list[int]:
        """Members of the last epoch that have not come to their end. Whoever was lost before is none of them, nor who
        died when others had finished and the result was safe."""
        safe = any(saved.step >= each.step for each in self.finished.values() for saved in self.saved)
        late = {each.rank for each in self.silent_exits} if safe else set()
        return [rank for rank in self.membership.members if rank not in self.finished and rank not in late]

    @property
    def open_failures(self) -> list[WorkerFailed]:
        """Errors that nobody made good: not those of a worker that is a member no longer, or has finished since."""
        members = self.membership.members

        def settled(failure: WorkerFailed) -> bool:
            finished = self.finished.get(failure.rank)
            if finished is not None:
                return finished.time >= failure.time
            return failure.rank not in members and not self.unfinished and bool(self.finished)

        return [failure for failure in self.failures if not settled(failure)]

    @property
    def silent_exits(self) -> list[WorkerExited]:
        """Processes that ended badly and were members to the last: nobody came in their place."""
        members = self.membership
        return [
            each
            for each in self.exits
            if each.code != 0
            and each.incarnation >= members.incarnation_of(each.rank)
            and (each.rank in members.members or not members.members)
            and not (each.code is None and each.rank in self.finished)
        ]

    @property
    def is_queue(self) -> bool:
        """Workers take steps from one queue, and each speaks for its own."""
        return isinstance(self.commits, UpdateLog)

    @property
    def seconds(self) -> float:
        """Time of training: what the leaders' steps took, and what was lost between them; of a queue the wall clock."""
        return self.commits.seconds

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None

    @property
    def recent_samples_per_second(self) -> float | None:
        seconds = self._recent_seconds
        return self.recent.samples / seconds if seconds else None

    @property
    def recent_steps_per_second(self) -> float | None:
        seconds = self._recent_seconds
        return self.recent.steps / seconds if seconds else None

    @property
    def _recent_seconds(self) -> float:
        return self.recent.wall_seconds if self.is_queue else self.recent.seconds

    @property
    def seconds_left(self) -> float | None:
        if self.started is None or self.started.steps is None or not self.recent.steps:
            return None
        return max(0, self.started.steps - self.step) * self._recent_seconds / self.recent.steps

    @property
    def metrics(self) -> Mapping[str, float | None]:
        return self.evaluated.metrics if self.evaluated else {}

    def _worker(self, rank: int) -> WorkerTally:
        return self.workers.setdefault(rank, WorkerTally(rank=rank))

    def _add_steps(self, event: StepsCommitted) -> None:
        worker = self._worker(event.rank)
        worker.lanes = event.lanes
        worker.steps += event.count
        worker.lane_steps += event.count * _num_lanes(event)
        worker.time_spent += event.spent
        worker.recent.add(event)
        worker.memory = event.memory_bytes
        worker.peak_memory = max(worker.peak_memory, event.memory_bytes)
        self.commits.add(event)
        if not event.leader:
            return
        began = event.time - event.spent.total - event.lost_seconds
        if self.training_began is None or (self.is_queue and began < self.training_began):
            self.training_began = began
        self.leader = event.rank
        self.recent.add(event)
        self.epoch = event.epoch
        self.loss = event.loss
        self.learning_rate = event.learning_rate
        if event.loss is not None:
            self.losses.add(event.time, event.step, event.loss)
        for rank, count in event.slowest.items():
            self._worker(rank).times_slowest += count


def _num_lanes(event: StepsCommitted) -> int:
    return event.lanes[1] - event.lanes[0]
