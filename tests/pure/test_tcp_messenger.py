"""Messages through streams: two ranks in one process, at the two ends of a socket."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.collectives import tcp_messenger, tcp_stream
from shoal.collectives.handshake import GroupMember
from shoal.collectives.liveness import PeerLink
from shoal.collectives.shm_p2p import ANY_SOURCE
from shoal.collectives.spare_time import SpareTime
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.errors import CollectiveError, PeerLost
from shoal.transport.sealed_records import OVERHEAD_BYTES, RecordCipher
from shoal.transport.sealed_socket import SealedSocket

PATIENCE = 10.0  # seconds: of a thread that would hang


def member(rank: int) -> GroupMember:
    place = f"host{rank}"
    return GroupMember(
        rank=rank, host=place, name=place, rack="", address="127.0.0.1", pid=1, descriptor=-1, token="00" * 16
    )


@dataclass
class Ends:
    """The messengers of a rank 0 that is connected to all others."""

    hub: TcpMessenger
    others: list[TcpMessenger]


def connected(size: int = 2, slow: bool = False, medium: bool = False) -> Ends:
    members = [member(rank) for rank in range(size)]
    near: dict[int, Any] = {}
    others = []
    for rank in range(1, size):
        near[rank], far = socket.socketpair()
        for end in (near[rank], far):
            end.setblocking(False)
        others.append(TcpMessenger(members, rank, {0: far}))
    behind = range(1, size)
    return Ends(TcpMessenger(members, 0, near, behind if slow else (), behind if medium else ()), others)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = connected()
    yield made
    for messenger in (made.hub, *made.others):
        messenger.close()


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def in_thread(action: Any) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_messages_of_all_sizes_arrive_by_their_tags_in_any_order(ends: Ends) -> None:
    (other,) = ends.others
    sizes = [0, 1, 15, 16, 17, 8191, 8192, 8193, 70_000, 3_000_000, 5]
    sent = [values(size, tag) for tag, size in enumerate(sizes)]

    def send() -> None:
        for message in [other.send(each, 0, tag, "a send") for tag, each in enumerate(sent)]:
            message.wait()

    sender = in_thread(send)
    posted_before = [ends.hub.receive(torch.zeros_like(sent[2]), 1, 2, "a receive")]
    for tag in reversed(range(len(sizes))):  # the last first: all before it have to be set aside
        into = torch.zeros_like(sent[tag])
        message = posted_before.pop() if tag == 2 else ends.hub.receive(into, 1, tag, "a receive")
        message.wait()
        found = bytes(message.memory) if tag == 2 else bytes(into.tolist())
        assert found == bytes(sent[tag].tolist()), tag
    joined(sender)
    stream = ends.hub.streams[1]
    assert not stream.unexpected and stream.received_messages == len(sizes)
    assert stream.received_bytes == other.streams[0].sent_bytes == sum(sizes) + 16 * len(sizes)


def test_messages_of_one_tag_arrive_in_the_order_of_sending(ends: Ends) -> None:
    (other,) = ends.others
    for number in range(5):
        other.send(torch.tensor([number]), 0, 7, "a send")
    ends.hub.receive(torch.zeros(0), 1, 8, "nothing yet")  # wanted: all before it is read
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    for each in found:
        ends.hub.receive(each, 1, 7, "a receive").wait()
    assert [int(each) for each in found] == [0, 1, 2, 3, 4]


def test_without_a_receive_nothing_is_read_and_the_sender_is_held_back(ends: Ends) -> None:
    (other,) = ends.others
    large = values(32 << 20)
    wanted = ends.hub.receive(torch.zeros(3), ANY_SOURCE, 9, "another", attended=False)
    ends.hub.cancel_any(wanted)
    sending = other.send(large, 0, 1, "a send", attended=False)
    time.sleep(0.1)
    assert not sending.done
    assert ends.hub.streams[1].received_bytes == 0
    into = torch.zeros_like(large)
    ends.hub.receive(into, 1, 1, "a receive").wait()
    assert torch.equal(into, large)


def test_a_message_of_another_length_is_an_error_of_the_receive_alone(ends: Ends) -> None:
    (other,) = ends.others
    other.send(values(16), 0, 3, "a send")
    other.send(values(20), 0, 4, "a send")
    refused = ends.hub.receive(torch.zeros(20, dtype=torch.uint8), 1, 3, "recv from rank 1")
    with pytest.raises(CollectiveError, match="rank 1 on host1 sent 16 bytes with tag 3 to rank 0 on host0, which has"):
        refused.wait()
    into = torch.zeros(20, dtype=torch.uint8)
    ends.hub.receive(into, 1, 4, "recv from rank 1").wait()
    assert torch.equal(into, values(20))


def test_a_receive_from_any_rank_takes_what_came_first() -> None:
    ends = connected(4)
    try:
        tensors = [torch.zeros(3) for _ in range(3)]
        receives = [ends.hub.receive(each, ANY_SOURCE, 5, "recv", attended=False) for each in tensors]
        for rank in (2, 1):
            ends.others[rank - 1].send(torch.full((3,), float(rank)), 0, 5, "send").wait()
            receives[2 - rank].wait()
        ends.others[2].send(torch.full((3,), 3.0), 0, 5, "send").wait()
        receives[2].wait()
        assert [receive.source for receive in receives] == [2, 1, 3]
        assert [float(each[0]) for each in tensors] == [2.0, 1.0, 3.0]
    finally:
        for messenger in (ends.hub, *ends.others):
            messenger.close()


def test_several_threads_wait_at_once_and_each_gets_its_own(ends: Ends) -> None:
    (other,) = ends.others
    tensors = [torch.zeros(1000) for _ in range(12)]

    def take(tag: int) -> None:
        ends.hub.receive(tensors[tag], 1, tag, "recv").wait()

    waiting = [in_thread(lambda tag=tag: take(tag)) for tag in range(12)]
    for tag in (5, 0, 11, 3, 7, 1, 2, 4, 6, 8, 9, 10):
        time.sleep(0.002)
        other.send(torch.full((1000,), float(tag)), 0, tag, "send").wait()
    joined(*waiting)
    assert [float(each.sum()) for each in tensors] == [1000.0 * tag for tag in range(12)]


def test_a_receive_is_served_while_another_thread_waits_for_a_send(ends: Ends) -> None:
    """On both ranks a thread waits for a send that nobody reads. What is in the sockets has been reported before
    anybody wanted it, so a receive that is posted then has to wake the thread that leads."""
    pairs = ((ends.hub, 1), (ends.others[0], 0))
    size = 4 << 20
    sends = [messenger.send(torch.ones(size, dtype=torch.uint8), peer, 0, "a send") for messenger, peer in pairs]
    threads = [threading.Thread(target=send.wait, daemon=True) for send in sends]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE
    while not all(messenger._leading for messenger, _ in pairs) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)  # the leaders have taken what was reported, and sleep
    receives = [messenger.receive(torch.zeros(size, dtype=torch.uint8), peer, 0, "it") for messenger, peer in pairs]
    threads += [threading.Thread(target=receive.wait, daemon=True) for receive in receives]
    for thread in threads[2:]:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert all(bool(receive.tensor.all()) and receive.done for receive in receives) and all(send.done for send in sends)


def test_the_reader_of_a_long_message_sleeps_until_the_rest_of_it_is_there() -> None:
    """Also where its header has come with the first part of its bytes, in one read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    one, other, size = bytes(range(32)), bytes(range(1, 33)), 200_000
    messenger = TcpMessenger([member(0), member(1)], 1, {0: SealedSocket(near, other, one)})
    cipher, sent = RecordCipher(one), b""
    for plain in (struct.pack("<qQ", 0, size), bytes(size)):
        record = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
        cipher.seal(plain, record)
        sent += bytes(record)
    far.sendall(sent[:-60_000])
    receive = messenger.receive(torch.ones(size, dtype=torch.uint8), 0, 0, "a receive")
    waits = threading.Thread(target=receive.wait, daemon=True)
    waits.start()
    until = time.monotonic() + PATIENCE
    while near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != 60_000 and time.monotonic() < until:
        time.sleep(0.01)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 60_000
    far.sendall(sent[-60_000:])
    waits.join(PATIENCE)
    assert receive.done and not receive.tensor.any()
    messenger.close()
    far.close()


