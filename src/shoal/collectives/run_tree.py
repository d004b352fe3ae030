"""Plays a route over messages between pairs of ranks: sums up to the roots, results down again, or only one of both.

    turn       0        1        2        3        4        5        6         SKEW = 2: chunks on their way from one
    leaves     send 0   send 1   send 2   send 3   …                           stage to the next. A link has work while
    parents                      add 0    add 1    add 2    add 3    …         ranks add, and nobody waits for a chunk
    roots                                          add 0    add 1    add 2     that was sent only just now.

Pieces travel in chunks. Leaves send a chunk in the turn of its number; each stage comes SKEW turns after the one below
it, up to the root and down again. Receives are posted AHEAD of the turn in which the leaves send: a message that nobody
has asked for yet would have to wait for the asking, behind whatever else is on the line.

All ranks take their duties in one order (turn; up before down), and whatever a duty waits for was sent in an earlier
turn, so the first duty that is not done yet can always be done: nobody waits in a circle.

A result arrives where the operand of the same chunk has been; it cannot arrive before that operand was delivered.
"""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.collectives.cost_model import complete_assignment, compressed_level
from shoal.collectives.reduction import Combine
from shoal.collectives.topology import Level, RankPlace, level_setting, link_level
from shoal.collectives.trees import GRAIN, TreeRoute, TreeTask, chunk_size, piece_bounds, tree_tasks
from shoal.numerics.lanes import Span

RECEIVES_AHEAD = 8  # turns; also how long a send has before it is waited for
SKEW = 2  # turns


class PendingMessage(Protocol):
    def wait(self) -> object: ...


