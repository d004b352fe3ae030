"""Models what Shoal's runtime does around kernels: hooks, lanes, reductions, updates. Pure; on arrays (setups, ranks).

Python's share is counted in *operators*: the host's time for one (`Device.overhead`), so a faster CPU is faster at it,
too. Counts are measured with models so small that nothing else takes time, and rounded. Where each comes from:

    microbatch   every block's hooks seed its randomness and check its output; a stage runs its share of a row and
                 keeps gradients separate by lane; sliced operators go through DTensor
    lane         gradients of microbatches and lanes are added one after the other: m − 1 sums on each worker
    exchange     tied weights: lane by lane from the last stage to the first
                 data: each worker adds up a share in shared memory, and writes it to all
                 zero=1: as data, then each spreads the rows it has updated
                 zero=2: each lane's gradients go to the owners of their rows, weights come back after the update
                 zero=3: the same, and weights come before each block runs, forward and backward
    step         exchange of figures, vote, commit, journal
    cores        workers that share them take turns: a step takes no less than all work over all cores
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.planner.cluster import Device, LinkTier
from shoal.planner.cost.comm import ALL_REDUCE, HALF, collective_seconds


@dataclass(frozen=True, kw_only=True)
class RuntimeOverheads:
    """Costs in operators of the host, unless a name or comment has another unit."""

    block: float = 10.0  # for each block and microbatch
    stage: float = 110.0  # for each microbatch on a stage of several
    slice: float = 3.5  # for each operator of a tensor-parallel model
    step: float = 45.0  # for each step
    call: float = 16.0  # for each collective, on each worker
    moved: float = 5.0  # for each tensor that is packed, sent and unpacked
    spread: float = 1.5  # the same in one pack with others
    clip: float = 1.2  # for each tensor of which the norm is taken
    sum_bytes: float = 12.0  # that adding up two gradients reads and writes, for each parameter
    copy_bytes: float = 32.0  # that packing, passing on and unpacking rows reads and writes
    clip_bytes: float = 20.0
    kept: float = 4e-3  # seconds that a process keeps a core while another waits for it: the kernel's time slice
    plain_update: float = 0.2  # of Adam's bytes: what an optimizer without state (SGD) moves

    def microbatch(self, tensor: np.ndarray, blocks: np.ndarray, starts: np.ndarray, ranks: int) -> np.ndarray:
        """`starts`: operators of one microbatch by rank."""
        sliced = np.where(tensor > 1, self.slice, 0.0)[:, None]
        return np.asarray(self.block * blocks[None, :] + (self.stage if ranks > 1 else 0.0) + sliced * starts)


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """The work of a step for each worker; arrays are by setup, or by (setup, rank)."""

    data: np.ndarray
    zero: np.ndarray
    workers: np.ndarray  # in all
    m: np.ndarray  # microbatches of the busiest replica
    lanes: np.ndarray
    parameters: np.ndarray  # by rank
    tensors: np.ndarray  # by rank
    blocks: np.ndarray  # of each rank
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    clips: bool
    tied: np.ndarray  # seconds to send the gradient of tied weights from one stage to the other

    @property
    def own_lanes(self) -> np.ndarray:
        """Lanes of the busiest replica."""
        return np.asarray(np.ceil(self.lanes / self.data))


def sum_seconds(overheads: RuntimeOverheads, load: StepLoad, device: Device) -> np.ndarray:
    """Seconds of adding up gradients: of a lane's microbatches, and of lanes."""
    whole, rows = (load.m - 1)[:, None], (load.m - load.own_lanes)[:, None]
    cut = (load.zero >= 2) & (load.data > 1)
    owned = ((load.lanes - 1) / load.data)[:, None]
    times = np.where(cut[:, None], rows + owned, whole)
    return np.asarray(times * load.parameters * overheads.sum_bytes / _bandwidth(device))


def update_seconds(
    overheads: RuntimeOverheads, load: StepLoad, device: Device, num_bytes: float, operators: float
) -> np.ndarray:
    """Seconds of the optimizer; `num_bytes` and `operators` are Adam's, for each parameter and each tensor."""
    share = overheads.plain_update + (1 - overheads.plain_update) * min(1.0, load.state_bytes / 8)
    cut, rows = np.where(load.zero >= 1, load.data, 1.0)[:, None], np.where(load.zero >= 2, load.data, 1.0)[:, None]
    size = num_bytes * share * load.parameters / cut
    started = operators * share * load.tensors
    if load.clips:
        size = size + overheads.clip_bytes * load.parameters / rows
        started = started + overheads.clip * load.tensors
    return np.asarray(size / _bandwidth(device) + started * device.overhead)


def exchange_seconds(
    overheads: RuntimeOverheads, load: StepLoad, device: Device, tiers: Sequence[LinkTier], stride: np.ndarray
) -> np.ndarray:
    """Seconds until every worker has its next weights."""
    data, stride = load.data[:, None], stride[:, None]
    gradients, weights = load.parameters * load.gradient_bytes, load.parameters * load.weight_bytes
    if not tiers:
        return np.zeros(load.parameters.shape)
    reduced = collective_seconds(tiers, data, stride, gradients, ALL_REDUCE)
    copied = overheads.copy_bytes * load.parameters / _bandwidth(device)
    scatter = collective_seconds(tiers, data, stride, gradients, HALF) + copied
    gather = collective_seconds(tiers, data, stride, weights, HALF) + copied
    calls = (overheads.moved * load.tensors + overheads.call * load.blocks[None, :]) * device.overhead
    rounds, passes = load.own_lanes[:, None], load.m[:, None]
    by_level = (
        reduced,
        reduced + gather + overheads.spread * load.tensors * device.overhead,
        rounds * (scatter + calls) + gather + calls,
        rounds * (scatter + calls) + 2 * passes * (gather + calls),
    )
    found: np.ndarray = np.select([load.zero[:, None] == level for level in range(4)], by_level)
    # Every lane's gradient of tied weights goes to the first stage that has them, and their sum comes back.
    return np.asarray(np.where(data > 1, found, 0.0) + (load.tied * (load.own_lanes + 1))[:, None])


def step_seconds(overheads: RuntimeOverheads, load: StepLoad, device: Device) -> np.ndarray:
    """Seconds of the host for a step, whatever its work: three collectives exchange figures and votes."""
    return np.asarray((overheads.step + np.where(load.workers > 1, 3 * overheads.call, 0.0)) * device.overhead)


def core_sharing_factor(load: StepLoad, path: np.ndarray, busy: np.ndarray, cores: int) -> np.ndarray:
    """How many times as long a step takes because workers share cores. `path`: seconds if each had its own core;
    `busy`: seconds of work of each rank of the busiest replica."""
    even = load.lanes / (load.data * load.own_lanes)  # replicas with fewer lanes do less
    slices = load.workers / load.data / busy.shape[1]
    work = busy.sum(axis=1) * load.data * slices * even
    return np.asarray(np.maximum(1.0, work / (cores * path)))


def queueing_seconds(overheads: RuntimeOverheads, load: StepLoad, cores: int) -> np.ndarray:
    """Seconds that collectives and messages take longer where a worker that others wait for has no core."""
    ranks = load.parameters.shape[1]
    messages = np.where(ranks > 1, 2 * load.m, 0.0)
    blocks = load.blocks.max() * np.select([load.zero == 2, load.zero == 3], [load.own_lanes + 1, 3 * load.m], 0.0)
    return np.asarray((3 + messages + blocks) * overheads.kept * np.maximum(0.0, 1 - cores / load.workers))


def _bandwidth(device: Device) -> float:
    return device.memory_bandwidth * device.stream
