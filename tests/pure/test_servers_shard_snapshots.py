"""A parameter server's shard: capture, restore, rewind, and files."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.shards import ONE, Worker, captured_at, counting, one_worker, refused, same, spec_of, values_of
from shoal.errors import CheckpointError, InputError
from shoal.paramserver.messages import (
    AckReply,
    ApplyRequest,
    BarrierRequest,
    ClientId,
    ContributeRequest,
    DeclareRequest,
    DenseSpec,
    HelloRequest,
    PullRequest,
    PushRequest,
    PutRequest,
    RewindRequest,
    ServerRequest,
    SnapshotRequest,
    SparseSpec,
    StatusReply,
    StatusRequest,
    TableSlice,
    WelcomeReply,
)
from shoal.paramserver.permissions import permitted
from shoal.paramserver.replies import ShardReply
from shoal.paramserver.rollback import MAX_POLLS, NoCommonSnapshotError, are_consistent, plan_rewind
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sharding import flat_layout, shard_dense
from shoal.paramserver.snapshot import ShardSnapshot, SnapshotFolder
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.transport.identity import Role

# -- capture, restore, rewind -----------------------------------------------------------------------------------------


def history(shard: ParameterShard, begin: int, end: int) -> list[ShardReply]:
    """Orders of two workers: pushes, a repeated one, a refused one, rows, contributions, tickets."""
    found: list[ShardReply] = []
    spec = spec_of("adam", lr=0.01)
    words = TableSlice("words", sparse=True)
    for step in range(begin, end):
        for worker in (0, 1):
            who = ClientId(worker, (1 << 32) + 1 + worker)
            welcome = shard.on_hello(HelloRequest(worker, who.incarnation))
            assert isinstance(welcome, WelcomeReply)
            number = welcome.sequence
            if not number:
                requests: list[tuple[ServerRequest, list[Tensor]]] = [
                    (DeclareRequest("model", spec), []),
                    (DeclareRequest("words", SparseSpec(rows=1000, dim=3, optimizer="adam")), []),
                    (PutRequest([TableSlice("model")], fill=True), flat_of(spec, values_of())),
                ]
            else:
                ids = torch.arange(step, 900, 97)
                rows = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(step))
                push = PushRequest([TableSlice("model"), words], lease=2 * step + worker, base_version=step)
                requests = [
                    (BarrierRequest(step - 1, b"note"), [torch.ones(worker)]),
                    (push, [*flat_of(spec, values_of(seed=step)), ids, rows]),
                    (PushRequest([TableSlice("model")]), [torch.zeros(1)]),
                    (
                        ContributeRequest(step - 1, (worker, worker + 1), [TableSlice("model")]),
                        flat_of(spec, values_of(seed=50 + step)),
                    ),
                    (ApplyRequest(step - 1, 2, [(0, 1), (1, 2)], scale=0.5, pull=False), []),
                ]
            for request, tensors in requests:
                number += 1
                for _ in range(2):  # everything twice
                    found += shard.handle(who, number, number, 0, request, tensors)
    return found


def flat_of(spec: DenseSpec, values: Mapping[str, Tensor]) -> list[Tensor]:
    laid = flat_layout(shard_dense(spec, 1)[0], spec)
    flats = laid.zeros()
    for view, name in zip(laid.views(flats), spec.names, strict=True):
        view.copy_(values[name])
    return flats


def equal(left: ShardSnapshot, right: ShardSnapshot) -> bool:
    return left.values == right.values and same(left.tensors, right.tensors)


def a_shard() -> ParameterShard:
    return ParameterShard(coordinator=StepCoordinator(SyncMode.parse("sync"), 2, 100))


def test_the_same_orders_give_the_same_bits_also_across_a_restart(tmp_path: Path) -> None:
    first, second, third = a_shard(), a_shard(), a_shard()
    answers = history(first, 0, 6)
    assert [answer.reply for answer in history(second, 0, 6)] == [answer.reply for answer in answers]
    assert equal(first.capture(), second.capture())
    assert first.stats().refused["shape"] == 10 and first.stats().duplicates > 20
    assert first.version == 15 and first.held_bytes > 0
    # ... and through a file.
    with SnapshotFolder(tmp_path / "shard-0") as snapshots:
        snapshots.write(first.capture())
        captured = snapshots.newest()
    assert captured is not None
    third.restore(captured)
    assert equal(third.capture(), second.capture())
    more = [answer.reply for answer in history(first, 6, 9)]
    assert [answer.reply for answer in history(third, 6, 9)] == more
    assert equal(third.capture(), first.capture())
    assert not equal(third.capture(), second.capture())
    with pytest.raises(CheckpointError, match="shard 0 of 1, and this is shard 1 of 2"):
        ParameterShard(shard=1, shards=2).restore(captured)


def test_rewind_goes_back_to_a_snapshot_once_for_each_epoch(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "shard-0") as snapshots:
        shard = ParameterShard(
            load_snapshot=snapshots.rewind, coordinator=StepCoordinator(SyncMode.parse("sync"), 1, 100)
        )
        worker, spec = Worker([shard]), spec_of("adam", ONE, lr=1.0)
        worker.declare(spec, {"count": torch.zeros(3)})
        seen = {}
        for step in range(5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(ApplyRequest(step, 1, [(0, 1)], snapshot=step in (1, 3)))
            seen[step] = worker.pull(spec)
            assert shard.snapshot_due == (step in (1, 3))
            if shard.snapshot_due:
                shard.snapshot_begun()
                snapshots.write(shard.capture())
                assert shard.snapshot_done(snapshots.steps()) == []
        standing = worker.look(StatusRequest()).reply
        assert isinstance(standing, StatusReply) and standing.snapshot_steps == [2, 4] and standing.step == 5
        assert worker.answers(ApplyRequest(5, 1, [(0, 1)])) == []
        waiting = worker.tag
        refused(worker.order(RewindRequest(1, 3)), "snapshot")
        answers = worker.answers(RewindRequest(1, 2))
        assert answers[0].reply == AckReply(2) and shard.generation == 1 and shard.step == 2
        assert (answers[1].tag, refused(answers[1], "fenced") != "") == (waiting, True)
        refused(worker.look(PullRequest([TableSlice("model")])), "fenced")
        refused(worker.order(PushRequest([TableSlice("model")])), "fenced")
        worker.epoch = 2
        refused(worker.look(PullRequest([TableSlice("model")])), "behind")
        worker.epoch = 1
        assert same(worker.pull(spec), seen[1])
        assert worker.order(RewindRequest(1, 2)).reply == AckReply(2), "once"
        refused(worker.order(RewindRequest(1, 4)), "rewind")
        assert snapshots.steps() == [2], "what came after it is undone"
        for step in range(2, 5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(ApplyRequest(step, 1, [(0, 1)]))
            assert same(worker.pull(spec), seen[step])
    lone, _ = one_worker()
    refused(lone.order(RewindRequest(1, 0)), "snapshot")


def test_a_rewind_is_for_one_process_of_a_shard() -> None:
    """Sent again to the next one it would bring an epoch back that others think they are in."""
    (worker,), _ = counting()
    first = worker.shards[0]
    captured = first.capture(copy=True)
    second = ParameterShard(
        server_incarnation=2,
        coordinator=StepCoordinator(SyncMode.parse("sync"), 1, 100),
        load_snapshot=lambda step: captured,
    )
    second.restore(captured)
    worker.shards = [second]
    assert "the request is for process 1 of shard 0, and this is process 2" in refused(
        worker.order(RewindRequest(7, 0, server_incarnation=1)), "fenced"
    )
    assert second.generation == 0
    assert (
        isinstance(worker.order(RewindRequest(7, 0, server_incarnation=2)).reply, AckReply) and second.generation == 7
    )


@pytest.mark.parametrize("lockstep", [True, False])
def test_what_a_worker_may_rewind(tmp_path: Path, lockstep: bool) -> None:
    """A named server process, in lockstep, to a step that has values: else a worker could have tables without values
    again, and fill them with its own."""
    with SnapshotFolder(tmp_path / "shard-0") as snapshots:
        shard = ParameterShard(load_snapshot=snapshots.rewind, lockstep=lockstep)
        worker, spec = Worker([shard]), spec_of("sgd", ONE, lr=1.0)

        def keep() -> None:
            shard.snapshot_begun()
            snapshots.write(shard.capture())
            shard.snapshot_done(snapshots.steps())

        def rewind(generation: int, step: int, process: int = 1) -> ShardReply:
            return worker.order(permitted(Role.WORKER, RewindRequest(generation, step, process)))

        keep()  # of step 0, before the first values
        worker.declare(spec, {"count": torch.zeros(3)})
        for step in range(2):
            worker.contribute(spec, step, (0, 1), {"count": torch.ones(3)})
            worker.order(ApplyRequest(step, 1, [(0, 1)]))
        keep()
        assert snapshots.steps() == [0, 2]
        if not lockstep:
            assert "in lockstep alone" in refused(rewind(1, 2), "role")
        else:
            assert "to the steps [0, 2], not to step 1" in refused(rewind(1, 1), "snapshot")
            assert "none is named" in refused(rewind(1, 2, process=0), "role")
            assert "is too far" in refused(rewind(1 << 62, 2), "rewind")
        assert shard.generation == 0 and snapshots.steps() == [0, 2]
        if lockstep:
            assert rewind((3 << 20) + 1, 2).reply == AckReply(2) and shard.generation == (3 << 20) + 1
            assert "tables had no values yet" in refused(rewind((3 << 20) + 2, 0), "role")
            worker.epoch = shard.generation
            assert same(worker.pull(spec), {"count": torch.full([3], -2.0)})
        assert isinstance(worker.order(RewindRequest((4 << 20) + 1, 0)).reply, AckReply), "the servers' owner may"


def stood(
    boot: int = 1, epoch: int = 0, step: int = 4, kept: Sequence[int] = (2, 4), back: bool = False
) -> StatusReply:
    return StatusReply(
        server_incarnation=boot,
        generation=epoch,
        version=step,
        step=step,
        filled=True,
        snapshot_steps=list(kept),
        needs_rewind=back,
    )


def test_servers_that_are_not_at_one_step_go_back_to_one_that_all_have_kept() -> None:
    assert are_consistent([stood(), stood()])
    assert not are_consistent([stood(), stood(step=5)]) and not are_consistent([stood(), stood(epoch=1)])
    assert not are_consistent([stood(), stood(boot=2, back=True)]), "its contributions are gone"

    back = [stood(step=7, kept=[4, 6]), stood(boot=2, back=True)]
    first, second = plan_rewind(back, polls=1)
    assert (first.step, first.server_incarnation, second.step, second.server_incarnation) == (
        4,
        1,
        4,
        2,
    ) and first.generation == second.generation

    # Whatever it has forgotten: no epoch comes again, not even when all were lost.
    again = [stood(boot=2, back=True), stood(boot=3, back=True)]
    assert plan_rewind(again, polls=1)[0].generation > first.generation > 0

    # Another one is at it, or an update is under way: look again, but not for ever.
    begun = [stood(epoch=first.generation), stood(boot=2, back=True)]
    midway = [stood(step=5), stood()]
    assert plan_rewind(begun, polls=MAX_POLLS - 1) == plan_rewind(midway, polls=MAX_POLLS - 1) == []
    assert plan_rewind(begun, polls=MAX_POLLS)[0].generation == first.generation + 1
    assert [each.step for each in plan_rewind(midway, polls=MAX_POLLS)] == [4, 4]
    with pytest.raises(NoCommonSnapshotError, match=r"server 0 has \[2\]; server 1 has \[4\]"):
        plan_rewind([stood(kept=[2]), stood(boot=2, kept=[4], back=True)], polls=1)


def test_keep_is_answered_when_it_stands() -> None:
    (worker,), _ = counting()
    shard = worker.shards[0]
    assert shard.handle(worker.who, 50, 0, 0, SnapshotRequest()) == [] and shard.snapshot_due
    shard.snapshot_begun()
    assert not shard.snapshot_due
    assert shard.handle(worker.who, 51, 0, 0, SnapshotRequest()) == [] and shard.snapshot_due, "after the other began"
    (answer,) = shard.snapshot_done([0])
    assert (answer.tag, answer.reply) == (50, AckReply(0))
    shard.snapshot_begun()
    (answer,) = shard.snapshot_done([0], "no space left on device")
    assert answer.tag == 51 and "no space left" in refused(answer, "snapshot")


# -- files ------------------------------------------------------------------------------------------------------------


def test_two_snapshots_are_kept_and_read_back(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "s") as snapshots:
        assert snapshots.newest() is None and snapshots.steps() == []
        for step in (1, 5, 9):
            snapshots.write(captured_at(step))
        assert snapshots.steps() == [5, 9]
        newest = snapshots.newest()
        assert newest is not None and equal(newest, captured_at(9)) and newest.step == newest.version == 9
        assert equal(snapshots.read_step(5), captured_at(5))
        with pytest.raises(CheckpointError, match="no snapshot of step 7, only of 5, 9"):
            snapshots.read_step(7)
        snapshots.write(captured_at(6))
        assert snapshots.steps() == [5, 6], "9 was undone"
        snapshots.clear()
        assert snapshots.newest() is None


def test_a_snapshot_of_another_format_is_refused_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotFolder(tmp_path / "s") as snapshots:
        with monkeypatch.context() as patch:
            patch.setattr("shoal.paramserver.snapshot.FORMAT", "shoal-shard 1")
            snapshots.write(captured_at(1))
        sentence = "s/snapshot-00000001 has format 'shoal-shard 1', and this Shoal reads 'shoal-shard 2'"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=sentence):
                snapshots.newest()


@pytest.mark.parametrize("name", ["values.msgpack", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flipped", "torn", "missing"])
def test_a_damaged_snapshot_falls_back_to_the_older(name: str, harm: str, tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        snapshots.write(captured_at(2))
        path = max((tmp_path / "s").glob("snapshot-*")) / name
        data = bytearray(path.read_bytes())
        if harm == "flipped":
            data[len(data) // 2] ^= 1
        path.unlink() if harm == "missing" else path.write_bytes(data[: len(data) // 2] if harm == "torn" else data)
        newest = snapshots.newest()
        assert newest is not None and equal(newest, captured_at(1))
        assert snapshots.steps() == [1]
        snapshots.write(captured_at(3))
        assert snapshots.steps() == [1, 3]


def test_when_all_are_damaged_it_is_said(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        (path,) = (tmp_path / "s").glob("snapshot-*")
        (path / "values.msgpack").write_bytes(b"")
        with pytest.raises(CheckpointError, match="none of the 1 snapshots in s is intact"):
            snapshots.newest()
        assert path.exists()


def test_a_failed_write_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotFolder(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        calls = []

        def full(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                snapshots.write(captured_at(2))
        assert snapshots.steps() == [1]
        assert sorted(entry.name for entry in (tmp_path / "s").iterdir()) == ["lock", "snapshot-00000001"]


def test_starts_are_counted_and_two_processes_never_serve_one_shard(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "shard-3") as snapshots:
        assert snapshots.next_incarnation() == 1
        with pytest.raises(InputError, match=f"shard 3 is already served by process {os.getpid()}"):
            SnapshotFolder(tmp_path / "shard-3")
    with SnapshotFolder(tmp_path / "shard-3") as again:
        assert again.next_incarnation() == 2
    (tmp_path / "shard-3" / "incarnation").write_text("two")
    with SnapshotFolder(tmp_path / "shard-3") as broken, pytest.raises(InputError, match="does not hold a number"):
        broken.next_incarnation()


def test_a_server_goes_on_when_its_folder_was_deleted(tmp_path: Path) -> None:
    with SnapshotFolder(tmp_path / "shard-0") as snapshots:
        shutil.rmtree(tmp_path / "shard-0")
        assert snapshots.steps() == [] and snapshots.newest() is None
