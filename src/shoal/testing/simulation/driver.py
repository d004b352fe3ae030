"""The driver of the simulated run: it sees workers end, starts others, and may take the dead out of the view."""

from typing import TYPE_CHECKING

from shoal.recovery.membership.protocol import MembershipView, WorkerId, model_shard_of, remove_dead
from shoal.testing.simulation.scenario import BEAT_SECONDS, PATIENCE_SECONDS
from shoal.testing.simulation.worker import SimProcess, SimWorker

if TYPE_CHECKING:
    from shoal.testing.simulation.world import SimWorld

MAX_STARTS = 8  # while there are faults: afterwards somebody lives anyway


class SimDriver(SimProcess):
    def __init__(self, world: "SimWorld", first: bool) -> None:
        super().__init__(world)
        self.first = first
        self.known: set[WorkerId] = set()  # ends that it has seen itself
        self.since = world.now

    def tick(self) -> None:
        world = self.world
        if self.ended:
            return
        if world.store.up:
            self._poll()
        if not world.store.done and world.now - self.since > 0.3:
            self._start_replacements()
        world.after(BEAT_SECONDS, self, self.tick)

    def on_exit(self, worker: SimWorker) -> None:
        self.known.add(worker.who)

    def _poll(self) -> None:
        world, store = self.world, self.world.store
        view = store.view
        if view.generation == 0:
            if self.first and world.plan.first_view:
                members = tuple(WorkerId(number) for number in range(world.plan.workers))
                world.swap(
                    MembershipView(generation=1, members=members, reason="the run begins"), store.revision, "the driver"
                )
            return
        dead = [who for who in view.members if who in self.known]
        if world.plan.removes and dead and len(dead) < len(view.members):
            world.invariants.record_case("the driver changed the view")
            world.swap(remove_dead(view, dict.fromkeys(dead, "ended")), store.revision, "the driver")

    def _start_replacements(self) -> None:
        """Replacements; and at least one worker for a part that nobody is left for."""
        world = self.world
        living = {worker.who.worker for worker in world.workers.values() if not worker.ended}
        dead = [who for who, worker in world.workers.items() if self._may_replace(worker)]
        numbers = sorted({who.worker for who in dead} - living)
        if not world.plan.replaces or (len(world.workers) >= MAX_STARTS and world.now < world.plan.heals):
            parts = world.plan.parts
            first = {model_shard_of(number, parts): number for number in reversed(numbers)}
            covered = {model_shard_of(number, parts) for number in living}
            numbers = sorted(number for part, number in first.items() if part not in covered)
        for number in numbers:
            world.after(world.random.uniform(0.05, 0.4), None, self._start_replacement, number)

    def _may_replace(self, worker: SimWorker) -> bool:
        """A worker that left, or that was let go, is not replaced while others live."""
        if not worker.ended or worker.ended == "finished":
            return False
        return worker.who in self.known or self.world.now - self.since > PATIENCE_SECONDS

    def _start_replacement(self, number: int) -> None:
        world = self.world
        if (
            self.ended
            or world.store.done
            or any(not w.ended and w.who.worker == number for w in world.workers.values())
        ):
            return
        world.start(number)
