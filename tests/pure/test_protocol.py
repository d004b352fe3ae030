"""The protocol in simulated worlds: no law is broken, every hard case is met, and a broken protocol is found out.

`make simulate` runs many more seeds. One that breaks a law fails with its story (docs/protocol.md: how to replay it).
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from shoal.recovery.membership import protocol
from shoal.recovery.membership.protocol import (
    BoundaryChange,
    FormGroup,
    LeaveRun,
    MemberAction,
    MemberPosition,
    MembershipObservation,
    MembershipView,
    MemberState,
    ProposeView,
    RecoveryPlan,
    WaitForStore,
    WorkerId,
    covers_model,
    plan_recovery,
)
from shoal.testing.simulation import InvariantViolated, run
from shoal.testing.simulation.process import Key
from shoal.testing.simulation.store import SimStore
from shoal.testing.simulation.worker import SimWorker

A, B, C, D = WorkerId(0), WorkerId(1), WorkerId(2), WorkerId(3)


def at(who: WorkerId, committed: int, doubt: bool = False, clean: bool = True) -> MemberPosition:
    return MemberPosition(worker_id=who, committed=committed, in_doubt=doubt, can_donate=clean)


def settled(*positions: MemberPosition, step: int = 0, parts: int = 1) -> RecoveryPlan:
    view = MembershipView(generation=2, members=tuple(each.worker_id for each in positions), step=step)
    return plan_recovery(view, {each.worker_id: each for each in positions}, parts)


# -- a protocol that is broken on purpose -----------------------------------------------------------------------------

Settle = Callable[[MembershipView, Mapping[WorkerId, MemberPosition], int], RecoveryPlan]


def any_donor(view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int) -> RecoveryPlan:
    """The first member gives its state, whatever it has: a fresh replacement wipes the model."""
    found, first = plan_recovery(view, positions, parts), view.members[0]
    if found.donor is None or not found.behind:
        return found
    behind = tuple(who for who in view.members if who != first)
    return replace(found, donors=(first,), step=max(positions[first].committed, 0), behind=behind, finishing=())


def doubt_is_forgotten(view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int) -> RecoveryPlan:
    return replace(plan_recovery(view, positions, parts), finishing=())


def doubt_is_done_again(view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int) -> RecoveryPlan:
    found = plan_recovery(view, positions, parts)
    return replace(found, step=found.step - 1, finishing=()) if found.finishing else found


def a_lost_part_is_ignored(
    view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int
) -> RecoveryPlan:
    return replace(plan_recovery(view, positions, parts), lost_shards=())


def one_donor_for_all(view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int) -> RecoveryPlan:
    """Whoever has any part gives it to those behind, whatever part they should have."""
    found = plan_recovery(view, positions, parts)
    first = next((who for who in found.donors if who is not None), None)
    return replace(found, donors=(first,) * parts, lost_shards=() if first is not None else found.lost_shards)


def a_part_is_lost_with_whoever_is_in_doubt(
    view: MembershipView, positions: Mapping[WorkerId, MemberPosition], parts: int
) -> RecoveryPlan:
    """One that has yet to apply a step is taken for one that has nothing."""
    found = plan_recovery(view, positions, parts)
    if found.fresh_start:
        return found
    held = {who.worker % parts for who in view.members if positions[who].committed == found.step}
    return replace(found, lost_shards=tuple(part for part in range(parts) if part not in held))


class CountsNoPasses(MemberState):
    """Which of several passes of a step are committed is not in its position."""

    def position(self) -> MemberPosition:
        return structs.replace(super().position(), passes=0, in_doubt=self.in_doubt and not self.further)


class CommitsAtTheBeginning(MemberState):
    """A term begins with step 0, whatever the checkpoint says."""

    def group_formed(self, settlement: RecoveryPlan) -> None:
        super().group_formed(settlement)
        self.committed = settlement.step


class ForgetsTheFloor(MemberState):
    def _next_view(
        self, view: MembershipView, members: Collection[WorkerId], reason: str, **rest: Any
    ) -> MembershipView:
        return structs.replace(super()._next_view(view, members, reason, **rest), step=0)


class EndsATermEarly(MemberState):
    """One lost member is enough for somebody outside to begin a new term."""

    def _not_a_member(self, seen: MembershipObservation, gone: Mapping[WorkerId, str]) -> MemberAction:
        return super()._not_a_member(seen, dict.fromkeys(seen.view.members, "is gone") if gone else gone)


class KeepsTheTerm(MemberState):
    def _new_restart(self, view: MembershipView, members: Collection[WorkerId]) -> MemberAction:
        action = super()._new_restart(view, members)
        return (
            ProposeView(structs.replace(action.view, restart=view.restart))
            if isinstance(action, ProposeView)
            else action
        )


class DropsHoldersOfTheState(MemberState):
    """One without the state takes a broken connection for the death of those who have it."""

    def decide(
        self, seen: MembershipObservation, gone: Mapping[WorkerId, str], change: BoundaryChange | None = None
    ) -> MemberAction:
        return super().decide(replace(seen, alive=[who for who in seen.alive if who not in gone]), gone, change)


class NeverGivesUp(MemberState):
    def group_failed(self) -> None:
        return


class DropsTheLastOfAPart(MemberState):
    """Whoever has some part of the state drops all that it cannot talk to, though nobody else has theirs."""

    def _missing(self, seen: MembershipObservation, gone: Mapping[WorkerId, str]) -> list[WorkerId]:
        mine = {who for who in gone if self.committed >= 0}
        return super()._missing(replace(seen, alive=[who for who in seen.alive if who not in mine]), gone)


class BelievesNewcomers(MemberState):
    """A newcomer's place is taken for a part of the state that it has not got yet."""

    def _missing(self, seen: MembershipObservation, gone: Mapping[WorkerId, str]) -> list[WorkerId]:
        self.state_holders = frozenset(seen.view.members)
        return super()._missing(seen, gone)