class _SpyPoll:
    """An epoll that counts how often somebody looks without sleeping."""

    def __init__(self, real: Any) -> None:
        self.real, self.looks = real, 0

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self.looks += timeout == 0
        found: list[tuple[int, int]] = self.real.poll(timeout)
        return found

    def close(self) -> None:
        self.real.close()


@pytest.mark.parametrize(("soon", "length", "looks"), [(True, 8, True), (False, 8, False), (True, 1 << 17, False)])
def test_a_wait_looks_before_it_sleeps_if_the_last_answer_came_soon(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, soon: bool, length: int, looks: bool
) -> None:
    """Only for small messages, and never for longer than SOON_SECONDS: here that is until the answer is there."""
    monkeypatch.setattr(tcp_messenger, "SOON_SECONDS", PATIENCE)
    spy = ends.hub._epoll = _SpyPoll(ends.hub._epoll)
    ends.hub._answers_soon = soon
    receive = ends.hub.receive(torch.empty(length, dtype=torch.uint8), 1, 0, "a receive")
    answer = threading.Timer(0.2, lambda: ends.others[0].send(torch.ones(length, dtype=torch.uint8), 0, 0, "a send"))
    answer.start()
    receive.wait()
    answer.join()
    assert (spy.looks > 20) is looks
    if length == 8:
        assert ends.hub._answers_soon, "this one came within SOON_SECONDS"


