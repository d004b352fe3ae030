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
    Action,
    Change,
    Form,
    Leave,
    Member,
    Position,
    Propose,
    Seen,
    Settlement,
    View,
    Wait,
    Who,
    covers,
    settle,
)
from shoal.testing.simulation import Broken, run
from shoal.testing.simulation.store import Store
from shoal.testing.simulation.worker import Key, Worker

A, B, C, D = Who(0), Who(1), Who(2), Who(3)


def at(who: Who, committed: int, doubt: bool = False, clean: bool = True) -> Position:
    return Position(who=who, committed=committed, doubt=doubt, clean=clean)


def settled(*positions: Position, step: int = 0, parts: int = 1) -> Settlement:
    view = View(epoch=2, members=tuple(each.who for each in positions), step=step)
    return settle(view, {each.who: each for each in positions}, parts)


# -- a protocol that is broken on purpose -----------------------------------------------------------------------------

Settle = Callable[[View, Mapping[Who, Position], int], Settlement]


def any_donor(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    """The first member gives its state, whatever it has: a fresh replacement wipes the model."""
    found, first = settle(view, positions, parts), view.members[0]
    if found.donor is None or not found.behind:
        return found
    behind = tuple(who for who in view.members if who != first)
    return replace(found, donors=(first,), step=max(positions[first].committed, 0), behind=behind, finishing=())


def doubt_is_forgotten(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    return replace(settle(view, positions, parts), finishing=())


def doubt_is_done_again(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    found = settle(view, positions, parts)
    return replace(found, step=found.step - 1, finishing=()) if found.finishing else found


def a_lost_part_is_ignored(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    return replace(settle(view, positions, parts), lost=())


def one_donor_for_all(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    """Whoever has any part gives it to those behind, whatever part they should have."""
    found = settle(view, positions, parts)
    first = next((who for who in found.donors if who is not None), None)
    return replace(found, donors=(first,) * parts, lost=() if first is not None else found.lost)


def a_part_is_lost_with_whoever_is_in_doubt(view: View, positions: Mapping[Who, Position], parts: int) -> Settlement:
    """One that has yet to apply a step is taken for one that has nothing."""
    found = settle(view, positions, parts)
    if found.begins:
        return found
    held = {who.worker % parts for who in view.members if positions[who].committed == found.step}
    return replace(found, lost=tuple(part for part in range(parts) if part not in held))


class CommitsAtTheBeginning(Member):
    """A term begins with step 0, whatever the checkpoint says."""

    def formed(self, settlement: Settlement) -> None:
        super().formed(settlement)
        self.committed = settlement.step


class ForgetsTheFloor(Member):
    def _next(self, view: View, members: Collection[Who], reason: str, **rest: Any) -> View:
        return structs.replace(super()._next(view, members, reason, **rest), step=0)


class EndsATermEarly(Member):
    """One lost member is enough for somebody outside to begin a new term."""

    def _outside(self, seen: Seen, gone: Mapping[Who, str]) -> Action:
        return super()._outside(seen, dict.fromkeys(seen.view.members, "is gone") if gone else gone)


class KeepsTheTerm(Member):
    def _new_term(self, view: View, members: Collection[Who]) -> Action:
        action = super()._new_term(view, members)
        return Propose(structs.replace(action.view, term=view.term)) if isinstance(action, Propose) else action


class DropsHoldersOfTheState(Member):
    """One without the state takes a broken connection for the death of those who have it."""

    def decide(self, seen: Seen, gone: Mapping[Who, str], change: Change | None = None) -> Action:
        return super().decide(replace(seen, alive=[who for who in seen.alive if who not in gone]), gone, change)


class NeverGivesUp(Member):
    def lost(self) -> None:
        return


class DropsTheLastOfAPart(Member):
    """Whoever has some part of the state drops all that it cannot talk to, though nobody else has theirs."""

    def _missing(self, seen: Seen, gone: Mapping[Who, str]) -> list[Who]:
        mine = {who for who in gone if self.committed >= 0}
        return super()._missing(replace(seen, alive=[who for who in seen.alive if who not in mine]), gone)


class BelievesNewcomers(Member):
    """A newcomer's place is taken for a part of the state that it has not got yet."""

    def _missing(self, seen: Seen, gone: Mapping[Who, str]) -> list[Who]:
        self.having = frozenset(seen.view.members)
        return super()._missing(seen, gone)


class StaysWithAWorthlessState(Member):
    """Those who have some of a state that is gone stay, and nobody can begin a term."""

    def _without_a_part(self, seen: Seen, gone: Mapping[Who, str], settlement: Settlement) -> Action:
        action = super()._without_a_part(seen, gone, settlement)
        return Wait() if isinstance(action, Leave) else action


class NeverLetsIn(Member):
    """A view that lost a member before it began stays as it is."""

    def _let_in(self, seen: Seen, gone: Mapping[Who, str]) -> Action:
        return Wait()


class DoesNotWaitForThoseWhoEnd(Member):
    """A term begins while others still have some of the state."""

    def _without_a_part(self, seen: Seen, gone: Mapping[Who, str], settlement: Settlement) -> Action:
        stateless = [who for who in seen.view.members if seen.positions[who].committed < 0]
        if self.who in stateless and covers(stateless, self.parts):
            return self._new_term(seen.view, stateless)
        return super()._without_a_part(seen, gone, settlement)


def broken_in(member: type[Member] = Member, seeds: int = 400, **planned: Any) -> str:
    """The first law that a seed broke."""
    for seed in range(seeds):
        try:
            run(seed, member, **planned)
        except Broken as broken:
            return str(broken).splitlines()[0]
    raise AssertionError(f"{seeds} seeds found nothing")


@pytest.mark.parametrize(
    ("wrong", "law", "parts"),
    [
        (any_donor, "have committed more", 1),
        (doubt_is_forgotten, "its weights have seen", 1),
        (doubt_is_done_again, "have committed more", 1),
        (a_lost_part_is_ignored, "and nobody has the parts", 2),
        (one_donor_for_all, "has part 1, and takes the state of", 2),
        (a_part_is_lost_with_whoever_is_in_doubt, "ends, since nobody has the parts", 2),
    ],
)
def test_a_wrong_settlement_is_found(wrong: Settle, law: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "settle", wrong)
    assert law in broken_in(parts=parts)


@pytest.mark.parametrize(
    ("first_view", "law"), [(True, "begins without some part"), (False, "goes on, and nobody has the parts")]
)
def test_a_beginning_without_some_part_is_found(first_view: bool, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "covers", lambda members, parts: True)
    assert law in broken_in(parts=2, first_view=first_view)


NEWCOMERS: dict[str, Any] = {"joins": (0.4, 0.6), "heals": 3.0}
HANDED_OVER: dict[str, Any] = {**NEWCOMERS, "workers": 1, "parts": 1, "focuses": 0.4}
ONE_REPLICA: dict[str, Any] = {"workers": 2, "parts": 2, "judges": True}


@pytest.mark.parametrize(
    ("wrong", "law", "planned"),
    [
        (CommitsAtTheBeginning, "with other weights", {}),
        (ForgetsTheFloor, "the newest checkpoint is", {**HANDED_OVER, "focus": "state", "resumed": 0}),
        (EndsATermEarly, "have the state and live", NEWCOMERS),
        (KeepsTheTerm, "the floor falls", {}),
        (DropsHoldersOfTheState, "nobody else has it", {**HANDED_OVER, "focus": "take", "judges": True}),
        (NeverGivesUp, "no end in sight", {}),
        (DropsTheLastOfAPart, "nobody else has it", {**ONE_REPLICA, "loses": 0.04}),
        (BelievesNewcomers, "nobody else has it", {**ONE_REPLICA, **NEWCOMERS, "focuses": 0.4, "focus": "state"}),
        (StaysWithAWorthlessState, "no end in sight", {"parts": 2}),
        (NeverLetsIn, "no end in sight", {"parts": 2}),
        (DoesNotWaitForThoseWhoEnd, "have the state and live", {"parts": 2}),
    ],
)
def test_a_wrong_member_is_found(wrong: type[Member], law: str, planned: dict[str, Any]) -> None:
    assert law in broken_in(wrong, **planned)


def test_a_commit_without_all_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    awaits = Worker._await

    def early(self: Worker, key: Key, senders: Sequence[Who], seconds: float) -> Generator[float, None, dict[Who, Any]]:
        return (yield from awaits(self, key, senders[:1] if key[1] == "vote" else senders, seconds))

    monkeypatch.setattr(Worker, "_await", early)
    assert "never said so" in broken_in()


def test_messages_of_an_old_epoch_that_count_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receives = Worker.receive

    def anyhow(self: Worker, key: Key, sender: Who, body: Any) -> None:
        receives(self, (max(key[0], self.member.epoch), key[1], key[2]), sender, body)

    monkeypatch.setattr(Worker, "receive", anyhow)
    assert broken_in(seeds=600, delays=0.15, loses=0.04, workers=3)


def test_a_store_that_swaps_blindly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = Store.swap
    monkeypatch.setattr(Store, "swap", lambda self, view, _, now: swaps(self, view, self.revision, now))
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
    assert settled(at(A, -1), at(B, -1)).begins
    lost = settled(at(A, -1), at(B, -1), step=3)
    assert not lost.begins
    assert lost.behind == (A, B)


def test_members_without_state_begin_a_term_and_one_outside_with_state_leaves() -> None:
    view = View(epoch=4, members=(B, C), term=1, step=7)
    seen = Seen(view=view, alive=[A, B, C], positions={B: at(B, -1), C: at(C, -1)})
    action = Member(who=B).decide(seen, {})
    assert isinstance(action, Propose)
    assert (action.view.term, action.view.step, action.view.members) == (2, 0, (B, C))
    assert isinstance(Member(who=A, committed=6).decide(seen, {}), Leave)


def test_all_members_come_to_the_same_settlement() -> None:
    view = View(epoch=2, members=(A, B), step=3)
    seen = Seen(view=view, alive=[A, B], positions={A: at(A, 4), B: at(B, 3, doubt=True)})
    members = [Member(who=A, committed=4, epoch=1), Member(who=B, committed=3, epoch=1, doubt=True)]
    first, second = (member.decide(seen, {}) for member in members)
    assert isinstance(first, Form)
    assert first == second


# -- a model that is cut: even numbers have one part, odd numbers the other --------------------------------------------


def test_a_member_takes_the_state_of_one_that_has_its_part() -> None:
    found = settled(at(A, 5), at(B, 5), at(C, -1), at(D, -1), parts=2)
    assert (found.donors, found.behind, found.lost) == ((A, B), (C, D), ())
    assert [found.takes_from(who) for who in (A, B, C, D)] == [None, None, A, B]
    assert [found.gives(who) for who in (A, B, C, D)] == [(C,), (D,), (), ()]


def test_a_part_is_lost_when_nobody_stands_at_the_floor_with_it_or_comes_to_it() -> None:
    assert settled(at(A, 5), at(B, 4, doubt=True), parts=2).lost == ()
    assert settled(at(A, 5), at(B, 4), parts=2).lost == (1,)
    assert settled(at(A, 5), at(C, 5), parts=2).lost == (1,)
    assert settled(at(A, -1), at(C, -1), parts=2).lost == (), "it has not begun"
    assert settled(at(A, -1), at(B, -1), step=3, parts=2).lost == (0, 1)


def acts(member: Member, *positions: Position, alive: Sequence[Who] = (), step: int = 0, **gone: str) -> Action:
    view = View(epoch=2, members=tuple(each.who for each in positions), term=1, step=step)
    seen = Seen(view=view, alive=alive or view.members, positions={each.who: each for each in positions})
    return member.decide(seen, {Who(int(name[1:])): why for name, why in gone.items()})


def test_those_who_have_some_of_a_lost_state_end_and_the_others_wait_for_that() -> None:
    stand = at(A, 5), at(C, -1), at(D, -1)
    assert acts(Member(who=A, parts=2, committed=5), *stand) == Leave(View(epoch=2, members=(A, C, D), term=1), (1,))
    assert acts(Member(who=C, parts=2), *stand) == Wait()
    action = acts(Member(who=C, parts=2), *stand[1:], step=5)
    assert isinstance(action, Propose)
    assert (action.view.term, action.view.members) == (2, (C, D))


def test_a_term_begins_with_somebody_for_every_part() -> None:
    """Whoever waits outside comes in with it: members without state have no boundary to let it in at."""
    member = Member(who=A, parts=2)
    assert acts(member, at(A, -1), at(C, -1), step=5) == Wait()
    action = acts(member, at(A, -1), at(C, -1), step=5, alive=[A, C, D])
    assert isinstance(action, Propose)
    assert (action.view.term, action.view.members) == (2, (A, C, D))
    assert member.decide(Seen(view=protocol.NOTHING, alive=[A, C]), {}) == Wait()
    assert isinstance(member.decide(Seen(view=protocol.NOTHING, alive=[A, B]), {}), Propose)


def test_a_first_view_that_lost_a_member_lets_another_in_before_it_begins() -> None:
    member = Member(who=A, parts=2)
    assert acts(member, at(A, -1)) == Wait()
    action = acts(member, at(A, -1), alive=[A, Who(1, 1)])
    assert isinstance(action, Propose)
    assert (action.view.term, action.view.members) == (1, (A, Who(1, 1)))
    assert isinstance(acts(member, at(A, -1), at(B, -1)), Form)


def test_newcomers_of_one_part_wait_while_those_of_another_come_in() -> None:
    action = acts(Member(who=A, parts=2, committed=5), at(A, 5), at(B, 5, clean=False), at(C, -1), at(D, -1))
    assert isinstance(action, Propose)
    assert action.view.members == (A, B, C)


def test_a_connection_that_broke_does_not_cost_the_last_of_a_part() -> None:
    stand = at(A, 5), at(B, 5), at(D, 5)
    view = View(epoch=1, members=(A, B, D))
    first = settle(view, {each.who: each for each in stand}, 2)
    member = Member(who=A, parts=2, committed=5)
    member.forms(first)
    dropped = acts(member, *stand, w1="closed its connection")
    assert isinstance(dropped, Propose) and dropped.view.members == (A, D)
    both = acts(member, *stand, w1="closed its connection", w3="closed its connection")
    assert not isinstance(both, Propose)
    dead = acts(member, *stand, w1="is silent", w3="is silent", alive=[A])
    assert isinstance(dead, Propose) and dead.view.members == (A,)
