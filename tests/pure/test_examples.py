"""The examples do what their first lines promise, through the real thing: what needs no process."""

from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (here, because it sets environment variables once, when it is loaded)
import torch

import shoal
from helpers.examples import example
from helpers.places import EXAMPLES

# -- digits ---------------------------------------------------------------------------------------------------------


def test_digits_never_trains_on_what_it_is_tested_on() -> None:
    job = example("digits.py")
    (images, labels), (held_out, targets) = job.data, job.evaluate
    assert (len(images), len(labels), len(held_out), len(targets)) == (1437, 1437, 360, 360)
    trained = {image.numpy().tobytes() for image in images}
    assert not any(image.numpy().tobytes() in trained for image in held_out)


# -- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 24, "BATCH": 16, "CONTEXT": 32, "WIDTH": 32, "DEPTH": 2, "HEADS": 2}.items():
        monkeypatch.setenv(f"SHOAL_{name}", str(value))
    monkeypatch.delenv("SHOAL_DATA", raising=False)


@pytest.mark.usefixtures("small_text")
def test_text_says_how_much_text_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "little.txt").write_text("a fish")
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with pytest.raises(shoal.InputError, match="1 files with 6 characters; at least 660 are needed"):
        example("text.py")


def test_text_warms_up_and_then_falls_to_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STEPS", "100")
    job = example("text.py")
    assert job.scheduler is not None
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = job.scheduler(optimizer)
    rates = []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


# -- a loop of one's own --------------------------------------------------------------------------------------------


def test_own_loop_is_an_ordinary_loop_with_five_marked_lines() -> None:
    lines = (EXAMPLES / "own_loop.py").read_text().splitlines()
    marked = [line for line in lines if "◄" in line]
    assert len(marked) == 5
    assert all(("shoal" in line or "run." in line) for line in marked)
