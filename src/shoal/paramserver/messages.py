"""The messages between client and server: small typed structs. Their tensors travel beside them as raw bytes.

A request is a write or a read. A write changes the shard: each has a sequence number 1, 2, 3, … within its worker's
incarnation. A shard applies number n + 1 after n, once, and answers a repeated write with the first reply. A read
changes nothing, has sequence 0 and may be repeated. A request that cannot be done is answered by `RefusedReply`.

The tensors of a table slice: a dense slice has one flat tensor, the shard's row ranges of its keys in the order of the
keys. A sparse slice has ids (int64, unique, rising) and rows (one per id); a read has ids alone.
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from shoal.transport.decoding import guarded

# Numbers that fit into a frame's header, into torch's sizes, and into sums of a few of them.
MOST = 1 << 62
MAX_LANES = 1 << 16  # that a shard reduces over
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]  # -1: none
Lanes: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
Span: TypeAlias = tuple[Count, Count]  # half open


class ClientId(msgspec.Struct, frozen=True, array_like=True):
    """One process of a worker."""

    worker: Count
    incarnation: Count = 0


class TableSlice(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a table on one shard."""

    table: str
    keys: tuple[Count, ...] | None = None  # dense: indices of this shard's row ranges; None: all of them
    sparse: bool = False
    codec: str = ""  # a compressor's name (collectives/compression); the tensor is its payload
    count: Count = 0  # elements before compression
    span: Span | None = None  # reads of a table of one dtype: elements of the flat tensor


class DenseSpec(msgspec.Struct, frozen=True, tag="dense"):
    """Tensors cut by rows over the shards (sharding.py). All clients declare the same spec."""

    names: list[str]
    shapes: list[list[Count]]
    dtypes: list[str]  # "float32"
    optimizer: str = "none"  # optimizers.py; "none": values are only put; "job": made by the server's factory
    settings: dict[str, float | bool] = {}  # of the optimizer
    loads: list[float] = []  # measured relative access rates, by name


class SparseSpec(msgspec.Struct, frozen=True, tag="sparse"):
    """Rows that are created from (seed, row) at their first update."""

    rows: Count
    dim: Count
    dtype: str = "float32"
    seed: Annotated[int, msgspec.Meta(ge=-MOST, le=2 * MOST - 1)] = 0
    scale: float = 0.01  # standard deviation of a new row; 0: zeros
    optimizer: str = "row_adagrad"
    settings: dict[str, float | bool] = {}
    evict_age: Count = 0  # versions after which an untouched row is evicted; 0: never
    evict_least: Count = 0  # a row with this many touches is never evicted by age; 0: no such exception
    capacity: Count = 0  # most rows on one shard; 0: unlimited


TableSpec: TypeAlias = DenseSpec | SparseSpec


class ServerRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class HelloRequest(ServerRequest, frozen=True):
    """The first request on a connection."""

    worker: Count
    incarnation: Count = 0  # 0: the server grants one (shard 0 only)
    proof: bytes = b""  # HMAC-SHA256 of the challenge's nonce under the token
    shared_memory: bool = False  # this process runs on the server's host and accepts shared memory
    ring_bytes: Count = 0  # requested ring size each way; 0: the server's default
    claim: str = ""  # whose token it is: "viewer", "worker/3.1" (permissions.py); empty: the servers' own


# -- writes -----------------------------------------------------------------------------------------------------------


class DeclareRequest(ServerRequest, frozen=True):
    """Creates a table. The same spec again does nothing; another spec under the same name is refused."""

    table: str
    spec: TableSpec


class RunStart(msgspec.Struct, frozen=True, array_like=True):
    """In `PutRequest.state` as "start_from", before the first values: the run goes on from a checkpoint."""

    first: Count  # step of this run
    done: list[Count]  # steps beyond it
    rows: str = ""  # the checkpoint with the rows of sparse tables
    start_step: Count = 0  # the job's step
    inexact: str = ""  # the sync mode of the steps before


class PutRequest(ServerRequest, frozen=True):
    """Sets values. `fill`: sets only keys without values; a table is ready when all its keys have values.
    `state`: the optimizer's state, as in `TableStateReply`. `guarded`: refused where it would change a table with an
    optimizer, other than by `fill`; the server sets it for clients that are workers (permissions.py)."""

    slices: list[TableSlice]
    fill: bool = False
    state: dict[str, Any] | None = None
    guarded: bool = False


class PushRequest(ServerRequest, frozen=True):
    """Gradients that the shard applies at once as one update. `lease`: the step they belong to (-1: none); the shard
    applies each lease once. `base_version`: the version that the gradients were computed from."""

    slices: list[TableSlice]
    lease: Index = -1
    base_version: Index = -1
    pull: bool = False  # reply with dense values
    last: bool = True  # False: another request of the same update follows


class ContributeRequest(ServerRequest, frozen=True):
    """Gradients of some lanes of a step, held until the step is applied. `LateReply` if the step is over."""

    step: Count
    span: Span
    slices: list[TableSlice]


class ApplyRequest(ServerRequest, frozen=True):
    """Applies a step: adds the contributions of these spans in the tree over `lanes`, multiplies by `scale` and clips
    to `max_norm` given the full gradient's `norm`. Only the first request for a step applies it."""

    step: Count
    lanes: Lanes
    spans: list[Span]
    scale: float = 1.0
    norm: float | None = None
    max_norm: float | None = None
    skip: bool = False  # ends the step without an update
    snapshot: bool = False  # write a snapshot of the result
    pull: bool = True  # reply with dense values
    put: list[TableSlice] = []  # values to set with the step (buffers); their tensors come along
    guarded: bool = False  # as in `PutRequest`


