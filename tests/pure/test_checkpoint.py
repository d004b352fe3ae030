"""The disk side: what is written comes back bit for bit, what is damaged is found, and nothing good is ever lost."""

import errno
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.snapshots import assert_same, found, names, run_of, snapshot, told, train, wait, writer
from shoal.errors import CheckpointError, InputError, RunFolderError
from shoal.numerics.digest import tensor_sha256
from shoal.recovery.checkpoint import directory, manifest
from shoal.recovery.checkpoint.directory import CheckpointDirectory, WrittenCheckpoint
from shoal.recovery.checkpoint.export import export_weights
from shoal.recovery.checkpoint.files import Snapshot, save_tensors
from shoal.recovery.checkpoint.policy import CheckpointPolicy
from shoal.recovery.checkpoint.safetensors_file import STORABLE_DTYPES
from shoal.recovery.checkpoint.serialize import SnapshotBuffers
from shoal.report.events import Event
from shoal.worker import checkpointer as keeping
from shoal.worker.checkpointer import Checkpointer

FILES = ("state.json", "model.safetensors", "optimizer.safetensors", "extra.safetensors", "manifest.json")


# ---- round trip
def test_round_trip(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "deep" / "checkpoints")
    assert checkpoints.newest() is None
    written = checkpoints.write(snapshot(100))
    assert written.path.name == "step-00000100"
    assert names(written.path) == sorted(FILES)
    assert written.num_bytes == sum((written.path / name).stat().st_size for name in FILES)
    assert len({(written.path / name).stat().st_mode for name in FILES}) == 1, "all readable by the same people"
    newest = CheckpointDirectory(tmp_path / "deep" / "checkpoints").newest()
    assert newest is not None
    assert (newest.path, newest.skipped) == (written.path, [])
    assert_same(newest.snapshot, snapshot(100))


