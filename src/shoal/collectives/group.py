"""The workers of a run as one group: gather a row, reduce partial sums in the order of the tree, broadcast.

`SoloGroup` is the group of one worker. `DistributedGroup` is a group of torch.distributed with the backend "shoal".
"""

import copy
import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.options import NAME, CommOptions
from shoal.collectives.process_group import ShoalProcessGroup
from shoal.collectives.registration import register
from shoal.collectives.shared_buffers import SharedBuffers, open_shared_buffers
from shoal.collectives.stats import CommStats, single_host_stats
from shoal.collectives.topology import RankPlace
from shoal.errors import PeerLost, RunError
from shoal.numerics.lanes import Span, fold


class PendingTensor(Protocol):
    """A tensor that a running operation fills or reads. `wait` returns the tensor when the operation is done."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """A running collective, for reports about a run that does not move."""

    operation: str
    missing_ranks: list[int]  # ranks that have not joined it
    seconds: float


class WorkerGroup(Protocol):
    rank: int
    size: int

    def gather_rows(self, row: Tensor) -> Tensor:
        """Every worker's row, one below the other."""
        ...

    def ordered_reduce(
        self,
        lanes: int,
        assignment: Sequence[Span],
        partials: Mapping[Span, Tensor],
        key: Hashable = None,
        attended: bool = False,
    ) -> PendingTensor:
        """Begins the sum over all workers of flat tensors of one length, this worker's given by subtree.

        The reduction owns the memory of `partials` until it is done, and may leave the result there. `key` identifies
        the tensor for compressors with state; a tensor without a key is not compressed. `attended`: the caller will
        wait for the sum soon, and does not compute in between.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None: ...

    def isend(self, tensor: Tensor, to: int, tag: int) -> PendingTensor:
        """Begins to send. The caller must not change the tensor until the send is done."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Forms a group of some of the workers, ranked by their places in `ranks`. All of them call this in the same
        order. The subgroup closes with this group."""
        ...

    def shared_buffers(self, num_bytes: int) -> SharedBuffers | None:
        """Memory of each worker that all can access; None if they share no host or it has too little memory."""
        ...

    def comm_stats(self) -> CommStats:
        """How this worker's sums have travelled so far."""
        ...

    def raise_if_failed(self) -> None:
        """Raises the group's error if it has failed, so that its workers stop computing for it."""
        ...

    def abandon(self, reason: str) -> None:
        """Ends every wait of this worker in the group, now and later, with PeerLost. Any thread may call this."""
        ...

    def ended_ranks(self) -> list[int]:
        """Ranks whose process ended without leaving the group."""
        ...

    def status(self) -> CollectiveStatus | None:
        """The collective that this worker runs now, or None. Any thread may call this."""
        ...

    def close(self) -> None: ...


class ReadyTensor:
    done = True

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)  # a plain add: a fused one would round differently


class SoloGroup:
    rank = 0
    size = 1

    def __init__(self, options: CommOptions | None = None) -> None:
        self.options = options or CommOptions()

    def gather_rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def ordered_reduce(
        self,
        lanes: int,
        assignment: Sequence[Span],
        partials: Mapping[Span, Tensor],
        key: Hashable = None,
        attended: bool = False,
    ) -> PendingTensor:
        total = fold(lanes, partials, _add)
        assert total is not None
        return ReadyTensor(total)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def send(self, tensor: Tensor, to: int) -> None:
        raise RunError("a group of one worker cannot send")

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        raise RunError("a group of one worker cannot receive")

    def isend(self, tensor: Tensor, to: int, tag: int) -> PendingTensor:
        raise RunError("a group of one worker cannot send")

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        return SoloGroup(self.options)

    def shared_buffers(self, num_bytes: int) -> SharedBuffers | None:
        return None

    def raise_if_failed(self) -> None:
        return

    def abandon(self, reason: str) -> None:
        return

    def ended_ranks(self) -> list[int]:
        return []

    def status(self) -> CollectiveStatus | None:
        return None

    def comm_stats(self) -> CommStats:
        return single_host_stats([RankPlace(os.environ.get("SHOAL_HOST") or socket.gethostname())], self.options)

    def close(self) -> None:
        return


