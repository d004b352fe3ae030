"""Invariants of every simulated world (docs/protocol.md), checked at each event. A violation ends the seed."""

from collections import defaultdict
from collections.abc import Iterable

from shoal.recovery.membership.protocol import (
    MembershipObservation,
    MembershipView,
    MemberState,
    RecoveryPlan,
    WorkerId,
)
from shoal.testing.simulation.process import SimMember
from shoal.testing.simulation.scenario import LANES

START = 17  # weights of a fresh model, in its first shard

# Cases that seeds must reach: a simulation that never reaches a case proves nothing about it.
CASES = (
    "a newcomer was let in",
    "a replacement came in",
    "a worker left",
    "only connections were made anew",
    "the driver changed the view",
    "the driver died",
    "the store was away",
    "a step was committed without the store",
    "a swap came too late",
    "the reply to a swap was lost",
    "a vote came late",
    "a commit came late",
    "a step in doubt was finished",
    "a step in doubt was done again",
    "a further pass in doubt was finished",
    "a further pass in doubt was done again",
    "an evaluation was interrupted",
    "an evicted worker woke up",
    "a paused worker began a restart that was over",
    "a donor was lost",
    "a donor died while it sent its state",
    "a state arrived changed",
    "a newcomer came in while a step was in doubt",
    "newcomers had to wait for the end of a step",
    "everything died",
    "a restart began",
    "a restart began from a checkpoint",
    "a restart began from a fresh model",
    "the run began from a checkpoint",
    "a checkpoint did not verify",
    "a torn checkpoint was passed over",
    "a group without the store trained on after a restart",
    # Where the model is cut:
    "a shard was lost, and the holders of the others ended",
    "a restart began after a shard was lost",
    "a replica was broken, and its mates stayed",
    "two broken replicas made one",
    "a donor of another shard than the first sent its state",
    "two donors sent their state in one generation",
    "newcomers joined a view in which no member had begun",
    "a member waited for those with a worthless state to end",
    "a checkpoint that lacked a shard was passed over",
)
Gradient = tuple[int, ...]


class InvariantViolated(Exception):
    pass


def furthest(member: MemberState) -> tuple[int, int]:
    """What a member has reached, or reaches with what it has voted for."""
    position = member.position()
    return position.voted_for or position.reached


def gradient_of(weights: int, lane: int, step: int) -> int:
    return hash((weights, step * LANES + lane))


def apply_step(weights: int, step: int, reduced: Gradient) -> int:
    """Weights after a step: a chain, in which a missing, repeated or misplaced step stays visible."""
    return hash((weights, step, reduced))


def reference_weights(steps: int, shards: int) -> list[tuple[int, ...]]:
    """Weights of every shard after 0, 1, 2, … steps without faults. The update of a shard needs all gradients."""
    found = [tuple(START + shard for shard in range(shards))]
    for step in range(steps):
        reduced = tuple(gradient_of(weights, lane, step) for weights in found[-1] for lane in range(LANES))
        found.append(tuple(apply_step(weights, step, reduced) for weights in found[-1]))
    return found


