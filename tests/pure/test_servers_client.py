"""The worker's side: numbers and retries as pure code, then tables and futures, then servers that are killed."""

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.command import forked
from shoal.errors import InputError, RunError
from shoal.paramserver import client as client_module
from shoal.paramserver import remote_dense
from shoal.paramserver.client import Away, Client, Lost, Notice, RefusedError, ServerUnreachable
from shoal.paramserver.connections import DIAL_SECONDS, Links
from shoal.paramserver.local_servers import Servers, connect
from shoal.paramserver.messages import (
    Declare,
    DenseSpec,
    Done,
    Hello,
    Keep,
    Pull,
    Push,
    Put,
    Refused,
    Reply,
    Request,
    Slot,
    SparseSpec,
    Standing,
    Stats,
    Welcome,
    Who,
)
from shoal.paramserver.server import Server
from shoal.paramserver.session import Session
from shoal.paramserver.shard import Shard
from shoal.paramserver.snapshot import Snapshots
from shoal.paramserver.transport import listen

# -- numbers and retries, pure -----------------------------------------------------------------------------------------


def asked(*orders: bool) -> Session[str]:
    """Requests "a", "b", …: orders and looks."""
    session: Session[str] = Session()
    session.welcome(1, 0)
    for tag, order in enumerate(orders, 1):
        session.ask(tag, chr(96 + tag), order=order)
    return session


def again(session: Session[str], boot: int, sequence: int) -> tuple[int, list[tuple[str, int]]]:
    renewed = session.welcome(boot, sequence)
    return renewed.lost, [(each.what, each.sequence) for each in renewed.again]


def test_what_has_no_answer_is_sent_again_under_its_number() -> None:
    session = asked(True, True, False, True)
    session.answer(1)
    assert again(session, 1, 2) == (0, [("b", 2), ("c", 0), ("d", 3)])
    assert session.sequence == 3


def test_what_was_answered_and_is_not_there_is_lost_and_the_rest_closes_up() -> None:
    session = asked(True, True, True, True, True)
    session.answer(1)
    session.answer(2)
    assert again(session, 2, 1) == (1, [("c", 2), ("d", 3), ("e", 4)])
    assert (session.sequence, session.lost, session.boot) == (4, 1, 2)
    assert session.ask(6, "f", order=True).sequence == 5


def test_an_unanswered_order_that_the_snapshot_has_keeps_its_number() -> None:
    session = asked(True, True, True)
    session.answer(3)  # the second waits for somebody else
    assert again(session, 2, 2) == (1, [("a", 1), ("b", 2)])
    assert session.ask(4, "d", order=True).sequence == 3


def test_an_answer_counts_once() -> None:
    session = asked(True)
    assert session.answer(1) is not None
    assert session.answer(1) is None
    assert session.answered == 1


@pytest.mark.parametrize("seed", range(30))
def test_every_order_is_applied_once_through_losses_and_restarts(seed: int) -> None:
    """A server that forgets, connections that break: applied = acknowledged - lost, and nothing twice."""
    chance = random.Random(seed)
    session: Session[int] = Session()
    boot, applied, kept = 1, [], []  # the state of a server is the list of orders that it has applied
    line: list[tuple[int, int, int]] = []  # tag, number, order: under way to the server
    answers: list[int] = []
    acknowledged: list[int] = []
    lost = 0
    session.welcome(boot, 0)

    def reconnect() -> None:
        nonlocal lost
        renewed = session.welcome(boot, len(applied))
        lost += renewed.lost
        line[:] = [(each.tag, each.sequence, each.what) for each in renewed.again]
        answers.clear()

    for turn in range(1, 300):
        event = chance.random()
        if event < 0.4:
            each = session.ask(turn, turn, order=True)
            line.append((each.tag, each.sequence, each.what))
        elif event < 0.7 and line:
            tag, number, order = line.pop(0)
            assert number <= len(applied) + 1, "no gaps"
            if number == len(applied) + 1:
                applied.append(order)
            answers.append(tag)
        elif event < 0.9 and answers:
            done = session.answer(answers.pop(0))
            if done is not None:
                acknowledged.append(done.what)
        elif event < 0.93:
            kept = list(applied)
        elif event < 0.97:
            reconnect()
        else:
            boot += 1
            applied = list(kept)
            reconnect()
    assert len(set(applied)) == len(applied)
    assert len([order for order in acknowledged if order not in applied]) <= lost
    assert session.lost == lost


