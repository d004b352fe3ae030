"""Shoal: distributed training with the same bits on any number of workers.

The job fixes the arithmetic; the cluster only fixes the speed.
"""

import os

# Before torch runs its first kernel: after one matrix product it has no effect (EXACT rule 7).
os.environ.setdefault("MKL_CBWR", "AUTO")

from shoal.collectives import backend
from shoal.errors import InputError, RunError, ShoalError, Stopped
from shoal.job import Job
from shoal.join import join
from shoal.launch import train
from shoal.plan.placement import Plan
from shoal.result import Report
from shoal.run import Batch, Run

__version__ = "0.1.0"

backend.register()  # torch.distributed now knows backend="shoal"

__all__ = [
    "Batch",
    "InputError",
    "Job",
    "Plan",
    "Report",
    "Run",
    "RunError",
    "ShoalError",
    "Stopped",
    "__version__",
    "join",
    "train",
]