class SimInvariants:
    def __init__(self, steps: int, shards: int, passes: int = 1) -> None:
        """A batch has so many passes. What is counted here are rounds: passes of all steps."""
        self.shards, self.passes = shards, passes
        self.reference = reference_weights(steps * passes, shards)
        self.cases: set[str] = set()  # that this seed has reached
        self.recoveries: dict[int, RecoveryPlan] = {}
        self.first_round: dict[int, int] = {}  # of a generation
        self.votes: defaultdict[tuple[int, int], set[WorkerId]] = defaultdict(set)  # by (generation, round)
        self.entered: dict[WorkerId, int] = {}  # the newest generation for which a worker has posted its position
        self.late_commits: defaultdict[int, set[int]] = defaultdict(
            set
        )  # steps committed after a newer generation formed
        self.newest = 0  # generation that formed
        self.committed = 0  # by any worker
        self.lost = False  # some shard was lost at some time

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            raise InvariantViolated(text)

    def record_case(self, case: str) -> None:
        assert case in CASES
        self.cases.add(case)

    # -- invariants 1, 4, 5: bits -------------------------------------------------------------------------------------

    def check_weights(self, worker: "SimMember", doing: str) -> None:
        """A worker's weights are those of a run without faults after as many steps."""
        committed = worker.member.committed
        if -(-worker.rounds // self.passes) != committed:
            rounds = f"{worker.rounds} passes of {self.passes} a step"
            raise InvariantViolated(f"{worker.who} {doing} at {committed} steps, but its weights have seen {rounds}")
        if worker.weights != self.reference[worker.rounds][worker.shard]:
            raise InvariantViolated(f"{worker.who} {doing} at {committed} steps with other weights than the others")

    def check_begin(self, worker: "SimMember") -> None:
        """All members of a generation begin with the same step, from the same weights."""
        self.check_weights(worker, "begins a step")
        generation, step = worker.member.generation, worker.rounds
        first = self.first_round.setdefault(generation, step)
        ahead = first == step or all(self.votes[generation, earlier] for earlier in range(first, step))
        self.require(
            step >= first and ahead, f"generation {generation} begins with {first}, for {worker.who} with {step}"
        )

    def check_samples(self, worker: "SimMember", lanes: list[tuple[int, int]]) -> None:
        """`lanes`: pairs of shard and lane."""
        every = [(shard, lane) for shard in range(self.shards) for lane in range(LANES)]
        self.require(sorted(lanes) == every, f"{worker.who} reduced the lanes {lanes}")

    # -- invariant 2: a step commits once all members have its gradient, and not in an old generation -----------------

    def check_commit(self, worker: "SimMember", members: tuple[WorkerId, ...], restart: int) -> None:
        """Called after the update."""
        generation, step = worker.member.generation, worker.rounds - 1
        self.check_weights(worker, "commits")
        missing = [who for who in members if who not in self.votes[generation, step]]
        self.require(
            not missing, f"{worker.who} commits step {step} in generation {generation}, but {missing} did not vote"
        )
        self.committed = max(self.committed, step + 1)
        if generation < self.newest:
            self._too_late(worker, members, restart, step)

    def _too_late(self, worker: "SimMember", members: tuple[WorkerId, ...], restart: int, step: int) -> None:
        """Allows the step in doubt, for which all had voted; or a group whose members do not know the new restart."""
        generation = worker.member.generation
        self.late_commits[generation].add(step)
        if any(self.entered.get(who, 0) > generation for who in members):
            self.record_case("a commit came late")
            text = f"{worker.who} commits a second step {step} in generation {generation} after {self.newest} formed"
            self.require(len(self.late_commits[generation]) == 1, text)
            return
        self.record_case("a group without the store trained on after a restart")
        newer = self.recoveries[self.newest].view
        text = f"{worker.who} commits step {step} in generation {generation}; {self.newest} formed without a restart"
        self.require(newer.restart > restart, text)

    # -- invariant 3: the floor ---------------------------------------------------------------------------------------

    def check_swap(
        self, old: MembershipView, new: MembershipView, holders: list[WorkerId], steady: list[WorkerId]
    ) -> None:
        """`holders`: members of the old view that have the state; `steady`: those that live and kept their lease since
        it was written."""
        self.require(
            new.generation == old.generation + 1, f"generation {old.generation} is followed by {new.generation}"
        )
        self.require(len({who.worker for who in new.members}) == len(new.members) > 0, f"members {new.members}")
        self.require(list(new.members) == sorted(new.members), f"members {new.members}")
        if new.restart == old.restart:
            self.require(
                new.step >= old.step, f"the floor falls from {old.step} to {new.step} in restart {old.restart}"
            )
        elif old.generation > 0:
            self.require(new.restart == old.restart + 1, f"restart {old.restart} is followed by {new.restart}")
            self.require(not steady, f"restart {new.restart} begins, but {steady} have the state and live")
            complete = not self._uncovered(new.members)
            self.require(complete, f"restart {new.restart} begins without some shard: {new.members}")
            self.record_case("a restart began")
            if self.lost:
                self.record_case("a restart began after a shard was lost")
        for shard in range(self.shards):
            own = [who for who in steady if who.worker % self.shards == shard]
            kept = not own or any(who in new.members for who in holders if who.worker % self.shards == shard)
            self.require(kept, f"generation {new.generation} lacks {own}, the only ones who live and have the state")

    def _uncovered(self, members: Iterable[WorkerId]) -> set[int]:
        """Shards that none of the members holds."""
        return set(range(self.shards)) - {who.worker % self.shards for who in members}

    def check_form(self, recovery: RecoveryPlan, members: "list[SimMember]") -> None:
        """All members derive the same recovery, and none is above its floor. `members`: their current states."""
        view = recovery.view
        known = self.recoveries.setdefault(view.generation, recovery)
        self.require(known == recovery, f"two recoveries of generation {view.generation}: {known} and {recovery}")
        if known is not recovery:
            return
        floor = recovery.step, recovery.passes
        above = [each.who for each in members if each.member.position().reached > floor]
        text = f"generation {view.generation} goes on from {recovery.step}, but {above} have committed more"
        self.require(not above, text)
        self.require(recovery.step >= view.step, f"generation {view.generation} goes on below its floor of {view.step}")
        having = view.members if recovery.fresh_start else [who for who in view.members if who not in recovery.behind]
        missing = self._uncovered(having)
        self.require(not missing, f"generation {view.generation} goes on, but no member has the shards {missing}")

    def check_stand(self, worker: "SimMember", recovery: RecoveryPlan) -> None:
        if not recovery.fresh_start:
            self.check_weights(worker, f"enters generation {recovery.view.generation}")
        self.newest = max(self.newest, recovery.view.generation)

    def check_donor(self, donor: "SimMember", recovery: RecoveryPlan) -> None:
        self.check_weights(donor, "sends its state")
        text = f"{donor.who} sends its state of {donor.member.committed} steps, but the floor is {recovery.step}"
        at_floor = donor.member.position().reached == (recovery.step, recovery.passes)
        self.require(at_floor and donor.rounds % self.passes == 0 and donor.member.can_donate, text)
        if donor.shard > 0:
            self.record_case("a donor of another shard than the first sent its state")
        if len([who for who in recovery.view.members if recovery.receivers_of(who)]) > 1:
            self.record_case("two donors sent their state in one generation")

    def check_received(self, worker: "SimMember", donor: WorkerId) -> None:
        text = f"{worker.who} has shard {worker.shard}, but receives the state of {donor}"
        self.require(donor.worker % self.shards == worker.shard, text)

    def check_leave(
        self, worker: "SimMember", seen: MembershipObservation, lost: tuple[int, ...], members: "list[SimMember]"
    ) -> None:
        """A shard is lost only when no member has it. `members`: of the view that was read, if it is still current."""
        if not lost:
            return
        self.lost = True
        self.record_case("a shard was lost, and the holders of the others ended")
        if any(position.committed < 0 for position in seen.positions.values()):
            self.record_case("a member waited for those with a worthless state to end")
        floor = max((seen.view.step, 0), *(position.reached for position in seen.positions.values()))
        having = [each for each in members if furthest(each.member) >= floor and not each.ended]
        wrong = [each.who for each in having if each.shard in lost]
        self.require(not wrong, f"{worker.who} ends because no member has the shards {lost}, but {wrong} do")

    def check_restart(self, worker: "SimMember", restart: int, step: int, verified: int | None) -> None:
        """A restart begins from the newest checkpoint that verifies, and from a fresh model only if there is none."""
        text = f"{worker.who} begins restart {restart} from step {step}, but the newest checkpoint is {verified}"
        self.require(step == (verified or 0), text)
