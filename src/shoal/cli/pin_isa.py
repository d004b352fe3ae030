"""A process chooses its instruction set before its first kernel: a command that trains starts over with the job's."""

import argparse
import os
import sys

from shoal.driver.launch import isa_environment
from shoal.job.job import Job
from shoal.numerics.kernels import ISA_IN_FORCE


def pin_isa(job: Job, given: argparse.Namespace) -> None:
    """Executes the same command again, where the job asks for an instruction set that is not in force."""
    if job.isa is not None and os.environ.get(ISA_IN_FORCE) != job.isa:
        if given.lab is not None:
            given.lab.close()  # the new process makes it again
        os.execve(sys.executable, [sys.executable, "-m", "shoal", *given.given], os.environ | isa_environment(job.isa))
