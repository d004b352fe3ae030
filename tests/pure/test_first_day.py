"""Mistakes of a first day are answered with what to type; files are looked at before they are executed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.command import Caller, refused, write_job
from helpers.job_files import LOOP
from shoal.driver.make_plan import plan_for
from shoal.errors import JobError
from shoal.job.load import load_job
from shoal.job.loss import Objective
from shoal.job.missing_package import install_command
from shoal.job.read_source import FileKind, file_kind
from shoal.report.run_folder import find_run, list_runs
from shoal.report.run_index import INDEX_NAME, add_run
from shoal.worker.run_config import RunConfig
from shoal.worker.training_notes import UnchangedWeights
from shoal.worker.training_state import Batch

# -- which file it is -------------------------------------------------------------------------------------------------

PLAIN = "import torch\nmodel = torch.nn.Linear(1, 1)\nmodel(torch.ones(1)).sum().backward()\n"
SOURCES: dict[str, tuple[str, FileKind]] = {
    "a job": ("import shoal\njob = shoal.Job(model=None)\n", "job"),
    "a job by another name": ("from shoal import Job as Task\njob = Task(model=None)\n", "job"),
    "a job that joins in a function": ("import shoal\njob = shoal.Job()\ndef f(): {shoal.join(1, 2, 3)}\n", "job"),
    "a loop": (LOOP, "joins"),
    "a loop by other names": ("import shoal as s\ndef main():\n    return s.join(1, 2, 3)\n", "joins"),
    "an imported join": ("from shoal import join\nrun = join(1, 2, 3)\n", "joins"),
    "another join": ("import os\nname = os.path.join('a', 'b')\n", "unknown"),
    "a plain script": (PLAIN, "script"),
    "a script with a group": ("import torch.distributed as dist\ndist.init_process_group('gloo')\n", "script"),
    "a job of a neighbour": ("from with_job import job\n", "job"),
    "a loop of a neighbour": ("from package.loop import main\nmain()\n", "joins"),
    "a loop beside a job": ("import with_job\n" + LOOP, "joins"),
    "not Python": ("def", "unknown"),
    "nothing": ("", "unknown"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_file_is_shows_in_its_source(name: str, tmp_path: Path) -> None:
    text, kind = SOURCES[name]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "loop.py").write_text("from package import loop\n" + LOOP)
    (tmp_path / "with_job.py").write_text("import shoal\njob = shoal.Job()\n")
    (tmp_path / "file.py").write_text(text)
    assert file_kind(tmp_path / "file.py") == kind
    assert file_kind(tmp_path / "missing.py") == "unknown"


@pytest.mark.parametrize("text", [LOOP, PLAIN])
@pytest.mark.parametrize("command", ["train", "plan", "chaos"])
def test_a_script_is_not_executed_to_find_a_job(command: str, text: str, call: Caller, tmp_path: Path) -> None:
    Path("my loop.py").write_text(f"{text}\nopen('executed', 'w')\n")
    why, fix = refused(call, command, "my loop.py").splitlines()
    assert why == "my loop.py has no shoal.Job but a loop of its own, which only shoal run starts"
    assert fix == "  fix: shoal run 'my loop.py'"
    assert [path.name for path in tmp_path.iterdir()] == ["my loop.py"]


def test_verify_says_what_a_script_lacks(call: Caller, tmp_path: Path) -> None:
    Path("plain.py").write_text(PLAIN)
    told = refused(call, "verify", "plain.py")
    assert (
        "joins no run, so Shoal does not know its weights" in told
        and "or start it as it is: shoal run plain.py" in told
    )
    Path("loop.py").write_text(LOOP)
    assert "--layouts needs a shoal.Job, and loop.py has a loop" in refused(
        call, "verify", "loop.py", "--layouts", "data=2"
    )
    assert "--set needs a shoal.Job" in refused(call, "verify", "loop.py", "--set", "steps=3")
    write_job(tmp_path)
    assert "arguments after -- belong to a script, and a job has --set" in refused(call, "verify", "job.py", "--", "3")


# -- names that are nearly right --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--epoch", "3"], "--set epochs=3?"),
        (["--epochs=3"], "--set epochs=3?"),
        (["--clip-norm", "0.5"], "--set clip_norm=0.5?"),
        (["--lane", "-q"], "--set lanes=…?"),
        (["--worker", "2"], "--workers?"),
    ],
)
def test_an_option_that_is_a_field_of_the_job(words: list[str], fix: str, call: Caller) -> None:
    for arguments in ((*words, "job.py"), ("job.py", *words)):
        assert refused(call, "train", *arguments) == f"unknown option {words[0]}\n  fix: did you mean {fix}\n"
    assert "--set" not in refused(call, "runs", *words), "it has no job"


def job(**changes: object) -> shoal.Job:
    fields = {"model": lambda: nn.Linear(1, 1), "data": None, "loss": max, "optimizer": max, "batch": 60, "steps": 1}
    return shoal.Job(**fields | changes)  # type: ignore[arg-type]


def test_a_field_that_a_job_does_not_have() -> None:
    with pytest.raises(JobError) as told:
        job(epoch=1)
    assert str(told.value) == "a job has no field epoch\n  fix: did you mean epochs=1?"
    with pytest.raises(JobError, match=r"no field xyz\n  fix: one of model, data, loss, .*, name$"):
        job(xyz=[])
    with pytest.raises(JobError, match="a job without loss, optimizer cannot be trained"):
        shoal.Job(model=nn.Linear(1, 1), data=None, batch=1, steps=1)  # type: ignore[call-arg]
    with pytest.raises(JobError, match="given by name"):
        shoal.Job(nn.Linear(1, 1))  # type: ignore[call-arg, misc]
    with pytest.raises(JobError, match="did you mean steps=5"):
        job().changed(step=5)
    assert copy.copy(job()).batch == copy.deepcopy(job()).batch == 60


def test_more_workers_than_lanes_says_how_to_have_more_lanes(call: Caller, tmp_path: Path) -> None:
    assert [job(batch=64).lanes_for(count) for count in (1, 3, 5, 64, 65)] == [1, 4, 8, 64, None]
    assert [job().lanes_for(count) for count in (5, 7, 16, 61)] == [5, 10, 20, None], "8 does not divide 60"
    assert job(batch=64, microbatches=4, lanes=4).lanes_for(17) is None
    write_job(tmp_path)
    told = refused(call, "train", "job.py", "--workers", "5", "--dry-run")
    assert "5 workers but 4 lanes" in told and "--workers 4, or --set lanes=8: another job than with 4 lanes" in told
    assert "a batch of 17 or more (it is 16)" in refused(call, "train", "job.py", "--workers", "17", "--dry-run")
    assert plan_for(load_job("job.py", ["lanes=8"]), RunConfig().changed(workers=5)).workers == 5


# -- runs in folders of their own -------------------------------------------------------------------------------------


def make_run(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "report.json").write_text("{}")
    return path


def test_runs_elsewhere_are_known(tmp_path: Path) -> None:
    root, far = Path("runs"), tmp_path / "elsewhere" / "far"
    for path in (Path("runs/7f3a"), Path("first"), far):
        add_run(make_run(path), root)
        add_run(path.resolve(), root)  # resumed, by another name
    lines = [json.loads(line)["path"] for line in (root / INDEX_NAME).read_text().splitlines()]
    assert lines == ["first", "elsewhere/far"], "the folder below runs is known anyway"
    with open(root / INDEX_NAME, "a") as index:
        index.write('{"path": "gone"}\n{"pa')  # and a line that is torn
    found = {line.id: (line.path, line.elsewhere) for line in list_runs(root)}
    assert found == {"7f3a": ("runs/7f3a", False), "first": ("first", True), "far": ("elsewhere/far", True)}
    assert find_run("fa").path == Path("elsewhere/far") and find_run("first").path == Path("first")
    away = Path("away")
    away.mkdir()
    outside = make_run(tmp_path / "out")
    add_run(outside, away / "runs")
    assert [line.path for line in list_runs(away / "runs")] == [str(outside)], "absolute where it lies outside"


def test_runs_elsewhere_survive_lines_that_name_no_folder(tmp_path: Path) -> None:
    """None of them hides the others, nor ends a run that notes itself there; a torn last line takes none with it."""
    root, fresh = Path("runs"), make_run(tmp_path / "fresh")
    make_run(tmp_path / "good")
    root.mkdir()
    Path("circle").symlink_to("circle")
    spoilt = [r'{"path":"a\u0000b"}', '{"path":"circle"}', '{"path":"' + 5000 * "x" + '"}']
    (root / INDEX_NAME).write_text("\n".join([*spoilt, '{"path":"good"}', '{"path":"ha']))
    add_run(fresh, root)
    add_run(fresh, root)
    assert {line.id for line in list_runs(root)} == {"good", "fresh"}
    assert len((root / INDEX_NAME).read_text().splitlines()) == len(spoilt) + 3


# -- losses, batches and packages -------------------------------------------------------------------------------------


def test_a_loss_that_fails_says_what_it_was_called_with() -> None:
    job = small_job(loss=lambda output: output.mean())
    with pytest.raises(TypeError) as caught:
        Objective(job, nn.Linear(2, 3))((torch.ones(4, 2), ["cat", "dog", "cat", "dog"]))
    assert caught.value.__notes__ == [
        "the loss (<lambda>) was called with (output, target): 4×3 float32, list of 4 str"
    ]


def test_a_loss_is_not_a_class() -> None:
    with pytest.raises(JobError, match="loss=CrossEntropyLoss is a class") as caught:
        small_job(loss=nn.CrossEntropyLoss)
    assert caught.value.fix == "loss=CrossEntropyLoss()"


def test_patience_that_follows_keep_best_is_named_itself() -> None:
    with pytest.raises(JobError, match="patience watches 'accuracy' without evaluate"):
        small_job(loss=nn.functional.cross_entropy, patience=3, keep_best="accuracy")


def test_a_batch_of_a_loop_has_no_entries() -> None:
    with pytest.raises(JobError, match=r"batch\[0\] works in the closure alone") as caught:
        Batch(step=0, epoch=0, indices=[1, 2])[0]
    assert "run.backward(batch" in (caught.value.fix or "")


def test_a_package_that_is_missing() -> None:
    assert install_command(ModuleNotFoundError(name="torch.no_such_part")) is None
    assert (install_command(ModuleNotFoundError(name="no_such")) or "").startswith("pip install no_such;")
    assert install_command(ModuleNotFoundError(name="cv2")) == "pip install opencv-python-headless"
    assert install_command(ImportError("other")) is None


def small_job(**fields: Any) -> shoal.Job:
    data = (torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
    whole = {"model": lambda: nn.Linear(2, 3), "data": data, "optimizer": torch.optim.SGD, "batch": 4, "steps": 1}
    return shoal.Job(**whole, **fields)


def test_a_loop_that_trains_nothing_is_noticed() -> None:
    for digests, noticed in (([7, 7], True), ([7, 8], False)):
        watch, given = UnchangedWeights(), iter(digests)
        found = [watch.look(step, lambda given=given: next(given)) for step in range(1, 20)]
        assert [text for text in found if text] == (
            ["no weight has changed from step 1 to 8: does the loop call optimizer.step()?"] if noticed else []
        )
    assert all(UnchangedWeights().look(step, lambda: 7) is None for step in range(5, 20)), "a resumed run"