class BarrierRequest(ServerRequest, frozen=True):
    """Lockstep modes, shard 0: this worker has finished the step. When a quorum has arrived, `BarrierReply` gives each
    of them all notes and all tensors that came along."""

    step: Count
    note: bytes


class LeaseRequest(ServerRequest, frozen=True):
    """Queue modes, shard 0: asks for a step. The reply is `LeaseReply`, `TaskReply` or `EndReply`."""

    group: Index
    finished: Index = -1  # the lease that this worker has finished since its last request; -1: none
    note: bytes = b""  # on the finished step (loss and so on); read in the order of steps
    failed_generation: Index = -1  # the group's generation that lost a member; its lease is not finished
    wants_next: bool = False  # reply also with the lease that follows


class TaskRequest(ServerRequest, frozen=True):
    """Shard 0: queues a task ("evaluate", "save") for the next worker that asks for a step."""

    task: str


class EndRequest(ServerRequest, frozen=True):
    """Shard 0: ends the run (target reached, error, user's request). `resumable`: the run ends before its last step."""

    reason: str
    resumable: bool = False


class RewindRequest(ServerRequest, frozen=True):
    """Lockstep modes, after a server was lost: restores the snapshot of a step and begins a new generation. `guarded`:
    refused beyond what workers need (rollback.py); the server sets it for clients that are workers."""

    generation: Count
    step: Count
    server_incarnation: Count = 0  # the addressed server process; any other refuses; 0: any
    guarded: bool = False


# -- reads ------------------------------------------------------------------------------------------------------------


class PullRequest(ServerRequest, frozen=True):
    slices: list[TableSlice]


class SquaresRequest(ServerRequest, frozen=True):
    """Sums of squares by row of a step's reduced gradient: for the norm of the full gradient."""

    step: Count
    lanes: Lanes
    spans: list[Span]
    scale: float = 1.0


class TableStateRequest(ServerRequest, frozen=True):
    """The state of a table, for a checkpoint."""

    table: str


class StatusRequest(ServerRequest, frozen=True):
    """The shard's generation, version, step and snapshots."""


class StatsRequest(ServerRequest, frozen=True):
    """The shard's counters."""


class SnapshotRequest(ServerRequest, frozen=True):
    """Writes a snapshot; the reply comes when it is on disk."""


# -- replies ----------------------------------------------------------------------------------------------------------


class ServerReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ChallengeReply(ServerReply, frozen=True):
    """The server's first message on a connection."""

    nonce: bytes
    shard: int
    shards: int
    needs_token: bool


class WelcomeReply(ServerReply, frozen=True):
    shard: int
    shards: int
    server_incarnation: int  # number of this shard's server process: 1, 2, …
    generation: int
    incarnation: int
    sequence: int  # the last write of this incarnation that the shard has applied
    version: int  # updates applied
    step: int  # lockstep: the next step
    tables: list[str]


class AckReply(ServerReply, frozen=True):
    version: int


class ValuesReply(ServerReply, frozen=True):
    version: int
    slices: list[TableSlice]
    step: int = -1  # lockstep: the next step


class LateReply(ServerReply, frozen=True):
    """The requested step closed without this worker. `step`: the current one."""

    step: int


class BarrierReply(ServerReply, frozen=True):
    """The workers of the barrier, rising; by worker its note and its number of the tensors that follow."""

    step: int
    workers: list[int]
    notes: list[bytes]
    tensor_counts: list[int]


class LeaseReply(ServerReply, frozen=True):
    lease: int
    generation: int = 0  # of the group: rises when its members change
    members: tuple[int, ...] = ()  # of the worker's group, rising
    steps_done: int = 0
    next_lease: int = -1  # reserved for the group, until an idle one takes it; -1: none


class TaskReply(ServerReply, frozen=True):
    task: str
    steps_done: int


class EndReply(ServerReply, frozen=True):
    reason: str  # empty: every step is done
    resumable: bool
    steps_done: int


class TableStateReply(ServerReply, frozen=True):
    """The optimizer's state of a dense table, or all of a sparse table."""

    names: list[str]  # of the tensors that follow
    values: dict[str, Any]  # scheduler and counters


class StatusReply(ServerReply, frozen=True):
    server_incarnation: int
    generation: int
    version: int
    step: int
    filled: bool  # every dense table has values
    snapshot_steps: list[int]  # steps that have a snapshot on disk
    progress: dict[str, Any] = {}  # of the step coordinator
    needs_rewind: bool = False  # the server process restarted, and the shard was not rewound since
    start_step: int = 0  # the job's step that the run started from
    inexact: str = ""  # the sync mode of the steps before that, if it was not exact


class StatsReply(ServerReply, frozen=True):
    """Counters since the shard was first started."""

    version: int
    updates: int
    duplicates: int
    refused: dict[str, int]  # code -> count
    staleness: dict[int, int]  # versions between base version and push -> pushes
    bytes_in: int
    bytes_out: int
    rows: dict[str, int]  # sparse table -> rows held
    loads: dict[str, list[float]]  # table -> accesses, by key or by range of rows
    busy_seconds: float
    evicted: dict[str, int] = {}  # sparse table -> rows evicted
    hot_rows: dict[str, list[tuple[int, float]]] = {}  # sparse table -> most requested rows, share of requests


class RefusedReply(ServerReply, frozen=True):
    code: str  # one word, for programs
    reason: str
    fix: str = ""  # what to change


WRITES = (
    DeclareRequest, PutRequest, PushRequest, ContributeRequest, ApplyRequest, BarrierRequest, LeaseRequest,
    TaskRequest, EndRequest, RewindRequest,
)  # fmt: skip
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
decode_request = guarded(msgspec.msgpack.Decoder[AnyRequest](AnyRequest).decode)
decode_reply = guarded(msgspec.msgpack.Decoder[AnyReply](AnyReply).decode)
