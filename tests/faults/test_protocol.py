"""The protocol in simulated worlds: with real processes."""

import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from helpers.command import Forked
from shoal.testing.simulation import SimRun, run
from shoal.testing.simulation.invariants import CASES

SEEDS = 4000
RARE = {"newcomers had to wait for the end of a step"}  # about once in ten thousand seeds: `make simulate` asks for it


# -- the simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_no_law_is_broken_and_every_case_is_met() -> None:
    def play(first: int) -> int:
        met: Counter[str] = Counter()
        for seed in range(first, SEEDS, 2):
            met.update(run(seed))
        print(msgspec.json.encode(met).decode())
        return 0

    met: Counter[str] = Counter()
    with Forked(call=lambda: play(0)) as even, Forked(call=lambda: play(1)) as odd:  # on two cores
        for result in (even.end(), odd.end()):
            assert result.code == 0, result.err
            met.update(result.value)
    assert [case for case in CASES if not met[case] and case not in RARE] == []


def test_a_seed_replays_in_another_process() -> None:
    """Its story holds no time, no address and no order of a hash table of this process."""
    world = SimRun(3, trace=True)
    world.run()
    assert world.trace
    command = [sys.executable, "-m", "shoal.testing.simulation", "--seed", "3", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "\n".join(world.trace) in done.stdout
