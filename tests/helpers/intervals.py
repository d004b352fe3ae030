"""What a checkpoint interval costs: a reference for the policy and for the simulation of failures."""

import math


def time_shares(
    seconds: float, save_seconds: float, failure_seconds: float, write_seconds: float
) -> tuple[float, float]:
    """The expected shares of all time that go into saving and into repeated work, with random failures."""
    useful = seconds + save_seconds
    # Expected time until an interval of this length passes without a failure, lost attempts included.
    taken = failure_seconds * math.expm1(min(useful / failure_seconds, 100.0))
    falls_further = write_seconds * taken / failure_seconds  # each failure also loses the write under way
    whole = taken + falls_further
    return save_seconds / whole, (taken - useful + falls_further) / whole
