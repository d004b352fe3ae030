"""Between connections and a shard: who is let in, what reaches the shard, and which answer goes where. No socket, no
clock: the server's loop (server.py) and clients within the same process use it alike.

A newer connection of an incarnation takes the place of its older one. Answers for a worker that is not connected are
dropped: the shard keeps what it needs to answer again.
"""

import hmac
import secrets
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
from torch import Tensor

from shoal.errors import ShoalError
from shoal.paramserver.messages import Challenge, Hello, Refused, Reply, Request, Welcome, Who, decode_request, encode
from shoal.paramserver.transport import Closed, Direct, Mailbox, Stream, Transport
from shoal.paramserver.wire_format import REPLY, REQUEST, STRANGER, BadFrame, Frame, Limits

REASONS_KEPT = 100
NONCE_BYTES = 32


class Answered(Protocol):
    @property
    def to(self) -> Who: ...
    @property
    def tag(self) -> int: ...
    @property
    def reply(self) -> Reply: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...


class Holder(Protocol):
    """What a desk needs of a shard."""

    shard: int
    shards: int
    epoch: int

    def hello(self, hello: Hello) -> Welcome | Refused: ...
    def owed(self) -> Iterable[Any]: ...
    def gone(self, who: Who) -> Iterable[Any]: ...
    def handle(
        self, who: Who, tag: int, sequence: int, epoch: int, request: Request, tensors: Sequence[Tensor]
    ) -> Iterable[Any]: ...


class Guest:
    """A connection, and who is on its other end once that is known."""

    def __init__(self, wire: Transport, name: str) -> None:
        self.wire, self.name = wire, name
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.who: Who | None = None
        self.ended = ""  # why
        self.descriptor = -1  # that the server waits on


