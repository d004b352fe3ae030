"""What must hold in every world, checked as things happen. A law that is broken ends the seed."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.recovery.membership.protocol import MembershipObservation, MembershipView, RecoveryPlan, WorkerId
from shoal.testing.simulation.scenario import LANES

if TYPE_CHECKING:
    from shoal.testing.simulation.worker import SimWorker

START = 17  # the weights of a fresh model, in its first part

# What the seeds have to meet: a simulation that never comes to a case proves nothing about it.
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
    "an evaluation was interrupted",
    "an evicted worker woke up",
    "a stopped worker began a term that was over",
    "a donor was lost",
    "a donor died while it gave",
    "a state arrived changed",
    "a newcomer came in while a step was in doubt",
    "newcomers had to wait for the end of a step",
    "everything died",
    "a term began",
    "a term began from a checkpoint",
    "a term began from a fresh model",
    "the run began from a checkpoint",
    "a checkpoint did not verify",
    "a torn checkpoint was passed over",
    "a group without the store trained on in an old term",
    # Where the model is cut:
    "a part was lost, and those who had the others ended",
    "a term began after a part was lost",
    "a replica was broken, and its mates stayed",
    "two broken replicas made one",
    "a donor of another part than the first gave",
    "two donors gave in one epoch",
    "newcomers came into a view that nobody had begun in",
    "a member waited for those with a worthless state to end",
    "a checkpoint that lacked a part was passed over",
)
Gradient = tuple[int, ...]


class InvariantViolated(Exception):
    """A law was broken."""


def gradient_of(weights: int, lane: int, step: int) -> int:
    return hash((weights, step * LANES + lane))


def apply_step(weights: int, step: int, reduced: Gradient) -> int:
    """Weights after a step: a chain, in which a step that is missing, doubled or out of order shows for ever."""
    return hash((weights, step, reduced))


def reference_weights(steps: int, parts: int) -> list[tuple[int, ...]]:
    """Weights of every part after 0, 1, 2, … steps of a run without any fault. A part's update needs all of them."""
    found = [tuple(START + part for part in range(parts))]
    for step in range(steps):
        merged = tuple(gradient_of(weights, lane, step) for weights in found[-1] for lane in range(LANES))
        found.append(tuple(apply_step(weights, step, merged) for weights in found[-1]))
    return found


