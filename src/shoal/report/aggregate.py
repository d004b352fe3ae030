"""Totals of a run so far, from its events. Pure; the live view and the closing report are drawn from them."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.report import events
from shoal.report.commits import CommitLog
from shoal.report.events import StepsCommitted, TimeSpent
from shoal.report.incidents import Incident, IncidentLog
from shoal.report.participation import TAKES_PART, MembershipHistory, participation_span
from shoal.report.scripts import ScriptTally
from shoal.report.servers import ServerTally
from shoal.report.updates import UpdateLog, is_queue_mode

RECENT_STEPS = 100
LOSSES_KEPT = 256


class RecentSteps:
    """The last events of a worker that together cover about `RECENT_STEPS` steps."""

    def __init__(self) -> None:
        self._events: deque[StepsCommitted] = deque()
        self._spent: TimeSpent | None = TimeSpent()  # cached sum
        self.steps = 0

    def add(self, event: StepsCommitted) -> None:
        self._events.append(event)
        self._spent = None
        self.steps += event.count
        while self.steps - self._events[0].count >= RECENT_STEPS:
            self.steps -= self._events.popleft().count

    @property
    def time_spent(self) -> TimeSpent:
        if self._spent is None:
            self._spent = sum((event.spent for event in self._events), TimeSpent())
        return self._spent

    @property
    def seconds(self) -> float:
        """Includes lost seconds."""
        return self.time_spent.total + sum(event.lost_seconds for event in self._events)

    @property
    def wall_seconds(self) -> float:
        """By the clock, for workers whose steps overlap."""
        ends = (event.time for event in self._events)
        return max(ends, default=0.0) - min((event.began for event in self._events), default=0.0)

    @property
    def samples(self) -> int:
        return sum(event.samples for event in self._events)

    @property
    def slowest(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for event in self._events:
            counts.update(event.slowest)
        return counts

    @property
    def seconds_per_lane(self) -> float | None:
        held = sum(event.count * _num_lanes(event) for event in self._events)
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
    lane_steps: int = 0  # lanes computed, over all steps; the assignment may change
    time_spent: TimeSpent = field(default_factory=TimeSpent)
    recent: RecentSteps = field(default_factory=RecentSteps)
    memory: int = 0
    peak_memory: int = 0
    times_slowest: int = 0  # steps in which it was last
    exit_code: int | None = None

    @property
    def seconds_per_lane(self) -> float | None:
        return (self.time_spent.data + self.time_spent.compute) / self.lane_steps if self.lane_steps else None


class LossHistory:
    """The loss over the whole run in a bounded number of points: when full, every second one is dropped."""

    def __init__(self) -> None:
        self.timed: list[tuple[float, int, float]] = []  # (time, step, loss), in order of arrival
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
    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.started: events.RunStarted | None = None
        self.predicted: events.RunPredicted | None = None
        self.workers: dict[int, WorkerTally] = {}
        self.commits: CommitLog | UpdateLog = CommitLog()
        self.servers = ServerTally()
        self.incident_log = IncidentLog()
        self.recent = RecentSteps()  # of the leaders
        self.epoch = 0
        self.loss: float | None = None
        self.pass_losses: dict[str, float | None] = {}  # of the last step, where it has several passes
        self.losses = LossHistory()
        self.learning_rate: float | None = None
        self.training_began: float | None = None
        self.evaluated: events.ModelEvaluated | None = None
        self.evaluation_seconds = 0.0  # of all evaluations
        self.target_reached: events.ModelEvaluated | None = None
        self.assignments: list[events.LanesAssigned] = []
        self.saved: list[events.CheckpointSaved] = []
        self.save_failed: list[events.SaveFailed] = []
        self.best: events.BestCheckpointFound | None = None
        self.logged: dict[str, float | None] = {}  # the newest value of each that callbacks logged
        self.logger_failures: list[events.LoggerFailed] = []
        self.skipped: list[events.StepSkipped] = []
        self.loss_scale: events.LossScaleChanged | None = None  # of the last step that changed it
        self.resumed: events.RunResumed | None = None
        self.traffic: dict[int, events.TrafficReported] = {}  # rank -> its last report
        self.lane_cost: events.LaneCost | None = None
        self.notes: list[str] = []
        self.model_shards: dict[int, events.ModelShardReported] = {}
        self.failures: list[events.WorkerFailed] = []
        self.exits: list[events.WorkerExited] = []
        self.finished: dict[int, events.WorkerFinished] = {}
        self.outcome: str | None = None  # from the driver, at the end
        self.last_time: float | None = None
        self.scripts = ScriptTally()

    def add(self, event: events.AnyEvent) -> None:
        if isinstance(event, events.RunStarted) and self.started is not None:
            if event.previous_layout:
                self._change_layout()
            else:
                self._clear()  # the events of a resumed run: only those since the resumption count
        self.last_time = max(event.time, self.last_time or event.time)
        self.incident_log.add(event)
        self.commits.add(event)
        self.servers.add(event)
        self.scripts.add(event)
        match event:
            case events.RunStarted():
                if self.started is None and is_queue_mode(event.sync_mode):
                    self.commits = UpdateLog()
                self.started = event
                self.servers.count = event.servers
            case events.RunPredicted():
                self.predicted = event
            case events.WorkerStarted():
                worker = self._worker(event.rank)
                worker.host, worker.pid, worker.fingerprint = event.host, event.pid, event.fingerprint
                worker.incarnation, worker.exit_code = event.incarnation, None
            case StepsCommitted():
                self._add_steps(event)
            case events.ModelEvaluated():
                # In a queue, evaluations may arrive out of order.
                if self.evaluated is None or event.step >= self.evaluated.step or not self.is_queue:
                    self.evaluated = event
                self.evaluation_seconds += event.seconds
                if event.target_reached and self.target_reached is None:
                    self.target_reached = event
            case events.LanesAssigned():
                self.assignments.append(event)
                for rank, lanes in zip(event.members or range(len(event.assignment)), event.assignment, strict=True):
                    self._worker(rank).lanes = lanes
            case events.CheckpointSaved():
                self.saved.append(event)
            case events.SaveFailed():
                self.save_failed.append(event)
            case events.BestCheckpointFound():
                self.best = event
            case events.MetricsLogged():
                for row in event.rows:
                    self.logged |= row.values
            case events.LoggerFailed():
                self.logger_failures.append(event)
            case events.RunResumed() if event.path:
                self.resumed = event
            case events.StepSkipped():
                self.skipped.append(event)
            case events.LossScaleChanged():
                self.loss_scale = event
            case events.TrafficReported():
                self.traffic[event.rank] = event
            case events.ModelShardReported():
                self.model_shards[event.rank] = event
            case events.LaneCost():
                self.lane_cost = event
            case events.TrainingNote():
                if event.text not in self.notes:  # a worker that took over says it again
                    self.notes.append(event.text)
            case events.WorkerFailed():
                self.failures.append(event)
            case events.WorkerFinished():
                self.finished[event.rank] = event
            case events.WorkerExited():
                worker = self._worker(event.rank)
                if event.incarnation >= worker.incarnation:
                    worker.exit_code = event.code
                self.exits.append(event)
            case events.RunFinished():
                self.outcome = event.outcome

    def _change_layout(self) -> None:
        """Commits and incidents stay; what belongs to the workers of the old layout goes."""
        self.workers, self.recent, self.evaluation_seconds = {}, RecentSteps(), 0.0
        self.assignments, self.traffic, self.model_shards, self.lane_cost, self.predicted = [], {}, {}, None, None
        self.failures, self.exits, self.finished = [], [], {}

    @property
    def step(self) -> int:
        """Committed so far; falls only when all workers with the state were lost."""
        return self.commits.step

    @property
    def steps(self) -> int:
        """Committed since the run started or resumed."""
        return self.commits.steps

    @property
    def samples(self) -> int:
        """Of `steps`."""
        return self.commits.samples

    @property
    def ranks(self) -> list[WorkerTally]:
        """All workers that ever took part."""
        return [self.workers[rank] for rank in sorted(self.workers)]

    @property
    def members(self) -> list[WorkerTally]:
        """The members of the present or last generation."""
        return [worker for worker in self.ranks if worker.rank in self.membership.members]

    @property
    def membership(self) -> MembershipHistory:
        return self.incident_log.membership

    @property
    def incidents(self) -> list[Incident]:
        return self.incident_log.incidents

    @property
    def num_workers(self) -> int:
        """How many workers the run should have."""
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
        """Members of the last generation that have not finished, except those that died after a checkpoint of the
        result was written."""
        safe = any(saved.step >= each.step for each in self.finished.values() for saved in self.saved)
        late = {each.rank for each in self.silent_exits} if safe else set()
        return [rank for rank in self.membership.members if rank not in self.finished and rank not in late]

    @property
    def open_failures(self) -> list[events.WorkerFailed]:
        """Errors of workers that have not finished since, unless the run finished without them."""
        members = self.membership.members

        def resolved(failure: events.WorkerFailed) -> bool:
            finished = self.finished.get(failure.rank)
            if finished is not None:
                return finished.time >= failure.time
            return failure.rank not in members and not self.unfinished and bool(self.finished)

        return [failure for failure in self.failures if not resolved(failure)]

    @property
    def silent_exits(self) -> list[events.WorkerExited]:
        """Processes that failed as members and were not replaced."""
        membership = self.membership
        return [
            each
            for each in self.exits
            if each.code != 0
            and each.incarnation >= membership.incarnation_of(each.rank)
            and (each.rank in membership.members or not membership.members)
            and not (each.code is None and each.rank in self.finished)
        ]

    @property
    def is_queue(self) -> bool:
        """Whether workers take steps from one queue, so that each reports its own."""
        return isinstance(self.commits, UpdateLog)

    @property
    def seconds(self) -> float:
        """Time of training: the leaders' steps and the time lost between them; in a queue the wall clock."""
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
        if not event.leader:
            return
        if self.training_began is None or (self.is_queue and event.began < self.training_began):
            self.training_began = event.began
        self.recent.add(event)
        self.epoch = event.epoch
        self.loss = event.loss
        self.pass_losses = event.losses
        self.learning_rate = event.learning_rate
        if event.loss is not None:
            self.losses.add(event.time, event.step, event.loss)
        for rank, count in event.slowest.items():
            self._worker(rank).times_slowest += count


def _num_lanes(event: StepsCommitted) -> int:
    return event.lanes[1] - event.lanes[0]


def unsaved_reason(tally: RunTally) -> str:
    """Why the last step of a run was not saved; empty: it was, or no save failed."""
    lost = [event.reason for event in tally.save_failed if event.step == tally.step]
    saved = [event.step for event in (*tally.saved, tally.resumed) if event is not None and event.path]
    return lost[0] if lost and tally.step not in saved else ""
