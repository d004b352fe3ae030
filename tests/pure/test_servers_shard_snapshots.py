"""A parameter server's shard: capture, restore, rewind, and files."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.shards import ONE, Worker, captured_at, counting, one_worker, refused, same, spec_of, values_of
from shoal.errors import CheckpointError, InputError
from shoal.paramserver.messages import (
    Apply,
    Contribute,
    Declare,
    DenseSpec,
    Done,
    Hello,
    Keep,
    Meet,
    Pull,
    Push,
    Put,
    Request,
    Rewind,
    Slot,
    SparseSpec,
    Standing,
    Stood,
    Welcome,
    Who,
)
from shoal.paramserver.rollback import PATIENCE, NothingInCommonError, at_one, ways_back
from shoal.paramserver.shard import Answer, Shard
from shoal.paramserver.sharding import cut_dense, flat
from shoal.paramserver.snapshot import Captured, Snapshots
from shoal.paramserver.step_coordinator import Pace
from shoal.paramserver.sync_mode import Mode

# -- capture, restore, rewind -----------------------------------------------------------------------------------------


def history(shard: Shard, begin: int, end: int) -> list[Answer]:
    """Orders of two workers: pushes, a repeated one, a refused one, rows, contributions, tickets."""
    found: list[Answer] = []
    spec = spec_of("adam", lr=0.01)
    words = Slot("words", sparse=True)
    for step in range(begin, end):
        for worker in (0, 1):
            who = Who(worker, (1 << 32) + 1 + worker)
            welcome = shard.hello(Hello(worker, who.incarnation))
            assert isinstance(welcome, Welcome)
            number = welcome.sequence
            if not number:
                requests: list[tuple[Request, list[Tensor]]] = [
                    (Declare("model", spec), []),
                    (Declare("words", SparseSpec(rows=1000, dim=3, optimizer="adam")), []),
                    (Put([Slot("model")], fill=True), flat_of(spec, values_of())),
                ]
            else:
                ids = torch.arange(step, 900, 97)
                rows = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(step))
                push = Push([Slot("model"), words], ticket=2 * step + worker, basis=step)
                requests = [
                    (Meet(step - 1, b"note"), [torch.ones(worker)]),
                    (push, [*flat_of(spec, values_of(seed=step)), ids, rows]),
                    (Push([Slot("model")]), [torch.zeros(1)]),
                    (
                        Contribute(step - 1, (worker, worker + 1), [Slot("model")]),
                        flat_of(spec, values_of(seed=50 + step)),
                    ),
                    (Apply(step - 1, 2, [(0, 1), (1, 2)], scale=0.5, pull=False), []),
                ]
            for request, tensors in requests:
                number += 1
                for _ in range(2):  # everything twice
                    found += shard.handle(who, number, number, 0, request, tensors)
    return found


def flat_of(spec: DenseSpec, values: Mapping[str, Tensor]) -> list[Tensor]:
    laid = flat(cut_dense(spec, 1)[0], spec)
    flats = laid.zeros()
    for view, name in zip(laid.views(flats), spec.names, strict=True):
        view.copy_(values[name])
    return flats


def equal(left: Captured, right: Captured) -> bool:
    return left.values == right.values and same(left.tensors, right.tensors)


def a_shard() -> Shard:
    return Shard(pace=Pace(Mode.read("sync"), 2, 100))


def test_the_same_orders_give_the_same_bits_also_across_a_restart(tmp_path: Path) -> None:
    first, second, third = a_shard(), a_shard(), a_shard()
    answers = history(first, 0, 6)
    assert [answer.reply for answer in history(second, 0, 6)] == [answer.reply for answer in answers]
    assert equal(first.capture(), second.capture())
    assert first.counted().refused["shape"] == 10 and first.counted().duplicates > 20
    assert first.version == 15 and first.held_bytes > 0
    # ... and through a file.
    with Snapshots(tmp_path / "shard-0") as snapshots:
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
        Shard(shard=1, shards=2).restore(captured)


def test_rewind_goes_back_to_a_snapshot_once_for_each_epoch(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "shard-0") as snapshots:
        shard = Shard(kept=snapshots.rewind, pace=Pace(Mode.read("sync"), 1, 100))
        worker, spec = Worker([shard]), spec_of("adam", ONE, lr=1.0)
        worker.declare(spec, {"count": torch.zeros(3)})
        seen = {}
        for step in range(5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(Apply(step, 1, [(0, 1)], snapshot=step in (1, 3)))
            seen[step] = worker.pull(spec)
            assert shard.due == (step in (1, 3))
            if shard.due:
                shard.begun()
                snapshots.write(shard.capture())
                assert shard.stood(snapshots.steps()) == []
        standing = worker.look(Standing()).reply
        assert isinstance(standing, Stood) and standing.kept == [2, 4] and standing.step == 5
        assert worker.answers(Apply(5, 1, [(0, 1)])) == []
        waiting = worker.tag
        refused(worker.order(Rewind(1, 3)), "snapshot")
        answers = worker.answers(Rewind(1, 2))
        assert answers[0].reply == Done(2) and shard.epoch == 1 and shard.step == 2
        assert (answers[1].tag, refused(answers[1], "fenced") != "") == (waiting, True)
        refused(worker.look(Pull([Slot("model")])), "fenced")
        refused(worker.order(Push([Slot("model")])), "fenced")
        worker.epoch = 2
        refused(worker.look(Pull([Slot("model")])), "behind")
        worker.epoch = 1
        assert same(worker.pull(spec), seen[1])
        assert worker.order(Rewind(1, 2)).reply == Done(2), "once"
        refused(worker.order(Rewind(1, 4)), "rewind")
        assert snapshots.steps() == [2], "what came after it is undone"
        for step in range(2, 5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(Apply(step, 1, [(0, 1)]))
            assert same(worker.pull(spec), seen[step])
    lone, _ = one_worker()
    refused(lone.order(Rewind(1, 0)), "snapshot")


def test_a_rewind_is_for_one_process_of_a_shard() -> None:
    """Sent again to the next one it would bring an epoch back that others think they are in."""
    (worker,), _ = counting()
    first = worker.shards[0]
    captured = first.capture(copy=True)
    second = Shard(boot=2, pace=Pace(Mode.read("sync"), 1, 100), kept=lambda step: captured)
    second.restore(captured)
    worker.shards = [second]
    assert "process 1 of shard 0 was to go back, and this is process 2" in refused(
        worker.order(Rewind(7, 0, boot=1)), "fenced"
    )
    assert second.epoch == 0
    assert isinstance(worker.order(Rewind(7, 0, boot=2)).reply, Done) and second.epoch == 7


def stood(boot: int = 1, epoch: int = 0, step: int = 4, kept: Sequence[int] = (2, 4), back: bool = False) -> Stood:
    return Stood(boot=boot, epoch=epoch, version=step, step=step, filled=True, kept=list(kept), came_back=back)


def test_servers_that_are_not_at_one_step_go_back_to_one_that_all_have_kept() -> None:
    assert at_one([stood(), stood()])
    assert not at_one([stood(), stood(step=5)]) and not at_one([stood(), stood(epoch=1)])
    assert not at_one([stood(), stood(boot=2, back=True)]), "its contributions are gone"

    back = [stood(step=7, kept=[4, 6]), stood(boot=2, back=True)]
    first, second = ways_back(back, looks=1)
    assert (first.step, first.boot, second.step, second.boot) == (4, 1, 4, 2) and first.epoch == second.epoch

    # Whatever it has forgotten: no epoch comes again, not even when all were lost.
    again = [stood(boot=2, back=True), stood(boot=3, back=True)]
    assert ways_back(again, looks=1)[0].epoch > first.epoch > 0

    # Another one is at it, or an update is under way: look again, but not for ever.
    begun = [stood(epoch=first.epoch), stood(boot=2, back=True)]
    midway = [stood(step=5), stood()]
    assert ways_back(begun, looks=PATIENCE - 1) == ways_back(midway, looks=PATIENCE - 1) == []
    assert ways_back(begun, looks=PATIENCE)[0].epoch == first.epoch + 1
    assert [each.step for each in ways_back(midway, looks=PATIENCE)] == [4, 4]
    with pytest.raises(NothingInCommonError, match=r"server 0 has \[2\]; server 1 has \[4\]"):
        ways_back([stood(kept=[2]), stood(boot=2, kept=[4], back=True)], looks=1)


def test_keep_is_answered_when_it_stands() -> None:
    (worker,), _ = counting()
    shard = worker.shards[0]
    assert shard.handle(worker.who, 50, 0, 0, Keep()) == [] and shard.due
    shard.begun()
    assert not shard.due
    assert shard.handle(worker.who, 51, 0, 0, Keep()) == [] and shard.due, "after the other began"
    (answer,) = shard.stood([0])
    assert (answer.tag, answer.reply) == (50, Done(0))
    shard.begun()
    (answer,) = shard.stood([0], "no space left on device")
    assert answer.tag == 51 and "no space left" in refused(answer, "snapshot")


# -- files ------------------------------------------------------------------------------------------------------------


def test_two_snapshots_are_kept_and_read_back(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
        assert snapshots.newest() is None and snapshots.steps() == []
        for step in (1, 5, 9):
            snapshots.write(captured_at(step))
        assert snapshots.steps() == [5, 9]
        newest = snapshots.newest()
        assert newest is not None and equal(newest, captured_at(9)) and newest.step == newest.version == 9
        assert equal(snapshots.of_step(5), captured_at(5))
        with pytest.raises(CheckpointError, match="no snapshot of step 7, only of 5, 9"):
            snapshots.of_step(7)
        snapshots.write(captured_at(6))
        assert snapshots.steps() == [5, 6], "9 was undone"
        snapshots.clear()
        assert snapshots.newest() is None


@pytest.mark.parametrize("name", ["values.msgpack", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flipped", "torn", "missing"])
def test_a_damaged_snapshot_falls_back_to_the_older(name: str, harm: str, tmp_path: Path) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
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
    with Snapshots(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        (path,) = (tmp_path / "s").glob("snapshot-*")
        (path / "values.msgpack").write_bytes(b"")
        with pytest.raises(CheckpointError, match="none of the 1 snapshots in s is whole"):
            snapshots.newest()
        assert path.exists()


def test_a_failed_write_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
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
    with Snapshots(tmp_path / "shard-3") as snapshots:
        assert snapshots.boot() == 1
        with pytest.raises(InputError, match=f"shard 3 is already served by process {os.getpid()}"):
            Snapshots(tmp_path / "shard-3")
    with Snapshots(tmp_path / "shard-3") as again:
        assert again.boot() == 2
    (tmp_path / "shard-3" / "boot").write_text("two")
    with Snapshots(tmp_path / "shard-3") as broken, pytest.raises(InputError, match="does not hold a number"):
        broken.boot()