class DistributedGroup:
    """Torch's default group, so that a job's code can use torch.distributed; or another, if a script has made one."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        options: CommOptions | None = None,
        form_timeout: timedelta | None = None,
    ) -> None:
        """`form_timeout`: how long to wait for the others to join, if not `timeout`, which holds for collectives."""
        self.rank, self.size = rank, size
        self.subgroups: list[DistributedGroup] = []
        self.owned = not dist.is_initialized()
        register()
        limit = timeout if form_timeout is None else form_timeout
        try:
            if self.owned:
                dist.init_process_group(
                    NAME, store=store, rank=rank, world_size=size, timeout=limit, pg_options=options
                )
                found = dist.group.WORLD
            else:
                found = dist.new_group(backend=NAME, timeout=limit, pg_options=options)
        except PeerLost:
            self._reset()
            raise
        except (RuntimeError, ValueError) as error:
            self._reset()
            raise RunError(f"worker {rank} could not join the group of {size}: {error}") from error
        assert isinstance(found, ShoalProcessGroup)
        self.process_group = found
        self._timeout, self._options = timeout, options
        found.set_timeout(timeout)

    def _reset(self) -> None:
        """Removes a group that is half made, so that the next attempt can begin."""
        if self.owned and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        elif self.owned:
            # Torch names a group by a count of attempts, and some ranks may have failed more often than others.
            dist.distributed_c10d._world.group_count = 0

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.process_group.gather_rows(row)

    def ordered_reduce(
        self,
        lanes: int,
        assignment: Sequence[Span],
        partials: Mapping[Span, Tensor],
        key: Hashable = None,
        attended: bool = False,
    ) -> PendingTensor:
        work = self.process_group.ordered_reduce(lanes, assignment, partials, key, attended)
        return _WorkHandle(next(iter(partials.values())), work)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.process_group.broadcast([tensor], source).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        self.process_group.send([tensor], to).wait()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.process_group.recv([tensor], source, tag).wait()

    def isend(self, tensor: Tensor, to: int, tag: int) -> PendingTensor:
        return _WorkHandle(tensor, self.process_group.send([tensor], to, tag))

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        if len(ranks) == 1:
            return SoloGroup(self._options)
        try:
            found = dist.new_group(
                list(ranks), self._timeout, NAME, pg_options=self._options, use_local_synchronization=True
            )
        except (RuntimeError, ValueError) as error:
            raise PeerLost(f"rank {self.rank} could not form a group with ranks {list(ranks)}: {error}") from error
        assert isinstance(found, ShoalProcessGroup)
        subgroup = copy.copy(self)
        subgroup.rank, subgroup.size, subgroup.process_group = ranks.index(self.rank), len(ranks), found
        subgroup.owned, subgroup.subgroups = False, []
        self.subgroups.append(subgroup)
        self.raise_if_failed()  # another thread may have abandoned this group before it knew the new one
        return subgroup

    def shared_buffers(self, num_bytes: int) -> SharedBuffers | None:
        return open_shared_buffers(self.process_group, num_bytes)

    def raise_if_failed(self) -> None:
        for group in (self, *self.subgroups):
            error = group.process_group.transport.health.failure
            if error is not None:
                raise error

    def abandon(self, reason: str) -> None:
        for group in (self, *self.subgroups):
            group.process_group.transport.health.fail(PeerLost(reason))

    def ended_ranks(self) -> list[int]:
        return self.process_group.transport.health.ended_ranks()

    def status(self) -> CollectiveStatus | None:
        for group in (self, *self.subgroups):
            found = group.process_group.transport.health.status()
            if found is not None:
                operation, missing, seconds = found
                if group is not self:
                    ranks = dist.get_process_group_ranks(group.process_group)
                    missing = [ranks[rank] for rank in missing]
                return CollectiveStatus(operation=operation, missing_ranks=missing, seconds=seconds)
        return None

    def comm_stats(self) -> CommStats:
        return self.process_group.transport.comm_stats()

    def close(self) -> None:
        if dist.is_initialized():
            for subgroup in self.subgroups:
                dist.destroy_process_group(subgroup.process_group)
            self.subgroups.clear()
            dist.destroy_process_group(None if self.owned else self.process_group)


class _WorkHandle:
    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor
