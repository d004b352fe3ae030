"""What workers and driver say about a run, one typed message each.

The same messages travel from worker to driver (a line of JSON each) and stand in `events.jsonl`, so whatever was on
the screen can be read again by a program.
"""

from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    time: float  # seconds since 1970


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    run: str
    job: str
    command: str = "train"
    workers: int
    layout: str
    lanes: int
    exact: bool
    steps: int | None
    steps_per_epoch: int | None
    tokens: int | None = None  # of a sample, where it has any
    layout_reason: str = ""  # why this layout, where the planner chose another one than plain copies
    servers: int = 0  # parameter servers
    sync_mode: str = ""  # how they keep workers in step
    previous_layout: str = ""  # the layout that the run had until now: it goes on with another one


class RunPredicted(Event, frozen=True, kw_only=True, tag="run-predicted"):
    """What was foreseen of the run: the short of prediction.json. Told by the driver when it is known."""

    cluster: str
    step_seconds: float | None = None
    samples_per_second: float | None = None
    reason: str = ""  # why nothing could be predicted


class WorkerStarted(Event, frozen=True, kw_only=True, tag="worker-started"):
    """A worker has joined. In all events `rank` is the worker's number: its place in the run, which whoever replaces it
    takes over; `life` counts the processes that have had it."""

    rank: int
    pid: int
    host: str
    fingerprint: str
    incarnation: int = 0
    elastic: bool = False  # it can go on when others are lost


