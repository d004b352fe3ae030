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

from shoal.collectives.options import Wish
from shoal.collectives.process_group import NAME, ShoalProcessGroup, register
from shoal.collectives.shared_buffers import Commons, open_commons
from shoal.collectives.single_host import OnHost
from shoal.collectives.stats import Travel, places_of, stay
from shoal.collectives.topology import Place
from shoal.errors import PeerLost, RunError
from shoal.numerics.lanes import Span, fold

if TYPE_CHECKING:
    from shoal.collectives.multi_host import Across


class Pending(Protocol):
    """A merge under way. `wait` returns the sum."""

    def wait(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Doing:
    """A collective under way, for whoever asks why nothing moves."""

    what: str
    waits_for: list[int]  # ranks that have not come to it
    seconds: float


class Posted(Pending, Protocol):
    """A message under way."""

    @property
    def done(self) -> bool: ...


class Group(Protocol):
    rank: int
    size: int

    def gather(self, row: Tensor) -> Tensor:
        """Every worker's row, one below the other."""
        ...

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor], key: Hashable = None) -> Pending:
        """Begins the sum over all workers of flat tensors of one length, this worker's given by subtree.

        The memory of `parts` belongs to the merge until it is done, and may hold the result afterwards. `key` names
        the tensor, for what a compressor remembers of it; what has no name is not compressed.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None: ...

    def post(self, tensor: Tensor, to: int, tag: int) -> "Posted":
        """Begins to send; the tensor belongs to the message until that is done."""
        ...

    def team(self, ranks: Sequence[int]) -> "Group":
        """Some of the workers as a group of their own. All of them ask for it, in the same order; it ends with this
        one. Their ranks in it are their places in `ranks`."""
        ...

    def commons(self, num_bytes: int) -> Commons | None:
        """Memory of each worker that all can reach; None where they share no host, or it has none left."""
        ...

    def how(self) -> Travel:
        """How sums have travelled so far, as this worker saw it."""
        ...

    def check(self) -> None:
        """Raises if the group has failed: what is computed for it would come to nothing."""
        ...

    def abandon(self, reason: str) -> None:
        """Called from another thread: every wait of this worker in the group ends with PeerLost, now and later."""
        ...

    def ended(self) -> list[int]:
        """Ranks that are known to have ended without a word."""
        ...

    def doing(self) -> Doing | None:
        """What this worker does in the group at this moment. Called from another thread; None: nothing."""
        ...

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

    def __init__(self, wish: Wish | None = None) -> None:
        self.wish = wish or Wish()

    def gather(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor], key: Hashable = None) -> Pending:
        total = fold(lanes, parts, _add)
        assert total is not None
        return Done(total)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def send(self, tensor: Tensor, to: int) -> None:
        raise RunError("one worker alone has nobody to send to")

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        raise RunError("one worker alone has nobody to receive from")

    def post(self, tensor: Tensor, to: int, tag: int) -> Posted:
        raise RunError("one worker alone has nobody to send to")

    def team(self, ranks: Sequence[int]) -> Group:
        return Alone(self.wish)

    def commons(self, num_bytes: int) -> Commons | None:
        return None

    def check(self) -> None:
        return

    def abandon(self, reason: str) -> None:
        return

    def ended(self) -> list[int]:
        return []

    def doing(self) -> Doing | None:
        return None

    def how(self) -> Travel:
        return stay([Place(os.environ.get("SHOAL_HOST") or socket.gethostname())], self.wish)

    def close(self) -> None:
        return


class Workers:
    """Torch's default group, so that a job's own code can use torch.distributed; a script that has one keeps it."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        wish: Wish | None = None,
        forming: timedelta | None = None,
    ) -> None:
        """`forming`: how long to wait for the others to come, where that differs from how long to wait in the group."""
        self.rank = rank
        self.size = size
        self.teams: list[Workers] = []
        self.owned = not dist.is_initialized()
        register()
        limit = timeout if forming is None else forming
        try:
            if self.owned:
                dist.init_process_group(NAME, store=store, rank=rank, world_size=size, timeout=limit, pg_options=wish)
                found = dist.group.WORLD
            else:
                found = dist.new_group(backend=NAME, timeout=limit, pg_options=wish)
        except PeerLost:
            self._undo()
            raise
        except (RuntimeError, ValueError) as error:
            self._undo()
            raise RunError(f"worker {rank} could not join the group of {size}: {error}") from error
        assert isinstance(found, ShoalProcessGroup)
        self.process_group = found
        self._timeout, self._wish = timeout, wish
        found.set_timeout(timeout)

    def _undo(self) -> None:
        """Half a group is none: the next attempt starts afresh."""
        if self.owned and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        elif self.owned:
            # Torch counts attempts and lets only those meet that have counted alike; some may have failed once more.
            dist.distributed_c10d._world.group_count = 0

    def gather(self, row: Tensor) -> Tensor:
        return self.process_group.gather_rows(row)

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor], key: Hashable = None) -> Pending:
        return _Merge(self.process_group, lanes, deal, parts, key)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.process_group.broadcast([tensor], source).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        self.process_group.send([tensor], to).wait()

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.process_group.recv([tensor], source, tag).wait()

    def post(self, tensor: Tensor, to: int, tag: int) -> Posted:
        return _Message(tensor, self.process_group.send([tensor], to, tag))

    def team(self, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return Alone(self._wish)
        team = object.__new__(Workers)
        team.rank, team.size, team.owned, team.teams, team._wish = (
            ranks.index(self.rank),
            len(ranks),
            False,
            [],
            self._wish,
        )
        try:
            made = dist.new_group(
                list(ranks), timeout=self._timeout, backend=NAME, pg_options=self._wish, use_local_synchronization=True
            )
        except (RuntimeError, ValueError) as error:
            raise PeerLost(f"rank {self.rank} could not form a group with ranks {list(ranks)}: {error}") from error
        assert isinstance(made, ShoalProcessGroup)
        team.process_group, team._timeout = made, self._timeout
        self.teams.append(team)
        self.check()  # whoever gave this group up meanwhile did not know of the new one
        return team

    def commons(self, num_bytes: int) -> Commons | None:
        return open_commons(self.process_group, num_bytes)

    def check(self) -> None:
        for group in (self, *self.teams):
            error = group.process_group.way.failure()
            if error is not None:
                raise error

    def abandon(self, reason: str) -> None:
        for group in (self, *self.teams):
            group.process_group.way.depart(PeerLost(reason))

    def ended(self) -> list[int]:
        return self.process_group.way.ended()

    def doing(self) -> Doing | None:
        for group in (self, *self.teams):
            found = group.process_group.way.doing()
            if found is not None:
                members = (
                    list(range(group.size)) if group is self else dist.get_process_group_ranks(group.process_group)
                )
                return Doing(what=found[0], waits_for=[members[rank] for rank in found[1]], seconds=found[2])
        return None

    def how(self) -> Travel:
        way, members = self.process_group.way, self.process_group.members
        return stay(places_of(members), members[0].wish) if isinstance(way, OnHost) else cast("Across", way).how()

    def close(self) -> None:
        if dist.is_initialized():
            for team in self.teams:
                dist.destroy_process_group(team.process_group)
            self.teams.clear()
            dist.destroy_process_group(None if self.owned else self.process_group)


class _Message:
    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor


class _Merge:
    def __init__(
        self,
        group: ShoalProcessGroup,
        lanes: int,
        deal: Sequence[Span],
        parts: Mapping[Span, Tensor],
        key: Hashable,
    ) -> None:
        self._result = next(iter(parts.values()))
        self._work = group.merge(lanes, deal, parts, key)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result
