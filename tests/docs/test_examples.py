"""The examples do what their first lines promise, through the real thing: forked workers, run folders, the command."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (here, because it sets environment variables once, when it is loaded)
from torch import nn

import shoal
from helpers.command import Forked, program
from helpers.examples import example
from helpers.places import EXAMPLES


def characters(job: shoal.Job) -> int:
    """How many characters the model of text.py tells apart."""
    assert not isinstance(job.model, nn.Module)
    return len(job.model().get_parameter("embed.weight"))


# -- digits ---------------------------------------------------------------------------------------------------------


def test_digits_reaches_its_target_before_its_last_step() -> None:
    job = example("digits.py")
    report = shoal.train(job, workers=2, quiet=True)
    assert report.value["target"]["reached"]
    assert report.metrics["accuracy"] >= 0.97
    assert report.steps < 12 * 23  # 12 passes over 1,437 samples in batches of 64


def test_digits_gives_the_same_weights_on_one_and_two_workers() -> None:
    job = example("digits.py").changed(steps=5)
    one, two = (shoal.train(job, workers=workers, quiet=True) for workers in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert one.metrics == two.metrics


# -- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 24, "BATCH": 16, "CONTEXT": 32, "WIDTH": 32, "DEPTH": 2, "HEADS": 2}.items():
        monkeypatch.setenv(f"SHOAL_{name}", str(value))
    monkeypatch.delenv("SHOAL_DATA", raising=False)


@pytest.mark.usefixtures("small_text")
def test_text_learns_and_gives_the_same_weights_on_one_and_two_workers() -> None:
    job = example("text.py")
    one, two = (shoal.train(job, workers=workers, quiet=True) for workers in (1, 2))
    assert one.weights_sha256 == two.weights_sha256
    assert two.metrics["loss"] < 0.9 * math.log(characters(job))  # what guessing costs


@pytest.mark.usefixtures("small_text")
def test_text_ties_its_head_to_its_embedding() -> None:
    job = example("text.py").changed(steps=2)
    model = shoal.train(job, workers=2, quiet=True).model()
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")


@pytest.mark.usefixtures("small_text")
def test_text_reads_the_text_files_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "b.txt").write_text("the shoal turns as one\n" * 60)
    (folder / "a.txt").write_text("0123456789" * 30)
    (folder / "c.md").write_text("~" * 1000)  # not a text file
    monkeypatch.setenv("SHOAL_DATA", str(folder))
    job = example("text.py").changed(steps=3)
    letters = sorted(set("the shoal turns as one\n0123456789"))
    assert characters(job) == len(letters)
    first, _ = job.data[0]
    assert "".join(letters[number] for number in first) == ("0123456789" * 4)[:32]  # a.txt comes first
    report = shoal.train(job, workers=2, quiet=True)
    assert report.steps == 3
    assert report.metrics["loss"] > 0


# -- a loop of one's own --------------------------------------------------------------------------------------------


def final_loss(text: str) -> float:
    (found,) = re.findall(r"final loss (\S+)", text)
    return float(found)


def test_own_loop_prints_the_same_loss_alone_and_on_two_workers() -> None:
    script = EXAMPLES / "own_loop.py"
    alone = program(script)
    assert alone.code == 0, alone.err
    assert final_loss(alone.out) < 0.2
    with Forked("run", script, "--workers", "2", "--plain") as running:
        together = running.end()
    assert together.code == 0, together.err
    assert final_loss(together.out + together.err) == final_loss(alone.out)


# -- survive --------------------------------------------------------------------------------------------------------


def test_a_killed_worker_changes_nothing() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "survive.py")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    fault, calm, hurt = done.stdout.splitlines()
    assert fault.startswith("worker 1: ")
    assert calm.split()[-1] == hurt.split()[-1]
