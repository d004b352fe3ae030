"""An error ends a run: the last whole step is saved, and a resumed run goes on with the bits of an undisturbed one."""

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from helpers.command import Caller, Result, checkpoint_sha256, events, write_job

LOOP = """\
import os

import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
alone = {} if "RANK" in os.environ else {"run_dir": "run", "resume": os.path.exists("run")}
run = shoal.join(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True), **alone)


def bug(kind):  # at step 5, on the last worker
    return run.step == 5 and run.rank == run.workers - 1 and os.path.exists(kind)


def closure(batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])  # after the batch norm has counted the lane
    if bug("closure"):
        raise KeyError("label")
    if bug("interrupt"):
        raise KeyboardInterrupt
    return loss * float("nan") if bug("nan") else loss


for epoch in run.epochs(2):
    for batch in run.batches():
        run.backward(batch, closure)
        if bug("loop"):
            raise KeyError("label")
        optimizer.step()
        optimizer.zero_grad()
"""


@lru_cache
def undisturbed(folder: Path) -> str:
    """The hash of the loop, alone."""
    (folder / "loop.py").write_text(LOOP)
    subprocess.run([sys.executable, "loop.py"], cwd=folder, check=True)
    return checkpoint_sha256(folder / "run")


@pytest.fixture
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.getbasetemp())


def fails(call: Caller, kind: str, *arguments: str) -> Result:
    """The loop on two workers, with a bug in step 5; the bug is mended afterwards."""
    Path("loop.py").write_text(LOOP)
    Path(kind).touch()
    result = call("run", "loop.py", "--workers", "2", "--run-dir", "run", *arguments)
    Path(kind).unlink()
    assert result.code == 1
    return result


@pytest.mark.parametrize(
    ("kind", "said"),
    [("closure", "worker 1, step 5, lane 2: KeyError: 'label'"), ("nan", "step 5: the loss is not finite")],
    ids=["closure", "nan"],
)
def test_the_step_before_an_error_is_saved(kind: str, said: str, expected: str, call: Caller) -> None:
    result = fails(call, kind)
    assert f"error: {said}" in result.err
    assert "  nothing of step 5 was applied\n  checkpoint: step 5\n" in result.err
    call.good("run", "loop.py", "--workers", "3", "--resume", "run")
    assert checkpoint_sha256(Path("run")) == expected


def test_what_is_not_saved(call: Caller) -> None:
    # Whether the optimizer has stepped is not known.
    result = fails(call, "loop")
    assert "  step 5 was being applied: it could not be saved\n  no checkpoint was written\n" in result.err
    Path("closure").touch()
    result = call("run", "loop.py", "--workers", "2", "--run-dir", "off", "--no-save-on-error")
    assert "  nothing of step 5 was applied\n  no checkpoint was written\n" in result.err


def assert_begins_again(shown: str) -> None:
    assert "no checkpoint was written: the run begins again from the fresh model" in shown
    (resumed,) = events(Path("run"), "run-resumed")
    assert (resumed["step"], resumed["path"]) == (0, "")


def test_a_loop_that_failed_before_its_first_checkpoint_begins_again(expected: str, call: Caller) -> None:
    assert "fix: go on with --resume" not in fails(call, "closure", "--no-save-on-error").err
    assert_begins_again(call.good("run", "loop.py", "--workers", "3", "--resume", "run", "--plain").err)
    assert checkpoint_sha256(Path("run")) == expected
    call.good("run", "loop.py", "--workers", "2", "--resume", "run")  # now it has one, and is done
    assert [each["step"] for each in events(Path("run"), "run-resumed")] == [0, 16]


def test_a_loop_without_a_driver_that_failed_before_its_first_checkpoint_begins_again(expected: str) -> None:
    Path("loop.py").write_text(LOOP)
    Path("loop").touch()
    failed = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True)
    assert failed.returncode != 0 and not list(Path("run").glob("checkpoints/step-*"))
    Path("loop").unlink()
    again = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True)
    assert_begins_again(again.stderr)
    assert checkpoint_sha256(Path("run")) == expected


def test_a_job_that_failed_before_its_first_checkpoint_begins_again(call: Caller, tmp_path: Path) -> None:
    job = write_job(tmp_path, loss=JOB_BUG)
    expected = call.train(job).sha256
    Path("bug").touch()
    assert call("train", job, "--workers", "2", "--run-dir", "run", "--no-save-on-error").code == 1
    Path("bug").unlink()
    assert_begins_again(call.good("train", job, "--resume", "run", "--workers", "2", "--plain").err)
    assert checkpoint_sha256(Path("run")) == expected


def test_an_interrupted_script_without_a_driver(expected: str) -> None:
    Path("loop.py").write_text(LOOP)
    Path("interrupt").touch()
    stopped = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True)
    assert stopped.returncode != 0
    assert stopped.stderr.endswith("checkpoint: step 5; resume=True in shoal.join goes on from there\n")
    Path("interrupt").unlink()
    subprocess.run([sys.executable, "loop.py"], check=True)
    assert checkpoint_sha256(Path("run")) == expected


