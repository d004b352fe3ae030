"""Runs a route over messages between pairs of ranks: sums up to the roots, results down again, or one of the two.

    turn       0        1        2        3        4        5        6         SKEW = 2: chunks on their way from one
    leaves     send 0   send 1   send 2   send 3   …                           stage to the next. Links have work while
    parents                      add 0    add 1    add 2    add 3    …         ranks add, and no rank waits for a chunk
    roots                                          add 0    add 1    add 2     that was sent in the same turn.

Pieces travel in chunks. Leaves send a chunk in the turn of its number. Each stage comes SKEW turns after the one below
it, up to the root and down again. Receives are posted RECEIVES_AHEAD turns before the leaves send, since a message
without a posted receive would wait behind other traffic.

All ranks do their tasks in one order (by turn; up before down), and a task waits only for messages of earlier turns. So
the first task that is not done can always be done: there is no deadlock.

A result arrives in the memory of the operand of the same chunk. It cannot arrive before that operand was delivered.
"""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.cost_model import complete_assignment, compressed_level
from shoal.collectives.reduction import Combine
from shoal.collectives.topology import Level, RankPlace, level_setting, link_level
from shoal.collectives.trees import GRAIN, MIN_CHUNK, TreeRoute, TreeTask, chunk_size, piece_bounds, tree_tasks
from shoal.numerics.lanes import Span

RECEIVES_AHEAD = 8  # turns; also the turns after which a rank waits for its sends
SKEW = 2  # turns


class PendingMessage(Protocol):
    def wait(self) -> object: ...


Arrival = tuple[PendingMessage, Tensor]  # a receive, and its memory


class Messenger(Protocol):
    """Messages between pairs of ranks, identified by tags. Tensors are flat and contiguous. The caller must not touch
    them until the message is done. A send may need its receive to be posted, and either side to call `wait`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, to: int, tag: int) -> PendingMessage: ...

    def receive(self, tensor: Tensor, source: int, tag: int) -> PendingMessage: ...


class Codec(Protocol):
    """The methods of a compressor that a tree uses."""

    def payload_bytes(self, count: int) -> int: ...

    def encode(self, flat: Tensor, key: Hashable) -> Tensor: ...

    def decode(self, payload: Tensor, count: int) -> Tensor: ...


@dataclass
class ByteCounts:
    """Bytes that this rank sent, by level, and the bytes of the same messages without compression."""

    sent: Counter[Level] = field(default_factory=Counter)
    uncompressed: Counter[Level] = field(default_factory=Counter)


class TensorPool:
    """Buffers for partial sums, kept from one chunk or tree to the next: new memory costs more than an add."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def acquire(self, count: int, dtype: torch.dtype) -> Tensor:
        free = self._free.get((count, dtype))
        return free.pop() if free else torch.empty(count, dtype=dtype)

    def release(self, tensor: Tensor) -> None:
        self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


def split_pieces(route: TreeRoute, flat: Tensor) -> list[Tensor]:
    """Splits a flat tensor into the pieces of a route."""
    return [flat[start:stop] for start, stop in piece_bounds(flat.numel(), len(route.parents))]


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    lanes: int | None = None
    assignment: Sequence[Span] | None = None  # spans of lanes by rank; without, rank r holds lane r
    base: int = 0  # the first tag: trees that run at the same time need `TreeExecutor.tags` different ones each
    up: bool = True
    down: bool = True
    ordered: bool = True
    combine: Combine = torch.add
    keep: bool = False  # do not overwrite the partial sums
    chunk_bytes: int | None = None
    least_chunk: int = MIN_CHUNK  # where chunk_bytes is None
    places: Sequence[RankPlace] | None = None  # without, each rank is a host
    compress: Mapping[str, Codec] | None = None  # by level, for one sum per rank (`ordered=False`)
    key: Hashable = None  # identifies the tensor for the state of compressors
    byte_counts: ByteCounts | None = None
    pool: TensorPool = field(default_factory=TensorPool)


