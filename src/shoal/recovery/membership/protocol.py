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


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """One life of a worker: a process. Its number is a place in the run and is used again by whoever replaces it."""

    worker: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.incarnation == 0 else f"worker {self.worker} (life {self.incarnation})"


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """Who belongs to an epoch."""

    generation: int
    members: tuple[WorkerId, ...]  # by number; a member's rank is its place here
    restart: int = 0  # rises when the state was lost with all who had it
    step: int = 0  # committed by somebody when this was written; never falls within a term
    reason: str = ""
    boundary: bool = False  # made between two steps by members that all knew of it: nobody has to be interrupted
    removed: dict[int, int] = {}  # worker -> its last life that was a member and is none any more: it never comes back

    def rank(self, worker_id: WorkerId) -> int:
        return self.members.index(worker_id)


EMPTY_VIEW = MembershipView(generation=0, members=())


class MemberPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member stands as it enters an epoch."""

    worker_id: WorkerId
    committed: int  # steps; -1: it has no state yet
    in_doubt: bool = (
        False  # it has said that it has the merged gradient of step `committed`, and does not know of the rest
    )
    can_donate: bool = True  # between two steps, or before the update of one: its state can be handed over


@dataclass(frozen=True, kw_only=True)
class MembershipObservation:
    """What a worker has read from the store, at one moment."""

    view: MembershipView
    alive: Collection[WorkerId]  # whoever holds a lease: members, and newcomers that wait to be let in
    positions: Mapping[WorkerId, MemberPosition] = field(default_factory=dict)  # of the view's epoch


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """What the members of an epoch make of their positions. All come to the same."""

    view: MembershipView
    step: int  # the floor: everybody goes on from here
    donors: tuple[WorkerId | None, ...] = (None,)  # by part: gives its state to those behind; None: nobody can
    behind: tuple[WorkerId, ...]  # have no state, or an older one
    finishing: tuple[WorkerId, ...]  # hold the gradient of step - 1 and have yet to apply it
    fresh_start: bool = (
        False  # a term: nobody has any state, and all take it from the job or from the newest checkpoint
    )
    lost_shards: tuple[int, ...] = ()  # parts that nobody stands at the floor with, or comes to it: the state is gone

    @property
    def donor(self) -> WorkerId | None:
        """Of the first part: of a model that is not cut, all there is."""
        return self.donors[0]

    def donor_of(self, worker_id: WorkerId) -> WorkerId | None:
        return self.donors[model_shard_of(worker_id.worker, len(self.donors))]

    def receives_from(self, worker_id: WorkerId) -> WorkerId | None:
        """Whose state a member takes; None for one that has it."""
        return self.donor_of(worker_id) if worker_id in self.behind else None

    def receivers_of(self, worker_id: WorkerId) -> tuple[WorkerId, ...]:
        """Whom a member hands its state to."""
        return tuple(other for other in self.behind if self.donor_of(other) == worker_id)


# What a member may be told to do.


@dataclass(frozen=True)
class ProposeView:
    """Swap the view for this one, if it is still the one that was read."""

    view: MembershipView


@dataclass(frozen=True)
class PostPosition:
    """Tell the others of this epoch where this member stands."""

    generation: int
    position: MemberPosition


@dataclass(frozen=True)
class FormGroup:
    """Everybody's position is known: make the group of this epoch."""

    recovery: RecoveryPlan


@dataclass(frozen=True)
class WaitForStore:
    """Nothing to do until the store holds something else."""


@dataclass(frozen=True)
class LeaveRun:
    """The others went on without this worker; or a part of the state is lost, and with it the worth of its own."""

    view: MembershipView
    lost_shards: tuple[int, ...] = ()  # parts


MemberAction = ProposeView | PostPosition | FormGroup | WaitForStore | LeaveRun


@dataclass(frozen=True, kw_only=True)
class BoundaryChange:
    """A change that all members know of since the last step: they make it together, between two steps."""

    leaving: Collection[WorkerId] = ()


