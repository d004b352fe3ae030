"""Runs a route over messages between pairs of ranks: sums up to the roots, results down again, or one of the two.

    rank 0's link   ├ up 0 ┼ up 1 ┼ up 2 ┼ down 0 ┼ down 1 ┼ down 2 ┤      Pieces travel in chunks. Leaves hand over
    a root adds            ├ 0 ┤  ├ 1 ┤  ├ 2 ┤                             all theirs at once, so sums go up first, and
                                                                           the first results are ready when links are.

A rank does what can be done: a chunk whose sums have all arrived is added and sent on, a result that has arrived is
passed down. It waits only if nothing can be done, and then for any message. So ranks need no common order, trees that
run at the same time do not wait for each other, and there is no deadlock. Receives are posted RECEIVES_AHEAD chunks
before they are due: a message without a posted receive needs memory of its own.

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

RECEIVES_AHEAD = 8  # chunks of a piece
SENDS_AHEAD = 16  # sums of others on their way up, after which a rank waits: their memory is then used again


class PendingMessage(Protocol):
    @property
    def done(self) -> bool:
        """It has arrived or left, or has failed: then `wait` raises the error."""
        ...

    def wait(self) -> object: ...


Arrival = tuple[PendingMessage, Tensor]  # a receive, and its memory


class Messenger(Protocol):
    """Messages between pairs of ranks, identified by tags. Tensors are flat and contiguous. The caller must not touch
    them until the message is done. A send may need its receive to be posted, and either side to wait."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, to: int, tag: int, like: PendingMessage | None = None) -> PendingMessage:
        """`like`: a send of the same tensor, to another rank, that was begun just before."""
        ...

    def receive(self, tensor: Tensor, source: int, tag: int) -> PendingMessage: ...

    @property
    def finished(self) -> int:
        """Messages of this rank that are done."""
        ...

    def wait_news(self, finished: int) -> None:
        """Moves messages until another one than these first `finished` is done."""
        ...


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

    def count(self, level: Level, sent: int, uncompressed: int | None = None) -> None:
        self.sent[level] += sent
        self.uncompressed[level] += sent if uncompressed is None else uncompressed


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
    """One run of a route. The constructor posts the first messages; `advance` does what can be done, `wait` all of it.

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
        lanes, assignment = complete_assignment(messenger.size, options.lanes, options.assignment)
        order = _task_order(route, lanes, assignment, options.ordered)
        self._served = order.served[rank]

        first = next(iter(partials.values()), out)
        self.dtype = next(tensor.dtype for tensor in first if tensor is not None)
        lengths = tuple([0 if tensor is None else tensor.numel() for tensor in first])
        chunk_bytes, compress = options.chunk_bytes, options.compress
        if chunk_bytes is None:
            size = self.dtype.itemsize
            least = options.least_chunk
            chunk_bytes = chunk_size(max(lengths) * size, sum(lengths) * size, route.stages, bool(compress), least)
        self._chunk = -(-chunk_bytes // (self.dtype.itemsize * GRAIN)) * GRAIN
        self._lengths, self._chunks = lengths, tuple([-(-length // self._chunk) for length in lengths])
        self._tags = _first_tags(order, rank, self._chunks)
        self.tags = sum([chunks * (widest + 1) for chunks, widest in zip(self._chunks, order.widest, strict=True)])

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

        own = order.reduce_order[rank]
        sums = [_ChunkFlow(task) for task in own if self.up and task.children and self._chunks[task.piece]]
        results = [_ChunkFlow(task) for task in order.broadcast_order[rank] if self.down and task.parent is not None]
        self._sums, self._results = sums, [flow for flow in results if self._chunks[flow.task.piece]]
        self._sends: deque[tuple[PendingMessage, Tensor, bool]] = deque()  # and whether to release the tensor
        self._held = 0  # tensors to release
        for flow in self._sums:
            self._post_sums(flow)
        for flow in self._results:
            self._post_results(flow)
        for chunk in range(max(self._chunks)):
            self._start_sends(own, chunk)

    @property
    def done(self) -> bool:
        """This rank's sums and results are there, and what it sent has left it."""
        return not (self._sums or self._results or self._sends)

    def advance(self) -> bool:
        """Does what can be done now. Returns whether that was anything."""
        moved = False
        for flow in tuple(self._sums):
            while self._held < SENDS_AHEAD and flow.ready:
                self._reduce_chunk(flow.task, *flow.take())
                self._post_sums(flow)
                moved = True
            if not flow.arriving:
                self._sums.remove(flow)
        for flow in tuple(self._results):
            while flow.ready:
                chunk, (arrival,) = flow.take()
                self._forward_down(flow.task, chunk, arrival)
                self._post_results(flow)
                moved = True
            if not flow.arriving:
                self._results.remove(flow)
        return self._end_sends() or moved

    def wait(self) -> list[Tensor | None]:
        while not self.done:
            finished = self.messenger.finished
            if not self.advance():
                self.messenger.wait_news(finished)
        return list(self.out)

    # -- one chunk of one piece ---------------------------------------------------------------------------------------

    def _post_sums(self, flow: "_ChunkFlow") -> None:
        """Posts the receives of the next chunks on the way up, in the order of the task's slots."""
        task = flow.task
        while flow.posted < min(flow.chunk + RECEIVES_AHEAD, self._chunks[task.piece]):
            chunk = flow.posted
            count = self._count(task.piece, chunk)
            flow.post(
                [
                    self._receive(count, child, self._tag(child, task.piece, "up", chunk, number), self._codec(child))
                    for child, sums in task.children
                    for number in range(sums)
                ]
            )

    def _post_results(self, flow: "_ChunkFlow") -> None:
        task = flow.task
        assert task.parent is not None
        codec = self._down_codec[task.piece]
        while flow.posted < min(flow.chunk + RECEIVES_AHEAD, self._chunks[task.piece]):
            chunk = flow.posted
            place = self._result(task.piece, chunk) if codec is None else None
            tag = self._tag(task.parent, task.piece, "down", chunk)
            flow.post([self._receive(self._count(task.piece, chunk), task.parent, tag, codec, place)])

    def _start_sends(self, tasks: Sequence[TreeTask], chunk: int) -> None:
        """Begins sends that wait for no message: of leaves on the way up, or of roots if there is only a way down."""
        for task in tasks:
            if chunk >= self._chunks[task.piece]:
                continue
            if self.up and not task.children:
                self._reduce_chunk(task, chunk, [])
            elif not self.up and task.parent is None:
                self._send_down(task, chunk, None)

    def _reduce_chunk(self, task: TreeTask, chunk: int, arriving: Sequence[Arrival]) -> None:
        """Adds the sums of a chunk as far as the task allows, and sends the rest to the parent."""
        piece = task.piece
        start = chunk * self._chunk
        slots: list[Tensor | None] = [self.partials[span][piece][start : start + self._chunk] for span in task.own]
        slots += [None] * len(arriving)
        codecs = [self._codec(child) for child, sums in task.children for _ in range(sums)]
        owned = len(task.own)
        pooled: dict[int, Tensor] = {}  # by address: buffers to release

        def value(slot: int) -> Tensor:
            """The sum of a slot. Its message has arrived, or has failed."""
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
            self._finish_root(task, chunk, value(task.rest[0]))
        else:
            codec = self._codec(task.parent)
            for number, slot in enumerate(task.rest):
                found = value(slot)
                tag = self._tag(task.parent, piece, "up", chunk, number)
                if codec is None:
                    back = pooled.pop(found.data_ptr(), None) is not None
                    self._send(found, task.parent, tag, found.nbytes, back)
                else:
                    payload = codec.encode(found, (self.options.key, piece, chunk, "up"))
                    self._send(payload, task.parent, tag, found.nbytes, False)
        for buffer in pooled.values():
            self.pool.release(buffer)

    def _finish_root(self, task: TreeTask, chunk: int, total: Tensor) -> None:
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
        self._send_down(task, chunk, payload)

    def _send_down(self, task: TreeTask, chunk: int, payload: Tensor | None) -> None:
        children = self._served[task.piece]
        if not children:
            return
        result, like = self._result(task.piece, chunk), None
        for child in children:
            tag = self._tag(child, task.piece, "down", chunk)
            like = self._send(result if payload is None else payload, child, tag, result.nbytes, False, like)

    def _forward_down(self, task: TreeTask, chunk: int, arrival: Arrival) -> None:
        pending, buffer = arrival
        pending.wait()
        codec = self._down_codec[task.piece]
        self._send_down(task, chunk, None if codec is None else buffer)
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

    def _send(
        self, tensor: Tensor, to: int, tag: int, plain: int, back: bool, like: PendingMessage | None = None
    ) -> PendingMessage:
        counts = self.options.byte_counts
        if counts is not None:
            counts.count(self._levels[to], tensor.nbytes, plain)
        message = self.messenger.send(tensor, to, tag, like)
        self._sends.append((message, tensor, back))
        self._held += back
        return message

    def _end_sends(self) -> bool:
        """Forgets sends that are done."""
        moved = False
        while self._sends and self._sends[0][0].done:
            pending, tensor, back = self._sends.popleft()
            pending.wait()
            if back:
                self.pool.release(tensor)
                self._held -= 1
            moved = True
        return moved

    def _codec(self, peer: int) -> Codec | None:
        return level_setting(self._compress, self._levels[peer]) if self._compress else None

    def _result(self, piece: int, chunk: int) -> Tensor:
        found = self.out[piece]
        assert found is not None, "no memory for a result of this rank"
        start = chunk * self._chunk
        return found[start : start + self._chunk]

    def _count(self, piece: int, chunk: int) -> int:
        return min(self._chunk, self._lengths[piece] - chunk * self._chunk)

    def _tag(self, peer: int, piece: int, direction: str, chunk: int, number: int = 0) -> int:
        return self.options.base + self._tags[peer, piece, direction] + number * self._chunks[piece] + chunk


