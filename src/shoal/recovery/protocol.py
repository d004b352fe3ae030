"""Who takes part in a run, and when a step counts: the decisions, without clock, network or disk.

    view      epoch 7: workers 0 1 3, at least 801 steps committed          one record in the store, moved by swaps
    position  worker 1 stands at 800, with step 800's gradient in hand      one per member and epoch

A step runs in the group of one epoch. Everybody computes, merges, says "I have the merged gradient" and waits until
all have said so: then, and only then, the step is committed. If that meeting fails, somebody may have committed it and
somebody else may not have heard. So each survivor posts its position under the next epoch; the furthest position is
the floor, and one that stands a step behind it holds that step's whole gradient (it had said so) and commits it too.
A worker without state takes it from a member that stands at the floor, never from one behind. Only when no member is
left that has the state does a new term begin: everybody loads the newest checkpoint, and the floor starts from there.

`Member.decide` is the whole protocol: from what the store holds to the next thing to do. The runtime (elastic.py) and
the simulation (testing/simulation.py) run this very code; they differ in the world around it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import structs


class Who(msgspec.Struct, frozen=True, order=True):
    """One life of a worker: a process. Its number is a place in the run and is used again by whoever replaces it."""

    worker: int
    life: int = 0

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.life == 0 else f"worker {self.worker} (life {self.life})"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Who belongs to an epoch."""

    epoch: int
    members: tuple[Who, ...]  # by number; a member's rank is its place here
    term: int = 0  # rises when the state was lost with all who had it
    step: int = 0  # committed by somebody when this was written; never falls within a term
    reason: str = ""
    boundary: bool = False  # made between two steps by members that all knew of it: nobody has to be interrupted
    removed: dict[int, int] = {}  # worker -> its last life that was a member and is none any more: it never comes back

    def rank(self, who: Who) -> int:
        return self.members.index(who)


NOTHING = View(epoch=0, members=())


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member stands as it enters an epoch."""

    who: Who
    committed: int  # steps; -1: it has no state yet
    doubt: bool = (
        False  # it has said that it has the merged gradient of step `committed`, and does not know of the rest
    )
    clean: bool = True  # between two steps, or before the update of one: its state can be handed over


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a worker has read from the store, at one moment."""

    view: View
    alive: Collection[Who]  # whoever holds a lease: members, and newcomers that wait to be let in
    positions: Mapping[Who, Position] = field(default_factory=dict)  # of the view's epoch


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What the members of an epoch make of their positions. All come to the same."""

    view: View
    step: int  # the floor: everybody goes on from here
    donor: Who | None  # gives its state to those behind; None: nobody has it
    behind: tuple[Who, ...]  # have no state, or an older one
    finishing: tuple[Who, ...]  # hold the gradient of step - 1 and have yet to apply it
    begins: bool = False  # a term: nobody has any state, and all take it from the job or from the newest checkpoint


# What a member may be told to do.


@dataclass(frozen=True)
class Propose:
    """Swap the view for this one, if it is still the one that was read."""

    view: View


@dataclass(frozen=True)
class Post:
    """Tell the others of this epoch where this member stands."""

    epoch: int
    position: Position


@dataclass(frozen=True)
class Form:
    """Everybody's position is known: make the group of this epoch."""

    settlement: Settlement


@dataclass(frozen=True)
class Wait:
    """Nothing to do until the store holds something else."""


@dataclass(frozen=True)
class Leave:
    """The others went on without this worker."""

    view: View


