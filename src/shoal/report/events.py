"""The events of a run. Workers send them to the driver as lines of JSON; the driver writes them to `events.jsonl`."""

import time

import msgspec

from shoal.transport.decoding import guarded


def _now() -> float:
    return time.time()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    time: float = msgspec.field(default_factory=_now)  # seconds since 1970


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    run: str
    job: str
    command: str = "train"
    arguments: list[str] = []  # of a script
    settings: list[str] = []  # of a job, as --set has them
    workers: int
    layout: str
    lanes: int
    exact: bool
    steps: int | None
    steps_per_epoch: int | None
    tokens: int | None = None  # of a sample
    layout_reason: str = ""  # why the planner chose this layout; empty: plain data parallelism
    servers: int = 0  # parameter servers
    sync_mode: str = ""  # of the servers
    previous_layout: str = ""  # of a run that goes on with another layout

    @classmethod
    def of_script(cls, run: str, script: str, arguments: list[str], *, workers: int, exact: bool) -> "RunStarted":
        """Of a script, whose lanes and steps its workers report."""
        return cls(
            run=run,
            job=script,
            command="run",
            arguments=arguments,
            workers=workers,
            layout=f"data={workers}",
            lanes=0,
            exact=exact,
            steps=None,
            steps_per_epoch=None,
        )


class RunPredicted(Event, frozen=True, kw_only=True, tag="run-predicted"):
    """From the driver: a summary of prediction.json."""

    cluster: str
    step_seconds: float | None = None
    samples_per_second: float | None = None
    reason: str = ""  # why nothing could be predicted


class WorkerStarted(Event, frozen=True, kw_only=True, tag="worker-started"):
    """From a worker that has joined. In all events `rank` is the worker's number, which its replacement takes over;
    `incarnation` counts the processes that have had it."""

    rank: int
    pid: int
    host: str
    fingerprint: str
    incarnation: int = 0
    elastic: bool = False  # it survives the loss of others


class ScriptStarted(Event, frozen=True, kw_only=True, tag="script-started"):
    """From a worker that begins to execute a script. Until it joins, the run knows of it what its process shows."""

    rank: int
    pid: int
    host: str
    began: str  # when the process began, which tells it from a later one with the same id
    incarnation: int = 0
    stack_file: int = -1  # the descriptor of a file in memory: its stack is there after STACK_SIGNAL


class ScriptAdvised(Event, frozen=True, kw_only=True, tag="script-advised"):
    """A script does what its user can hardly have meant, in one sentence with what to do. `rank` None: all workers."""

    rank: int | None
    text: str


class ProcessUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one process uses of its machine."""

    rank: int
    cpu: float  # cores, on average since the last look
    memory_bytes: int  # resident


class ProcessesObserved(Event, frozen=True, kw_only=True, tag="processes-observed"):
    """From the driver, now and then: workers that execute a script and have not joined."""

    workers: list[ProcessUse]


class TimeSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one worker's steps, by cause."""

    data: float = 0.0  # loading samples
    compute: float = 0.0  # forward, backward, adding the worker's own lanes
    wait: float = 0.0  # for the slowest worker
    merge: float = 0.0  # ordered reduce of gradients
    apply: float = 0.0  # clipping, optimizer, scheduler
    other: float = 0.0  # everything between steps: evaluation, checkpoints, events

    @property
    def total(self) -> float:
        return self.data + self.compute + self.wait + self.merge + self.apply + self.other

    def __add__(self, more: "TimeSpent") -> "TimeSpent":
        return TimeSpent(**{name: getattr(self, name) + getattr(more, name) for name in self.__struct_fields__})


TIME_PARTS = TimeSpent.__struct_fields__


class StepsCommitted(Event, frozen=True, kw_only=True, tag="steps-committed"):
    """From every worker, now and then: the steps that it committed since its last such event."""

    rank: int
    step: int  # committed so far
    count: int  # steps that this event covers
    samples: int  # of the global batches, not of this worker alone
    epoch: int
    loss: float | None  # None: not finite
    losses: dict[str, float | None] = {}  # of a loop with several optimizers, by their names
    lanes: tuple[int, int]  # of this worker: first, past the last
    spent: TimeSpent
    lost_seconds: float = 0.0  # beside `spent`: dropped steps, new groups
    learning_rate: float | None = None
    memory_bytes: int = 0  # resident
    slowest: dict[int, int] = {}  # rank -> in how many of these steps it was last (from the leader only)
    leader: bool = False  # its report counts for the run; another member takes over when it is lost
    sample_digests: list[str] = []  # of each of these steps' samples
    sample_indices: list[list[int]] = []  # the samples themselves, on request

    @property
    def began(self) -> float:
        return self.time - self.spent.total - self.lost_seconds


