"""What a worker of Shoal's own runtime holds at the most. Pure; on arrays.

It is one of two moments that needs most:

    a step     weights, state, sums of gradients, and what the microbatch at work keeps
    a save     weights, state, and a copy of both that is written during training; an uncut model also has the weights
               once more at the end, for export

Sums of gradients (parallel/local_step.py, gradient_exchange.py), for k lanes of this worker and n replicas:

    ⌊log2 k⌋ + 1 sets    while lanes are added up in their tree; the last one grows while activations go
    alone                one set more: that of the step before, until this one's is there
    n replicas           2 − 1/n sets in shared memory: its own, and its share of the other workers'
    zero ≥ 2             sums of its own rows alone, and one block's gradients in transit

Under `--memory` a run holds only what is alive. Otherwise the C library keeps freed memory, and later tensors do not
always fit: a share of the activations is added (`Runtime.fragmentation`). benchmarks/planner.py compares with runs.
"""

import numpy as np

PROCESS_BYTES = 7e6  # bytes of a worker process before it holds a model


def gradient_sets(lanes: np.ndarray) -> np.ndarray:
    """Sets of gradients at once, while so many lanes are added up."""
    found: np.ndarray = np.floor(np.log2(np.maximum(lanes, 1.0))) + 1
    return found


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
    """Bytes by what they are for. All arrays are (setups, ranks), or spread to that.

    `parameters`: of this worker's model shard; `largest`: of its largest block. `cut`: pipeline, tensor or zero.
    `lanes`: of a replica; `microbatches`: of a lane. `weight`, `gradient`, `state`: bytes of a parameter.
    `fragmentation`: see `Runtime`; a save uses the memory that was kept.
    """
    own = parameters / np.where(zero >= 1, data, 1.0)  # updated here
    masters = weight < 4.0 <= state  # weights in bf16, and fp32 ones in the state
    weights = np.where(zero == 3, own, parameters) * weight + np.where(zero == 2, own * weight, 0.0)
    optimizer = own * state
    scratch = np.where(zero >= 2, largest * weight * (1 + 1 / data), 0.0)  # a block's rows on their way
    whole = np.where(zero == 3, largest * weight, 0.0)
    full, rows = parameters * gradient, own * gradient
    # In a step: the last set is whole only when its activations are gone, unless more of its lane follow.
    added = np.where(zero >= 2, rows, full)
    growing = np.where(microbatches > 1, added, np.maximum(added - activations, 0.0))
    more = np.where(zero >= 2, largest * gradient, np.where(data == 1, full, 0.0))
    private = (gradient_sets(lanes) - 1) * added + growing + more
    shared = np.where((data > 1) & (zero < 2), full * (2 - 1 / data), 0.0)
    # In a save: what the optimizer has seen and has.
    seen = np.where(masters, 0.0, np.where(zero >= 2, own, parameters) * weight)
    copies = seen + optimizer + np.where(cut, 0.0, parameters * max(weight, 4.0 if masters else weight))
    left = np.where((data == 1) & (zero < 2), full, 0.0)
    holes = fragmentation * (activations + working)
    step = private + activations + working + whole + holes
    saves = left + copies > step
    gradients = np.where(saves, left, private) + shared
    return {
        "weights": weights + 0.0 * step,
        "gradients": gradients,
        "optimizer": optimizer + 0.0 * step,
        "activations": np.where(saves, 0.0, activations),
        "working": np.where(saves, 0.0, working + whole),
        "other": buffers + PROCESS_BYTES + scratch + np.where(saves, copies, holes),
    }
