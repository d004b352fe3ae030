"""A TLS connection behaves as a non-blocking socket does, and no byte of a stranger gets through it."""

import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from helpers.tls_pairs import received
from shoal.transport.authority import RunAuthority
from shoal.transport.credentials import Credentials
from shoal.transport.frame_format import REQUEST, Frame
from shoal.transport.frame_socket import SocketTransport
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.secure_socket import TlsSocket, handshake, secure

AUTHORITY = RunAuthority.new("run-1")
WORKER, SERVER, VIEWER = (AUTHORITY.issue(role, "0") for role in (Role.WORKER, Role.SERVER, Role.VIEWER))
EVERYONE = tuple(Role)


Pair = tuple[socket.socket, socket.socket]
opened: list[TlsSocket] = []


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    yield here, there
    for each in (here, there, *opened):
        each.close()
    opened.clear()


def tls(connection: socket.socket, credentials: Credentials, server_side: bool, roles: Sequence[Role]) -> TlsSocket:
    opened.append(TlsSocket(connection, credentials, server_side=server_side, roles=roles))
    return opened[-1]


def connected(pair: Pair) -> tuple[TlsSocket, TlsSocket]:
    client = tls(pair[0], WORKER, False, EVERYONE)
    server = tls(pair[1], SERVER, True, EVERYONE)
    other = threading.Thread(target=handshake, args=(server, 5.0))
    other.start()
    handshake(client, 5.0)
    other.join()
    return client, server


def test_both_ends_know_each_other_before_a_byte_is_read(pair: Pair) -> None:
    client, server = connected(pair)
    assert client.peer is not None and (client.peer.role, client.peer.run) == (Role.SERVER, "run-1")
    assert server.peer is not None and server.peer.role == Role.WORKER
    assert client.send(b"hello") == 5
    assert received(server, 5) == b"hello"
    with pytest.raises(BlockingIOError):
        server.recv(1)
    client.close()
    select.select([server], [], [], 5)
    assert server.recv(1) == b""


def test_buffers_arrive_in_order_although_the_peer_reads_late(pair: Pair) -> None:
    """What the socket does not take is offered again, in other pieces than before."""
    client, server = connected(pair)
    parts = [
        bytes([number % 251]) * size for number, size in enumerate((10, 70_000, 3, 16_384, 900_000, 1, 40_000) * 9)
    ]
    whole = b"".join(parts)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: (time.sleep(0.2), found.append(received(server, len(whole)))))
    reader.start()
    sent = blocked = 0
    while sent < len(whole):
        rest = memoryview(whole)[sent:]
        try:
            # Another cut of the same bytes each time.
            sent += client.sendmsg([rest[:7], rest[7 : 50_000 + blocked], rest[50_000 + blocked :]])
        except BlockingIOError:
            blocked += 1
            select.select([], [client], [], 1)
    reader.join()
    assert blocked, "the peer never was late: the test proves nothing"
    assert found[0] == whole


def test_a_plaintext_client_is_refused(pair: Pair) -> None:
    server = tls(pair[1], SERVER, True, EVERYONE)
    pair[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(PeerRefused):
        handshake(server, 5.0)
    assert server.peer is None


def test_a_silent_client_costs_bounded_time(pair: Pair) -> None:
    server = tls(pair[1], SERVER, True, EVERYONE)
    with pytest.raises(TimeoutError, match="no TLS handshake within"):
        handshake(server, 0.1)


def test_a_role_that_is_not_admitted_is_named(pair: Pair) -> None:
    client = tls(pair[0], VIEWER, False, EVERYONE)
    server = tls(pair[1], SERVER, True, [Role.WORKER, Role.DRIVER])
    other = threading.Thread(target=handshake, args=(client, 5.0))
    other.start()
    with pytest.raises(
        PeerRefused, match=r"viewer 0 of run run-1 has connected to server 0 .* accepts the role driver or worker"
    ):
        handshake(server, 5.0)
    other.join()


def test_a_changed_byte_on_the_way_ends_the_connection(pair: Pair) -> None:
    """Between the two ends is a third that flips one bit of what it passes on, after the handshake."""
    client_end, middle_left = pair
    middle_right, server_end = socket.socketpair()
    client = tls(client_end, WORKER, False, EVERYONE)
    server = tls(server_end, SERVER, True, EVERYONE)
    tamper = threading.Event()

    def relay(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if tamper.is_set() else data)

    threads = [
        threading.Thread(target=relay, args=ends) for ends in ((middle_left, middle_right), (middle_right, middle_left))
    ]
    for thread in threads:
        thread.start()
    other = threading.Thread(target=handshake, args=(server, 5.0))
    other.start()
    handshake(client, 5.0)
    other.join()
    client.send(b"first")
    assert received(server, 5) == b"first"
    tamper.set()
    client.send(b"second")
    with pytest.raises(PeerRefused):
        received(server, 6)
    for end in (client, server):
        end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    middle_right.close()


def test_without_credentials_the_socket_is_as_it_was(pair: Pair) -> None:
    assert secure(pair[0], None, server_side=False, roles=()) is pair[0]
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)


def test_frames_with_tensors_travel_through_tls(pair: Pair) -> None:
    client, server = connected(pair)
    sender, receiver = SocketTransport(client), SocketTransport(server, copies=True)
    sizes = [0, 1, 1000, 16_000, 17_000, 65_000, 300_000, 5, 1_000_000] * 3
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    for number, tensor in enumerate(tensors):
        sender.send(Frame(REQUEST, 0, 0, 0, number, 0, b"meta", [tensor]))
    found: list[int] = []
    until = time.monotonic() + 20
    while len(found) < len(tensors) and time.monotonic() < until:
        sender.flush()
        frame = receiver.receive()
        if frame is None:
            if not receiver.buffered:
                select.select([receiver], [sender] if sender.unsent_bytes else [], [], 1)
            continue
        assert torch.equal(frame.tensors[0], tensors[frame.tag])
        found.append(frame.tag)
        frame.release()
    assert found == list(range(len(tensors)))
