"""Seconds of operators on a device. Pure; on arrays.

- A matrix product reaches e_max · x/(x + x0) of the peak, x its FLOPs: small products do not fill the device.
- Other operators take bytes / bandwidth; a product takes no less than its bytes do.
- The host starts operators one by one. Where it runs ahead of the device, (t_gpu⁴ + t_host⁴)^¼ fits measured layers
  better than the sum: the slower one counts, and a little of the other.
"""

from collections.abc import Mapping

import numpy as np

from shoal.errors import InputError
from shoal.planner.cluster import Cluster, Device
from shoal.planner.cost.runtime import Runtime

# Peaks grew faster than power and kernels kept up. Both exponents are of (peak over an A100's).
REFERENCE = 312e12  # bf16 FLOP/s of an A100
HEAT = 0.105  # plain products: clocks fall under load
AGE = 0.43  # fused kernels: those written for an A100 use less of later devices
CASTS = 0.75  # of a product's bytes: inputs are read in bf16 and written in fp8 before the product begins


def operator_seconds(
    device: Device, runtime: Runtime, dtype: str, flops: np.ndarray, size: np.ndarray, ops: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Seconds of each operator: `flops` of its products, `size` bytes that it moves. `ops` has its `rate`, whether it
    is `fused` or `half`, and the rate that a probe measured for its kind (`known`; 0: none)."""
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
    return np.asarray(np.where(known > 0, measured, np.maximum(product, moved)))


def with_host(device: np.ndarray, host: np.ndarray, runtime: Runtime) -> np.ndarray:
    """Seconds of a block from the seconds that the device and the host take for it."""
    return np.asarray((device**4 + host**4) ** 0.25 if runtime.concurrent else device + host)


def slowest_device(cluster: Cluster, dtype: str) -> Device:
    """The slowest kind of device in the cluster, which a step waits for."""
    found = [host.device for host in cluster.hosts if host.device is not None]
    if not found:
        raise InputError(
            "the cluster does not describe its devices",
            fix="a [devices.NAME] table in its file, a preset by name, or shoal cluster probe",
        )
    return min(found, key=lambda each: each.peak_of(dtype) * each.efficiency)
