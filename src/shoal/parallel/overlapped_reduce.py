"""Buckets leave while the backward pass of this worker's last lane is still running.

    this worker's lanes      0         1         2: the last one with samples
                             ├─sums────┴─────────┼─forward─┬─backward───────────────────────┬─buffers─┐
    gradients arrive                                       w4   w3     w2     w1       w0
    bucket 0  (w4, w3)                                          ├─add──┬─ordered reduce──────┤
    bucket 1  (w2, w1)                                                        ├─add─┬─ordered reduce──┤
    bucket 2  (w0)                                                                          ├─add─┬──…  then the rows

A bucket leaves when the lane has all its gradients and the bucket before it has left, so all workers reduce the same
buckets in the same order. Buckets go from the last parameter to the first, and after the first pass in the order in
which gradients arrive. The sums of the lanes before are added to it first: the same additions of the same operands
as in `LocalStep.sum_subtree`, so the bits are the same. What never arrives (parameters that the lane does not use) is
found when the lane ends; then all buckets that are left leave, with minus zero for what is absent.

The step is a transaction as before. The rows about the lanes travel after the buckets: what does not count, since a
loss is not finite or no worker has the tensor, was summed in vain and is not looked at. A gradient that changes after
its bucket has left (a block that the user recomputes with `use_reentrant=True` may do that) is told in the row, and all
workers compute the step again, and go on, without overlap.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shoal.collectives.group import PendingTensor, WorkerGroup
from shoal.errors import PeerLost
from shoal.numerics.lanes import Span, left_siblings, subtrees
from shoal.parallel.buckets import Bucket, make_buckets
from shoal.parallel.gradient_exchange import (
    CollectiveExchange,
    GradientExchange,
    GradList,
    LocalExchange,
    SubtreeSums,
    unpack_bucket,
)
from shoal.parallel.local_step import LocalStep, add_into
from shoal.parallel.replica import ModelReplica
from shoal.parallel.row_riders import NO_RIDERS, RowRiders, make_riders

BUCKETS = 8  # to aim for: the first leaves early, and the last, which nothing hides, is small
LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 512 << 10, 4 << 20


def bucket_size(num_bytes: int) -> int:
    """The size of a bucket, for gradients of so many bytes."""
    return min(max(num_bytes // BUCKETS, LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


def open_overlapped(
    group: WorkerGroup,
    lanes: int,
    assignment: Sequence[Span],
    tensors: Sequence[tuple[int, Tensor]],
    count: int,
    uncompressed: Sequence[tuple[int, Tensor]] = (),
) -> GradientExchange:
    """An exchange for `OverlappedStep`; the arguments are those of `open_exchange`. `uncompressed`: the buffers, which
    are whole when the lane ends. They ride with the rows if they are small."""
    if group.size == 1:
        return LocalExchange()
    return OverlappedExchange(group, lanes, tensors, count, *make_riders(lanes, assignment, uncompressed))


class LeavingOrder:
    """Decides which buckets leave: one whose items have all arrived, after those before it."""

    def __init__(self, buckets: Iterable[Iterable[Hashable]]) -> None:
        self._missing = [set(items) for items in buckets]
        self._bucket_of = {item: number for number, items in enumerate(self._missing) for item in items}
        self.left = 0  # so many of the first buckets

    def arrived(self, item: Hashable) -> list[int]:
        """The buckets that leave now. An item that comes again changes nothing."""
        self._missing[self._bucket_of[item]].discard(item)
        before = self.left
        while self.left < len(self._missing) and not self._missing[self.left]:
            self.left += 1
        return list(range(before, self.left))


class OverlappedExchange(CollectiveExchange):
    """Reduces one bucket after the other, as `OverlappedStep` packs them.

    The first pass has buckets from the last parameter to the first. In it the first worker notes in which order
    gradients arrive, and tells all: from the second pass on buckets follow that order.
    """

    def __init__(
        self,
        group: WorkerGroup,
        lanes: int,
        gradients: Sequence[tuple[int, Tensor]],
        count: int,
        riders: RowRiders | None = None,
        buffers: Sequence[Bucket] = (),
    ) -> None:
        self._size = bucket_size(sum(tensor.nbytes for _, tensor in gradients))
        self._gradients, self._buffer_buckets = dict(gradients), list(buffers)
        first = make_buckets(gradients, self._size)
        super().__init__(group, lanes, first + self._buffer_buckets, count, len(first), riders)
        self._pending: list[PendingTensor] = []  # by bucket
        self._arrivals: list[int] | None = []  # parameters, as their gradients came; None: the order is known
        self._next_order: list[int] = []  # parameters in the order to follow from the next pass on; empty: as it is

    @property
    def gradient_buckets(self) -> int:
        """So many of the first buckets have gradients, the others buffers."""
        return self.compressible

    def begin(self, spans: Sequence[Span], assignment: Sequence[Span]) -> None:
        """Begins a pass. A pass that ended in an error has left buckets on the way, which the other workers have
        taken for this one's: they compute the step again, too."""
        whole = len(self._pending) == len(self.buckets) and all(pending.done for pending in self._pending)
        if self._pending and not whole:
            self.group.abandon(f"worker {self.group.rank} computes a step again after its first buckets have left")
            self.group.raise_if_failed()
            raise PeerLost("the group was abandoned")
        if self._next_order:
            ordered = [(index, self._gradients[index]) for index in reversed(self._next_order)]
            buckets = make_buckets(ordered, self._size)
            self.first_key += len(self.buckets)
            self.buckets, self.compressible = buckets + self._buffer_buckets, len(buckets)
            self._flats, self._views, self._next_order = {}, {}, []
        self.spans, self.assignment = spans, assignment
        self._pending = []

    def note_arrival(self, index: int) -> None:
        if self._arrivals is not None:
            self._arrivals.append(index)

    def leave(self, number: int) -> None:
        """The bucket is packed for all subtrees: its reduction begins."""
        assert number == len(self._pending), "buckets leave in order"
        self._pending.append(self.begin_reduce(number, self.spans, self.assignment))

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        """The rows about the step follow the buckets. They arrive last: collectives end in their order."""
        if self._arrivals is not None:
            last = {index: place for place, index in enumerate(self._arrivals)}
            default = list(reversed(self._gradients))
            row = [last.get(index, len(self._arrivals)) for index in default]
            places = self.group.gather_rows(torch.tensor(row))[0].tolist()
            ordered = [index for _, index in sorted(zip(places, default, strict=True), key=lambda pair: pair[0])]
            self._arrivals, self._next_order = None, [] if ordered == default else ordered
        return NO_RIDERS if self.riders is None else self.riders.packed

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums: GradList = [None] * self.count
        if self.riders is not None:
            self.riders.add(riders, self.assignment, anywhere, sums)
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            unpack_bucket(bucket, bucket.views(pending.wait()), anywhere, sums)
        return sums


