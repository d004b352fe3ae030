"""What must hold in every world, checked as things happen. A law that is broken ends the seed."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.recovery.membership.protocol import Seen, Settlement, View, Who
from shoal.testing.simulation.scenario import LANES

if TYPE_CHECKING:
    from shoal.testing.simulation.worker import Worker

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


class Broken(Exception):
    """A law was broken."""


def gradient_of(weights: int, lane: int, step: int) -> int:
    return hash((weights, step * LANES + lane))


def applied(weights: int, step: int, merged: Gradient) -> int:
    """Weights after a step: a chain, in which a step that is missing, doubled or out of order shows for ever."""
    return hash((weights, step, merged))


def chain(steps: int, parts: int) -> list[tuple[int, ...]]:
    """Weights of every part after 0, 1, 2, … steps of a run without any fault. A part's update needs all of them."""
    found = [tuple(START + part for part in range(parts))]
    for step in range(steps):
        merged = tuple(gradient_of(weights, lane, step) for weights in found[-1] for lane in range(LANES))
        found.append(tuple(applied(weights, step, merged) for weights in found[-1]))
    return found


class Laws:
    def __init__(self, steps: int, parts: int) -> None:
        self.parts = parts
        self.truth = chain(steps, parts)
        self.met: set[str] = set()  # cases that this seed has met: one that is never met is not proved
        self.settlements: dict[int, Settlement] = {}
        self.first: dict[int, int] = {}  # epoch -> the step that it begins with
        self.said: defaultdict[tuple[int, int], set[Who]] = defaultdict(set)  # (epoch, step) -> who has its gradient
        self.entered: dict[Who, int] = {}  # the newest epoch that a worker has posted its position for
        self.late: defaultdict[int, set[int]] = defaultdict(set)  # steps committed in an epoch after a newer one stood
        self.newest = 0  # epoch that stands
        self.committed = 0  # by anybody
        self.lost = False  # some part was, at some time

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
        if worker.weights != self.truth[committed][worker.part]:
            raise Broken(f"{worker.who} {doing} at {committed} steps with other weights than the others")

    def begins(self, worker: "Worker") -> None:
        """A step begins: all members of the epoch begin with the same one, from the same weights."""
        self.equal(worker, "begins a step")
        epoch, step = worker.member.epoch, worker.member.committed
        first = self.first.setdefault(epoch, step)
        ahead = first == step or all(self.said[epoch, earlier] for earlier in range(first, step))
        self.holds(step >= first and ahead, f"epoch {epoch} begins with {first}, for {worker.who} with {step}")

    def samples(self, worker: "Worker", lanes: list[tuple[int, int]]) -> None:
        """`lanes`: of which part, and which one."""
        every = [(part, lane) for part in range(self.parts) for lane in range(LANES)]
        self.holds(sorted(lanes) == every, f"{worker.who} merged the lanes {lanes}")

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
            self.holds(not self._uncovered(new.members), f"term {new.term} begins without some part: {new.members}")
            self.meets("a term began")
            if self.lost:
                self.meets("a term began after a part was lost")
        for part in range(self.parts):
            own = [who for who in steady if who.worker % self.parts == part]
            kept = not own or any(who in new.members for who in holders if who.worker % self.parts == part)
            self.holds(kept, f"epoch {new.epoch} is without {own}, who live and have the state, and nobody else has it")

    def _uncovered(self, members: Iterable[Who]) -> set[int]:
        """Parts that nobody of them has."""
        return set(range(self.parts)) - {who.worker % self.parts for who in members}

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
        having = view.members if settlement.begins else [who for who in view.members if who not in settlement.behind]
        missing = self._uncovered(having)
        self.holds(not missing, f"epoch {view.epoch} goes on, and nobody has the parts {missing}")

    def stands(self, worker: "Worker", settlement: Settlement) -> None:
        if not settlement.begins:
            self.equal(worker, f"enters epoch {settlement.view.epoch}")
        self.newest = max(self.newest, settlement.view.epoch)

    def gives(self, donor: "Worker", settlement: Settlement) -> None:
        self.equal(donor, "gives its state")
        text = f"{donor.who} gives its state of {donor.member.committed} steps, the floor is {settlement.step}"
        self.holds(donor.member.committed == settlement.step and donor.member.clean, text)
        if donor.part > 0:
            self.meets("a donor of another part than the first gave")
        if len([who for who in settlement.view.members if settlement.gives(who)]) > 1:
            self.meets("two donors gave in one epoch")

    def takes(self, worker: "Worker", donor: Who) -> None:
        text = f"{worker.who} has part {worker.part}, and takes the state of {donor}"
        self.holds(donor.worker % self.parts == worker.part, text)

    def leaves(self, worker: "Worker", seen: Seen, lost: tuple[int, ...], members: "list[Worker]") -> None:
        """A part is lost only when no member has it. `members`: of the view that was seen, if it still stands."""
        if not lost:
            return
        self.lost = True
        self.meets("a part was lost, and those who had the others ended")
        if any(position.committed < 0 for position in seen.positions.values()):
            self.meets("a member waited for those with a worthless state to end")
        floor = max(seen.view.step, *(position.committed for position in seen.positions.values()))
        having = [each for each in members if each.member.committed + each.member.doubt >= floor and not each.ended]
        wrong = [each.who for each in having if each.part in lost]
        self.holds(not wrong, f"{worker.who} ends, since nobody has the parts {lost}, and {wrong} do")

    def opens(self, worker: "Worker", term: int, step: int, verified: int | None) -> None:
        """A term begins from the newest checkpoint that verifies, and only without any from a fresh model."""
        text = f"{worker.who} begins term {term} from step {step}, the newest checkpoint is {verified}"
        self.holds(step == (verified or 0), text)
