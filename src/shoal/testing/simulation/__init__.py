"""Simulates the membership and commit protocol under faults, for a hundred thousand seeds.

    run(1234)                                              one seed: its cases, or InvariantViolated with its trace
    python -m shoal.testing.simulation --seed 1234 --trace that seed, event by event
    make simulate                                          a hundred thousand of them, and many of servers.py

Every simulated worker runs the real `MemberState` (recovery/membership/protocol.py); clock, network, store, disk and
faults are simulated, and the seed decides everything.

    scenario.py       what a seed decides             world.py        processes, network; clock.py: clock, disk
    worker*.py        the runtime's loop              store.py        views, leases, positions
    driver.py         replaces lost workers           faults.py       what goes wrong
    simulated_run.py  one seed                        invariants.py   what must hold (docs/protocol.md)

Parameter servers have a simulation of their own: servers.py, with clients, scripts and a reference without faults;
pushes.py sends very many over a lossy connection.
"""

from collections.abc import Callable
from typing import Any

from shoal.recovery.membership.protocol import MemberState
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.simulated_run import SimRun

__all__ = ["InvariantViolated", "SimRun", "run"]


def run(seed: int, member: Callable[..., MemberState] = MemberState, **planned: Any) -> set[str]:
    """Returns the cases of a seed. Raises InvariantViolated with the seed's trace if an invariant does not hold."""
    try:
        return SimRun(seed, member, **planned).run()
    except InvariantViolated:
        pass
    world = SimRun(seed, member, trace=True, **planned)
    try:
        return world.run()
    except InvariantViolated as broken:
        raise InvariantViolated(f"seed {seed}: {broken}\n" + "\n".join(world.trace or [])) from None
