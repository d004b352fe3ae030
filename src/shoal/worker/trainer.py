"""The loop of a job on one worker, the same for collectives and for parameter servers.

    next_batch ─► reduce_step ─► apply_step ─► end_step ─► next_batch …        None: no step is left ─► finish

What differs is a strategy (parallel/strategy.py: how a step is spread) and a coordinator (which worker does which step,
when a step counts, what a loss means): `CollectiveWorker` here, the workers of server_worker/ for parameter servers.
The words for how far a step has come (computed, reduced, committed, applied) are those of parallel/strategy.py.
"""

from typing import Protocol

from shoal.errors import ShoalError
from shoal.parallel.step import StepResult
from shoal.worker.memory import MemoryMeter
from shoal.worker.training_state import Batch

MEMORY_CHECK_STEPS = 25  # between two samples of the memory in use


class Coordinator(Protocol):
    meter: MemoryMeter

    def enter(self) -> None:
        """Makes this worker take part in the run, with its state."""

    def next_batch(self) -> Batch | None:
        """The next step of this worker; None: none is left."""

    def reduce_step(self, batch: Batch) -> StepResult | None:
        """Computes and reduces a step; with collectives it is committed then. None: it went on without this worker."""

    def apply_step(self, batch: Batch, result: StepResult) -> StepResult | None:
        """Applies the step: the optimizer steps, here or on the servers. None: it went on without this worker."""

    def end_step(self, batch: Batch, result: StepResult) -> None:
        """Records the step that was applied, evaluates and saves if that is due."""

    def recover(self, error: ShoalError) -> bool:
        """Handles a loss in a step; False: the error ends the run."""

    def finish(self) -> bool:
        """Writes and reports the result; False: the run went back meanwhile, and steps are left."""


def train(coordinator: Coordinator) -> None:
    coordinator.enter()
    while True:
        try:
            while (batch := coordinator.next_batch()) is not None:
                train_step(coordinator, batch)
            if coordinator.finish():
                return
        except ShoalError as error:
            if not coordinator.recover(error):
                raise


def train_step(coordinator: Coordinator, batch: Batch) -> None:
    result = coordinator.reduce_step(batch)
    if result is not None:
        result = coordinator.apply_step(batch, result)
    if result is not None:
        if batch.step % MEMORY_CHECK_STEPS == 0:
            coordinator.meter.sample()
        coordinator.end_step(batch, result)
