"""The worker's side: with real processes."""

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.command import forked
from helpers.odd_server import Answer, Odd
from shoal.errors import InputError, RunError
from shoal.paramserver.client import (
    ClientNotice,
    ParameterClient,
    RefusedError,
    ServerAwayNotice,
    ServerUnreachable,
    WritesLostNotice,
)
from shoal.paramserver.local_servers import LocalServers, connect
from shoal.paramserver.messages import (
    AckReply,
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PutRequest,
    ServerRequest,
    SnapshotRequest,
    SparseSpec,
    StatsRequest,
    StatusRequest,
    TableSlice,
)
from shoal.paramserver.server import ParameterServer
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.snapshot import SnapshotFolder
from shoal.transport.owned_folder import remove_orphans

# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one process", "unix", "tcp"])
def client(request: pytest.FixtureRequest) -> Iterator[ParameterClient]:
    """Of two shards, reached in every way."""
    if request.param == "one process":
        with ParameterClient([ParameterShard(shard=shard, shards=2) for shard in range(2)]) as found:
            yield found
        return
    addresses = ["tcp://127.0.0.1:0"] * 2 if request.param == "tcp" else None
    with LocalServers(2, addresses=addresses) as servers, ParameterClient(servers.addresses[::-1]) as found:
        yield found


def test_push_pull_and_wait(client: ParameterClient) -> None:
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 3))
    half = {"half": torch.ones(70, 3, dtype=torch.float64), "number": torch.tensor(5.0)}
    values = dict(model.named_parameters()) | half
    before = {name: value.detach().clone() for name, value in values.items()}
    table = client.dense("model", values, optimizer="sgd", lr=0.5)
    gradients: dict[str, Tensor | None] = {
        name: torch.randint(-3, 4, value.shape).to(value.dtype) for name, value in before.items()
    }
    gradients["1.bias"] = None
    kept = {name: None if value is None else value.clone() for name, value in gradients.items()}
    pushed = table.push(gradients)
    for gradient in gradients.values():
        if gradient is not None:
            gradient.fill_(100)  # packed when it was pushed
    pushed.wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    found = table.pull(values).wait()
    assert found["0.weight"].data_ptr() == model[0].weight.data_ptr(), "written where it was wanted"
    for name, value in before.items():
        step = kept[name]
        assert torch.equal(values[name].detach(), value if step is None else value - 0.5 * step)
    some = table.pull({"half": torch.empty(70, 3, dtype=torch.float64)}).wait()
    assert list(some) == ["half"] and torch.equal(some["half"], values["half"])
    new = {name: torch.empty_like(value) for name, value in before.items()}
    version = table.push({"number": torch.tensor(2.0)}, pull_into=new).wait()
    assert new["number"] == values["number"] - 1 and torch.equal(new["0.weight"], values["0.weight"].detach())
    assert version == max(table.versions)
    table.put({"number": torch.tensor(9.0)}).wait()
    assert table.pull().wait()["number"] == 9
    second = client.dense("model", {name: torch.zeros_like(value) for name, value in before.items()}, lr=0.5)
    assert second.pull().wait()["number"] == 9, "whoever comes second takes what there is"


def test_rows_of_any_shape_and_repeated(client: ParameterClient) -> None:
    spec = SparseSpec(rows=10_000, dim=8, optimizer="sgd", settings={"lr": 1.0}, scale=0.0)
    table = client.sparse("rows", spec)
    ids = torch.tensor([[7, 2, 7], [9_999, 0, 2]])
    gradients = torch.arange(6.0).view(2, 3, 1).expand(2, 3, 8)
    table.push(ids, gradients).wait()
    rows = table.pull(ids).wait()
    assert rows.shape == (2, 3, 8)
    assert rows[..., 0].tolist() == [[-2, -6, -2], [-3, -4, -6]]
    assert table.pull(torch.empty(0, 4, dtype=torch.int64)).wait().shape == (0, 4, 8)
    many = torch.randint(0, 10_000, (3000,), generator=torch.Generator().manual_seed(1))
    table.push(many, torch.ones(3000, 8)).wait()
    found = table.pull(torch.arange(10_000)).wait()[:, 3]
    expected = -torch.bincount(many, minlength=10_000).float()
    expected[ids.view(-1).unique()] -= torch.tensor([4.0, 6.0, 2.0, 3.0])
    assert torch.equal(found, expected)


# -- connecting --------------------------------------------------------------------------------------------------------


def test_a_token_opens_and_nothing_else_does() -> None:
    with LocalServers(1, token="secret") as servers:
        with pytest.raises(InputError, match="needs a token, and this client has none"):
            ParameterClient(servers.addresses)
        with pytest.raises(RefusedError, match="a wrong token"):
            ParameterClient(servers.addresses, token="guess")
        with ParameterClient(servers.addresses, token="secret") as client:
            assert client.request(0, StatusRequest()).wait()[0].version == 0