class TreeExecutor:
    """One run of a route. The constructor posts the first messages; `wait` does the rest and returns the pieces.

    `partials` has this rank's sums by subtree of the lanes, as one flat tensor per piece. `out` has one flat tensor per
    piece: the results, or the source (down only). It may be the memory of a partial sum. With up only, those of other
    roots may be None.
    """

    def __init__(
        self,
        messenger: Messenger,
        route: TreeRoute,
        partials: Mapping[Span, Sequence[Tensor]],
        out: Sequence[Tensor | None],
        options: TreeOptions,
    ) -> None:
        self.messenger, self.out, self.partials, self.options = messenger, out, partials, options
        self.up, self.down, self.pool, rank = options.up, options.down, options.pool, messenger.rank
        tensors = [*out, *(piece for pieces in partials.values() for piece in pieces)]
        self.dtype = next(tensor.dtype for tensor in tensors if tensor is not None)
        lanes, assignment = complete_assignment(messenger.size, options.lanes, options.assignment)
        order = _task_order(route, lanes, assignment, options.ordered)
        self._tasks, self._heights = order.tasks[rank], order.heights
        self._reduce_order, self._broadcast_order = order.reduce_order[rank], order.broadcast_order[rank]
        self._served = order.served[rank]

        first = next(iter(partials.values()), None)
        shapes = (out[piece] if first is None else first[piece] for piece in range(len(route.parents)))
        self._lengths = [0 if tensor is None else tensor.numel() for tensor in shapes]
        chunk_bytes, compress = options.chunk_bytes, options.compress
        if chunk_bytes is None:
            sizes = [length * self.dtype.itemsize for length in self._lengths]
            chunk_bytes = chunk_size(max(sizes), sum(sizes), bool(compress), options.least_chunk)
        self._chunk = max(1, chunk_bytes // self.dtype.itemsize // GRAIN) * GRAIN
        self._chunks = [-(-length // self._chunk) for length in self._lengths]
        self._turns = max(self._chunks)
        self._tags = self._number_tags(options.base)
        self.tags = sum(chunks * (widest + 1) for chunks, widest in zip(self._chunks, order.widest, strict=True))

        places = options.places or tuple(RankPlace(str(each)) for each in range(messenger.size))
        self._levels = [link_level(places[rank], place) for place in places]
        self._compress: Mapping[str, Codec] = {}
        self._down_codec: Sequence[Codec | None] = [None] * len(self._lengths)
        if compress and self.dtype.is_floating_point:
            self._compress = compress
            farthest = _farthest(route, tuple(places), frozenset(compress))
            self._down_codec = [None if level is None else level_setting(compress, level) for level in farthest]
            if options.ordered and self.up and any(farthest):
                raise ValueError("compressed sums are not exact: run the route with ordered=False")

        self._arriving: dict[tuple[int, int], list[Arrival]] = {}  # by piece and chunk, in slot order
        self._results: dict[tuple[int, int], Arrival] = {}
        self._sends: deque[tuple[int, PendingMessage, Tensor, bool]] = deque()  # by turn; whether to release the tensor
        self._skew = min(SKEW, self._turns)
        for turn in range(RECEIVES_AHEAD):
            self._post_receives(turn)

    def wait(self) -> list[Tensor | None]:
        last = self._turns + self._skew * max(self._heights) * (self.up + self.down)
        for turn in range(last):
            self._post_receives(turn + RECEIVES_AHEAD)
            self._start_sends(turn)
            if self.up:
                for task in self._reduce_order:
                    chunk = turn - self._skew * task.height
                    if task.children and 0 <= chunk < self._chunks[task.piece]:
                        self._reduce_chunk(task, chunk, turn)
            if self.down:
                for task in self._broadcast_order:
                    stage = task.depth + (self._heights[task.piece] if self.up else 0)
                    chunk = turn - self._skew * stage
                    if task.parent is not None and 0 <= chunk < self._chunks[task.piece]:
                        self._forward_down(task, chunk, turn)
            self._wait_sends(turn - RECEIVES_AHEAD)
        self._wait_sends(last)
        return list(self.out)

    # -- one chunk of one piece ---------------------------------------------------------------------------------------

    def _post_receives(self, chunk: int) -> None:
        """Posts the receives of a chunk for all stages."""
        for task in self._reduce_order:
            if chunk >= self._chunks[task.piece]:
                continue
            at = (task.piece, chunk)
            count = self._count(*at)
            if self.up and task.children:
                self._arriving[at] = [
                    self._receive(count, child, self._tag(child, task.piece, "up", chunk, number), self._codec(child))
                    for child, sums in task.children
                    for number in range(sums)
                ]
            if self.down and task.parent is not None:
                codec = self._down_codec[task.piece]
                place = self._result(*at) if codec is None else None
                tag = self._tag(task.parent, task.piece, "down", chunk)
                self._results[at] = self._receive(count, task.parent, tag, codec, place)

    def _start_sends(self, turn: int) -> None:
        """Begins sends that wait for no message: of leaves on the way up, or of roots if there is only a way down."""
        for task in self._reduce_order:
            if turn >= self._chunks[task.piece]:
                continue
            if self.up and not task.children:
                self._reduce_chunk(task, turn, turn)
            elif not self.up and task.parent is None:
                self._send_down(task, turn, turn, None)

    def _reduce_chunk(self, task: TreeTask, chunk: int, turn: int) -> None:
        """Adds the sums of a chunk as far as the task allows, and sends the rest to the parent."""
        piece = task.piece
        start = chunk * self._chunk
        slots: list[Tensor | None] = [self.partials[span][piece][start : start + self._chunk] for span in task.own]
        arriving = self._arriving.pop((piece, chunk), [])
        slots += [None] * len(arriving)
        codecs = [self._codec(child) for child, sums in task.children for _ in range(sums)]
        owned = len(task.own)
        pooled: dict[int, Tensor] = {}  # by address: buffers to release

        def value(slot: int) -> Tensor:
            """The sum of a slot. Waits for its message on first use."""
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
            elif not self.options.keep or left >= owned or left in written:
                target = one
            elif right >= owned or right in written:
                target = other
            else:
                target = self.pool.acquire(one.numel(), one.dtype)
                pooled[target.data_ptr()] = target
            self.options.combine(one, other, out=target)
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
                    payload = codec.encode(found, (self.options.key, piece, chunk, "up"))
                    self._send(payload, task.parent, tag, turn, found.nbytes, False)
        for buffer in pooled.values():
            self.pool.release(buffer)

    def _finish_root(self, task: TreeTask, chunk: int, turn: int, total: Tensor) -> None:
        """Stores the result at the root and sends it down."""
        result = self._result(task.piece, chunk)
        if total.data_ptr() != result.data_ptr():
            result.copy_(total)
        if not self.down:
            return
        codec = self._down_codec[task.piece]
        payload = None
        if codec is not None:
            # The root decodes its own payload, so that all ranks have the same bits.
            payload = codec.encode(result, (self.options.key, task.piece, chunk, "down"))
            result.copy_(codec.decode(payload, result.numel()))
        self._send_down(task, chunk, turn, payload)

    def _send_down(self, task: TreeTask, chunk: int, turn: int, payload: Tensor | None) -> None:
        result = self._result(task.piece, chunk)
        for child in self._served[task.piece]:
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

    def _receive(self, count: int, source: int, tag: int, codec: Codec | None, place: Tensor | None = None) -> Arrival:
        if place is None:
            size, dtype = (count, self.dtype) if codec is None else (codec.payload_bytes(count), torch.uint8)
            place = self.pool.acquire(size, dtype)
        return self.messenger.receive(place, source, tag), place

    def _send(self, tensor: Tensor, to: int, tag: int, turn: int, plain: int, back: bool) -> None:
        counts = self.options.byte_counts
        if counts is not None:
            counts.sent[self._levels[to]] += tensor.nbytes
            counts.uncompressed[self._levels[to]] += plain
        self._sends.append((turn, self.messenger.send(tensor, to, tag), tensor, back))

    def _wait_sends(self, turn: int) -> None:
        """Waits for the sends up to a turn. Their receivers need nothing more from this rank to take them."""
        while self._sends and self._sends[0][0] <= turn:
            _, pending, tensor, back = self._sends.popleft()
            pending.wait()
            if back:
                self.pool.release(tensor)

    def _codec(self, peer: int) -> Codec | None:
        return level_setting(self._compress, self._levels[peer]) if self._compress else None

    def _result(self, piece: int, chunk: int) -> Tensor:
        found = self.out[piece]
        assert found is not None, "no memory for a result of this rank"
        start = chunk * self._chunk
        return found[start : start + self._chunk]

    def _count(self, piece: int, chunk: int) -> int:
        return min(self._chunk, self._lengths[piece] - chunk * self._chunk)

    def _number_tags(self, base: int) -> dict[tuple[int, int, str], int]:
        """First tags by peer, piece and direction. Both ends count the messages of a pair in order of the pieces."""
        found: dict[tuple[int, int, str], int] = {}
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()

        def count(messages: Counter[int], peer: int, piece: int, direction: str, sums: int) -> None:
            found[peer, piece, direction] = base + messages[peer]
            messages[peer] += sums * self._chunks[piece]

        for task in self._tasks:
            if task.parent is not None:
                count(out, task.parent, task.piece, "up", len(task.rest))
                count(into, task.parent, task.piece, "down", 1)
            for child, sums in task.children:
                count(into, child, task.piece, "up", sums)
                count(out, child, task.piece, "down", 1)
        return found

    def _tag(self, peer: int, piece: int, direction: str, chunk: int, number: int = 0) -> int:
        return self._tags[peer, piece, direction] + number * self._chunks[piece] + chunk


@dataclass(frozen=True)
class _TaskOrder:
    """The tasks of a route by rank: by piece, in the order of adding, and in the order of sending down.

    Where all else is equal, a rank sends to the ranks behind it in turn, so that no two begin with the same one:

        rank 0: 1 2 3    rank 1: 2 3 0    rank 2: 3 0 1    rank 3: 0 1 2
    """

    tasks: tuple[tuple[TreeTask, ...], ...]
    reduce_order: tuple[tuple[TreeTask, ...], ...]
    broadcast_order: tuple[tuple[TreeTask, ...], ...]
    served: tuple[tuple[tuple[int, ...], ...], ...]  # by rank and piece, the children in the order of sending down
    widest: tuple[int, ...]  # by piece, the most sums that a rank sends to its parent
    heights: tuple[int, ...]  # by piece, stages from the farthest leaf to the root


@lru_cache(maxsize=128)
def _task_order(route: TreeRoute, lanes: int, assignment: tuple[Span, ...], ordered: bool) -> _TaskOrder:
    tasks = tree_tasks(route, lanes, assignment, ordered)
    by_piece = list(zip(*tasks, strict=True))

    def behind(rank: int, other: int | None) -> int:
        return 0 if other is None else (other - rank) % len(tasks)

    def served(rank: int, task: TreeTask) -> tuple[int, ...]:
        """The tallest subtree first: most ranks wait for it."""
        children = [child for child, _ in task.children]
        return tuple(sorted(children, key=lambda child: (-tasks[child][task.piece].height, behind(rank, child))))

    return _TaskOrder(
        tasks=tasks,
        reduce_order=tuple(
            tuple(sorted(own, key=lambda task: (task.height, behind(rank, task.parent), task.piece)))
            for rank, own in enumerate(tasks)
        ),
        broadcast_order=tuple(tuple(sorted(own, key=lambda task: (task.depth, task.piece))) for own in tasks),
        served=tuple(tuple(served(rank, task) for task in own) for rank, own in enumerate(tasks)),
        widest=tuple(max(len(task.rest) for task in piece) for piece in by_piece),
        heights=tuple(max(task.height for task in piece) for piece in by_piece),
    )


@lru_cache(maxsize=128)
def _farthest(route: TreeRoute, places: tuple[RankPlace, ...], levels: frozenset[str]) -> tuple[Level | None, ...]:
    return compressed_level(route, places, dict.fromkeys(levels, True))
