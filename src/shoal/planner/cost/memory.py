"""Peak bytes of a worker. Pure; on arrays.

States, for each parameter, d replicas (Rajbhandari et al., ZeRO):

    zero=0   w + g + s          16: 2 + 2 + 12 with mixed-precision Adam; 18 with fp32 gradients (Megatron)
    zero=1   w + g + s/d        4 + 12/d; 6 + 12/d
    zero=2   w + (g + s)/d      2 + 14/d
    zero=3   (w + g + s)/d      16/d, and two whole blocks while they compute

Activations: what a stage keeps of one microbatch (workload.py), times the microbatches in flight.
"""

import numpy as np

Numbers = np.ndarray | float


def model_state_bytes(
    parameters: Numbers, zero: Numbers, data: Numbers, weight: float, gradient: float, state: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of weights, gradients and optimizer state on one worker."""
    cut = [np.where(np.asarray(zero) >= level, data, 1) for level in (3, 2, 1)]
    return parameters * weight / cut[0], parameters * gradient / cut[1], parameters * state / cut[2]


def in_flight(schedule: str, ranks: int, microbatches: np.ndarray, chunks: int) -> np.ndarray:
    """The most microbatches held at once, by (setup, chunk, rank).

    Closed forms of `shoal.parallel.pipeline_schedule.in_flight`, by chunk; a test compares them.
    """
    m = np.asarray(microbatches, dtype=float)[:, None, None]
    behind = np.arange(ranks - 1, -1, -1.0)[None, None, :]  # ranks after this one
    chunk = np.arange(chunks, dtype=float)[None, :, None]
    if schedule == "gpipe":
        held = m + 0 * behind
    elif schedule == "1f1b":
        held = behind + 1
    elif schedule == "interleaved":
        # This many forwards come before the first backward, p of each chunk in turn.
        ahead = 2 * behind + (chunks - 1) * ranks + 1
        rounds, rest = np.divmod(ahead, ranks * chunks)
        held = rounds * ranks + np.clip(rest - chunk * ranks, 0, ranks)
    elif schedule == "zero-bubble":
        held = ranks + 0 * behind
    elif schedule == "zbv":
        held = np.where(m >= 2 * ranks, ranks, np.minimum(ranks, (m + ranks - behind) / 2))
    else:
        held = ranks + 0.5 + 0 * behind
    return np.asarray(np.minimum(m, held + 0 * chunk))
