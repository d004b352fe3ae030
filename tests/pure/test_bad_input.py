"""Mistakes a user makes: what needs no process."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shoal
from helpers.command import Caller, assert_plain, write_job
from shoal.errors import JobError

# -- refused before anything begins -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "missing file": (["jop.py"], ["no file jop.py", "did you mean job.py?"]),
    "missing file, nothing near": (["elsewhere/x.py"], ["no file elsewhere/x.py", "shoal train path/to/file.py"]),
    "no file at all": ([], ["a file is missing", "shoal train digits.py"]),
    "wrong name in it": (["job.py:jop"], ["job.py has no job named 'jop'; it has job", "fix: job.py:job"]),
    "uneven cut": (
        ["job.py", "--set", "batch=18", "--set", "lanes=4"],
        ["a batch of 18 cannot be cut into 4 lanes", "batch=16 or 20, or lanes=1 or 2 or 3 or 6"],
    ),
    "uneven cut, with microbatches": (
        ["job.py", "--set", "microbatches=3"],
        ["a batch of 16 cannot be cut into 4 lanes of 3 microbatches (12 in all)", "batch=12 or 24"],
    ),
    "more workers than lanes": (
        ["job.py", "--workers", "5"],
        ["5 workers but 4 lanes", "--workers 4, or --set lanes=8"],
    ),
    "no workers": (["job.py", "--workers", "0"], ["0 workers: at least 1", "--workers 1"]),
    "workers in words": (["job.py", "--workers", "two"], ["--workers", "'two'", "shoal train --help"]),
    "data smaller than a batch": (
        ["job.py", "--set", "batch=512"],
        ["the data has 160 samples, fewer than a batch of 512", "a smaller batch"],
    ),
    "steps and epochs": (
        ["job.py", "--set", "steps=3", "--set", "epochs=1"],
        ["steps or epochs; this one has both", "steps=1000, or epochs=10"],
    ),
    "neither steps nor epochs": (["job.py", "--set", "steps=none"], ["steps or epochs; this one has neither"]),
    "unknown metric": (
        ["job.py", "--set", "target=recall >= 0.9"],
        ["target 'recall >= 0.9' names the metric 'recall', but the job measures loss"],
    ),
    "target that is no target": (
        ["job.py", "--set", "target=good"],
        ["'good' is not understood", 'target="accuracy >= 0.97"'],
    ),
    "target without held-out data": (
        ["job.py", "--set", "target=loss <= 1"],
        ["target 'loss <= 1' without evaluate", "evaluate=held_out_data"],
    ),
    "unknown option": (["job.py", "--wrokers", "2"], ["unknown option --wrokers", "did you mean --workers?"]),
    "unknown option, nothing near": (["job.py", "--zzz"], ["unknown option --zzz", "shoal train --help"]),
    "an argument too many": (["job.py", "other.py"], ["unknown argument other.py"]),
    "unknown setting": (["job.py", "--set", "stepz=5"], ["--set stepz", "did you mean --set steps=5?"]),
    "a setting that is no name": (["job.py", "--set", "model=x"], ["--set model", "one of batch, steps"]),
    "bad value": (["job.py", "--set", "steps=many"], ["--set steps=many", "'many' is not a whole number"]),
    "bad switch": (["job.py", "--set", "shuffle=2"], ["--set shuffle=2", "neither true nor false"]),
    "no value": (["job.py", "--set", "steps"], ["--set steps: a name and a value", "--set steps=50"]),
    "value out of range": (["job.py", "--set", "steps=0"], ["steps=0 must be a whole number from 1 up"]),
    "unknown precision": (["job.py", "--set", "precision=fp8"], ["precision='fp8'", "one of 'fp32'"]),
    "shares in words": (["job.py", "--workers", "2", "--shares", "big,small"], ["'big,small' are not numbers", "3,1"]),
    "shares of others": (["job.py", "--workers", "2", "--shares", "1,2,1"], ["3 shares for 2 workers", "--workers 3"]),
    "shares of nothing": (["job.py", "--workers", "2", "--shares", "1,0"], ["'1,0': each must be above 0"]),
    "stop before the first step": (["job.py", "--stop-after", "0"], ["--stop-after 0: a number from 1 up"]),
    "no time at all": (["job.py", "--timeout", "0"], ["--timeout 0.0: seconds above 0"]),
    "a missing plan": (["job.py", "--plan", "no.json"], ["plan no.json cannot be read: No such file"]),
    "a plan that is not JSON": (["job.py", "--plan", "job.py"], ["job.py is not JSON"]),
    "a plan that is something else": (["job.py", "--plan", "other.json"], ["other.json is not a plan", "answer"]),
    "a plan of other lanes": (["job.py", "--plan", "eight.json"], ["the plan has 8 lanes, the job 4"]),
    "a plan of other workers": (
        ["job.py", "--plan", "good.json", "--workers", "3"],
        ["--workers 3, but the plan has 2", "leave --workers out"],
    ),
    "a plan with a hole": (["job.py", "--plan", "hole.json"], ["lanes 3 to 4 to worker 1; they must begin at 2"]),
    "nothing to resume": (["job.py", "--resume"], ["no runs in runs", "shoal train FILE starts one"]),
    "no such run": (["job.py", "--resume", "ab12"], ["no run 'ab12'", "no runs in runs"]),
    "a folder without a run": (["job.py", "--resume", "--run-dir", "."], ["holds no run", "shoal runs"]),
    "a folder below a file": (
        ["job.py", "--run-dir", "job.py/below"],
        ["cannot write to job.py/below: Not a directory", "--run-dir DIR"],
    ),
    "a misspelt part to accept": (
        ["job.py", "--resume", "x", "--accept", "los"],
        ["--accept los", "did you mean loss?"],
    ),
    "arguments for a script": (["job.py", "--", "--lr", "1"], ["after --", "train runs none"]),
}


def write_plans(folder: Path) -> None:
    good = {"workers": 2, "lanes": 4, "assignment": [[0, 2], [2, 4]]}
    plans = {
        "good": good,
        "eight": good | {"lanes": 8, "assignment": [[0, 4], [4, 8]]},
        "hole": good | {"assignment": [[0, 2], [3, 4]]},
        "other": {"answer": 42},
    }
    for name, value in plans.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_begins(name: str, call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    write_plans(tmp_path)
    before = sorted(tmp_path.iterdir())
    arguments, texts = REFUSED[name]
    assert_plain(call("train", *arguments), *texts)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("import shoal\njob = shoal.Job(\n", ["job.py is not valid Python", "job.py:2  job = shoal.Job("]),
        ("def f():\n    return 1 / 0\nf()\n", ["ZeroDivisionError: division by zero", "job.py:2  return 1 / 0"]),
        (
            "import no_such_module\n",
            ["ModuleNotFoundError", "no_such_module", "job.py:1  import no_such_module", "pip install no_such_module"],
        ),
        ("a = 1\n", ["job.py has no shoal.Job", "job = shoal.Job(model=…"]),
        ("import sys\nsys.exit('gone')\n", ["job.py could not be loaded", "job.py:2  sys.exit('gone')"]),
    ],
)
def test_a_file_that_cannot_be_loaded(content: str, texts: list[str], call: Caller, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(content)
    assert_plain(call("train", "job.py"), *texts)
    assert not (tmp_path / "runs").exists()


def test_a_job_that_is_refused_names_its_line(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields="lanes=3")
    result = call("train", "job.py")
    assert_plain(result, "a batch of 16 cannot be cut into 3 lanes", "job.py:", "job = shoal.Job(")


def test_unknown_command_gets_the_nearest(call: Caller) -> None:
    assert_plain(call("trian", "job.py"), "trian", "did you mean train?")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["run", "missing.py"], ["no script missing.py", "shoal run path/to/script.py"]),
        (["run", "jobs.py"], ["no script jobs.py", "did you mean job.py?"]),
        (["run", "job.py", "--workers", "0"], ["0 workers: at least 1", "--workers 1"]),
        (["verify", "missing.py"], ["no file missing.py"]),
        (["verify", "job.py", "--workers", "1,x"], ["--workers 1,x: whole numbers from 1 up", "--workers 1,2,4"]),
        (["verify", "job.py", "--workers", "0"], ["--workers 0: whole numbers from 1 up"]),
        (["verify", "job.py", "--workers", "1,5"], ["5 workers but 4 lanes"]),
        (["verify", "job.py", "--steps", "0"], ["--steps 0: at least 1"]),
        (["verify", "job.py", "--shares", "1,x"], ["'1,x' are not numbers"]),
        (["verify", "job.py", "--against", "fancy"], ["--against", "fancy", "plain"]),
        (["report"], ["no runs in runs"]),
        (["report", "ab12"], ["no run 'ab12'"]),
    ],
)
def test_other_commands_refuse_as_plainly(arguments: list[str], texts: list[str], call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    assert_plain(call(*arguments), *texts)
    assert not (tmp_path / "runs").exists()


# -- data that has no exact order -------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(4, 2))


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(2)


def sharded_loader() -> DataLoader[Tensor]:
    return DataLoader(Rows(), batch_size=4, sampler=DistributedSampler(Rows(), num_replicas=2, rank=0))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (Stream(), "an IterableDataset has no sample numbers"),
        (DataLoader(Stream(), batch_size=4), "a DataLoader over an IterableDataset"),
        (sharded_loader(), "a DataLoader with a DistributedSampler has one rank's samples"),
        (42, "int is not a supported type"),
        ((torch.zeros(3), torch.zeros(4)), "tensors of different lengths: 3, 4"),
    ],
)
def test_data_that_cannot_be_ordered(data: object, text: str, tmp_path: Path) -> None:
    job = shoal.Job(
        model=lambda: nn.Linear(2, 1),
        data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=1,
    )
    with pytest.raises(JobError) as caught:
        shoal.train(job, quiet=True)
    assert text in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_tensorboard_that_is_not_installed(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    write_job(tmp_path)
    result = call("train", "job.py", "--tensorboard")
    assert_plain(result, "needs the package tensorboard, which is missing", "pip install 'shoal[tensorboard]'")
    assert not (tmp_path / "runs").exists()
