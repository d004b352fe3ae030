"""Parameter servers in a world that goes wrong (testing/simulation/servers.py): what must hold, that it can fail, and
that a seed tells the same story again."""

import sys
from collections.abc import Mapping
from functools import reduce
from typing import Any

import msgspec
import pytest
from torch import Tensor

from shoal.paramserver import reduce as push_reduction
from shoal.paramserver import shard
from shoal.paramserver.dense_table import DenseTable
from shoal.paramserver.lease_queue import LeaseQueue
from shoal.paramserver.messages import ApplyRequest, PushRequest, RewindRequest
from shoal.paramserver.pending_steps import PendingSteps
from shoal.paramserver.reduce import ReducedContributions
from shoal.paramserver.request_log import ClientRecord
from shoal.paramserver.rollback import plan_rewind
from shoal.paramserver.session import ShardSession
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sparse_table import SparseTable
from shoal.paramserver.tables import ShardTables
from shoal.testing.simulation import server_scripts
from shoal.testing.simulation.__main__ import main
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.pushes import exact_sum, restarts
from shoal.testing.simulation.servers import CASES, SimServersRun, run

SEEDS = range(160)
RARE = {
    "a group repeated a lease",
    "a server came back with the snapshot before the newest",
    "a step was done again",
    "a norm came too late",
    "an update waited for a contribution",
}
CRASHES = ((0.3, 0), (0.6, 1), (0.9, 0))


def some(**planned: Any) -> None:
    for seed in range(20):
        run(seed, **planned)


def test_every_law_holds_and_every_case_is_met() -> None:
    met: set[str] = set()
    for seed in SEEDS:
        met |= run(seed)
    assert set(CASES) - met <= RARE, "a simulation that never comes to a case proves nothing about it"


@pytest.mark.parametrize("mode", ["push", "groups:2", "sync", "quorum:0.6", "local:2"])
def test_a_seed_tells_the_same_story_again(mode: str) -> None:
    worlds = [
        SimServersRun(7, trace=True, mode=mode, workers=2, shards=2, drops=0.1, doubles=0.1, rows=True)
        for _ in range(2)
    ]
    first, second = (world.run() for world in worlds)
    assert first == second
    assert worlds[0].trace == worlds[1].trace
    assert (worlds[0].now, worlds[0].count) == (worlds[1].now, worlds[1].count)


# -- what is broken on purpose is found, and the story says where -----------------------------------------------------


def test_a_shard_that_applies_a_repeated_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    again = ParameterShard._repeat

    def twice(self: ParameterShard, record: ClientRecord, asked: Any, epoch: int, request: Any, tensors: Any) -> Any:
        if isinstance(request, PushRequest) and asked.sequence <= record.sequence:
            return self._execute(asked, epoch, request, tensors)
        return again(self, record, asked, epoch, request, tensors)

    monkeypatch.setattr(ParameterShard, "_repeat", twice)
    with pytest.raises(
        InvariantViolated, match=r"seed \d+: number \d+ was acknowledged, but was applied 2 times\n(.|\n)*begins"
    ):
        some(mode="push", doubles=0.2)


def test_a_shard_that_takes_new_orders_for_repeated_ones_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process of a worker counts from 1 again."""

    def same(self: ParameterShard, who: Any) -> ClientRecord:
        return self._records.setdefault(who.worker, ClientRecord(who.incarnation))

    monkeypatch.setattr(ParameterShard, "_record", same)
    with pytest.raises(InvariantViolated):
        some(mode="push", workers=1, crashes=(), deaths=((0.1, 0),), heals=1.0)


def test_a_client_that_counts_what_is_lost_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = ShardSession.resume

    def careless(self: ShardSession[Any], boot: int, sequence: int) -> Any:
        renewed = welcome(self, boot, sequence)
        return type(renewed)(0, renewed.resend)

    monkeypatch.setattr(ShardSession, "resume", careless)
    with pytest.raises(InvariantViolated, match=r"0 orders were reported as lost, but [1-9]"):
        some(mode="push", crashes=((0.2, 0), (0.5, 0)))


def test_a_pace_that_forgets_a_dead_workers_ticket_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseQueue, "_return_leases", lambda self, holder: setattr(holder, "lease", -1))
    with pytest.raises(InvariantViolated, match="no end in sight"):
        some(mode="async", workers=3, steps=10, deaths=((0.05, 0), (0.06, 1)), crashes=())


def test_a_server_that_comes_back_in_lockstep_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterShard, "_check_rewound", lambda self: None)
    with pytest.raises(InvariantViolated):
        some(mode="sync", workers=3, steps=8, crashes=((0.3, 0), (0.6, 0)), heals=1.0)


def test_rows_that_come_back_without_their_optimizer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SparseTable.restore

    def forgets(self: SparseTable, kept: Mapping[str, Tensor]) -> None:
        restore(self, {name: each * 0 if name.startswith("state.") else each for name, each in kept.items()})

    monkeypatch.setattr(SparseTable, "restore", forgets)
    with pytest.raises(InvariantViolated, match=r"rows of step \d+: .*, in one process|not the same bits in state"):
        some(mode="sync", rows=True, shards=2, steps=8, crashes=CRASHES, heals=1.5)


def test_rows_that_are_added_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no whole numbers."""

    def in_a_row(lanes: int, parts: Mapping[Any, Any], add: Any) -> Any:
        return reduce(add, [parts[span] for span in sorted(parts) if parts[span] is not None])

    monkeypatch.setattr(push_reduction, "fold", in_a_row)
    with pytest.raises(InvariantViolated, match=r"rows of step \d+: .*, in one process|not the same bits in values"):
        some(mode="sync", rows=True, workers=4, crashes=(), deaths=())


@pytest.mark.parametrize("mode", ["push", "async", "groups:2", "quorum:0.6"])
def test_a_server_that_comes_back_without_its_rows_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = ShardTables.restore

    def forgets(self: ShardTables, captured: Mapping[str, Any]) -> None:
        restore(self, captured)
        for table in self.sparse.values():
            table._start_empty()

    monkeypatch.setattr(ShardTables, "restore", forgets)
    with pytest.raises(InvariantViolated, match="pushes of rows differ from pushes of their numbers"):
        some(mode=mode, rows=True, workers=3, shards=2, steps=8, crashes=CRASHES, heals=1.5)


def test_rows_of_a_ticket_that_are_applied_again_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: ParameterShard, asked: Any, request: PushRequest, tensors: Any) -> Any:
        if request.lease in self._applied_leases:
            gradients = self.tables.check_gradients(request.slices, tensors)
            self.tables.update({server_scripts.ROWS: gradients[server_scripts.ROWS]}, self.version)
        return ParameterShard._push(self, asked, request, tensors)

    monkeypatch.setitem(shard._HANDLERS, PushRequest, twice)
    with pytest.raises(InvariantViolated, match="pushes of rows differ from pushes of their numbers"):
        some(mode="async", rows=True, workers=4, steps=10, deaths=((0.1, 0), (0.15, 1), (0.2, 2)), crashes=())


def test_rounds_that_go_on_with_another_momentum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseTable, "put_state", lambda self, names, tensors, values: None)
    with pytest.raises(InvariantViolated, match=r"numbers of step \d+: .*, in one process"):
        some(mode="local:2,outer=nesterov", shards=2, steps=8, crashes=CRASHES, heals=1.5)