class OverlappedStep(LocalStep):
    _closing: "_ClosingLane | None" = None  # the last lane, once it runs

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        if not isinstance(exchange, OverlappedExchange):  # of one worker
            return super().sum_lanes(exchange)
        holder = self.holder
        spans = subtrees(holder.lanes, holder.own_lanes)
        last = max((lane for lane in range(*holder.own_lanes) if self.lane_microbatches[lane]), default=None)
        exchange.begin(spans, holder.assignment)
        closing = None
        for place, span in enumerate(spans):
            if last is not None and span[0] <= last < span[1]:
                closing = place
            else:  # before the last lane, or without samples
                values = self.sum_subtree(span, [])
                for number in range(len(exchange.buckets)):
                    exchange.pack(number, place, values)
                exchange.ride(place, values)
        if closing is None or last is None:
            for number in range(len(exchange.buckets)):
                exchange.leave(number)
            return {}
        lefts = [self.sum_subtree(each, []) for each in left_siblings(spans[closing], last)]
        self._closing = _ClosingLane(exchange, self.replica, closing, lefts)
        self._closing.finish(self.run_lane(last))
        return {}

    def backward(self, loss: Tensor, lane: int, number: int) -> None:
        if self._closing is not None and number == len(self.lane_microbatches[lane]) - 1:
            self._closing.backward(loss)
        else:
            super().backward(loss, lane, number)

    def take_gradients(self) -> GradList:
        values = super().take_gradients()
        if self._closing is not None:
            self.came_late = self._closing.add_taken(values)
        return values


