"""A batch with several backward passes: workers die before, in, between and after them, and the bits are the same."""

from pathlib import Path

import shoal
from helpers.command import Caller
from helpers.faults import ASKS, LANE, MEETS, MERGED, MET, Faults, Place, kill, unheard, until
from helpers.passes_job import drawing, passes_job, tell_apart
from shoal.recovery.membership.protocol import WorkerId

# Two updates for each batch, of which the second sees what the first has made; every third batch has one more pass.
# The gradients of the last two passes are applied together: the one before survives the other's recovery.
LOOP = """\
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=8, shuffle=True)
maker = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
judge = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1))
scale = nn.Linear(1, 1)
optimizers = {"m": torch.optim.Adam(maker.parameters(), lr=0.01), "j": torch.optim.Adam(judge.parameters(), lr=0.01)}
optimizers["s"] = torch.optim.SGD(scale.parameters(), lr=0.01, momentum=0.9)
schedulers = {"j": torch.optim.lr_scheduler.ExponentialLR(optimizers["j"], 0.9)}
models = {"maker": maker, "judge": judge, "scale": scale}
book = {"losses": []}
run = shoal.join(models, optimizers, loader, scheduler=schedulers, state={"book": book}, checkpoint_every=4)


def apart(batch):
    return (judge(maker(torch.randn(len(batch[0]), 2))) - judge(batch[0])).mean() + judge(batch[0]).square().mean()


for epoch in run.epochs(3):
    for batch in run.batches():
        losses = [run.backward(batch, apart, optimizer="j")]
        run.clip(0.5)
        optimizers["j"].step()
        schedulers["j"].step()
        if batch.step % 3 == 0:
            losses.append(run.backward(batch, lambda b: (scale(judge(b[0])) - 1).square().mean(), optimizer="s"))
        losses.append(run.backward(batch, lambda b: -judge(maker(torch.randn(len(b[0]), 2))).mean(), optimizer="m"))
        if batch.step % 3 == 0:
            optimizers["s"].step()
        optimizers["m"].step()
        book["losses"].append(losses)
with open("told", "a") as file:
    state = str([each.state_dict()["state"] for each in optimizers.values()]).replace("\\n", " ")
    print(book, state, schedulers["j"].last_epoch, file=file)
"""
STEPS = 15


def test_workers_die_between_two_passes_of_a_batch(faults: Faults, call: Caller) -> None:
    Path("loop.py").write_text(LOOP)
    expected = call.good("run", "loop.py", "--json")
    told = Path("told").read_text()
    Path("told").unlink()

    # Between the first and the second pass; in the lanes of the second; in its vote; when it is committed.
    schedule: list[tuple[Place, int, int, int]] = [
        (MERGED, 1, 0, 1),
        (LANE, 3, 1, 0),
        (MEETS, 5, 1, 2),
        (MET, 7, 1, 0),
        (LANE, 9, 2, 1),
    ]
    lives: dict[int, int] = {}
    for place, step, backward_pass, worker in schedule:
        faults.at(place, kill, step=step, worker=worker, life=lives.get(worker, 0), backward_pass=backward_pass)
        lives[worker] = lives.get(worker, 0) + 1
        faults.at(ASKS, until(WorkerId(worker, lives[worker])), step=step + 1)
    # Two workers know that a further pass is committed, and the third has not heard it.
    faults.at(MET, unheard, step=12, worker=2, backward_pass=1)
    with faults.armed():
        result = call.good("run", "loop.py", "--workers", "3", "--json", "--run-dir", faults.run)
    assert result.sha256 == expected.sha256
    assert result.value["steps"] == STEPS
    assert set(Path("told").read_text().splitlines(keepends=True)) == {told}
    assert len(faults.told("worker-lost")) == len(schedule)


def test_a_stopped_loop_with_several_optimizers_goes_on_with_all_of_them(call: Caller) -> None:
    Path("loop.py").write_text(LOOP)
    expected = call.good("run", "loop.py", "--json").sha256
    told = Path("told").read_text()
    assert call("run", "loop.py", "--workers", "2", "--run-dir", "run", "--stop-after", "7").code == 3
    Path("told").unlink()
    assert call.good("run", "loop.py", "--json", "--resume", "run").sha256 == expected
    assert Path("told").read_text() == told


def test_workers_of_a_job_die_between_two_passes(faults: Faults, tmp_path: Path) -> None:
    job = passes_job(loss={"judge": tell_apart, "maker": drawing})
    calm = shoal.train(job, quiet=True, predict=False, run_dir=tmp_path / "calm")
    # After the first update, in the lanes of the second pass; and when the second pass is merged.
    for place, step, worker in ((LANE, 2, 1), (MERGED, 5, 0)):
        faults.at(place, kill, step=step, worker=worker, life=0, backward_pass=1)
        faults.at(ASKS, until(WorkerId(worker, 1)), step=step + 1)
    hurt = faults.train(job, workers=2)
    assert hurt.weights_sha256 == calm.weights_sha256
    assert len(faults.told("worker-lost")) == 2
