"""Parsers of what comes from the network, for tests/fuzz: messages of the store, of servers, of ranks and drivers."""

import random
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from helpers.fuzz_key_values import key_value_stream, take_key_values
from helpers.fuzz_ranks import (
    open_sealed,
    packed_floats,
    receive_tensors,
    sealed_stream,
    tensor_messages,
    unpack_floats,
)
from helpers.fuzzing import FuzzTarget, changed_tree, msgpack_bytes, plain, resealed_frame
from shoal.collectives import liveness
from shoal.collectives.compression.parse import parse_compressor
from shoal.collectives.float_packing import PackingDamaged
from shoal.driver.launchers.channels import parse_greeting
from shoal.driver.launchers.fork_server import ForkServerReply, StartOrder
from shoal.errors import MismatchError, RunError
from shoal.paramserver import messages
from shoal.paramserver.dispatcher import ClientConnection, RequestDispatcher
from shoal.paramserver.local_transport import LocalReplyTransport
from shoal.paramserver.request_checks import TableLimits
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.recovery.membership import etcd, sqlite_messages
from shoal.recovery.membership.heartbeat import MembershipState, RunRequest
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.protocol import MemberPosition, MembershipView, WorkerId
from shoal.recovery.membership.sqlite_records import StoreRecords
from shoal.recovery.membership.sqlite_server import StoreConnection, StoreServer
from shoal.recovery.membership.store import StoreEntry, StoreSnapshot
from shoal.recovery.membership.store_door import StoreDoor
from shoal.recovery.membership.store_rights import hello
from shoal.report import events
from shoal.transport.decoding import decode_json
from shoal.transport.frame_format import DTYPES, REPLY, REQUEST, BadFrame, Frame, FrameLimits, pack_prefix, packed_body
from shoal.transport.frame_socket import ConnectionLost, SocketTransport
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.key_value_records import KeyValueRecords
from shoal.transport.key_value_wire import MAGIC, KeyValueParser, KeyValueQuery, KeyValueRequest, encode_request

UNREADABLE = (msgspec.DecodeError,)
TOKEN = "0123456789abcdef"

# -- the embedded store -----------------------------------------------------------------------------------------------

STORE_REQUESTS: list[sqlite_messages.StoreRequest] = [
    hello(TOKEN, Role.WORKER),
    sqlite_messages.StoreRead("alive/"),
    sqlite_messages.StoreSwap("view", b"{}", 0, None),
    sqlite_messages.StoreSwap("view", None, 2, None),
    sqlite_messages.StorePut("position/1/0.0", b"\x00\xff", 1 << 61),
    sqlite_messages.StoreGrant(5.0),
    sqlite_messages.StoreRenew(1 << 61),
    sqlite_messages.StoreRevoke(1 << 61),
    sqlite_messages.StoreWait("", 0, 0.25),
]
STORE_REPLIES = [
    sqlite_messages.StoreReply(revision=7, entries={"view": (b"{}", 3), "alive/0.0": (b"", 4)}),
    sqlite_messages.StoreReply(error="full", rejected=3),
    sqlite_messages.StoreReply(lease_ended=True),
]


class ServedStore:
    """A server without a listener: each case is a connection, whose bytes are all there."""

    def __init__(self) -> None:
        self._server: StoreServer | None = None
        self._cases = 0

    def feed(self, data: bytes) -> None:
        server = self._serve()
        server.rejected.clear()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with suppress(BlockingIOError):
            ours.send(data)
        theirs.setblocking(False)
        connection = StoreConnection(theirs, time.monotonic(), role=Role.WORKER if len(data) % 2 == 0 else None)
        server._connections.add(connection)
        server._selector.register(theirs.fileno(), 1, connection)
        try:
            for _ in range(3):
                server._handle_events(connection, 1)
            server._answer_waiting(time.monotonic() + 2e6)
            unexpected = server.rejected.keys() - {
                "DecodeError",
                "ValidationError",
                "StoreConnectionRejected",
                "refused",
            }
            assert not unexpected, unexpected
        finally:
            if connection in server._connections:
                server._drop(connection)
            ours.close()

    def _serve(self) -> StoreServer:
        self._cases += 1
        if self._server is None or self._cases % 500 == 0:
            listener = socket.socket()
            self.close()
            self._server = StoreServer(StoreDoor(listener, TOKEN), StoreRecords(Path(":memory:"), 0.0), 60.0, 100)
            self._listener = listener
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server._selector.close()
            self._server._records.close()
            self._listener.close()
            self._server = None


