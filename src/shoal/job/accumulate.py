"""Gradient accumulation: how many consecutive batches are one update, by pass over the data. Pure.

    accumulate=4                  always
    accumulate={0: 1, 2: 4}       from pass 2 on; passes are counted from 0

An update of four batches is the mean over their samples. Each lane has four times as many microbatches of the same
size, so the memory that kernels need stays.
"""

from collections.abc import Mapping
from typing import Any

from shoal.errors import JobError
from shoal.numerics.sampling import ONE_BATCH, Accumulation

EXAMPLE = "accumulate=4, or accumulate={0: 1, 2: 4}: from pass 2 on four batches are one update"


def parse_accumulation(given: Any) -> Accumulation:
    if given is None:
        return ONE_BATCH
    table = given if isinstance(given, Mapping) else {0: given}
    for epoch, factor in table.items():
        for what, value, least in (("a pass over the data", epoch, 0), ("a number of batches", factor, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JobError(f"accumulate={given!r}: {value!r} is not {what} from {least} up", fix=EXAMPLE)
    found: list[tuple[int, int]] = []
    for epoch, factor in sorted({0: 1, **table}.items()):
        if not found or found[-1][1] != factor:
            found.append((epoch, factor))
    return tuple(found)