class _ClosingLane:
    """The last lane of a pass: takes its gradients as they arrive."""

    def __init__(self, exchange: OverlappedExchange, replica: ModelReplica, place: int, lefts: list[GradList]) -> None:
        """`lefts`: sums of the lanes before in the same subtree, number `place`, from the largest to the smallest."""
        self.exchange, self.replica, self.place, self.lefts = exchange, replica, place, lefts
        self._taken: GradList = [None] * exchange.count
        self._leaves: dict[tuple[int, int], nn.Parameter] = {}  # by parameter, and which of its leaves, if it is tied
        waits_for = []
        for bucket in exchange.buckets[: exchange.gradient_buckets]:
            leaves = {
                (slot.index, number): leaf
                for slot in bucket.slots
                for number, leaf in enumerate(replica.leaves(*replica.parameters[slot.index]))
            }
            self._leaves |= leaves
            waits_for.append(leaves)
        self._order = LeavingOrder(waits_for)
        self._error: BaseException | None = None

    def backward(self, loss: Tensor) -> None:
        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(self._arrived, key)) for key, leaf in self._leaves.items()
        ]
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        if self._error is not None:
            raise self._error

    def _arrived(self, key: tuple[int, int], leaf: Tensor) -> None:
        """Runs inside autograd, which an error does not pass: it is raised when the backward pass is over."""
        if self._error is None:
            try:
                self.exchange.note_arrival(key[0])
                for number in self._order.arrived(key):
                    for slot in self.exchange.buckets[number].slots:
                        self._taken[slot.index] = self.replica.take_gradient(slot.index)
                    self._leave(number, self._taken)
            except BaseException as error:
                self._error = error

    def add_taken(self, values: GradList) -> bool:
        """Completes what is left at the end of the lane. Returns whether some of it came too late for its bucket."""
        late = False
        for bucket in self.exchange.buckets[: self._order.left]:
            for slot in bucket.slots:
                late = late or values[slot.index] is not None
                values[slot.index] = self._taken[slot.index]
        return late

    def finish(self, values: GradList) -> None:
        """The lane has ended, with these values: all other buckets leave."""
        for number in range(self._order.left, len(self.exchange.buckets)):
            self._leave(number, values)
        if self.exchange.riders is not None:
            sums: GradList = [None] * self.exchange.count
            for index in self.exchange.riders.indices:
                sums[index] = self._sum_up(index, values[index], None)
            self.exchange.ride(self.place, sums)

    def _leave(self, number: int, values: GradList) -> None:
        bucket = self.exchange.buckets[number]
        places = self.exchange.places(number, self.place)
        sums: GradList = [None] * self.exchange.count
        for slot, place in zip(bucket.slots, places, strict=True):
            sums[slot.index] = self._sum_up(slot.index, values[slot.index], place)
        self.exchange.pack(number, self.place, sums)
        self.exchange.leave(number)

    @torch.no_grad()
    def _sum_up(self, index: int, total: Tensor | None, out: Tensor | None) -> Tensor | None:
        """Adds the lane's value to the sums before it, from the smallest subtree to the largest."""
        for height, left in enumerate(reversed(self.lefts), start=1):
            total = add_into(left[index], total, out if height == len(self.lefts) else None)
            left[index] = None
        return total