def test_messages_move_though_nobody_waits(ends: Ends) -> None:
    (other,) = ends.others
    large = values(8 << 20)
    into = torch.zeros_like(large)
    receiving = ends.hub.receive(into, 1, 1, "recv", attended=False)
    sending = other.send(large, 0, 1, "send", attended=False)
    until = time.monotonic() + PATIENCE
    while not (sending.done and receiving.done) and time.monotonic() < until:
        time.sleep(0.001)
    assert torch.equal(into, large)
    # And a caller that waits takes the lead from the thread.
    for number in range(50):
        small = torch.zeros(2)
        receiving = ends.hub.receive(small, 1, 2, "recv", attended=False)
        other.send(torch.full((2,), float(number)), 0, 2, "send", attended=False)
        receiving.wait()
        assert float(small[1]) == number


def test_a_failure_ends_all_waits_at_once(ends: Ends) -> None:
    said: list[str] = []

    def take(tag: int) -> None:
        try:
            ends.hub.receive(torch.zeros(3), 1 if tag else ANY_SOURCE, tag, "recv").wait()
        except CollectiveError as error:
            said.append(str(error))

    waiting = [in_thread(lambda tag=tag: take(tag)) for tag in range(4)]
    time.sleep(0.05)
    began = time.monotonic()
    ends.hub.fail(PeerLost("rank 1 is gone"))
    joined(*waiting)
    assert time.monotonic() - began < 1.0
    assert said == ["rank 1 is gone"] * 4
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ends.hub.send(torch.zeros(3), 1, 0, "send").wait()