@dataclass(kw_only=True)
class MemberState:
    """One worker's part. Facts come in by the methods below; `decide` says what to do about membership."""

    worker_id: WorkerId
    model_shards: int = 1  # that the state is cut into; this member has one of them
    committed: int = -1
    generation: int = 0  # of the group that it has formed, or was told to form last
    in_doubt: bool = False
    can_donate: bool = True
    group_broken: bool = True  # that group cannot be used: not made yet, or something in it failed
    group_members: tuple[WorkerId, ...] = ()  # members of that group
    state_holders: frozenset[WorkerId] = frozenset()  # of all it has met, those that are known to have had the state

    # -- a step ---------------------------------------------------------------------------------------------------

    def vote(self) -> None:
        """It has the merged gradient of step `committed` and is about to tell the others."""
        self.in_doubt = True

    def commit(self) -> None:
        """All members of the epoch have said so: the step is committed."""
        assert self.in_doubt, "a step is committed by those who have its gradient"
        assert not self.group_broken, "nothing is committed in a group that has failed"
        self.committed += 1
        self.in_doubt = False
        self.state_holders = frozenset(self.group_members)

    def drop(self) -> None:
        """Nothing of the step is kept: it is done again."""
        self.in_doubt = False

    # -- membership -------------------------------------------------------------------------------------------------

    def group_failed(self) -> None:
        """Something failed in the group."""
        self.group_broken = True

    def position(self) -> MemberPosition:
        return MemberPosition(
            worker_id=self.worker_id, committed=self.committed, in_doubt=self.in_doubt, can_donate=self.can_donate
        )

    def group_forming(self, recovery: RecoveryPlan) -> None:
        """It begins to make the group of the settlement's epoch. If that fails, another epoch is needed."""
        self.generation, self.group_broken = recovery.view.generation, True
        self.group_members = recovery.view.members
        behind = self.group_members if recovery.fresh_start else recovery.behind
        self.state_holders = frozenset(who for who in self.group_members if who not in behind)

    def group_formed(self, recovery: RecoveryPlan) -> None:
        """The group of the settlement's epoch stands. Those in doubt have committed; those behind have the state."""
        self.generation, self.group_broken, self.in_doubt = recovery.view.generation, False, False
        if not recovery.fresh_start:
            self.committed = recovery.step

    def start_at(self, step: int) -> None:
        """It has taken the state that a term begins with."""
        self.committed = step

    def decide(
        self, observed: MembershipObservation, gone: Mapping[WorkerId, str], change: BoundaryChange | None = None
    ) -> MemberAction:
        """The next thing to do. `gone`: whoever is known to be dead or silent, with how that is known."""
        view = observed.view
        if self.worker_id not in view.members:
            return self._not_a_member(observed, gone)
        missing = self._missing(observed, gone)
        if missing:
            reason = "; ".join(f"{who} {gone[who]}" for who in missing)
            return ProposeView(
                self._next_view(view, [who for who in view.members if who not in missing], reason, out=missing)
            )
        if view.generation <= self.generation:
            if self.group_broken:
                return ProposeView(self._next_view(view, view.members, "a connection failed"))
            return WaitForStore() if change is None else self._at_boundary(observed, gone, change)
        if observed.positions.get(self.worker_id) != self.position():
            return PostPosition(view.generation, self.position())
        if any(who not in observed.positions for who in view.members):
            return WaitForStore()
        settlement = plan_recovery(view, observed.positions, self.model_shards)
        if settlement.lost_shards:
            return self._shard_lost(observed, gone, settlement)
        waiting = [who for who in settlement.behind if settlement.donor_of(who) is None]
        if waiting:  # who has their part is in the middle of something: newcomers wait for the next boundary
            stay = [who for who in view.members if who not in waiting]
            return ProposeView(self._next_view(view, stay, "newcomers wait for the end of the step"))
        if settlement.fresh_start and not covers_model(view.members, self.model_shards):
            return self._admit(observed, gone)
        return FormGroup(settlement)

    def _missing(self, observed: MembershipObservation, gone: Mapping[WorkerId, str]) -> list[WorkerId]:
        """Members to go on without. A connection that broke must not cost the state, or a part of it: whoever holds a
        lease is dropped only by those who have the state, and while somebody stays who has the same part."""
        missing = [who for who in observed.view.members if who in gone and who != self.worker_id]
        if self.committed < 0:
            return [who for who in missing if who not in observed.alive]
        having = [who for who in observed.view.members if who in self.state_holders and who not in missing]
        kept = {model_shard_of(who.worker, self.model_shards) for who in (self.worker_id, *having)}
        return [
            who for who in missing if who not in observed.alive or model_shard_of(who.worker, self.model_shards) in kept
        ]

    def _shard_lost(
        self, observed: MembershipObservation, gone: Mapping[WorkerId, str], recovery: RecoveryPlan
    ) -> MemberAction:
        """The state is gone. Those who have some of it end; the others wait for that, and begin a term."""
        view = observed.view
        stateless = [who for who in view.members if observed.positions[who].committed < 0]
        if self.committed >= 0:
            return LeaveRun(view, recovery.lost_shards if self.model_shards > 1 else ())
        if any(who not in recovery.behind for who in view.members):
            return WaitForStore()
        if not covers_model(stateless, self.model_shards):
            stateless = sorted([*stateless, *newcomers(view, observed.alive, gone)])
        return self._new_restart(view, stateless)

    def _admit(self, observed: MembershipObservation, gone: Mapping[WorkerId, str]) -> MemberAction:
        """Nobody has any state, and some part nobody at all: there is no boundary to wait for."""
        joining = newcomers(observed.view, observed.alive, gone)
        if not joining:
            return WaitForStore()
        reason = "; ".join(f"{who} joined" for who in joining)
        return ProposeView(self._next_view(observed.view, sorted([*observed.view.members, *joining]), reason))

    def _not_a_member(self, observed: MembershipObservation, gone: Mapping[WorkerId, str]) -> MemberAction:
        view = observed.view
        if self.committed >= 0 or not may_join(view, self.worker_id):
            return LeaveRun(view)
        if any(
            who.worker == self.worker_id.worker and who.incarnation > self.worker_id.incarnation
            for who in (*view.members, *observed.alive)
        ):
            return LeaveRun(view)  # replaced before it came in
        present = sorted(who for who in observed.alive if who not in gone and may_join(view, who))
        if any(who not in gone for who in view.members) or self.worker_id != min(present, default=self.worker_id):
            return WaitForStore()
        # Nobody is left who could let anybody in: whoever waits begins a new epoch, from a checkpoint.
        return self._new_restart(view, newest_incarnations(present or [self.worker_id]))

    def _at_boundary(
        self, observed: MembershipObservation, gone: Mapping[WorkerId, str], change: BoundaryChange
    ) -> MemberAction:
        view = observed.view
        staying = [who for who in view.members if who not in change.leaving]
        if self.worker_id != staying[0]:
            return WaitForStore()
        joining = newcomers(view, observed.alive, gone)
        leaving = [who for who in view.members if who in change.leaving]
        reason = "; ".join([*(f"{who} left" for who in leaving), *(f"{who} joined" for who in joining)])
        return ProposeView(self._next_view(view, sorted([*staying, *joining]), reason, out=leaving, boundary=True))

    def _new_restart(self, view: MembershipView, members: Collection[WorkerId]) -> MemberAction:
        """With somebody for every part."""
        if not covers_model(members, self.model_shards):
            return WaitForStore()
        reason = "nobody is left who has the state: back to the newest checkpoint"
        out = [who for who in view.members if who not in members]
        return ProposeView(
            structs.replace(self._next_view(view, members, reason, out=out), restart=view.restart + 1, step=0)
        )

    def _next_view(
        self,
        view: MembershipView,
        members: Collection[WorkerId],
        reason: str,
        out: Collection[WorkerId] = (),
        boundary: bool = False,
    ) -> MembershipView:
        removed = dict(view.removed)
        for who in out:
            removed[who.worker] = max(who.incarnation, removed.get(who.worker, -1))
        return structs.replace(
            view,
            generation=view.generation + 1,
            members=tuple(members),
            step=max(view.step, self.committed),
            reason=reason,
            boundary=boundary,
            removed=removed,
        )