# -- a shard in this process -------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    to: Who
    tag: int
    reply: Reply
    tensors: Sequence[Tensor] = ()


class Odd:
    """A shard that answers what it is told to, in another order."""

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        self.shard, self.shards, self.epoch, self.version = shard, shards, 0, 0
        self.sequence = 0
        self.due, self.busy_seconds = False, 0.0
        self.bytes_in = self.bytes_out = 0
        self.asked: list[tuple[int, Request]] = []
        self.answer: Callable[[Who, int, int, Request], list[Answer]] = lambda who, tag, sequence, request: []

    def hello(self, hello: Hello) -> Welcome | Refused:
        return Welcome(self.shard, self.shards, 1, 0, hello.incarnation or 1, self.sequence, 0, 0, [])

    def owed(self) -> list[Answer]:
        return []

    def gone(self, who: Who) -> list[Answer]:
        return []

    def handle(
        self, who: Who, tag: int, sequence: int, epoch: int, request: Request, tensors: Sequence[Tensor]
    ) -> list[Answer]:
        self.asked.append((sequence, request))
        return self.answer(who, tag, sequence, request)


def test_futures_are_settled_in_any_order() -> None:
    shard = Odd()
    held: list[Answer] = []

    def late(who: Who, tag: int, sequence: int, request: Request) -> list[Answer]:
        held.append(Answer(who, tag, Done(len(held) + 1)))
        return held[::-1] if len(held) == 3 else []

    shard.answer = late
    with Client([shard]) as client:
        futures = [client.request(0, Standing()) for _ in range(2)]
        assert not futures[0].done()
        futures.append(client.request(0, Standing()))
        assert futures[2].wait()[0] == Done(3)
        assert [future.wait()[0].version for future in futures] == [1, 2, 3]


def test_to_wait_for_oneself_is_told() -> None:
    with Client([Odd()]) as client, pytest.raises(RunError, match="wait for ever: Standing by shard 0"):
        client.request(0, Standing()).wait()


def test_a_gap_is_closed_by_sending_again_from_there() -> None:
    shard = Odd()
    dropped = [2]

    def forgetful(who: Who, tag: int, sequence: int, request: Request) -> list[Answer]:
        if sequence in dropped:
            dropped.clear()
            return []
        if sequence != shard.sequence + 1:
            return [Answer(who, tag, Refused("gap", "send again"))]
        shard.sequence = sequence
        return [Answer(who, tag, Done(sequence))]

    shard.answer = forgetful
    with Client([shard]) as client:
        futures = [client.request(0, Put([])) for _ in range(4)]
        assert [future.wait()[0].version for future in futures] == [1, 2, 3, 4]
    assert [sequence for sequence, _ in shard.asked] == [1, 2, 3, 4, 2, 3, 4]


def test_what_is_refused_is_raised_once_somebody_looks() -> None:
    with Client([Shard()]) as client:
        table = client.dense("w", {"a": torch.zeros(4)}, lr=1.0)
        bad = client.request(0, Push([Slot("nowhere")]), [torch.zeros(64)])
        assert table.push([torch.ones(4)]).wait() == 1, "what follows is not held up"
        with pytest.raises(RefusedError, match="no table 'nowhere'") as told:
            client.flush()
        assert told.value.code == "table"
        assert "shard 0 at this process" in str(told.value)
        with pytest.raises(RefusedError):
            bad.wait()
        client.flush()


def test_too_much_under_way_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WINDOW_REQUESTS", 5)
    shard = Odd()
    most = 0

    def at_once(who: Who, tag: int, sequence: int, request: Request) -> list[Answer]:
        nonlocal most
        most = max(most, len(client._links[0].session))
        return [Answer(who, tag, Done(1))]

    shard.answer = at_once
    with Client([shard]) as client:
        for _ in range(50):
            client.request(0, Standing())
        client.flush()
    assert most == 5
    assert len(shard.asked) == 50


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one process", "unix", "tcp"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Of two shards, reached in every way."""
    if request.param == "one process":
        with Client([Shard(shard=shard, shards=2) for shard in range(2)]) as found:
            yield found
        return
    addresses = ["tcp://127.0.0.1:0"] * 2 if request.param == "tcp" else None
    with Servers(2, addresses=addresses) as servers, Client(servers.addresses[::-1]) as found:
        yield found


