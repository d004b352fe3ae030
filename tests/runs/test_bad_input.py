"""Mistakes a user makes: one plain message with both sides and what to change, and nothing lost or left behind."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.command import Caller, assert_plain, checkpoint_sha256, events, newest, write_job

# -- refused before anything begins -----------------------------------------------------------------------------------


def test_several_jobs_and_none_named(call: Caller, tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("job = ", "small = ") + "large = small\n")
    assert_plain(call("train", "job.py"), "job.py has several jobs: small, large", "job.py:small")
    assert call("train", "job.py:large", "--dry-run").code == 0


# -- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        ("return F.cross_entropy(output, label, reduction='none')", "a tensor of shape (4,)"),
        ("return value.item()", "float"),
        ("return None", "NoneType"),
    ],
)
def test_a_loss_that_is_not_a_scalar(loss: str, got: str, call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=loss)
    result = call("train", "job.py", "--workers", "2", "--run-dir", "run")
    assert_plain(result, f"step 0, lane 0: the loss is {got}; it must be a scalar mean, or (sum, count)", "reduction=")


NOT_FINITE = "if step == 5 and lane == 2 and os.environ.get('FAULT'):\n    value = value * float('nan')"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_is_not_finite_changes_nothing(
    workers: int, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, loss=NOT_FINITE)
    undisturbed = call.train("job.py").sha256
    stopped = call("train", "job.py", "--stop-after", "5", "--json")
    assert stopped.code == 3

    monkeypatch.setenv("FAULT", "1")
    result = call("train", "job.py", "--workers", str(workers), "--run-dir", "run", "--checkpoint-every", "1")
    worker = 0 if workers == 1 else 1
    assert_plain(
        result,
        f"step 5: the loss is not finite (worker {worker} lane 2)",
        "nothing of step 5 was applied",
        "checkpoint: step 5",
        "--nonfinite skip",
        code=1,
    )
    assert newest(Path("run")).snapshot.step == 5
    assert checkpoint_sha256(Path("run")) == stopped.sha256

    monkeypatch.delenv("FAULT")
    assert call.train("job.py", "--resume", "run").sha256 == undisturbed


def test_a_step_that_is_skipped_is_recorded_and_the_same_on_any_workers(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, loss=NOT_FINITE)
    undisturbed = call.train("job.py").sha256
    monkeypatch.setenv("FAULT", "1")
    found = []
    for workers in (1, 2):
        result = call.train("job.py", "--workers", str(workers), "--nonfinite", "skip")
        assert result.value["steps"] == 8
        assert result.value["skipped_steps"] == [{"step": 5, "where": [[workers - 1, 2]]}]
        assert [event["step"] for event in events(Path(result.value["folder"]), "step-skipped")] == [5]
        found.append(result.sha256)
    assert found[0] == found[1] != undisturbed


# -- members that do not fit together ---------------------------------------------------------------------------------


UNLIKE = """\
import os
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ["RANK"] == "1":
    torch.backends.mkldnn.enabled = False
model = nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
shoal.join(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
print("joined")
"""


def test_a_member_that_computes_other_bits_is_refused_by_name(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "unlike.py").write_text(UNLIKE)
    result = call("run", "unlike.py", "--workers", "2")
    assert_plain(
        result,
        "worker 1 computes other bits than worker 0",
        "worker 0 has oneDNN: True; worker 1 has oneDNN: False",
        "fix: give every worker the same",
        code=1,
    )
    assert "joined" not in result.err


# -- folders and checkpoints ------------------------------------------------------------------------------------------


def stopped_run(call: Caller, folder: Path, **job: str) -> Path:
    """A run that stopped after step 4 of 8, with checkpoints of steps 2 and 4."""
    write_job(folder, **job)
    result = call("train", "job.py", "--run-dir", "run", "--checkpoint-every", "2", "--stop-after", "4")
    assert result.code == 3
    assert result.err.splitlines()[-3:] == [
        "stopped after step 4: --stop-after 4",
        "  checkpoint: step 4",
        "  fix: go on with --resume run",
    ]
    return Path("run")


def contents(folder: Path) -> dict[str, bytes]:
    """What a run is worth; its logs grow with each try."""
    kept = [folder / "config.json", folder / "plan.json", folder / "report.json", *(folder / "checkpoints").rglob("*")]
    return {str(path): path.read_bytes() for path in kept if path.is_file()}


def flip(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def make_foreign(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"format": "something else"}')


DAMAGES: dict[Callable[[Path], None], str] = {
    flip: "sha256 differs",
    truncate: "bytes, the manifest says",
    make_foreign: "not a Shoal checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_left_for_the_older_one(
    damage: Callable[[Path], None], call: Caller, tmp_path: Path
) -> None:
    run = stopped_run(call, tmp_path)
    undisturbed = call.train("job.py").sha256
    damage(run / "checkpoints" / "step-00000004")
    result = call("train", "job.py", "--resume", "run", "--workers", "2")
    assert result.code == 0
    assert "step-00000004" in result.err
    assert DAMAGES[damage] in result.err
    report = json.loads((run / "report.json").read_text())
    assert (report["weights_sha256"], events(run, "run-resumed")[0]["step"]) == (undisturbed, 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_only_damaged_checkpoints_are_refused_and_left_alone(
    damage: Callable[[Path], None], call: Caller, tmp_path: Path
) -> None:
    run = stopped_run(call, tmp_path)
    for checkpoint in (run / "checkpoints").iterdir():
        damage(checkpoint)
    before = contents(run)
    result = call("train", "job.py", "--resume", "run", "--workers", "2")
    assert_plain(result, "none of the 2 checkpoints in run/checkpoints can be used", DAMAGES[damage], "fix: ")
    assert contents(run) == before


CHANGES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "seed": (["--set", "seed=7"], {}, "seed was 0 in the checkpoint and is 7 now"),
    "lanes": (["--set", "lanes=8"], {}, "lanes was 4 in the checkpoint and is 8 now"),
    "batch": (["--set", "batch=32"], {}, "batch was 16 in the checkpoint and is 32 now"),
    "shuffle": (["--set", "shuffle=true"], {}, "shuffle was 'in order' in the checkpoint and is 'shuffled' now"),
    "last": (["--set", "last=drop"], {}, "last was 'short' in the checkpoint and is 'drop' now"),
    "loss": ([], {"loss": "value = value * 2"}, "the code of loss (loss) is another than in the checkpoint"),
    "optimizer": (
        [],
        {"fields": "optimizer=lambda named: torch.optim.Adam(named)"},
        "the code of optimizer (<lambda>)",
    ),
    "model": ([], {"fields": "model=lambda: nn.Linear(8, 3)"}, "the code of model (<lambda>)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_other_arithmetic(name: str, call: Caller, tmp_path: Path) -> None:
    run = stopped_run(call, tmp_path)
    before = contents(run)
    arguments, changes, text = CHANGES[name]
    write_job(tmp_path, **changes)
    result = call("train", "job.py", "--resume", "run", *arguments)
    assert_plain(result, "the job's arithmetic changed", text, f"set {name} back, or start a new run")
    assert contents(run) == before

    write_job(tmp_path)
    assert call.train("job.py", "--resume", "run").sha256 == call.train("job.py").sha256


def test_a_longer_run_of_the_same_arithmetic_does_go_on(call: Caller, tmp_path: Path) -> None:
    stopped_run(call, tmp_path)
    longer = call.train("job.py", "--resume", "run", "--set", "steps=12")
    assert longer.sha256 == call.train("job.py", "--set", "steps=12").sha256


def test_a_run_without_a_checkpoint_cannot_be_resumed(call: Caller, tmp_path: Path) -> None:
    run = stopped_run(call, tmp_path)
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    result = call("train", "job.py", "--resume", "run")
    assert_plain(result, "run/checkpoints holds no checkpoint to resume from", "start without --resume")
    assert contents(run) == before


def test_a_folder_that_holds_a_run_is_not_overwritten(call: Caller, tmp_path: Path) -> None:
    run = stopped_run(call, tmp_path)
    before = contents(run)
    result = call("train", "job.py", "--run-dir", "run")
    assert_plain(result, "run already holds a run (report.json, events.jsonl)", "--resume run to go on with it")
    assert contents(run) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(path: Path) -> Path:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 1024)
        except OSError:
            return path


# Prints go to a log on the same disk. In step 7 the checkpoint of step 6 may be on its way; that of step 4 is not.
FILLS_UP = """\
print("step", step)
if step == 7 and lane == 3 and os.environ.get("FILL"):
    try:
        with open(os.environ["FILL"], "wb", buffering=0) as file:
            while True:
                file.write(b"0" * 1024)
    except OSError:
        pass
print("step", step, "is done")"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_disk_that_fills_up_is_said_and_costs_no_checkpoint(
    workers: str, call: Caller, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path, loss=FILLS_UP)
    undisturbed = call.train("job.py").sha256
    run = small_disk / "run"
    monkeypatch.setenv("FILL", str(small_disk / "fill"))
    result = call("train", "job.py", "--run-dir", run, "--checkpoint-every", "2", "--workers", workers)
    assert_plain(
        result,
        "the checkpoint of step 8 was not written: No space left on device",
        "error: trained to step 8, but not saved",
        "still intact: step-0000000",
        "fix: free some space there",
        code=1,
    )
    assert newest(run).snapshot.step in (4, 6)

    more = fill(small_disk / "more")  # what a failed write had taken is free again
    refused = call("train", "job.py", "--resume", run)
    assert_plain(refused, f"cannot write to {run}: No space left on device", "free some space there")

    more.unlink()
    (small_disk / "fill").unlink()
    monkeypatch.delenv("FILL")
    assert call.train("job.py", "--resume", run).sha256 == undisturbed


def test_a_disk_that_is_full_from_the_start(call: Caller, tmp_path: Path, small_disk: Path) -> None:
    write_job(tmp_path)
    filler = fill(small_disk / "fill")
    result = call("train", "job.py", "--run-dir", small_disk / "run")
    assert_plain(result, "cannot write to", "No space left on device", "--run-dir DIR")
    assert list(small_disk.iterdir()) == [filler]
