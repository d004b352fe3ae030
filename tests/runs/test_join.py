"""`shoal.join`: the user's own loop, alone, on workers, left early, resumed, or wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command import Caller, Result, events, log_lines, program
from helpers.faults import STANDS_DOWN, Faults, crew, until_true
from shoal.recovery.membership.heartbeat import MembershipState
from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.elastic_membership import ElasticMembership

LOOP = """\
import os
import sys

import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed({seed})
generator = torch.Generator().manual_seed(1)
x = torch.randn(41, 6, generator=generator)
y = torch.randint(3, (41,), generator=generator)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
book = {{"seen": 0, "best": [3.5, None], "note": "x"}}
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
run = shoal.join(
    model, optimizer, loader, scheduler=scheduler, state={{"average": average, "book": book}}, **dict({join})
)


def closure(batch):
    return F.cross_entropy(model(batch[0]), batch[1])


for epoch in run.epochs(2):
    for batch in run.batches():
        loss = run.backward(batch, closure)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        book["seen"] += len(batch)
        {each}
{after}
if run.leader:
    print("rate", scheduler.get_last_lr()[0], "updates", int(average.n_averaged), "seen", book["seen"])
    print("average", sum(p.sum().item() for p in average.parameters()).hex())
"""


def write(*, each: str = "pass", after: str = "", join: str = "", seed: str = "0") -> None:
    Path("loop.py").write_text(LOOP.format(each=each.replace("\n", "\n        "), after=after, join=join, seed=seed))


def run(call: Caller, *arguments: str, workers: int = 1) -> Result:
    return call.good("run", "loop.py", "--workers", str(workers), "--json", *arguments)


def said(result: Result) -> list[str]:
    """What the leader printed."""
    return log_lines(result.value["folder"])


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_the_same_bits_and_bookkeeping_on_any_number_of_workers(call: Caller) -> None:
    write()
    results = [run(call, workers=workers) for workers in (1, 2, 3, 4)]
    assert len({result.sha256 for result in results}) == 1
    # 41 samples in batches of 8 are 6 steps a pass, whatever the number of workers.
    assert [result.value["steps"] for result in results] == [12] * 4
    assert [result.value["samples"] for result in results] == [82] * 4
    lines = said(results[0])
    assert lines[0] == "rate 0.0 updates 12 seen 82", "the scheduler went through its whole curve"
    for result in results[1:]:
        assert said(result) == lines
        assert log_lines(result.value["folder"], 1) == [], "only the leader prints"


def test_workers_that_begin_with_other_weights_get_the_leaders(call: Caller) -> None:
    write()
    expected = run(call).sha256
    write(seed="int(os.environ['RANK'])")
    assert run(call, workers=2).sha256 == expected


def test_lanes_microbatches_and_seed_are_the_callers(call: Caller) -> None:
    write()
    usual = run(call).sha256
    write(join="lanes=2, microbatches=2, seed=3")
    found = {run(call, workers=workers).sha256 for workers in (1, 2)}
    assert len(found) == 1
    assert usual not in found


def test_alone_in_plain_python(call: Caller) -> None:
    write(join="run_dir='alone'")
    expected = run(call, workers=2)
    done = subprocess.run([sys.executable, "loop.py"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == said(expected)
    assert done.stderr == ""
    assert (Path("alone") / "model.safetensors").exists()
    report = json.loads(Path("alone/report.json").read_text())
    assert (report["weights_sha256"], report["outcome"]) == (expected.sha256, "done")
    assert len(Path("alone/metrics.jsonl").read_text().splitlines()) == len(events(Path("alone"), "steps-committed"))

    refused = program(Path("loop.py"))
    assert refused.code == 1
    assert "alone already holds a run" in refused.err
    assert "resume=True to go on with it" in refused.err

    # Resumed when it is done: nothing is left to do, and nothing changes.
    write(join="run_dir='alone', resume=True")
    again = program(Path("loop.py"))
    assert again.code == 0, again.err
    assert again.out == done.stdout


# -- state, stop, resume ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_state_comes_back_on_resume(stop: int, call: Caller) -> None:
    write()
    expected = run(call)
    stopped = call("run", "loop.py", "--workers", "2", "--run-dir", "run", "--stop-after", str(stop))
    assert stopped.code == 3
    assert f"stopped after step {stop}" in stopped.err
    resumed = run(call, "--resume", "run", workers=3)
    assert resumed.sha256 == expected.sha256
    assert said(resumed)[-2:] == said(expected), "average, dictionary and scheduler are where they would have been"


def test_leaving_the_loop_early_is_a_good_end(call: Caller) -> None:
    write(each="if batch.step == 7:\n    break", after="run.stopped")
    early = [run(call, workers=workers) for workers in (1, 2)]
    assert {result.value["outcome"] for result in early} == {"done"}
    assert len({result.sha256 for result in early}) == 1
    # `break` leaves the pass, not the epochs: the second begins at its third batch and ends there.
    assert early[0].value["steps"] == 8


def test_leaving_by_exit(call: Caller) -> None:
    write(each="if batch.step == 3:\n    sys.exit(0)")
    result = run(call, workers=2)
    assert (result.value["outcome"], result.value["steps"]) == ("done", 4)
    assert (Path(result.value["folder"]) / "model.safetensors").exists()


def test_a_limit_of_steps(call: Caller) -> None:
    write(join="steps=5")
    result = run(call, workers=2)
    assert (result.value["outcome"], result.value["steps"]) == ("done", 5)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def failed(call: Caller, workers: int = 2) -> str:
    result = call("run", "loop.py", "--workers", str(workers), "--run-dir", "run")
    assert result.code in (1, 2)
    assert "Traceback" not in result.err
    return result.err[result.err.index("error: ") :]


def test_forgetting_backward(call: Caller) -> None:
    write()
    path = Path("loop.py")
    path.write_text(path.read_text().replace("run.backward(batch, closure)", "None"))
    text = failed(call)
    assert "a batch was taken but run.backward was not called for it" in text
    assert "fix: run.backward(batch, closure)" in text


def test_calling_backward_twice(call: Caller) -> None:
    write(each="run.backward(batch, closure)")
    text = failed(call)
    assert "run.backward was called twice for one batch" in text
    assert "fix: one run.backward per item of run.batches(), or one for each optimizer:" in text


def test_unpacking_a_batch(call: Caller) -> None:
    write()
    path = Path("loop.py")
    path.write_text(path.read_text().replace("for batch in run.batches():", "for a, b in run.batches():"))
    text = failed(call, workers=1)
    assert "an item of run.batches() is a global batch, not its tensors" in text
    assert "fix: for batch in run.batches(): loss = run.backward(batch, lambda b:" in text


def test_weights_that_depend_on_the_worker(call: Caller) -> None:
    write(each="if run.rank == 1 and batch.step == 2:\n    with torch.no_grad():\n        model[3].bias[0] += 1e-7")
    text = failed(call)
    assert "step 4: worker 1 and worker 0 hold different weights, first in 3.bias" in text
    assert "depends on the worker" in text


def test_an_error_in_the_loop_names_the_line(call: Caller) -> None:
    write(each="if run.rank == 1 and batch.step == 4:\n    raise KeyError('label')")
    text = failed(call)
    assert text.startswith("error: worker 1, step 4: KeyError: 'label'\n")
    assert "in <module>:  raise KeyError('label')" in text


def test_more_workers_than_lanes(call: Caller) -> None:
    write(join="lanes=2")
    assert "3 workers but 2 lanes" in failed(call, workers=3)


def test_a_batch_that_cannot_be_cut(call: Caller) -> None:
    write(join="lanes=3")
    assert "a batch of 8 cannot be cut into 3 lanes" in failed(call, workers=1)


# -- evaluation -------------------------------------------------------------------------------------------------------

EVALUATION = """\
held_x = torch.arange(101.0).unsqueeze(1)
counted = []