def test_push_pull_and_wait(client: Client) -> None:
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


def test_rows_of_any_shape_and_repeated(client: Client) -> None:
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


@pytest.mark.parametrize("whole", [False, True], ids=["in pieces", "whole"])
def test_large_tables_travel_in_pieces_to_the_same_end(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        for name, num_bytes in (("SPLIT_BYTES", 3000), ("PIECE_BYTES", 2000), ("STRETCH_BYTES", 700)):
            monkeypatch.setattr(remote_dense, name, num_bytes)
    generator = torch.Generator().manual_seed(1)
    shapes = [(1,), (300,), (7, 33), (), (50, 3), (0, 4), (64,), (1000,), (2, 2)]
    values = {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    shards = [Shard(shard=shard, shards=2) for shard in range(2)]
    with Client(shards) as client:
        table = client.dense("t", values, optimizer="momentum", lr=0.5, momentum=0.9)
        into = {name: torch.full_like(value, 9) for name, value in values.items()}
        live = {name: value.clone().requires_grad_() for name, value in values.items()}
        mirror = torch.optim.SGD(live.values(), lr=0.5, momentum=0.9)
        for _ in range(3):
            for tensor in live.values():
                tensor.grad = torch.randn(tensor.shape, generator=generator)
            table.push({name: tensor.grad for name, tensor in live.items()}, pull_into=into).wait()
            mirror.step()
        for found in (into, table.pull().wait()):
            assert all(torch.equal(found[name], live[name].detach()) for name in values)
        assert [shard.version for shard in shards] == [3, 3], "pieces are one update"
        turned = {"2": torch.zeros(33, 7).t()}  # memory that is not in one piece
        assert torch.equal(table.pull(turned).wait()["2"], live["2"].detach())
        asked = client.request(0, Pull([Slot("t", span=(0, 1 << 40))]))
        with pytest.raises(RefusedError, match="elements 0 to 1,099,511,627,776 of table 't'"):
            asked.wait()


@pytest.mark.parametrize("client", ["one process"], indirect=True)
@pytest.mark.parametrize(
    ("push", "message"),
    [
        (
            lambda table: table.push({"w": torch.ones(4, 4)}),
            r"has shape \[4, 3\] in table 'm', but this tensor has \[4, 4\]",
        ),
        (lambda table: table.push({"w": torch.ones(1)}), r"but this tensor has \[1\]"),
        (
            lambda table: table.push({"w": torch.ones(4, 3).double()}),
            "float32 in table 'm', but this tensor is float64",
        ),
        (lambda table: table.push({"ww": torch.ones(4, 3)}), "no tensor 'ww'"),
        (lambda table: table.push([torch.ones(4, 3)] * 2), "2 tensors for table 'm', which has 1"),
        (lambda table: table.push({"w": torch.full((4, 3), float("nan"))}).wait(), "finite"),
        (lambda table: table.pull({"w": torch.ones(4)}), r"but this tensor has \[4\]"),
    ],
)
def test_what_does_not_fit_is_told_with_both_sides(client: Client, push: Callable[[Any], Any], message: str) -> None:
    table = client.dense("m", {"w": torch.zeros(4, 3)}, lr=1.0)
    with pytest.raises(InputError, match=message):
        push(table)
    assert table.pull().wait()["w"].sum() == 0


@pytest.mark.parametrize("client", ["one process"], indirect=True)
def test_rows_that_are_not_there_are_told(client: Client) -> None:
    table = client.sparse("rows", SparseSpec(rows=100, dim=2))
    with pytest.raises(InputError, match="row 100, but table 'rows' has rows 0 to 99"):
        table.pull(torch.tensor([3, 100]))
    with pytest.raises(InputError, match="row -1"):
        table.push(torch.tensor([-1]), torch.ones(1, 2))
    with pytest.raises(InputError, match="whole numbers, but these are float32"):
        table.pull(torch.tensor([1.0]))
    with pytest.raises(InputError, match=r"\[1, 2\] are needed"):
        table.push(torch.tensor([1]), torch.ones(1, 3))


@pytest.mark.parametrize("codec", ["int8", "int4", "topk:0.3", "bf16"])
def test_compressed_pushes_come_to_the_same_in_the_end(codec: str) -> None:
    """With error feedback nothing is lost, only late; without, it is within the compressor's price."""
    with Client([Shard(shard=shard, shards=2) for shard in range(2)], compress=codec) as client:
        table = client.dense("w", {"a": torch.zeros(200, 300), "b": torch.zeros(7)}, lr=1.0)
        generator = torch.Generator().manual_seed(1)
        total = {"a": torch.zeros(200, 300), "b": torch.zeros(7)}
        for _ in range(20):
            gradients = {name: torch.randn(each.shape, generator=generator) for name, each in total.items()}
            table.push(gradients)
            for name, each in total.items():
                each -= gradients[name]
        found = table.pull().wait()
        for name, each in total.items():
            assert (found[name] - each).norm() < 0.3 * each.norm()
        stats = client.request(0, Stats()).wait()[0]
        plain = 20 * 200 * 300 / 2 * 4
        assert stats.bytes_in < (0.55 if codec == "bf16" else 0.65 if "topk" in codec else 0.3) * plain + 250_000


def test_an_unknown_compressor_is_told() -> None:
    with pytest.raises(InputError, match="there is no compressor 'int9'"):
        Client([Shard()], compress="int9")


# -- connecting --------------------------------------------------------------------------------------------------------


def test_two_servers_that_claim_one_shard_are_named(tmp_path: Path) -> None:
    shards = [Shard(shard=0, shards=2), Shard(shard=0, shards=2)]
    with pytest.raises(InputError, match="two servers claim shard 0: this process and this process"):
        Client(shards)


def test_a_wrong_number_of_addresses_is_told() -> None:
    with pytest.raises(InputError, match="is shard 1 of 3, but 2 addresses were given"):
        Client([Shard(shard=0, shards=2), Shard(shard=1, shards=3)])


def test_a_server_that_is_not_there_is_named_with_the_time(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable) as told:
        Client([f"unix:{tmp_path}/nobody"], timeout=0.05)
    text = str(told.value)
    assert f"the server at unix:{tmp_path}/nobody cannot be reached since " in text
    assert "for 0.05 s: there is no such file" in text
    assert time.strftime("%H:") in text


def test_what_is_no_server_is_told(tmp_path: Path) -> None:
    """Something else listens there, and says nothing."""
    other = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ServerUnreachable, match="it takes the connection, and does not answer"):
        Client([f"tcp://127.0.0.1:{other.getsockname()[1]}"], timeout=0.1)
    other.close()


def test_a_token_opens_and_nothing_else_does() -> None:
    with Servers(1, token="secret") as servers:
        with pytest.raises(InputError, match="needs a token, and this client has none"):
            Client(servers.addresses)
        with pytest.raises(RefusedError, match="a wrong token"):
            Client(servers.addresses, token="guess")
        with Client(servers.addresses, token="secret") as client:
            assert client.request(0, Standing()).wait()[0].version == 0


def test_the_environment_says_where_servers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="SHOAL_SERVERS is not set"):
        connect()
    with Servers(2) as servers:
        monkeypatch.setenv("SHOAL_SERVERS", ", ".join(servers.addresses))
        monkeypatch.setenv("RANK", "3")
        with connect() as client:
            assert (client.shards, client.who.worker) == (2, 3)
        monkeypatch.setenv("RANK", "x")
        with pytest.raises(InputError, match="RANK is 'x'"):
            connect()


