"""The backward passes of a job's step, each followed by its update.

backward ─► update ─► backward ─► …          the last update is `CollectiveWorker.apply_step`'s
"""

import math

from shoal.parallel.step import StepResult
from shoal.worker.loop_optimizers import NAME_OF_ONE
from shoal.worker.run import Run
from shoal.worker.training_state import Batch


class StepPasses:
    def __init__(self, run: Run, clip_norm: float | None) -> None:
        assert run.objective is not None
        self.run, self.clip_norm = run, clip_norm
        self.closures = run.objective.closures
        self.optimizers = run.setup.optimizers or {NAME_OF_ONE: run.setup.optimizer}
        self._under_way = NAME_OF_ONE
        self._norms: list[float] = []  # of the gradients of this step's passes, before they were clipped

    def reduce(self, batch: Batch) -> StepResult | None:
        """All passes, and all updates but the last. The result is the last pass's."""
        self._norms.clear()
        for number, (name, closure) in enumerate(self.closures.items()):
            if number:
                self.update()
                self.run.updated()
            self._under_way = name
            self.run.backward(batch, closure, optimizer=name or None)
        return self.run.committed_result

    def update(self) -> None:
        """Of the pass under way."""
        if self.clip_norm is not None:
            self._norms.append(self.run.clip(self.clip_norm))
        self.optimizers[self._under_way].step()

    @property
    def norm(self) -> float | None:
        """Of the step's whole gradient before it was clipped; None: it is not."""
        if self.clip_norm is None:
            return None
        return self._norms[0] if len(self._norms) == 1 else math.hypot(*self._norms)

    def clear_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
