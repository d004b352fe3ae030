"""Shoal's own part of paramserver.py: a server and workers through `Servers` and `Client`, as a script would use them.

Rates of the three cases that peers run too; then bandwidth, round trips and memory of one server, which is Shoal alone.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it
import torch.nn.functional as F
from torch import Tensor

import pushes
from contenders import forked, scratch_folder
from shoal.paramserver.client import ParameterClient
from shoal.paramserver.local_servers import LocalServers
from shoal.paramserver.messages import SparseSpec

Values = dict[str, Tensor]


class Note(msgspec.Struct, frozen=True):
    """What a worker leaves behind."""

    rate: float = 0.0
    pushed: int = 0
    numbers: dict[str, float] = {}


# -- the cases of all contenders --------------------------------------------------------------------------------------


class Mlp:
    """The model's parameters are views of one flat tensor, as in the RPC peer: one tensor in a message is quickest."""

    def __init__(self, client: ParameterClient, worker: int) -> None:
        first = [torch.from_numpy(value) for value in pushes.mlp_values().values()]
        self.flat = torch.cat([value.reshape(-1) for value in first])
        self.table = client.dense("mlp", {"all": self.flat}, optimizer="sgd", lr=pushes.LEARNING_RATE)
        views = self.flat.split([value.numel() for value in first])
        self.trained = [part.view(value.shape).requires_grad_() for part, value in zip(views, first, strict=True)]
        self.next = pushes.cycle([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pushes.batches(worker)])
        self.under_way: Any = None
        self.pushed = 0

    def step(self) -> None:
        x, y = self.next()
        weight, bias, weight2, bias2 = self.trained
        loss = F.cross_entropy(F.linear(F.relu(F.linear(x, weight, bias)), weight2, bias2), y)
        gradient = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, self.trained)])
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.table.push([gradient], pull_into=[self.flat])
        self.pushed += 1


class Fixed:
    def __init__(self, client: ParameterClient, worker: int) -> None:
        self.values = {name: torch.zeros(shape) for name, shape in pushes.SHAPES.items()}
        self.gradients = {name: torch.full(shape, pushes.GRADIENT) for name, shape in pushes.SHAPES.items()}
        self.table = client.dense("fixed", self.values, optimizer="sgd", lr=pushes.LEARNING_RATE)
        self.under_way: Any = None
        self.pushed = 0

    def step(self) -> None:
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.table.push(self.gradients, pull_into=self.values)
        self.pushed += 1

    def applied(self) -> float:
        return -float(self.table.pull().wait()["0.weight"][0, 0]) / pushes.STEP


class Sparse:
    """The next batch's rows are asked for right behind the push."""

    def __init__(self, client: ParameterClient, worker: int) -> None:
        settings = {"lr": pushes.LEARNING_RATE}
        spec = SparseSpec(rows=pushes.ROWS, dim=pushes.DIM, scale=0.0, optimizer="sgd", settings=settings)
        self.table = client.sparse("sparse", spec)
        self.next = pushes.cycle([torch.from_numpy(rows) for rows in pushes.lookups(worker)])
        self.gradients = torch.full((pushes.LOOKUPS, pushes.DIM), pushes.GRADIENT)
        self.rows = self.next()
        self.pulled = self.table.pull(self.rows)
        self.under_way: Any = None
        self.pushed = 0

    def step(self) -> None:
        self.values = self.pulled.wait()
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = self.table.push(self.rows, self.gradients)
        self.rows = self.next()
        self.pulled = self.table.pull(self.rows)
        self.pushed += 1

    def applied(self) -> float:
        moved = sum(
            float(self.table.pull(rows).wait()[:, 0].double().sum()) for rows in torch.arange(pushes.ROWS).split(10_000)
        )
        return -moved / pushes.STEP / pushes.LOOKUPS


WORK: dict[str, Callable[[ParameterClient, int], Any]] = {"mlp": Mlp, "fixed": Fixed, "sparse": Sparse}