def store_stream(chance: random.Random) -> bytes:
    """Requests with their lengths."""
    bodies = [msgpack_bytes(changed_tree(chance, plain(chance.choice(STORE_REQUESTS)))) for _ in range(3)]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


def as_store_records(data: bytes) -> None:
    """One value in the place of each record that workers and drivers read."""
    for key in ("view", "alive/0.0", "position/0/0.0", "request", "rendezvous/0", "committed", "why"):
        with suppress(RunError):
            MembershipState(StoreSnapshot(1, {key: StoreEntry(data, 1)}, "here"))


WHO = WorkerId(1, 2)
STORE_RECORDS: list[Any] = [
    MembershipView(generation=3, members=(WHO,), step=7, reason="begins", removed={1: 1}),
    WorkerProcess(worker_id=WHO, pid=7, started="1", host="h", host_name="h"),
    MemberPosition(worker_id=WHO, committed=7, passes=1),
    RunRequest(stop=True, workers=3, failed="x"),
]
ETCD_REPLIES: list[Any] = [
    {"header": {"revision": "7"}, "kvs": [{"key": "c2hvYWwvcnVuL3ZpZXc=", "value": "e30=", "mod_revision": "3"}]},
    {"header": {"revision": "7"}, "succeeded": True, "ID": "99", "TTL": "5", "token": "x"},
    {"result": {"header": {"revision": "7"}, "events": [{}], "canceled": False}, "error": None},
    {"error": "no lease", "code": 5},
]


class EtcdReplies(etcd.EtcdStore):
    def __init__(self) -> None:
        super().__init__("etcd://one", "run")

    def feed(self, data: bytes) -> None:
        with suppress(*UNREADABLE):
            self._snapshot(etcd.decode_response(data))
        with suppress(*UNREADABLE):
            etcd._decode_failure(data)
        with suppress(OSError, *UNREADABLE):
            etcd._decode_chunk(data)


def key_value_messages(chance: random.Random) -> bytes:
    found = []
    for _ in range(chance.randrange(1, 5)):
        query, key, value = chance.choice(list(KeyValueQuery)), chance.choice((b"a", b"b", b"")), chance.randbytes(3)
        number = MAGIC if query is KeyValueQuery.VALIDATE else chance.choice((0, 1, 7))
        values = (value, b"7") if query is KeyValueQuery.COMPARE_SET else (value,)
        found.append(encode_request(KeyValueRequest(query, (key,), values, number)))
    return b"".join(found)