class Desk:
    def __init__(
        self,
        shard: Holder,
        *,
        number: int = 0,
        count: int = 1,
        token: str | None = None,
        limits: Limits | None = None,
        ring_bytes: int = 0,
    ) -> None:
        self.shard, self.number, self.count = shard, number, count
        self.limits = limits or Limits()
        self._token = token.encode() if token else b""
        self._ring_bytes = ring_bytes
        self.guests: dict[Who, Guest] = {}
        self.closed: deque[str] = deque(maxlen=REASONS_KEPT)  # why connections were closed, the last ones
        self.counts: Counter[str] = Counter()  # connections by how they ended: "left", "bad frame", "refused", …
        self.touched: set[Guest] = set()  # whose connection has ended, or has no room for all that was sent

    def greet(self, guest: Guest) -> None:
        """The first word to a new connection."""
        if isinstance(guest.wire, Stream):
            guest.wire.limits = STRANGER
        self._send(guest, 0, Challenge(guest.nonce, self.number, self.count, bool(self._token)))

    def take(self, guest: Guest, frame: Frame) -> None:
        """A frame has come. `BadFrame`: it was none that a client sends."""
        if frame.kind != REQUEST:
            raise BadFrame("an answer came, but servers take requests")
        try:
            request = decode_request(frame.meta)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"a request that cannot be read: {error}") from None
        except (RecursionError, UnicodeDecodeError):
            raise BadFrame("a request that cannot be read") from None
        if type(request) is Hello:
            self._hello(guest, frame.tag, request)
            return
        who = guest.who
        if who is None:
            raise BadFrame(f"{type(request).__name__} came before Hello")
        if frame.worker != who.worker or frame.incarnation != who.incarnation:
            raise BadFrame(f"worker {who.worker} spoke as worker {frame.worker}, incarnation {frame.incarnation:x}")
        try:
            answers = self.shard.handle(who, frame.tag, frame.sequence, frame.epoch, request, frame.tensors)
        except ShoalError as error:
            self._send(guest, frame.tag, Refused("refused", error.message, error.fix or ""))
            return
        except Exception as error:  # a mistake of ours: one request of one worker must not end all the others' work
            traceback.print_exc(file=sys.stderr)
            self._send(guest, frame.tag, Refused("failed", f"{type(request).__name__} failed on the server: {error!r}"))
            return
        self.tell(answers)

    def tell(self, answers: Iterable[Answered]) -> None:
        """Sends what a shard has answered, to whom it concerns."""
        for answer in answers:
            guest = self.guests.get(answer.to)
            if guest is not None:
                self._send(guest, answer.tag, answer.reply, answer.tensors)

    def end(self, guest: Guest, kind: str, reason: str) -> None:
        """Closes a connection. Whoever was on it is told the reason, if that is still possible."""
        if guest.ended:
            return
        if kind in ("bad frame", "refused"):
            self._send(guest, 0, Refused(kind.replace(" ", "-"), reason))
        guest.ended = reason or kind
        self.touched.add(guest)
        self.counts[kind] += 1
        if kind != "left":
            self.closed.append(f"{guest.name}: {reason}")
        guest.wire.close()
        if guest.who is not None and self.guests.get(guest.who) is guest:
            del self.guests[guest.who]
            self.tell(self.shard.gone(guest.who))

    def _hello(self, guest: Guest, tag: int, hello: Hello) -> None:
        if self._token and not hmac.compare_digest(hello.proof, proof(self._token, guest.nonce)):
            what = "a wrong token" if hello.proof else "no token"
            self.end(guest, "refused", f"worker {hello.worker} came with {what}: this server needs the right one")
            return
        word = self.shard.hello(msgspec.structs.replace(hello, proof=b""))
        if not isinstance(word, Welcome):
            self._send(guest, tag, word)
            self.end(guest, "turned away", word.reason)
            return
        who = Who(hello.worker, word.incarnation)
        older = self.guests.get(who)
        guest.who = who
        self.guests[who] = guest
        if older is not None and older is not guest:
            self.end(older, "replaced", "a newer connection of the same process came")
        # An older process of the same worker has no say any more.
        for other in [each for each in self.guests if each.worker == who.worker and each != who]:
            self.end(self.guests[other], "replaced", "a newer process of the same worker came")
        frame = self._frame(who, tag, word)
        wire = guest.wire
        if isinstance(wire, Stream):
            wire.limits = self.limits
            if hello.memory and wire.local and self._ring_bytes:
                most = max(self._ring_bytes, 2 * self.limits.body_bytes)
                size = min(max(self._ring_bytes, hello.memory_bytes), most)
                try:
                    wire.send_memory(frame, size)
                except Closed as error:
                    self.end(guest, "left", str(error))
                self.tell(self.shard.owed())
                return
        self._deliver(guest, frame)
        self.tell(self.shard.owed())

    def _send(self, guest: Guest, tag: int, reply: Reply, tensors: Sequence[Tensor] = ()) -> None:
        self._deliver(guest, self._frame(guest.who or Who(0), tag, reply, tensors))

    def _frame(self, who: Who, tag: int, reply: Reply, tensors: Sequence[Tensor] = ()) -> Frame:
        return Frame(REPLY, who.worker, who.incarnation, 0, tag, self.shard.epoch, encode(reply), tensors)

    def _deliver(self, guest: Guest, frame: Frame) -> None:
        if guest.ended:
            return
        wire = guest.wire
        try:
            wire.send(frame)
        except Closed as error:
            self.end(guest, "left", str(error))
        else:
            if isinstance(wire, Stream) and wire.waiting:
                self.touched.add(guest)


def proof(token: bytes, nonce: bytes) -> bytes:
    """That one knows the token."""
    return hmac.digest(token, nonce, "sha256")


# -- within one process ------------------------------------------------------------------------------------------------

_desks: "WeakKeyDictionary[Any, Desk]" = WeakKeyDictionary()


def enter(shard: Any) -> Direct:
    """A connection to a shard of this process. Clients of one shard share its desk."""
    desk = _desks.get(shard)
    if desk is None:
        desk = _desks[shard] = Desk(shard, number=shard.shard, count=shard.shards)
    mailbox = Mailbox()
    guest = Guest(mailbox, "this process")

    def deliver(frame: Frame) -> None:
        try:
            desk.take(guest, frame)
        except BadFrame as error:
            desk.end(guest, "bad frame", str(error))

    mailbox.other = direct = Direct(deliver, lambda: desk.end(guest, "left", ""))
    desk.greet(guest)
    return direct