def rates(cases: Sequence[str], warm_up: float, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """By case: updates a second (sparse: rows) of all workers; updates applied over those pushed."""
    found, applied = {}, {}
    with scratch_folder() as folder, LocalServers(1) as servers:
        for case in cases:
            start = time.monotonic() + warm_up
            forked(
                pushes.WORKERS,
                lambda worker, case=case, start=start: _run(  # type: ignore[misc]
                    servers.addresses, case, worker, start, seconds, folder / f"{case}{worker}"
                ),
            )
            notes = [_read(folder / f"{case}{worker}") for worker in range(pushes.WORKERS)]
            found[case] = sum(note.rate for note in notes) * (pushes.LOOKUPS if case == "sparse" else 1)
            if case != "mlp":
                told = folder / f"{case} applied"
                forked(1, lambda _, case=case, told=told: _count(servers.addresses, case, told))  # type: ignore[misc]
                applied[case] = _read(told).rate / sum(note.pushed for note in notes)
    return found, applied


def _run(addresses: Sequence[str], case: str, worker: int, start: float, seconds: float, note: Path) -> None:
    with ParameterClient(addresses, worker=worker) as client:
        work = WORK[case](client, worker)
        rate = pushes.counted(work.step, start, seconds)
        work.under_way.wait()
        if case == "sparse":
            work.pulled.wait()
        note.write_bytes(msgspec.json.encode(Note(rate, work.pushed)))


def _count(addresses: Sequence[str], case: str, note: Path) -> None:
    with ParameterClient(addresses, worker=pushes.WORKERS) as client:
        note.write_bytes(msgspec.json.encode(Note(WORK[case](client, 0).applied())))


def _read(path: Path) -> Note:
    return msgspec.json.decode(path.read_bytes(), type=Note)


# -- one server, one worker -------------------------------------------------------------------------------------------


def alone(work: Callable[[ParameterClient], Mapping[str, float]]) -> dict[str, float]:
    """What one worker beside one server finds."""
    with scratch_folder() as folder, LocalServers(1) as servers:
        note = folder / "note"

        def run(_: int) -> None:
            with ParameterClient(servers.addresses) as client:
                note.write_bytes(msgspec.json.encode(Note(numbers=dict(work(client)))))

        forked(1, run)
        return _read(note).numbers


def bandwidth(num_bytes: int, repeats: int) -> dict[str, float]:
    """Bytes a second, the best of a few. A push is applied (SGD); a pull is into memory that is there. `copy`: of copy_
    over as many bytes, in turns with them."""

    def work(client: ParameterClient) -> Mapping[str, float]:
        values = {f"layer{number}": torch.zeros(num_bytes // 16) for number in range(4)}  # four tensors of float32
        gradients = {name: torch.ones_like(each) for name, each in values.items()}
        table = client.dense("wide", values, optimizer="sgd", lr=1.0)
        source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        calls: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (1, lambda: target.copy_(source)),
            "push": (1, lambda: table.push(gradients).wait()),
            "pull": (1, lambda: table.pull(values).wait()),
            "push+pull": (2, lambda: table.push(gradients, pull_into=values).wait()),
        }
        best = dict.fromkeys(calls, 0.0)
        for turn in range(repeats + 1):
            for name, (times, call) in calls.items():
                began = time.perf_counter()
                call()
                if turn:
                    best[name] = max(best[name], times * num_bytes / (time.perf_counter() - began))
        return best

    return alone(work)


def round_trips(repeats: int) -> dict[str, float]:
    """Seconds of a push of 64 bytes that is applied and answered with 64 bytes, one at a time; `pull`: the median of a
    plain question that is answered with 64 bytes."""

    def work(client: ParameterClient) -> Mapping[str, float]:
        values, gradients = {"small": torch.zeros(16)}, {"small": torch.ones(16)}
        table = client.dense("small", values, optimizer="sgd", lr=1.0)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            table.push(gradients, pull_into=values).wait()
            seconds.append(time.perf_counter() - began)
        asked = []
        for _ in range(repeats):
            began = time.perf_counter()
            table.pull(values).wait()
            asked.append(time.perf_counter() - began)
        seconds = sorted(seconds[repeats // 10 :])
        return {
            "pull": statistics.median(asked[repeats // 10 :]),
            "median": statistics.median(seconds),
            "p99": seconds[int(0.99 * len(seconds))],
            "best": seconds[0],
            "worst": seconds[-1],
        }

    return alone(work)


def memory(layers: int, width: int) -> dict[str, float]:
    """Bytes of a server that holds square layers with AdamW: its resident set (VmRSS) after a few pushes and pulls,
    less what it was before the table was declared. `shared`: the part of it that the worker has, too (RssShmem).
    `peak`: the largest so far (VmHWM). `needed`: values and two moments."""
    with scratch_folder() as folder, LocalServers(1) as servers:
        pid, note = servers.pids[0], folder / "note"

        def run(_: int) -> None:
            with ParameterClient(servers.addresses) as client:
                before = _resident(pid)
                values = {f"{layer}.weight": torch.zeros(width, width) for layer in range(layers)}
                values |= {f"{layer}.bias": torch.zeros(width) for layer in range(layers)}
                gradients = {name: torch.ones_like(each) for name, each in values.items()}
                table = client.dense("deep", values, optimizer="adamw", lr=1e-3)
                for _ in range(5):
                    table.push(gradients, pull_into=values).wait()
                after = _resident(pid)
                found = {
                    "needed": 3 * sum(each.nbytes for each in values.values()),
                    "held": after["VmRSS"] - before["VmRSS"],
                    "shared": after["RssShmem"] - before["RssShmem"],
                    "peak": after["VmHWM"] - before["VmRSS"],
                }
                note.write_bytes(msgspec.json.encode(Note(numbers=found)))

        forked(1, run)
        return _read(note).numbers


def _resident(pid: int) -> dict[str, int]:
    """Bytes that a process has in memory, by the kernel's names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    told = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {name: 1024 * int(told[name].split()[0]) for name in ("VmRSS", "RssShmem", "VmHWM")}


def quiet() -> None:
    """One thread, in this process and those forked from it."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