class StaysWithAWorthlessState(MemberState):
    """Those who have some of a state that is gone stay, and nobody can begin a term."""

    def _shard_lost(
        self, seen: MembershipObservation, gone: Mapping[WorkerId, str], settlement: RecoveryPlan
    ) -> MemberAction:
        action = super()._shard_lost(seen, gone, settlement)
        return WaitForStore() if isinstance(action, LeaveRun) else action


class NeverLetsIn(MemberState):
    """A view that lost a member before it began stays as it is."""

    def _admit(self, seen: MembershipObservation, gone: Mapping[WorkerId, str]) -> MemberAction:
        return WaitForStore()


class DoesNotWaitForThoseWhoEnd(MemberState):
    """A term begins while others still have some of the state."""

    def _shard_lost(
        self, seen: MembershipObservation, gone: Mapping[WorkerId, str], settlement: RecoveryPlan
    ) -> MemberAction:
        stateless = [who for who in seen.view.members if seen.positions[who].committed < 0]
        if self.worker_id in stateless and covers_model(stateless, self.model_shards):
            return self._new_restart(seen.view, stateless)
        return super()._shard_lost(seen, gone, settlement)


def broken_in(member: type[MemberState] = MemberState, seeds: int = 400, **planned: Any) -> str:
    """The first law that a seed broke."""
    for seed in range(seeds):
        try:
            run(seed, member, **planned)
        except InvariantViolated as broken:
            return str(broken).splitlines()[0]
    raise AssertionError(f"{seeds} seeds found nothing")


@pytest.mark.parametrize(
    ("wrong", "law", "parts"),
    [
        (any_donor, "have committed more", 1),
        (doubt_is_forgotten, "its weights have seen", 1),
        (doubt_is_done_again, "have committed more", 1),
        (a_lost_part_is_ignored, "but no member has the shards", 2),
        (one_donor_for_all, "has shard 1, but receives the state of", 2),
        (a_part_is_lost_with_whoever_is_in_doubt, "ends because no member has the shards", 2),
    ],
)
def test_a_wrong_settlement_is_found(wrong: Settle, law: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "plan_recovery", wrong)
    assert law in broken_in(shards=parts)


@pytest.mark.parametrize(
    ("first_view", "law"), [(True, "begins without some shard"), (False, "goes on, but no member has the shards")]
)
def test_a_beginning_without_some_part_is_found(first_view: bool, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "covers_model", lambda members, parts: True)
    assert law in broken_in(shards=2, passes=1, first_view=first_view)


NEWCOMERS: dict[str, Any] = {"joins": (0.4, 0.6), "heals": 3.0}
HANDED_OVER: dict[str, Any] = {**NEWCOMERS, "workers": 1, "shards": 1, "focuses": 0.4}
ONE_REPLICA: dict[str, Any] = {"workers": 2, "shards": 2, "judges": True}


