"""Early stopping, the best checkpoint and the average go over to whoever replaces a worker."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.faults import ASKS, EVALUATED, LANE, MERGED, Faults, kill, until
from shoal.recovery.membership.protocol import WorkerId


def job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        "data": (x[:192], (x[:192, 0] > 0).long()),
        "evaluate": (x[192:], torch.randint(2, (64,), generator=generator)),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda named: torch.optim.Adam(named, lr=0.02),
        "batch": 16,
        "epochs": 10,
        "evaluate_every": 3,
        "patience": 3,
        "keep_best": "loss",
        "ema": 0.9,
        "evaluate_ema": True,
    }
    return shoal.Job(**fields).changed(**changes)


def test_what_callbacks_remember_survives_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers are replaced one after the other, the leader in an evaluation; then the first replacement again."""
    calm = shoal.train(job(), quiet=True, predict=False, run_dir=tmp_path / "calm")
    assert calm.steps >= 9
    faults = Faults(tmp_path / "run", monkeypatch)
    for place, step, worker, life in ((LANE, 1, 1, 0), (EVALUATED, 5, 0, 0), (MERGED, 7, 1, 1)):
        faults.at(place, kill, step=step, worker=worker, life=life)
        if step < 7:
            faults.at(ASKS, until(WorkerId(worker, life + 1)), step=step + 1)
    hurt = faults.train(job(), workers=2)
    assert (hurt.steps, hurt.value["stopped"]) == (calm.steps, calm.value["stopped"])
    assert hurt.weights_sha256 == calm.weights_sha256
    assert hurt.metrics == calm.metrics
    for name in ("best.safetensors", "ema.safetensors"):
        assert (hurt.folder / name).read_bytes() == (calm.folder / name).read_bytes(), name
