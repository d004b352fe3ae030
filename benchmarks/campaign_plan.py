"""Which faults the kill campaign plays, and what follows from what was seen. Pure: a seed and a number give one run."""

import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

LONGEST_SILENCE = 5.0  # seconds: the target
KILL, STOP, PAUSE = "kill", "stop", "pause"
FAULTS = {KILL: "SIGKILL", STOP: "SIGSTOP for good", PAUSE: "SIGSTOP, and SIGCONT some seconds later"}
WORKER, TWO_WORKERS, SERVER, FORK_SERVER, DRIVER, STORE = (
    "worker", "two workers", "server", "fork server", "driver", "store",
)  # fmt: skip
VICTIMS = (WORKER, TWO_WORKERS, SERVER, FORK_SERVER, DRIVER, STORE)
EARLY_SHARE = 0.2  # of the faults come before the first step
EARLY_SECONDS, WITHIN_SECONDS = 0.5, 0.06  # the latest moment after the start, and within a step
PAUSE_SECONDS = (0.2, 7.0)
REST_STEPS = 6  # at the end, in which no fault comes


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the job is run. `exact`: the hash of an undisturbed run is promised."""

    arguments: str
    exact: bool = True
    servers: bool = False
    lab: bool = False
    script: bool = False


MODES = {
    "data": Mode(arguments="--workers 3"),
    "pipeline": Mode(arguments="--layout pipeline=2"),
    "pipeline x data": Mode(arguments="--layout data=2,pipeline=2"),
    "tensor": Mode(arguments="--layout tensor=2"),
    "zero=1": Mode(arguments="--layout data=2,zero=1"),
    "zero=2": Mode(arguments="--layout data=2,zero=2"),
    "zero=3": Mode(arguments="--layout data=2,zero=3"),
    "sync": Mode(arguments="--workers 2 --servers 2 --sync sync", servers=True),
    "quorum": Mode(arguments="--workers 3 --servers 1 --sync quorum:0.6", servers=True, exact=False),
    "local": Mode(arguments="--workers 2 --servers 1 --sync local:4", servers=True, exact=False),
    "async": Mode(arguments="--workers 2 --servers 1 --sync async", servers=True, exact=False),
    "stale": Mode(arguments="--workers 2 --servers 1 --sync stale:3", servers=True, exact=False),
    "groups": Mode(arguments="--workers 4 --servers 1 --sync groups:2", servers=True, exact=False),
    "join": Mode(arguments="--workers 3", script=True),
    "lab": Mode(arguments="--workers 2", lab=True),
}


class PlannedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its fault. `step` 0: before the first one."""

    number: int
    mode: str
    victim: str
    fault: str
    step: int
    delay: float  # seconds after that
    seconds: float = 0.0  # of a pause
    draw: float = 0.0  # which of the processes that may be the victim, from 0 to below 1

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the first step"
        lasting = f" for {self.seconds:.1f} s" if self.fault == PAUSE else ""
        return f"{self.mode}: {self.fault} {self.victim}{lasting} {when}"


def combinations(modes: Sequence[str]) -> list[tuple[str, str, str]]:
    """Every mode with every victim that it has and every fault. A driver that is stopped for good is nobody's to end:
    it is killed, or goes on."""
    return [
        (mode, victim, fault)
        for mode in modes
        for victim in VICTIMS
        if victim != SERVER or MODES[mode].servers
        for fault in FAULTS
        if (victim, fault) != (DRIVER, STOP)
    ]


def plan_run(seed: int, number: int, modes: Sequence[str], steps: int) -> PlannedFault:
    """Every combination comes once before one comes again."""
    known = combinations(modes)
    cycle, place = divmod(number, len(known))
    order = random.Random(f"{seed} order {cycle}")
    mode, victim, fault = sorted((order.random(), each) for each in known)[place][1]
    chance = random.Random(f"{seed} run {number}")
    early = chance.random() < EARLY_SHARE
    step = 0 if early else 1 + int(chance.random() * (steps - REST_STEPS))
    least, most = PAUSE_SECONDS
    pause, draw = least + (most - least) * chance.random(), chance.random()
    return PlannedFault(
        number=number,
        mode=mode,
        victim=victim,
        fault=fault,
        step=step,
        delay=round(chance.random() * (EARLY_SECONDS if early else WITHIN_SECONDS), 4),
        seconds=round(pause, 2) if fault == PAUSE else 0.0,
        draw=round(draw, 6),
    )


# -- what was seen ----------------------------------------------------------------------------------------------------

Span = tuple[float, float]  # in which a command ran: from, to


class Gap(NamedTuple):
    seconds: float = 0.0
    began: float = 0.0


def longest_gap(moments: Sequence[float], spans: Sequence[Span], since: float) -> Gap:
    """The longest time without one of the (sorted) moments while a command ran, of those that end after `since`."""
    found = [Gap()]
    for start, end in spans:
        inside = moments[bisect_left(moments, start) : bisect_right(moments, end)]
        points = pairwise([start, *inside, end])
        found += [Gap(after - before, before) for before, after in points if after > since]
    return max(found)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    call: str
    code: int | None  # None: it was ended, as it did not end by itself
    began: float  # seconds since 1970
    ended: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    planned: PlannedFault | None  # None: an undisturbed run
    mode: str
    injected: bool
    commands: list[Command]
    weights_sha256: str | None
    silence: float  # the longest time without an event and without an update of weights
    silence_after: str  # what came before it
    standstill: float  # the longest time without an update of weights
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.problems

    @property
    def seconds(self) -> float:
        return sum(each.ended - each.began for each in self.commands)