def test_the_environment_says_where_servers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="SHOAL_SERVERS is not set"):
        connect()
    with LocalServers(2) as servers:
        monkeypatch.setenv("SHOAL_SERVERS", ", ".join(servers.addresses))
        monkeypatch.setenv("RANK", "3")
        with connect() as client:
            assert (client.shards, client.client_id.worker) == (2, 3)
        monkeypatch.setenv("RANK", "x")
        with pytest.raises(InputError, match="RANK is 'x'"):
            connect()


def test_a_folder_is_served_by_one_process(tmp_path: Path) -> None:
    with LocalServers(1, folder=tmp_path) as servers:
        served = f"shard 0 is already served by process {servers.pids[0]}"
        with pytest.raises(InputError, match=served):
            LocalServers(1, folder=tmp_path)


# -- servers that go away ----------------------------------------------------------------------------------------------


def counters(client: ParameterClient, number: int = 4) -> Any:
    """A table that counts: gradients of 1, learning rate 1."""
    return client.dense("count", {str(each): torch.zeros(2000) for each in range(number)}, lr=1.0)


def counted(table: Any) -> int:
    values = {int(value) for tensor in table.pull().wait().values() for value in -tensor}
    assert len(values) == 1, "all of a push, or nothing"
    return values.pop()


def test_a_server_that_is_killed_goes_on_from_its_snapshot_and_says_what_is_lost(tmp_path: Path) -> None:
    notices: list[ClientNotice] = []
    ones = [torch.ones(2000)] * 4
    with (
        LocalServers(1, folder=tmp_path) as servers,
        ParameterClient(servers.addresses, notify=notices.append) as client,
    ):
        table = counters(client)
        for _ in range(5):
            table.push(ones).wait()
        client.request(0, SnapshotRequest()).wait()
        for _ in range(3):
            table.push(ones).wait()
        servers.kill(0)
        waiting = [table.push(ones) for _ in range(2)]  # nobody is there
        assert not waiting[0].done()
        servers.restart(0)
        for future in waiting:
            future.wait()
        assert counted(table) == 5 + 2
        assert client.lost_writes == 3
        assert client.server_incarnations == [2]
        assert [notice for notice in notices if isinstance(notice, WritesLostNotice)] == [
            WritesLostNotice(0, 3, pushes=3)
        ]
        away = [notice for notice in notices if isinstance(notice, ServerAwayNotice)]
        assert [notice.seconds is None for notice in away] == [True, False]
        assert away[0].address == servers.addresses[0]
        assert table.push(ones).wait() and counted(table) == 8, "the numbers go on"


def test_pushes_through_kills_are_applied_once_each(tmp_path: Path) -> None:
    """Small whole numbers make a lost or doubled push arithmetic."""
    with LocalServers(2, folder=tmp_path) as servers, ParameterClient(servers.addresses) as client:
        table = counters(client)
        ones = [torch.ones(2000)] * 4
        for turn in range(3):
            futures = [table.push(ones) for _ in range(10)]
            for shard in range(2):
                client.request(shard, SnapshotRequest()).wait()
            futures += [table.push(ones) for _ in range(10)]
            servers.restart(turn % 2)
            for future in futures:
                future.wait()
        done = 0
        for shard, parts in enumerate(table.ranges):
            stats = client.request(shard, StatsRequest()).wait()[0]
            done += stats.updates
            assert parts
        assert done == 2 * 60 - client.lost_writes
        values = table.pull().wait()
        assert sum(-int(value[0]) for value in values.values()) == 2 * done


def test_a_broken_connection_changes_nothing() -> None:
    with LocalServers(1) as servers, ParameterClient(servers.addresses) as client:
        table = counters(client)
        futures = []
        for turn in range(30):
            futures.append(table.push([torch.ones(2000)] * 4))
            if turn % 7 == 3:
                client._links[0].transport._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            if turn % 5 == 0:
                futures[-1].wait()
        assert sorted(future.wait() for future in futures) == list(range(1, 31))
        assert counted(table) == 30
        assert client.lost_writes == 0


def test_a_server_that_stays_away_is_named_and_so_is_its_shard() -> None:
    notices: list[ClientNotice] = []
    with LocalServers(2) as servers, ParameterClient(servers.addresses, timeout=0.2, notify=notices.append) as client:
        servers.kill(1)
        with pytest.raises(ServerUnreachable, match=f"shard 1 at {servers.addresses[1]} cannot be reached since"):
            client.request(1, StatusRequest()).wait()
        assert notices == [ServerAwayNotice(1, servers.addresses[1])]
        with pytest.raises(ServerUnreachable):
            client.request(1, StatusRequest())
        assert client.request(0, StatusRequest()).wait()[0].server_incarnation == 1, "the others are still there"


