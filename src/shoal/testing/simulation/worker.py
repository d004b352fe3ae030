"""A simulated worker: the real `MemberState`, in a loop like the runtime's (elastic_membership.py, trainer.py)."""

from collections.abc import Generator

from shoal.recovery.membership.protocol import (
    BoundaryChange,
    FormGroup,
    LeaveRun,
    MembershipView,
    PostPosition,
    ProposeView,
    RecoveryPlan,
    WorkerId,
    covers_model,
    model_shard_of,
)
from shoal.testing.simulation.invariants import Gradient, apply_step, gradient_of
from shoal.testing.simulation.process import VOID
from shoal.testing.simulation.scenario import COLLECTIVE_SECONDS, FORMING_SECONDS, LANES
from shoal.testing.simulation.store import SimReading
from shoal.testing.simulation.worker_threads import SimGroupFailed, SimStoreAway, SimThreads, Waits
from shoal.testing.simulation.world import SimWorld

CHANGE, LEAVE = 1, 2


def start_worker(world: SimWorld, number: int) -> None:
    incarnation = max((who.incarnation + 1 for who in world.workers if who.worker == number), default=0)
    worker = SimWorker(world, WorkerId(number, incarnation), host=number % world.plan.hosts)
    world.workers[worker.who] = worker
    world.log("%s starts", worker.who)
    worker.start()


