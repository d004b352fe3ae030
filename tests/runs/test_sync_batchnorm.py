"""`shoal.convert_sync_batchnorm` in a loop of one's own, with several models and optimizers: one hash."""

import json
from pathlib import Path

from helpers.command import Caller

LOOP = """\
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(42, 6))  # the last batch has 10 samples of 16: lane 3 is empty, lane 2 short
maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 6))
judge = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
models = {"maker": shoal.convert_sync_batchnorm(maker), "judge": shoal.convert_sync_batchnorm(judge)}
optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
run = shoal.join(models, optimizers, DataLoader(data, batch_size=16), lanes=4)


def judged(batch):
    with torch.no_grad():
        made = maker(torch.randn(len(batch[0]), 3))
    return nn.functional.softplus(judge(made)).mean() + nn.functional.softplus(-judge(batch[0])).mean()


def made(batch):
    return nn.functional.softplus(-judge(maker(torch.randn(len(batch[0]), 3)))).mean()


for epoch in run.epochs(2):
    for batch in run.batches():
        for name, closure in (("judge", judged), ("maker", made)):
            run.backward(batch, closure, optimizer=name)
            optimizers[name].step()
            optimizers[name].zero_grad()
"""


def test_a_loop_with_converted_models_has_one_hash(call: Caller, tmp_path: Path) -> None:
    script, hashes = tmp_path / "loop.py", set()
    script.write_text(LOOP)
    for workers in ("1", "2", "3"):
        folder = tmp_path / workers
        call.good("run", script, "--workers", workers, "--run-dir", folder)
        report = json.loads((folder / "report.json").read_text())
        hashes.add(report["weights_sha256"])
        assert not any("batch norm" in note for note in report["notes"])
    assert len(hashes) == 1
