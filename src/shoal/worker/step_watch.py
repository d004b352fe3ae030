"""Calls a job's callbacks at the steps of its run, and does what they ask for.

    optimizer.step ─► note_update ─► evaluation, if due ─► Run.end_step: the step is counted ─► after_step ─► saved

What callbacks remember of a step is in its checkpoint, and goes to a worker that comes in after it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from shoal.job.callbacks import StepInfo
from shoal.numerics.grad_norm import global_norm
from shoal.parallel.step import StepResult
from shoal.report.events import BestCheckpointFound
from shoal.worker.job_callbacks import JobCallbacks
from shoal.worker.run import Run


class StepWatch:
    def __init__(self, run: Run, callbacks: JobCallbacks) -> None:
        self.run, self.callbacks, self.optimizer = run, callbacks, run.setup.optimizer
        self.directory = run.checkpoints.directory
        self._learning_rate: float | None = None  # of the last step
        self._clipped_norm: float | None = None  # of its gradient, before it was clipped
        self._evaluated = False  # after the last step
        self._known_save = run.saved_step  # the step of the last checkpoint that callbacks know of
        run.after_step = self._after_step
        if callbacks.best is not None:
            if self.directory is not None:
                self.directory.preferred = callbacks.best.steps
            self._report_best()  # of the run that is resumed

    def note_update(self, norm: float | None) -> None:
        """The optimizer has stepped, and the scheduler has not. `norm`: of the gradient, if it was clipped."""
        groups = self.optimizer.param_groups
        rate = groups[0].get("lr") if groups else None
        self._clipped_norm, self._learning_rate = norm, None if rate is None else float(rate)

    def note_evaluation(self) -> None:
        """The job was evaluated after this step: `Run.metrics` has the result."""
        self._evaluated = True

    def finish(self) -> None:
        """The run is over, and its result is on disk."""
        self._report_checkpoint()
        self.callbacks.on_end(self._info(stopped=self.run.stopped))
        self.run.record_logged(self.callbacks.take_logged(now=True))

    def _after_step(self, result: StepResult) -> None:
        try:
            info = self._info(read_gradients=self._gradients, read_gradient_norm=self._gradient_norm)
            self.callbacks.on_step(info)
        finally:  # an evaluation counts, also if the error of a callback ends the run
            self._after_evaluation()
        self._report_checkpoint()
        self.optimizer.zero_grad()
        self._do_what_is_asked()

    def catch_up(self) -> None:
        """The evaluation that the last step of a resumed run lacked was made."""
        self._after_evaluation()
        self._do_what_is_asked()

    def _after_evaluation(self) -> None:
        if self._evaluated:
            self._evaluated = False
            self.callbacks.on_evaluate(self._info())

    def _do_what_is_asked(self) -> None:
        run, callbacks = self.run, self.callbacks
        if callbacks.save_wanted:
            callbacks.save_wanted, run.save_wanted = False, True
            self._report_best()
        if callbacks.stop_reason and run.stopped is None and not run.at_limit:
            run.stopped = callbacks.stop_reason
        run.leader_stop_reason = callbacks.leader_stop_reason
        run.record_logged(callbacks.take_logged(now=run.save_wanted))

    def _report_checkpoint(self) -> None:
        if self.directory is not None and self.run.saved_step > self._known_save:
            self._known_save = self.run.saved_step
            self.callbacks.on_checkpoint(self._info(checkpoint=self.directory.path_of(self._known_save)))

    def _report_best(self) -> None:
        best = self.callbacks.best
        if best is None or best.value is None or not self.run.leader:
            return
        step = best.steps[0]
        found = None if self.directory is None else self.directory.of_step(step)  # one that is being written is not yet
        path = "" if found is None else str(found)
        self.run.emit(BestCheckpointFound(step=step, metric=best.metric.name, value=best.value, path=path))

    def _info(self, **more: Any) -> StepInfo:
        run = self.run
        return StepInfo(
            step=run.step,
            epoch=run.epoch,
            loss=run.loss,
            learning_rate=self._learning_rate,
            metrics=MappingProxyType(dict(run.metrics)),
            model=run.model,
            worker=run.worker,
            leader=run.leader,
            **more,
        )

    def _gradients(self) -> Mapping[str, Tensor]:
        held = self.run.update.optimizer_params
        return {name: each.grad for name, each in held.items() if each.grad is not None}

    def _gradient_norm(self) -> float | None:
        if self._clipped_norm is not None:
            return self._clipped_norm
        return None if self.run.layout.sharded else global_norm(self._gradients().values())
