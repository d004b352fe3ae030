"""Shoal: distributed training with the same bits on any number of workers.

The job fixes the arithmetic; the cluster only fixes the speed.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Before torch runs its first kernel: after one matrix product it has no effect (docs/exact.md rule 7).
os.environ.setdefault("MKL_CBWR", "AUTO")

from shoal.collectives.registration import register
from shoal.numerics.import_hooks import when_imported

if TYPE_CHECKING:
    from shoal.driver.launch import train
    from shoal.driver.result import Report
    from shoal.errors import InputError, RunError, ShoalError, Stopped
    from shoal.job.callbacks import Callback, StepInfo
    from shoal.job.early_stopping import EarlyStopping
    from shoal.job.job import Job
    from shoal.job.loss_scale import LossScale
    from shoal.parallel.plan import Plan
    from shoal.parallel.sync_batchnorm import convert_sync_batchnorm
    from shoal.paramserver.embedding import Embedding
    from shoal.worker.join import join
    from shoal.worker.run import Run
    from shoal.worker.run_config import Checkpoint, Communication, Failure, Output, Parallel, RunConfig, Servers
    from shoal.worker.training_state import Batch
    from shoal.worker.values import Mirrored, PerWorker

__version__ = "0.2.0"

when_imported("torch", register)  # torch.distributed then knows backend="shoal"

_HOMES = {  # a module is imported with the first use of one of its names: torch alone takes a second
    "driver.launch": ("train",),
    "driver.result": ("Report",),
    "errors": ("InputError", "RunError", "ShoalError", "Stopped"),
    "job.callbacks": ("Callback", "StepInfo"),
    "job.early_stopping": ("EarlyStopping",),
    "job.job": ("Job",),
    "job.loss_scale": ("LossScale",),
    "parallel.plan": ("Plan",),
    "parallel.sync_batchnorm": ("convert_sync_batchnorm",),
    "paramserver.embedding": ("Embedding",),
    "worker.join": ("join",),
    "worker.run": ("Run",),
    "worker.run_config": ("Checkpoint", "Communication", "Failure", "Output", "Parallel", "RunConfig", "Servers"),
    "worker.training_state": ("Batch",),
    "worker.values": ("Mirrored", "PerWorker"),
}

__all__ = [
    "Batch",
    "Callback",
    "Checkpoint",
    "Communication",
    "EarlyStopping",
    "Embedding",
    "Failure",
    "InputError",
    "Job",
    "LossScale",
    "Mirrored",
    "Output",
    "Parallel",
    "PerWorker",
    "Plan",
    "Report",
    "Run",
    "RunConfig",
    "RunError",
    "Servers",
    "ShoalError",
    "StepInfo",
    "Stopped",
    "__version__",
    "convert_sync_batchnorm",
    "join",
    "train",
]


def __getattr__(name: str) -> Any:
    """A public name, or a room such as `shoal.testing`, imported on first use."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        value = getattr(import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