def model_shard_of(worker: int, model_shards: int) -> int:
    """Which part of the state a worker has; whoever takes its number later has the same."""
    return worker % model_shards


def covers_model(members: Collection[WorkerId], model_shards: int) -> bool:
    """Whether there is somebody for every part."""
    return len({model_shard_of(who.worker, model_shards) for who in members}) == model_shards


def may_join(view: MembershipView, worker_id: WorkerId) -> bool:
    return worker_id.incarnation > view.removed.get(worker_id.worker, -1)


def newcomers(view: MembershipView, alive: Collection[WorkerId], gone: Collection[WorkerId] = ()) -> list[WorkerId]:
    """Whoever waits to be let in."""
    present = {who.worker for who in view.members}
    waiting = [who for who in alive if who.worker not in present and who not in gone and may_join(view, who)]
    return newest_incarnations(waiting)


def remove_dead(view: MembershipView, gone: Mapping[WorkerId, str]) -> MembershipView:
    """The next view, by somebody who is no member and knows who is dead: the driver. It may have no members at all."""
    removed = dict(view.removed)
    for who in gone:
        removed[who.worker] = max(who.incarnation, removed.get(who.worker, -1))
    return structs.replace(
        view,
        generation=view.generation + 1,
        members=tuple(who for who in view.members if who not in gone),
        reason="; ".join(f"{who} {why}" for who, why in gone.items()),
        boundary=False,
        removed=removed,
    )


def newest_incarnations(present: Collection[WorkerId]) -> list[WorkerId]:
    """Of several lives of a worker the last one."""
    last: dict[int, WorkerId] = {}
    for who in sorted(present):
        last[who.worker] = who
    return sorted(last.values())


def plan_recovery(
    view: MembershipView, positions: Mapping[WorkerId, MemberPosition], model_shards: int = 1
) -> RecoveryPlan:
    """Where the members of an epoch go on from. Pure: everyone has the same positions, so all come to the same."""
    placed = [positions[who] for who in view.members]
    floor = max(view.step, *(each.committed for each in placed))
    if floor == 0 and all(each.committed < 0 for each in placed):
        return RecoveryPlan(view=view, step=0, donors=(None,) * model_shards, behind=(), finishing=(), fresh_start=True)
    finishing = tuple(each.worker_id for each in placed if each.in_doubt and each.committed == floor - 1)
    behind = tuple(each.worker_id for each in placed if each.committed < floor and each.worker_id not in finishing)
    held = {model_shard_of(who.worker, model_shards) for who in view.members if who not in behind}
    donors: list[WorkerId | None] = [None] * model_shards
    for each in reversed(placed):
        if each.committed == floor and each.can_donate:
            donors[model_shard_of(each.worker_id.worker, model_shards)] = each.worker_id
    return RecoveryPlan(
        view=view,
        step=floor,
        donors=tuple(donors),
        behind=behind,
        finishing=finishing,
        lost_shards=tuple(part for part in range(model_shards) if part not in held),
    )
