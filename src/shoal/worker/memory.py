"""What one worker uses of a machine's memory, what it may use, and what training needs at the least.

Of what a process has in memory, pages of files (libraries, mapped data) are the machine's: they are there once for all
workers. Pages that a fork inherited count as little. What the process adds counts. Only the kernel sees a peak between
two looks: it keeps the highest resident set since the last one, pages of files included.
"""

import ctypes
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import MemoryNeeded
from shoal.report import human

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"

# -- how much it is ---------------------------------------------------------------------------------------------------


class MemoryMeter:
    """Started before the model is built; looks again whenever it is asked (a quarter of a millisecond)."""

    def __init__(self) -> None:
        _reset_peak()
        start = process_status()
        self._resident = start.get("VmRSS", 0) - start.get("RssFile", 0)
        self._shared = start.get("RssShmem", 0)
        self._peak = 0

    def sample(self) -> None:
        """To be called once a step. Pages of files that came between two looks are taken to have been there at the
        peak: in the first step that is up to 20 MB of libraries, later nothing."""
        now = process_status()
        self._peak = max(self._peak, now.get("VmHWM", 0) - now.get("RssFile", 0) - self._resident)
        _reset_peak()

    def peak_bytes(self) -> int:
        """Bytes above the start, at the most so far; shared memory that this process has touched is part of it."""
        self.sample()
        return self._peak

    def shared_bytes(self) -> int:
        """Bytes above the start of memory that several workers share. Each of them counts it."""
        return max(0, process_status().get("RssShmem", 0) - self._shared)


def process_status() -> dict[str, int]:
    """Bytes by the kernel's names for them; empty where there is no such kernel."""
    try:
        rows = [line.partition(":") for line in STATUS.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in rows if "kB" in rest}


def _reset_peak() -> None:
    with suppress(OSError):  # without it the peak is that of the whole process
        CLEAR_REFS.write_text(RESET_PEAK)


# -- how much it may be -----------------------------------------------------------------------------------------------

STACK_BYTES = 1 << 20  # of threads that start under a cap
SPARE_THREADS = 8
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
TRIM_BYTES = 256 << 10


def cap_memory(num_bytes: int, *, threads: int = SPARE_THREADS) -> None:
    """From now on this process gets so many bytes more, from the kernel; torch raises when it asks for more.

    It counts private memory, touched or not, so `threads` that are still to start have room for their stacks besides.
    Memory shared with other workers is not counted. Large tensors go back when they are freed (`return_freed_memory`).
    """
    return_freed_memory()
    _small_stacks()
    limit = process_status().get("VmData", 0) + num_bytes + threads * STACK_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def return_freed_memory() -> None:
    """Undoes `kernels.keep_large_allocations`: what is freed goes back, so a peak is about what was alive at once.

    Costs page faults: a step that moves much memory may take longer.
    """
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 65536)
        libc.mallopt(M_MMAP_THRESHOLD, TRIM_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        libc.malloc_trim(0)


def _small_stacks() -> None:
    """A thread's whole stack counts as its process's data, and by default it is 8 MB."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(256)
        if libc.pthread_getattr_default_np(attributes) == 0:
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES))
            libc.pthread_setattr_default_np(attributes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that no memory was left."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


# -- how much it must be ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes that one worker needs at the least, by what they are for. Activations come on top."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0

    CATEGORIES: ClassVar[tuple[str, ...]] = ("weights", "gradients", "optimizer", "buffers")

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    def by_category(self) -> dict[str, int]:
        return {part: getattr(self, part) for part in self.CATEGORIES if getattr(self, part)}

    def lines(self) -> list[str]:
        rows = {**self.by_category(), "together": self.total}
        return [f"{part:<10} {human.size(num_bytes):>9}" for part, num_bytes in rows.items()]

    def check(self, available: int, *, by: str, fix: str) -> None:
        """`by`: where the limit comes from, such as an option."""
        if self.total > available:
            parts = ", ".join(f"{part} {human.size(num_bytes)}" for part, num_bytes in self.by_category().items())
            needs, has = human.size(self.total), human.size(available)
            refused = MemoryNeeded(f"one worker needs {needs} ({parts}) and has {has} ({by})", fix=fix)
            refused.needed = self.total
            raise refused


def estimate_memory(
    weights: int,
    *,
    state: float,
    lanes: int = 1,
    trained: int | None = None,
    stored: int | None = None,
    reduced: bool = True,
    buffers: int = 0,
) -> MemoryEstimate:
    """All in bytes on this worker. `state`: see `state_factor`. `lanes`: that it holds.

    `trained`: the weights that get gradients; `stored`: those whose optimizer state is here; by default both are all.
    `reduced`: the sums over all workers have memory of their own (False for one worker).
    """
    trained = weights if trained is None else trained
    stored = trained if stored is None else stored
    gradients = trained * (lanes.bit_length() + int(reduced))  # adding up a tree of lanes: log2 + 1 at once
    return MemoryEstimate(weights=weights, gradients=gradients, optimizer=math.ceil(stored * state), buffers=buffers)


def state_factor(
    optimizer: Callable[[Any], Optimizer | Sequence[Optimizer]],
    dims: Mapping[str, int] = MappingProxyType({"weight": 2}),
) -> float:
    """Bytes of optimizer state per byte of weights: 2 for Adam. Builds it on tiny weights and takes a step.

    `dims`: what the weights are called and how many dimensions each has, for a job that sorts them by either. A number
    per tensor (a count of steps) is not counted. 0.0 where no step can be taken without the job's own loss, or the job
    wants other weights than tiny ones: then less is known of what it needs, not more.
    """
    weights = [(name, nn.Parameter(torch.zeros((4,) * dim))) for name, dim in dims.items()]
    try:
        made = optimizer(weights)
        built = [made] if isinstance(made, Optimizer) else made
        for _, weight in weights:
            weight.grad = torch.zeros_like(weight)
        for each in built:
            each.step()
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError):  # a closure is asked for, or other shapes
        return 0.0
    large = {id(weight): weight.nbytes for _, weight in weights if weight.numel() >= 4}
    state = [
        value.nbytes
        for each in built
        for weight, kept in each.state.items()
        for value in kept.values()
        if id(weight) in large and isinstance(value, torch.Tensor) and value.numel() >= 4
    ]
    return sum(state) / (sum(large.values()) or 1)
