"""Seconds and bytes of each block for each variant of cutting it: what predictions of many setups share.

A *variant* is (tensor, microbatch, recompute, sequence parallel). Arrays are (variants, blocks).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from shoal.planner.cluster import Device, LinkTier
from shoal.planner.cost.comm import collective_seconds
from shoal.planner.cost.compute import operator_seconds, with_host
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.setup import RECOMPUTE
from shoal.planner.cost.workload import Block, Workload


@dataclass(frozen=True, kw_only=True)
class CutVariants:
    """Columns of equal length; `recompute` is an index into RECOMPUTE."""

    tensor: np.ndarray
    microbatch: np.ndarray
    recompute: np.ndarray
    sequence: np.ndarray


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """Costs of one microbatch through each block on one device: (variants, blocks)."""

    forward: np.ndarray  # seconds of the device
    backward: np.ndarray
    again: np.ndarray  # recomputation
    host: np.ndarray  # seconds that the host adds, over all three
    host_forward: np.ndarray  # of those: in forward
    tensor: np.ndarray  # seconds of all-reduces, over all three
    tensor_forward: np.ndarray  # of those: in forward
    parameters: np.ndarray
    tensors: np.ndarray
    saved: np.ndarray  # bytes
    working: np.ndarray
    output: np.ndarray

    def at(self, places: Sequence[int]) -> "BlockCosts":
        """The costs of these blocks, in this order."""
        return replace(self, **{each.name: getattr(self, each.name)[:, places] for each in fields(self)})


def block_costs(
    work: Workload, variants: CutVariants, device: Device, tiers: Sequence[LinkTier], runtime: Runtime
) -> BlockCosts:
    distinct = list({id(block): block for block in work.blocks}.values())
    places = {id(block): number for number, block in enumerate(distinct)}
    found = _distinct_costs(work, distinct, variants, device, tiers, runtime)
    return found.at([places[id(block)] for block in work.blocks])


def _distinct_costs(
    work: Workload,
    blocks: Sequence[Block],
    variants: CutVariants,
    device: Device,
    tiers: Sequence[LinkTier],
    runtime: Runtime,
) -> BlockCosts:
    scale, t = variants.microbatch[:, None] / work.samples, variants.tensor[:, None].astype(float)
    along = np.where(variants.sequence[:, None] > 0, t, 1.0)  # the divisor of sequence parallelism
    full = (variants.recompute == RECOMPUTE.index("full"))[:, None]
    selective = (variants.recompute == RECOMPUTE.index("selective"))[:, None]
    found = _device_seconds(work, blocks, scale, t, along, device, runtime)
    forward, backward = found.forward, found.backward
    reduced = collective_seconds(tiers, t, np.ones(1), scale * _row(blocks, "reduced")) * _row(blocks, "reductions")
    recomputed = np.where(full, _row(blocks, "recomputed"), 0.0)
    again = recomputed * found.full + np.where(selective, _row(blocks, "recomputed") * found.selective, 0.0)
    overhead = device.overhead * runtime.dispatch
    host_forward = with_host(forward, overhead * found.starts, runtime) - forward
    host_backward = with_host(backward, overhead * found.starts_backward, runtime) - backward
    rest, sliced, kept = (_row(blocks, name) for name in ("saved", "saved_sliced", "saved_core"))
    fixed = _row(blocks, "saved_fixed")
    everything = scale * ((rest - sliced - fixed) / along + sliced / t) + fixed
    inputs = scale * _row(blocks, "saved_input") / along
    some = everything - scale * kept / t
    if runtime.selective == "products":  # keeps about a third: every second product, and attention's output
        some = np.where(_row(blocks, "recomputed") > 0, inputs + np.maximum(some - inputs, 0.0) / 3, everything)
    saved = np.where(selective, some, np.where(recomputed > 0, inputs, everything))
    cut = np.where(_row(blocks, "sliced") > 0, t, 1.0)
    working = scale * _row(blocks, "working") / cut + np.where(recomputed > 0, everything, 0.0)
    parameters = _row(blocks, "parameters") - _row(blocks, "sliced") * (1 - 1 / t)
    return BlockCosts(
        forward=forward,
        backward=backward,
        again=again,
        host=(1 + recomputed) * host_forward + host_backward,
        host_forward=host_forward,
        tensor=reduced * (2 - runtime.overlap_tensor + recomputed),
        tensor_forward=reduced + 0 * t,
        parameters=parameters,
        tensors=_row(blocks, "tensors") + 0 * t,
        saved=saved,
        working=working,
        output=scale * _row(blocks, "output") + 0 * t,
    )


def _row(blocks: Sequence[Block], name: str) -> np.ndarray:
    return np.array([[float(getattr(block, name)) for block in blocks]])


@dataclass(frozen=True, kw_only=True)
class _DeviceSeconds:
    """Seconds of the device by (variant, block), and the number of operators that the host starts."""

    forward: np.ndarray
    backward: np.ndarray
    full: np.ndarray  # recomputation of everything
    selective: np.ndarray
    starts: np.ndarray  # in forward
    starts_backward: np.ndarray


def _device_seconds(
    work: Workload,
    blocks: Sequence[Block],
    scale: np.ndarray,
    t: np.ndarray,
    along: np.ndarray,
    device: Device,
    runtime: Runtime,
) -> _DeviceSeconds:
    ops = [op for block in blocks for op in block.ops]
    owner = np.repeat(np.arange(len(blocks)), [len(block.ops) for block in blocks])
    names = ("flops", "bytes", "fixed", "times", "rate", "fused", "half", "backward", "sliced", "core", "last")
    column = {name: np.array([float(getattr(op, name)) for op in ops]) for name in names}
    flops, size, fixed, times, back, sliced, core = (
        column[name] for name in ("flops", "bytes", "fixed", "times", "backward", "sliced", "core")
    )
    column["known"] = np.array([device.rates.get(op.name, 0.0) for op in ops])
    cut = np.where(sliced > 0, t, np.where(flops > 0, 1.0, along))
    seconds = times * operator_seconds(
        device, runtime, work.dtype, flops * scale / cut, ((size - fixed) * scale + fixed) / cut, column
    )

    def summed(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
        found = np.zeros((len(values), len(blocks)))
        for block in range(len(blocks)):
            of = owner == block
            found[:, block] = values[:, of] @ weights[of]
        return found

    ahead = 1 - back
    some = core if runtime.selective == "core" else (1 - core) * np.where(flops > 0, 0.5, 1.0)
    return _DeviceSeconds(
        forward=summed(ahead, seconds),
        backward=summed(back, seconds),
        full=summed(ahead * (1 - column["last"] * runtime.early_stop), seconds),
        selective=summed(ahead * some, seconds),
        starts=summed(ahead, times[None, :]),
        starts_backward=summed(back, times[None, :]),
    )
