"""Which workers are members of a run, and when a step counts: the decisions, without clock, network or disk.

    view      generation 7: workers 0 1 3, at least 801 steps committed     one record in the store, moved by swaps
    position  worker 1 is at 800, with step 800's gradient                  one per member and generation

A step runs in the group of one generation. Every member computes, reduces, votes "I have the reduced gradient" and
waits for all votes: then, and only then, the step is committed. A loop may have several backward passes for one batch:
the first commits the step, and each further one is voted for in the same way. If a vote fails, some members may have
committed the step and others may not know. So each survivor posts its position under the next generation. The highest
position is the floor. A member one step (or pass) below it that has voted holds that step's whole gradient, and commits
it, too. A worker without state receives it from a member at the floor, never from one below. When no member is left
that has the state, a restart begins: all members load the newest checkpoint, and the floor starts from there.

Of a sharded model a member has one shard of the state, by its number. Then all of this holds shard by shard: a donor
gives to members of its own shard; a restart needs a member for every shard; and when no member is left for some shard,
the state is lost: the members with other shards end, and a restart begins.

`MemberState.decide` is the whole protocol: from what the store holds to the next action. The runtime
(worker/elastic_membership.py) and the simulation (testing/simulation) run this same code.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import structs


class WorkerId(msgspec.Struct, frozen=True, order=True):
    """One incarnation of a worker: a process. A process that replaces it has the same number."""

    worker: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"worker {self.worker}" + (f" (incarnation {self.incarnation})" if self.incarnation else "")


class MembershipView(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a generation."""

    generation: int
    members: tuple[WorkerId, ...]  # by number; a member's rank is its index here
    restart: int = 0  # rises when all members with the state were lost
    step: int = 0  # committed by a member when this was written; never falls until a restart
    reason: str = ""
    boundary: bool = False  # made between two steps, and known to all members: no step is interrupted
    removed: dict[int, int] = {}  # worker -> its last incarnation that was removed, which never comes back

    def rank(self, worker_id: WorkerId) -> int:
        return self.members.index(worker_id)


EMPTY_VIEW = MembershipView(generation=0, members=())


class MemberPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member is as it enters a generation."""

    worker_id: WorkerId
    committed: int  # steps; -1: it has no state yet
    passes: int = 0  # further backward passes of the last of these steps that are committed, too
    in_doubt: bool = False  # it has voted for step `committed`, and does not know of the other votes
    further: bool = False  # if in doubt: it has voted for a further pass of the last step instead
    can_donate: bool = True  # its state can be sent: between two steps, or before the update of one

    @property
    def reached(self) -> tuple[int, int]:
        return self.committed, self.passes

    @property
    def voted_for(self) -> tuple[int, int] | None:
        """What it has reached if the others have voted, too."""
        if not self.in_doubt:
            return None
        return (self.committed, self.passes + 1) if self.further else (self.committed + 1, 0)


@dataclass(frozen=True, kw_only=True)
class MembershipObservation:
    """What a worker has read from the store at one moment."""

    view: MembershipView
    alive: Collection[WorkerId]  # holders of a lease: members, and newcomers that wait to join
    positions: Mapping[WorkerId, MemberPosition] = field(default_factory=dict)  # of the view's generation


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """What follows from the members' positions, the same for all members of a generation."""

    view: MembershipView
    step: int  # the floor: all members continue from here
    passes: int = 0  # further passes of step - 1 that belong to the floor
    donors: tuple[WorkerId | None, ...] = (None,)  # by shard: sends its state to members behind; None: no member can
    behind: tuple[WorkerId, ...]  # with no state, or an older one
    finishing: tuple[WorkerId, ...]  # with the gradient of step - 1 or its last pass, which they have yet to apply
    fresh_start: bool = False  # no member has state: all take it from the job or from the newest checkpoint
    lost_shards: tuple[int, ...] = ()  # shards that no member has or reaches at the floor: the state is lost

    @property
    def donor(self) -> WorkerId | None:
        """The donor of the first shard, which is the only one of a whole model."""
        return self.donors[0]

    def donor_of(self, worker_id: WorkerId) -> WorkerId | None:
        return self.donors[model_shard_of(worker_id.worker, len(self.donors))]

    def receives_from(self, worker_id: WorkerId) -> WorkerId | None:
        """The member whose state a member receives; None for one that has it."""
        return self.donor_of(worker_id) if worker_id in self.behind else None

    def receivers_of(self, worker_id: WorkerId) -> tuple[WorkerId, ...]:
        """The members that a member sends its state to."""
        return tuple(other for other in self.behind if self.donor_of(other) == worker_id)


