"""Whether a run may go on from a checkpoint: only with the arithmetic that it began with, or with a change that the
user accepts by name (`--accept loss`)."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from shoal.errors import CheckpointError

# What a user may mend between two parts of a run. The other fields decide which samples a step sees, or what the state
# consists of.
ACCEPTABLE = ("model", "loss", "optimizer", "scheduler", "clip_norm")


_CODE = re.compile(r"(.+) [0-9a-f]{16}")  # how numerics/describe.py describes a function: its name, a hash of its code


def check_arithmetic(
    stored: Mapping[str, Any], mine: Mapping[str, Any], accept: Collection[str] = ()
) -> tuple[str, ...]:
    """A run continues only with the arithmetic it began with; the error names the field that differs. Returns the
    fields that differ and are accepted."""
    differ = [name for name in {**mine, **stored} if stored.get(name) != mine.get(name)]
    for name in differ:
        if name not in accept:
            then, now = stored.get(name), mine.get(name)
            go_on = f"; --accept {name} goes on with the new one" if name in ACCEPTABLE else ""
            raise CheckpointError(
                f"the job's arithmetic changed: {_change(name, then, now)}",
                fix=f"set {name} back, or start a new run without --resume{go_on}",
            )
    return tuple(differ)


def _change(name: str, then: Any, now: Any) -> str:
    before, after = (_CODE.fullmatch(each) if isinstance(each, str) else None for each in (then, now))
    if before is not None and after is not None and before[1] == after[1]:
        return f"the code of {name} ({before[1]}) is another than in the checkpoint"
    return f"{name} was {then!r} in the checkpoint and is {now!r} now"