@pytest.mark.parametrize(
    ("wrong", "law", "planned"),
    [
        (CountsNoPasses, "begins with", {"passes": 3, "shards": 1}),
        (CommitsAtTheBeginning, "with other weights", {}),
        (ForgetsTheFloor, "the newest checkpoint is", {**HANDED_OVER, "focus": "state", "resumed": 0}),
        (EndsATermEarly, "have the state and live", NEWCOMERS),
        (KeepsTheTerm, "the floor falls", {}),
        (
            DropsHoldersOfTheState,
            "the only ones who live and have the state",
            {**HANDED_OVER, "focus": "take", "judges": True},
        ),
        (NeverGivesUp, "no end in sight", {}),
        (DropsTheLastOfAPart, "the only ones who live and have the state", {**ONE_REPLICA, "loses": 0.04}),
        (
            BelievesNewcomers,
            "the only ones who live and have the state",
            {**ONE_REPLICA, **NEWCOMERS, "focuses": 0.4, "focus": "state"},
        ),
        (StaysWithAWorthlessState, "no end in sight", {"shards": 2}),
        (NeverLetsIn, "no end in sight", {"shards": 2}),
        (DoesNotWaitForThoseWhoEnd, "have the state and live", {"shards": 2}),
    ],
)
def test_a_wrong_member_is_found(wrong: type[MemberState], law: str, planned: dict[str, Any]) -> None:
    assert law in broken_in(wrong, **planned)


def test_a_commit_without_all_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    awaits = SimWorker._await

    def early(
        self: SimWorker, key: Key, senders: Sequence[WorkerId], seconds: float
    ) -> Generator[float, None, dict[WorkerId, Any]]:
        return (yield from awaits(self, key, senders[:1] if key[1] == "vote" else senders, seconds))

    monkeypatch.setattr(SimWorker, "_await", early)
    assert "did not vote" in broken_in()


def test_messages_of_an_old_epoch_that_count_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receives = SimWorker.receive

    def anyhow(self: SimWorker, key: Key, sender: WorkerId, body: Any) -> None:
        receives(self, (max(key[0], self.member.generation), key[1], key[2]), sender, body)

    monkeypatch.setattr(SimWorker, "receive", anyhow)
    assert broken_in(seeds=600, delays=0.15, loses=0.04, workers=3)


def test_a_store_that_swaps_blindly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = SimStore.swap
    monkeypatch.setattr(SimStore, "swap", lambda self, view, _, now: swaps(self, view, self.revision, now))
    assert "is followed by" in broken_in()


# -- the decisions themselves -----------------------------------------------------------------------------------------


def test_the_step_in_doubt_is_finished_by_those_who_hold_its_gradient() -> None:
    found = settled(at(A, 801), at(B, 800, doubt=True), at(C, -1))
    assert (found.step, found.donor, found.behind, found.finishing) == (801, A, (C,), (B,))


def test_a_step_that_nobody_committed_is_done_again() -> None:
    found = settled(at(A, 800, doubt=True), at(B, 800, doubt=True))
    assert (found.step, found.behind, found.finishing) == (800, (), ())


def test_a_worker_in_the_middle_of_something_gives_nothing() -> None:
    assert settled(at(A, 5, clean=False), at(B, 5), at(C, -1)).donor == B
    assert settled(at(A, 5, clean=False), at(C, -1)).donor is None


def test_a_run_begins_where_nobody_has_state_and_nothing_was_committed() -> None:
    assert settled(at(A, -1), at(B, -1)).fresh_start
    lost = settled(at(A, -1), at(B, -1), step=3)
    assert not lost.fresh_start
    assert lost.behind == (A, B)


def test_members_without_state_begin_a_term_and_one_outside_with_state_leaves() -> None:
    view = MembershipView(generation=4, members=(B, C), restart=1, step=7)
    seen = MembershipObservation(view=view, alive=[A, B, C], positions={B: at(B, -1), C: at(C, -1)})
    action = MemberState(worker_id=B).decide(seen, {})
    assert isinstance(action, ProposeView)
    assert (action.view.restart, action.view.step, action.view.members) == (2, 0, (B, C))
    assert isinstance(MemberState(worker_id=A, committed=6).decide(seen, {}), LeaveRun)


def test_all_members_come_to_the_same_settlement() -> None:
    view = MembershipView(generation=2, members=(A, B), step=3)
    seen = MembershipObservation(view=view, alive=[A, B], positions={A: at(A, 4), B: at(B, 3, doubt=True)})
    members = [
        MemberState(worker_id=A, committed=4, generation=1),
        MemberState(worker_id=B, committed=3, generation=1, in_doubt=True),
    ]
    first, second = (member.decide(seen, {}) for member in members)
    assert isinstance(first, FormGroup)
    assert first == second


# -- a model that is cut: even numbers have one part, odd numbers the other --------------------------------------------


