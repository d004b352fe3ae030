"""How workers keep in step: the values of --sync.

    sync                    all gradients, then the update: the same bits as one process
    quorum:0.9              the first 90 % of the workers close a step; late workers are refused and counted
    stale:3                 every gradient is an update; a worker is at most 3 steps ahead of the slowest
    async                   every gradient is an update; no worker waits
    local:16                every worker alone for 16 steps, then the mean of all (local SGD)
    local:16,outer=nesterov the same; the mean is a gradient of an outer optimizer (DiLoCo)
    groups:2                two groups: synchronous inside, by collectives; asynchronous between, by the servers

In lockstep modes (sync, quorum, local) all workers are at one step. In queue modes a free worker takes the next step
from one queue: fast workers do more steps, and a run makes as many updates as the job has steps.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches

from shoal.errors import InputError

MODE_NAMES = ("sync", "quorum", "stale", "async", "local", "groups")
EXAMPLES = "sync, quorum:0.9, stale:3, async, local:16, local:16,outer=nesterov, groups:2"
OUTERS = ("average", "nesterov")


@dataclass(frozen=True, kw_only=True)
class SyncMode:
    name: str = "sync"
    number: float = 0  # quorum (a share up to 1, above that workers), steps, or groups
    outer: str = "average"  # local: the outer optimizer

    @classmethod
    def parse(cls, text: str) -> "SyncMode":
        head, *options = text.strip().split(",")
        name, colon, number = head.partition(":")
        if name not in MODE_NAMES:
            near = get_close_matches(name, MODE_NAMES, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {EXAMPLES}"
            raise InputError(f"there is no mode {name!r}", fix=fix)
        if name in ("sync", "async"):
            if colon:
                raise InputError(f"mode {text!r}: {name} has no number after it", fix=name)
            _no_options(text, name, options)
            return cls(name=name)
        value = _number(text, name, number)
        if name != "local":
            _no_options(text, name, options)
            return cls(name=name, number=value)
        return cls(name=name, number=value, outer=_outer(text, options))

    def __str__(self) -> str:
        head = self.name if self.name in ("sync", "async") else f"{self.name}:{self.number:g}"
        return head if self.outer == "average" else f"{head},outer={self.outer}"

    @property
    def exact(self) -> bool:
        """Whether a run has the same bits as one process."""
        return self.name == "sync"

    @property
    def lockstep(self) -> bool:
        """Whether all workers are at one step; else they take steps from one queue."""
        return self.name in ("sync", "quorum", "local")

    def quorum(self, workers: int) -> int:
        """The number of workers that close a step."""
        if self.name != "quorum":
            return workers
        return math.ceil(self.number * workers - 1e-9) if self.number <= 1 else int(self.number)

    def check_workers(self, workers: int) -> None:
        if self.name == "quorum" and self.quorum(workers) > workers:
            raise InputError(
                f"--sync {self}: a quorum of {self.number:g}, but there are {workers} workers",
                fix=f"quorum:{workers}, or a share such as quorum:0.9",
            )
        if self.name == "groups" and self.number > workers:
            raise InputError(
                f"--sync {self}: {self.number:g} groups, but there are {workers} workers: each group needs one",
                fix=f"groups:{workers}, or --workers {self.number:g}",
            )

    def group_of(self, worker: int) -> int:
        return worker % int(self.number) if self.name == "groups" else worker


def _number(text: str, name: str, number: str) -> float:
    example = {"quorum": "quorum:0.9", "stale": "stale:3", "local": "local:16", "groups": "groups:2"}[name]
    try:
        value = float(number)
    except ValueError:
        raise InputError(f"mode {text!r}: {name} needs a number, and got {number!r}", fix=example) from None
    least = {"stale": 0, "quorum": math.ulp(0)}.get(name, 1)
    if not math.isfinite(value) or value < least:
        raise InputError(f"mode {text!r}: {number} is out of range", fix=example)
    if (name != "quorum" or value > 1) and value != int(value):
        raise InputError(f"mode {text!r}: {name} needs a whole number here, and got {number}", fix=example)
    return value


def _no_options(text: str, name: str, options: list[str]) -> None:
    if options:
        raise InputError(f"mode {text!r}: {name} has no option {options[0]!r}", fix=f"one of {EXAMPLES}")


def _outer(text: str, options: list[str]) -> str:
    outer = "average"
    for option in options:
        key, _, outer = option.partition("=")
        if key != "outer" or outer not in OUTERS:
            raise InputError(f"mode {text!r}: {option!r} is not known", fix="local:16,outer=nesterov, or local:16")
    return outer
