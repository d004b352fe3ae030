"""The worker's side: numbers and retries as pure code, then tables and futures, then servers that are killed."""

import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.odd_server import Answer, Odd
from shoal.errors import InputError, RunError
from shoal.paramserver import remote_dense, request_client
from shoal.paramserver.client import ParameterClient, RefusedError, ServerUnreachable
from shoal.paramserver.connections import DIAL_SECONDS, ConnectionOptions, ShardLinks
from shoal.paramserver.local_servers import LocalServers
from shoal.paramserver.messages import (
    AckReply,
    ClientId,
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    ServerRequest,
    SparseSpec,
    StatsRequest,
    StatusRequest,
    TableSlice,
)
from shoal.paramserver.session import ShardSession
from shoal.paramserver.shard import ParameterShard
from shoal.transport.addresses import listen

# -- numbers and retries, pure -----------------------------------------------------------------------------------------


def asked(*orders: bool) -> ShardSession[str]:
    """Requests "a", "b", …: orders and looks."""
    session: ShardSession[str] = ShardSession()
    session.resume(1, 0)
    for tag, order in enumerate(orders, 1):
        session.register(tag, chr(96 + tag), writes=order)
    return session


def again(session: ShardSession[str], boot: int, sequence: int) -> tuple[int, list[tuple[str, int]]]:
    renewed = session.resume(boot, sequence)
    return renewed.lost, [(each.payload, each.sequence) for each in renewed.resend]


def test_what_has_no_answer_is_sent_again_under_its_number() -> None:
    session = asked(True, True, False, True)
    session.resolve(1)
    assert again(session, 1, 2) == (0, [("b", 2), ("c", 0), ("d", 3)])
    assert session.sequence == 3


def test_what_was_answered_and_is_not_there_is_lost_and_the_rest_closes_up() -> None:
    session = asked(True, True, True, True, True)
    session.resolve(1)
    session.resolve(2)
    assert again(session, 2, 1) == (1, [("c", 2), ("d", 3), ("e", 4)])
    assert (session.sequence, session.lost, session.server_incarnation) == (4, 1, 2)
    assert session.register(6, "f", writes=True).sequence == 5


def test_an_unanswered_order_that_the_snapshot_has_keeps_its_number() -> None:
    session = asked(True, True, True)
    session.resolve(3)  # the second waits for somebody else
    assert again(session, 2, 2) == (1, [("a", 1), ("b", 2)])
    assert session.register(4, "d", writes=True).sequence == 3


def test_an_answer_counts_once() -> None:
    session = asked(True)
    assert session.resolve(1) is not None
    assert session.resolve(1) is None
    assert session.answered == 1


@pytest.mark.parametrize("seed", range(30))
def test_every_order_is_applied_once_through_losses_and_restarts(seed: int) -> None:
    """A server that forgets, connections that break: applied = acknowledged - lost, and nothing twice."""
    chance = random.Random(seed)
    session: ShardSession[int] = ShardSession()
    boot, applied, kept = 1, [], []  # the state of a server is the list of orders that it has applied
    line: list[tuple[int, int, int]] = []  # tag, number, order: under way to the server
    answers: list[int] = []
    acknowledged: list[int] = []
    lost = 0
    session.resume(boot, 0)

    def reconnect() -> None:
        nonlocal lost
        renewed = session.resume(boot, len(applied))
        lost += renewed.lost
        line[:] = [(each.tag, each.sequence, each.payload) for each in renewed.resend]
        answers.clear()

    for turn in range(1, 300):
        event = chance.random()
        if event < 0.4:
            each = session.register(turn, turn, writes=True)
            line.append((each.tag, each.sequence, each.payload))
        elif event < 0.7 and line:
            tag, number, order = line.pop(0)
            assert number <= len(applied) + 1, "no gaps"
            if number == len(applied) + 1:
                applied.append(order)
            answers.append(tag)
        elif event < 0.9 and answers:
            done = session.resolve(answers.pop(0))
            if done is not None:
                acknowledged.append(done.payload)
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


def test_futures_are_settled_in_any_order() -> None:
    shard = Odd()
    held: list[Answer] = []

    def late(who: ClientId, tag: int, sequence: int, request: ServerRequest) -> list[Answer]:
        held.append(Answer(who, tag, AckReply(len(held) + 1)))
        return held[::-1] if len(held) == 3 else []

    shard.answer = late
    with ParameterClient([shard]) as client:
        futures = [client.request(0, StatusRequest()) for _ in range(2)]
        assert not futures[0].done()
        futures.append(client.request(0, StatusRequest()))
        assert futures[2].wait()[0] == AckReply(3)
        assert [future.wait()[0].version for future in futures] == [1, 2, 3]


