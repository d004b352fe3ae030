"""Memory of each rank that all ranks of the host read and write: gradients are there and are summed in place.

┌ rank 0's ────┬──────────────┐      Each rank adds up one share of all buffers, a cache-sized piece at a time, and
│ share 0      │ share 1      │      writes the sum to all buffers. There are two barriers: all buffers are filled;
├ rank 1's ────┼──────────────┤      all sums are written. Nothing is copied in or out.
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
from shoal.collectives.reduction import ALIGN, SUM, Reduction, aligned_share, fold_partials
from shoal.collectives.shm_segment import TOKEN_BYTES, map_segment, new_segment
from shoal.collectives.single_host import SingleHostTransport
from shoal.numerics.lanes import Span

if TYPE_CHECKING:
    from shoal.collectives.process_group import ShoalProcessGroup

PartialSums = Mapping[Span, Tensor | None]
PIECE_BYTES = 1 << 18  # added up at a time: the pieces of all ranks stay in cache


class SharedBuffers:
    """`buffers` has the bytes of each rank; `own` is this rank's."""

    def __init__(
        self,
        transport: SingleHostTransport,
        buffers: Sequence[Tensor],
        run_in_order: Callable[[Callable[[], None]], None],
    ) -> None:
        self.transport = transport
        self._run_in_order = run_in_order  # runs an action in the order of the group's collectives
        self.buffers = list(buffers)
        self.own = self.buffers[transport.rank]
        self._operation = CollectiveOp("none")  # the running ordered reduce

    def all_reduce(self, dtype: torch.dtype = torch.float32, reduction: Reduction = SUM) -> None:
        """Overwrites all buffers, as elements of one type, with their sum."""
        segment = self.transport.segment
        flats = [flat.view(dtype) for flat in self.buffers]
        partials: PartialSums = {(rank, rank + 1): flat for rank, flat in enumerate(flats)}

        def action() -> None:
            segment.begin(CollectiveOp("all_reduce of shared memory", dtype, self.own.numel()))
            segment.wait_all(segment.publish(), compare=True)
            self.reduce_own_share(segment.size, partials, flats, reduction)
            segment.wait_all(segment.publish())
            segment.end()

        self._run_in_order(action)

    def ordered_reduce(self, lanes: int, sums: Sequence[tuple[PartialSums, Sequence[Tensor]]]) -> None:
        """Adds up this rank's share of several sums by lanes, and writes it to all ranks; `barrier` completes them.

        Each sum has all ranks' partial sums by subtree (None where one is absent), and by rank where the result goes.
        The ranks have passed a barrier since the partial sums were written.
        """
        self._operation = CollectiveOp("ordered_reduce", count=len(sums))

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
        """Adds up this rank's share of a sum and writes it to the targets of all ranks."""
        rank, size = self.transport.rank, self.transport.size
        own, itemsize = targets[rank], targets[rank].element_size()
        start, stop = aligned_share(own.numel(), rank, size, max(1, ALIGN // itemsize))
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
    """All ranks call this together. Returns None on all of them if they share no host or one gets no memory."""
    transport = group.transport
    if not isinstance(transport, SingleHostTransport):
        return None
    token = new_token()
    num_bytes = TOKEN_BYTES + -(-num_bytes // TOKEN_BYTES) * TOKEN_BYTES
    try:
        descriptor = new_segment(num_bytes, token, sharers=transport.size)
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
        # Also a barrier: after it the descriptors may be closed.
        complete = bool(group.gather_rows(torch.tensor([len(found) == transport.size])).all())
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return SharedBuffers(transport, found, group.run_in_order) if complete else None
