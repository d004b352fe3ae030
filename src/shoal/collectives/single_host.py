"""Collectives of ranks that share memory. Large tensors move in cache-sized pieces, one per slot.

A collective is a row of turns (shm_segment.py): `stage` fills this rank's slot, `take` reads the others'. A rank stages
a turn before it waits for the turn before.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.collectives.handshake import GroupMember
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.reduction import ALIGN, SUM, Reduction, ScratchBuffers, aligned_share, fold_partials
from shoal.collectives.remote_read import PeerReader
from shoal.collectives.shm_p2p import ShmMessage, ShmMessenger
from shoal.collectives.shm_segment import SLOT_BYTES, ShmSegment
from shoal.collectives.stats import CommStats, places_of, single_host_stats
from shoal.errors import CollectiveError
from shoal.numerics.lanes import Span, subtrees

SPREAD_BYTES = 1 << 15  # from this size on, with three ranks or more, each rank reduces one share for all


class SingleHostTransport:
    overlapping = None  # the segment knows of one collective at a time

    def __init__(self, segment: ShmSegment, messenger: ShmMessenger) -> None:
        self.segment = self.health = segment
        self.messenger = messenger
        self.rank, self.size = segment.rank, segment.size
        self.scratch = ScratchBuffers()
        self._reader = PeerReader(segment, self.scratch)

    # -- turns ----------------------------------------------------------------------------------------------------

    def _turns(
        self, op: CollectiveOp, count: int, stage: Callable[[int, int], None], take: Callable[[int, int], None]
    ) -> None:
        """Stages and takes `count` pieces. Without a piece the ranks still wait for each other and compare records."""
        segment = self.segment
        segment.begin(op)
        first = segment.turn + 1
        if not count:
            segment.wait_all(segment.publish(), compare=True)
        else:
            stage(0, first)
            segment.publish()
        for piece in range(count):
            if piece + 1 < count:
                stage(piece + 1, first + piece + 1)
                segment.publish()
            segment.wait_all(first + piece, compare=not piece)
            take(piece, first + piece)
        segment.end()

    def barrier(self) -> None:
        self._turns(CollectiveOp("barrier"), 0, lambda piece, turn: None, lambda piece, turn: None)

    @property
    def sequence(self) -> int:
        return self.segment.sequence

    def comm_stats(self) -> CommStats:
        return single_host_stats(places_of(self.segment.members), self.segment.members[0].options)

    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> ShmMessage:
        return self.messenger.send(flat, to, tag, op)

    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> ShmMessage:
        return self.messenger.receive(flat, source, tag, op)

    def set_timeout(self, seconds: float) -> None:
        self.segment.timeout = seconds

    def abandon(self, error: BaseException) -> None:
        self.segment.abandon(error)

    def close(self) -> None:
        self.segment.leave()
        self.messenger.close()

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        work = flat if reduction.is_plain else reduction.prepare(flat)
        if work.nbytes < SPREAD_BYTES:
            self._small_all_reduce(work, reduction, op)
        elif self.size == 2:  # adds the other's piece directly from its slot: nothing faster was found
            self._fold_all(work, reduction, op, None)
        elif self._reader.usable(work.nbytes, op):
            self._reader.reduce_shares(work, reduction, op, None)
        else:
            self._pipelined_reduce(work, reduction, op, None)
        if not reduction.is_plain:
            reduction.finish_into(flat, work, self.size)

    def _small_all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        """A small tensor takes one turn. Written out, since the time goes into Python's calls here."""
        segment, rank, dtype, count = self.segment, self.rank, flat.dtype, flat.numel()
        segment.begin(op)
        turn = segment.turn + 1
        if count:
            segment.slot(rank, turn, dtype)[:count].copy_(flat)
        segment.wait_all(segment.publish(), compare=True)
        if count and self.size == 2:
            other = segment.slot(1 - rank, turn, dtype)[:count]
            reduction.combine(flat if rank == 0 else other, other if rank == 0 else flat, out=flat)
        elif count:
            reduction.fold(self._operands(flat, turn), flat, self.scratch)
        segment.end()

    def _operands(self, own: Tensor, turn: int, start: int = 0) -> list[Tensor]:
        """The tensors of all ranks in a turn: `own`, and as many elements from `start` of the others' slots."""
        stop, dtype = start + own.numel(), own.dtype
        return [
            own if rank == self.rank else self.segment.slot(rank, turn, dtype)[start:stop] for rank in range(self.size)
        ]

    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None:
        """Like all_reduce, but only the root's tensor changes."""
        work = reduction.prepare(flat)
        if self._reader.usable(work.nbytes, op):
            shared = self.rank != root and work.data_ptr() == flat.data_ptr()
            work = work.clone() if shared else work  # shares are reduced in place
            self._reader.reduce_shares(work, reduction, op, root)
        elif self.size > 2 and work.nbytes >= SPREAD_BYTES:
            self._pipelined_reduce(work, reduction, op, root)
        else:
            self._fold_all(work, reduction, op, root)
        if self.rank == root:
            reduction.finish_into(flat, work, self.size)

    def _fold_all(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, root: int | None) -> None:
        """All ranks, or the root, reduce the whole tensor: one turn per piece."""
        segment, rank, dtype = self.segment, self.rank, flat.dtype
        step = SLOT_BYTES // dtype.itemsize
        pieces = flat.split(step) if flat.numel() else ()

        def stage(piece: int, turn: int) -> None:
            if rank != root:
                source = pieces[piece]
                segment.slot(rank, turn, dtype)[: len(source)].copy_(source)

        def take(piece: int, turn: int) -> None:
            if root in (None, rank):
                reduction.fold(self._operands(pieces[piece], turn), pieces[piece], self.scratch)

        self._turns(op, len(pieces), stage, take)

    def _pipelined_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, root: int | None) -> None:
        """Each rank reduces its share of every piece for all ranks, or for the root. In turn t it

        copies piece t into its slot · reduces its share of piece t - 1 into the slot behind it · reads the shares of
        piece t - 2 in the others' slots
        """
        segment, rank, dtype, itemsize = self.segment, self.rank, flat.dtype, flat.dtype.itemsize
        align = max(1, ALIGN // itemsize)
        room = SLOT_BYTES // itemsize // (self.size + 1) // align * align * self.size  # of a piece; the share follows
        pieces = flat.split(room)
        segment.begin(op)
        first = segment.turn + 1
        for number in range(len(pieces) + 2):
            turn = first + number
            slot = segment.slot(rank, turn, dtype)
            if number < len(pieces):
                slot[: len(pieces[number])].copy_(pieces[number])
            if number:
                segment.wait_all(turn - 1, compare=number == 1)
            if 1 <= number <= len(pieces):
                piece = pieces[number - 1]
                start, stop = aligned_share(len(piece), rank, self.size, align)
                if stop > start:
                    operands = self._operands(piece[start:stop], turn - 1, start)
                    reduction.fold(operands, slot[room : room + stop - start], self.scratch)
            if number <= len(pieces):
                segment.publish()
            if number >= 2 and root in (None, rank):
                piece = pieces[number - 2]
                for each in range(self.size):
                    start, stop = aligned_share(len(piece), each, self.size, align)
                    if stop > start:
                        piece[start:stop].copy_(segment.slot(each, turn - 1, dtype)[room : room + stop - start])
        segment.end()

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        """`inputs`: one flat tensor per rank, this rank's as long as the output; lengths are the same on all ranks."""
        segment, rank = self.segment, self.rank
        work = [reduction.prepare(each) for each in inputs]
        dtype = work[rank].dtype
        align = max(1, ALIGN // dtype.itemsize)
        step = SLOT_BYTES // dtype.itemsize // self.size // align * align
        target = output if reduction.dtype is None else output.view(reduction.dtype)
        longest = max(each.numel() for each in work)
        if self._reader.usable(longest * dtype.itemsize * self.size, op):
            table = self._reader.begin(op, [each.data_ptr() for each in work])
            self._reader.reduce(work[rank], [row[rank] for row in table], target, reduction)
            reduction.finish(target, self.size)
            return self._reader.end()

        def stage(piece: int, turn: int) -> None:
            slot = segment.slot(rank, turn, dtype)
            for each in segment.others:
                part = work[each][piece * step : (piece + 1) * step]
                slot[each * step : each * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            own = work[rank][piece * step : (piece + 1) * step]
            if len(own):
                operands = self._operands(own, turn, rank * step)
                reduction.fold(operands, target[piece * step : (piece + 1) * step], self.scratch)

        self._turns(op, -(-longest // step), stage, take)
        reduction.finish(target, self.size)
        return None

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> None:
        """Sums partial sums into this rank's first one. Every rank adds up those of all ranks, slot by slot."""
        segment, rank = self.segment, self.rank
        result = next(iter(partials.values()))
        dtype = result.dtype
        held = [subtrees(lanes, span) for span in assignment]
        most = max(len(spans) for spans in held)
        align = max(1, ALIGN // dtype.itemsize)
        step = SLOT_BYTES // dtype.itemsize // most // align * align
        length = result.numel()

        def stage(piece: int, turn: int) -> None:
            slot = segment.slot(rank, turn, dtype)
            for place, span in enumerate(held[rank]):
                part = partials[span][piece * step : (piece + 1) * step]
                slot[place * step : place * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            out = result[piece * step : (piece + 1) * step]
            pieces = {
                span: segment.slot(each, turn, dtype)[place * step : place * step + len(out)]
                for each, spans in enumerate(held)
                for place, span in enumerate(spans)
            }
            fold_partials(lanes, pieces, out, SUM, self.scratch)

        self._turns(op, -(-length // step), stage, take)

    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor:
        """The all-reduce over the ranks up to this one (`exclusive`: below it)."""
        segment, rank, dtype = self.segment, self.rank, flat.dtype
        result = torch.zeros_like(flat)
        step = SLOT_BYTES // dtype.itemsize
        pieces, results = (flat.split(step), result.split(step)) if flat.numel() else ((), ())
        counted = rank if exclusive else rank + 1

        def stage(piece: int, turn: int) -> None:
            segment.slot(rank, turn, dtype)[: len(pieces[piece])].copy_(pieces[piece])

        def take(piece: int, turn: int) -> None:
            if counted:
                reduction.fold(self._operands(pieces[piece], turn)[:counted], results[piece], self.scratch)

        self._turns(op, len(pieces), stage, take)
        return result

    # -- moves of bytes -------------------------------------------------------------------------------------------

    def _move(
        self,
        op: CollectiveOp,
        longest: int,
        fields: int,
        sends: Mapping[int, Tensor],
        receives: Sequence[tuple[int, int, Tensor]],
    ) -> None:
        """Copies flat tensors of bytes, `longest` at most, from rank to rank. A slot has `fields` of equal size.

        `sends` has this rank's tensors by field of its slot; `receives` has a rank, a field of its slot and the output.
        """
        segment, step = self.segment, SLOT_BYTES // fields // ALIGN * ALIGN
        if self._reader.usable(longest, op):
            own = [sends[field].data_ptr() if field in sends else 0 for field in range(fields)]
            addresses = self._reader.begin(op, own)
            for source, field, output in receives:
                self._reader.fetch(source, addresses[source][field], output)
            self._reader.end()
            return

        def stage(piece: int, turn: int) -> None:
            slot = segment.slot(self.rank, turn, torch.uint8)
            for field, tensor in sends.items():
                part = tensor[piece * step : (piece + 1) * step]
                slot[field * step : field * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            for source, field, output in receives:
                part = output[piece * step : (piece + 1) * step]
                part.copy_(segment.slot(source, turn, torch.uint8)[field * step : field * step + len(part)])

        self._turns(op, -(-longest // step), stage, take)

    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None:
        is_root = self.rank == root
        self._move(op, flat.nbytes, 1, {0: flat} if is_root else {}, [] if is_root else [(root, 0, flat)])

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None:
        self.gather(outputs, source, -1, op)

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None:
        receives = []
        if outputs is not None:
            _copy_own(outputs[self.rank], source)
            receives = [(each, 0, outputs[each]) for each in self.segment.others]
        self._move(op, source.nbytes, 1, {0: source} if self.rank != root else {}, receives)

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None:
        sends = {}
        if sources is not None:
            _copy_own(output, sources[self.rank])
            sends = {each: sources[each] for each in self.segment.others}
        receives = [(root, self.rank, output)] if self.rank != root else []
        self._move(op, output.nbytes, self.size, sends, receives)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None:
        """One flat tensor of bytes from and to each rank. Lengths may differ: the ranks exchange them first."""
        size, others = self.size, self.segment.others
        table = torch.empty(size, 2 * size, dtype=torch.int64)
        self.all_gather(list(table.view(torch.uint8).unbind(0)), own_lengths(outputs, inputs), op)
        lengths = table.tolist()
        check_lengths(lengths, self.segment.members, self.segment.sequence)
        _copy_own(outputs[self.rank], inputs[self.rank])
        longest = max(max(row[:size]) for row in lengths)
        receives = [(each, self.rank, outputs[each]) for each in others]
        self._move(op, longest, size, {each: inputs[each] for each in others}, receives)


def own_lengths(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """The bytes that this rank sends to each rank, and those it expects from each, as a tensor of bytes."""
    return torch.tensor([each.numel() for each in (*inputs, *outputs)]).view(torch.uint8)


def check_lengths(table: Sequence[Sequence[int]], members: Sequence[GroupMember], sequence: int) -> None:
    """Raises if one rank sends another length than its receiver expects. A row of the table is `own_lengths`."""
    size = len(members)
    for source in range(size):
        for target in range(size):
            sent, room = table[source][target], table[target][size + source]
            if sent != room:
                raise CollectiveError(
                    f"all_to_all number {sequence}: {members[source]} sends {sent} bytes"
                    f" to {members[target]}, which has room for {room}"
                )


def _copy_own(output: Tensor, source: Tensor) -> None:
    if output.data_ptr() != source.data_ptr():
        output.copy_(source)