def test_to_wait_for_oneself_is_told() -> None:
    with ParameterClient([Odd()]) as client, pytest.raises(RunError, match="wait forever: StatusRequest by shard 0"):
        client.request(0, StatusRequest()).wait()


def test_a_gap_is_closed_by_sending_again_from_there() -> None:
    shard = Odd()
    dropped = [2]

    def forgetful(who: ClientId, tag: int, sequence: int, request: ServerRequest) -> list[Answer]:
        if sequence in dropped:
            dropped.clear()
            return []
        if sequence != shard.sequence + 1:
            return [Answer(who, tag, RefusedReply("gap", "send again"))]
        shard.sequence = sequence
        return [Answer(who, tag, AckReply(sequence))]

    shard.answer = forgetful
    with ParameterClient([shard]) as client:
        futures = [client.request(0, PutRequest([])) for _ in range(4)]
        assert [future.wait()[0].version for future in futures] == [1, 2, 3, 4]
    assert [sequence for sequence, _ in shard.asked] == [1, 2, 3, 4, 2, 3, 4]


def test_what_is_refused_is_raised_once_somebody_looks() -> None:
    with ParameterClient([ParameterShard()]) as client:
        table = client.dense("w", {"a": torch.zeros(4)}, lr=1.0)
        bad = client.request(0, PushRequest([TableSlice("nowhere")]), [torch.zeros(64)])
        assert table.push([torch.ones(4)]).wait() == 1, "what follows is not held up"
        with pytest.raises(RefusedError, match="no table 'nowhere'") as told:
            client.flush()
        assert told.value.code == "table"
        assert "shard 0 at this process" in str(told.value)
        with pytest.raises(RefusedError):
            bad.wait()
        client.flush()


def test_too_much_under_way_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_client, "WINDOW_REQUESTS", 5)
    shard = Odd()
    most = 0

    def at_once(who: ClientId, tag: int, sequence: int, request: ServerRequest) -> list[Answer]:
        nonlocal most
        most = max(most, len(client._links[0].session))
        return [Answer(who, tag, AckReply(1))]

    shard.answer = at_once
    with ParameterClient([shard]) as client:
        for _ in range(50):
            client.request(0, StatusRequest())
        client.flush()
    assert most == 5
    assert len(shard.asked) == 50


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


