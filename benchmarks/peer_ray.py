"""A parameter server as a Ray actor, with two worker actors. One line of JSON.

What travels is numpy, one flat array each way: Ray takes arrays out of its object store without a copy. Run by
paramserver.py with the Python of `make bench-peers`.
"""

import os
import time
import warnings
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import ray
import torch
import torch.nn.functional as F

import pushes


@ray.remote(num_cpus=0)
class Server:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        # What comes out of the object store is read-only; nothing here writes to it.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        first = [torch.from_numpy(value).reshape(-1) for value in pushes.mlp_values().values()]
        self.values = {"mlp": torch.cat(first), "fixed": torch.zeros(pushes.count(pushes.SHAPES))}
        self.table = torch.zeros(pushes.ROWS, pushes.DIM)
        self.pushed = dict.fromkeys(pushes.CASES, 0)

    def pull(self, case: str) -> np.ndarray:
        return self.values[case].numpy()

    def push(self, case: str, gradient: np.ndarray) -> np.ndarray:
        """One update; answers with the new values."""
        self.pushed[case] += 1
        self.values[case].sub_(torch.from_numpy(gradient), alpha=pushes.LEARNING_RATE)
        return self.values[case].numpy()

    def pull_rows(self, rows: np.ndarray) -> np.ndarray:
        return self.table.index_select(0, torch.from_numpy(rows)).numpy()

    def push_rows(self, rows: np.ndarray, gradients: np.ndarray) -> None:
        self.pushed["sparse"] += 1
        self.table.index_add_(0, torch.from_numpy(rows), torch.from_numpy(gradients), alpha=-pushes.LEARNING_RATE)

    def applied(self) -> dict[str, float]:
        found = {}
        if self.pushed["fixed"]:
            found["fixed"] = -float(self.values["fixed"][0]) / pushes.STEP / self.pushed["fixed"]
        if self.pushed["sparse"]:
            moved = -float(self.table[:, 0].double().sum()) / pushes.STEP
            found["sparse"] = moved / self.pushed["sparse"] / pushes.LOOKUPS
        return found


class Mlp:
    """The model's parameters are views of one flat tensor."""

    def __init__(self, server: Any, worker: int) -> None:
        self.server = server
        self.flat = torch.empty(pushes.count(pushes.mlp_shapes()))
        self.array = self.flat.numpy()
        self.array[:] = ray.get(server.pull.remote("mlp"))
        self.parts, at = [], 0
        for shape in pushes.mlp_shapes().values():
            size = torch.Size(shape).numel()
            self.parts.append(self.flat[at : at + size].view(shape).requires_grad_())
            at += size
        self.next = pushes.cycle([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pushes.batches(worker)])
        self.under_way: Any = None

    def step(self) -> None:
        x, y = self.next()
        weight, bias, weight2, bias2 = self.parts
        loss = F.cross_entropy(F.linear(F.relu(F.linear(x, weight, bias)), weight2, bias2), y)
        gradient = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, self.parts)])
        if self.under_way is not None:
            self.array[:] = ray.get(self.under_way)
        self.under_way = self.server.push.remote("mlp", gradient.numpy())


class Fixed:
    """A gradient is put into the object store for each push: it would be another one each time."""

    def __init__(self, server: Any, worker: int) -> None:
        self.server = server
        self.gradient = np.full(pushes.count(pushes.SHAPES), pushes.GRADIENT, dtype=np.float32)
        self.under_way: Any = None

    def step(self) -> None:
        if self.under_way is not None:
            self.values = ray.get(self.under_way)
        self.under_way = self.server.push.remote("fixed", ray.put(self.gradient))


class Sparse:
    """The next batch's rows are asked for right behind the push."""

    def __init__(self, server: Any, worker: int) -> None:
        self.server = server
        self.next = pushes.cycle(pushes.lookups(worker))
        self.gradients = np.full((pushes.LOOKUPS, pushes.DIM), pushes.GRADIENT, dtype=np.float32)
        self.rows = self.next()
        self.pulled = server.pull_rows.remote(self.rows)
        self.under_way: Any = None

    def step(self) -> None:
        self.values = ray.get(self.pulled)
        if self.under_way is not None:
            ray.get(self.under_way)
        self.under_way = self.server.push_rows.remote(self.rows, self.gradients)
        self.rows = self.next()
        self.pulled = self.server.pull_rows.remote(self.rows)


WORK: dict[str, Any] = {"mlp": Mlp, "fixed": Fixed, "sparse": Sparse}


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, server: Any, worker: int) -> None:
        torch.set_num_threads(1)
        self.server, self.worker = server, worker

    def run(self, case: str, start: float, seconds: float) -> float:
        work = WORK[case](self.server, self.worker)
        rate = pushes.counted(work.step, start, seconds)
        ray.get(work.under_way)
        return rate


def main() -> None:
    asked = pushes.options("a Ray actor as a parameter server")
    ray.init(
        num_cpus=pushes.WORKERS,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        object_store_memory=1 << 30,
        _node_ip_address="127.0.0.1",
    )
    server = Server.remote()
    workers = [Worker.remote(server, worker) for worker in range(pushes.WORKERS)]
    ray.get([server.applied.remote(), *(each.__ray_ready__.remote() for each in workers)])
    rates = {}
    for case in asked.only:
        start = time.monotonic() + asked.warm_up
        found = ray.get([each.run.remote(case, start, asked.seconds) for each in workers])
        rates[case] = sum(found) * (pushes.LOOKUPS if case == "sparse" else 1)
    counts = ray.get(server.applied.remote())
    ray.shutdown()
    pushes.say("ray", ray.__version__, rates, counts)


if __name__ == "__main__":
    main()
