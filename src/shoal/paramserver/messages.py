"""What client and server say to each other. Small typed messages; tensors travel beside them as raw bytes.

A request is an order or a look. Orders change the shard: each has a sequence number of its worker's incarnation, 1, 2,
3, …, and a shard applies number n + 1 after n, once: a repeated one gets the answer that it got before. Looks change
nothing, have sequence 0, and may be repeated at will. Whatever cannot be done is answered by `Refused`.

The tensors of slots: a dense slot has one, flat: the shard's pieces of these keys one after the other, in the order of
the keys. A sparse slot has ids (int64, each once, rising) and rows (one per id); a look has ids alone.
"""

from typing import Any, TypeAlias

import msgspec

Span: TypeAlias = tuple[int, int]  # lanes, or workers: from the first up to, not including, the second


class ClientId(msgspec.Struct, frozen=True, array_like=True):
    """One process that is a worker."""

    worker: int
    incarnation: int = 0


class TableSlice(msgspec.Struct, frozen=True, array_like=True):
    """Some of a table."""

    table: str
    keys: tuple[int, ...] | None = None  # dense: numbers of pieces in this shard; None: all of them
    sparse: bool = False
    codec: str = ""  # of a compressor (collectives/compress); the tensor is its payload
    count: int = 0  # elements before compression
    span: Span | None = None  # of a look at a table of one dtype: elements of the flat tensor, from and up to


class DenseSpec(msgspec.Struct, frozen=True, tag="dense"):
    """Tensors of which every shard has some rows; `cut.py` says which. All clients say the same."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]  # "float32"
    optimizer: str = "none"  # optimizers.py; "none": values are put; "job": the factory that the server was given
    settings: dict[str, float | bool] = {}  # of the optimizer
    loads: list[float] = []  # measured, by name: what is asked for more often than the rest


class SparseSpec(msgspec.Struct, frozen=True, tag="sparse"):
    """Rows that are made when they are first touched, from (seed, row)."""

    rows: int
    dim: int
    dtype: str = "float32"
    seed: int = 0
    scale: float = 0.01  # standard deviation of a new row; 0: zeros
    optimizer: str = "row_adagrad"
    settings: dict[str, float | bool] = {}
    evict_age: int = 0  # versions that a row may go untouched; 0: for ever
    evict_least: int = 0  # touches that a row needs to stay when it is that old
    capacity: int = 0  # rows that a shard holds at the most; 0: no bound


TableSpec: TypeAlias = DenseSpec | SparseSpec


class ServerRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class HelloRequest(ServerRequest, frozen=True):
    """The first word of a connection."""

    worker: int
    incarnation: int = 0  # 0: grant one (shard 0 alone does)
    proof: bytes = b""  # of the credentials, over what the server sent first
    shared_memory: bool = False  # this process is on the server's host and would share memory
    ring_bytes: int = 0  # that it would like to share each way; 0: as the server has it


# -- orders -----------------------------------------------------------------------------------------------------------


class DeclareRequest(ServerRequest, frozen=True):
    """A table; the same again does nothing, another of the same name is refused."""

    table: str
    spec: TableSpec


class PutRequest(ServerRequest, frozen=True):
    """Values as they are. `fill`: these are the first ones, and the table stands when all of its keys have some. With
    `state`, of the optimizer (see `State`)."""

    slices: list[TableSlice]
    fill: bool = False
    state: dict[str, Any] | None = None


class PushRequest(ServerRequest, frozen=True):
    """Gradients, applied at once: one update. `ticket`: the step that it is of (-1: none); a ticket is applied once,
    whoever pushes it. `basis`: the version that the gradient was computed from. `pull`: answer with dense values."""

    slices: list[TableSlice]
    lease: int = -1
    base_version: int = -1
    pull: bool = False
    last: bool = True  # False: another part of the same update follows


class ContributeRequest(ServerRequest, frozen=True):
    """Gradients of some lanes of a step, kept until it is applied. What comes for a step that is over is refused."""

    step: int
    span: Span
    slices: list[TableSlice]


class ApplyRequest(ServerRequest, frozen=True):
    """The step's update: contributions of these spans are added in the tree over `lanes`, times `scale`, clipped to
    `max_norm` given the whole gradient's `norm`. Once for each step, whoever asks first. `skip`: nothing is applied."""

    step: int
    lanes: int
    spans: list[Span]
    scale: float = 1.0
    norm: float | None = None
    max_norm: float | None = None
    skip: bool = False
    snapshot: bool = False  # keep what it comes to on disk
    pull: bool = True  # answer with dense values
    put: list[TableSlice] = []  # values that become part of the step as they are (buffers); their tensors come along


class BarrierRequest(ServerRequest, frozen=True):
    """In lockstep, shard 0: this worker is done with the step. Answered with everybody's notes when enough have come.
    Tensors may come along; they go to everybody."""

    step: int
    note: bytes


class LeaseRequest(ServerRequest, frozen=True):
    """Not in lockstep, shard 0: give me a step. Answered when there is one, `Compute` or `Errand` or `End`.

    `done`: the ticket that this worker has done since, -1: none, with its `note` (loss and so on: kept in order).
    `failed`: the group's epoch in which a mate was lost; the ticket is still to be done. `ahead`: tell me also which
    ticket is to be mine after this one."""

    group: int
    finished: int = -1
    note: bytes = b""
    failed_generation: int = -1
    wants_next: bool = False


class TaskRequest(ServerRequest, frozen=True):
    """Shard 0: something is to be done once, by the next worker that asks: "evaluate", "save"."""

    task: str