class SimInvariants:
    def __init__(self, steps: int, parts: int) -> None:
        self.parts = parts
        self.reference = reference_weights(steps, parts)
        self.cases: set[str] = set()  # cases that this seed has met: one that is never met is not proved
        self.settlements: dict[int, RecoveryPlan] = {}
        self.first_step: dict[int, int] = {}  # epoch -> the step that it begins with
        self.votes: defaultdict[tuple[int, int], set[WorkerId]] = defaultdict(
            set
        )  # (epoch, step) -> who has its gradient
        self.entered: dict[WorkerId, int] = {}  # the newest epoch that a worker has posted its position for
        self.late_commits: defaultdict[int, set[int]] = defaultdict(
            set
        )  # steps committed in an epoch after a newer one stood
        self.newest = 0  # epoch that stands
        self.committed = 0  # by anybody
        self.lost = False  # some part was, at some time

    def require(self, law: bool, text: str) -> None:
        if not law:
            raise InvariantViolated(text)

    def record_case(self, case: str) -> None:
        assert case in CASES
        self.cases.add(case)

    # -- 1, 4, 5: bits ------------------------------------------------------------------------------------------------

    def check_weights(self, worker: "SimWorker", doing: str) -> None:
        """Whatever a worker holds is what a run without faults holds after as many steps."""
        committed = worker.member.committed
        if worker.steps != committed:
            raise InvariantViolated(
                f"{worker.who} {doing} at {committed} steps, and its weights have seen {worker.steps}"
            )
        if worker.weights != self.reference[committed][worker.part]:
            raise InvariantViolated(f"{worker.who} {doing} at {committed} steps with other weights than the others")

    def check_begin(self, worker: "SimWorker") -> None:
        """A step begins: all members of the epoch begin with the same one, from the same weights."""
        self.check_weights(worker, "begins a step")
        epoch, step = worker.member.generation, worker.member.committed
        first = self.first_step.setdefault(epoch, step)
        ahead = first == step or all(self.votes[epoch, earlier] for earlier in range(first, step))
        self.require(step >= first and ahead, f"epoch {epoch} begins with {first}, for {worker.who} with {step}")

    def check_samples(self, worker: "SimWorker", lanes: list[tuple[int, int]]) -> None:
        """`lanes`: of which part, and which one."""
        every = [(part, lane) for part in range(self.parts) for lane in range(LANES)]
        self.require(sorted(lanes) == every, f"{worker.who} merged the lanes {lanes}")

    # -- 2: a step counts once everybody has its gradient, and not in an epoch that is over ---------------------------

    def check_commit(self, worker: "SimWorker", members: tuple[WorkerId, ...], restart: int) -> None:
        """Called after the update."""
        epoch, step = worker.member.generation, worker.member.committed - 1
        self.check_weights(worker, "commits")
        missing = [who for who in members if who not in self.votes[epoch, step]]
        self.require(not missing, f"{worker.who} commits step {step} in epoch {epoch}, and {missing} never said so")
        self.committed = max(self.committed, step + 1)
        if epoch < self.newest:
            self._too_late(worker, members, restart, step)

    def _too_late(self, worker: "SimWorker", members: tuple[WorkerId, ...], restart: int, step: int) -> None:
        """Only the step in doubt, for which all had voted; or a group that nobody of has heard of the newer term."""
        epoch = worker.member.generation
        self.late_commits[epoch].add(step)
        if any(self.entered.get(who, 0) > epoch for who in members):
            self.record_case("a commit came late")
            text = f"{worker.who} commits step {step} in epoch {epoch}, {self.newest} stands, and it is not the first"
            self.require(len(self.late_commits[epoch]) == 1, text)
            return
        self.record_case("a group without the store trained on in an old term")
        newer = self.settlements[self.newest].view
        text = f"{worker.who} commits step {step} in epoch {epoch}, {self.newest} stands without a new term"
        self.require(newer.restart > restart, text)

    # -- 3: the floor -------------------------------------------------------------------------------------------------

    def check_swap(
        self, old: MembershipView, new: MembershipView, holders: list[WorkerId], steady: list[WorkerId]
    ) -> None:
        """`holders`: members of the old view that have the state; `steady`: those that were never silent since it was
        written, and live."""
        self.require(new.generation == old.generation + 1, f"epoch {old.generation} is followed by {new.generation}")
        self.require(len({who.worker for who in new.members}) == len(new.members) > 0, f"members {new.members}")
        self.require(list(new.members) == sorted(new.members), f"members {new.members}")
        if new.restart == old.restart:
            self.require(new.step >= old.step, f"the floor falls from {old.step} to {new.step} in term {old.restart}")
        elif old.generation > 0:
            self.require(new.restart == old.restart + 1, f"term {old.restart} is followed by {new.restart}")
            self.require(not steady, f"term {new.restart} begins, and {steady} have the state and live")
            self.require(
                not self._uncovered(new.members), f"term {new.restart} begins without some part: {new.members}"
            )
            self.record_case("a term began")
            if self.lost:
                self.record_case("a term began after a part was lost")
        for part in range(self.parts):
            own = [who for who in steady if who.worker % self.parts == part]
            kept = not own or any(who in new.members for who in holders if who.worker % self.parts == part)
            self.require(
                kept, f"epoch {new.generation} is without {own}, who live and have the state, and nobody else has it"
            )

    def _uncovered(self, members: Iterable[WorkerId]) -> set[int]:
        """Parts that nobody of them has."""
        return set(range(self.parts)) - {who.worker % self.parts for who in members}

    def check_form(self, settlement: RecoveryPlan, members: "list[SimWorker]") -> None:
        """All make the same of an epoch, and nobody stands above its floor. `members`: as they are at this moment."""
        view = settlement.view
        known = self.settlements.setdefault(view.generation, settlement)
        self.require(known == settlement, f"two settlements of epoch {view.generation}: {known} and {settlement}")
        if known is not settlement:
            return
        above = [each.who for each in members if each.member.committed > settlement.step]
        self.require(
            not above, f"epoch {view.generation} goes on from {settlement.step}, and {above} have committed more"
        )
        self.require(settlement.step >= view.step, f"epoch {view.generation} goes on below its floor of {view.step}")
        having = (
            view.members if settlement.fresh_start else [who for who in view.members if who not in settlement.behind]
        )
        missing = self._uncovered(having)
        self.require(not missing, f"epoch {view.generation} goes on, and nobody has the parts {missing}")

    def check_stand(self, worker: "SimWorker", settlement: RecoveryPlan) -> None:
        if not settlement.fresh_start:
            self.check_weights(worker, f"enters epoch {settlement.view.generation}")
        self.newest = max(self.newest, settlement.view.generation)

    def check_donor(self, donor: "SimWorker", settlement: RecoveryPlan) -> None:
        self.check_weights(donor, "gives its state")
        text = f"{donor.who} gives its state of {donor.member.committed} steps, the floor is {settlement.step}"
        self.require(donor.member.committed == settlement.step and donor.member.can_donate, text)
        if donor.part > 0:
            self.record_case("a donor of another part than the first gave")
        if len([who for who in settlement.view.members if settlement.receivers_of(who)]) > 1:
            self.record_case("two donors gave in one epoch")

    def check_received(self, worker: "SimWorker", donor: WorkerId) -> None:
        text = f"{worker.who} has part {worker.part}, and takes the state of {donor}"
        self.require(donor.worker % self.parts == worker.part, text)

    def check_leave(
        self, worker: "SimWorker", seen: MembershipObservation, lost: tuple[int, ...], members: "list[SimWorker]"
    ) -> None:
        """A part is lost only when no member has it. `members`: of the view that was seen, if it still stands."""
        if not lost:
            return
        self.lost = True
        self.record_case("a part was lost, and those who had the others ended")
        if any(position.committed < 0 for position in seen.positions.values()):
            self.record_case("a member waited for those with a worthless state to end")
        floor = max(seen.view.step, *(position.committed for position in seen.positions.values()))
        having = [each for each in members if each.member.committed + each.member.in_doubt >= floor and not each.ended]
        wrong = [each.who for each in having if each.part in lost]
        self.require(not wrong, f"{worker.who} ends, since nobody has the parts {lost}, and {wrong} do")

    def check_restart(self, worker: "SimWorker", restart: int, step: int, verified: int | None) -> None:
        """A term begins from the newest checkpoint that verifies, and only without any from a fresh model."""
        text = f"{worker.who} begins term {restart} from step {step}, the newest checkpoint is {verified}"
        self.require(step == (verified or 0), text)