Action = Propose | Post | Form | Wait | Leave


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that all members know of since the last step: they make it together, between two steps."""

    leaving: Collection[Who] = ()


@dataclass(kw_only=True)
class Member:
    """One worker's part. Facts come in by the methods below; `decide` says what to do about membership."""

    who: Who
    committed: int = -1
    epoch: int = 0  # of the group that it has formed, or was told to form last
    doubt: bool = False
    clean: bool = True
    broken: bool = True  # that group cannot be used: not made yet, or something in it failed

    # -- a step ---------------------------------------------------------------------------------------------------

    def says(self) -> None:
        """It has the merged gradient of step `committed` and is about to tell the others."""
        self.doubt = True

    def met(self) -> None:
        """All members of the epoch have said so: the step is committed."""
        assert self.doubt, "a step is committed by those who have its gradient"
        assert not self.broken, "nothing is committed in a group that has failed"
        self.committed += 1
        self.doubt = False

    def dropped(self) -> None:
        """Nothing of the step is kept: it is done again."""
        self.doubt = False

    # -- membership -------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """Something failed in the group."""
        self.broken = True

    def position(self) -> Position:
        return Position(who=self.who, committed=self.committed, doubt=self.doubt, clean=self.clean)

    def forms(self, settlement: Settlement) -> None:
        """It begins to make the group of the settlement's epoch. If that fails, another epoch is needed."""
        self.epoch, self.broken = settlement.view.epoch, True

    def formed(self, settlement: Settlement) -> None:
        """The group of the settlement's epoch stands. Those in doubt have committed; those behind have the state."""
        self.epoch, self.broken, self.doubt = settlement.view.epoch, False, False
        if not settlement.begins:
            self.committed = settlement.step

    def begun(self, step: int) -> None:
        """It has taken the state that a term begins with."""
        self.committed = step

    def decide(self, seen: Seen, gone: Mapping[Who, str], change: Change | None = None) -> Action:
        """The next thing to do. `gone`: whoever is known to be dead or silent, with how that is known."""
        view = seen.view
        if self.who not in view.members:
            return self._outside(seen, gone)
        missing = [who for who in view.members if who in gone and who != self.who]
        if self.committed < 0:  # one without the state must not drop those who have it for a connection that broke
            missing = [who for who in missing if who not in seen.alive]
        if missing:
            reason = "; ".join(f"{who} {gone[who]}" for who in missing)
            return Propose(self._next(view, [who for who in view.members if who not in missing], reason, out=missing))
        if view.epoch <= self.epoch:
            if self.broken:
                return Propose(self._next(view, view.members, "a connection failed"))
            return Wait() if change is None else self._at_boundary(seen, gone, change)
        if seen.positions.get(self.who) != self.position():
            return Post(view.epoch, self.position())
        if any(who not in seen.positions for who in view.members):
            return Wait()
        settlement = settle(view, seen.positions)
        if settlement.donor is None and settlement.behind:
            stay = [who for who in view.members if who not in settlement.behind]
            if stay:  # they have the state, but are in the middle of something: newcomers wait for the next boundary
                return Propose(self._next(view, stay, "newcomers wait for the end of the step"))
            return self._new_term(view, [who for who in view.members if seen.positions[who].committed < 0])
        return Form(settlement)

    def _outside(self, seen: Seen, gone: Mapping[Who, str]) -> Action:
        view = seen.view
        if self.committed >= 0 or not may_join(view, self.who):
            return Leave(view)
        if any(who.worker == self.who.worker and who.life > self.who.life for who in (*view.members, *seen.alive)):
            return Leave(view)  # replaced before it came in
        present = sorted(who for who in seen.alive if who not in gone and may_join(view, who))
        if any(who not in gone for who in view.members) or self.who != min(present, default=self.who):
            return Wait()
        # Nobody is left who could let anybody in: whoever waits begins a new epoch, from a checkpoint.
        return self._new_term(view, newest(present or [self.who]))

    def _at_boundary(self, seen: Seen, gone: Mapping[Who, str], change: Change) -> Action:
        view = seen.view
        staying = [who for who in view.members if who not in change.leaving]
        if self.who != staying[0]:
            return Wait()
        joining = newcomers(view, seen.alive, gone)
        leaving = [who for who in view.members if who in change.leaving]
        reason = "; ".join([*(f"{who} left" for who in leaving), *(f"{who} joined" for who in joining)])
        return Propose(self._next(view, sorted([*staying, *joining]), reason, out=leaving, boundary=True))

    def _new_term(self, view: View, members: Collection[Who]) -> Action:
        if self.who not in members:
            return Leave(view)  # what it has is behind what was committed
        reason = "nobody is left who has the state: back to the newest checkpoint"
        out = [who for who in view.members if who not in members]
        return Propose(structs.replace(self._next(view, members, reason, out=out), term=view.term + 1, step=0))

    def _next(
        self, view: View, members: Collection[Who], reason: str, out: Collection[Who] = (), boundary: bool = False
    ) -> View:
        removed = dict(view.removed)
        for who in out:
            removed[who.worker] = max(who.life, removed.get(who.worker, -1))
        return structs.replace(
            view,
            epoch=view.epoch + 1,
            members=tuple(members),
            step=max(view.step, self.committed),
            reason=reason,
            boundary=boundary,
            removed=removed,
        )


def may_join(view: View, who: Who) -> bool:
    return who.life > view.removed.get(who.worker, -1)


def newcomers(view: View, alive: Collection[Who], gone: Collection[Who] = ()) -> list[Who]:
    """Whoever waits to be let in."""
    present = {who.worker for who in view.members}
    waiting = [who for who in alive if who.worker not in present and who not in gone and may_join(view, who)]
    return newest(waiting)


def remove(view: View, gone: Mapping[Who, str]) -> View:
    """The next view, by somebody who is no member and knows who is dead: the driver. It may have no members at all."""
    removed = dict(view.removed)
    for who in gone:
        removed[who.worker] = max(who.life, removed.get(who.worker, -1))
    return structs.replace(
        view,
        epoch=view.epoch + 1,
        members=tuple(who for who in view.members if who not in gone),
        reason="; ".join(f"{who} {why}" for who, why in gone.items()),
        boundary=False,
        removed=removed,
    )


def newest(present: Collection[Who]) -> list[Who]:
    """Of several lives of a worker the last one."""
    last: dict[int, Who] = {}
    for who in sorted(present):
        last[who.worker] = who
    return sorted(last.values())


def settle(view: View, positions: Mapping[Who, Position]) -> Settlement:
    """Where the members of an epoch go on from. Pure: everyone has the same positions, so all come to the same."""
    placed = [positions[who] for who in view.members]
    floor = max(view.step, *(each.committed for each in placed))
    if floor == 0 and all(each.committed < 0 for each in placed):
        return Settlement(view=view, step=0, donor=None, behind=(), finishing=(), begins=True)
    finishing = tuple(each.who for each in placed if each.doubt and each.committed == floor - 1)
    donors = [each.who for each in placed if each.committed == floor and each.clean]
    behind = tuple(each.who for each in placed if each.committed < floor and each.who not in finishing)
    return Settlement(view=view, step=floor, donor=donors[0] if donors else None, behind=behind, finishing=finishing)
