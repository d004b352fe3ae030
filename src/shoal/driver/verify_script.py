"""`shoal verify script.py`: runs a loop that calls `shoal.join` as `shoal run` does, on several numbers of workers."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.driver.launch import run_with
from shoal.driver.outcome import RunInterrupted
from shoal.driver.verify import (
    StepDigests,
    VerifyPlacement,
    VerifyRow,
    read_digests,
    stops_at,
    traced_config,
    verify_row,
)
from shoal.errors import InputError
from shoal.worker.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class VerifiedScript:
    """A script and its arguments. Its loop ends after the steps that are compared, by `run.batches()`."""

    script: Path
    arguments: list[str]

    def trace(self, placed: VerifyPlacement, folder: Path, steps: int) -> tuple[VerifyRow, StepDigests]:
        config = traced_config(placed, folder, steps)
        if config.checkpoint.stop_after is not None:
            with stops_at(config.checkpoint.stop_after):
                self._run(placed, config)
            config = config.changed(workers=placed.resume_workers, resume=True)
        try:
            value = self._run(placed, config.changed(stop_after=steps))
        except RunInterrupted as stopped:
            if stopped.report["steps"] < steps:  # by Ctrl-C, not after the steps that were asked for
                raise
            value = stopped.report
        if not value["weights_sha256"]:
            raise not_joined(self.script)
        return verify_row(placed, value), read_digests(folder)

    def _run(self, placed: VerifyPlacement, config: RunConfig) -> dict[str, Any]:
        launcher = None if placed.lab is None else placed.lab.launcher
        return run_with(self.script, self.arguments, config, launcher=launcher).value


def not_joined(script: Path) -> InputError:
    return InputError(
        f"{script} has no shoal.Job and joins no run, so Shoal does not know its weights",
        fix=f"run = shoal.join(model, optimizer, loader) in its loop; or start it as it is: shoal run"
        f" {shlex.quote(str(script))}",
    )
