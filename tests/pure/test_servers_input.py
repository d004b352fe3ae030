"""What an admitted client may send to a parameter server: nothing ends it, and nothing makes it take much memory."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.server_guests import Guest, turns
from shoal.paramserver import messages
from shoal.paramserver import server as server_module
from shoal.paramserver.messages import (
    AckReply,
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    SparseSpec,
    StatusReply,
    StatusRequest,
    TableSlice,
)
from shoal.paramserver.request_checks import TableLimits
from shoal.paramserver.server import ParameterServer
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.snapshot import SnapshotFolder
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.transport.frame_format import REQUEST, Frame

BIG = 1 << 62


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ParameterServer]:
    shard = ParameterShard(
        coordinator=StepCoordinator(SyncMode.parse("sync"), 2, 10),
        limits=TableLimits(tables=8, dense_bytes=1 << 20, row_bytes=1 << 10, reply_bytes=1 << 16),
    )
    made = ParameterServer(shard, [f"unix:{tmp_path}/shard"])
    yield made
    made.close()


class Writer(Guest):
    """Numbers its writes."""

    sequence = 0

    def ask(self, request: messages.ServerRequest, *tensors: torch.Tensor) -> messages.ServerReply:
        self.sequence += isinstance(request, messages.WRITES)
        number = self.sequence if isinstance(request, messages.WRITES) else 0
        self.stream.send(Frame(REQUEST, self.worker, 1, number, 7, 0, messages.encode(request), tensors))
        return self.hear()


def dense(*shape: int, **more: Any) -> DenseSpec:
    return DenseSpec(["w"], [list(shape)], [more.pop("dtype", "float32")], **more)


REFUSED: dict[str, tuple[messages.ServerRequest, str]] = {
    "sizes that overflow": (DeclareRequest("t", dense(0, BIG, BIG)), "no tensor has the shape"),
    "a product that overflows": (DeclareRequest("t", dense(1 << 31, 1 << 31, 1 << 31)), "no tensor has the shape"),
    "more than there is memory": (DeclareRequest("t", dense(1 << 50)), "this server allows 1,048,576"),
    "many dimensions": (DeclareRequest("t", dense(*[1] * 70)), "no tensor has the shape"),
    "a dtype that cannot be sent": (DeclareRequest("t", dense(4, dtype="quint8")), "no tensor of quint8"),
    "no dtype": (DeclareRequest("t", dense(4, dtype="nn")), "there is no dtype 'nn'"),
    "a setting that is no number": (
        DeclareRequest("t", dense(4, optimizer="sgd", settings={"lr": float("nan")})),
        "lr is a number from 0 on",
    ),
    "long rows": (DeclareRequest("t", SparseSpec(10, BIG)), "a row of table 't' takes"),
    "a start that is none": (PutRequest([], state={"start_from": ["x", [], "", 0, ""]}), "no run starts from there"),
    "a start without fields": (PutRequest([], state={"start_from": 7}), "no run starts from there"),
    "state of no table": (PutRequest([TableSlice("no")], state={"table": "no", "names": []}), "has no table 'no'"),
    "a step far ahead": (messages.ContributeRequest(BIG, (0, 1), []), "is at step 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_and_the_server_goes_on(server: ParameterServer, name: str) -> None:
    guest, (request, reason) = Writer(server), REFUSED[name]
    reply = guest.ask(request)
    assert isinstance(reply, RefusedReply) and reason in reply.reason, reply
    assert isinstance(guest.ask(StatusRequest()), StatusReply)
    guest.close()


NO_MESSAGE: dict[str, list[Any]] = {
    "a rewind beyond the header": ["RewindRequest", 1 << 63, 0],
    "a rewind below zero": ["RewindRequest", -1, 0],
    "endless lanes": ["ApplyRequest", 0, 1 << 40, [[0, 1]]],
    "no lanes": ["SquaresRequest", 0, 0, []],
    "a span below zero": ["ContributeRequest", 0, [-1, 1], []],
    "a lease of 64 bits": ["PushRequest", [], (1 << 64) - 1],
    "a key of 64 bits": ["PullRequest", [["t", [1 << 63]]]],
    "a shape below zero": ["DeclareRequest", "t", {"type": "dense", "names": ["w"], "shapes": [[-1]], "dtypes": ["x"]}],
    "a ring below zero": ["HelloRequest", 0, 1, b"", True, -5],
}


@pytest.mark.parametrize("name", NO_MESSAGE)
def test_numbers_that_no_client_sends_end_its_connection_alone(server: ParameterServer, name: str) -> None:
    good, bad = Writer(server, 1), Guest(server)
    bad.stream.send(Frame(REQUEST, 0, 1, 1, 7, 0, messages.encode(NO_MESSAGE[name]), ()))
    told = bad.hear()
    assert isinstance(told, RefusedReply) and told.code == "bad-frame", told
    assert isinstance(good.ask(StatusRequest()), StatusReply)
    assert server.close_counts == {"bad frame": 1}
    good.close()
    bad.close()


def test_a_read_takes_no_more_than_the_limit(server: ParameterServer) -> None:
    guest = Writer(server)
    assert guest.ask(DeclareRequest("rows", SparseSpec(1 << 40, 256))) == AckReply(0)
    reply = guest.ask(PullRequest([TableSlice("rows", sparse=True)]), torch.arange(100))
    assert isinstance(reply, RefusedReply) and "this server allows 65,536" in reply.reason, reply
    bomb = TableSlice("rows", sparse=True, codec="topk:1e-9", count=100 * 256)
    reply = guest.ask(PushRequest([bomb]), torch.arange(100), torch.zeros(8, dtype=torch.uint8))
    assert isinstance(reply, RefusedReply) and "this server allows 65,536" in reply.reason, reply
    assert guest.ask(DeclareRequest("flat", dense(1 << 14))) == AckReply(0)
    assert guest.ask(PutRequest([TableSlice("flat")]), torch.zeros(1 << 14)) == AckReply(0)
    reply = guest.ask(PullRequest([TableSlice("flat", (0,))] * 50000))
    assert isinstance(reply, RefusedReply) and "a reply of these tables takes" in reply.reason, reply
    guest.close()


def test_tables_and_memory_run_out_one_by_one(server: ParameterServer) -> None:
    guest = Writer(server)
    spec = dense(1 << 17)  # half of what the server allows
    assert [type(guest.ask(DeclareRequest(f"t{number}", spec))) for number in range(3)] == [
        *(AckReply, AckReply, RefusedReply)
    ]
    small = [type(guest.ask(DeclareRequest(f"s{number}", dense()))) for number in range(8)]
    assert small == [RefusedReply] * 8, "not a byte is left"
    rows = [type(guest.ask(DeclareRequest(f"r{number}", SparseSpec(4, 4)))) for number in range(8)]
    assert rows == [AckReply] * 6 + [RefusedReply] * 2
    guest.close()


def test_a_mistake_while_a_frame_is_read_ends_one_connection(
    server: ParameterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Writer(server, 1), Guest(server)
    dispatch = server.dispatcher.dispatch

    def fails(connection: Any, frame: Frame) -> None:
        if frame.worker == 0:
            raise OverflowError("a mistake")
        dispatch(connection, frame)

    monkeypatch.setattr(server.dispatcher, "dispatch", fails)
    bad.say(StatusRequest())
    turns(server, lambda: server.close_counts)
    assert server.close_counts == {"failed": 1} and "a mistake" in server.close_reasons[0]
    assert isinstance(good.ask(StatusRequest()), StatusReply)
    good.close()
    bad.close()


def test_garbage_leaves_no_descriptor_open(server: ParameterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_UNIDENTIFIED", 10)
    guest = Writer(server, 1)
    before = len(os.listdir("/proc/self/fd"))
    chance, path = random.Random(17), server.addresses[0].removeprefix("unix:")
    silent = []
    for number in range(100):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(path)
        silent.append(stranger)
        with suppress(ConnectionError):
            stranger.sendall(chance.randbytes(chance.randrange(4, 300)) if number % 2 else b"SHOL")
        server.poll_once(0.0)
        server.poll_once(0.0)
        assert len(os.listdir("/proc/self/fd")) <= before + len(silent) + 11
    for stranger in silent:
        stranger.close()
    turns(server, lambda: len(os.listdir("/proc/self/fd")) == before)
    assert isinstance(guest.ask(StatusRequest()), StatusReply)
    counts = server.close_counts
    assert counts["refused"] >= 30 and counts["bad frame"] == 50 and counts.total() == 100, counts
    guest.close()


def test_snapshots_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with SnapshotFolder(tmp_path / "shard-0") as folder:
            folder.next_incarnation()
            folder.write(ParameterShard().capture())
        found = {path: path.stat().st_mode & 0o777 for path in sorted((tmp_path / "shard-0").rglob("*"))}
    finally:
        os.umask(before)
    assert len(found) >= 5
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in found.items()), found
