"""Calls a job's callbacks on one worker, and collects what they ask for: to log, to stop, to save."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shoal.errors import CheckpointError
from shoal.job.callbacks import Callback, StepInfo
from shoal.job.early_stopping import EarlyStopping, MonitoredMetric
from shoal.job.job import Job
from shoal.numerics.seeds import preserve_generators
from shoal.recovery.checkpoint.serialize import decode, encode
from shoal.report.events import LoggedValues
from shoal.worker.best_checkpoint import BestCheckpoint

FLUSH_SECONDS = 0.2  # between two events with logged values


class JobCallbacks:
    """Of one job on one worker. `stop_reason`: all workers end training after this step. `leader_stop_reason`: this
    worker, the leader, asks the others to end it after the next one. `save_wanted`: this step is to be saved."""

    def __init__(self, job: Job) -> None:
        self.best: BestCheckpoint | None = None
        self.callbacks: list[Callback] = list(job.callbacks)
        if job.patience is not None:
            self.callbacks.append(EarlyStopping(job.monitored, job.patience))
        if job.keep_best is not None:
            self.best = BestCheckpoint(MonitoredMetric.parse(job.keep_best, "keep_best"))
            self.best.found = self._want_save
            self.callbacks.append(self.best)
        self.stop_reason = self.leader_stop_reason = ""
        self.save_wanted = False
        self._logged: dict[tuple[int, int], LoggedValues] = {}
        self._flushed_at = time.monotonic()

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def _want_save(self) -> None:
        self.save_wanted = True

    # -- calls --------------------------------------------------------------------------------------------------------

    def on_step(self, info: StepInfo) -> None:
        self._call(info, lambda callback, own: callback.on_step(own))

    def on_evaluate(self, info: StepInfo) -> None:
        self._call(info, lambda callback, own: callback.on_evaluate(own))

    def on_checkpoint(self, info: StepInfo) -> None:
        self._call(info, lambda callback, own: callback.on_checkpoint(own), wrote=True)

    def on_end(self, info: StepInfo) -> None:
        self._call(info, lambda callback, own: callback.on_end(own))

    def _call(self, info: StepInfo, call: Callable[[Callback, StepInfo], None], wrote: bool = False) -> None:
        """`wrote`: this worker, and no other, calls. Where one fails, the others are called all the same: what they
        remember is that of a whole step, and is saved with it."""
        failed: Exception | None = None
        for callback in self.callbacks:
            if not (callback.on_all_workers or info.leader or wrote):
                continue
            together = callback.on_all_workers and not wrote

            def stop(reason: str, together: bool = together) -> None:
                if together:
                    self.stop_reason = self.stop_reason or reason
                else:
                    self.leader_stop_reason = self.leader_stop_reason or reason

            own = replace(info, log_value=lambda name, value: self._log(info, name, value), stop_training=stop)
            try:
                with preserve_generators(), torch.no_grad():
                    call(callback, own)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # -- values -------------------------------------------------------------------------------------------------------

    def _log(self, info: StepInfo, name: str, value: float) -> None:
        if not info.leader:
            return
        key = (info.step, info.epoch)
        if key not in self._logged:
            self._logged[key] = LoggedValues(step=info.step, epoch=info.epoch, time=time.time(), values={})
        self._logged[key].values[name] = value if math.isfinite(value) else None

    def take_logged(self, now: bool = False) -> list[LoggedValues]:
        """What was logged since the last call that returned something; `now`: also if that was a moment ago."""
        if not self._logged or (not now and time.monotonic() - self._flushed_at < FLUSH_SECONDS):
            return []
        logged, self._logged, self._flushed_at = list(self._logged.values()), {}, time.monotonic()
        return logged

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For checkpoints and for workers that come in, as JSON."""
        found: dict[str, Any] = {}
        for name, callback in self._by_name().items():
            if state := callback.state_dict():
                found[name] = encode(state, f"the state of callback {name}")
        return found

    def load_state(self, stored: dict[str, Any]) -> None:
        """What a checkpoint has of other callbacks is left out; a callback that it does not know begins anew."""
        for name, callback in self._by_name().items():
            if name in stored:
                try:
                    callback.load_state_dict(decode(stored[name], {}))
                except (KeyError, TypeError, ValueError) as error:
                    text = f"{type(error).__name__}: {error}"
                    raise CheckpointError(f"callback {name} did not take its state: {text}") from error

    def _by_name(self) -> dict[str, Callback]:
        """By class, and where there are several of a class by their order."""
        found: dict[str, Callback] = {}
        for callback in self.callbacks:
            name, number = type(callback).__name__, 2
            while name in found:
                name, number = f"{type(callback).__name__} {number}", number + 1
            found[name] = callback
        return found