# What `decide` may return.


@dataclass(frozen=True)
class ProposeView:
    """Swap the view for this one, if the store still has the one that was read."""

    view: MembershipView


@dataclass(frozen=True)
class PostPosition:
    """Post this member's position under this generation."""

    generation: int
    position: MemberPosition


@dataclass(frozen=True)
class FormGroup:
    """Form the group of this generation: all positions are known."""

    recovery: RecoveryPlan


@dataclass(frozen=True)
class WaitForStore:
    """Wait until the store changes."""


@dataclass(frozen=True)
class LeaveRun:
    """Leave: the others continue without this worker, or a shard of the state is lost and so its own is useless."""

    view: MembershipView
    lost_shards: tuple[int, ...] = ()


MemberAction = ProposeView | PostPosition | FormGroup | WaitForStore | LeaveRun


@dataclass(frozen=True, kw_only=True)
class BoundaryChange:
    """A change that all members have known since the last step, and make together between two steps."""

    leaving: Collection[WorkerId] = ()


@dataclass(kw_only=True)
class MemberState:
    """One worker's state in the protocol. Methods record facts; `decide` returns the next action."""

    worker_id: WorkerId
    model_shards: int = 1  # of the state; this member has one of them
    committed: int = -1
    passes: int = 0
    generation: int = 0  # of the group that it formed, or began to form last
    in_doubt: bool = False
    further: bool = False
    can_donate: bool = True
    group_broken: bool = True  # that group is not formed yet, or something in it failed
    group_members: tuple[WorkerId, ...] = ()
    state_holders: frozenset[WorkerId] = frozenset()  # members that are known to have had the state

    # -- a step ---------------------------------------------------------------------------------------------------

    def vote(self, further: bool = False) -> None:
        """It has the reduced gradient of step `committed`, or of a further pass of the last one, and sends its vote
        next."""
        self.in_doubt, self.further = True, further

    def commit(self) -> None:
        """All members of the generation have voted: the step, or the further pass, is committed."""
        assert self.in_doubt, "only a member that has voted commits a step"
        assert not self.group_broken, "nothing is committed in a group that has failed"
        self.committed, self.passes = (self.committed, self.passes + 1) if self.further else (self.committed + 1, 0)
        self.in_doubt = self.further = False
        self.state_holders = frozenset(self.group_members)

    def drop(self) -> None:
        """Forgets the step or pass, which is repeated."""
        self.in_doubt = self.further = False

    # -- membership -------------------------------------------------------------------------------------------------

    def group_failed(self) -> None:
        """Something failed in the group."""
        self.group_broken = True

    def position(self) -> MemberPosition:
        return MemberPosition(
            worker_id=self.worker_id,
            committed=self.committed,
            passes=self.passes,
            in_doubt=self.in_doubt,
            further=self.further,
            can_donate=self.can_donate,
        )

    def group_forming(self, recovery: RecoveryPlan) -> None:
        """It begins to form the group of the plan's generation. If that fails, another generation is needed."""
        self.generation, self.group_broken = recovery.view.generation, True
        self.group_members = recovery.view.members
        behind = self.group_members if recovery.fresh_start else recovery.behind
        self.state_holders = frozenset(who for who in self.group_members if who not in behind)

    def group_formed(self, recovery: RecoveryPlan) -> None:
        """The group is formed. Members in doubt have committed; members behind have the state."""
        self.generation, self.group_broken = recovery.view.generation, False
        self.in_doubt = self.further = False
        if not recovery.fresh_start:
            self.committed, self.passes = recovery.step, recovery.passes

    def start_at(self, step: int) -> None:
        """It has the state that a restart begins with."""
        self.committed, self.passes = step, 0

    def decide(
        self, observed: MembershipObservation, gone: Mapping[WorkerId, str], change: BoundaryChange | None = None
    ) -> MemberAction:
        """The next action. `gone`: workers that are known to be dead or silent, each with how that is known."""
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
        recovery = plan_recovery(view, observed.positions, self.model_shards)
        if recovery.lost_shards:
            return self._shard_lost(observed, gone, recovery)
        waiting = [who for who in recovery.behind if recovery.donor_of(who) is None]
        if waiting:  # their donors are within a step: newcomers wait for the next boundary
            stay = [who for who in view.members if who not in waiting]
            return ProposeView(self._next_view(view, stay, "newcomers wait for the end of the step"))
        if recovery.fresh_start and not covers_model(view.members, self.model_shards):
            return self._admit(observed, gone)
        return FormGroup(recovery)

    def _missing(self, observed: MembershipObservation, gone: Mapping[WorkerId, str]) -> list[WorkerId]:
        """Members to continue without. A broken connection must not cost the state or a shard of it: only members with
        the state drop a worker that holds a lease, and only while another member stays that has the same shard."""
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
        """The state is lost. Members with some of it end; the others wait for that, and begin a restart."""
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
        """Lets newcomers join at once: no member has state, and some shard has no member."""
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
            return LeaveRun(view)  # replaced before it joined
        present = sorted(who for who in observed.alive if who not in gone and may_join(view, who))
        if any(who not in gone for who in view.members) or self.worker_id != min(present, default=self.worker_id):
            return WaitForStore()
        # No member is left to let a newcomer join: the first that waits begins a restart, from a checkpoint.
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
        """A restart, which needs a member for every shard."""
        if not covers_model(members, self.model_shards):
            return WaitForStore()
        reason = "no worker has the state any more"
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
    """Which shard of the state a worker has; a replacement with its number has the same."""
    return worker % model_shards