class _ChunkFlow:
    """The chunks of one piece that come to this rank: sums from its children, or results from its parent."""

    def __init__(self, task: TreeTask) -> None:
        self.task = task
        self.chunk = 0  # the next one
        self.posted = 0  # so many of the first have their receives
        self.arriving: deque[list[Arrival]] = deque()  # by chunk, from the next one on

    def post(self, receives: list[Arrival]) -> None:
        self.arriving.append(receives)
        self.posted += 1

    @property
    def ready(self) -> bool:
        """Whether the next chunk is here. Raises the error of a message that failed."""
        if not self.arriving:
            return False
        here = True
        for message, _ in self.arriving[0]:
            if message.done:
                message.wait()
            else:
                here = False
        return here

    def take(self) -> tuple[int, list[Arrival]]:
        self.chunk += 1
        return self.chunk - 1, self.arriving.popleft()


@dataclass(frozen=True, eq=False)  # there is one of each: the cache finds it by identity
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
    )


@lru_cache(maxsize=1024)
def _first_tags(order: _TaskOrder, rank: int, chunks: tuple[int, ...]) -> Mapping[tuple[int, int, str], int]:
    """By peer, piece and direction. Both ends count the messages of a pair in order of the pieces."""
    found: dict[tuple[int, int, str], int] = {}
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()

    def count(messages: Counter[int], peer: int, piece: int, direction: str, sums: int) -> None:
        found[peer, piece, direction] = messages[peer]
        messages[peer] += sums * chunks[piece]

    for task in order.tasks[rank]:
        if task.parent is not None:
            count(out, task.parent, task.piece, "up", len(task.rest))
            count(into, task.parent, task.piece, "down", 1)
        for child, sums in task.children:
            count(into, child, task.piece, "up", sums)
            count(out, child, task.piece, "down", 1)
    return found


@lru_cache(maxsize=128)
def _farthest(route: TreeRoute, places: tuple[RankPlace, ...], levels: frozenset[str]) -> tuple[Level | None, ...]:
    return compressed_level(route, places, dict.fromkeys(levels, True))
