"""How a step is spread over the workers: the contract, and the four words for how far a step has come.

    computed     this worker has summed its lanes
    reduced      this worker has the ordered sums over all workers; the model is as before
    committed    every worker is known to have the sums
    applied      the optimizer has stepped

A step that fails before it is committed is dropped and computed again, with the same bits. A worker that has voted for
a step (recovery/membership/protocol.py) keeps its sums until it knows whether another worker has committed the step.
If so, `write_gradients` is all that is left to do.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from shoal.numerics.lanes import Span
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.local_step import LocalStep
from shoal.parallel.step import Closure, ReducedStep, StepInput, StepResult

Evaluator = Callable[[Sequence[Callable[[], Any]]], Iterable[tuple[int, Any]]]


class Strategy(Protocol):
    """One way to do a step: data, pipeline, zero, servers."""

    groups: ParallelGroups
    microbatches: int  # of a lane
    assignment: tuple[Span, ...]  # lanes, by replica
    current_lane: int | None  # the lane that is computed now, for error messages

    @property
    def own_lanes(self) -> Span: ...
    @property
    def overlapped(self) -> bool:
        """Whether gradients of the last pass left during its backward pass."""

    def compute(self, step_input: StepInput, closure: Closure, request: int = 0) -> LocalStep:
        """Runs forward and backward of this worker's lanes. All workers learn of `request` when they reduce."""

    def reduce(self, local: LocalStep) -> ReducedStep:
        """Sums the lanes of all workers in the tree's order."""

    def commit(self, reduced: ReducedStep) -> None:
        """Waits until every worker has the sums: a barrier."""

    def write_gradients(self, reduced: ReducedStep) -> StepResult:
        """Writes the sums to `.grad` and buffers; the optimizer may step. Needs no other worker."""

    def drop(self) -> None:
        """Discards the step under way: gradients and buffers are as before it."""

    def regroup(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        """Goes on in other groups, with other lanes. Nothing of the old groups is used again."""

    def refresh(self) -> None:
        """Updates what the strategy derives from the weights, after they were applied or restored. All workers call
        it together."""

    def trainable_changed(self) -> None:
        """Parameters were frozen or freed since the last step, somewhere in the model. All workers call it together."""

    def microbatch_indices(self, indices: Sequence[int], batch: int, microbatches: int) -> list[list[int]]:
        """The samples of each microbatch that this worker fetches for a step, in order. `batch`: of a full step, whose
        lanes have so many microbatches."""

    def make_evaluator(self, objective: Any) -> Evaluator:
        """A function from batches to (number of the batch, its metrics), for a job's objective."""

    def close(self) -> None:
        """Restores the model to what it was before the strategy changed it."""