def test_a_newer_process_of_a_worker_ends_the_older_one() -> None:
    shard = Shard()
    with Client([shard], worker=2) as older:
        table = older.dense("w", {"a": torch.zeros(3)}, lr=1.0)
        with Client([shard], worker=2) as newer:
            assert newer.who.incarnation > older.who.incarnation
            with pytest.raises(RefusedError, match="older process of worker 2"):
                table.push([torch.ones(3)]).wait()
            newer.dense("w", {"a": torch.zeros(3)}, lr=1.0).push([torch.ones(3)]).wait()


def test_a_folder_is_served_by_one_process(tmp_path: Path) -> None:
    with Servers(1, folder=tmp_path) as servers:
        served = f"shard 0 is already served by process {servers.pids[0]}"
        with pytest.raises(InputError, match=served):
            Servers(1, folder=tmp_path)


# -- servers that go away ----------------------------------------------------------------------------------------------


def counters(client: Client, number: int = 4) -> Any:
    """A table that counts: gradients of 1, learning rate 1."""
    return client.dense("count", {str(each): torch.zeros(2000) for each in range(number)}, lr=1.0)


def counted(table: Any) -> int:
    values = {int(value) for tensor in table.pull().wait().values() for value in -tensor}
    assert len(values) == 1, "all of a push, or nothing"
    return values.pop()


