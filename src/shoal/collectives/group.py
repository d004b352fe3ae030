"""The workers of a run as one group: gather a row, merge partial sums in the order of the tree, send from one to all.

`Alone` is the group of one worker; `Workers` is one of torch.distributed's groups with the backend "shoal".
"""

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.options import CommOptions
from shoal.collectives.process_group import NAME, ShoalProcessGroup, register
from shoal.collectives.shared_buffers import SharedBuffers, open_shared_buffers
from shoal.collectives.single_host import SingleHostTransport
from shoal.collectives.stats import CommStats, places_of, single_host_stats
from shoal.collectives.topology import RankPlace
from shoal.errors import PeerLost, RunError
from shoal.numerics.lanes import Span, fold

if TYPE_CHECKING:
    from shoal.collectives.multi_host import MultiHostTransport


class PendingTensor(Protocol):
    """A merge under way. `wait` returns the sum."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class CollectiveStatus:
    """A collective under way, for whoever asks why nothing moves."""

    operation: str
    missing_ranks: list[int]  # ranks that have not come to it
    seconds: float


class PendingSend(PendingTensor, Protocol):
    """A message under way."""

    @property
    def done(self) -> bool: ...


class WorkerGroup(Protocol):
    rank: int
    size: int

    def gather_rows(self, row: Tensor) -> Tensor:
        """Every worker's row, one below the other."""
        ...

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable = None
    ) -> PendingTensor:
        """Begins the sum over all workers of flat tensors of one length, this worker's given by subtree.

        The memory of `parts` belongs to the merge until it is done, and may hold the result afterwards. `key` names
        the tensor, for what a compressor remembers of it; what has no name is not compressed.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None: ...

    def isend(self, tensor: Tensor, to: int, tag: int) -> "PendingSend":
        """Begins to send; the tensor belongs to the message until that is done."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> "WorkerGroup":
        """Some of the workers as a group of their own. All of them ask for it, in the same order; it ends with this
        one. Their ranks in it are their places in `ranks`."""
        ...

    def shared_buffers(self, num_bytes: int) -> SharedBuffers | None:
        """Memory of each worker that all can reach; None where they share no host, or it has none left."""
        ...

    def comm_stats(self) -> CommStats:
        """How sums have travelled so far, as this worker saw it."""
        ...

    def raise_if_failed(self) -> None:
        """Raises if the group has failed: what is computed for it would come to nothing."""
        ...

    def abandon(self, reason: str) -> None:
        """Called from another thread: every wait of this worker in the group ends with PeerLost, now and later."""
        ...

    def ended_ranks(self) -> list[int]:
        """Ranks that are known to have ended without a word."""
        ...

    def status(self) -> CollectiveStatus | None:
        """What this worker does in the group at this moment. Called from another thread; None: nothing."""
        ...

    def close(self) -> None: ...


class ReadyTensor:
    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self) -> Tensor:
        return self.result


def _add(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)  # a plain add: anything fused would round differently


class SoloGroup:
    rank = 0
    size = 1

    def __init__(self, options: CommOptions | None = None) -> None:
        self.options = options or CommOptions()

    def gather_rows(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable = None
    ) -> PendingTensor:
        total = fold(lanes, partials, _add)
        assert total is not None
        return ReadyTensor(total)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def send(self, tensor: Tensor, to: int) -> None:
        raise RunError("one worker alone has nobody to send to")

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        raise RunError("one worker alone has nobody to receive from")

    def isend(self, tensor: Tensor, to: int, tag: int) -> PendingSend:
        raise RunError("one worker alone has nobody to send to")

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
    """Torch's default group, so that a job's own code can use torch.distributed; a script that has one keeps it."""

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
        """`forming`: how long to wait for the others to come, where that differs from how long to wait in the group."""
        self.rank = rank
        self.size = size
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
        """Half a group is none: the next attempt starts afresh."""
        if self.owned and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        elif self.owned:
            # Torch counts attempts and lets only those meet that have counted alike; some may have failed once more.
            dist.distributed_c10d._world.group_count = 0

    def gather_rows(self, row: Tensor) -> Tensor:
        return self.process_group.gather_rows(row)

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable = None
    ) -> PendingTensor:
        return _ReduceHandle(self.process_group, lanes, assignment, partials, key)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.process_group.broadcast([tensor], source).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        self.process_group.send([tensor], to).wait()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.process_group.recv([tensor], source, tag).wait()

    def isend(self, tensor: Tensor, to: int, tag: int) -> PendingSend:
        return _SendHandle(tensor, self.process_group.send([tensor], to, tag))

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        if len(ranks) == 1:
            return SoloGroup(self._options)
        team = object.__new__(DistributedGroup)
        team.rank, team.size, team.owned, team.subgroups, team._options = (
            ranks.index(self.rank),
            len(ranks),
            False,
            [],
            self._options,
        )
        try:
            made = dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend=NAME,
                pg_options=self._options,
                use_local_synchronization=True,
            )
        except (RuntimeError, ValueError) as error:
            raise PeerLost(f"rank {self.rank} could not form a group with ranks {list(ranks)}: {error}") from error
        assert isinstance(made, ShoalProcessGroup)
        team.process_group, team._timeout = made, self._timeout
        self.subgroups.append(team)
        self.raise_if_failed()  # whoever gave this group up meanwhile did not know of the new one
        return team

    def shared_buffers(self, num_bytes: int) -> SharedBuffers | None:
        return open_shared_buffers(self.process_group, num_bytes)

    def raise_if_failed(self) -> None:
        for group in (self, *self.subgroups):
            error = group.process_group.transport.failure()
            if error is not None:
                raise error

    def abandon(self, reason: str) -> None:
        for group in (self, *self.subgroups):
            group.process_group.transport.announce_exit(PeerLost(reason))

    def ended_ranks(self) -> list[int]:
        return self.process_group.transport.ended_ranks()

    def status(self) -> CollectiveStatus | None:
        for group in (self, *self.subgroups):
            found = group.process_group.transport.status()
            if found is not None:
                members = (
                    list(range(group.size)) if group is self else dist.get_process_group_ranks(group.process_group)
                )
                return CollectiveStatus(
                    operation=found[0], missing_ranks=[members[rank] for rank in found[1]], seconds=found[2]
                )
        return None

    def comm_stats(self) -> CommStats:
        way, members = self.process_group.transport, self.process_group.members
        return (
            single_host_stats(places_of(members), members[0].options)
            if isinstance(way, SingleHostTransport)
            else cast("MultiHostTransport", way).comm_stats()
        )

    def close(self) -> None:
        if dist.is_initialized():
            for team in self.subgroups:
                dist.destroy_process_group(team.process_group)
            self.subgroups.clear()
            dist.destroy_process_group(None if self.owned else self.process_group)


class _SendHandle:
    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor


class _ReduceHandle:
    def __init__(
        self,
        group: ShoalProcessGroup,
        lanes: int,
        assignment: Sequence[Span],
        partials: Mapping[Span, Tensor],
        key: Hashable,
    ) -> None:
        self._result = next(iter(partials.values()))
        self._work = group.ordered_reduce(lanes, assignment, partials, key)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result
