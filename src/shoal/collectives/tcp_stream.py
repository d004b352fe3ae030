"""One connection that carries the tensors between two ranks of different hosts. Nothing here blocks or locks.

    header: tag, length │ the tensor's bytes │ header │ …

The highest bit of a length marks packed floats (float_packing.py), of which the length counts the packed bytes.

A message leaves from the tensor's own memory, and arrives in the memory of the receive that is posted for it. A rank
reads from another only while it has a receive for it. Until then the bytes stay with the sender, whom TCP holds back:
so a rank holds no more than what was sent before a message that it wants, and a peer that sends too much of that is
lost.
"""

import ctypes
import itertools
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.collectives.float_packing import FloatPacker, PackingDamaged
from shoal.collectives.receive_claim import ReceiveClaim
from shoal.errors import CollectiveError

_HEADER = struct.Struct("<qQ")  # tag, length
HEADER_BYTES = _HEADER.size
PACKED = 1 << 63
LONG_BYTES = 128 << 10  # of a message for which a reader sleeps until it is there
STAGE_BYTES = 8 << 10  # read at once with a header, so that a small message takes one call of the system
GATHER_BYTES = 64 << 10  # messages that leave in one call
GATHER_MESSAGES = 8
HELD_BYTES, HELD_MESSAGES = 4 << 30, 1 << 16  # at most, of one rank's messages that this one has not asked for
PULL_BYTES, PULL_TURNS = 4 << 20, 4096  # bytes and reads of one rank before the others get their turn
_arrivals = itertools.count()


