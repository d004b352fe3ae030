"""The examples with parameter servers do what their first lines promise: they learn, and say how much."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from helpers import command
from helpers.examples import sizes
from helpers.places import EXAMPLES
from shoal.job.load import load_job

CHANCE = 0.5
RANDOM_PLAY = 22  # steps that CartPole's pole stands when nobody cares


# -- recommender ------------------------------------------------------------------------------------------------------


def test_the_recommender_learns_what_people_like(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, STEPS=60, BATCH=512, PEOPLE=50, ITEMS=2000, CLICKS=20_000)
    job = load_job(str(EXAMPLES / "recommender.py"))
    report = shoal.train(job.changed(evaluate_every=60), workers=2, servers=2, sync="async", quiet=True)
    assert report.metrics["auc"] > CHANCE + 0.1, report.metrics
    assert report.steps == 60


# -- skip-gram --------------------------------------------------------------------------------------------------------


def test_skip_grams_find_neighbours_and_the_report_has_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, STEPS=80, BATCH=1024, WIDTH=16)
    told = runpy.run_path(str(EXAMPLES / "skipgram.py"))
    job: shoal.Job = told["job"]
    report = shoal.train(job.changed(evaluate_every=80), workers=1, servers=2, sync="sync", quiet=True)
    assert report.metrics["neighbours"] > CHANCE + 0.04, report.metrics
    model = report.model()
    centre, around, right = job.evaluate
    with torch.no_grad():
        again: Tensor = told["neighbours"](model(centre, around), right)
    assert again.item() == pytest.approx(report.metrics["neighbours"]), "rows of the servers, not new ones"
    close = told["nearest"](model, "class")
    assert len(set(close)) == 5 and "class" not in close


# -- CartPole ---------------------------------------------------------------------------------------------------------


def last_mean(episodes: list[dict[str, Any]], number: int = 50) -> float:
    last = [episode["steps"] for episode in episodes[-number:]]
    return float(sum(last) / len(last))


def test_asynchronous_actors_learn_to_keep_the_pole_up() -> None:
    result = command.program(EXAMPLES / "cartpole.py", "--updates", "60", "--json", "--picture", "curve.svg")
    assert result.code == 0, result.err
    episodes = json.loads(result.out)["episodes"]
    assert last_mean(episodes[:50]) < 1.5 * RANDOM_PLAY
    assert last_mean(episodes) > 1.5 * RANDOM_PLAY
    assert {episode["worker"] for episode in episodes} == {0, 1}
    assert [episode["update"] for episode in episodes] == sorted(episode["update"] for episode in episodes)
    assert Path("curve.svg").read_text().startswith("<?xml")


def test_cartpole_under_shoal_run_draws_its_curve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = command.Caller(capsys).good(
        "run", EXAMPLES / "cartpole.py", "--workers", "2", "--servers", "1", "--json", "--", "--updates", "6"
    )
    said = Path(result.value["folder"], "worker-0.log").read_text()
    assert "steps that the pole stood" in said and "● mean   ○ random play" in said
    assert "updates; the last" in said.splitlines()[-1]