class Messenger(Protocol):
    """Messages between pairs of ranks, told apart by their tags. Tensors are flat and contiguous, and belong to the
    mail until it is done. A send may wait for its receive to be posted, and for a turn of either side's `wait`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, to: int, tag: int) -> PendingMessage: ...

    def receive(self, tensor: Tensor, source: int, tag: int) -> PendingMessage: ...


class Codec(Protocol):
    """What a relay needs of a compressor."""

    def payload_bytes(self, count: int) -> int: ...

    def encode(self, flat: Tensor, key: Hashable) -> Tensor: ...

    def decode(self, payload: Tensor, count: int) -> Tensor: ...


@dataclass
class ByteCounts:
    """Bytes that this rank sent, by level, and how many the same messages would have had without compression."""

    sent: Counter[Level] = field(default_factory=Counter)
    uncompressed: Counter[Level] = field(default_factory=Counter)


class TensorPool:
    """Room for sums on their way; kept from one chunk, or relay, to the next: fresh memory costs more than an add."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def acquire(self, count: int, dtype: torch.dtype) -> Tensor:
        free = self._free.get((count, dtype))
        return free.pop() if free else torch.empty(count, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def clear(self) -> None:
        self._free.clear()


def split_pieces(route: TreeRoute, flat: Tensor) -> list[Tensor]:
    """A flat tensor as the pieces of a route."""
    return [flat[start:stop] for start, stop in piece_bounds(flat.numel(), len(route.parents))]


class TreeExecutor:
    """One play of a route. Made, it posts its first messages; `wait` does the rest and returns the pieces.

    parts    by subtree of the lanes, this rank's sums, as one flat tensor per piece
    out      the results, one flat tensor per piece: where they are to be (up and down), or to come from (down only).
             Up only, those of other roots may be None. May be the memory of a part
    base     the first tag: relays that may be under way together need `tags` different ones each
    lanes    the lanes and their deal; without, rank r holds lane r
    keep     the memory of `parts` is only read
    compress by level; then one sum per rank (`ordered=False`), and `key` names the tensor: what a compressor remembers
             belongs to it
    """

    def __init__(
        self,
        messenger: Messenger,
        route: TreeRoute,
        partials: Mapping[Span, Sequence[Tensor]],
        out: Sequence[Tensor | None],
        *,
        lanes: int | None = None,
        assignment: Sequence[Span] | None = None,
        base: int = 0,
        up: bool = True,
        down: bool = True,
        ordered: bool = True,
        combine: Combine = torch.add,
        keep: bool = False,
        chunk_bytes: int | None = None,
        places: Sequence[RankPlace] | None = None,
        compress: Mapping[str, Codec] | None = None,
        key: Hashable = None,
        byte_counts: ByteCounts | None = None,
        pool: TensorPool | None = None,
    ) -> None:
        self.messenger, self.out, self.partials = messenger, out, partials
        self.up, self.down, self.combine, self.keep, self.key = up, down, combine, keep, key
        self.byte_counts, self.pool = byte_counts, pool or TensorPool()
        everything = [*out, *(piece for pieces in partials.values() for piece in pieces)]
        self.dtype = next(tensor.dtype for tensor in everything if tensor is not None)
        score = _task_order(route, *complete_assignment(messenger.size, lanes, assignment), ordered)
        self._tasks = score.tasks[messenger.rank]
        self._reduce_order, self._broadcast_order = (
            score.reduce_order[messenger.rank],
            score.broadcast_order[messenger.rank],
        )
        self._heights = score.heights

        first = next(iter(partials.values()), None)
        shapes = (out[piece] if first is None else first[piece] for piece in range(len(route.parents)))
        self._lengths = [0 if tensor is None else tensor.numel() for tensor in shapes]
        if chunk_bytes is None:
            sizes = [length * self.dtype.itemsize for length in self._lengths]
            chunk_bytes = chunk_size(max(sizes), sum(sizes), bool(compress))
        self._chunk = max(1, chunk_bytes // self.dtype.itemsize // GRAIN) * GRAIN
        self._chunks = [-(-length // self._chunk) for length in self._lengths]
        self._turns = max(self._chunks)
        self._tags = self._number_tags(base)
        self.tags = sum(chunks * (widest + 1) for chunks, widest in zip(self._chunks, score.widest, strict=True))

        if places is None:
            places = tuple(RankPlace(str(rank)) for rank in range(messenger.size))
        self._levels = [link_level(places[messenger.rank], place) for place in places]
        self._compress: Mapping[str, Codec] = {}
        self._down_codec: Sequence[Codec | None] = [None] * len(self._lengths)
        if compress and self.dtype.is_floating_point:
            self._compress = compress
            farthest = _farthest(route, tuple(places), frozenset(compress))
            self._down_codec = [None if where is None else level_setting(compress, where) for where in farthest]
            if ordered and up and any(farthest):
                raise ValueError("compressed sums are not exact: play the route with ordered=False")

        self._arriving: dict[
            tuple[int, int], list[tuple[PendingMessage, Tensor]]
        ] = {}  # by piece and chunk, in slot order
        self._results: dict[tuple[int, int], tuple[PendingMessage, Tensor]] = {}
        self._sends: deque[tuple[int, PendingMessage, Tensor, bool]] = deque()  # by turn; whether the pool gets it back
        self._skew = min(SKEW, self._turns)
        for turn in range(RECEIVES_AHEAD):
            self._post_receives(turn)

    def wait(self) -> list[Tensor | None]:
        last = self._turns + self._skew * max(self._heights) * (self.up + self.down)
        for turn in range(last):
            self._post_receives(turn + RECEIVES_AHEAD)
            self._start_sends(turn)
            if self.up:
                for duty in self._reduce_order:
                    chunk = turn - self._skew * duty.height
                    if duty.children and 0 <= chunk < self._chunks[duty.piece]:
                        self._reduce_chunk(duty, chunk, turn)
            if self.down:
                for duty in self._broadcast_order:
                    stage = duty.depth + (self._heights[duty.piece] if self.up else 0)
                    chunk = turn - self._skew * stage
                    if duty.parent is not None and 0 <= chunk < self._chunks[duty.piece]:
                        self._forward_down(duty, chunk, turn)
            self._wait_sends(turn - RECEIVES_AHEAD)
        self._wait_sends(last)
        return list(self.out)

    # -- one chunk of one piece ---------------------------------------------------------------------------------------

    def _post_receives(self, chunk: int) -> None:
        """Posts the receives of a chunk, of all stages."""
        for duty in self._reduce_order:
            if chunk >= self._chunks[duty.piece]:
                continue
            at = (duty.piece, chunk)
            count = self._count(*at)
            if self.up and duty.children:
                self._arriving[at] = [
                    self._receive(count, child, self._tag(child, duty.piece, "up", chunk, number), self._codec(child))
                    for child, sums in duty.children
                    for number in range(sums)
                ]
            if self.down and duty.parent is not None:
                codec = self._down_codec[duty.piece]
                place = self._result(*at) if codec is None else None
                tag = self._tag(duty.parent, duty.piece, "down", chunk)
                self._results[at] = self._receive(count, duty.parent, tag, codec, place)

    def _start_sends(self, turn: int) -> None:
        """Sends that wait for nobody: of leaves on the way up, or of roots if there is only a way down."""
        for duty in self._reduce_order:
            if turn >= self._chunks[duty.piece]:
                continue
            if self.up and not duty.children:
                self._reduce_chunk(duty, turn, turn)
            elif not self.up and duty.parent is None:
                self._send_down(duty, turn, turn, None)

    def _reduce_chunk(self, task: TreeTask, chunk: int, turn: int) -> None:
        """Adds what belongs together and hands on the rest."""
        piece = task.piece
        start = chunk * self._chunk
        slots: list[Tensor | None] = [self.partials[span][piece][start : start + self._chunk] for span in task.own]
        arriving = self._arriving.pop((piece, chunk), [])
        slots += [None] * len(arriving)
        codecs = [self._codec(child) for child, sums in task.children for _ in range(sums)]
        owned = len(task.own)
        pooled: dict[int, Tensor] = {}  # by address: what goes back to the pool

        def value(slot: int) -> Tensor:
            """A slot's sum, waited for when it is needed."""
            found = slots[slot]
            if found is None:
                pending, buffer = arriving[slot - owned]
                pending.wait()
                codec = codecs[slot - owned]
                pooled[buffer.data_ptr()] = buffer
                found = buffer
                if codec is not None:
                    found = codec.decode(buffer, self._count(piece, chunk)).to(self.dtype)
                slots[slot] = found
            return found

        written: set[int] = set()
        for number, (left, right) in enumerate(task.folds):
            one, other = value(left), value(right)
            if task.parent is None and number == len(task.folds) - 1:
                target = self._result(piece, chunk)
            elif not self.keep or left >= owned or left in written:
                target = one
            elif right >= owned or right in written:
                target = other
            else:
                target = self.pool.acquire(one.numel(), one.dtype)
                pooled[target.data_ptr()] = target
            self.combine(one, other, out=target)
            slots[left] = target
            written.add(left)

        if task.parent is None:
            self._finish_root(task, chunk, turn, value(task.rest[0]))
        else:
            codec = self._codec(task.parent)
            for number, slot in enumerate(task.rest):
                found = value(slot)
                tag = self._tag(task.parent, piece, "up", chunk, number)
                if codec is None:
                    back = pooled.pop(found.data_ptr(), None) is not None
                    self._send(found, task.parent, tag, turn, found.nbytes, back)
                else:
                    payload = codec.encode(found, (self.key, piece, chunk, "up"))
                    self._send(payload, task.parent, tag, turn, found.nbytes, False)
        for buffer in pooled.values():
            self.pool.release(buffer)

    def _finish_root(self, task: TreeTask, chunk: int, turn: int, total: Tensor) -> None:
        """At the root: the result to its place, and on its way down."""
        result = self._result(task.piece, chunk)
        if total.data_ptr() != result.data_ptr():
            result.copy_(total)
        if not self.down:
            return
        codec = self._down_codec[task.piece]
        payload = None
        if codec is not None:
            # The root too takes what the others will decode, so that all have the same bits.
            payload = codec.encode(result, (self.key, task.piece, chunk, "down"))
            result.copy_(codec.decode(payload, result.numel()))
        self._send_down(task, chunk, turn, payload)

    def _send_down(self, task: TreeTask, chunk: int, turn: int, payload: Tensor | None) -> None:
        result = self._result(task.piece, chunk)
        for child, _ in reversed(task.children):  # the tallest first: others wait behind it
            tag = self._tag(child, task.piece, "down", chunk)
            self._send(result if payload is None else payload, child, tag, turn, result.nbytes, False)

    def _forward_down(self, task: TreeTask, chunk: int, turn: int) -> None:
        pending, buffer = self._results.pop((task.piece, chunk))
        pending.wait()
        codec = self._down_codec[task.piece]
        self._send_down(task, chunk, turn, None if codec is None else buffer)
        if codec is not None:
            result = self._result(task.piece, chunk)
            result.copy_(codec.decode(buffer, result.numel()))
            if not task.children:
                self.pool.release(buffer)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(
        self, count: int, source: int, tag: int, codec: Codec | None, place: Tensor | None = None
    ) -> tuple[PendingMessage, Tensor]:
        if place is None and codec is None:
            place = self.pool.acquire(count, self.dtype)
        elif place is None and codec is not None:
            place = self.pool.acquire(codec.payload_bytes(count), torch.uint8)
        assert place is not None
        return self.messenger.receive(place, source, tag), place

    def _send(self, tensor: Tensor, to: int, tag: int, turn: int, plain: int, back: bool) -> None:
        if self.byte_counts is not None:
            where = self._levels[to]
            self.byte_counts.sent[where] += tensor.nbytes
            self.byte_counts.uncompressed[where] += plain
        self._sends.append((turn, self.messenger.send(tensor, to, tag), tensor, back))

    def _wait_sends(self, turn: int) -> None:
        """Waits for sends up to a turn: their receivers are past it by now, or will be without us."""
        while self._sends and self._sends[0][0] <= turn:
            _, pending, tensor, back = self._sends.popleft()
            pending.wait()
            if back:
                self.pool.release(tensor)

    def _codec(self, peer: int) -> Codec | None:
        return level_setting(self._compress, self._levels[peer]) if self._compress else None

    def _result(self, piece: int, chunk: int) -> Tensor:
        found = self.out[piece]
        assert found is not None, "no room for a result that this rank is to have"
        start = chunk * self._chunk
        return found[start : start + self._chunk]

    def _count(self, piece: int, chunk: int) -> int:
        return min(self._chunk, self._lengths[piece] - chunk * self._chunk)

    def _number_tags(self, base: int) -> dict[tuple[int, int, str], int]:
        """First tags, by peer, piece and way. Both ends count the messages of a pair in the order of the pieces."""
        found: dict[tuple[int, int, str], int] = {}
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()

        def count(messages: Counter[int], peer: int, piece: int, way: str, sums: int) -> None:
            found[peer, piece, way] = base + messages[peer]
            messages[peer] += sums * self._chunks[piece]

        for duty in self._tasks:
            if duty.parent is not None:
                count(out, duty.parent, duty.piece, "up", len(duty.rest))
                count(into, duty.parent, duty.piece, "down", 1)
            for child, sums in duty.children:
                count(into, child, duty.piece, "up", sums)
                count(out, child, duty.piece, "down", 1)
        return found

    def _tag(self, peer: int, piece: int, way: str, chunk: int, number: int = 0) -> int:
        return self._tags[peer, piece, way] + number * self._chunks[piece] + chunk


@dataclass(frozen=True)
class _TaskOrder:
    """A route's duties by rank: as they come, in the order of adding and in the order of passing on."""

    tasks: tuple[tuple[TreeTask, ...], ...]
    reduce_order: tuple[tuple[TreeTask, ...], ...]
    broadcast_order: tuple[tuple[TreeTask, ...], ...]
    widest: tuple[int, ...]  # by piece, the most sums that anybody hands on
    heights: tuple[int, ...]  # by piece, stages from the farthest leaf to the root


@lru_cache(maxsize=128)
def _task_order(route: TreeRoute, lanes: int, assignment: tuple[Span, ...], ordered: bool) -> _TaskOrder:
    everybody = tree_tasks(route, lanes, assignment, ordered)
    heights = tuple(max(mine[piece].height for mine in everybody) for piece in range(len(route.parents)))
    return _TaskOrder(
        tasks=everybody,
        reduce_order=tuple(tuple(sorted(mine, key=lambda duty: (duty.height, duty.piece))) for mine in everybody),
        broadcast_order=tuple(tuple(sorted(mine, key=lambda duty: (duty.depth, duty.piece))) for mine in everybody),
        widest=tuple(max(len(mine[piece].rest) for mine in everybody) for piece in range(len(route.parents))),
        heights=heights,
    )


@lru_cache(maxsize=128)
def _farthest(route: TreeRoute, places: tuple[RankPlace, ...], levels: frozenset[str]) -> tuple[Level | None, ...]:
    return compressed_level(route, places, dict.fromkeys(levels, True))


def tree_all_reduce(
    messenger: Messenger,
    route: TreeRoute,
    partials: Mapping[Span, Tensor],
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The sum of flat tensors over all ranks, in the memory of this rank's first part, or in `out`."""
    result = next(iter(partials.values())) if out is None else out
    pieces = {span: split_pieces(route, part) for span, part in partials.items()}
    TreeExecutor(messenger, route, pieces, split_pieces(route, result), **options).wait()
    return result