def test_a_round_that_is_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a shard that keeps what it has added up, and applies it for everybody who asks."""

    def twice(self: ParameterShard, asked: Any, request: ApplyRequest, tensors: Any) -> Any:
        return self._apply_now(request) if self._pending_steps.ready_or_park(asked, request) else None

    monkeypatch.setattr(PendingSteps, "finish", lambda self, step: [])
    monkeypatch.setitem(shard._HANDLERS, ApplyRequest, twice)
    with pytest.raises(InvariantViolated, match=r"\d updates make step \d"):
        some(mode="local:2", workers=3, crashes=())


def test_a_gradient_that_is_not_clipped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReducedContributions, "clip", lambda self, max_norm, norm: None)
    with pytest.raises(InvariantViolated, match=r" of step \d+: .*, in one process"):
        some(mode="sync", clips=True)


@pytest.mark.parametrize("mode", ["sync", "local:2"])
def test_a_buffer_that_is_not_put_is_found(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingSteps, "add_values", lambda self, request, tensors: None)
    with pytest.raises(InvariantViolated, match=r"buffer of step \d+: .*, in one process|not the same bits in buffer"):
        some(mode=mode, rows=False, clips=False, buffers=True)


# -- what it has found ------------------------------------------------------------------------------------------------


def test_a_server_that_comes_back_does_not_come_to_an_epoch_that_it_was_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in epoch 1, knew nothing of it, and was taken there again: whoever had contributed in the first epoch 1
    did not do it again, and all waited for ever."""
    run(1215)

    def forgetful(standings: Any, looks: int) -> list[RewindRequest]:
        newest = max(each.generation for each in standings)
        return [msgspec.structs.replace(each, generation=newest + 1) for each in plan_rewind(standings, looks)]

    monkeypatch.setattr(server_scripts, "plan_rewind", forgetful)
    with pytest.raises(InvariantViolated, match="no end in sight"):
        run(1215)


def test_a_rewind_that_is_sent_again_does_not_reach_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same end: a worker without an answer sent it to the next process of the server, which took it."""
    crashes = tuple((at, 0) for at in (0.2, 0.7, 1.2, 1.7))
    plan = {"mode": "sync", "workers": 3, "shards": 1, "drops": 0.3, "crashes": crashes, "deaths": (), "heals": 2.2}
    run(729, eager=False, **plan)

    def anybody(standings: Any, looks: int) -> list[RewindRequest]:
        return [msgspec.structs.replace(each, server_incarnation=0) for each in plan_rewind(standings, looks)]

    monkeypatch.setattr(server_scripts, "plan_rewind", anybody)
    with pytest.raises(InvariantViolated, match="no end in sight"):
        run(729, eager=False, **plan)


# -- pushes over a lossy connection -----------------------------------------------------------------------------------


def test_ten_thousand_pushes_over_a_bad_line_come_to_the_exact_sum() -> None:
    """20 % of answers dropped, 20 % of requests doubled; a million of them with --pushes 1000000."""
    found = exact_sum(10_000)
    assert found.exact, found
    assert found.sent > 1.4 * found.pushes and found.duplicates == found.sent - found.pushes


def test_a_sum_that_is_not_exact_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParameterShard, "_repeat", lambda self, record, asked, epoch, request, tensors: self._execute(
        asked, epoch, request, tensors))  # fmt: skip
    assert not exact_sum(200).exact


@pytest.mark.parametrize("worker", [0, 129, 200, 100_000])
def test_a_worker_restarts_a_hundred_times_under_its_number(worker: int) -> None:
    assert restarts(100, worker=worker, pushes=2) == 200


def test_the_command_replays_a_seed_and_counts_pushes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = SimServersRun(3, trace=True)
    world.run()
    monkeypatch.setattr(sys, "argv", ["simulation", "--servers", "--seed", "3", "--trace"])
    assert main() == 0
    told = capsys.readouterr().out
    assert world.trace and "\n".join(world.trace) in told and "every invariant held" in told
    monkeypatch.setattr(sys, "argv", ["simulation", "--pushes", "100"])
    assert main() == 0
    assert "100 pushes, 20% of answers dropped, 20% of requests doubled" in capsys.readouterr().out