class EndRequest(ServerRequest, frozen=True):
    """Shard 0: the run ends (a target, an error, word from the user). `resumable`: before its last step."""

    reason: str
    resumable: bool = False


class RewindRequest(ServerRequest, frozen=True):
    """In lockstep, after a server was lost: back to what was kept of a step. Once for each epoch."""

    generation: int
    step: int
    server_incarnation: int = 0  # of the process that is meant: what was asked of another is out of date; 0: of any


# -- looks ------------------------------------------------------------------------------------------------------------


class PullRequest(ServerRequest, frozen=True):
    slices: list[TableSlice]


class SquaresRequest(ServerRequest, frozen=True):
    """Sums of squares by row of what a step's contributions come to, by key: for the norm of the whole gradient."""

    step: int
    lanes: int
    spans: list[Span]
    scale: float = 1.0


class TableStateRequest(ServerRequest, frozen=True):
    """The optimizer's state of a dense table, for a checkpoint."""

    table: str


class StatusRequest(ServerRequest, frozen=True):
    """Where the shard is."""


class StatsRequest(ServerRequest, frozen=True):
    """What it has done."""


class SnapshotRequest(ServerRequest, frozen=True):
    """Write a snapshot now; answered when it stands on disk."""


# -- replies ----------------------------------------------------------------------------------------------------------


class ServerReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ChallengeReply(ServerReply, frozen=True):
    """The server's first word. `proof` in Hello is the HMAC-SHA256 of this nonce under the token."""

    nonce: bytes
    shard: int
    shards: int
    needs_token: bool


class WelcomeReply(ServerReply, frozen=True):
    shard: int
    shards: int
    server_incarnation: int  # how many processes have been this shard
    generation: int
    incarnation: int
    sequence: int  # the last order of this incarnation that the shard has
    version: int  # updates applied
    step: int  # in lockstep: the next one
    tables: list[str]


class AckReply(ServerReply, frozen=True):
    version: int


class ValuesReply(ServerReply, frozen=True):
    version: int
    slices: list[TableSlice]
    step: int = -1  # in lockstep: the next one


class LateReply(ServerReply, frozen=True):
    """The step is over without this worker. `step`: the one at work."""

    step: int


class BarrierReply(ServerReply, frozen=True):
    """`workers`: who is in, rising; their notes; how many tensors of those that follow are each one's."""

    step: int
    workers: list[int]
    notes: list[bytes]
    tensor_counts: list[int]


class LeaseReply(ServerReply, frozen=True):
    """`members`: the worker's group, rising; `epoch`: of the group, rises when they change. `done`: tickets so far.
    `then`: the ticket that comes next, unless somebody who has nothing else to do takes it; -1: not known."""

    lease: int
    generation: int = 0
    members: tuple[int, ...] = ()
    steps_done: int = 0
    next_lease: int = -1


class TaskReply(ServerReply, frozen=True):
    task: str
    steps_done: int


class EndReply(ServerReply, frozen=True):
    reason: str  # empty: the last step is done
    resumable: bool
    steps_done: int


class TableStateReply(ServerReply, frozen=True):
    """The optimizer's state: tensors follow, named; scheduler and counters in `values`."""

    names: list[str]
    values: dict[str, Any]


class StatusReply(ServerReply, frozen=True):
    server_incarnation: int
    generation: int
    version: int
    step: int
    filled: bool  # every dense table has its first values
    snapshot_steps: list[int]  # steps that a snapshot stands of
    progress: dict[str, Any] = {}  # of the pace
    needs_rewind: bool = False  # another process had this shard before, and nobody has gone back with it since
    start_step: int = 0  # the job's step that the run began with; `step` may count something else
    inexact: str = ""  # how the steps before that were done, if not exactly


class StatsReply(ServerReply, frozen=True):
    """All since the shard was first started. `staleness`: versions between basis and push -> pushes."""

    version: int
    updates: int
    duplicates: int
    refused: dict[str, int]  # why -> how many
    staleness: dict[int, int]
    bytes_in: int
    bytes_out: int
    rows: dict[str, int]  # sparse table -> rows held
    loads: dict[str, list[float]]  # table -> touches, by key or by range of rows
    busy_seconds: float
    evicted: dict[str, int] = {}  # sparse table -> rows that were forgotten
    hot_rows: dict[
        str, list[tuple[int, float]]
    ] = {}  # sparse table -> rows asked for most, and in which share of requests


class RefusedReply(ServerReply, frozen=True):
    """`code`: one word for programs. `fix`: what to change."""

    code: str
    reason: str
    fix: str = ""


WRITES = (
    DeclareRequest,
    PutRequest,
    PushRequest,
    ContributeRequest,
    ApplyRequest,
    BarrierRequest,
    LeaseRequest,
    TaskRequest,
    EndRequest,
    RewindRequest,
)
READS = (PullRequest, SquaresRequest, TableStateRequest, StatusRequest, StatsRequest, SnapshotRequest)
AnyRequest: TypeAlias = (
    HelloRequest | DeclareRequest | PutRequest | PushRequest | ContributeRequest | ApplyRequest | BarrierRequest
    | LeaseRequest | TaskRequest | EndRequest | RewindRequest | PullRequest | SquaresRequest | TableStateRequest
    | StatusRequest | StatsRequest | SnapshotRequest
)  # fmt: skip
AnyReply: TypeAlias = (
    ChallengeReply | WelcomeReply | AckReply | ValuesReply | LateReply | BarrierReply | LeaseReply | TaskReply
    | EndReply | TableStateReply | StatusReply | StatsReply | RefusedReply
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
decode_reply = msgspec.msgpack.Decoder(AnyReply).decode
