"""This machine as a cluster of one host, as far as it is known without measuring: its cores and its memory."""

import os
from pathlib import Path

from shoal.planner.cluster import Cluster, laptop

CGROUP = Path("/sys/fs/cgroup/memory.max")


def this_machine() -> Cluster:
    """A device is a core. How fast one is, is a guess: `shoal cluster probe` measures it."""
    return laptop(cores(), memory_bytes())


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    """Of the machine, or of the container that this is."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(CGROUP.read_text()))
    except (OSError, ValueError):  # no such container, or "max"
        return whole