def test_a_member_takes_the_state_of_one_that_has_its_part() -> None:
    found = settled(at(A, 5), at(B, 5), at(C, -1), at(D, -1), parts=2)
    assert (found.donors, found.behind, found.lost_shards) == ((A, B), (C, D), ())
    assert [found.receives_from(who) for who in (A, B, C, D)] == [None, None, A, B]
    assert [found.receivers_of(who) for who in (A, B, C, D)] == [(C,), (D,), (), ()]


def test_a_part_is_lost_when_nobody_stands_at_the_floor_with_it_or_comes_to_it() -> None:
    assert settled(at(A, 5), at(B, 4, doubt=True), parts=2).lost_shards == ()
    assert settled(at(A, 5), at(B, 4), parts=2).lost_shards == (1,)
    assert settled(at(A, 5), at(C, 5), parts=2).lost_shards == (1,)
    assert settled(at(A, -1), at(C, -1), parts=2).lost_shards == (), "it has not begun"
    assert settled(at(A, -1), at(B, -1), step=3, parts=2).lost_shards == (0, 1)


def acts(
    member: MemberState, *positions: MemberPosition, alive: Sequence[WorkerId] = (), step: int = 0, **gone: str
) -> MemberAction:
    view = MembershipView(generation=2, members=tuple(each.worker_id for each in positions), restart=1, step=step)
    seen = MembershipObservation(
        view=view, alive=alive or view.members, positions={each.worker_id: each for each in positions}
    )
    return member.decide(seen, {WorkerId(int(name[1:])): why for name, why in gone.items()})


def test_those_who_have_some_of_a_lost_state_end_and_the_others_wait_for_that() -> None:
    stand = at(A, 5), at(C, -1), at(D, -1)
    assert acts(MemberState(worker_id=A, model_shards=2, committed=5), *stand) == LeaveRun(
        MembershipView(generation=2, members=(A, C, D), restart=1), (1,)
    )
    assert acts(MemberState(worker_id=C, model_shards=2), *stand) == WaitForStore()
    action = acts(MemberState(worker_id=C, model_shards=2), *stand[1:], step=5)
    assert isinstance(action, ProposeView)
    assert (action.view.restart, action.view.members) == (2, (C, D))


def test_a_term_begins_with_somebody_for_every_part() -> None:
    """Whoever waits outside comes in with it: members without state have no boundary to let it in at."""
    member = MemberState(worker_id=A, model_shards=2)
    assert acts(member, at(A, -1), at(C, -1), step=5) == WaitForStore()
    action = acts(member, at(A, -1), at(C, -1), step=5, alive=[A, C, D])
    assert isinstance(action, ProposeView)
    assert (action.view.restart, action.view.members) == (2, (A, C, D))
    assert member.decide(MembershipObservation(view=protocol.EMPTY_VIEW, alive=[A, C]), {}) == WaitForStore()
    assert isinstance(member.decide(MembershipObservation(view=protocol.EMPTY_VIEW, alive=[A, B]), {}), ProposeView)


def test_a_first_view_that_lost_a_member_lets_another_in_before_it_begins() -> None:
    member = MemberState(worker_id=A, model_shards=2)
    assert acts(member, at(A, -1)) == WaitForStore()
    action = acts(member, at(A, -1), alive=[A, WorkerId(1, 1)])
    assert isinstance(action, ProposeView)
    assert (action.view.restart, action.view.members) == (1, (A, WorkerId(1, 1)))
    assert isinstance(acts(member, at(A, -1), at(B, -1)), FormGroup)


def test_newcomers_of_one_part_wait_while_those_of_another_come_in() -> None:
    action = acts(
        MemberState(worker_id=A, model_shards=2, committed=5), at(A, 5), at(B, 5, clean=False), at(C, -1), at(D, -1)
    )
    assert isinstance(action, ProposeView)
    assert action.view.members == (A, B, C)


def test_a_connection_that_broke_does_not_cost_the_last_of_a_part() -> None:
    stand = at(A, 5), at(B, 5), at(D, 5)
    view = MembershipView(generation=1, members=(A, B, D))
    first = plan_recovery(view, {each.worker_id: each for each in stand}, 2)
    member = MemberState(worker_id=A, model_shards=2, committed=5)
    member.group_forming(first)
    dropped = acts(member, *stand, w1="closed its connection")
    assert isinstance(dropped, ProposeView) and dropped.view.members == (A, D)
    both = acts(member, *stand, w1="closed its connection", w3="closed its connection")
    assert not isinstance(both, ProposeView)
    dead = acts(member, *stand, w1="is silent", w3="is silent", alive=[A])
    assert isinstance(dead, ProposeView) and dead.view.members == (A,)