def answer_key_values(data: bytes) -> None:
    """In two portions, with little room: as one client of a rendezvous."""
    parser, records = KeyValueParser(1 << 16), KeyValueRecords(1 << 16)
    for portion in (data[: len(data) // 2], data[len(data) // 2 :]):
        for request in parser.feed(portion):
            if request.query not in (KeyValueQuery.WAIT, KeyValueQuery.VALIDATE, KeyValueQuery.CANCEL_WAIT):
                records.answer(request)
            assert records.num_bytes <= 1 << 16


# -- frames -----------------------------------------------------------------------------------------------------------


def frame_bytes(chance: random.Random) -> bytes:
    tensors = []
    for _ in range(chance.choice((0, 0, 1, 2, 5))):
        shape = [chance.choice((0, 1, 3, 8)) for _ in range(chance.choice((0, 1, 2, 4)))]
        tensors.append(torch.zeros(shape, dtype=chance.choice(DTYPES)))
    meta = messages.encode(chance.choice(SERVER_REQUESTS))
    worker, incarnation, sequence, tag, generation = (chance.choice((0, 1, (1 << 63) - 1)) for _ in range(5))
    kind = chance.choice((REQUEST, REPLY))
    made = Frame(kind, worker, incarnation, sequence, tag, generation, meta, tensors)
    return (pack_prefix(made) + packed_body(tensors)) * chance.choice((1, 1, 2))


def receive_frames(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    transport = SocketTransport(theirs, limits=FrameLimits(body_bytes=1 << 24))
    try:
        ours.setblocking(False)
        with suppress(BlockingIOError):
            ours.send(data)
        for _ in range(6):
            frame = transport.receive()
            if frame is not None:
                frame.release()
    finally:
        transport.close()
        ours.close()


# -- parameter servers ------------------------------------------------------------------------------------------------

SLICE, ROWS = messages.TableSlice("dense"), messages.TableSlice("rows", sparse=True)
SERVER_REQUESTS: list[messages.ServerRequest] = [
    messages.HelloRequest(0, 1, b"", True, 1 << 16),
    messages.DeclareRequest("t", messages.DenseSpec(["w", "b"], [[4, 3], [3]], ["float32", "bfloat16"], "adam")),
    messages.DeclareRequest("t", messages.DenseSpec(["w"], [[]], ["float64"], "sgd", {"lr": 0.1}, [2.0])),
    messages.DeclareRequest("s", messages.SparseSpec(100, 4, evict_age=3, evict_least=1, capacity=10)),
    messages.DeclareRequest("s", messages.SparseSpec(1 << 40, 2, "float64", optimizer="adam", settings={"lr": 0.1})),
    messages.PutRequest([SLICE]),
    messages.PutRequest([messages.TableSlice("dense", (0,))], fill=True),
    messages.PutRequest([], state={"start_from": [2, [3], "", 1, ""]}),
    messages.PutRequest([], state={"table": "dense", "names": ["w\tstep"], "steps": {"w\tstep": [1.0, "float32"]}}),
    messages.PutRequest([], state={"table": "dense", "names": [], "groups": [{"lr": 0.1}], "scheduler": {"a": 1}}),
    messages.PushRequest([SLICE], 3, 0, True, True),
    messages.PushRequest([ROWS], 4, 0, False, False),
    messages.PushRequest([messages.TableSlice("dense", codec="int8", count=128)]),
    messages.PushRequest([messages.TableSlice("rows", sparse=True, codec="topk:0.5", count=8)]),
    messages.ContributeRequest(0, (0, 2), [SLICE]),
    messages.ContributeRequest(0, (2, 4), [ROWS]),
    messages.ApplyRequest(0, 4, [(0, 2), (2, 4)], 0.5, 1.0, 2.0),
    messages.ApplyRequest(0, 4, [(0, 2)], skip=True, snapshot=True, put=[SLICE]),
    messages.BarrierRequest(0, b"note"),
    messages.LeaseRequest(0, 3, b"note", -1, True),
    messages.TaskRequest("save"),
    messages.EndRequest("enough", True),
    messages.RewindRequest(1, 0, 1),
    messages.PullRequest([SLICE, ROWS]),
    messages.PullRequest([messages.TableSlice("dense", (1,), span=(0, 2))]),
    messages.SquaresRequest(0, 4, [(0, 2), (2, 4)]),
    messages.TableStateRequest("rows"),
    messages.StatusRequest(),
    messages.StatsRequest(),
    messages.SnapshotRequest(),
]
SERVER_REPLIES: list[messages.ServerReply] = [
    messages.ChallengeReply(b"n" * 32, 0, 2, True),
    messages.WelcomeReply(0, 1, 1, 0, 7, 3, 2, 1, ["dense"]),
    messages.ValuesReply(3, [SLICE, ROWS], 4),
    messages.BarrierReply(3, [0, 1], [b"a", b"b"], [0, 2]),
    messages.LeaseReply(3, 1, (0, 1), 2, 4),
    messages.TableStateReply(["w"], {"groups": [{"lr": 0.1}]}),
    messages.StatusReply(1, 0, 3, 4, True, [1, 2], {"done": 3}),
    messages.StatsReply(1, 2, 3, {"late": 1}, {0: 3}, 4, 5, {"rows": 6}, {"dense": [1.0]}, 0.5),
    messages.RefusedReply("limit", "too much", "less"),
    messages.EndReply("", False, 7),
]
LIMITS = TableLimits(tables=16, dense_bytes=1 << 22, row_bytes=1 << 12, reply_bytes=1 << 20)
# What a request may raise within the shard: a state that no optimizer of torch takes is refused only when it is used,
# be it by a contribution for which an update has waited.
FAILED_STATES = ("PutRequest", "PushRequest", "ContributeRequest", "ApplyRequest", "TableStateRequest")


class ServedShard:
    """A shard behind its dispatcher, which gets one request after the other, with tensors that often fit."""

    def __init__(self) -> None:
        self._cases = 0
        self._start("sync")

    def _start(self, mode: str) -> None:
        shard = ParameterShard(coordinator=StepCoordinator(SyncMode.parse(mode), 2, 10), limits=LIMITS)
        self.shard, self.dispatcher = shard, RequestDispatcher(shard)
        self.connection = ClientConnection(_Taken(), "fuzz")
        self.sequence = 0
        self.say(messages.HelloRequest(0, 1))
        self.say(messages.DeclareRequest("dense", messages.DenseSpec(["w", "b"], [[4], [3]], ["float32"] * 2, "adam")))
        self.say(messages.DeclareRequest("rows", messages.SparseSpec(100, 4, evict_age=3)))
        self.say(messages.PutRequest([SLICE]), [torch.zeros(128)])

    def say(self, request: messages.ServerRequest, tensors: Any = ()) -> None:
        self.feed_meta(messages.encode(request), tensors)

    def feed(self, data: bytes) -> None:
        self._cases += 1
        if self._cases % 100 == 0 or self.shard.step or self.shard.generation or self.connection.client is None:
            self._start(("sync", "async", "stale:1", "groups:2", "quorum:1", "local:2")[self._cases // 100 % 6])
        self.feed_meta(data, _tensors_for(data))

    def feed_meta(self, meta: bytes, tensors: Any) -> None:
        kind = _request_kind(meta)
        writes = kind in {each.__name__ for each in messages.WRITES}
        self.sequence = self.sequence + 1 if writes else self.sequence
        number = self.sequence if writes else 0
        taken = self.connection.transport
        assert isinstance(taken, _Taken)
        taken.codes.clear()
        frame = Frame(REQUEST, 0, 1, number, 7, self.shard.generation, meta, tensors)
        self.dispatcher.dispatch(self.connection, frame)
        if self.shard.snapshot_due:
            self.shard.snapshot_begun()
            self.shard.capture()
            self.dispatcher.send_replies(self.shard.snapshot_done([0]))
        if kind not in FAILED_STATES:
            assert "failed" not in taken.codes, taken.codes


class _Taken(LocalReplyTransport):
    """Packs every reply as a socket would, and keeps the codes of refusals."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: dict[str, str] = {}

    def send(self, frame: Frame) -> None:
        pack_prefix(frame)
        reply = messages.decode_reply(frame.meta)
        if isinstance(reply, messages.RefusedReply):
            self.codes[reply.code] = reply.reason

    def close(self) -> None: ...


def _request_kind(meta: bytes) -> str:
    with suppress(*UNREADABLE):
        return type(messages.decode_request(meta)).__name__
    return ""


def _tensors_for(meta: bytes) -> list[torch.Tensor]:
    """Tensors for the slices of a request; of every eighth one too many, or of another kind."""
    try:
        request = messages.decode_request(meta)
    except msgspec.DecodeError:
        return []
    chance = random.Random(len(meta) * 31 + meta[-1])
    found: list[torch.Tensor] = []
    for each in (getattr(request, "slices", None) or getattr(request, "put", None) or [])[:20]:
        if each.sparse:
            found.append(torch.tensor(sorted(chance.sample(range(100), 2))))
            if isinstance(request, messages.PushRequest | messages.ContributeRequest):
                found.append(torch.zeros(2, 4))
        else:
            found.append(torch.zeros(128 if each.keys is None else 64 * len(each.keys[:20])))
    if isinstance(request, messages.PutRequest) and request.state:
        names = request.state.get("names")
        found += [torch.zeros(4)] * min(20, len(names) if isinstance(names, list) else 0)
    if chance.random() < 0.12:
        odd = (
            torch.zeros(0, 3),
            torch.tensor([5, 3]),
            torch.full((128,), torch.nan),
            torch.zeros(8, dtype=torch.uint8),
        )
        found.append(chance.choice(odd))
        chance.shuffle(found)
    return found


# -- ranks, drivers, workers ------------------------------------------------------------------------------------------

PEER_MESSAGES: list[Any] = [
    liveness.PeerStatus(sequence=7, finished=False, records=((6, b"all_reduce"),), history_crc=1, failed="x")
]
ORDERS: list[Any] = [StartOrder(process=WHO, environment={"A": "b"}, log="/log", cores=[0, 1], host="h")]
FORKED: list[Any] = [[ForkServerReply(process=WHO, pid=7), ForkServerReply(process=WHO, code=-9)]]
EVENTS: list[Any] = [
    events.RunFinished(outcome="done"),
    events.WorkerPrinted(rank=1, text="hello"),
    events.TrainingNote(text="a note"),
    events.ServerReported(shard=0, version=3, updates=3, refused={"late": 1}, staleness={0: 3}),
    events.ServerOutage(rank=0, shard=1, address="unix:x", seconds=1.5),
    events.StoreOutage(rank=None, address="etcd://one", seconds=None),
]
COMPRESSORS = ("bf16", "fp16", "int8", "int4", "onebit", "topk:0.1", "topk:1%", "powersgd:2", "int8+feedback")


def payload(chance: random.Random) -> bytes:
    """A compressor, a number of elements, and a payload of about the right length."""
    name, count = chance.choice(COMPRESSORS), chance.choice((0, 1, 2, 255, 256, 257, 1000))
    made = parse_compressor(name).encode(torch.randn(count), "key")
    return bytes([COMPRESSORS.index(name)]) + count.to_bytes(2, "big") + made.numpy().tobytes()


def decompress(data: bytes) -> None:
    if len(data) < 3:
        return
    count, body = int.from_bytes(data[1:3], "big"), bytearray(data[3:])
    wire = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
    found = parse_compressor(COMPRESSORS[data[0] % len(COMPRESSORS)]).decode(wire, count)
    assert found.shape == (count,)


def targets() -> list[FuzzTarget]:
    store, shard, replies = ServedStore(), ServedShard(), EtcdReplies()

    def one_of(values: list[Any]) -> Any:
        return lambda chance: plain(chance.choice(values))

    return [
        FuzzTarget("store_request", sqlite_messages.decode_request, one_of(STORE_REQUESTS), UNREADABLE, "msgpack"),
        FuzzTarget("store_server", store.feed, store_stream, (), cost=4),
        FuzzTarget("store_reply", sqlite_messages.decode_reply, one_of(STORE_REPLIES), UNREADABLE, "msgpack"),
        FuzzTarget("store_records", as_store_records, one_of(STORE_RECORDS), (), "json", cost=2),
        FuzzTarget("etcd_reply", replies.feed, one_of(ETCD_REPLIES), (), "json"),
        FuzzTarget("key_value", answer_key_values, key_value_messages, (ValueError,)),
        FuzzTarget("frame", receive_frames, frame_bytes, (BadFrame, ConnectionLost), cost=4, seal=resealed_frame),
        FuzzTarget("sealed", open_sealed, sealed_stream, (PeerRefused, ConnectionResetError), cost=2),
        FuzzTarget("tensor_stream", receive_tensors, tensor_messages, (), cost=2),
        FuzzTarget("packed_floats", unpack_floats, packed_floats, (PackingDamaged,), cost=4),
        FuzzTarget("server_request", shard.feed, one_of(SERVER_REQUESTS), (BadFrame,), "msgpack", cost=4),
        FuzzTarget("server_reply", messages.decode_reply, one_of(SERVER_REPLIES), UNREADABLE, "msgpack"),
        FuzzTarget("peer_message", liveness._decode, one_of(PEER_MESSAGES), UNREADABLE, "msgpack"),
        FuzzTarget("fork_order", lambda data: decode_json(data, StartOrder), one_of(ORDERS), UNREADABLE, "json"),
        FuzzTarget(
            "fork_reply", lambda data: decode_json(data, list[ForkServerReply]), one_of(FORKED), UNREADABLE, "json"
        ),
        FuzzTarget("event", events.decode, one_of(EVENTS), UNREADABLE, "json"),
        FuzzTarget("greeting", parse_greeting, lambda chance: b"%d.%d" % (chance.randrange(9), 3), (ValueError,)),
        FuzzTarget("key_values", take_key_values, key_value_stream, (ValueError,)),
        FuzzTarget("compressed", decompress, payload, (MismatchError, RuntimeError, IndexError), cost=4),
    ]
