"""Mirrored and per-worker values: alone, on real workers through any group, in a joined loop, and wrong."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from helpers.command import Caller
from helpers.places import DOCS
from shoal.collectives.group import WorkerGroup
from shoal.errors import InputError, MismatchError
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.lanes import fold
from shoal.testing import ranks

WORKERS = 3


def uneven_magnitudes(worker: int) -> Tensor:
    """Another order of sums would round otherwise."""
    generator = torch.Generator().manual_seed(worker)
    scale = 10.0 ** torch.randint(-3, 4, (5, 7), generator=generator)
    return torch.randn(5, 7, generator=generator) * scale


def tree_sum() -> Tensor:
    parts = {(worker, worker + 1): uneven_magnitudes(worker) for worker in range(WORKERS)}
    total = fold(WORKERS, parts, lambda left, right: left + right)
    assert total is not None
    return total


def error(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# -- several workers --------------------------------------------------------------------------------------------------


def exchange(group: Any) -> dict[str, Any]:
    """Everything there is, through one group; what each worker found."""
    mirrored = shoal.Mirrored(uneven_magnitudes(dist.get_rank()), group=group)
    begin = tensor_sha256(mirrored.value)
    mine = shoal.PerWorker(uneven_magnitudes, group=group)
    mirrored.assign(mine.value, aggregate="sum")
    summed = tensor_sha256(mirrored.value)
    mirrored.assign_add(mine.value, aggregate="only_first")
    mirrored.check()
    uneven = shoal.PerWorker(lambda worker: torch.full((worker, 2), float(worker)), group=group)  # worker 0 has none
    flags = shoal.PerWorker(lambda worker: torch.tensor([worker == 1, False]), group=group)
    return {
        "begin": begin,
        "summed": summed,
        "added": tensor_sha256(mirrored.value),
        "counted": int(shoal.Mirrored(0, aggregate="sum", group=group).assign_add(mine.worker + 1).assign_add(1)),
        "sum": tensor_sha256(mine.reduce("sum")),
        "mean": tensor_sha256(mine.reduce("mean")),
        "max": tensor_sha256(mine.reduce("max")),
        "any": flags.reduce("max").tolist(),
        "half": mine.map(lambda value: value[0, :2].to(torch.bfloat16)).reduce("min").dtype == torch.bfloat16,
        "rows": uneven.gather().tolist(),
        "columns": uneven.map(lambda value: value.T).gather(dim=-1).tolist(),
        "mean of rows": uneven.reduce("mean", dim=0).tolist(),
        "numbers": mine.map(lambda value: mine.worker).gather().tolist(),
        "shapes": [list(value.shape) for value in uneven.values()],
    }


def test_all_workers_find_the_same_through_any_group() -> None:
    def work(group: WorkerGroup) -> list[Any]:
        gloo = dist.new_group(backend="gloo")
        found = [exchange(which) for which in (group, None, gloo)]
        dist.destroy_process_group(gloo)
        return found

    values = [uneven_magnitudes(worker) for worker in range(WORKERS)]
    rows = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    expected = {
        "begin": tensor_sha256(values[0]),
        "summed": tensor_sha256(tree_sum()),
        "added": tensor_sha256(tree_sum() + values[0]),
        "counted": 1 + 2 + 3 + WORKERS,
        "sum": tensor_sha256(tree_sum()),
        "mean": tensor_sha256(tree_sum() / WORKERS),
        "max": tensor_sha256(torch.stack(values).amax(0)),
        "any": [True, False],
        "half": True,
        "rows": rows,
        "columns": [[1.0, 2.0, 2.0]] * 2,
        "mean of rows": torch.tensor(rows).mean(0).tolist(),
        "numbers": [0, 1, 2],
        "shapes": [[0, 2], [1, 2], [2, 2]],
    }
    assert ranks(WORKERS, work) == [[expected] * 3] * WORKERS
    assert not torch.equal(tree_sum(), values[0] + (values[1] + values[2])), "another order would go unnoticed"


def test_workers_that_differ_are_named_on_all() -> None:
    def work(group: WorkerGroup) -> list[str]:
        mirrored = shoal.Mirrored(torch.zeros(2, 3), group=group)
        if group.rank == 0:
            mirrored.value[1, 2] = 0.5  # not by assign; and two others say otherwise
        told = [error(mirrored.check, MismatchError)]
        shaped = shoal.PerWorker(lambda worker: torch.zeros(2, 3 if worker == 1 else 4), group=group)
        told.append(error(shaped.gather, InputError))
        told.append(error(lambda: shaped.reduce("sum"), InputError))
        how = "max" if group.rank == 2 else "min"
        told.append(error(lambda: shoal.PerWorker(1.0, group=group).reduce(how), InputError))
        shoal.PerWorker(1.0, group=group).reduce()  # the group is whole
        return told

    expected = [
        "a mirrored value differs on worker 0 from worker 1's\n"
        "  [1, 2]: 0.0 on worker 1, 0.5 on worker 0 (1 of 6 elements differ)\n"
        "  fix: change it by assign and assign_add, on all workers; .value is to be read",
        "gather dim=0: worker 0 has shape [2, 4], worker 1 has [2, 3]\n"
        "  fix: only dimension 0 may differ; PerWorker.values() takes any shapes",
        "worker 0 calls PerWorker.reduce sum float32 [2, 4]; worker 1 calls PerWorker.reduce sum float32 [2, 3]\n"
        "  fix: all workers call the same, in the same order, with the same shape and type",
        "worker 0 calls PerWorker.reduce min float64 []; worker 2 calls PerWorker.reduce max float64 []\n"
        "  fix: all workers call the same, in the same order, with the same shape and type",
    ]
    assert ranks(WORKERS, work) == [expected] * WORKERS


def test_signed_zeros_and_nan_count_as_different() -> None:
    def work(group: WorkerGroup) -> str:
        mirrored = shoal.Mirrored(0.0, group=group)
        mirrored.value.fill_(-0.0 if group.rank else 0.0)
        return error(mirrored.check, MismatchError).splitlines()[1].strip()

    assert ranks(2, work) == ["[]: 0.0 on worker 0, -0.0 on worker 1"] * 2


# -- in a joined loop -------------------------------------------------------------------------------------------------


LOOP = """\
import json
import re
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
steps = shoal.Mirrored(0, aggregate="only_first")
run = shoal.join(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, state={"steps": steps})
norms = []
for epoch in run.epochs(2):
    for batch in run.batches():
        run.backward(batch, lambda b: model(b[0]).square().mean())
        run.optimizer.step()
        run.optimizer.zero_grad()
        steps.assign_add(1)
    norms.append(shoal.PerWorker(lambda worker: float(worker + 1)).reduce("sum").item())
mine = shoal.PerWorker(run.rank, group=run)
if run.leader:
    print(json.dumps([int(steps), norms, mine.workers]))
"""


def test_in_a_joined_loop_the_workers_are_the_runs(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    call = Caller(capsys)
    Path("loop.py").write_text(LOOP)

    def said(*arguments: str) -> list[Any]:
        result = call.good("run", "loop.py", "--json", *arguments)
        return list(json.loads(Path(result.value["folder"], "worker-0.log").read_text().splitlines()[-1]))

    assert said("--workers", "2") == [4, [3.0, 3.0], 2]
    assert call("run", "loop.py", "--workers", "2", "--stop-after", "3", "--run-dir", "kept").code == 3
    assert said("--workers", "2", "--resume", "kept") == [4, [3.0], 2], "what was counted before is counted"


def test_what_the_page_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = (DOCS / "values.md").read_text()
    (script,) = re.findall(r"^```python\n(# values.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (line, shown) = re.findall(r"^```console\n\$ shoal (.*)\n(.*)\n```", page, re.MULTILINE)[0]
    Path("values.py").write_text(script)
    result = Caller(capsys).good(*line.split(), "--plain")
    assert shown in (result.out + result.err).splitlines()
