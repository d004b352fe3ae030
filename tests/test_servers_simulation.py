"""Parameter servers in a world that goes wrong (testing/simulation/servers.py): what must hold, that it can fail, and
that a seed tells the same story again."""

import sys
from typing import Any

import pytest

from shoal.paramserver.messages import Push
from shoal.paramserver.pace import Queue
from shoal.paramserver.records import Record
from shoal.paramserver.session import Session
from shoal.paramserver.shard import Shard
from shoal.testing.simulation.__main__ import main
from shoal.testing.simulation.laws import Broken
from shoal.testing.simulation.pushes import exact_sum, restarts
from shoal.testing.simulation.servers import CASES, World, run

SEEDS = range(160)
RARE = {"a group did a ticket again", "a server came back with the snapshot before the newest", "a step was done again"}


def some(**planned: Any) -> None:
    for seed in range(20):
        run(seed, **planned)


def test_every_law_holds_and_every_case_is_met() -> None:
    met: set[str] = set()
    for seed in SEEDS:
        met |= run(seed)
    assert set(CASES) - met <= RARE, "a simulation that never comes to a case proves nothing about it"


@pytest.mark.parametrize("mode", ["push", "groups:2", "sync", "quorum:0.6"])
def test_a_seed_tells_the_same_story_again(mode: str) -> None:
    worlds = [World(7, trace=True, mode=mode, workers=2, shards=2, drops=0.1, doubles=0.1) for _ in range(2)]
    first, second = (world.run() for world in worlds)
    assert first == second
    assert worlds[0].trace == worlds[1].trace
    assert (worlds[0].now, worlds[0].count) == (worlds[1].now, worlds[1].count)


# -- what is broken on purpose is found, and the story says where -----------------------------------------------------


def test_a_shard_that_applies_a_repeated_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Shard._again

    def twice(self: Shard, record: Record, asked: Any, epoch: int, request: Any, tensors: Any) -> Any:
        if isinstance(request, Push) and asked.sequence <= record.sequence:
            return self._do(asked, epoch, request, tensors)
        return again(self, record, asked, epoch, request, tensors)

    monkeypatch.setattr(Shard, "_again", twice)
    with pytest.raises(Broken, match=r"seed \d+: number \d+ was acknowledged, and was applied 2 times\n(.|\n)*begins"):
        some(mode="push", doubles=0.2)


def test_a_shard_that_takes_new_orders_for_repeated_ones_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process of a worker counts from 1 again."""

    def same(self: Shard, who: Any) -> Record:
        return self._records.setdefault(who.worker, Record(who.incarnation))

    monkeypatch.setattr(Shard, "_record", same)
    with pytest.raises(Broken):
        some(mode="push", workers=1, crashes=(), deaths=((0.1, 0),), heals=1.0)


def test_a_client_that_counts_what_is_lost_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = Session.welcome

    def careless(self: Session[Any], boot: int, sequence: int) -> Any:
        renewed = welcome(self, boot, sequence)
        return type(renewed)(0, renewed.again)

    monkeypatch.setattr(Session, "welcome", careless)
    with pytest.raises(Broken, match=r"0 orders were told as lost, and [1-9]"):
        some(mode="push", crashes=((0.2, 0), (0.5, 0)))


def test_a_pace_that_forgets_a_dead_workers_ticket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_give_back", lambda self, party: setattr(party, "ticket", -1))
    with pytest.raises(Broken, match="no end in sight"):
        some(mode="async", workers=3, steps=10, deaths=((0.05, 0), (0.06, 1)), crashes=())


def test_a_server_that_comes_back_in_lockstep_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "_check_back", lambda self: None)
    with pytest.raises(Broken):
        some(mode="sync", workers=3, steps=8, crashes=((0.3, 0), (0.6, 0)), heals=1.0)


# -- scores 4 and 5 of PROTOCOLS.md -----------------------------------------------------------------------------------


def test_ten_thousand_pushes_over_a_bad_line_come_to_the_exact_sum() -> None:
    """20 % of answers dropped, 20 % of requests doubled; a million of them with --pushes 1000000."""
    found = exact_sum(10_000)
    assert found.exact, found
    assert found.sent > 1.4 * found.pushes and found.duplicates == found.sent - found.pushes


def test_a_sum_that_is_not_exact_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "_again", lambda self, record, asked, epoch, request, tensors: self._do(
        asked, epoch, request, tensors))  # fmt: skip
    assert not exact_sum(200).exact


@pytest.mark.parametrize("worker", [0, 129, 200, 100_000])
def test_a_worker_restarts_a_hundred_times_under_its_number(worker: int) -> None:
    assert restarts(100, worker=worker, pushes=2) == 200


def test_the_command_replays_a_seed_and_counts_pushes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(3, trace=True)
    world.run()
    monkeypatch.setattr(sys, "argv", ["simulation", "--servers", "--seed", "3", "--trace"])
    assert main() == 0
    told = capsys.readouterr().out
    assert world.trace and "\n".join(world.trace) in told and "every law held" in told
    monkeypatch.setattr(sys, "argv", ["simulation", "--pushes", "100"])
    assert main() == 0
    assert "100 pushes, 20% of answers dropped, 20% of requests doubled" in capsys.readouterr().out
