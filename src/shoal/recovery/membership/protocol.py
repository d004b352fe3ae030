"""Who takes part in a run, and when a step counts: the decisions, without clock, network or disk.

    view      epoch 7: workers 0 1 3, at least 801 steps committed          one record in the store, moved by swaps
    position  worker 1 stands at 800, with step 800's gradient in hand      one per member and epoch

A step runs in the group of one epoch. Everybody computes, merges, says "I have the merged gradient" and waits until
all have said so: then, and only then, the step is committed. If that meeting fails, somebody may have committed it and
somebody else may not have heard. So each survivor posts its position under the next epoch; the furthest position is
the floor, and one that stands a step behind it holds that step's whole gradient (it had said so) and commits it too.
A worker without state takes it from a member that stands at the floor, never from one behind. Only when no member is
left that has the state does a new term begin: everybody loads the newest checkpoint, and the floor starts from there.

Where a model is cut, a member has one part of the state, by its number. Then all of that is said part by part: a donor
gives to members of its own part; a term begins with somebody for every part; and when nobody is left that has some part
the state is gone, however many have the others: they end, and a term begins.

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
    donors: tuple[Who | None, ...] = (None,)  # by part: gives its state to those behind; None: nobody can
    behind: tuple[Who, ...]  # have no state, or an older one
    finishing: tuple[Who, ...]  # hold the gradient of step - 1 and have yet to apply it
    begins: bool = False  # a term: nobody has any state, and all take it from the job or from the newest checkpoint
    lost: tuple[int, ...] = ()  # parts that nobody stands at the floor with, or comes to it: the state is gone

    @property
    def donor(self) -> Who | None:
        """Of the first part: of a model that is not cut, all there is."""
        return self.donors[0]

    def donor_of(self, who: Who) -> Who | None:
        return self.donors[part_of(who.worker, len(self.donors))]

    def takes_from(self, who: Who) -> Who | None:
        """Whose state a member takes; None for one that has it."""
        return self.donor_of(who) if who in self.behind else None

    def gives(self, who: Who) -> tuple[Who, ...]:
        """Whom a member hands its state to."""
        return tuple(other for other in self.behind if self.donor_of(other) == who)


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
    """The others went on without this worker; or a part of the state is lost, and with it the worth of its own."""

    view: View
    lost: tuple[int, ...] = ()  # parts


Action = Propose | Post | Form | Wait | Leave


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that all members know of since the last step: they make it together, between two steps."""

    leaving: Collection[Who] = ()


@dataclass(kw_only=True)
class Member:
    """One worker's part. Facts come in by the methods below; `decide` says what to do about membership."""

    who: Who
    parts: int = 1  # that the state is cut into; this member has one of them
    committed: int = -1
    epoch: int = 0  # of the group that it has formed, or was told to form last
    doubt: bool = False
    clean: bool = True
    broken: bool = True  # that group cannot be used: not made yet, or something in it failed
    others: tuple[Who, ...] = ()  # members of that group
    having: frozenset[Who] = frozenset()  # of all it has met, those that are known to have had the state

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
        self.having = frozenset(self.others)

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
        self.others = settlement.view.members
        behind = self.others if settlement.begins else settlement.behind
        self.having = frozenset(who for who in self.others if who not in behind)

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
        missing = self._missing(seen, gone)
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
        settlement = settle(view, seen.positions, self.parts)
        if settlement.lost:
            return self._without_a_part(seen, gone, settlement)
        waiting = [who for who in settlement.behind if settlement.donor_of(who) is None]
        if waiting:  # who has their part is in the middle of something: newcomers wait for the next boundary
            stay = [who for who in view.members if who not in waiting]
            return Propose(self._next(view, stay, "newcomers wait for the end of the step"))
        if settlement.begins and not covers(view.members, self.parts):
            return self._let_in(seen, gone)
        return Form(settlement)

    def _missing(self, seen: Seen, gone: Mapping[Who, str]) -> list[Who]:
        """Members to go on without. A connection that broke must not cost the state, or a part of it: whoever holds a
        lease is dropped only by those who have the state, and while somebody stays who has the same part."""
        missing = [who for who in seen.view.members if who in gone and who != self.who]
        if self.committed < 0:
            return [who for who in missing if who not in seen.alive]
        having = [who for who in seen.view.members if who in self.having and who not in missing]
        kept = {part_of(who.worker, self.parts) for who in (self.who, *having)}
        return [who for who in missing if who not in seen.alive or part_of(who.worker, self.parts) in kept]

    def _without_a_part(self, seen: Seen, gone: Mapping[Who, str], settlement: Settlement) -> Action:
        """The state is gone. Those who have some of it end; the others wait for that, and begin a term."""
        view = seen.view
        stateless = [who for who in view.members if seen.positions[who].committed < 0]
        if self.committed >= 0:
            return Leave(view, settlement.lost if self.parts > 1 else ())
        if any(who not in settlement.behind for who in view.members):
            return Wait()
        if not covers(stateless, self.parts):
            stateless = sorted([*stateless, *newcomers(view, seen.alive, gone)])
        return self._new_term(view, stateless)

    def _let_in(self, seen: Seen, gone: Mapping[Who, str]) -> Action:
        """Nobody has any state, and some part nobody at all: there is no boundary to wait for."""
        joining = newcomers(seen.view, seen.alive, gone)
        if not joining:
            return Wait()
        reason = "; ".join(f"{who} joined" for who in joining)
        return Propose(self._next(seen.view, sorted([*seen.view.members, *joining]), reason))

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
        """With somebody for every part."""
        if not covers(members, self.parts):
            return Wait()
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


def part_of(worker: int, parts: int) -> int:
    """Which part of the state a worker has; whoever takes its number later has the same."""
    return worker % parts


def covers(members: Collection[Who], parts: int) -> bool:
    """Whether there is somebody for every part."""
    return len({part_of(who.worker, parts) for who in members}) == parts


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


def settle(view: View, positions: Mapping[Who, Position], parts: int = 1) -> Settlement:
    """Where the members of an epoch go on from. Pure: everyone has the same positions, so all come to the same."""
    placed = [positions[who] for who in view.members]
    floor = max(view.step, *(each.committed for each in placed))
    if floor == 0 and all(each.committed < 0 for each in placed):
        return Settlement(view=view, step=0, donors=(None,) * parts, behind=(), finishing=(), begins=True)
    finishing = tuple(each.who for each in placed if each.doubt and each.committed == floor - 1)
    behind = tuple(each.who for each in placed if each.committed < floor and each.who not in finishing)
    held = {part_of(who.worker, parts) for who in view.members if who not in behind}
    donors: list[Who | None] = [None] * parts
    for each in reversed(placed):
        if each.committed == floor and each.clean:
            donors[part_of(each.who.worker, parts)] = each.who
    return Settlement(
        view=view,
        step=floor,
        donors=tuple(donors),
        behind=behind,
        finishing=finishing,
        lost=tuple(part for part in range(parts) if part not in held),
    )
