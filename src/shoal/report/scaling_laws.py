"""The speed-up of n workers by the laws of Amdahl, Gustafson and Gunther. Pure; used by plans and reports.

`parallel` is the share of one worker's time that can be divided among workers, 0 to 1.
"""

import math


def amdahl_speedup(parallel: float, workers: int) -> float:
    """1 / ((1 - p) + p / n): the same work on n workers (Amdahl, "Validity of the single processor approach to
    achieving large scale computing capabilities", 1967)."""
    _check(parallel, workers)
    return 1.0 / ((1.0 - parallel) + parallel / workers)


def amdahl_limit(parallel: float) -> float:
    """1 / (1 - p): Amdahl's speed-up as n grows without end; infinite if everything can be divided."""
    _check(parallel, 1)
    return math.inf if parallel == 1.0 else 1.0 / (1.0 - parallel)


def parallel_fraction(speedup: float, workers: int) -> float | None:
    """(1 - 1/S) / (1 - 1/n): Amdahl's law solved for p, clamped to 0..1. None for one worker. 1 - p is the serial
    fraction of Karp and Flatt ("Measuring parallel processor performance", 1990), waiting and messages included."""
    _check(0.0, workers)
    if not speedup > 0.0:
        raise ValueError(f"a speed-up is above 0, got {speedup}")
    if workers == 1:
        return None
    return min(1.0, max(0.0, (1.0 - 1.0 / speedup) / (1.0 - 1.0 / workers)))


def gustafson_speedup(parallel: float, workers: int) -> float:
    """(1 - p) + p * n: work that grows with n, so that each worker does as much divisible work as one did alone
    (Gustafson, "Reevaluating Amdahl's law", 1988)."""
    _check(parallel, workers)
    return (1.0 - parallel) + parallel * workers


def usl_speedup(contention: float, coherence: float, workers: float) -> float:
    """n / (1 + σ(n - 1) + κ n(n - 1)): σ is contention, κ is coherence between every pair of workers.

    With κ = 0 it is Amdahl's law with p = 1 - σ; with κ > 0 it has a peak.
    Gunther, "A simple capacity model of massively parallel transaction systems", 1993.
    """
    return workers / (1.0 + contention * (workers - 1.0) + coherence * workers * (workers - 1.0))


def usl_peak(contention: float, coherence: float) -> float:
    """√((1 - σ) / κ): the number of workers past which more are slower; infinite without κ."""
    return math.inf if coherence == 0.0 else math.sqrt(max(0.0, 1.0 - contention) / coherence)


def _check(parallel: float, workers: int) -> None:
    if not 0.0 <= parallel <= 1.0:
        raise ValueError(f"the parallel share is from 0 to 1, got {parallel}")
    if workers < 1:
        raise ValueError(f"at least 1 worker, got {workers}")