class ModelEvaluated(Event, frozen=True, kw_only=True, tag="model-evaluated"):
    step: int
    epoch: int
    metrics: dict[str, float | None]  # None: not finite
    seconds: float
    target_reached: bool = False


class LoggedValues(msgspec.Struct, frozen=True, kw_only=True):
    """What callbacks logged at one step."""

    step: int
    epoch: int
    time: float  # seconds since 1970
    values: dict[str, float | None]  # None: not finite


class MetricsLogged(Event, frozen=True, kw_only=True, tag="metrics-logged"):
    """From the leader: what the job's callbacks logged since the last such event."""

    rows: list[LoggedValues]


class BestCheckpointFound(Event, frozen=True, kw_only=True, tag="best-checkpoint-found"):
    """From the leader: the evaluation after this step is the best so far, and its checkpoint is kept."""

    step: int
    metric: str
    value: float
    path: str = ""  # of the checkpoint; empty: it is being written


class LoggerFailed(Event, frozen=True, kw_only=True, tag="logger-failed"):
    """From the driver: a logger raised an error, and gets no further values."""

    logger: str
    reason: str


class LanesAssigned(Event, frozen=True, kw_only=True, tag="lanes-assigned"):
    step: int
    assignment: list[tuple[int, int]]
    reason: str
    members: list[int] = []  # the workers, in the same order; empty: workers 0, 1, 2, …


class CheckpointIntervalChanged(Event, frozen=True, kw_only=True, tag="checkpoint-interval-changed"):
    """From the leader: how often a checkpoint is worth its cost."""

    step: int
    every: int  # steps
    save_seconds: float  # cost of one
    failure_seconds: float  # mean time between failures, assumed or observed
    auto: bool = True  # False: advice only


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint-saved"):
    step: int
    path: str
    num_bytes: int
    seconds: float
    final: bool = False


class SaveFailed(Event, frozen=True, kw_only=True, tag="save-failed"):
    step: int
    reason: str


class RunResumed(Event, frozen=True, kw_only=True, tag="run-resumed"):
    step: int
    path: str  # of the checkpoint; empty: all state was lost before there was one, and the run begins again
    skipped: list[str] = []  # checkpoints that did not verify, with the reason
    repeated: int = 0  # steps committed after this checkpoint, which the run repeats
    inexact_sync_mode: str = ""  # of the run that wrote the checkpoint, if not exact
    changes: list[str] = []  # of the job since its first step, which the user accepted


class StepSkipped(Event, frozen=True, kw_only=True, tag="step-skipped"):
    """A step was dropped because its loss was not finite."""

    step: int
    where: list[tuple[int, int]]  # (worker, lane)


class LossScaleChanged(Event, frozen=True, kw_only=True, tag="loss-scale-changed"):
    """The loss scale of fp16, at the start and after a step that changed it."""

    step: int
    scale: float  # of the next step
    skipped: int  # updates left out so far
    overflowed: bool = False  # the step's update was left out: its scaled gradients were not finite


class StepDigest(Event, frozen=True, kw_only=True, tag="step-digest"):
    """One sha256 per tensor after a step, for `shoal verify`."""

    step: int
    tensors: dict[str, str]


class TrafficReported(Event, frozen=True, kw_only=True, tag="traffic-reported"):
    """How gradients travel, from rank 0 after the first step, and from all workers at the end."""

    rank: int
    transport: str  # "shared memory", or the algorithm of messages; empty: one worker
    reason: str = ""
    hosts: tuple[str, ...] = ()  # by rank
    racks: tuple[str, ...] = ()
    exact: bool = True
    compressors: dict[str, str] = {}  # level (host, rack) -> compressor
    unused_levels: tuple[str, ...] = ()  # levels with a compressor that no message crosses
    sent_bytes: dict[str, int] = {}  # level -> bytes of gradients that this worker sent
    uncompressed_bytes: dict[str, int] = {}  # the same without compression
    squared_errors: dict[str, tuple[float, float]] = {}  # level -> squared norms: of what was left out, of the gradient
    network: dict[str, dict[str, int]] = {}  # level -> messages and bytes of all kinds that went through sockets
    overlapped: bool = False  # gradients leave during the backward pass
    final: bool = False


