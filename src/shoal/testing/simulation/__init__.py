"""The membership and commit protocol in a world that goes wrong, a hundred thousand times over.

    run(1234)                                              one seed: the cases that it met, or Broken with its story
    python -m shoal.testing.simulation --seed 1234 --trace that seed, event by event
    make simulate                                          a hundred thousand of them, and many of servers.py

Every worker of the simulation runs the real `Member` (recovery/membership/protocol.py); clock, network, store,
disk and the faults of all of them are played, and one seed decides everything.

    plan.py     what a seed stands for          world.py    clock, processes, network, disk
    worker.py   the runtime's loop              store.py    views, leases, positions
    driver.py   sees ends, starts others        faults.py   what goes wrong
                                                laws.py     what must hold

Parameter servers have a world of their own: servers.py, with its workers in peers.py and what one process comes to in
truth.py; pushes.py, many over a bad line.
"""

from collections.abc import Callable
from typing import Any

from shoal.recovery.membership.protocol import MemberState
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.world import SimWorld

__all__ = ["InvariantViolated", "SimWorld", "run"]


def run(seed: int, member: Callable[..., MemberState] = MemberState, **planned: Any) -> set[str]:
    """The cases that a seed met. Raises Broken with the story of the seed if a law did not hold."""
    try:
        return SimWorld(seed, member, **planned).run()
    except InvariantViolated:
        pass
    world = SimWorld(seed, member, trace=True, **planned)
    try:
        return world.run()
    except InvariantViolated as broken:
        raise InvariantViolated(f"seed {seed}: {broken}\n" + "\n".join(world.trace or [])) from None