def test_a_server_that_is_stopped_is_noticed() -> None:
    with LocalServers(1) as servers, ParameterClient(servers.addresses, timeout=0.4) as client:
        os.kill(servers.pids[0], signal.SIGSTOP)
        try:
            with pytest.raises(ServerUnreachable, match=r"no reply from it|does not answer"):
                client.request(0, StatsRequest()).wait()
        finally:
            os.kill(servers.pids[0], signal.SIGCONT)


def test_an_answer_that_takes_long_is_waited_for() -> None:
    """An order that is parked is no sign of death, as long as the server answers when it is asked whether it lives."""
    notices: list[ClientNotice] = []

    def made(shard: int, shards: int, boot: int) -> Odd:
        odd = Odd(shard, shards)
        odd.answer = lambda who, tag, sequence, request: [] if sequence else [Answer(who, tag, AckReply(1))]
        return odd

    with (
        LocalServers(1, make_shard=made) as servers,
        ParameterClient(servers.addresses, timeout=0.1, notify=notices.append) as client,
    ):
        with pytest.raises(RunError, match=r"no reply within 0\.4 s: PutRequest by shard 0"):
            client.request(0, PutRequest([])).wait(0.4)
        assert client.request(0, StatusRequest()).wait()[0] == AckReply(1)
    assert notices == []


def test_servers_end_with_their_parent() -> None:
    heard, told = os.pipe()

    def play() -> None:
        servers = LocalServers(2)
        os.write(told, f"{servers.pids[0]} {servers.pids[1]} {servers.addresses[0]}".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(play), 0)
    os.close(told)
    first, second, address = os.read(heard, 1000).decode().split()
    os.close(heard)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/stat").exists() for pid in (first, second)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))
    remove_orphans()  # as the next run does
    assert not Path(address.removeprefix("unix:")).parent.exists()


def test_snapshots_are_written_now_and_then_by_themselves(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "kept") as snapshots:
        shard = ParameterShard()
        server = ParameterServer(shard, [f"unix:{tmp_path}/s"], snapshots=snapshots, snapshot_seconds=0.0)
        with ParameterClient([shard]) as client:
            client.dense("w", {"a": torch.zeros(3)}, lr=1.0).push([torch.ones(3)]).wait()
        deadline = time.monotonic() + 20
        while snapshots.newest() is None and time.monotonic() < deadline:
            server.poll_once(0.01)
        server.close()
        found = snapshots.newest()
        assert found is not None and found.version == 1


def test_a_large_table_gets_the_memory_that_it_needs() -> None:
    with LocalServers(1, ring_bytes=1 << 20) as servers, ParameterClient(servers.addresses) as client:
        writer = client._links[0].transport.writer  # type: ignore[union-attr]
        assert writer is not None and writer.size == 1 << 20
        table = client.dense("large", {"a": torch.zeros(1 << 20)}, lr=1.0)
        grown = client._links[0].transport.writer  # type: ignore[union-attr]
        assert grown is not None and grown.size >= 8 << 20
        for _ in range(4):
            table.push([torch.ones(1 << 20)]).wait()
        assert table.pull().wait()["a"].sum() == -4 << 20
        servers.restart(0)
        with pytest.raises(RefusedError, match="no table"):  # it had no folder to remember in
            table.push([torch.ones(1 << 20)]).wait()


def test_memory_grows_with_what_is_asked_for_and_with_what_comes() -> None:
    spec = DenseSpec(names=["a"], shapes=[[1 << 20]], dtypes=["float32"], optimizer="none")
    with LocalServers(1, ring_bytes=1 << 20) as servers, ParameterClient(servers.addresses) as client:
        sizes = []

        def ask(request: ServerRequest, tensors: Sequence[Tensor] = ()) -> list[Tensor]:
            found = client.request(0, request, tensors).wait()[1]
            sizes.append(client._links[0].transport.writer.size >> 20)  # type: ignore[union-attr]
            return found

        ask(DeclareRequest("w", spec))
        ask(PutRequest([TableSlice("w")], fill=True), [torch.ones(1 << 20)])
        assert ask(PullRequest([TableSlice("w")]))[0].sum() == 1 << 20
        assert sizes == [1, 8, 8]
        with ParameterClient(servers.addresses, worker=1) as reader:
            for expected in (1, 8):  # the first answer shows how large they are
                assert reader.request(0, PullRequest([TableSlice("w")])).wait()[1][0].sum() == 1 << 20
                assert reader._links[0].transport.writer.size >> 20 == expected  # type: ignore[union-attr]