def test_a_server_that_is_killed_goes_on_from_its_snapshot_and_says_what_is_lost(tmp_path: Path) -> None:
    notices: list[Notice] = []
    ones = [torch.ones(2000)] * 4
    with Servers(1, folder=tmp_path) as servers, Client(servers.addresses, tell=notices.append) as client:
        table = counters(client)
        for _ in range(5):
            table.push(ones).wait()
        client.request(0, Keep()).wait()
        for _ in range(3):
            table.push(ones).wait()
        servers.kill(0)
        waiting = [table.push(ones) for _ in range(2)]  # nobody is there
        assert not waiting[0].done()
        servers.restart(0)
        for future in waiting:
            future.wait()
        assert counted(table) == 5 + 2
        assert client.lost == 3
        assert client.boots == [2]
        assert [notice for notice in notices if isinstance(notice, Lost)] == [Lost(0, 3, updates=3)]
        away = [notice for notice in notices if isinstance(notice, Away)]
        assert [notice.seconds is None for notice in away] == [True, False]
        assert away[0].address == servers.addresses[0]
        assert table.push(ones).wait() and counted(table) == 8, "the numbers go on"


def test_pushes_through_kills_are_applied_once_each(tmp_path: Path) -> None:
    """Small whole numbers make a lost or doubled push arithmetic."""
    with Servers(2, folder=tmp_path) as servers, Client(servers.addresses) as client:
        table = counters(client)
        ones = [torch.ones(2000)] * 4
        for turn in range(3):
            futures = [table.push(ones) for _ in range(10)]
            for shard in range(2):
                client.request(shard, Keep()).wait()
            futures += [table.push(ones) for _ in range(10)]
            servers.restart(turn % 2)
            for future in futures:
                future.wait()
        done = 0
        for shard, parts in enumerate(table.cut):
            stats = client.request(shard, Stats()).wait()[0]
            done += stats.updates
            assert parts
        assert done == 2 * 60 - client.lost
        values = table.pull().wait()
        assert sum(-int(value[0]) for value in values.values()) == 2 * done


def test_a_broken_connection_changes_nothing() -> None:
    with Servers(1) as servers, Client(servers.addresses) as client:
        table = counters(client)
        futures = []
        for turn in range(30):
            futures.append(table.push([torch.ones(2000)] * 4))
            if turn % 7 == 3:
                client._links[0].wire._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            if turn % 5 == 0:
                futures[-1].wait()
        assert sorted(future.wait() for future in futures) == list(range(1, 31))
        assert counted(table) == 30
        assert client.lost == 0


def test_a_connection_that_is_lost_in_its_greeting_is_made_again_soon(tmp_path: Path) -> None:
    """A process that is being killed still takes a connection, and then closes it."""
    listener, address = listen(f"unix:{tmp_path / 'server'}", None)
    links = Links([address], 0, None, 30.0, None, False, None)
    (link,) = links.all
    now = time.monotonic()
    assert links.reach(link, now)
    listener.close()
    links.lose(link, "closed")
    assert link.next_try < now + DIAL_SECONDS / 2


def test_a_server_that_stays_away_is_named_and_so_is_its_shard() -> None:
    notices: list[Notice] = []
    with Servers(2) as servers, Client(servers.addresses, timeout=0.2, tell=notices.append) as client:
        servers.kill(1)
        with pytest.raises(ServerUnreachable, match=f"shard 1 at {servers.addresses[1]} cannot be reached since"):
            client.request(1, Standing()).wait()
        assert notices == [Away(1, servers.addresses[1])]
        with pytest.raises(ServerUnreachable):
            client.request(1, Standing())
        assert client.request(0, Standing()).wait()[0].boot == 1, "the others are still there"


def test_a_server_that_is_stopped_is_noticed() -> None:
    with Servers(1) as servers, Client(servers.addresses, timeout=0.4) as client:
        os.kill(servers.pids[0], signal.SIGSTOP)
        try:
            with pytest.raises(ServerUnreachable, match=r"no word from it|does not answer"):
                client.request(0, Stats()).wait()
        finally:
            os.kill(servers.pids[0], signal.SIGCONT)


