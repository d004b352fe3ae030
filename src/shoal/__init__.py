"""Shoal: distributed training with the same bits on any number of workers.

The job fixes the arithmetic; the cluster only fixes the speed.
"""

import os
from typing import TYPE_CHECKING, Any

# Before torch runs its first kernel: after one matrix product it has no effect (docs/exact.md rule 7).
os.environ.setdefault("MKL_CBWR", "AUTO")

from shoal.collectives import process_group
from shoal.driver.launch import train
from shoal.driver.result import Report
from shoal.errors import InputError, RunError, ShoalError, Stopped
from shoal.job.job import Job
from shoal.parallel.plan import Plan
from shoal.worker.join import join
from shoal.worker.run import Run
from shoal.worker.run_config import Checkpoint, Communication, Failure, Output, Parallel, RunConfig, Servers
from shoal.worker.training_state import Batch
from shoal.worker.values import Mirrored, PerWorker

if TYPE_CHECKING:
    from shoal.paramserver.embedding import Embedding

__version__ = "0.2.0"

process_group.register()  # torch.distributed now knows backend="shoal"

__all__ = [
    "Batch",
    "Checkpoint",
    "Communication",
    "Embedding",
    "Failure",
    "InputError",
    "Job",
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
    "Stopped",
    "__version__",
    "join",
    "train",
]


def __getattr__(name: str) -> Any:
    """Imports on first use what most programs do not use."""
    if name == "Embedding":
        from shoal.paramserver.embedding import Embedding

        return Embedding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