def covers_model(members: Collection[WorkerId], model_shards: int) -> bool:
    """Whether there is a member for every shard."""
    return len({model_shard_of(who.worker, model_shards) for who in members}) == model_shards


def may_join(view: MembershipView, worker_id: WorkerId) -> bool:
    return worker_id.incarnation > view.removed.get(worker_id.worker, -1)


def newcomers(view: MembershipView, alive: Collection[WorkerId], gone: Collection[WorkerId] = ()) -> list[WorkerId]:
    """Workers that wait to join."""
    present = {who.worker for who in view.members}
    waiting = [who for who in alive if who.worker not in present and who not in gone and may_join(view, who)]
    return newest_incarnations(waiting)


def remove_dead(view: MembershipView, gone: Mapping[WorkerId, str]) -> MembershipView:
    """The next view, from the driver, which is no member and knows which workers are dead. It may have no members."""
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
    """The last incarnation of each worker."""
    last: dict[int, WorkerId] = {}
    for who in sorted(present):
        last[who.worker] = who
    return sorted(last.values())


def plan_recovery(
    view: MembershipView, positions: Mapping[WorkerId, MemberPosition], model_shards: int = 1
) -> RecoveryPlan:
    """Where the members of a generation continue. Pure: all members have the same positions, and the same result."""
    placed = [positions[who] for who in view.members]
    floor = max((view.step, 0), *(each.reached for each in placed))
    if floor == (0, 0) and all(each.committed < 0 for each in placed):
        return RecoveryPlan(view=view, step=0, donors=(None,) * model_shards, behind=(), finishing=(), fresh_start=True)
    finishing = tuple(each.worker_id for each in placed if each.reached < floor and each.voted_for == floor)
    behind = tuple(each.worker_id for each in placed if each.reached < floor and each.worker_id not in finishing)
    held = {model_shard_of(who.worker, model_shards) for who in view.members if who not in behind}
    donors: list[WorkerId | None] = [None] * model_shards
    for each in reversed(placed):
        if each.reached == floor and each.can_donate:
            donors[model_shard_of(each.worker_id.worker, model_shards)] = each.worker_id
    return RecoveryPlan(
        view=view,
        step=floor[0],
        passes=floor[1],
        donors=tuple(donors),
        behind=behind,
        finishing=finishing,
        lost_shards=tuple(shard for shard in range(model_shards) if shard not in held),
    )