def test_an_answer_that_takes_long_is_waited_for() -> None:
    """An order that is parked is no sign of death, as long as the server answers when it is asked whether it lives."""
    notices: list[Notice] = []

    def made(shard: int, shards: int, boot: int) -> Odd:
        odd = Odd(shard, shards)
        odd.answer = lambda who, tag, sequence, request: [] if sequence else [Answer(who, tag, Done(1))]
        return odd

    with Servers(1, make=made) as servers, Client(servers.addresses, timeout=0.1, tell=notices.append) as client:
        with pytest.raises(RunError, match=r"no answer within 0\.4 s: Put by shard 0"):
            client.request(0, Put([])).wait(0.4)
        assert client.request(0, Standing()).wait()[0] == Done(1)
    assert notices == []


def test_servers_end_with_their_parent() -> None:
    heard, told = os.pipe()

    def play() -> None:
        servers = Servers(2)
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
    shutil.rmtree(Path(address.removeprefix("unix:")).parent)


def test_snapshots_are_written_now_and_then_by_themselves(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "kept") as snapshots:
        shard = Shard()
        server = Server(shard, [f"unix:{tmp_path}/s"], snapshots=snapshots, keep_seconds=0.0)
        with Client([shard]) as client:
            client.dense("w", {"a": torch.zeros(3)}, lr=1.0).push([torch.ones(3)]).wait()
        deadline = time.monotonic() + 20
        while snapshots.newest() is None and time.monotonic() < deadline:
            server.turn(0.01)
        server.close()
        found = snapshots.newest()
        assert found is not None and found.version == 1


def test_a_large_table_gets_the_memory_that_it_needs() -> None:
    with Servers(1, ring_bytes=1 << 20) as servers, Client(servers.addresses) as client:
        writer = client._links[0].wire.writer  # type: ignore[union-attr]
        assert writer is not None and writer.size == 1 << 20
        table = client.dense("large", {"a": torch.zeros(1 << 20)}, lr=1.0)
        grown = client._links[0].wire.writer  # type: ignore[union-attr]
        assert grown is not None and grown.size >= 8 << 20
        for _ in range(4):
            table.push([torch.ones(1 << 20)]).wait()
        assert table.pull().wait()["a"].sum() == -4 << 20
        servers.restart(0)
        with pytest.raises(RefusedError, match="no table"):  # it had no folder to remember in
            table.push([torch.ones(1 << 20)]).wait()


def test_memory_grows_with_what_is_asked_for_and_with_what_comes() -> None:
    spec = DenseSpec(names=["a"], shapes=[[1 << 20]], dtypes=["float32"], optimizer="none")
    with Servers(1, ring_bytes=1 << 20) as servers, Client(servers.addresses) as client:
        sizes = []

        def ask(request: Request, tensors: Sequence[Tensor] = ()) -> list[Tensor]:
            found = client.request(0, request, tensors).wait()[1]
            sizes.append(client._links[0].wire.writer.size >> 20)  # type: ignore[union-attr]
            return found

        ask(Declare("w", spec))
        ask(Put([Slot("w")], fill=True), [torch.ones(1 << 20)])
        assert ask(Pull([Slot("w")]))[0].sum() == 1 << 20
        assert sizes == [1, 8, 8]
        with Client(servers.addresses, worker=1) as reader:
            for expected in (1, 8):  # the first answer shows how large they are
                assert reader.request(0, Pull([Slot("w")])).wait()[1][0].sum() == 1 << 20
                assert reader._links[0].wire.writer.size >> 20 == expected  # type: ignore[union-attr]


def test_a_spec_can_be_given_by_itself() -> None:
    spec = DenseSpec(names=["a"], shapes=[[3]], dtypes=["float32"], optimizer="sgd", settings={"lr": 1.0})
    with Client([Shard()]) as client:
        table = client.dense("w", spec=spec)
        with pytest.raises(RefusedError, match="no values yet"):
            table.pull().wait()
        table.put([torch.ones(3)], fill=True).wait()
        assert table.pull().wait()["a"].sum() == 3
        assert client.request(0, Declare("w", spec)).wait()[0] == Done(0)
        assert client.request(0, Pull([Slot("w")])).wait()[1][0][:3].sum() == 3
        with pytest.raises(InputError, match="neither tensors nor a spec"):
            client.dense("x")
