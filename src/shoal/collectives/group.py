"""The workers of a run as one group: gather a row, merge partial sums in the order of the tree, send from one to all.

`Alone` is the group of one worker; `GlooGroup` moves bytes with torch.distributed. Both have the same face.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.errors import RunError
from shoal.partition.lanes import Span, fold, subtrees

SLICE_ELEMENTS = 64  # slices of a merge begin at multiples of this


class PeerLost(RunError):
    """Another worker is gone or has not answered in time."""


class Pending(Protocol):
    """A merge under way. `wait` returns the sum."""

    def wait(self) -> Tensor: ...


class Group(Protocol):
    rank: int
    size: int

    def gather(self, row: Tensor) -> Tensor:
        """Every worker's row, one below the other."""
        ...

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> Pending:
        """Begins the sum over all workers of flat tensors of one length, this worker's given by subtree.

        The memory of `parts` belongs to the merge until it is done, and may hold the result afterwards.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def close(self) -> None: ...


class Done:
    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)  # a plain add: anything fused would round differently


class Alone:
    rank = 0
    size = 1

    def gather(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> Pending:
        total = fold(lanes, parts, _add)
        assert total is not None
        return Done(total)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def close(self) -> None:
        return


class GlooGroup:
    """torch.distributed's Gloo underneath. Two ways to merge give the same bits:

    pair    two workers with one partial sum each: the library's all-reduce, since a + b is b + a
    direct  every worker sends each slice of its sums to the slice's owner, who adds in the tree's order; then all
            gather the slices. With one partial sum each, the traffic of a ring
    """

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.merges = 0
        self.owned = not dist.is_initialized()
        try:
            if self.owned:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
                self.group = None  # the default one
            else:  # a script that has one of its own keeps it
                self.group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"worker {rank} could not join the group of {size}: {error}") from error

    def gather(self, row: Tensor) -> Tensor:
        rows = torch.empty(self.size, *row.shape, dtype=row.dtype)
        with _peers(self.rank, "gather"):
            dist.all_gather(list(rows.unbind(0)), row, group=self.group)
        return rows

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> Pending:
        with _peers(self.rank, "merge"):
            return self._merge(lanes, deal, parts)

    def _merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> Pending:
        if self.size == 2 and all(len(subtrees(lanes, span)) == 1 for span in deal):
            (part,) = parts.values()
            return _Pair(self, part)
        return _Direct(self, lanes, deal, parts)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with _peers(self.rank, "broadcast"):
            dist.broadcast(tensor, source, group=self.group)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(None if self.owned else self.group)


@contextmanager
def _peers(rank: int, operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).split("\n")[0]
        raise PeerLost(f"worker {rank} lost touch with another worker in {operation}: {text}") from error


class _Pair:
    def __init__(self, group: GlooGroup, part: Tensor) -> None:
        self.group, self.part = group, part
        self.work = dist.all_reduce(part, group=group.group, async_op=True)

    def wait(self) -> Tensor:
        with _peers(self.group.rank, "merge"):
            self.work.wait()
        return self.part


class _Direct:
    def __init__(self, group: GlooGroup, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> None:
        self.group, self.lanes, self.parts = group, lanes, dict(parts)
        length = next(iter(parts.values())).numel()
        self.bounds = slice_bounds(length, group.size)
        mine = self.bounds[group.rank]
        self.received: dict[Span, Tensor] = {span: part[mine[0] : mine[1]] for span, part in parts.items()}
        self.work = []
        # Several merges may be under way at once: each has tags of its own.
        group.merges += 1
        base = group.merges % 4096 * 1024
        for other, held in enumerate(deal):
            if other == group.rank:
                continue
            start, stop = self.bounds[other]
            for tag, span in enumerate(subtrees(lanes, held)):
                if mine[1] > mine[0]:
                    first = next(iter(parts.values()))
                    self.received[span] = torch.empty(mine[1] - mine[0], dtype=first.dtype)
                    self.work.append(dist.irecv(self.received[span], other, group=group.group, tag=base + tag))
            if stop > start:
                for tag, span in enumerate(subtrees(lanes, deal[group.rank])):
                    self.work.append(dist.isend(parts[span][start:stop], other, group=group.group, tag=base + tag))

    def wait(self) -> Tensor:
        with _peers(self.group.rank, "merge"):
            return self._wait()

    def _wait(self) -> Tensor:
        for work in self.work:
            work.wait()  # type: ignore[union-attr]
        group = self.group
        result = next(iter(self.parts.values()))
        start, stop = self.bounds[group.rank]
        if stop > start:
            total = fold(self.lanes, self.received, _add)
            assert total is not None
            if total.data_ptr() != result[start:stop].data_ptr():
                result[start:stop].copy_(total)
        gathering = [
            dist.broadcast(result[begin:end], owner, group=group.group, async_op=True)
            for owner, (begin, end) in enumerate(self.bounds)
            if end > begin
        ]
        for work in gathering:
            work.wait()
        return result


def slice_bounds(length: int, owners: int) -> list[tuple[int, int]]:
    """Cuts a flat tensor into one slice per owner, at multiples of 64 elements."""
    pieces = -(-length // SLICE_ELEMENTS)
    cuts = [min(length, pieces * owner // owners * SLICE_ELEMENTS) for owner in range(owners + 1)]
    return list(pairwise(cuts))