@pytest.mark.parametrize("whole", [False, True], ids=["in pieces", "whole"])
def test_large_tables_travel_in_pieces_to_the_same_end(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:
        for name, num_bytes in (("SPLIT_BYTES", 3000), ("CHUNK_BYTES", 2000), ("STREAM_BYTES", 700)):
            monkeypatch.setattr(remote_dense, name, num_bytes)
    generator = torch.Generator().manual_seed(1)
    shapes = [(1,), (300,), (7, 33), (), (50, 3), (0, 4), (64,), (1000,), (2, 2)]
    values = {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    shards = [ParameterShard(shard=shard, shards=2) for shard in range(2)]
    with ParameterClient(shards) as client:
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
        asked = client.request(0, PullRequest([TableSlice("t", span=(0, 1 << 40))]))
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
def test_what_does_not_fit_is_told_with_both_sides(
    client: ParameterClient, push: Callable[[Any], Any], message: str
) -> None:
    table = client.dense("m", {"w": torch.zeros(4, 3)}, lr=1.0)
    with pytest.raises(InputError, match=message):
        push(table)
    assert table.pull().wait()["w"].sum() == 0


@pytest.mark.parametrize("client", ["one process"], indirect=True)
def test_rows_that_are_not_there_are_told(client: ParameterClient) -> None:
    table = client.sparse("rows", SparseSpec(rows=100, dim=2))
    with pytest.raises(InputError, match="row 100, but table 'rows' has rows 0 to 99"):
        table.pull(torch.tensor([3, 100]))
    with pytest.raises(InputError, match="row -1"):
        table.push(torch.tensor([-1]), torch.ones(1, 2))
    with pytest.raises(InputError, match="ids of rows are integers, but these are float32"):
        table.pull(torch.tensor([1.0]))
    with pytest.raises(InputError, match=r"\[1, 2\] are needed"):
        table.push(torch.tensor([1]), torch.ones(1, 3))


@pytest.mark.parametrize("codec", ["int8", "int4", "topk:0.3", "bf16"])
def test_compressed_pushes_come_to_the_same_in_the_end(codec: str) -> None:
    """With error feedback nothing is lost, only late; without, it is within the compressor's price."""
    with ParameterClient([ParameterShard(shard=shard, shards=2) for shard in range(2)], compress=codec) as client:
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
        stats = client.request(0, StatsRequest()).wait()[0]
        plain = 20 * 200 * 300 / 2 * 4
        assert stats.bytes_in < (0.55 if codec == "bf16" else 0.65 if "topk" in codec else 0.3) * plain + 250_000


def test_an_unknown_compressor_is_told() -> None:
    with pytest.raises(InputError, match="there is no compressor 'int9'"):
        ParameterClient([ParameterShard()], compress="int9")


# -- connecting --------------------------------------------------------------------------------------------------------


def test_two_servers_that_claim_one_shard_are_named(tmp_path: Path) -> None:
    shards = [ParameterShard(shard=0, shards=2), ParameterShard(shard=0, shards=2)]
    with pytest.raises(InputError, match="two servers claim shard 0: this process and this process"):
        ParameterClient(shards)


def test_a_wrong_number_of_addresses_is_told() -> None:
    with pytest.raises(InputError, match="is shard 1 of 3, but 2 addresses were given"):
        ParameterClient([ParameterShard(shard=0, shards=2), ParameterShard(shard=1, shards=3)])


def test_a_server_that_is_not_there_is_named_with_the_time(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable) as told:
        ParameterClient([f"unix:{tmp_path}/nobody"], timeout=0.05)
    text = str(told.value)
    assert f"the server at unix:{tmp_path}/nobody cannot be reached since " in text
    assert "for 0.05 s: there is no such file" in text
    assert time.strftime("%H:") in text


def test_what_is_no_server_is_told(tmp_path: Path) -> None:
    """Something else listens there, and says nothing."""
    other = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ServerUnreachable, match="it accepts the connection, and does not answer"):
        ParameterClient([f"tcp://127.0.0.1:{other.getsockname()[1]}"], timeout=0.1)
    other.close()


def test_a_newer_process_of_a_worker_ends_the_older_one() -> None:
    shard = ParameterShard()
    with ParameterClient([shard], worker=2) as older:
        table = older.dense("w", {"a": torch.zeros(3)}, lr=1.0)
        with ParameterClient([shard], worker=2) as newer:
            assert newer.client_id.incarnation > older.client_id.incarnation
            with pytest.raises(RefusedError, match="older process of worker 2"):
                table.push([torch.ones(3)]).wait()
            newer.dense("w", {"a": torch.zeros(3)}, lr=1.0).push([torch.ones(3)]).wait()


# -- servers that go away ----------------------------------------------------------------------------------------------


def test_a_connection_that_is_lost_in_its_greeting_is_made_again_soon(tmp_path: Path) -> None:
    """A process that is being killed still takes a connection, and then closes it."""
    listener, address = listen(f"unix:{tmp_path / 'server'}", None)
    links = ShardLinks([address], ConnectionOptions(0, None, 30.0, None, False, None))
    (link,) = links.links
    now = time.monotonic()
    assert links.try_connect(link, now)
    listener.close()
    links.on_disconnect(link, "closed")
    assert link.next_try < now + DIAL_SECONDS / 2


def test_a_spec_can_be_given_by_itself() -> None:
    spec = DenseSpec(names=["a"], shapes=[[3]], dtypes=["float32"], optimizer="sgd", settings={"lr": 1.0})
    with ParameterClient([ParameterShard()]) as client:
        table = client.dense("w", spec=spec)
        with pytest.raises(RefusedError, match="no values yet"):
            table.pull().wait()
        table.put([torch.ones(3)], fill=True).wait()
        assert table.pull().wait()["a"].sum() == 3
        assert client.request(0, DeclareRequest("w", spec)).wait()[0] == AckReply(0)
        assert client.request(0, PullRequest([TableSlice("w")])).wait()[1][0][:3].sum() == 3
        with pytest.raises(InputError, match="neither tensors nor a spec"):
            client.dense("x")
