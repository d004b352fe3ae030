"""Checkpoints in parts: with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.checkpoint_parts import assert_same, cut, names, pipeline, sliced, trained, write
from helpers.command import forked
from shoal.errors import CheckpointError
from shoal.recovery.checkpoint import directory, shards
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.files import ShardWriteTask, StateShard


@pytest.fixture(autouse=True)
def random_state_stays() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(before)


def test_a_shared_folder_is_swept_when_its_leader_is_gone_or_nothing_moves(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = directory._machine_identity()
    leftovers = {"ab": (f"{here}-{dead.pid}-77", False), "cd": (directory._process_identity(), True), "ef": ("", True)}
    leftovers |= {"12": ("0123abcd-1-1", True), "34": ("0123abcd-1-1", False), "56": ("", False)}
    for token, (owner, _) in leftovers.items():
        folder = tmp_path / f".step-00000001.shards-{token}"
        folder.mkdir()
        (folder / "model-1.safetensors").write_bytes(b"half")
        if owner:
            (folder / "owner").write_text(owner)
        if token in ("34", "56"):
            for path in (*folder.iterdir(), folder):
                os.utime(path, (time.time() - 3600,) * 2)
    write(CheckpointDirectory(tmp_path), trained(), sliced(), 2)
    stay = [f".step-00000001.shards-{token}" for token, (_, stays) in leftovers.items() if stays]
    assert names(tmp_path) == sorted([*stay, "step-00000002"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_killed_while_it_writes_leaves_nothing_that_looks_whole(tmp_path: Path, victim: int) -> None:
    """Processes of their own; one dies by kill -9 in the middle of its files, the leader or the other."""
    whole, layout = trained(), sliced()
    write(CheckpointDirectory(tmp_path), whole, layout, 1)

    def play(holding: StateShard) -> None:
        real = shards.save_tensors

        def dies(tensors: dict[str, Tensor], path: Path) -> None:
            real(tensors, path)
            if holding.shard_index == victim and path.name.startswith("optimizer"):
                path.write_bytes(path.read_bytes()[:100])
                os.kill(os.getpid(), signal.SIGKILL)

        shards.save_tensors = dies
        share = ShardWriteTask(state_shard=holding, token="first")
        snapshot = cut(whole, holding).capture(2, {"loss": 0.5}, task=share)
        if holding.is_leader and victim == 1:
            with pytest.raises(CheckpointError, match="shard 1 of 2 did not come"):
                CheckpointDirectory(tmp_path, stall_seconds=0.1).write_shard(snapshot, share)
        else:
            CheckpointDirectory(tmp_path).write_shard(snapshot, share)

    for part in (victim, 1 - victim):  # the dead one first: then nobody has to be waited for long
        pid = forked(partial(play, layout[part]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (-signal.SIGKILL if part == victim else 0)
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and (newest.snapshot.step, newest.skipped) == (1, [])
    write(CheckpointDirectory(tmp_path), whole, pipeline(), 2, token="second")
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "what the dead writer left is swept"
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None
    assert_same(newest.snapshot, whole.capture(2, {"loss": 0.5}))