@lru_cache(maxsize=4096)
def _array_type(num_bytes: int) -> Any:
    return ctypes.c_ubyte * num_bytes


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor. The caller keeps the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview(_array_type(tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class MessageOwner(Protocol):
    finished: int  # messages, with or without an error

    def wait(self, message: "TcpMessage", seconds: float | None = None) -> None:
        """Returns when the message is done."""
        ...

    def explain_loss(self, peer: int, fact: str) -> CollectiveError: ...


class TcpMessage:
    """A send or a receive in progress. `peer` is the other rank; a receive from any rank learns it late. `packed`: the
    tensor of a send has packed floats."""

    patience = -1  # of a thread that waits for it while another one leads: without end

    def __init__(
        self,
        owner: MessageOwner,
        tensor: Tensor,
        peer: int,
        tag: int,
        op: object,
        claim: ReceiveClaim | None = None,
        packed: bool = False,
    ) -> None:
        self._owner, self.tensor, self.peer, self.tag, self.claim = owner, tensor, peer, tag, claim
        self.packed = packed
        self.op = op  # what the message belongs to, for errors
        self.memory = memory_of(tensor)
        self.length = len(self.memory)
        self.moved = 0
        self.done = False
        self.lost = ""  # why the other rank can no longer take part
        self.error: CollectiveError | None = None
        self.baton: Any = None  # a lock that wakes the thread that waits for this message

    @property
    def source(self) -> int:
        return self.peer

    @property
    def header(self) -> bytes:
        return _HEADER.pack(self.tag, self.length | PACKED if self.packed else self.length)

    def wait(self, timeout: float | None = None) -> None:
        """The timeout is the monitor's (peer_monitor.py): it ends the wait with an error that names the late rank."""
        if not self.done:
            self._owner.wait(self)
        if self.lost:
            self.error, self.lost = self._owner.explain_loss(self.peer, self.lost), ""
        if self.error is not None:
            raise self.error

    def finish(self, error: CollectiveError | None = None, lost: str = "") -> None:
        self.error, self.lost, self.done = error, lost, True
        self._owner.finished += 1
        if self.baton is not None:
            self.baton.release()
            self.baton = None


class TcpArrival:
    """A message that is read, or that was read before its receive was posted: then it has memory of its own."""

    __slots__ = ("length", "memory", "moved", "number", "packed", "receive", "tag", "tensor")

    def __init__(self, tag: int, length: int, packed: bool, receive: TcpMessage | None) -> None:
        self.tag, self.length, self.packed, self.receive = tag, length, packed, receive
        self.number = next(_arrivals)
        self.moved = 0
        self.tensor: Tensor | None = None
        if receive is not None and receive.length == length and not packed:
            self.memory = receive.memory
        else:
            try:
                self.tensor = torch.empty(length, dtype=torch.uint8)
            except (RuntimeError, TypeError, OverflowError):  # more than there can be
                raise OSError(f"it announced a message of {length} bytes, which this rank cannot take") from None
            self.memory = memory_of(self.tensor)


class TcpStream:
    """`any_source` has the receives from any rank, by tag: all streams of a rank share it. `refuse` makes the error of
    a receive whose message has another length."""

    def __init__(
        self,
        peer: int,
        connection: Any,
        any_source: dict[int, deque[TcpMessage]],
        refuse: Callable[[int, TcpMessage, int], CollectiveError],
        packer: FloatPacker | None = None,
    ) -> None:
        self._unpack = (packer or FloatPacker()).unpack
        self.peer, self.connection, self._any_source, self._refuse = peer, connection, any_source, refuse
        self.out: deque[TcpMessage] = deque()
        self.unexpected: dict[int, deque[TcpArrival]] = {}  # by tag
        self.readable = self.writable = True  # as far as known: the system reports only changes
        self.closed = ""  # why nothing more arrives
        self.broken = ""  # why nothing more leaves
        self.sent_bytes = self.sent_messages = self.received_bytes = self.received_messages = 0
        self._posted: defaultdict[int, deque[TcpMessage]] = defaultdict(deque)  # by tag
        self._waiting = 0  # receives from this rank that are not done
        self._held_bytes = self._held_messages = 0  # of `unexpected`
        self._arrival: TcpArrival | None = None
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._staged = (0, 0)  # start and end of the bytes behind a header that are not taken yet
        self._plain = isinstance(connection, socket.socket)  # then a short read or write is the last for now

    # -- sending ------------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Sends as much as the system takes."""
        out = self.out
        while out and self.writable:
            buffers, size = self._gather(out[0])
            try:
                sent = self.connection.sendmsg(buffers)
            except BlockingIOError:
                self.writable = False
                return
            except OSError as error:
                self._break(_loss_text(error))
                return
            except BaseException:  # a signal of the user's: what was sent is not counted
                self.close("a send was interrupted")
                raise
            if sent < size and self._plain:
                self.writable = False
            self.sent_bytes += sent
            while sent:
                message = out[0]
                left = HEADER_BYTES + message.length - message.moved
                if sent < left:
                    message.moved += sent
                    break
                sent -= left
                out.popleft()
                self.sent_messages += 1
                message.finish()

    def _gather(self, first: TcpMessage) -> tuple[list[Any], int]:
        """The buffers of the next call of the system: the rest of a message, and whole small ones behind it."""
        moved = first.moved
        if not moved:
            buffers: list[Any] = [first.header, first.memory]
        elif moved < HEADER_BYTES:
            buffers = [first.header[moved:], first.memory]
        else:
            buffers = [first.memory[moved - HEADER_BYTES :]]
        size = HEADER_BYTES + first.length - moved
        if len(self.out) > 1 and size < GATHER_BYTES:
            for message in itertools.islice(self.out, 1, GATHER_MESSAGES):
                if size + HEADER_BYTES + message.length > GATHER_BYTES:
                    break
                buffers += (message.header, message.memory)
                size += HEADER_BYTES + message.length
        return buffers, size

    # -- receiving ----------------------------------------------------------------------------------------------------

    def post(self, receive: TcpMessage) -> None:
        """Takes the message if it has arrived before its receive, or notes that it is wanted."""
        found = self.unexpected.get(receive.tag)
        if found:
            self.give(found[0], receive)
        else:
            self._posted[receive.tag].append(receive)
            self._waiting += 1

    def give(self, arrival: TcpArrival, receive: TcpMessage) -> None:
        """Gives a message with memory of its own to a receive: now, or when the rest of it has come."""
        self._forget(arrival)
        arrival.receive = receive
        self._waiting += 1
        if arrival is not self._arrival:
            self._complete(arrival, receive)

    def _forget(self, arrival: TcpArrival) -> None:
        queue = self.unexpected[arrival.tag]
        queue.remove(arrival)
        if not queue:
            del self.unexpected[arrival.tag]
        self._held_bytes -= arrival.length
        self._held_messages -= 1

    @property
    def due(self) -> bool:
        """Whether bytes may be there, and this rank wants some from the other."""
        if not self._waiting and not self._any_source:
            return False
        return (self.readable or self._staged[1] - self._staged[0] >= HEADER_BYTES) and not self.closed

    def pull(self, ended: Callable[[], bool]) -> bool:
        """Reads what is there, until a message after which the caller has `ended`, nobody wants more, or others should
        have a turn. Returns whether there may be more."""
        before, turns = self.received_bytes, 0
        while self.due:
            arrival, turns = self._arrival, turns + 1
            try:
                if arrival is None:
                    arrival = self._arrival = self._begin()
                    if arrival is not None and arrival.length >= LONG_BYTES and not self._plain:
                        self.readable = True  # perhaps: the next read says how much more is to come
                elif arrival.moved < arrival.length:
                    if not self._plain and arrival.length >= LONG_BYTES:
                        self.connection.owed = arrival.length - arrival.moved
                    arrival.moved += self._read_into(arrival.memory[arrival.moved :])
            except BlockingIOError:
                self.readable = False
                return False
            except OSError as error:
                self.close(_loss_text(error))
                return False
            except BaseException:  # a signal of the user's: what was read is not counted
                self.close("a read was interrupted")
                raise
            if arrival is not None and arrival.moved == arrival.length:
                self._arrival = None
                self.received_messages += 1
                if arrival.receive is not None:
                    self._complete(arrival, arrival.receive)
                    if ended():
                        return True
            if self.received_bytes - before >= PULL_BYTES or turns == PULL_TURNS:
                return True
        return False

    def _begin(self) -> TcpArrival | None:
        """Reads a header, and some bytes behind it. Returns the message that begins, with its first bytes."""
        start, end = self._staged
        if end - start < HEADER_BYTES:
            self._stage[: end - start] = self._stage[start:end]
            start, end = 0, end - start
            self._staged = (start, end)  # the read may raise
            if not self._plain:
                self.connection.owed = 0
            end += self._read_into(self._stage[end:])
            self._staged = (start, end)
            if end - start < HEADER_BYTES:
                return None
        tag, length = _HEADER.unpack_from(self._stage, start)
        packed, length = length >= PACKED, length % PACKED
        start += HEADER_BYTES
        receive = self._match(tag)
        try:
            if receive is None or (receive.length < length if packed else receive.length != length):
                self._check_room(length)
            arrival = TcpArrival(tag, length, packed, receive)
        except OSError as error:
            if receive is not None:  # it is no longer among those that `close` ends
                receive.finish(lost=_loss_text(error))
            raise
        if receive is None:
            self.unexpected.setdefault(tag, deque()).append(arrival)
            self._held_bytes += length
            self._held_messages += 1
        count = min(length, end - start)
        if count:
            arrival.memory[:count] = self._stage[start : start + count]
            arrival.moved = count
        self._staged = (start + count, end)
        return arrival

    def _check_room(self, length: int) -> None:
        """Raises for a message that nobody has asked for, or not in this length, where too much of that is held. The
        system gives memory as bytes come."""
        if self._held_bytes + length > HELD_BYTES or self._held_messages >= HELD_MESSAGES:
            raise OSError(
                f"it announced a message of {length} bytes that this rank has not asked for, and a rank holds"
                f" {HELD_MESSAGES} such messages and {HELD_BYTES >> 30} GiB of them at most"
            )

    def _match(self, tag: int) -> TcpMessage | None:
        queue = self._posted.get(tag)
        if queue:
            receive = queue.popleft()
            if not queue:
                del self._posted[tag]
            return receive
        return self._match_any(tag)

    def _match_any(self, tag: int) -> TcpMessage | None:
        queue = self._any_source.get(tag)
        while queue:
            receive = queue.popleft()
            if not queue:
                del self._any_source[tag]
            if receive.claim is None or receive.claim.take():
                receive.peer = self.peer
                self._waiting += 1
                return receive
        return None

    def _read_into(self, memory: memoryview) -> int:
        count: int = self.connection.recv_into(memory)
        if not count:
            raise ConnectionResetError
        if count < len(memory) and (self._plain or self.connection.drained):
            self.readable = False
        self.received_bytes += count
        return count

    def _complete(self, arrival: TcpArrival, receive: TcpMessage) -> None:
        self._waiting -= 1
        if arrival.packed:
            try:
                self._unpack(arrival.memory, receive.memory)
            except PackingDamaged as error:
                receive.finish(lost=str(error))
                self.close(str(error))
            else:
                receive.finish()
            return
        if arrival.length != receive.length:
            receive.finish(self._refuse(self.peer, receive, arrival.length))
            return
        if arrival.tensor is not None and arrival.length:
            receive.memory[:] = arrival.memory
        receive.finish()

    # -- the end ------------------------------------------------------------------------------------------------------

    def pending(self) -> list[TcpMessage]:
        """Messages that are not done."""
        found = [*self.out, *(receive for queue in self._posted.values() for receive in queue)]
        if self._arrival is not None and self._arrival.receive is not None:
            found.append(self._arrival.receive)
        return found

    def _break(self, reason: str) -> None:
        """Nothing more leaves; what the other rank had sent before may still arrive."""
        self.broken = reason
        while self.out:
            self.out.popleft().finish(lost=reason)

    def close(self, reason: str, error: CollectiveError | None = None) -> None:
        """Ends the messages that are not done: with the error, or as lost for this reason."""
        found = self.pending()
        self.closed = self.broken = reason
        self.out.clear()
        self._posted.clear()
        if self._arrival is not None and self._arrival.receive is None:
            self._forget(self._arrival)
        self._arrival, self._waiting = None, 0
        for message in found:
            message.finish(error, "" if error is not None else reason)


def _loss_text(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "the connection to it was closed"
    return error.strerror or str(error)