class ModelShardReported(Event, frozen=True, kw_only=True, tag="model-shard-reported"):
    """From a worker at its end: its shard of the model, and the memory and time that it took."""

    rank: int
    replica: int
    stage: int
    tensor_shard: int
    blocks: list[str]  # empty: all
    num_parameters: int
    peak_bytes: int
    limit_bytes: int | None = None  # of memory
    busy_seconds: float | None = None  # in a pipeline: of a typical step, without waiting for other stages
    stage_seconds: float | None = None  # the same with waiting
    bubble_planned: float | None = None  # the share of the workers' time that the schedule leaves idle


class LaneCost(Event, frozen=True, kw_only=True, tag="lane-cost"):
    """Seconds that worker 0 needs for its lanes one by one, and for all of them in one batch."""

    lanes: int
    separate_seconds: float
    joint_seconds: float


class TrainingNote(Event, frozen=True, kw_only=True, tag="training-note"):
    """From the leader, once: what the user should know of the job's arithmetic."""

    text: str


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    rank: int
    kind: str  # the exception's class
    message: str
    exit_code: int = 1
    step: int | None = None
    lane: int | None = None
    where: list[str] = []
    fix: str | None = None
    log: str | None = None


class WorkerFinished(Event, frozen=True, kw_only=True, tag="worker-finished"):
    rank: int
    step: int
    samples: int
    weights_sha256: str
    final_loss: float | None
    metrics: dict[str, float | None]  # None: not finite
    stopped: str | None = None  # why it ended before its last step
    resumable: bool = False
    tensors: dict[str, str] = {}


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    rank: int
    code: int | None  # negative: the signal that ended it; None: unknown (it was another driver's child)
    incarnation: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag="worker-lost"):
    """From the driver: a worker is gone."""

    rank: int
    incarnation: int
    host: str
    pid: int | None
    detected_by: str  # "its process ended", "its lease ran out", "it was stopped", …
    code: int | None  # as in WorkerExited; None also while the process exists
    out_of_memory: bool = False  # the kernel killed it for its memory
    log: list[str] = []  # its last lines
    action: str = ""  # of the driver: "replaced", "the others go on", "the run ends: …"


class WorkerLeft(Event, frozen=True, kw_only=True, tag="worker-left"):
    """From a worker that leaves on request between two steps: no step is repeated."""

    rank: int
    incarnation: int
    step: int
    reason: str  # "asked to by SIGTERM", "the run was scaled to 2 workers", "too slow"


class WorkerAdded(Event, frozen=True, kw_only=True, tag="worker-added"):
    """From the driver: it started a process as this worker."""

    rank: int
    incarnation: int
    reason: str  # "replacement", "scaled to 4 workers"


class MembershipChanged(Event, frozen=True, kw_only=True, tag="membership-changed"):
    """From the leader of a new generation, when its group is connected."""

    generation: int
    members: list[int]  # worker numbers
    incarnations: list[int] = []  # of the members, in the same order; empty: each one's newest
    step: int  # committed; training goes on from here
    reason: str
    redone: int = 0  # steps that were under way and are computed again: 0 at a boundary, else 1
    seconds: float = 0.0  # since the leader noticed
    restart: int = 0  # rises when all workers with the state were lost


class RunRecovered(Event, frozen=True, kw_only=True, tag="run-recovered"):
    """From the leader: the first commit after a change of members."""

    generation: int
    step: int
    seconds: float  # since the leader noticed the failure or the request


class StateTransferred(Event, frozen=True, kw_only=True, tag="state-transferred"):
    """From a newcomer: it has a member's weights, optimizer and buffers, and their digest is right."""

    rank: int
    donor: int
    step: int
    num_bytes: int
    seconds: float


class RunStalled(Event, frozen=True, kw_only=True, tag="run-stalled"):
    """From the driver: nothing has been committed for so many seconds, and who is waited for."""

    seconds: float
    text: str
    awaited: list[int]  # ranks; servers follow the workers


class StoreOutage(Event, frozen=True, kw_only=True, tag="store-outage"):
    """The store cannot be reached (seconds None), or can again after that many seconds."""

    rank: int | None  # None: from the driver
    address: str
    host: str = ""  # of the worker, where a network is between it and the store
    seconds: float | None = None


