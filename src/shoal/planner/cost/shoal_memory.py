"""Predicts the most bytes that a worker of Shoal's runtime holds. Pure; on arrays.

The peak is in one of two moments:

    a step     weights, state, sums of gradients, and what the running microbatch keeps
    a save     weights, state, and a copy of both that is written while training goes on; if the model is not cut, the
               weights once more at the end, for export

Sums of gradients (parallel/data_parallel.py, gradient_exchange.py), for k lanes of this worker and n replicas:

    ⌊log2 k⌋ + 1 sets    while lanes are added up in their tree; the last set grows while activations shrink
    n = 1                one set more: that of the step before, until the new one is complete
    n replicas           2 − 1/n sets in shared memory: its own, and its share of the others'
    zero ≥ 2             sums of its own rows alone, and one block's gradients in transit

A run under `--memory` needs no more than these: there, freed memory returns to the system. Otherwise the
C library keeps it, and later tensors do not always fit the holes: a share of the activations comes on top
(`Runtime.fragmentation`). benchmarks/planner.py compares with `peak_bytes` of runs.
"""

import numpy as np

PROCESS_BYTES = 7e6  # of a worker before it holds anything of the model


def gradient_sets(lanes: np.ndarray) -> np.ndarray:
    """Sets of gradients held at once while this many lanes are added up."""
    return np.asarray(np.floor(np.log2(np.maximum(lanes, 1.0))) + 1)


def memory_bytes(
    *,
    parameters: np.ndarray,
    largest: np.ndarray,
    activations: np.ndarray,
    working: np.ndarray,
    data: np.ndarray,
    zero: np.ndarray,
    cut: np.ndarray,
    lanes: np.ndarray,
    microbatches: np.ndarray,
    weight: float,
    gradient: float,
    state: float,
    buffers: float,
    fragmentation: float = 0.0,
) -> dict[str, np.ndarray]:
    """Bytes by use. All arrays are (setups, ranks), or broadcast to that.

    `parameters`: of this worker's share of the model, unsharded; `largest`: of its largest block. `cut`: pipeline,
    tensor or zero. `lanes`: of a replica; `microbatches`: of a lane. `weight`, `gradient`, `state`: bytes of a
    parameter. `fragmentation`: see `Runtime`; a save reuses that memory.
    """
    own = parameters / np.where(zero >= 1, data, 1.0)  # updated here
    masters = weight < 4.0 <= state  # weights in bf16, and fp32 ones in the state
    weights = np.where(zero == 3, own, parameters) * weight + np.where(zero == 2, own * weight, 0.0)
    optimizer = own * state
    scratch = np.where(zero >= 2, largest * weight * (1 + 1 / data), 0.0)  # a block's rows in transit
    gathered = np.where(zero == 3, largest * weight, 0.0)
    full, rows = parameters * gradient, own * gradient
    # In a step: the last set is complete only when its activations are gone, unless its lane has more microbatches.
    added = np.where(zero >= 2, rows, full)
    growing = np.where(microbatches > 1, added, np.maximum(added - activations, 0.0))
    more = np.where(zero >= 2, largest * gradient, np.where(data == 1, full, 0.0))
    private = (gradient_sets(lanes) - 1) * added + growing + more
    shared = np.where((data > 1) & (zero < 2), full * (2 - 1 / data), 0.0)
    # In a save: weights and optimizer state are copied.
    seen = np.where(masters, 0.0, np.where(zero >= 2, own, parameters) * weight)
    copies = seen + optimizer + np.where(cut, 0.0, parameters * max(weight, 4.0 if masters else weight))
    left = np.where((data == 1) & (zero < 2), full, 0.0)
    holes = fragmentation * (activations + working)
    step = private + activations + working + gathered + holes
    saves = left + copies > step
    gradients = np.where(saves, left, private) + shared
    return {
        "weights": weights + 0.0 * step,
        "gradients": gradients,
        "optimizer": optimizer + 0.0 * step,
        "activations": np.where(saves, 0.0, activations),
        "working": np.where(saves, 0.0, working + gathered),
        "other": buffers + PROCESS_BYTES + scratch + np.where(saves, copies, holes),
    }
