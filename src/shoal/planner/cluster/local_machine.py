"""Describes this machine as a cluster of one host without measuring: its cores and its memory."""

import os
from pathlib import Path

from shoal.planner.cluster import Cluster, laptop

CGROUP = Path("/sys/fs/cgroup/memory.max")


def this_machine() -> Cluster:
    """A device is a core. Its speed is a guess: `shoal cluster probe` measures it."""
    return laptop(cores(), memory_bytes())


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Memory of the machine, or of the container that this process runs in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(CGROUP.read_text()))
    except (OSError, ValueError):  # not in a container, or the limit is "max"
        return physical
