"""The workers of a run as one of them sees them: what a run needs of its membership, and how a membership can end.

ElasticMembership    workers come and go; they find each other at the run's store
FixedMembership      as many as at the start (torchrun, a process alone): a loss ends the run
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.collectives.group import WorkerGroup
from shoal.errors import PeerLost, RunError
from shoal.recovery.membership.protocol import MembershipView, RecoveryPlan, WorkerId
from shoal.worker.requests import STOP

TOO_SLOW = "too slow"  # why a worker left
MODEL_SHARD_LOST = "a part of the model was lost"  # another reason
AFTER_SHARD_LOST = "the run goes on from its newest checkpoint, or begins again without one"


class WorkerEvicted(RunError):
    """The others went on without this worker."""

    exit_code = 75


class ModelShardLost(WorkerEvicted):
    """No worker is left that has some shard of the model: this worker's shard is worth nothing without it."""

    present: tuple[WorkerId, ...] = ()  # the workers that are left


class RunAbandoned(PeerLost):
    """The run ends because of an error that another worker has reported."""


class RunCompleted(RunError):
    """The run is done: this worker was at its end with the others when it lost them."""


class RunMembership(Protocol):
    worker_id: WorkerId
    group: WorkerGroup
    view: MembershipView
    elastic: bool  # False: a loss ends the run

    @property
    def generation(self) -> int: ...
    def enter(self) -> RecoveryPlan:
        """Makes the first group that this worker is a member of."""

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        """Some of the members as a group of their own."""

    def start_at(self, step: int) -> None:
        """This worker has the state that the run starts with."""
        return

    def state_received(self, recovery: RecoveryPlan) -> None:
        """This worker was behind, and has the state now."""
        return

    def vote(self, further: bool = False) -> None:
        """This worker has reduced the step: it holds the sums until it knows whether the step is committed. `further`:
        another backward pass of a step that is committed already."""
        return

    def commit(self) -> None:
        """All members have reduced what this worker has voted for."""
        return

    def drop(self) -> None:
        """The step or pass is computed again."""
        return

    def set_busy(self, busy: bool) -> None:
        """Between `backward` and the end of the step the state cannot be sent to another worker."""
        return

    def recover(self, error: PeerLost) -> RecoveryPlan:
        """Makes a group of the members that are left, after one failed. Raises `error` if it cannot."""

    def change_members(self, leaving: Sequence[int]) -> RecoveryPlan:
        """Between two steps: some ranks leave, waiting workers come in."""

    def leave(self) -> None:
        """Waits until the others, which know that this worker leaves, go on without it."""
        return

    def fail_run(self, reason: str) -> None:
        """Ends the run for all workers: an error of the user's code, or of the job."""
        return

    def claim_save(self, step: int) -> bool:
        """Whether this worker, of those that an error has ended, is the one to save this step."""
        return True

    def stop_watching(self) -> None:
        """Nothing is left to do together: a worker that ends now is not lost."""
        return

    def finish_run(self) -> None:
        """The last step is applied: no worker has to be let in any more."""
        return

    def requests(self) -> int:
        """What this worker requests of all (worker/requests.py)."""

    def known_committed(self) -> int:
        """Steps that are known to have been committed, by any worker."""

    def close(self) -> None:
        """Leaves the store."""
        return


class FixedMembership(RunMembership):
    """A group that is made once. No worker is replaced, and the loss of one ends the run."""

    elastic = False
    generation = 1

    def __init__(self, group: WorkerGroup, should_stop: Callable[[], bool]) -> None:
        self.group, self.worker_id, self._should_stop = group, WorkerId(group.rank), should_stop
        self.view = MembershipView(generation=1, members=tuple(WorkerId(rank) for rank in range(group.size)))

    def enter(self) -> RecoveryPlan:
        return RecoveryPlan(view=self.view, step=0, behind=(), finishing=(), fresh_start=True)

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        return self.group.subgroup(ranks)

    def recover(self, error: PeerLost) -> RecoveryPlan:
        raise error

    def change_members(self, leaving: Sequence[int]) -> RecoveryPlan:
        raise RunError("the workers of this run cannot change")

    def requests(self) -> int:
        return STOP if self._should_stop() else 0

    def known_committed(self) -> int:
        return 0