def test_what_was_sent_before_the_end_of_a_rank_arrives_and_the_rest_is_lost(ends: Ends) -> None:
    (other,) = ends.others
    asked: list[tuple[int, str]] = []

    def explain(peer: int, fact: str) -> CollectiveError:
        asked.append((peer, fact))
        return PeerLost("its process has ended")

    ends.hub.explain_loss = explain
    other.send(torch.ones(1000), 0, 1, "send").wait()
    other.close()
    into = torch.zeros(1000)
    first, second = ends.hub.receive(into, 1, 1, "recv"), ends.hub.receive(torch.zeros(5), 1, 2, "recv")
    first.wait()
    assert float(into.sum()) == 1000.0
    for message in (second, ends.hub.receive(torch.zeros(5), 1, 3, "recv"), ends.hub.send(torch.zeros(5), 1, 4, "s")):
        with pytest.raises(PeerLost, match="its process has ended"):
            message.wait()
    assert asked == [(1, "the connection to it was closed")] * 3


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("tag", [3, 4])  # one that is asked for, and another
def test_a_message_longer_than_any_memory_loses_that_rank_alone(length: int, tag: int) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    hub = TcpMessenger([member(0), member(1)], 0, {1: near})
    hub.explain_loss = lambda peer, fact: PeerLost(f"rank {peer}: {fact}")
    receive = hub.receive(torch.empty(8), 1, 3, "a test")
    far.sendall(struct.pack("<qQ", tag, length))
    announced = length % tcp_stream.PACKED
    with pytest.raises(PeerLost, match=f"rank 1: it announced a message of {announced} bytes"):
        receive.wait()
    hub.close()
    far.close()


def test_half_a_header_does_not_keep_other_ranks_from_their_messages() -> None:
    """Rank 1 sends 5 bytes and no more; the message to rank 2 leaves all the same, while the hub waits for both."""
    members = [member(rank) for rank in range(3)]
    pairs = [socket.socketpair() for _ in range(2)]
    for near, _ in pairs:
        near.setblocking(False)
    hub = TcpMessenger(members, 0, {1: pairs[0][0], 2: pairs[1][0]})
    pairs[0][1].sendall(bytes(5))
    hub.receive(torch.empty(8, dtype=torch.uint8), 1, 3, "a test")
    sent = hub.send(values(4_000_000), 2, 4, "a test")

    def read() -> None:
        left = 4_000_000 + 16
        while left:
            left -= len(pairs[1][1].recv(1 << 16))

    reader = in_thread(read)
    hub.wait(sent, PATIENCE)
    assert sent.done
    joined(reader)
    hub.close()
    for _, far in pairs:
        far.close()


def test_messages_that_nobody_asked_for_are_held_up_to_a_limit(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that floods another loses its own connection; what is taken makes room again."""
    monkeypatch.setattr(tcp_stream, "HELD_BYTES", 1000)
    (other,) = ends.others
    ends.hub.explain_loss = lambda peer, fact: PeerLost(f"rank {peer}: {fact}")
    for round_number in range(3):  # 800 bytes each time
        for tag in range(8):
            other.send(values(100, tag), 0, tag, "a send")
        other.send(values(1), 0, 99, "a send")
        ends.hub.receive(torch.empty(1, dtype=torch.uint8), 1, 99, "a test").wait()
        for tag in range(8):
            into = torch.empty(100, dtype=torch.uint8)
            ends.hub.receive(into, 1, tag, f"round {round_number}").wait()
            assert torch.equal(into, values(100, tag))
    for tag in range(11):
        other.send(values(100, tag), 0, tag, "a send")
    with pytest.raises(PeerLost, match="rank 1: it announced a message of 100 bytes that this rank has not asked for"):
        ends.hub.receive(torch.empty(1, dtype=torch.uint8), 1, 99, "a test").wait()


def test_a_message_of_another_length_than_its_receive_counts_as_not_asked_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_stream, "HELD_BYTES", 1000)
    (other,) = ends.others
    ends.hub.explain_loss = lambda peer, fact: PeerLost(f"rank {peer}: {fact}")
    other.send(values(1001), 0, 3, "a send")
    with pytest.raises(PeerLost, match="rank 1: it announced a message of 1001 bytes"):
        ends.hub.receive(torch.empty(8, dtype=torch.uint8), 1, 3, "a test").wait()


def test_a_rank_that_never_stops_reporting_takes_bounded_memory() -> None:
    class Endless:
        """A connection that has bytes whenever it is asked, up to 4 MB."""

        asked = 0

        def setblocking(self, flag: bool) -> None: ...

        def setsockopt(self, level: int, option: int, value: int) -> None: ...

        def recv(self, count: int) -> bytes:
            self.asked += count
            if self.asked > 4 << 20:
                raise BlockingIOError
            return bytes(count)

    endless = Endless()
    PeerLink(1, endless).receive()
    assert endless.asked <= (1 << 20) + (1 << 17)


@pytest.fixture
def slow_ends() -> Iterator[Ends]:
    made = connected(3, slow=True)
    yield made
    for messenger in (made.hub, *made.others):
        messenger.close()


def floats(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("early", [True, False])  # whether the receive is posted before the message comes
def test_floats_to_a_slow_rank_are_packed_and_arrive_to_the_bit(slow_ends: Ends, early: bool) -> None:
    hub, other = slow_ends.hub, slow_ends.others[0]
    sent = [floats(100_000), values(100_000), floats(10), floats(200_000, seed=1)]
    found = [torch.empty_like(each) for each in sent]
    receives = [other.receive(found[0], 0, 0, "a test")] if early else []
    sends = [hub.send(tensor, 1, tag, "a test") for tag, tensor in enumerate(sent)]
    waiting = in_thread(lambda: [send.wait() for send in sends])
    last = other.receive(found[3], 0, 3, "a test")
    last.wait()
    for tag in range(len(receives), 3):
        receives.append(other.receive(found[tag], 0, tag, "a test"))
    for receive in receives:
        receive.wait()
    joined(waiting)
    assert all(torch.equal(one, other) for one, other in zip(found, sent, strict=True))
    plain = sum(each.nbytes for each in sent)
    assert [send.packed for send in sends] == [True, False, False, True]
    assert hub.streams[1].sent_bytes == other.streams[0].received_bytes < 0.95 * plain


def test_a_tensor_for_several_slow_ranks_is_packed_once(slow_ends: Ends) -> None:
    hub, tensor = slow_ends.hub, floats(20_000)
    first = hub.send(tensor, 1, 0, "a test")
    second = hub.send(tensor, 2, 0, "a test", like=first)
    assert first.packed and second.packed and second.tensor is first.tensor
    for other in slow_ends.others:
        found = torch.empty_like(tensor)
        other.receive(found, 0, 0, "a test").wait()
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("early", [True, False])
def test_packed_floats_for_memory_of_another_length_lose_that_rank_alone(slow_ends: Ends, early: bool) -> None:
    hub, (one, other) = slow_ends.hub, slow_ends.others
    one.explain_loss = lambda peer, fact: PeerLost(f"rank {peer}: {fact}")
    tensor, short = floats(20_000), torch.empty(10_000)
    receive = one.receive(short, 0, 0, "a test") if early else None
    hub.send(tensor, 1, 0, "a test")
    hub.send(tensor, 2, 0, "a test")
    with pytest.raises(PeerLost, match="rank 0: 20000 packed floats of 4 bytes came for memory of 40000 bytes"):
        (receive or one.receive(short, 0, 0, "a test")).wait()
    found = torch.empty_like(tensor)
    other.receive(found, 0, 0, "a test").wait()
    assert torch.equal(found, tensor)


def test_floats_to_a_rank_of_medium_speed_are_packed_while_a_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connected(3, medium=True)
    tensor, packed = floats(20_000), []
    for idle in (False, True):
        monkeypatch.setattr(SpareTime, "look", lambda _, idle=idle: idle)
        first = made.hub.send(tensor, 1, 0, "a test")
        second = made.hub.send(tensor, 2, 0, "a test", like=first)
        packed += [first.packed, second.packed]
        for other in made.others:
            found = torch.empty_like(tensor)
            other.receive(found, 0, 0, "a test").wait()
            assert torch.equal(found, tensor)
    assert packed == [False, False, True, True]
    for messenger in (made.hub, *made.others):
        messenger.close()
