"""A job's worker in a run with collectives: a coordinator (worker/trainer.py) on the `Run` that scripts use, too."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress

import torch
from torch import nn

from shoal.errors import NonFiniteError, ShoalError
from shoal.parallel.step import StepResult
from shoal.worker.context import WorkerContext
from shoal.worker.job_setup import OpenJob, set_up_job
from shoal.worker.lane_overhead import measure_lane_cost
from shoal.worker.run import Run
from shoal.worker.step_passes import StepPasses
from shoal.worker.step_watch import StepWatch
from shoal.worker.training_state import Batch


class CollectiveWorker:
    def __init__(self, opened: OpenJob, context: WorkerContext) -> None:
        assert context.plan is not None
        self.opened, self.job, self.context, self.plan = opened, opened.job, context, context.plan
        self.setup, self.meter = set_up_job(opened, context)
        assert self.setup.objective is not None
        self.objective = self.setup.objective
        self.run: Run  # from `enter` on
        self._passes: StepPasses  # from `enter` on
        self.entered = False
        self._watch: StepWatch | None = None  # where the job has callbacks
        self._epochs: Iterator[int] = iter(())
        self._batches: Iterator[Batch] = iter(())

    def enter(self) -> None:
        self.run = Run(self.setup, self.plan, self.context, self.context.membership())
        self._passes = StepPasses(self.run, self.job.clip_norm)
        self.entered = True
        if self.setup.callbacks:
            self._watch = StepWatch(self.run, self.setup.callbacks)
        self.run.record_loss_scale(self.run.step)
        if self.job.compile:
            compile_blocks(self.setup.built.model, self.run.replica.blocks.names)
        if self.run.unevaluated:
            self.run.unevaluated = False
            self._evaluate(self.run.step)
            if self._watch is not None:
                self._watch.catch_up()
        self._epochs = self.run.epochs(self.run.schedule.epochs_of(self.opened.steps))

    def next_batch(self) -> Batch | None:
        while (batch := next(self._batches, None)) is None:
            if next(self._epochs, None) is None:
                return None
            self._batches = self.run.batches()
        return batch

    def reduce_step(self, batch: Batch) -> StepResult | None:
        return self._passes.reduce(batch)

    def apply_step(self, batch: Batch, result: StepResult) -> StepResult | None:
        scheduler = self.setup.scheduler
        if self.setup.scaler is not None and not result.not_finite and self._overflowed(batch.step, result):
            if self._watch is not None:
                self._watch.note_update(None)
            return result
        self._passes.update()
        if self.setup.average is not None and not result.not_finite:
            self.setup.average.update()
        self.run.updated()
        if self._watch is not None:
            self._watch.note_update(self._passes.norm)
        if scheduler is not None:
            scheduler.step()
        if self._watch is None:  # callbacks may look at the gradients
            self._passes.clear_gradients()
        return result

    def _overflowed(self, step: int, result: StepResult) -> bool:
        """Whether the update is left out, and its learning rate with it: the scaled gradients were not finite."""
        scaler = self.setup.scaler
        assert scaler is not None
        before = scaler.scale
        changed = scaler.update(result.overflowed)
        if result.overflowed and scaler.exhausted:
            raise NonFiniteError(
                f"step {step}: gradients are not finite, even with a loss scale of {before:g}",
                where=f"nothing of step {step} was applied; {scaler.skipped} updates were skipped so far",
                fix="what makes them so is not the scale: a smaller learning rate, precision='bf16' or 'fp32'",
            )
        if changed or result.overflowed:
            self.run.record_loss_scale(step, overflowed=result.overflowed)
        return result.overflowed

    def end_step(self, batch: Batch, result: StepResult) -> None:
        self.run.update_complete = True
        if self.opened.evaluation_due(batch.step + 1, self.run.schedule):
            try:
                self._evaluate(batch.step + 1)
            except BaseException:
                with suppress(Exception):  # the first error is what the user needs to see
                    self.run.leave_unevaluated()
                raise
        self.run.end_step()

    def _evaluate(self, step: int) -> None:
        run = self.run
        run.metrics = run.evaluate(self.opened.held_out, self.objective.evaluation())
        reached = self.opened.target_reached(run.metrics)
        if reached:
            run.stopped = f"target {self.job.target} reached"
        if run.leader:
            run.record_evaluation(step, run.evaluation_seconds, reached)
        if self._watch is not None:
            self._watch.note_evaluation()

    def recover(self, error: ShoalError) -> bool:
        """`Run` recovers from a loss where it happens: a loop of the user's own does not see it, either."""
        return False

    def finish(self) -> bool:
        run = self.run  # `epochs` has finished it
        if self._watch is not None:
            self._watch.finish()
        run.record_usage(self.meter.peak_bytes())
        if run.leader and not run.resumable and run.step and not run.layout.sharded:
            # The user's code runs a few times more than was asked for: it prints nothing, and can fail without harm.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(Exception):
                cost = measure_lane_cost(run, self.objective)
                if cost is not None:
                    run.emit(cost)
        run.group.close()
        return True


MOST_COMPILATIONS = 1 << 16  # of one function; beyond torch's own limit it runs uncompiled, with other bits


def compile_blocks(model: nn.Module, names: tuple[str, ...]) -> None:
    """Compiles each block by itself, so that seeding a block's randomness stays outside.

    Each shape is a compilation. Which shapes come first depends on the placement, so none may be left out."""
    config = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = MOST_COMPILATIONS
    config.fail_on_recompile_limit_hit = True
    for name in names:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, dynamic=False)
