"""The simulated driver: it sees workers end, starts replacements, and may remove lost workers from the view."""

from shoal.recovery.membership.protocol import MembershipView, WorkerId, model_shard_of, remove_dead
from shoal.testing.simulation.process import SimMember, SimProcess
from shoal.testing.simulation.scenario import BEAT_SECONDS, PATIENCE_SECONDS
from shoal.testing.simulation.worker import start_worker
from shoal.testing.simulation.world import SimWorld

MAX_STARTS = 8  # while faults last


def start_driver(world: SimWorld) -> None:
    world.drivers += 1
    driver = SimDriver(world, first=world.drivers == 1)
    world.driver = driver
    driver.tick()


class SimDriver(SimProcess):
    def __init__(self, world: SimWorld, first: bool) -> None:
        super().__init__()
        self.world, self.first = world, first
        self.known: set[WorkerId] = set()  # workers whose end it has seen
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

    def on_exit(self, who: WorkerId) -> None:
        self.known.add(who)

    def _poll(self) -> None:
        world, store = self.world, self.world.store
        view = store.view
        if view.generation == 0:
            if self.first and world.plan.first_view:
                members = tuple(WorkerId(number) for number in range(world.plan.workers))
                first = MembershipView(generation=1, members=members, reason="the run begins")
                world.swap(first, store.revision, "the driver")
            return
        lost = [who for who in view.members if who in self.known]
        if world.plan.removes and lost and len(lost) < len(view.members):
            world.invariants.record_case("the driver changed the view")
            world.swap(remove_dead(view, dict.fromkeys(lost, "ended")), store.revision, "the driver")

    def _start_replacements(self) -> None:
        """Starts replacements; at least one worker for a model shard that no living worker has."""
        world = self.world
        living = {worker.who.worker for worker in world.workers.values() if not worker.ended}
        lost = [who for who, worker in world.workers.items() if self._may_replace(worker)]
        numbers = sorted({who.worker for who in lost} - living)
        if not world.plan.replaces or (len(world.workers) >= MAX_STARTS and world.now < world.plan.heals):
            shards = world.plan.shards
            first = {model_shard_of(number, shards): number for number in reversed(numbers)}
            covered = {model_shard_of(number, shards) for number in living}
            numbers = sorted(number for shard, number in first.items() if shard not in covered)
        for number in numbers:
            world.after(world.random.uniform(0.05, 0.4), None, self._start_replacement, number)

    def _may_replace(self, worker: SimMember) -> bool:
        """A worker that left, or whose end this driver has not seen, is not replaced while others live."""
        if not worker.ended or worker.ended == "finished":
            return False
        return worker.who in self.known or self.world.now - self.since > PATIENCE_SECONDS

    def _start_replacement(self, number: int) -> None:
        world = self.world
        running = any(not w.ended and w.who.worker == number for w in world.workers.values())
        if not (self.ended or world.store.done or running):
            start_worker(world, number)
