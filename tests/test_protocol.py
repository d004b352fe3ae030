"""The protocol in simulated worlds: no law is broken, every hard case is met, and a broken protocol is found out.

`make simulate` runs many more seeds. One that breaks a law fails with its story (docs/protocol.md: how to replay it).
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from shoal.recovery import protocol
from shoal.recovery.protocol import (
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
    Who,
    settle,
)
from shoal.testing.simulation import Broken, World, run
from shoal.testing.simulation.laws import CASES
from shoal.testing.simulation.store import Store
from shoal.testing.simulation.worker import Key, Worker

SEEDS = 4000
RARE = {"newcomers had to wait for the end of a step"}  # about once in ten thousand seeds: `make simulate` asks for it

A, B, C = Who(0), Who(1), Who(2)


def at(who: Who, committed: int, doubt: bool = False, clean: bool = True) -> Position:
    return Position(who=who, committed=committed, doubt=doubt, clean=clean)


def settled(*positions: Position, step: int = 0) -> Settlement:
    view = View(epoch=2, members=tuple(each.who for each in positions), step=step)
    return settle(view, {each.who: each for each in positions})


# -- the simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_no_law_is_broken_and_every_case_is_met() -> None:
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        met.update(run(seed))
    assert [case for case in CASES if not met[case] and case not in RARE] == []


def test_a_seed_replays_in_another_process() -> None:
    """Its story holds no time, no address and no order of a hash table of this process."""
    world = World(3, trace=True)
    world.run()
    assert world.trace
    command = [sys.executable, "-m", "shoal.testing.simulation", "--seed", "3", "--trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "\n".join(world.trace) in done.stdout


# -- a protocol that is broken on purpose -----------------------------------------------------------------------------

Settle = Callable[[View, Mapping[Who, Position]], Settlement]


def any_donor(view: View, positions: Mapping[Who, Position]) -> Settlement:
    """The first member gives its state, whatever it has: a fresh replacement wipes the model."""
    found, first = settle(view, positions), view.members[0]
    if found.donor is None or not found.behind:
        return found
    behind = tuple(who for who in view.members if who != first)
    return replace(found, donor=first, step=max(positions[first].committed, 0), behind=behind, finishing=())


def doubt_is_forgotten(view: View, positions: Mapping[Who, Position]) -> Settlement:
    return replace(settle(view, positions), finishing=())


def doubt_is_done_again(view: View, positions: Mapping[Who, Position]) -> Settlement:
    found = settle(view, positions)
    return replace(found, step=found.step - 1, finishing=()) if found.finishing else found


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


def broken_in(member: type[Member] = Member, seeds: int = 400, **planned: Any) -> str:
    """The first law that a seed broke."""
    for seed in range(seeds):
        try:
            run(seed, member, **planned)
        except Broken as broken:
            return str(broken).splitlines()[0]
    raise AssertionError(f"{seeds} seeds found nothing")


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (any_donor, "have committed more"),
        (doubt_is_forgotten, "its weights have seen"),
        (doubt_is_done_again, "have committed more"),
    ],
)
def test_a_wrong_settlement_is_found(wrong: Settle, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "settle", wrong)
    assert law in broken_in()


NEWCOMERS: dict[str, Any] = {"joins": (0.4, 0.6), "heals": 3.0}
HANDED_OVER: dict[str, Any] = {**NEWCOMERS, "workers": 1, "focuses": 0.4}


@pytest.mark.parametrize(
    ("wrong", "law", "planned"),
    [
        (CommitsAtTheBeginning, "with other weights", {}),
        (ForgetsTheFloor, "the newest checkpoint is", {**HANDED_OVER, "focus": "state", "resumed": 0}),
        (EndsATermEarly, "have the state and live", NEWCOMERS),
        (KeepsTheTerm, "the floor falls", {}),
        (DropsHoldersOfTheState, "nobody else has it", {**HANDED_OVER, "focus": "take", "judges": True}),
        (NeverGivesUp, "no end in sight", {}),
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