JOB_BUG = """\
if step == 5 and rank == "1" and os.path.exists("bug"):
    raise KeyError("label")"""
METRIC = """
def metric(output, target):
    if os.path.exists("metric"):
        raise ValueError("metric")
    return output.mean()
"""


def test_every_shard_of_a_sharded_model_is_saved(call: Caller, tmp_path: Path) -> None:
    held_out = "evaluate=(x[:8], torch.stack([labels, labels], 1)[:8]), metrics={'m': metric}, evaluate_every=6"
    job = write_job(tmp_path, loss=JOB_BUG, top=METRIC, fields=held_out)
    expected = call.train(job).sha256
    Path("bug").touch()
    result = call("train", job, "--layout", "pipeline=2", "--run-dir", "run")
    assert "error: worker 1, step 5, lane 0: KeyError: 'label'" in result.err
    assert "  nothing of step 5 was applied\n  checkpoint: step 5\n" in result.err
    Path("bug").unlink()

    # The error of a metric comes when the step is applied: it is saved with it.
    Path("metric").touch()
    result = call("train", job, "--resume", "run", "--layout", "pipeline=2")
    assert "ValueError: metric" in result.err and "  checkpoint: step 6\n" in result.err
    Path("metric").unlink()
    assert call.train(job, "--resume", "run").sha256 == expected


COUNTING = """
def constant(output, target):
    if os.path.exists("metric"):
        raise ValueError("metric")
    return torch.ones(())


class Bug(shoal.Callback):
    on_all_workers = True

    def on_step(self, info):
        kind = {4: "callback", 8: "last"}.get(info.step)
        if kind and os.path.exists(kind):
            raise ValueError(kind)


class Count(shoal.Callback):
    on_all_workers = True

    def __init__(self):
        self.losses, self.evaluations = [], []

    def on_step(self, info):
        self.losses.append((info.step, info.loss, "0.weight" in info.gradients))

    def on_evaluate(self, info):
        self.evaluations.append(info.step)

    def state_dict(self):
        return {"losses": self.losses, "evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.losses, self.evaluations = state["losses"], state["evaluations"]

    def on_end(self, info):
        if info.leader:
            with open("told", "w") as file:
                print(self.losses, self.evaluations, file=file)
"""


@pytest.mark.parametrize(("kind", "first"), [("metric", 2), ("callback", 4), ("last", 8)], ids=str)  # when it fails
def test_an_evaluation_that_an_error_has_cut_off_counts(kind: str, first: int, call: Caller, tmp_path: Path) -> None:
    """The metric never improves: training ends after three evaluations more, so each that is left out is two steps."""
    held_out = "evaluate=(x[:8], torch.stack([labels, labels], 1)[:8]), metrics={'m': constant}, evaluate_every=2"
    stops = "steps=10, patience=3, monitor='max m', keep_best='max m', callbacks=[Bug(), Count()]"
    job = write_job(tmp_path, top=COUNTING, fields=f"{held_out}, {stops}")
    expected = call.train(job)
    told = Path("told").read_text()
    assert expected.value["steps"] == 8
    Path(kind).touch()
    result = call("train", job, "--workers", "2", "--run-dir", "run")
    assert f"ValueError: {kind}" in result.err and f"  checkpoint: step {first}\n" in result.err
    Path(kind).unlink()
    resumed = call.train(job, "--resume", "run", "--workers", "2")
    assert (resumed.value["steps"], resumed.sha256) == (8, expected.sha256)
    assert Path("told").read_text() == told


def test_a_mended_loss_goes_on_where_the_user_accepts_it(call: Caller, tmp_path: Path) -> None:
    bug = 'if step == 3 and rank == "1":\n    raise KeyError("label")'
    job = write_job(tmp_path, loss=bug)
    assert "  checkpoint: step 3\n" in call("train", job, "--workers", "2", "--run-dir", "run").err
    write_job(tmp_path, loss="pass")
    expected = call.train(job).sha256
    result = call("train", job, "--resume", "run")
    assert (
        result.code == 2
        and "the job's arithmetic changed: the code of loss (loss) is another than in the checkpoint" in result.err
    )
    assert "--accept loss goes on with the new one" in result.err
    assert call("train", job, "--resume", "run", "--accept", "loss", "--workers", "2", "--stop-after", "5").code == 3
    again = call.train(job, "--resume", "run")  # the checkpoints are of the new loss, and remember the change
    assert again.sha256 == expected
    assert again.value["changes"] == ["another loss from step 3 on"]
    assert again.value["notes"] == [
        "another loss from step 3 on: the result is not that of one job from its first step"
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--resume", "run", "--accept", "batch"], "--accept batch: it may not change on the way"),
        (["--accept", "loss"], "--accept loss is for a run that goes on\n  fix: --resume RUN"),
    ],
)
def test_what_cannot_be_accepted(options: list[str], said: str, call: Caller, tmp_path: Path) -> None:
    result = call("train", write_job(tmp_path), *options)
    assert result.code == 2 and said in result.err