def count(batch):
    counted.extend(int(value) for value in batch[0].flatten())
    return {"mean": batch[0].mean(), "even": ((batch[0] % 2 == 0).sum(), len(batch[0])), "one": 1.0}

state, mode = torch.get_rng_state(), model.training
found = run.evaluate(TensorDataset(held_x), count)
assert torch.equal(torch.get_rng_state(), state) and model.training is mode
single = run.evaluate((held_x,), lambda batch: batch[0].mean())
import json
with open(f"counted-{run.rank}.json", "w") as file:
    json.dump([counted, found, single], file)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_evaluation_counts_each_sample_once(workers: int, call: Caller) -> None:
    write(after=EVALUATION)
    run(call, workers=workers)
    told = [json.loads(Path(f"counted-{rank}.json").read_text()) for rank in range(workers)]
    assert sorted(sample for counted, _, _ in told for sample in counted) == list(range(101))
    if workers > 1:
        assert all(counted for counted, _, _ in told), "every worker did its part"
    for _, found, single in told:
        assert found == {"mean": 50.0, "even": 51 / 101, "one": 1.0}
        assert single == 50.0


def test_whoever_goes_first_takes_nothing_from_an_evaluation_after_the_end(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have given their leases back before worker 1 has left the last meeting behind."""
    faults = Faults(tmp_path / "run", monkeypatch)
    write(after=EVALUATION)
    heard: list[set[WorkerId]] = [set()]
    hear = ElasticMembership._on_state

    def listen(crew: ElasticMembership, news: MembershipState) -> None:
        hear(crew, news)
        heard.append(set(news.alive))

    monkeypatch.setattr(ElasticMembership, "_on_state", listen)
    faults.at(STANDS_DOWN, until_true(lambda: heard[-1] == {crew().worker_id}), worker=1)
    with faults.armed():
        run(call, "--run-dir", str(faults.run), workers=3)
    told = [json.loads(Path(f"counted-{rank}.json").read_text()) for rank in range(3)]
    assert sorted(sample for counted, _, _ in told for sample in counted) == list(range(101))


def test_a_joined_run_is_told_of_like_a_job(call: Caller) -> None:
    write()
    result = run(call, "--run-dir", "run", workers=2)
    assert [event["rank"] for event in events(Path("run"), "worker-finished")].count(0) == 1
    assert len(result.value["weights_sha256"]) == 64
    assert result.value["lanes"] == 4
    assert {"plan.json", "config.json", "report.json", "model.safetensors", "checkpoints"} <= {
        path.name for path in Path("run").iterdir()
    }
