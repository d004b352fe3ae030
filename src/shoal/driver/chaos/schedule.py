"""When a fault is injected, of which kind, and into which worker. Pure: the same seed gives the same faults.

The victim is a draw between 0 and 1 among the members at that moment: a schedule cannot know how fast earlier victims
are replaced.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import InputError
from shoal.transport.decoding import decode_json

KINDS = {
    "kill": "a worker is killed (SIGKILL)",
    "stop": "a worker is stopped (SIGSTOP) and never goes on",
    "partition": "a worker's host is cut off for some seconds; the run is in a lab then",
    "driver": "the driver is killed, and the next one attached a second later",
    "store": "the run's store is killed",
}
ON_WORKERS = ("kill", "stop", "partition")
CUT_SECONDS = (2.0, 10.0)  # how long a host is cut off: shorter than the usual lease of 5 s, and longer


class ChaosFault(msgspec.Struct, frozen=True, kw_only=True):
    at: float  # seconds since training began
    kind: str
    draw: float = 0.0  # which of the members at that moment, from 0 to below 1
    seconds: float = 0.0  # how long it lasts, where it ends by itself


class FaultSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int
    every: float
    duration: float
    kinds: list[str]
    workers: int
    faults: list[ChaosFault]


def make_schedule(*, seed: int, every: float, duration: float, kinds: Sequence[str], workers: int) -> FaultSchedule:
    """A fault every `every` seconds until `duration`."""
    check_schedule(every=every, duration=duration, kinds=kinds, workers=workers)
    chance = random.Random(seed)
    faults: list[ChaosFault] = []
    bag: list[str] = []
    while (at := every * (len(faults) + 1)) < duration:
        bag = bag or _shuffled(kinds, chance)  # each kind once before one repeats
        kind, draw, length = bag.pop(), chance.random(), chance.random()
        least, most = CUT_SECONDS
        seconds = round(least + (most - least) * length, 3) if kind == "partition" else 0.0
        faults.append(ChaosFault(at=round(at, 6), kind=kind, draw=round(draw, 6), seconds=seconds))
    return FaultSchedule(seed=seed, every=every, duration=duration, kinds=list(kinds), workers=workers, faults=faults)


def check_schedule(*, every: float, duration: float, kinds: Sequence[str], workers: int) -> None:
    if every <= 0:
        raise InputError(f"--every {every:g}s: seconds above 0")
    if duration <= every:
        fix = f"--for {10 * every:g}s, or a smaller --every"
        raise InputError(f"--for {duration:g}s with --every {every:g}s: not one fault comes before the end", fix=fix)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        why = f"no fault is called {unknown[0]!r}" if unknown else "--kinds is empty"
        raise InputError(why, fix=f"--kinds {','.join(KINDS)}, or some of them")
    twice = next((kind for place, kind in enumerate(kinds) if kind in kinds[:place]), None)
    if twice is not None:
        raise InputError(f"--kinds names {twice} twice")
    if "partition" in kinds and "driver" in kinds:
        raise InputError(
            "--kinds partition,driver: a partition needs a lab, and a lab ends with the driver that is to be killed",
            fix=f"two calls: --kinds {','.join(kind for kind in kinds if kind != 'partition')}, then --kinds partition",
        )
    needy = [kind for kind in kinds if kind in ON_WORKERS]
    if workers < 2 and needy:
        fix = "--workers 2 or more, or only --kinds driver,store"
        raise InputError(f"--kinds {needy[0]} with {workers} worker: another worker must hold the state", fix=fix)


def read_schedule(path: Path) -> FaultSchedule:
    """Reads a stored schedule, to play it again."""
    try:
        found = decode_json(path.read_bytes(), FaultSchedule)
    except OSError as error:
        raise InputError(f"--schedule {path}: {error.strerror}", fix="the faults.json of a run's folder") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"--schedule {path} is not a schedule of faults: {error}") from None
    check_schedule(every=found.every, duration=found.duration, kinds=found.kinds, workers=found.workers)
    for fault in found.faults:
        if fault.kind not in found.kinds or not 0 <= fault.at < found.duration or not 0 <= fault.draw < 1:
            raise InputError(f"--schedule {path}: {fault} does not fit the rest of the schedule")
    return found


def victim(fault: ChaosFault, candidates: Sequence[int]) -> int:
    """The index of the victim among the candidates."""
    return min(int(fault.draw * len(candidates)), len(candidates) - 1)


def _shuffled(kinds: Sequence[str], chance: random.Random) -> list[str]:
    """Uses only `random()`, whose numbers are the same in every version of Python."""
    return [kind for _, kind in sorted((chance.random(), kind) for kind in kinds)]
