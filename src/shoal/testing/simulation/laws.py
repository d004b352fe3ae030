"""What must hold in every world, checked as things happen. A law that is broken ends the seed."""

from collections import defaultdict
from typing import TYPE_CHECKING

from shoal.recovery.protocol import Settlement, View, Who
from shoal.testing.simulation.plan import LANES

if TYPE_CHECKING:
    from shoal.testing.simulation.worker import Worker

START = 17  # the weights of a fresh model

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
)
Gradient = tuple[int, ...]


class Broken(Exception):
    """A law was broken."""


def gradient_of(weights: int, lane: int, step: int) -> int:
    return hash((weights, step * LANES + lane))


def applied(weights: int, step: int, merged: Gradient) -> int:
    """Weights after a step: a chain, in which a step that is missing, doubled or out of order shows for ever."""
    return hash((weights, step, merged))


def chain(steps: int) -> list[int]:
    """Weights after 0, 1, 2, … steps of a run without any fault."""
    found = [START]
    for step in range(steps):
        merged = tuple(gradient_of(found[-1], lane, step) for lane in range(LANES))
        found.append(applied(found[-1], step, merged))
    return found


class Laws:
    def __init__(self, steps: int) -> None:
        self.truth = chain(steps)
        self.met: set[str] = set()  # cases that this seed has met: one that is never met is not proved
        self.settlements: dict[int, Settlement] = {}
        self.first: dict[int, int] = {}  # epoch -> the step that it begins with
        self.said: defaultdict[tuple[int, int], set[Who]] = defaultdict(set)  # (epoch, step) -> who has its gradient
        self.entered: dict[Who, int] = {}  # the newest epoch that a worker has posted its position for
        self.late: defaultdict[int, set[int]] = defaultdict(set)  # steps committed in an epoch after a newer one stood
        self.newest = 0  # epoch that stands
        self.committed = 0  # by anybody

    def holds(self, law: bool, text: str) -> None:
        if not law:
            raise Broken(text)

    def meets(self, case: str) -> None:
        assert case in CASES
        self.met.add(case)

    # -- 1, 4, 5: bits ------------------------------------------------------------------------------------------------

    def equal(self, worker: "Worker", doing: str) -> None:
        """Whatever a worker holds is what a run without faults holds after as many steps."""
        committed = worker.member.committed
        if worker.steps != committed:
            raise Broken(f"{worker.who} {doing} at {committed} steps, and its weights have seen {worker.steps}")
        if worker.weights != self.truth[committed]:
            raise Broken(f"{worker.who} {doing} at {committed} steps with other weights than the others")

    def begins(self, worker: "Worker") -> None:
        """A step begins: all members of the epoch begin with the same one, from the same weights."""
        self.equal(worker, "begins a step")
        epoch, step = worker.member.epoch, worker.member.committed
        first = self.first.setdefault(epoch, step)
        ahead = first == step or all(self.said[epoch, earlier] for earlier in range(first, step))
        self.holds(step >= first and ahead, f"epoch {epoch} begins with {first}, for {worker.who} with {step}")

    def samples(self, worker: "Worker", lanes: list[int]) -> None:
        text = f"{worker.who} merged the lanes {lanes}"
        self.holds(sorted(lanes) == list(range(LANES)), text)

    # -- 2: a step counts once everybody has its gradient, and not in an epoch that is over ---------------------------

    def commits(self, worker: "Worker", members: tuple[Who, ...], term: int) -> None:
        """Called after the update."""
        epoch, step = worker.member.epoch, worker.member.committed - 1
        self.equal(worker, "commits")
        missing = [who for who in members if who not in self.said[epoch, step]]
        self.holds(not missing, f"{worker.who} commits step {step} in epoch {epoch}, and {missing} never said so")
        self.committed = max(self.committed, step + 1)
        if epoch < self.newest:
            self._too_late(worker, members, term, step)

    def _too_late(self, worker: "Worker", members: tuple[Who, ...], term: int, step: int) -> None:
        """Only the step in doubt, for which all had voted; or a group that nobody of has heard of the newer term."""
        epoch = worker.member.epoch
        self.late[epoch].add(step)
        if any(self.entered.get(who, 0) > epoch for who in members):
            self.meets("a commit came late")
            text = f"{worker.who} commits step {step} in epoch {epoch}, {self.newest} stands, and it is not the first"
            self.holds(len(self.late[epoch]) == 1, text)
            return
        self.meets("a group without the store trained on in an old term")
        newer = self.settlements[self.newest].view
        text = f"{worker.who} commits step {step} in epoch {epoch}, {self.newest} stands without a new term"
        self.holds(newer.term > term, text)

    # -- 3: the floor -------------------------------------------------------------------------------------------------

    def swaps(self, old: View, new: View, holders: list[Who], steady: list[Who]) -> None:
        """`holders`: members of the old view that have the state; `steady`: those that were never silent since it was
        written, and live."""
        self.holds(new.epoch == old.epoch + 1, f"epoch {old.epoch} is followed by {new.epoch}")
        self.holds(len({who.worker for who in new.members}) == len(new.members) > 0, f"members {new.members}")
        self.holds(list(new.members) == sorted(new.members), f"members {new.members}")
        if new.term == old.term:
            self.holds(new.step >= old.step, f"the floor falls from {old.step} to {new.step} in term {old.term}")
        elif old.epoch > 0:
            self.holds(new.term == old.term + 1, f"term {old.term} is followed by {new.term}")
            self.holds(not steady, f"term {new.term} begins, and {steady} have the state and live")
            self.meets("a term began")
        kept = not steady or any(who in new.members for who in holders)
        self.holds(kept, f"epoch {new.epoch} is without {steady}, who live and have the state, and nobody else has it")

    def forms(self, settlement: Settlement, members: "list[Worker]") -> None:
        """All make the same of an epoch, and nobody stands above its floor. `members`: as they are at this moment."""
        view = settlement.view
        known = self.settlements.setdefault(view.epoch, settlement)
        self.holds(known == settlement, f"two settlements of epoch {view.epoch}: {known} and {settlement}")
        if known is not settlement:
            return
        above = [each.who for each in members if each.member.committed > settlement.step]
        self.holds(not above, f"epoch {view.epoch} goes on from {settlement.step}, and {above} have committed more")
        self.holds(settlement.step >= view.step, f"epoch {view.epoch} goes on below its floor of {view.step}")

    def stands(self, worker: "Worker", settlement: Settlement) -> None:
        if not settlement.begins:
            self.equal(worker, f"enters epoch {settlement.view.epoch}")
        self.newest = max(self.newest, settlement.view.epoch)

    def gives(self, donor: "Worker", settlement: Settlement) -> None:
        self.equal(donor, "gives its state")
        text = f"{donor.who} gives its state of {donor.member.committed} steps, the floor is {settlement.step}"
        self.holds(donor.member.committed == settlement.step and donor.member.clean, text)

    def opens(self, worker: "Worker", term: int, step: int, verified: int | None) -> None:
        """A term begins from the newest checkpoint that verifies, and only without any from a fresh model."""
        text = f"{worker.who} begins term {term} from step {step}, the newest checkpoint is {verified}"
        self.holds(step == (verified or 0), text)
