"""Connections between the ranks of a group: who is let in, and what a stranger costs. Ranks are threads here."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from shoal.collectives import connect_peers as module
from shoal.collectives.connect_peers import PeerConnections, connect_peers
from shoal.collectives.handshake import GroupMember, new_token
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.errors import InputError, PeerLost
from shoal.transport.credentials import Credentials, self_issued
from shoal.transport.identity import Role
from shoal.transport.sealed_socket import SealedSocket
from shoal.transport.secure_socket import TlsSocket

SECRET = "a secret that all hosts of this test share"
LIMIT = timedelta(seconds=20)


def group_of(size: int, **facts: Any) -> list[GroupMember]:
    return [
        GroupMember(
            rank=rank,
            host=f"host{rank}",
            name=f"host{rank}",
            rack="",
            address="127.0.0.1",
            pid=1,
            descriptor=-1,
            token=new_token(),
            **facts,
        )
        for rank in range(size)
    ]


def connect_all(
    members: Sequence[GroupMember], before: Callable[[int, Any], None] = lambda rank, store: None
) -> list[PeerConnections]:
    """What each rank has got. `before` runs in a rank's thread first."""
    store = dist.HashStore()

    def play(rank: int) -> PeerConnections:
        before(rank, store)
        threading.current_thread().name = f"rank {rank}"
        return connect_peers(store, members, rank, [], LIMIT)

    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(play, rank) for rank in range(len(members))]
    return [future.result() for future in futures]


def exchange(members: Sequence[GroupMember], found: Sequence[PeerConnections]) -> None:
    """All ranks send to all others through the connections for tensors."""
    messengers = [TcpMessenger(members, rank, each.tensors) for rank, each in enumerate(found)]
    for rank, messenger in enumerate(messengers):
        for to in messenger.streams:
            messenger.send(torch.tensor([10.0 * rank + to]), to, 1, "send")
    for rank, messenger in enumerate(messengers):
        for source in messenger.streams:
            into = torch.zeros(1)
            messenger.receive(into, source, 1, "recv").wait()
            assert float(into) == 10.0 * source + rank
    for messenger, each in zip(messengers, found, strict=True):
        messenger.close()
        each.close()


def test_strangers_are_closed_and_the_ranks_find_each_other() -> None:
    members = group_of(3)
    strangers: list[socket.socket] = []

    def before(rank: int, store: Any) -> None:
        if rank == 0:
            return
        if rank == 1:  # the others wait for this rank, and rank 0 listens
            address = ("127.0.0.1", int(store.get("port/0")))
            strangers.extend(socket.create_connection(address) for _ in range(100))
            for number, stranger in enumerate(strangers[:60]):
                stranger.sendall(os.urandom(number + 1))
            wrong = module._HELLO.pack(1, module.Purpose.STATUS, bytes(16), bytes(32))
            strangers[60].sendall(wrong)  # says that it is rank 1, without its token
            unexpected = module._HELLO.pack(0, 0, bytes.fromhex(members[0].token), bytes(32))
            strangers[61].sendall(unexpected)

    descriptors = len(os.listdir("/proc/self/fd"))
    found = connect_all(members, before)
    for stranger in strangers:
        stranger.settimeout(5.0)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b"", "nothing is said to a stranger"
        stranger.close()
    exchange(members, found)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # epoll of threads that end


def test_with_credentials_all_goes_through_tls_and_tensors_through_sealed_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    members = group_of(3, secured=True)

    def before(rank: int, store: Any) -> None:
        if rank == 1:  # in plain text, with the right token
            with socket.create_connection(("127.0.0.1", int(store.get("port/0")))) as plain:
                plain.sendall(module._HELLO.pack(1, 0, bytes.fromhex(members[1].token), bytes(32)))
                with suppress(ConnectionResetError):
                    assert bytes.fromhex(members[0].token) not in plain.recv(100)

    found = connect_all(members, before)
    for each in found:
        status = list(each.status.values())
        assert len(status) == 2 and all(isinstance(one, TlsSocket) for one in status)
        assert all(one.peer is not None and one.peer.role is Role.WORKER for one in status)
        assert len(each.tensors) == 2 and all(isinstance(one, SealedSocket) for one in each.tensors.values())
    exchange(members, found)


def by_rank(monkeypatch: pytest.MonkeyPatch, own: dict[int, Credentials]) -> None:
    monkeypatch.setattr(
        module, "credentials_from_environment", lambda: own[int(threading.current_thread().name.removeprefix("rank "))]
    )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (self_issued("quite another secret than that of this test", Role.WORKER, "w"), "another secret"),
        (self_issued(SECRET, Role.VIEWER, "v"), "role"),
    ],
    ids=["foreign", "role"],
)
def test_a_rank_with_the_wrong_certificate_is_refused_on_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: Credentials, reason: str
) -> None:
    by_rank(monkeypatch, {0: self_issued(SECRET, Role.WORKER, "w"), 1: other})
    with pytest.raises(PeerLost) as raised:
        connect_all(group_of(2, secured=True))
    assert "rank 1 on host1" in str(raised.value) and "rank 0 on host0" in str(raised.value)
    if reason == "another secret":
        assert reason in str(raised.value)
        assert raised.value.fix is not None and "SHOAL_SECRET_FILE" in raised.value.fix, "not an address"
    else:
        assert "rank 0 on host0 closed the connection after the handshake" in raised.value.message
        assert (
            "it admits the role worker alone" in raised.value.message and "this end is viewer v" in raised.value.message
        )
        assert raised.value.fix is not None and "the log of rank 0 on host0 says" in raised.value.fix
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("rank 0 on host0 refused a connection: viewer v of run ")
        assert "accepts the role worker alone" in line


def test_members_that_cannot_trust_each_other_are_named() -> None:
    bare = group_of(2)
    mixed = [structs.replace(bare[0], secured=True), bare[1]]
    with pytest.raises(InputError, match=r"rank 0 on host0 has credentials and rank 1 on host1 has none"):
        connect_all(mixed)
    open_to_all = [bare[0], structs.replace(bare[1], address="10.1.2.3")]
    with pytest.raises(InputError, match=r"rank 1 on host1 can be reached from other machines at 10.1.2.3") as raised:
        connect_all(open_to_all)
    assert "SHOAL_SECRET_FILE" in str(raised.value) and "shoal keys new" in str(raised.value)


def test_near_hosts_get_windows_and_far_ones_keep_what_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def control(connection: socket.socket) -> bytes:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        usual = control(near)
        monkeypatch.setattr(module, "NEAR_MICROSECONDS", -1)
        module.fill_links(near)
        assert control(near) == usual
        monkeypatch.setattr(module, "NEAR_MICROSECONDS", 10_000)
        module.fill_links(near)
        assert control(near) in (b"cubic", b"reno")
