"""Memory of each rank that all ranks of the host can read and write: gradients live there, and are summed in place.

┌ rank 0's ────┬──────────────┐      Each rank takes one share of the tensor, adds up everybody's part of it,
│ share 0      │ share 1      │      a cache-sized piece at a time, and writes the sum to everybody. Two meetings:
├ rank 1's ────┼──────────────┤      all parts are there; all sums are there. Nothing is copied in or out.
│ share 0      │ share 1      │
└──────────────┴──────────────┘
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.collectives.handshake import new_token
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.reduction import SUM, Reduction, fold_partials
from shoal.collectives.shm_segment import TOKEN_BYTES, map_segment, new_segment
from shoal.collectives.single_host import SingleHostTransport, aligned_share
from shoal.numerics.lanes import Span

if TYPE_CHECKING:
    from shoal.collectives.process_group import ShoalProcessGroup

PartialSums = Mapping[Span, Tensor | None]
PIECE_BYTES = 1 << 18  # added up at a time: everybody's pieces stay in cache


class SharedBuffers:
    """`flats` are everybody's bytes, by rank; `own` is this rank's."""

    def __init__(
        self,
        transport: SingleHostTransport,
        buffers: Sequence[Tensor],
        run_in_order: Callable[[Callable[[], None]], None],
    ) -> None:
        self.transport = transport
        self._run_in_order = run_in_order  # runs something in the order of the group's collectives
        self.buffers = list(buffers)
        self.own = self.buffers[transport.rank]
        self._operation = CollectiveOp("none")  # the ordered reduce under way

    def all_reduce(self, dtype: torch.dtype = torch.float32, reduction: Reduction = SUM) -> None:
        """Everybody's memory, as elements of one type, becomes their sum."""
        arena = self.transport.segment
        flats = [flat.view(dtype) for flat in self.buffers]
        parts: PartialSums = {(rank, rank + 1): flat for rank, flat in enumerate(flats)}

        def action() -> None:
            arena.begin(CollectiveOp("all_reduce of shared memory", dtype, self.own.numel()))
            arena.wait_all(arena.publish(), compare=True)
            self.reduce_own_share(arena.size, parts, flats, reduction)
            arena.wait_all(arena.publish())
            arena.end()

        self._run_in_order(action)

    def ordered_reduce(self, lanes: int, sums: Sequence[tuple[PartialSums, Sequence[Tensor]]]) -> None:
        """Adds up this rank's share of several sums by lanes, and writes it to all ranks; `barrier` completes them.

        Each sum has all ranks' partial sums by subtree (None where one is absent), and by rank where the result goes.
        The ranks have passed a barrier since the partial sums were written."""

        self._operation = CollectiveOp("merge", count=len(sums))

        def action() -> None:
            for partials, targets in sums:
                self.reduce_own_share(lanes, partials, targets, SUM)

        self._run_in_order(action)

    def barrier(self) -> None:
        """Returns when all ranks have written their shares of the last ordered reduce."""
        segment = self.transport.segment

        def action() -> None:
            segment.begin(self._operation)
            segment.wait_all(segment.publish(), compare=True)
            segment.end()

        self._run_in_order(action)

    def reduce_own_share(
        self, lanes: int, partials: PartialSums, targets: Sequence[Tensor], reduction: Reduction
    ) -> None:
        """This rank's share of a sum, written to everybody."""
        rank, size = self.transport.rank, self.transport.size
        own, itemsize = targets[rank], targets[rank].element_size()
        start, stop = aligned_share(own.numel(), rank, size, max(1, 64 // itemsize))
        step = PIECE_BYTES // itemsize
        others = [target for other, target in enumerate(targets) if other != rank]
        for at in range(start, stop, step):
            end = min(stop, at + step)
            piece = own[at:end]
            pieces = {span: None if part is None else part[at:end] for span, part in partials.items()}
            fold_partials(lanes, pieces, piece, reduction, self.transport.scratch)
            reduction.finish(piece, size)
            for target in others:
                target[at:end].copy_(piece)


def open_shared_buffers(group: "ShoalProcessGroup", num_bytes: int) -> SharedBuffers | None:
    """All ranks call it together. None, on all of them, where they share no host or one cannot have the memory."""
    way = group.transport
    if not isinstance(way, SingleHostTransport):
        return None
    token = new_token()
    num_bytes = TOKEN_BYTES + -(-num_bytes // TOKEN_BYTES) * TOKEN_BYTES
    try:
        descriptor = new_segment(num_bytes, token, sharers=way.size)
    except OSError:
        descriptor = -1
    try:
        note = torch.tensor([descriptor, os.getpid(), *bytes.fromhex(token)], dtype=torch.int64)
        found: list[Tensor] = []
        for their_descriptor, process, *secret in group.gather_rows(note).tolist():
            segment = None
            if their_descriptor >= 0:
                segment = map_segment(process, their_descriptor, bytes(secret).hex(), num_bytes)
            if segment is not None:
                found.append(torch.frombuffer(segment, dtype=torch.uint8)[TOKEN_BYTES:])
        # Also the barrier after which nobody needs the descriptors any more.
        complete = bool(group.gather_rows(torch.tensor([len(found) == way.size])).all())
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return SharedBuffers(way, found, group.run_in_order) if complete else None
