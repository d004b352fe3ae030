"""The workers of a run as one of them sees them: what a run needs of its membership, and how a membership can end.

ElasticMembership    workers come and go; they find each other at the run's store
FixedMembership      as many as at the start (torchrun, a process alone): a loss ends the run
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.collectives.group import WorkerGroup
from shoal.errors import PeerLost, RunError
from shoal.recovery.membership.protocol import MembershipView, MemberState, RecoveryPlan, WorkerId
from shoal.worker.requests import STOP

TOO_SLOW = "too slow"  # why a worker left
MODEL_SHARD_LOST = "a part of the model was lost"  # another reason


class WorkerEvicted(RunError):
    """The others went on without this worker."""

    exit_code = 75


class ModelShardLost(WorkerEvicted):
    """Nobody is left who has some part of the model: what this worker has of it is worth nothing."""

    present: tuple[WorkerId, ...] = ()  # whoever is left


class RunAbandoned(PeerLost):
    """The run ends, because of an error that another worker has told of."""


class RunCompleted(RunError):
    """The others are done, and so is this worker: it had come to the end with them, and did not hear of it."""


class RunMembership(Protocol):
    """What a run needs to know of its workers."""

    worker_id: WorkerId
    group: WorkerGroup
    view: MembershipView
    elastic: bool  # False: a loss ends the run

    @property
    def generation(self) -> int: ...
    def enter(self) -> RecoveryPlan:
        """Makes the first group that this worker is a member of."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        """Some of the members as a group of their own."""
        ...

    def start_at(self, step: int) -> None: ...
    def state_received(self, recovery: RecoveryPlan) -> None:
        """This worker was behind, and has the state now."""
        ...

    def vote(self) -> None: ...
    def commit(self) -> None: ...
    def drop(self) -> None: ...
    def set_busy(self, busy: bool) -> None:
        """In the middle of the loop's own code: the state cannot be handed over."""
        ...

    def recover(self, error: PeerLost) -> RecoveryPlan:
        """A group that stands, after one that failed. Raises what it was given where nothing can be done."""
        ...

    def change_members(self, leaving: Sequence[int]) -> RecoveryPlan:
        """Between two steps: some ranks leave, whoever waits comes in."""
        ...

    def leave(self) -> None:
        """The others know: waits until they go on without this worker."""
        ...

    def fail_run(self, reason: str) -> None:
        """An error of the user's code, or of the job: nobody is to go on without this worker."""
        ...

    def stop_watching(self) -> None:
        """Nothing is left to do together: whoever goes now is not missed."""
        ...

    def finish_run(self) -> None:
        """The last step is committed: nobody has to be let in any more."""
        ...

    def requests(self) -> int: ...
    def known_committed(self) -> int:
        """Steps that are known to have been committed, by anybody."""
        ...

    def close(self) -> None: ...


class FixedMembership:
    """A group that was made once. Nobody is replaced, and whoever is lost takes the run with it."""

    elastic = False

    def __init__(self, group: WorkerGroup, should_stop: Callable[[], bool]) -> None:
        self.group = group
        self.worker_id = WorkerId(group.rank)
        self.view = MembershipView(generation=1, members=tuple(WorkerId(rank) for rank in range(group.size)))
        self.member = MemberState(worker_id=self.worker_id)
        self._should_stop = should_stop
        self.phase = "works"

    @property
    def generation(self) -> int:
        return 1

    def enter(self) -> RecoveryPlan:
        settlement = RecoveryPlan(view=self.view, step=0, behind=(), finishing=(), fresh_start=True)
        self.member.group_formed(settlement)
        return settlement

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        return self.group.subgroup(ranks)

    def start_at(self, step: int) -> None:
        self.member.start_at(step)

    def state_received(self, recovery: RecoveryPlan) -> None:
        return

    def vote(self) -> None:
        self.member.vote()

    def commit(self) -> None:
        self.member.commit()

    def drop(self) -> None:
        self.member.drop()

    def set_busy(self, busy: bool) -> None:
        return

    def recover(self, error: PeerLost) -> RecoveryPlan:
        raise error

    def change_members(self, leaving: Sequence[int]) -> RecoveryPlan:
        raise RunError("the workers of this run cannot change")

    def leave(self) -> None:
        return

    def fail_run(self, reason: str) -> None:
        return

    def stop_watching(self) -> None:
        return

    def finish_run(self) -> None:
        return

    def requests(self) -> int:
        return STOP if self._should_stop() else 0

    def known_committed(self) -> int:
        return 0

    def close(self) -> None:
        return