class SimWorker(SimThreads):
    kept_gradient: Gradient = ()  # of the step in doubt

    def _run(self) -> Waits:
        change: BoundaryChange | None = None
        while not self.ended:
            try:
                yield from self._enter(change)
                if not self.ended:
                    change = yield from self._train()
            except SimGroupFailed as lost:
                change = None
                self._fails(str(lost))

    def _fails(self, why: str) -> None:
        self.world.log("%s: %s", self.who, why)
        self.member.group_failed()
        self.world.close_connections(self, self.member.generation)

    def _enter(self, change: BoundaryChange | None) -> Waits:
        """Follows the protocol's decisions until a group is formed."""
        world = self.world
        while not self.ended:
            if change is not None and (self.alarm or self._cut_off()):
                self._fails(f"at the boundary: {self.alarm or 'cut off'}")
                change = None
            try:
                reading: SimReading = yield from self._request_store("read")
                if reading.done and self._unneeded(reading.seen.view):
                    world.end(self, "is not needed any more")
                    return
                action = self.member.decide(reading.seen, self._gone(reading), change)
                match action:
                    case ProposeView(view):
                        world.log(
                            "%s proposes generation %d %s: %s", self.who, view.generation, view.members, view.reason
                        )
                        yield from self._fault_point("propose")
                        yield from self._request_store("swap", view, reading.revision)
                    case PostPosition(generation, position):
                        world.invariants.entered[self.who] = max(generation, world.invariants.entered.get(self.who, 0))
                        yield from self._fault_point("post")
                        yield from self._request_store("post", generation, position)
                    case FormGroup(recovery):
                        yield from self._form(recovery)
                        return
                    case LeaveRun(_, lost):
                        members = reading.seen.view.members if world.store.view == reading.seen.view else ()
                        world.invariants.check_leave(self, reading.seen, lost, [world.workers[who] for who in members])
                        if lost:  # it finishes its checkpoint
                            yield world.random.uniform(0.0, 0.5)
                        world.end(self, "was left behind")
                        return
                    case _:
                        self.watching = True
                        yield self._until(0.2)
            except SimStoreAway:
                yield 0.05

    def _unneeded(self, view: MembershipView) -> bool:
        """Whether it is not a member; or a member of a group that is too small to begin and will not grow."""
        return self.who not in view.members or (
            self.member.committed < 0 and not covers_model(view.members, self.shards)
        )

    def _cut_off(self) -> bool:
        return any((self.member.generation, other) in self.closed for other in self._others())

    def _form(self, recovery: RecoveryPlan) -> Waits:
        world, member, view = self.world, self.member, recovery.view
        world.on_group_formed(self, recovery)
        member.group_forming(recovery)
        self.view, self.alarm = view, ""
        self.inbox = {key: received for key, received in self.inbox.items() if key[0] >= view.generation}
        self.closed = {each for each in self.closed if each[0] >= view.generation}
        yield from self._gather("hello", 0, None, FORMING_SECONDS)
        if self.who in recovery.behind:
            yield from self._receive_state(recovery)
        elif self.who in recovery.finishing:
            self._apply()
            member.can_donate = self.rounds % world.plan.passes == 0
            world.invariants.record_case(f"a {'further pass' if member.further else 'step'} in doubt was finished")
        elif member.in_doubt:
            world.invariants.record_case(f"a {'further pass' if member.further else 'step'} in doubt was done again")
        member.group_formed(recovery)
        world.log("%s joins generation %d at step %d", self.who, view.generation, recovery.step)
        world.invariants.check_stand(self, recovery)
        if recovery.fresh_start:
            yield from self._begin(view)
        elif recovery.receivers_of(self.who):
            world.invariants.check_donor(self, recovery)
            for other in recovery.receivers_of(self.who):
                world.send_state(self, other, view.generation, (self.weights, self.rounds))
                yield from self._fault_point("state")

    def _receive_state(self, recovery: RecoveryPlan) -> Waits:
        """Overwrites the state with the donor's."""
        donor = recovery.receives_from(self.who)
        assert donor is not None
        self.world.invariants.check_received(self, donor)
        self.weights = VOID
        yield from self._fault_point("take")
        try:
            received = yield from self._await((recovery.view.generation, "state", 0), [donor], COLLECTIVE_SECONDS)
        except SimGroupFailed:
            self.world.invariants.record_case("a donor was lost")
            raise
        weights, rounds = received[donor]
        if weights == VOID:
            self.world.invariants.record_case("a state arrived changed")
            raise SimGroupFailed("the state arrived changed")
        self.weights, self.rounds, self.member.can_donate = weights, rounds, True

    def _begin(self, view: MembershipView) -> Waits:
        """The leader chooses a checkpoint; all load it."""
        world, leader, generation = self.world, view.members[0], view.generation
        if self.who == leader:
            step = world.disk.newest_checkpoint(self, view.restart)
            for other in self._others():
                yield from self._fault_point("begin", other)
                world.send(self, other, (generation, "begin", 0), step)
        else:
            step = (yield from self._await((generation, "begin", 0), [leader], COLLECTIVE_SECONDS))[leader]
        yield world.random.uniform(0.01, 0.2)
        self.rounds = step * world.plan.passes
        self.weights, self.member.can_donate = world.invariants.reference[self.rounds][self.shard], True
        self.member.start_at(step)
        yield from self._fault_point("begun")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _train(self) -> Generator[float, None, BoundaryChange | None]:
        """Trains until the run is over, or the members change between two steps."""
        world, member = self.world, self.member
        if not member.can_donate and self.rounds % world.plan.passes == 0:
            yield from self._evaluate_alone()
        while self.rounds < world.plan.last * world.plan.passes:
            asks = yield from self._step()
            generation = member.generation
            yield from self._after_step()
            leaving = [who for who, asked in asks.items() if asked & LEAVE]
            if not covers_model([who for who in asks if who not in leaving], self.shards):
                leaving = []
            if self.who in leaving:
                yield from self._leave()
                return None
            if any(asks.values()) and member.generation == generation and member.committed < world.plan.last:
                yield from self._fault_point("boundary")
                return BoundaryChange(leaving=leaving)
        world.invariants.check_weights(self, "finishes")
        while not self.ended:
            try:
                yield from self._request_store("done")
                world.end(self, "finished")
            except SimStoreAway:
                yield 0.1
        return None

    def _step(self) -> Generator[float, None, dict[WorkerId, int]]:
        """Commits the passes of a step that are left. Returns every member's requests."""
        while True:
            self.member.can_donate = self.rounds % self.world.plan.passes == 0
            asks = yield from self._pass()
            if self.rounds % self.world.plan.passes == 0:
                self.member.can_donate = True
                return asks

    def _pass(self) -> Generator[float, None, dict[WorkerId, int]]:
        """Commits one pass: the first one of a step commits the step."""
        world, member, view = self.world, self.member, self.view
        assert view is not None
        step = self.rounds
        world.invariants.check_begin(self)
        yield world.random.uniform(0.03, 0.15)
        mine = {(self.shard, lane): gradient_of(self.weights, lane, step) for lane in self._lanes(view)}
        waiting = any(who not in view.members for who in self.newcomers)
        asks = (CHANGE if waiting else 0) | (LEAVE if self.leaving else 0)
        offers = dict((yield from self._gather("offer", step, (asks, mine), COLLECTIVE_SECONDS)))
        offers[self.who] = asks, mine
        lanes = {lane: gradient for _, some in offers.values() for lane, gradient in some.items()}
        world.invariants.check_samples(self, [lane for _, some in offers.values() for lane in some])
        self.kept_gradient = tuple(lanes[lane] for lane in sorted(lanes))
        member.vote(further=step % world.plan.passes > 0)
        world.invariants.votes[member.generation, step].add(self.who)
        yield from self._gather("vote", step, None, COLLECTIVE_SECONDS)
        member.commit()
        self._apply()
        world.on_commit(self, view)
        yield from self._fault_point("committed")
        return {who: asked for who, (asked, _) in sorted(offers.items())}

    def _lanes(self, view: MembershipView) -> range:
        """Lanes are assigned to replicas of one member for each shard. Other members have none, and follow."""
        shards, laws = range(self.shards), self.world.invariants
        by_shard = [
            [who for who in view.members if model_shard_of(who.worker, self.shards) == shard] for shard in shards
        ]
        replicas = min(map(len, by_shard))
        if len(view.members) > replicas * self.shards:
            laws.record_case("a replica was broken, and its mates stayed")
        if any(len({own[number].worker // self.shards for own in by_shard}) > 1 for number in range(replicas)):
            laws.record_case("two broken replicas made one")
        own = by_shard[self.shard].index(self.who)
        return range(own, LANES, replicas) if own < replicas else range(0)

    def _apply(self) -> None:
        self.weights = apply_step(self.weights, self.rounds, self.kept_gradient)
        self.rounds += 1

    def _after_step(self) -> Waits:
        """Saves and evaluates, as the user's loop does after a step."""
        world, step, plan = self.world, self.member.committed, self.world.plan
        if plan.saves and step % plan.saves == 0 and self._writes_checkpoint():
            world.disk.save(self)
            yield from self._fault_point("save")
        if plan.evaluates and step % plan.evaluates == 0:
            self.member.can_donate = False
            yield world.random.uniform(0.01, 0.05)
            yield from self._gather("evaluation", step, None, COLLECTIVE_SECONDS)
            self.member.can_donate = True

    def _writes_checkpoint(self) -> bool:
        """The first member of each shard writes that shard of a checkpoint."""
        members = () if self.view is None else self.view.members
        return next((who for who in members if model_shard_of(who.worker, self.shards) == self.shard), None) == self.who

    def _evaluate_alone(self) -> Waits:
        self.world.invariants.record_case("an evaluation was interrupted")
        yield self.world.random.uniform(0.01, 0.1)
        self.member.can_donate = True

    def _leave(self) -> Waits:
        """Waits until the others have gone on without it."""
        world = self.world
        until = world.now + 1.0
        while world.now < until:
            try:
                reading: SimReading = yield from self._request_store("read")
                if self.who not in reading.seen.view.members:
                    break
                self.watching = True
                yield self._until(0.2)
            except SimStoreAway:
                break
        world.invariants.record_case("a worker left")
        world.end(self, "left")
