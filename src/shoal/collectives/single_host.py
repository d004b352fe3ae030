"""Collectives of ranks that share memory. Large tensors move in pieces that stay in cache, a slot at a time.

Every one is a row of turns (arena.py): `stage` fills this rank's slot, `take` reads the others'. A turn is staged while
the one before it is still on its way.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.handshake import GroupMember
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.reduction import SUM, Reduction, ScratchBuffers, fold_partials
from shoal.collectives.remote_read import ReadProbe, can_read, read_memory
from shoal.collectives.shm_p2p import ShmMessage, ShmMessenger
from shoal.collectives.shm_segment import SLOT_BYTES, ShmSegment
from shoal.errors import CollectiveError
from shoal.numerics.lanes import Span, subtrees

ALIGN = 64  # bytes: pieces begin at multiples of this
REMOTE_READ_BYTES = 1 << 18  # from here on tensors are read where they lie, if the system lets us
REMOTE_READ_PIECE_BYTES = 1 << 18  # of a sum at a time: everybody's pieces stay in cache
SPREAD_BYTES = 1 << 15  # from here on, and with three ranks or more, each rank reduces its share and hands it round


class SingleHostTransport:
    def __init__(self, segment: ShmSegment, messenger: ShmMessenger) -> None:
        self.segment = segment
        self.messenger = messenger
        self.rank, self.size = segment.rank, segment.size
        self._peers_readable: bool | None = None  # whether all may read each other's memory; None: not tried yet
        self.scratch = ScratchBuffers()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _turns(
        self, op: CollectiveOp, count: int, stage: Callable[[int, int], None], take: Callable[[int, int], None]
    ) -> None:
        """Stages and takes `count` pieces. Even an operation on nothing meets once, so that mistakes are seen."""
        arena = self.segment
        arena.begin(op)
        first = arena.turn + 1
        if not count:
            arena.wait_all(arena.publish(), compare=True)
        else:
            stage(0, first)
            arena.publish()
        for piece in range(count):
            if piece + 1 < count:
                stage(piece + 1, first + piece + 1)
                arena.publish()
            arena.wait_all(first + piece, compare=not piece)
            take(piece, first + piece)
        arena.end()

    def barrier(self, name: str = "barrier") -> None:
        self._turns(CollectiveOp(name), 0, _nothing, _nothing)

    @property
    def sequence(self) -> int:
        """How many collectives this group has begun."""
        return self.segment.sequence

    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> ShmMessage:
        return self.messenger.send(flat, to, tag, op)

    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> ShmMessage:
        return self.messenger.receive(flat, source, tag, op)

    def set_timeout(self, seconds: float) -> None:
        self.segment.timeout = seconds

    def abandon(self, error: BaseException) -> None:
        self.segment.abandon(error)

    def announce_exit(self, cause: CollectiveError) -> None:
        self.segment.fail(cause)

    def status(self) -> tuple[str, list[int], float] | None:
        return self.segment.status()

    def failure(self) -> CollectiveError | None:
        return self.segment.failure

    def ended_ranks(self) -> list[int]:
        return self.segment.ended_ranks()

    def close(self) -> None:
        self.segment.leave()
        self.messenger.close()

    # -- reading where it lies ----------------------------------------------------------------------------------------

    def _reads_peers(self, num_bytes: int, op: CollectiveOp) -> bool:
        """Whether tensors of this size (the same on all ranks) are read from their owners' memory."""
        if num_bytes < REMOTE_READ_BYTES or self.size == 1:
            return False
        if self._peers_readable is None:
            proof = ReadProbe()
            rows = self._exchange_rows(op, proof.address_and_secret())
            processes = [member.pid for member in self.segment.members]
            mine = all(can_read(processes[each], rows[each]) for each in self.segment.others)
            self.segment.end()
            self._peers_readable = all(
                row[0] for row in self._exchange_rows(op, [int(mine)])
            )  # also the end of the proof
            self.segment.end()
        return self._peers_readable

    def _exchange_rows(self, op: CollectiveOp, row: list[int]) -> list[list[int]]:
        """Everybody's few numbers: the beginning of an operation, which `_meet` ends."""
        arena, count = self.segment, len(row)
        arena.begin(op)
        turn = arena.turn + 1
        arena.slot(self.rank, turn, torch.int64)[:count] = torch.tensor(row)
        arena.wait_all(arena.publish(), compare=True)
        return [arena.slot(each, turn, torch.int64)[:count].tolist() for each in range(self.size)]

    def _fetch(self, rank: int, address: int, into: Tensor) -> None:
        try:
            read_memory(self.segment.members[rank].pid, address, into)
        except OSError as error:
            self.segment.peer_unreadable(rank, error)

    def _end_op(self) -> None:
        self.segment.wait_all(self.segment.publish())
        self.segment.end()

    def _reduce_remote(self, own: Tensor, addresses: Sequence[int], out: Tensor, reduction: Reduction) -> None:
        """Everybody's tensors of one length, each at its address, combined a cache-sized piece at a time."""
        itemsize = own.element_size()
        step = REMOTE_READ_PIECE_BYTES // itemsize
        for start in range(0, own.numel(), step):
            piece = own[start : start + step]
            parts = []
            for each in range(self.size):
                if each == self.rank:
                    parts.append(piece)
                else:
                    room = self.scratch.like(piece, 100 + each)
                    self._fetch(each, addresses[each] + start * itemsize, room)
                    parts.append(room)
            reduction.fold(parts, out[start : start + step], self.scratch)

    def _reduce_remote_shares(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, root: int | None) -> None:
        """Each rank adds up one share in its own memory; then all, or the root, fetch the others' shares."""
        itemsize = flat.element_size()
        addresses = [row[0] for row in self._exchange_rows(op, [flat.data_ptr()])]
        shares = [aligned_share(flat.numel(), each, self.size, max(1, ALIGN // itemsize)) for each in range(self.size)]
        start, stop = shares[self.rank]
        own = flat[start:stop]
        self._reduce_remote(own, [address + start * itemsize for address in addresses], own, reduction)
        self.segment.wait_all(self.segment.publish())
        if root is None or root == self.rank:
            for each in self.segment.others:
                start, stop = shares[each]
                self._fetch(each, addresses[each] + start * itemsize, flat[start:stop])
        self._end_op()

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        """In place, on a contiguous flat tensor."""
        work = flat if reduction.is_plain else reduction.prepare(flat)
        if work.nbytes < SPREAD_BYTES:
            self._small_all_reduce(work, reduction, op)
        elif self.size == 2:  # the other's piece is added straight from its slot: no better way was found
            self._fold_all(work, reduction, op, everybody=True)
        elif self._reads_peers(work.nbytes, op):
            self._reduce_remote_shares(work, reduction, op, None)
        else:
            self._pipelined_reduce(work, reduction, op, everybody=True)
        if not reduction.is_plain:
            reduction.finish(work, self.size)
            _copy_back(flat, work)

    def _small_all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        """A small tensor: one turn, and few words about it, since here it is the words that take the time."""
        arena, rank, dtype, count = self.segment, self.rank, flat.dtype, flat.numel()
        arena.begin(op)
        turn = arena.turn + 1
        if count:
            arena.slot(rank, turn, dtype)[:count].copy_(flat)
        arena.wait_all(arena.publish(), compare=True)
        if count and self.size == 2:
            other = arena.slot(1 - rank, turn, dtype)[:count]
            reduction.combine(flat if rank == 0 else other, other if rank == 0 else flat, out=flat)
        elif count:
            parts = [flat if each == rank else arena.slot(each, turn, dtype)[:count] for each in range(self.size)]
            reduction.fold(parts, flat, self.scratch)
        arena.end()

    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None:
        """Like all_reduce, but only the root's tensor changes."""
        mine = self.rank == root
        work = reduction.prepare(flat)
        if self._reads_peers(work.nbytes, op):
            kept = not mine and work.data_ptr() == flat.data_ptr()
            self._reduce_remote_shares(work.clone() if kept else work, reduction, op, root)  # shares are made in place
        elif self.size > 2 and work.nbytes >= SPREAD_BYTES:
            self._pipelined_reduce(work, reduction, op, everybody=False, root=root)
        else:
            self._fold_all(work, reduction, op, everybody=False, root=root)
        if mine:
            reduction.finish(work, self.size)
            _copy_back(flat, work)

    def _fold_all(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, everybody: bool, root: int = -1) -> None:
        """Whoever needs the result adds it all up: one turn per piece."""
        arena, rank, dtype = self.segment, self.rank, flat.dtype
        step = SLOT_BYTES // dtype.itemsize
        pieces = flat.split(step) if flat.numel() else ()
        need = everybody or rank == root

        def stage(piece: int, turn: int) -> None:
            if everybody or rank != root:
                source = pieces[piece]
                arena.slot(rank, turn, dtype)[: len(source)].copy_(source)

        def take(piece: int, turn: int) -> None:
            if need:
                own = pieces[piece]
                length = len(own)
                parts = [own if each == rank else arena.slot(each, turn, dtype)[:length] for each in range(self.size)]
                reduction.fold(parts, own, self.scratch)

        self._turns(op, len(pieces), stage, take)

    def _pipelined_reduce(
        self, flat: Tensor, reduction: Reduction, op: CollectiveOp, everybody: bool, root: int = -1
    ) -> None:
        """Each rank reduces its share of every piece and hands it round. Three things are under way at a time:

        turn t    piece t goes into the slot · this rank's share of piece t - 1 is reduced and goes in behind it
                  · the shares of piece t - 2 come out
        """
        arena, rank, dtype, itemsize = self.segment, self.rank, flat.dtype, flat.dtype.itemsize
        align = max(1, ALIGN // itemsize)
        room = SLOT_BYTES // itemsize // (self.size + 1) // align * align * self.size  # for a piece; shares lie behind
        pieces = flat.split(room)
        arena.begin(op)
        first = arena.turn + 1
        for number in range(len(pieces) + 2):
            turn = first + number
            slot = arena.slot(rank, turn, dtype)
            if number < len(pieces):
                slot[: len(pieces[number])].copy_(pieces[number])
            if number:
                arena.wait_all(turn - 1, compare=number == 1)
            if 1 <= number <= len(pieces):
                piece = pieces[number - 1]
                start, stop = aligned_share(len(piece), rank, self.size, align)
                parts = [
                    piece[start:stop] if each == rank else arena.slot(each, turn - 1, dtype)[start:stop]
                    for each in range(self.size)
                ]
                if stop > start:
                    reduction.fold(parts, slot[room : room + stop - start], self.scratch)
            if number <= len(pieces):
                arena.publish()
            if number >= 2 and (everybody or rank == root):
                piece = pieces[number - 2]
                for each in range(self.size):
                    start, stop = aligned_share(len(piece), each, self.size, align)
                    if stop > start:
                        piece[start:stop].copy_(arena.slot(each, turn - 1, dtype)[room : room + stop - start])
        arena.end()

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        """`inputs`: one flat tensor per rank, this rank's as long as the output; all ranks give the same lengths."""
        arena, rank = self.segment, self.rank
        work = [reduction.prepare(each) for each in inputs]
        dtype = work[rank].dtype
        align = max(1, ALIGN // dtype.itemsize)
        step = SLOT_BYTES // dtype.itemsize // self.size // align * align
        target = output if reduction.dtype is None else output.view(reduction.dtype)
        longest = max(each.numel() for each in work)
        if self._reads_peers(longest * dtype.itemsize * self.size, op):
            table = self._exchange_rows(op, [each.data_ptr() for each in work])
            self._reduce_remote(work[rank], [row[rank] for row in table], target, reduction)
            reduction.finish(target, self.size)
            return self._end_op()

        def stage(piece: int, turn: int) -> None:
            slot = arena.slot(rank, turn, dtype)
            for each in arena.others:
                part = work[each][piece * step : (piece + 1) * step]
                slot[each * step : each * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            own = work[rank][piece * step : (piece + 1) * step]
            if len(own):
                at = rank * step
                parts = [
                    own if each == rank else arena.slot(each, turn, dtype)[at : at + len(own)]
                    for each in range(self.size)
                ]
                reduction.fold(parts, target[piece * step : (piece + 1) * step], self.scratch)

        self._turns(op, -(-longest // step), stage, take)
        reduction.finish(target, self.size)
        return None

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> Tensor:
        """The sum of partial sums, in the memory of this rank's first part. All add up all of them, slot by slot."""
        arena, rank = self.segment, self.rank
        result = next(iter(partials.values()))
        dtype = result.dtype
        held = [subtrees(lanes, span) for span in assignment]
        most = max(len(spans) for spans in held)
        align = max(1, ALIGN // dtype.itemsize)
        step = SLOT_BYTES // dtype.itemsize // most // align * align
        length = result.numel()

        def stage(piece: int, turn: int) -> None:
            slot = arena.slot(rank, turn, dtype)
            for place, span in enumerate(held[rank]):
                part = partials[span][piece * step : (piece + 1) * step]
                slot[place * step : place * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            out = result[piece * step : (piece + 1) * step]
            pieces = {
                span: arena.slot(each, turn, dtype)[place * step : place * step + len(out)]
                for each, spans in enumerate(held)
                for place, span in enumerate(spans)
            }
            fold_partials(lanes, pieces, out, SUM, self.scratch)

        self._turns(op, -(-length // step), stage, take)
        return result

    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor:
        """What an all-reduce of the ranks up to this one (or below it) would give."""
        arena, rank, dtype = self.segment, self.rank, flat.dtype
        result = torch.zeros_like(flat)
        step = SLOT_BYTES // dtype.itemsize
        pieces, results = (flat.split(step), result.split(step)) if flat.numel() else ((), ())
        counted = rank if exclusive else rank + 1

        def stage(piece: int, turn: int) -> None:
            arena.slot(rank, turn, dtype)[: len(pieces[piece])].copy_(pieces[piece])

        def take(piece: int, turn: int) -> None:
            length = len(pieces[piece])
            if counted:
                parts = [
                    pieces[piece] if each == rank else arena.slot(each, turn, dtype)[:length] for each in range(counted)
                ]
                reduction.fold(parts, results[piece], self.scratch)

        self._turns(op, len(pieces), stage, take)
        return result

    # -- moves: bytes, whatever they mean -------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None:
        arena, rank = self.segment, self.rank
        if self._reads_peers(flat.nbytes, op):
            address = self._exchange_rows(op, [flat.data_ptr()])[root][0]
            if rank != root:
                self._fetch(root, address, flat)
            return self._end_op()
        pieces = flat.split(SLOT_BYTES) if flat.numel() else ()

        def stage(piece: int, turn: int) -> None:
            if rank == root:
                arena.slot(rank, turn, torch.uint8)[: len(pieces[piece])].copy_(pieces[piece])

        def take(piece: int, turn: int) -> None:
            if rank != root:
                pieces[piece].copy_(arena.slot(root, turn, torch.uint8)[: len(pieces[piece])])

        self._turns(op, len(pieces), stage, take)
        return None

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None:
        self._gather(outputs, source, op)

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None:
        self._gather(outputs, source, op, root)

    def _gather(self, outputs: Sequence[Tensor] | None, source: Tensor, op: CollectiveOp, root: int = -1) -> None:
        """Everyone's bytes to everyone, or to the root."""
        arena, rank = self.segment, self.rank
        pieces = source.split(SLOT_BYTES) if source.numel() else ()
        targets = [_split(output) for output in outputs] if outputs is not None else []
        if outputs is not None and outputs[rank].data_ptr() != source.data_ptr():
            outputs[rank].copy_(source)
        if self._reads_peers(source.nbytes, op):
            addresses = [row[0] for row in self._exchange_rows(op, [source.data_ptr()])]
            if outputs is not None:
                for each in arena.others:
                    self._fetch(each, addresses[each], outputs[each])
            return self._end_op()

        def stage(piece: int, turn: int) -> None:
            if rank != root:
                arena.slot(rank, turn, torch.uint8)[: len(pieces[piece])].copy_(pieces[piece])

        def take(piece: int, turn: int) -> None:
            if outputs is not None:
                length = len(pieces[piece])
                for each in arena.others:
                    targets[each][piece].copy_(arena.slot(each, turn, torch.uint8)[:length])

        self._turns(op, len(pieces), stage, take)
        return None

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None:
        arena, rank = self.segment, self.rank
        step = SLOT_BYTES // self.size // ALIGN * ALIGN
        length = output.numel()
        if sources is not None and output.data_ptr() != sources[rank].data_ptr():
            output.copy_(sources[rank])
        if self._reads_peers(output.nbytes, op):
            row = [each.data_ptr() for each in sources] if sources is not None else [0] * self.size
            addresses = self._exchange_rows(op, row)[root]
            if rank != root:
                self._fetch(root, addresses[rank], output)
            return self._end_op()

        def stage(piece: int, turn: int) -> None:
            if sources is not None:
                start, stop = piece * step, min(length, (piece + 1) * step)
                slot = arena.slot(rank, turn, torch.uint8)
                for each in arena.others:
                    slot[each * step : each * step + stop - start].copy_(sources[each][start:stop])

        def take(piece: int, turn: int) -> None:
            if rank != root:
                start, stop = piece * step, min(length, (piece + 1) * step)
                at = rank * step
                output[start:stop].copy_(arena.slot(root, turn, torch.uint8)[at : at + stop - start])

        self._turns(op, -(-length // step), stage, take)
        return None

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None:
        """One flat tensor of bytes from and to each rank. Lengths may differ: all tell theirs first."""
        arena, rank, size = self.segment, self.rank, self.size
        lengths = torch.tensor([*[each.numel() for each in inputs], *[each.numel() for each in outputs]])
        table = torch.empty(size, 2 * size, dtype=torch.int64)
        rows = table.view(torch.uint8)
        self._gather(list(rows.unbind(0)), lengths.view(torch.uint8), op)
        lines = table.tolist()
        check_lengths(lines, arena.members, arena.sequence)
        if outputs[rank].numel():
            outputs[rank].copy_(inputs[rank])
        step = SLOT_BYTES // size // ALIGN * ALIGN
        longest = max(max(line[:size]) for line in lines)
        if self._reads_peers(longest, op):
            places = self._exchange_rows(op, [each.data_ptr() for each in inputs])
            for each in arena.others:
                self._fetch(each, places[each][rank], outputs[each])
            return self._end_op()

        def stage(piece: int, turn: int) -> None:
            slot = arena.slot(rank, turn, torch.uint8)
            for each in arena.others:
                part = inputs[each][piece * step : (piece + 1) * step]
                if len(part):
                    slot[each * step : each * step + len(part)].copy_(part)

        def take(piece: int, turn: int) -> None:
            for each in arena.others:
                part = outputs[each][piece * step : (piece + 1) * step]
                if len(part):
                    part.copy_(arena.slot(each, turn, torch.uint8)[rank * step : rank * step + len(part)])

        self._turns(op, -(-longest // step), stage, take)
        return None


def check_lengths(table: Sequence[Sequence[int]], members: Sequence[GroupMember], sequence: int) -> None:
    """Every rank tells what it sends to each and what it has room for from each; all see the same table."""
    size = len(members)
    for source in range(size):
        for target in range(size):
            sent, room = table[source][target], table[target][size + source]
            if sent != room:
                raise CollectiveError(
                    f"all_to_all number {sequence}: {members[source]} sends {sent} bytes"
                    f" to {members[target]}, which has room for {room}"
                )


def _nothing(piece: int, turn: int) -> Any:
    return None


def _split(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split(SLOT_BYTES) if flat.numel() else ()


def _copy_back(flat: Tensor, work: Tensor) -> None:
    if flat.data_ptr() != work.data_ptr():
        flat.copy_(work.view(flat.dtype))


def aligned_share(length: int, owner: int, owners: int, align: int) -> tuple[int, int]:
    """A rank's share of a piece: from where to where, at aligned places."""
    cells = (length + align - 1) // align
    width = (cells + owners - 1) // owners * align
    return min(length, owner * width), min(length, (owner + 1) * width)
