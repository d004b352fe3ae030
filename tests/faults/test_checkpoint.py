"""The disk side: with real processes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from helpers.snapshots import assert_same, found, names, run_of, snapshot, told, train, wait, writer
from shoal.errors import RunFolderError
from shoal.numerics.digest import tensor_digests
from shoal.recovery.checkpoint import directory, files, manifest, safetensors_file
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.files import Snapshot
from shoal.report.events import Event


def test_leftovers_of_dead_writers_are_swept_and_of_living_ones_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me = os.getpid()
    here, elsewhere = directory._machine_identity(), "0123abcd"
    leftovers = {
        f".step-00000001.{here}-{dead.pid}-77.ab12": False,
        f".step-00000001.{here}-{me}-1.ab12": False,  # our number, but of a process that began at another time
        f".step-00000001.{here}-{me}-{directory.process.start_ticks(me)}.ab12": True,
        f".step-00000001.{elsewhere}-{dead.pid}-77.ab12": True,  # of a host that shares the folder: may well be alive
        f".step-00000001.{elsewhere}-{dead.pid}-77.cd34": False,  # likewise, but untouched for two days
        ".removed.ab12": False,
    }
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
        if name.endswith("cd34"):
            os.utime(tmp_path / name, (time.time() - 2 * 86400,) * 2)
    assert CheckpointDirectory(tmp_path).newest() is None
    CheckpointDirectory(tmp_path).write(snapshot(2))
    assert names(tmp_path) == sorted([*(name for name, stays in leftovers.items() if stays), "step-00000002"])


WRITING = (directory.__file__, files.__file__, manifest.__file__, safetensors_file.__file__)


def forked(play: Callable[[], object]) -> int:
    """A process that does this and ends with 0, or with 3 if another writer has overtaken it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        play()
        code = 0
    except directory.CheckpointOvertaken:
        code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def lines_of(play: Callable[[], object], at_line: Callable[[int], None]) -> None:
    """Calls back before each line of the files that write checkpoints."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in WRITING:
            return None
        if event == "line":
            count += 1
            at_line(count)
        return trace

    sys.settrace(trace)
    try:
        play()
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("again", [False, True])
def test_a_writer_killed_anywhere_leaves_nothing_that_looks_whole_and_is_not(tmp_path: Path, again: bool) -> None:
    """kill -9 before any of its lines, drawn at random; with a checkpoint of the same step there before, or without."""

    def prepared(name: str) -> CheckpointDirectory:
        checkpoints = CheckpointDirectory(tmp_path / name)
        for step in (10, 20) if again else (10,):
            checkpoints.write(snapshot(step))
        return CheckpointDirectory(checkpoints.folder)

    lines: list[int] = []
    lines_of(partial(prepared("whole").write, snapshot(20)), lines.append)
    chance = random.Random(again)

    def kill(line: int, last: int) -> None:
        if line == last:
            os.kill(os.getpid(), signal.SIGKILL)

    steps_found = set()
    for last in [*chance.sample(lines[:-1], 10), lines[-1]]:
        checkpoints = prepared(str(last))
        folder, writes = checkpoints.folder, partial(checkpoints.write, snapshot(20))
        pid = forked(lambda writes=writes, last=last: lines_of(writes, lambda line: kill(line, last)))  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        newest = CheckpointDirectory(folder).newest()
        assert newest is not None and newest.skipped == []
        assert_same(newest.snapshot, snapshot(newest.snapshot.step))
        steps_found.add(newest.snapshot.step)
        CheckpointDirectory(folder).write(snapshot(20))
        assert names(folder) == ["step-00000010", "step-00000020"], "what the dead writer left is swept"
    assert steps_found == ({20} if again else {10, 20})


@pytest.mark.parametrize(
    ("meanwhile", "code", "standing"),
    [
        ((), 0, [10, 20]),
        ((20,), 3, [10, 20]),
        ((20, 30, 40), 3, [30, 40]),
        ((12,), 0, [12, 20]),  # the others had gone back to 10: 20 is still a good checkpoint of the same run
    ],
)
def test_a_writer_that_was_stopped_wakes_up_when_another_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: tuple[int, ...], code: int, standing: list[int]
) -> None:
    CheckpointDirectory(tmp_path).write(snapshot(10))
    real = manifest.write_manifest

    def seal_and_stop(folder: Path, *, step: int, names: tuple[str, ...]) -> None:
        real(folder, step=step, names=names)
        os.kill(os.getpid(), signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_manifest", seal_and_stop)
        pid = forked(lambda: CheckpointDirectory(tmp_path).write(snapshot(20)))
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    successor = CheckpointDirectory(tmp_path)
    for step in meanwhile:
        successor.write(snapshot(step))
    inodes = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert names(tmp_path) == [f"step-{step:08d}" for step in standing]
    if code == 3:
        assert all((tmp_path / name).stat().st_ino == inodes[name] for name in names(tmp_path)), "nothing was touched"
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and newest.skipped == []
    assert_same(newest.snapshot, snapshot(standing[-1]))


def test_two_writers_of_the_same_steps_at_once_do_no_harm(tmp_path: Path) -> None:
    last = 25
    CheckpointDirectory(tmp_path).write(snapshot(1))

    def write_all() -> None:
        checkpoints = CheckpointDirectory(tmp_path)
        for step in range(1, last + 1):
            with suppress(directory.CheckpointOvertaken):
                checkpoints.write(snapshot(step))

    writers = {forked(write_all), forked(write_all)}
    seen = [1]
    try:
        while writers:
            newest = CheckpointDirectory(tmp_path).newest()
            assert newest is not None and newest.skipped == [], "at every moment there is one, and it is whole"
            seen.append(newest.snapshot.step)
            for pid in list(writers):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    writers.remove(pid)
                    assert os.waitstatus_to_exitcode(status) == 0
    finally:
        for pid in writers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert seen == sorted(seen), "the newest never falls"
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and newest.snapshot.step == last
    assert_same(newest.snapshot, snapshot(last))
    CheckpointDirectory(tmp_path).write(snapshot(last + 1))
    assert [name for name in names(tmp_path) if not name.startswith("step-000000")] == []
    assert len(names(tmp_path)) == 2


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("part", ["weights", "values"])
def test_a_disk_that_is_really_full(tiny_disk: Path, part: str) -> None:
    checkpoints = CheckpointDirectory(tiny_disk)
    checkpoints.write(snapshot(10))
    large = {"weights": {"z.weight": torch.zeros(100_000)}, "values": {"text": "x" * 400_000}}
    with pytest.raises(RunFolderError, match="step 20 was not written: No space left on device") as caught:
        checkpoints.write(Snapshot(**{**vars(snapshot(20)), part: large[part]}))
    assert caught.value.where[0].startswith(f"{tiny_disk} needs 40")
    assert caught.value.where[1] == "still intact: step-00000010"
    assert names(tiny_disk) == ["step-00000010"]
    checkpoints.write(snapshot(30))
    assert found(checkpoints) == (30, [])


def test_a_full_disk_is_said_once_and_that_there_is_room_again_too(tiny_disk: Path) -> None:
    live, events = run_of(), list[Event]()
    keeper = writer(tiny_disk, live, events.append)
    keeper.save(1, {})
    wait(keeper)
    filler = tiny_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    for step in (2, 3, 4):
        train(live)
        keeper.save(step, {})
        wait(keeper)
        assert keeper.policy.failing and not keeper.policy.retry_due(time.monotonic() - 1)
        assert keeper.policy.retry_due(time.monotonic() + 60)
        assert keeper.saved_step == 1, "what stands is still known"
    assert told(events) == [("CheckpointSaved", 1), ("SaveFailed", 2)]
    newest = keeper.directory.newest()
    assert newest is not None and newest.snapshot.step == 1
    filler.unlink()
    keeper.save(5, {})
    keeper.close()
    assert not keeper.policy.failing
    assert told(events) == [("CheckpointSaved", 1), ("SaveFailed", 2), ("CheckpointSaved", 5)]
    newest = keeper.directory.newest()
    assert newest is not None
    assert tensor_digests(newest.snapshot.weights.items()) == tensor_digests(live.live_snapshot(5, {}).weights.items())
