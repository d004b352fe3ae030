"""Samples by name in whole runs: a model that returns its loss, ragged samples, a loop of one's own."""

import json
from pathlib import Path

from helpers.command import Caller

TOP = """\
import random

import shoal
import torch
import torch.nn.functional as F
from torch import nn

draw = random.Random(3)
data = [{"ids": [draw.randrange(1, 8) for _ in range(draw.randrange(3, 9))]} for _ in range(64)]


def pad(samples):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample["ids"]) for sample in samples], batch_first=True)
    return {"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 8)

    def forward(self, ids, labels=None):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = self.drop(torch.tanh(layer(hidden)))
        logits = self.head(hidden)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]), "logits": logits}


def mean_of_tokens(logits, batch):
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


"""

JOB = """
usual = dict(
    model=Tokens, data=data, collate_fn=pad, batch=16, steps=3,
    optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], lr=0.3),
)
own = shoal.Job(loss="model", evaluate=data[:20], **usual)
function = shoal.Job(loss=mean_of_tokens, **usual)
strings = shoal.Job(loss="model", **usual | dict(data=[{"ids": [1, 2], "text": "a"}] * 16, collate_fn=None))
"""

LOOP = """
model = Tokens()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = torch.utils.data.DataLoader(data, batch_size=16, collate_fn=pad)
run = shoal.join(model, optimizer, loader, steps=3)
for epoch in run.epochs(1):
    for batch in run.batches():
        run.backward(batch, lambda batch: model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tokens.py"
    path.write_text(TOP + text)
    return path


def test_a_model_with_its_own_loss_on_ragged_samples_has_one_hash_and_the_mean_over_all_tokens(
    call: Caller, tmp_path: Path
) -> None:
    job = f"{write(tmp_path, JOB)}:own"
    done = call.good("verify", job, "--workers", "2", "--layouts", "pipeline=2", "--against", "plain", "--json")
    assert done.value["equal"], done.out
    assert done.value["plain"]["difference"] < 1e-12
    report = call.train(job, "--workers", "2", "--run-dir", tmp_path / "run").value
    assert report["metrics"]["loss"] > 0
    assert report["notes"] == []


def test_a_plain_mean_over_tokens_is_noted_and_pointed_out(call: Caller, tmp_path: Path) -> None:
    path = write(tmp_path, JOB)
    done = call("verify", f"{path}:function", "--workers", "2", "--steps", "2", "--against", "plain")
    assert done.code == 1
    assert "2 workers" in done.out and "equal" in done.out and "DIFFERS" in done.out
    assert "return (sum, count) from the loss" in done.err
    shown = call.good("train", f"{path}:function", "--run-dir", tmp_path / "run")
    assert "a mean over a number of items that differs between lanes" in " ".join((shown.out + shown.err).split())
    wrong = call("train", f"{path}:strings", "--run-dir", tmp_path / "strings")
    assert wrong.code and "a sample has a string under 'text'" in wrong.err


def test_a_joined_loop_gets_batches_by_name(call: Caller, tmp_path: Path) -> None:
    path, hashes = write(tmp_path, LOOP), []
    for workers in ("1", "2"):
        folder = tmp_path / workers
        call.good("run", path, "--workers", workers, "--run-dir", folder)
        report = json.loads((folder / "report.json").read_text())
        hashes.append(report["weights_sha256"])
        assert "(sum, count)" in report["notes"][0]
    assert len(set(hashes)) == 1