class TimeSpent(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one worker, by cause. They sum to the time that its steps took."""

    data: float = 0.0  # loading samples
    compute: float = 0.0  # forward, backward, adding the worker's own lanes
    wait: float = 0.0  # for the slowest worker
    merge: float = 0.0  # moving and adding gradients
    apply: float = 0.0  # clipping, optimizer, scheduler
    other: float = 0.0  # everything between steps: evaluation, checkpoints, events

    @property
    def total(self) -> float:
        return self.data + self.compute + self.wait + self.merge + self.apply + self.other

    def __add__(self, more: "TimeSpent") -> "TimeSpent":
        return TimeSpent(
            data=self.data + more.data,
            compute=self.compute + more.compute,
            wait=self.wait + more.wait,
            merge=self.merge + more.merge,
            apply=self.apply + more.apply,
            other=self.other + more.other,
        )


class StepsCommitted(Event, frozen=True, kw_only=True, tag="steps-committed"):
    """Committed steps of one worker since its last such message; several at a time, so that telling costs little."""

    rank: int
    step: int  # number of committed steps so far
    count: int  # how many of them this message covers
    samples: int  # of the whole global batches, not of this worker alone
    epoch: int
    loss: float | None  # None: not finite
    lanes: tuple[int, int]  # the lanes this worker holds: first, past the last
    spent: TimeSpent
    lost_seconds: float = 0.0  # seconds, beside `spent`, that went into no step: a dropped one, a group made anew
    learning_rate: float | None = None  # learning rate
    memory_bytes: int = 0  # resident bytes
    slowest: dict[int, int] = {}  # rank -> how many of these steps it came last to (from the leader only)
    leader: bool = False  # the one member whose word counts for the whole run; another takes over when it is gone
    sample_digests: list[str] = []  # for each of these steps a digest of the samples it saw
    sample_indices: list[list[int]] = []  # likewise the samples themselves, where the user asked for them


class ModelEvaluated(Event, frozen=True, kw_only=True, tag="model-evaluated"):
    step: int
    epoch: int
    metrics: dict[str, float | None]  # None: not finite
    seconds: float
    target_reached: bool = False


class LanesAssigned(Event, frozen=True, kw_only=True, tag="lanes-assigned"):
    """Lanes were dealt anew."""

    step: int
    assignment: list[tuple[int, int]]
    reason: str
    members: list[int] = []  # whose lanes these are, in the same order; empty: workers 0, 1, 2, …


class CheckpointIntervalChanged(Event, frozen=True, kw_only=True, tag="checkpoint-interval-changed"):
    """How often checkpoints are worth their cost, and why. Told by the leader when it changes."""

    step: int
    every: int  # steps
    save_seconds: float  # what one costs
    failure_seconds: float  # mean time between failures that was assumed or seen
    auto: bool = True  # and they are written that often; else it is advice


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
    path: str
    skipped: list[str] = []  # checkpoints that did not verify, with why
    repeated: int = 0  # steps that had been committed after this checkpoint and are done again
    inexact_sync_mode: str = ""  # the way of keeping in step that it comes from, if that was not exact


class StepSkipped(Event, frozen=True, kw_only=True, tag="step-skipped"):
    """A step whose loss was not finite was dropped."""

    step: int
    where: list[tuple[int, int]]  # (worker, lane)


class StepDigest(Event, frozen=True, kw_only=True, tag="step-digest"):
    """One sha256 per tensor after a step; only when asked for (`shoal verify`)."""

    step: int
    tensors: dict[str, str]


class TrafficReported(Event, frozen=True, kw_only=True, tag="traffic-reported"):
    """How gradients travel, as one worker saw it: from rank 0 once the first have, and from all at the end."""

    rank: int
    transport: str  # "shared memory", or the algorithm of messages; empty: one worker, and nothing travels
    reason: str = ""
    hosts: tuple[str, ...] = ()  # by rank
    racks: tuple[str, ...] = ()
    exact: bool = True  # False: something is lost on the way
    compressors: dict[str, str] = {}  # level (host, rack) -> the compressor that was asked for
    unused_levels: tuple[str, ...] = ()  # of these levels the ones that no message can cross
    sent_bytes: dict[str, int] = {}  # level -> bytes of gradients that this worker sent
    uncompressed_bytes: dict[str, int] = {}  # likewise, without compression
    squared_errors: dict[
        str, tuple[float, float]
    ] = {}  # level -> squared lengths: what was left out, what should be carried
    final: bool = False


class ModelShardReported(Event, frozen=True, kw_only=True, tag="model-shard-reported"):
    """What a worker held of the model, and what that took. Told at its end."""

    rank: int
    replica: int
    stage: int
    tensor_shard: int
    blocks: list[str]  # that it computed; empty: all
    num_parameters: int
    peak_bytes: int  # of memory, at the most
    limit_bytes: int | None = None  # that it had
    busy_seconds: float | None = None  # in a pipeline: of a typical step, without waiting for other stages
    stage_seconds: float | None = None  # the same with waiting
    bubble_planned: float | None = None  # the share of its workers' time that a pipeline waits, by its schedule


class LaneCost(Event, frozen=True, kw_only=True, tag="lane-cost"):
    """What cutting worker 0's share into lanes costs: seconds for its lanes one by one, and for all of them at once."""

    lanes: int
    separate_seconds: float
    joint_seconds: float


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    rank: int
    kind: str  # name of the exception's class
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
    stopped: str | None = None  # why it ended before its last step, if it did
    resumable: bool = False
    tensors: dict[str, str] = {}


class WorkerExited(Event, frozen=True, kw_only=True, tag="worker-exited"):
    rank: int
    code: int | None  # negative: the signal that ended it; None: not known (it was another driver's child)
    incarnation: int = 0


class WorkerLost(Event, frozen=True, kw_only=True, tag="worker-lost"):
    """A worker is gone and the run goes on (or not) without it. Told by the driver."""

    rank: int
    incarnation: int
    host: str
    pid: int | None
    detected_by: str  # how: "its process ended", "its lease ran out", "it was stopped", …
    code: int | None  # as in WorkerExited; None while the process still exists or when nobody knows
    out_of_memory: bool = False  # the kernel killed it for its memory
    log: list[str] = []  # the last lines that it wrote
    action: str = ""  # what the driver does about it: "replaced", "the others go on", "the run ends: …"


class WorkerLeft(Event, frozen=True, kw_only=True, tag="worker-left"):
    """A worker left between two steps, as asked: nothing is done again. Told by the worker."""

    rank: int
    incarnation: int
    step: int
    reason: str  # "asked to by SIGTERM", "the run was scaled to 2 workers", "too slow"


class WorkerAdded(Event, frozen=True, kw_only=True, tag="worker-added"):
    """A process was started for a worker's place. Told by the driver."""

    rank: int
    incarnation: int
    reason: str  # "replacement", "scaled to 4 workers"


class MembershipChanged(Event, frozen=True, kw_only=True, tag="membership-changed"):
    """The members of the run are others now. Told by the leader of the new epoch, when its group stands."""

    generation: int
    members: list[int]  # numbers of the workers that take part
    incarnations: list[int] = []  # of the members, in the same order; empty: of each the one that was started last
    step: int  # committed; training goes on from here
    reason: str
    redone: int = 0  # steps that were under way and are done again: 0 at a boundary, else 1
    seconds: float = 0.0  # since the leader noticed
    restart: int = 0  # rises when the state was lost with all who had it


class RunRecovered(Event, frozen=True, kw_only=True, tag="run-recovered"):
    """The first step that was committed after a change. Told by the leader."""

    generation: int
    step: int
    seconds: float  # since the leader noticed that something was wrong, or that a change was due


class StateTransferred(Event, frozen=True, kw_only=True, tag="state-transferred"):
    """A newcomer has weights, optimizer and buffers from a member. Told by the newcomer, when the digest is right."""

    rank: int
    donor: int
    step: int
    num_bytes: int
    seconds: float


class StoreOutage(Event, frozen=True, kw_only=True, tag="store-outage"):
    """The store cannot be reached (seconds None), or can be again after that many seconds."""

    rank: int | None  # None: the driver says so
    address: str
    seconds: float | None = None


class DriverChanged(Event, frozen=True, kw_only=True, tag="driver-changed"):
    """Another process watches over the run now: `shoal attach`."""

    pid: int
    host: str


class ServerStarted(Event, frozen=True, kw_only=True, tag="server-started"):
    """A parameter server listens. Told by itself. `boot`: how many processes have been this shard, this one too."""

    shard: int
    shards: int
    pid: int
    host: str
    addresses: list[str] = []
    incarnation: int = 1
    version: int = 0  # of what it came back with
    step: int = -1  # in lockstep: of what it came back with


class ServerLost(Event, frozen=True, kw_only=True, tag="server-lost"):
    """Its process ended before the run did. Told by the driver."""

    shard: int
    pid: int | None
    code: int | None
    log: list[str] = []
    action: str = ""  # "started again", "the run ends: …"


class ServerOutage(Event, frozen=True, kw_only=True, tag="server-outage"):
    """A worker cannot reach a server (seconds None), or can again after that many seconds."""

    rank: int
    shard: int
    address: str
    seconds: float | None = None


class PushesLost(Event, frozen=True, kw_only=True, tag="pushes-lost"):
    """A server came back without updates that it had acknowledged to this worker: its snapshot was older."""

    rank: int
    shard: int
    number: int


class ServersRolledBack(Event, frozen=True, kw_only=True, tag="servers-rolled-back"):
    """In lockstep all servers went back to a step that each has a snapshot of; what followed is done again."""

    rank: int
    generation: int
    step: int
    repeated: int


class ServerReported(Event, frozen=True, kw_only=True, tag="server-reported"):
    """What a server has done since it was first started. Told by itself now and then, and at its end."""

    shard: int
    version: int
    updates: int
    duplicates: int = 0
    refused: dict[str, int] = {}  # why -> how many
    staleness: dict[int, int] = {}  # versions between a gradient's basis and its push -> how many pushes
    bytes_in: int = 0
    bytes_out: int = 0
    rows: dict[str, int] = {}  # table -> rows held
    row_loads: dict[str, list[float]] = {}  # table -> touches, by key or by range of rows
    busy_seconds: float = 0.0
    held_bytes: int = 0  # values and optimizer state
    peak_bytes: int = 0  # of its memory, above what it was when it started
    final: bool = False


class WorkerPrinted(Event, frozen=True, kw_only=True, tag="worker-printed"):
    rank: int
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run-finished"):
    outcome: str  # done, stopped, failed
    report: dict[str, Any] = {}


AnyEvent = (
    RunStarted
    | RunPredicted
    | WorkerStarted
    | StepsCommitted
    | ModelEvaluated
    | LanesAssigned
    | CheckpointSaved
    | SaveFailed
    | RunResumed
    | StepSkipped
    | StepDigest
    | TrafficReported
    | ModelShardReported
    | LaneCost
    | WorkerFailed
    | WorkerFinished
    | WorkerExited
    | WorkerLost
    | WorkerLeft
    | WorkerAdded
    | MembershipChanged
    | RunRecovered
    | StateTransferred
    | StoreOutage
    | DriverChanged
    | ServerStarted
    | ServerLost
    | ServerOutage
    | PushesLost
    | ServersRolledBack
    | ServerReported
    | CheckpointIntervalChanged
    | WorkerPrinted
    | RunFinished
)

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode(line: bytes) -> AnyEvent:
    return _decoder.decode(line)
