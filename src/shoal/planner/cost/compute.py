"""Seconds of operators on a device. Pure; on arrays.

- A matrix product reaches e_max · x/(x + x0) of the peak, x its FLOPs: small ones do not fill the device.
- What only reads and writes takes bytes / bandwidth; a product no less than its bytes take.
- The host starts operators one by one. Where it runs ahead of the device (t_gpu⁴ + t_host⁴)^¼ fits measured layers
  better than adding: whichever is slower counts, and a little of the other (PLANNER.md).
"""

from collections.abc import Mapping

import numpy as np

from shoal.planner.cluster import Device
from shoal.planner.cost.runtime import Runtime

# Peaks grew faster than what keeps up with them, power and kernels. Both exponents are of (peak over an A100's).
REFERENCE = 312e12  # bf16 FLOP/s
HEAT = 0.105  # of plain products: clocks fall under load
AGE = 0.43  # of fused kernels: those written for an A100 use less of later devices
CASTS = 0.75  # of a product's bytes: read in bf16 and written in fp8 before it can begin


def operator_seconds(
    device: Device, runtime: Runtime, dtype: str, flops: np.ndarray, size: np.ndarray, ops: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Of one operator each: `flops` of its products, `size` bytes that it moves; in `ops` how it goes about it: its
    `rate`, whether it is `fused` or `half`, and what a probe measured of its kind (`known`, 0: nothing)."""
    peak, half = device.peak_of(dtype), device.peak_of("bf16") if dtype == "fp8" else device.peak_of(dtype)
    top = np.where(ops["half"] > 0, half, peak)
    above = np.maximum(1.0, top / REFERENCE)
    reached = top * device.efficiency * runtime.sustained
    rate = ops["rate"] * np.where(ops["fused"] > 0, above**-AGE, above**-HEAT)
    # flops / (reached · x/(x + x0)) = (x + x0) / reached
    product = np.where(flops > 0, (flops / rate + device.half_flops) / reached, 0.0)
    if dtype == "fp8":
        product += np.where(
            (flops > 0) & (ops["half"] == 0), CASTS * size / (device.memory_bandwidth * device.stream), 0
        )
    moved = np.where(flops > 0, 1.0, runtime.passes) * size / (device.memory_bandwidth * device.stream)
    known = ops["known"]
    measured = np.where(flops > 0, flops, size) / np.where(known > 0, known, 1.0)
    seconds: np.ndarray = np.where(known > 0, measured, np.maximum(product, moved))
    return seconds


def with_host(device: np.ndarray, host: np.ndarray, runtime: Runtime) -> np.ndarray:
    """Seconds of a block, of the seconds that the device and the host take for it."""
    seconds: np.ndarray = (device**4 + host**4) ** 0.25 if runtime.concurrent else device + host
    return seconds
