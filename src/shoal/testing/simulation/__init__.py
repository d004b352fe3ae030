"""The membership and commit protocol in a world that goes wrong, ten thousand times over.

    run(1234)                                              one seed: the cases that it met, or Broken with its story
    python -m shoal.testing.simulation --seed 1234 --trace that seed, event by event
    make simulate                                          a hundred thousand of them

Every worker of the simulation runs the real `Member` (recovery/protocol.py); clock, network, store, disk and the faults
of all of them are played, and one seed decides everything.

    plan.py     what a seed stands for          world.py    clock, network, disk, faults
    worker.py   the runtime's loop              store.py    views, leases, positions
    driver.py   sees ends, starts others        laws.py     what must hold
"""

from collections.abc import Callable

from shoal.recovery.protocol import Member
from shoal.testing.simulation.laws import Broken
from shoal.testing.simulation.world import World

__all__ = ["Broken", "World", "run"]


def run(seed: int, member: Callable[..., Member] = Member) -> set[str]:
    """The cases that a seed met. Raises Broken with the story of the seed if a law did not hold."""
    try:
        return World(seed, member).run()
    except Broken:
        return _again(seed, member)


def _again(seed: int, member: Callable[..., Member]) -> set[str]:
    world = World(seed, member, trace=True)
    try:
        return world.run()
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}\n" + "\n".join(world.trace or [])) from None