def test_every_bit_of_every_dtype_and_layout_comes_back(tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    weights: dict[str, Tensor] = {}
    for name, dtype in STORABLE_DTYPES.items():
        # Any bit pattern, not-a-number included; a bool has only two.
        full = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
        weights[f"{name} matrix"] = full[:15].reshape(3, 5).clone()
        weights[f"{name} transposed"] = full[:15].reshape(3, 5).clone().t()
        weights[f"{name} scalar"] = full[0].clone()
        weights[f"{name} empty"] = full[:0].reshape(0, 4).clone()
    flat = torch.randn(12)
    weights |= {"view 1": flat[:6], "view 2": flat[3:9], "ß / “name”": torch.ones(1), "": torch.zeros(1)}
    weights["conjugated"] = torch.randn(3, dtype=torch.complex64).conj()
    saved = snapshot(1, weights=weights)
    loaded = CheckpointDirectory(tmp_path).read(CheckpointDirectory(tmp_path).write(saved).path)
    resolved = {name: tensor.resolve_conj() for name, tensor in weights.items()}
    assert_same(loaded, Snapshot(**{**vars(saved), "weights": resolved}))
    for part in (loaded.weights, loaded.optimizer, loaded.extra):
        for name, tensor in part.items():
            assert tensor.is_contiguous(), name
            assert tensor.data_ptr() % 64 == 0, name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{name} is a view of something larger"


def test_a_file_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {f"ß {name}": torch.ones(3, dtype=dtype) for name, dtype in STORABLE_DTYPES.items()}
    tensors |= {"b": torch.randn(3, 4), "a": torch.randn(2), "scalar": torch.tensor(1.0), "0": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "library")
    save_tensors(tensors, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    aliases = {"tied “name”": "b"}
    export_weights(tmp_path / "ours", tensors, aliases)
    metadata = {"format": "pt", "aliases": json.dumps(aliases)}
    for _ in range(20):  # the library writes metadata in an order that it draws anew each time
        save_file(tensors | {"tied “name”": tensors["b"].clone()}, tmp_path / "library", metadata)
        if (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes():
            break
    else:
        pytest.fail("the library never wrote the same bytes")


def test_values_that_json_would_change_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for values in ({"betas": (0.9, 0.99)}, {"milestones": {30: 1}}, {"best": float("inf")}, {"f": print}):
        with pytest.raises(CheckpointError, match="the snapshot's values"):
            CheckpointDirectory(tmp_path).write(Snapshot(**{**vars(snapshot(1)), "values": values}))
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(CheckpointError, match=r"odd\.weight is a tensor that a checkpoint cannot hold"):
            CheckpointDirectory(tmp_path).write(snapshot(1, weights={"odd.weight": tensor}))
    with pytest.raises(CheckpointError, match="__metadata__"):
        CheckpointDirectory(tmp_path).write(snapshot(1, weights={"__metadata__": torch.ones(1)}))
    assert names(tmp_path) == []


# ---- damage
@pytest.fixture
def two(tmp_path: Path) -> Path:
    checkpoints = CheckpointDirectory(tmp_path)
    checkpoints.write(snapshot(10))
    checkpoints.write(snapshot(20))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_byte_anywhere_is_found_and_the_older_one_loads(two: Path, name: str) -> None:
    path = two / "step-00000020" / name
    good = path.read_bytes()
    ends_and_middle = {0, 7, 8, 9, len(good) // 2, len(good) - 2, len(good) - 1}
    for offset in range(len(good)) if name == "manifest.json" else ends_and_middle:
        for mask in (0x01, 0x20, 0x80):
            bad = bytearray(good)
            bad[offset] ^= mask
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match=r"step-00000020: "):
                CheckpointDirectory(two).read(path.parent)
        step, skipped = found(CheckpointDirectory(two))
        assert step == 10
        assert len(skipped) == 1
        assert skipped[0].startswith(f"step-00000020: {name}: ")
    path.write_bytes(good)
    assert found(CheckpointDirectory(two)) == (20, [])


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_or_lengthened_or_missing_is_found(two: Path, name: str) -> None:
    path = two / "step-00000020" / name
    good = path.read_bytes()
    for length in {0, 1, 8, len(good) // 3, len(good) // 2, len(good) - 1}:
        path.write_bytes(good[:length])
        assert found(CheckpointDirectory(two))[0] == 10, length
    path.write_bytes(good + b"\n")
    assert found(CheckpointDirectory(two))[0] == 10
    path.unlink()
    step, skipped = found(CheckpointDirectory(two))
    assert step == 10
    assert name in skipped[0]
    path.mkdir()
    assert found(CheckpointDirectory(two))[0] == 10


def damage(folder: Path, chance: random.Random) -> set[str]:
    """Harms a checkpoint in one of the ways that disks and people do; returns the names of the files concerned."""
    name = chance.choice(FILES)
    path = folder / name
    good = path.read_bytes()
    kind = chance.choice(["cut", "flip", "remove", "swap", "zero", "garbage", "shift"])
    if kind == "cut":
        path.write_bytes(good[: chance.randrange(len(good))])
    elif kind == "flip":
        place = chance.randrange(len(good))
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :])
    elif kind == "remove":
        path.unlink()
    elif kind == "swap":
        other = chance.choice([each for each in FILES if each != name])
        path.write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(good)
        return {name, other}
    elif kind == "zero":
        place = chance.choice([index for index, byte in enumerate(good) if byte])
        block = good[place : place + 512]
        path.write_bytes(good[:place] + bytes(len(block)) + good[place + len(block) :])
    elif kind == "garbage":
        path.write_bytes(good + chance.randbytes(chance.randint(1, 5000)))
    else:  # a block that was never written, of which the rest moved up; what follows fills the length
        place = chance.randrange(len(good))
        path.write_bytes((good[:place] + good[place + 1 :] + b"\1")[: len(good)])
        return {name} if path.read_bytes() != good else damage(folder, chance)
    return {name}


def test_500_torn_or_flipped_checkpoints_are_all_found_and_the_older_one_loads(two: Path) -> None:
    newer = two / "step-00000020"
    good = {name: (newer / name).read_bytes() for name in FILES}
    for seed in range(500):
        harmed = damage(newer, random.Random(seed))
        step, skipped = found(CheckpointDirectory(two))
        assert (step, len(skipped)) == (10, 1), f"seed {seed}: {harmed}"
        assert skipped[0].startswith("step-00000020: ") and any(name in skipped[0] for name in harmed), skipped
        for name in harmed:
            (newer / name).write_bytes(good[name])
    assert found(CheckpointDirectory(two)) == (20, [])


def test_sizes_are_checked_before_anything_is_read(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (two / "step-00000020" / "extra.safetensors").open("ab") as file:
        file.truncate(1 << 40)  # a sparse terabyte: reading or allocating it would not end well
    monkeypatch.setattr(manifest, "file_sha256", lambda path: pytest.fail(f"read {path}"))
    with pytest.raises(CheckpointError, match=r"extra\.safetensors: 1,099,511,627,776 bytes, the manifest says \d+"):
        CheckpointDirectory(two).read(two / "step-00000020")


def test_if_none_verifies_each_is_listed_with_its_defect(two: Path) -> None:
    (two / "step-00000010" / "state.json").unlink()
    (two / "step-00000020" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as caught:
        CheckpointDirectory(two).newest()
    assert [line.split(": ")[:2] for line in caught.value.where] == [
        ["step-00000020", "manifest.json"],
        ["step-00000010", "state.json"],
    ]


def reseal(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """A manifest with a right sha256 over wrong content: what another program, or another version, would write."""
    content = json.loads((path / "manifest.json").read_bytes())
    change(content)
    sealed = msgspec.convert(content, manifest.Manifest)
    (path / "manifest.json").write_bytes(sealed.encode())


def test_what_is_not_ours_is_refused_by_name(two: Path) -> None:
    newest = two / "step-00000020"
    reseal(newest, lambda content: content.update(version=3))
    with pytest.raises(CheckpointError, match=r"step-00000020: .*version 3, this Shoal reads 1 and 2") as caught:
        CheckpointDirectory(two).read(newest)
    assert "newer Shoal" in (caught.value.fix or "")
    reseal(newest, lambda content: content.update(version=2, format="other-checkpoint"))
    with pytest.raises(CheckpointError, match="format 'other-checkpoint', not 'shoal-checkpoint'"):
        CheckpointDirectory(two).read(newest)
    reseal(newest, lambda content: content.update(format="shoal-checkpoint", files={}))
    with pytest.raises(CheckpointError, match=r"lists \[\]"):
        CheckpointDirectory(two).read(newest)
    foreign = two / "step-00000030"
    foreign.mkdir()
    with pytest.raises(CheckpointError, match=r"step-00000030: no manifest\.json: not a Shoal checkpoint"):
        CheckpointDirectory(two).read(foreign)
    (two / "model.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"model\.pt: is a file"):
        CheckpointDirectory(two).read(two / "model.pt")
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        CheckpointDirectory(two).read(two / "nowhere")
    shutil.copytree(two / "step-00000010", two / "step-00000040")
    with pytest.raises(CheckpointError, match="step-00000040: its manifest says step 10"):
        CheckpointDirectory(two).read(two / "step-00000040")
    shutil.copytree(two / "step-00000010", two / "best")
    assert CheckpointDirectory(two).read(two / "best").step == 10
    assert found(CheckpointDirectory(two))[0] == 10


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_a_defect(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manifest.verify

    def verify_while_the_run_moves_on(path: Path, sealed: manifest.Manifest, files: tuple[str, ...]) -> None:
        monkeypatch.setattr(directory, "verify", real)
        CheckpointDirectory(two, keep=1).write(snapshot(30))
        real(path, sealed, files)

    monkeypatch.setattr(directory, "verify", verify_while_the_run_moves_on)
    assert found(CheckpointDirectory(two)) == (30, [])
    assert names(two) == ["step-00000030"]


# ---- keeping, replacing, sweeping
def test_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    for step in (5, 10, 15, 100_000_000):
        checkpoints.write(snapshot(step))
    assert names(tmp_path) == ["step-00000015", "step-100000000"]
    assert found(checkpoints) == (100_000_000, [])
    CheckpointDirectory(tmp_path, keep=1).write(snapshot(100_000_001))
    assert names(tmp_path) == ["step-100000001"]
    with pytest.raises(InputError, match="keep=0"):
        CheckpointDirectory(tmp_path, keep=0)


def test_after_a_return_to_an_older_one_the_good_ones_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        CheckpointDirectory(tmp_path, keep=3).write(snapshot(step))
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    CheckpointDirectory(tmp_path, keep=2).write(snapshot(15))
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_nothing_foreign_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "thesis.tex").write_text("unique")
    (tmp_path / "step-00000002").write_text("a file")
    for name in ("notes", ".hidden", ".step-00000001.mine"):
        (tmp_path / name).mkdir()
    checkpoints = CheckpointDirectory(tmp_path, keep=1)
    for step in (1, 2, 3):
        checkpoints.write(snapshot(step))
    assert {"notes", ".hidden", ".step-00000001.mine", "step-00000003"} <= set(names(tmp_path))
    assert [path.read_text() for path in tmp_path.glob("step-00000001.unreadable-*/thesis.tex")] == ["unique"]
    assert [path.read_text() for path in tmp_path.glob("step-00000002.unreadable-*")] == ["a file"]
    assert len(names(tmp_path)) == 6


def test_writing_a_step_again_replaces_it(two: Path) -> None:
    again = snapshot(20, weights={"w": torch.full((2,), 7.0)})
    CheckpointDirectory(two).write(again)
    assert names(two) == ["step-00000010", "step-00000020"]
    assert_same(CheckpointDirectory(two).read(two / "step-00000020"), again)


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = snapshot(20)
    CheckpointDirectory(tmp_path).write(first)
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.startswith(".step-"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            CheckpointDirectory(tmp_path).write(snapshot(20, weights={"w": torch.ones(1)}))
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None
    assert newest.path.name.startswith("step-00000020.replaced-")
    assert_same(newest.snapshot, first)
    CheckpointDirectory(tmp_path).write(snapshot(20))
    assert names(tmp_path) == ["step-00000020"]


def test_files_are_durable_before_the_rename_and_the_manifest_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def rename(self: Path, target: Path) -> Path:
        told.append("rename")
        return real_rename(self, target)

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        told.append("folder" if path.name.startswith(".step") else "parent" if path == tmp_path else path.name)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    CheckpointDirectory(tmp_path).write(snapshot(1))
    assert told == [*FILES, "folder", "rename", "parent"]


# ---- disk full, unwritable
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_says_what_is_wrong_and_leaves_no_trace(
    two: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunFolderError) as caught:
        CheckpointDirectory(two).write(snapshot(30))
    message = str(caught.value)
    assert f"the checkpoint of step 30 was not written: {os.strerror(code)}" in message
    assert str(two) in message
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ are free", message)
    assert "still intact: step-00000020, step-00000010" in message
    assert ("free some space" in message) == (code == errno.ENOSPC)
    assert names(two) == ["step-00000010", "step-00000020"]


def test_a_folder_that_cannot_be_made_or_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="step 1 was not written: Not a directory"):
        CheckpointDirectory(tmp_path / "file" / "checkpoints").write(snapshot(1))
    with pytest.raises(RunFolderError, match=r"cannot look for checkpoints in .*file: Not a directory"):
        CheckpointDirectory(tmp_path / "file").newest()


# ---- saving beside training
class Told(Checkpointer):
    def __init__(self, directory: CheckpointDirectory) -> None:
        super().__init__(directory.folder, run_of(), lambda event: None)
        self.directory, self.writes = directory, True
        self.saved: list[tuple[WrittenCheckpoint, int]] = []
        self.failed: list[tuple[int, Exception]] = []

    def _on_saved(self, written: WrittenCheckpoint, step: int) -> None:
        self.saved.append((written, step))

    def _on_failed(self, step: int, error: Exception) -> None:
        self.failed.append((step, error))


class Blocked(CheckpointDirectory):
    """A disk that takes as long as the test wants."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def write(self, snapshot: Snapshot) -> WrittenCheckpoint:
        self.begun.release()
        assert self.go.acquire(timeout=60)
        return super().write(snapshot)


def test_saving_overlaps_training_and_never_runs_twice_at_once(tmp_path: Path) -> None:
    threads = threading.active_count()
    slow = Blocked(tmp_path)
    saver = told = Told(slow)
    saver.save(1, {})  # returns, though the write cannot end
    assert slow.begun.acquire(timeout=60)
    assert told.saved == []
    assert names(tmp_path) == []
    second = threading.Thread(target=saver.save, args=(2, {}))
    second.start()
    second.join(timeout=0.2)  # cannot end early if right, and does if wrong
    assert second.is_alive(), "the second save has to wait for the first"
    assert not slow.begun.acquire(blocking=False)
    slow.go.release()
    second.join(timeout=60)
    assert [step for _, step in told.saved] == [1]
    slow.go.release()
    saver.close()
    saver.close()
    assert [(written.path.name, step) for written, step in told.saved] == [("step-00000001", 1), ("step-00000002", 2)]
    assert told.failed == []
    assert threading.active_count() == threads


def test_a_failed_write_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    obstacle = tmp_path / "checkpoints"
    obstacle.write_text("in the way")

    class Unblocking(Told):
        def _on_failed(self, step: int, error: Exception) -> None:
            super()._on_failed(step, error)
            if step == 2:
                obstacle.unlink()

    saver = Unblocking(CheckpointDirectory(obstacle))
    for step in (1, 2, 3):
        saver.save(step, {})
    saver.close()
    assert [(step, type(error)) for step, error in saver.failed] == [(1, RunFolderError), (2, RunFolderError)]
    assert [step for _, step in saver.saved] == [3]


def test_a_callback_that_raises_is_not_swallowed(tmp_path: Path) -> None:
    def raises(*_: object) -> None:
        raise ZeroDivisionError

    saver = writer(tmp_path, run_of(), raises)
    saver.save(1, {})
    with pytest.raises(ZeroDivisionError):
        saver.close()


def test_patience_grows_and_is_forgotten() -> None:
    patience = CheckpointPolicy(0.0, workers=1)
    assert not patience.failing and not patience.retry_due(1e9)
    now, waits = 100.0, []
    for _ in range(7):
        patience.write_failed(now)
        wait_for = next(seconds for seconds in range(1, 100) if patience.retry_due(now + seconds))
        assert not patience.retry_due(now + wait_for - 0.5)
        waits.append(wait_for)
        now += wait_for
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    patience.write_succeeded()
    assert not patience.failing and not patience.retry_due(now + 1000)
    patience.write_failed(now)
    assert patience.retry_due(now + 1)


def test_each_cause_is_said_once_and_the_last_failure_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room in the end the run has not been saved, and whoever ends it must know."""
    events: list[Event] = []
    keeper = writer(tmp_path, run_of(), events.append)
    codes = iter([errno.ENOSPC, errno.ENOSPC, errno.EIO, errno.EIO, errno.ENOSPC, errno.ENOSPC])

    def fail(*_: object, **__: object) -> None:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(directory, "write_manifest", fail)
    for step in (1, 2, 3, 4, 5, 6):
        keeper.save(step, {})
        wait(keeper)
    assert told(events) == [("SaveFailed", 1), ("SaveFailed", 3), ("SaveFailed", 5)]
    keeper.close()
    keeper.close()
    assert told(events)[3:] == [("SaveFailed", 6)]


def test_who_writes_may_change(tmp_path: Path) -> None:
    threads = threading.active_count()
    live, events = run_of(), list[Event]()
    keeper = Checkpointer(tmp_path, live, events.append)
    keeper.save(1, {})
    keeper.export()
    assert names(tmp_path) == [] and threading.active_count() == threads
    keeper.writes = True
    keeper.save(2, {})
    keeper.save(2, {})
    keeper.writes = False  # what has begun is finished
    keeper.save(3, {})
    keeper.close()
    assert told(events) == [("CheckpointSaved", 2)]
    assert (keeper.saved_step, names(tmp_path / "checkpoints")) == (2, ["step-00000002"])
    assert keeper.capture_seconds > 0 and keeper.write_seconds is not None and keeper.write_seconds > 0


def test_a_room_is_used_again_and_holds_the_same_bits_as_a_copy() -> None:
    live, room = run_of(), SnapshotBuffers()
    train(live)
    first = live.capture(1, {}, room)
    places = {name: tensor.data_ptr() for name, tensor in (first.weights | first.optimizer).items()}
    train(live)
    second, plain = live.capture(2, {}, room), live.capture(2, {})
    assert_same(second, plain)
    assert {name: tensor.data_ptr() for name, tensor in (second.weights | second.optimizer).items()} == places
    live_places = {
        tensor.data_ptr() for tensor in (*live.model.parameters(), *live.live_snapshot(2, {}).optimizer.values())
    }
    assert not set(places.values()) & live_places
    odd = SnapshotBuffers()
    take = odd.copier("weights")
    grown = take(torch.ones(4), "a"), torch.randn(3, 5).t(), torch.randn(3, dtype=torch.complex64).conj()
    for name, tensor in zip("bcd", grown, strict=True):
        assert tensor_sha256(take(tensor, name)) == tensor_sha256(tensor.resolve_conj().contiguous())
    odd.recycle()
    assert take(torch.ones(7), "a").shape == (7,)
    assert odd.copier("extra")(torch.zeros(7), "a").tolist() == [0.0] * 7
    with pytest.raises(CheckpointError, match="cannot hold"):
        take(torch.zeros(2).to_sparse(), "s")


class Answers:
    """A group of two, of which the other one finds these steps."""

    def __init__(self, *others: int) -> None:
        self.others = list(others)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.tensor([self.others.pop(0)])])


def test_workers_that_see_different_checkpoints_look_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    live = run_of()
    keeper = writer(tmp_path, live, lambda event: None)
    with pytest.raises(CheckpointError, match="holds no checkpoint to resume from"):
        keeper.resume(Answers(-1))  # type: ignore[arg-type]
    keeper.save(4, {"loss": 1.0})
    keeper.close()
    late: Any = Answers(2, 4)
    assert keeper.resume(late).snapshot.values["progress"] == {"loss": 1.0}
    with pytest.raises(CheckpointError, match=r"different newest checkpoints: steps 4, 9") as caught:
        keeper.resume(Answers(2, 3, 9))  # type: ignore[arg-type]
    assert "the same folder on every host" in str(caught.value)