class EventsDropped(Event, frozen=True, kw_only=True, tag="events-dropped"):
    """From a worker, or from the driver about its lines: so many events are in no file. The disk was full while the
    driver did not read, or a line was too long or no event."""

    rank: int
    count: int


class ProcessPaused(Event, frozen=True, kw_only=True, tag="process-paused"):
    """From the driver: a process is stopped by a signal or a debugger (seconds None), or goes on after that many."""

    rank: int | None  # None: the process that starts workers
    pid: int
    seconds: float | None = None


class DriverChanged(Event, frozen=True, kw_only=True, tag="driver-changed"):
    """From a new driver: `shoal attach`."""

    pid: int
    host: str


class ServerStarted(Event, frozen=True, kw_only=True, tag="server-started"):
    """From a parameter server that listens. `incarnation` counts the processes of this shard from 1."""

    shard: int
    shards: int
    pid: int
    host: str
    addresses: list[str] = []
    incarnation: int = 1
    version: int = 0  # of the snapshot that it loaded
    step: int = -1  # of that snapshot, in lockstep


class ServerLost(Event, frozen=True, kw_only=True, tag="server-lost"):
    """From the driver: a server's process ended before the run did."""

    shard: int
    pid: int | None
    code: int | None
    log: list[str] = []
    action: str = ""  # "started again", "the run ends: …"
    detected_by: str = ""  # where it did not end by itself: "server 0 is stopped"


class ServerOutage(Event, frozen=True, kw_only=True, tag="server-outage"):
    """A worker cannot reach a server (seconds None), or can again after that many seconds."""

    rank: int
    shard: int
    address: str
    seconds: float | None = None


class PushesLost(Event, frozen=True, kw_only=True, tag="pushes-lost"):
    """A restarted server lacks updates that it had acknowledged to this worker: its snapshot was older."""

    rank: int
    shard: int
    number: int


class ServersRolledBack(Event, frozen=True, kw_only=True, tag="servers-rolled-back"):
    """In lockstep, all servers went back to a step of which each has a snapshot; workers repeat the later steps."""

    rank: int
    generation: int
    step: int
    repeated: int


class ServerReported(Event, frozen=True, kw_only=True, tag="server-reported"):
    """From a server, now and then and at its end: its work since its first start."""

    shard: int
    version: int
    updates: int
    duplicates: int = 0
    refused: dict[str, int] = {}  # reason -> requests
    staleness: dict[int, int] = {}  # versions between a gradient's pull and its push -> pushes
    bytes_in: int = 0
    bytes_out: int = 0
    rows: dict[str, int] = {}  # table -> rows held
    row_loads: dict[str, list[float]] = {}  # table -> accesses, by key or by range of rows
    busy_seconds: float = 0.0
    held_bytes: int = 0  # values and optimizer state
    peak_bytes: int = 0  # of memory, above its start
    final: bool = False


class WorkerPrinted(Event, frozen=True, kw_only=True, tag="worker-printed"):
    rank: int
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run-finished"):
    outcome: str  # done, stopped, failed


NoticeEvent = EventsDropped | ProcessPaused | RunStalled
RunEvent = (
    RunStarted | RunPredicted | RunResumed | RunRecovered | RunFinished | DriverChanged | StoreOutage | NoticeEvent
)
StepEvent = (
    StepsCommitted | StepSkipped | StepDigest | ModelEvaluated | LanesAssigned | LaneCost | TrafficReported
    | TrainingNote | LossScaleChanged
)  # fmt: skip
LogEvent = MetricsLogged | LoggerFailed
CheckpointEvent = CheckpointSaved | SaveFailed | CheckpointIntervalChanged | BestCheckpointFound
WorkerEvent = (
    WorkerAdded | WorkerStarted | WorkerPrinted | WorkerFailed | WorkerLeft | WorkerLost | WorkerFinished | WorkerExited
)
ScriptEvent = ScriptStarted | ScriptAdvised | ProcessesObserved
MemberEvent = WorkerAdded | MembershipChanged | StateTransferred | ModelShardReported
ServerEvent = ServerStarted | ServerLost | ServerOutage | PushesLost | ServersRolledBack | ServerReported
AnyEvent = RunEvent | StepEvent | LogEvent | CheckpointEvent | WorkerEvent | ScriptEvent | MemberEvent | ServerEvent

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_decode = guarded(_decoder.decode)


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode(line: bytes) -> AnyEvent:
    """Raises msgspec.DecodeError for anything but an event."""
    return _decode(line)
