"""A parameter server with torch.distributed.rpc: one process that holds the values, two workers. One line of JSON.

Values and gradients are one flat tensor each: one tensor per message is the quickest that RPC has. Run by
paramserver.py in Shoal's own environment, which has torch; `python benchmarks/peer_rpc.py` runs it alone.
"""

import functools
import os
import socket
import threading
import time
import warnings
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import Tensor

import pushes

SERVER = "server"
THREADS = 16  # that take requests: its default


class Server:
    """Lives in the server's process. The lock is RPC's own advice: requests come in on several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        first = [torch.from_numpy(value).reshape(-1) for value in pushes.mlp_values().values()]
        self.values = {"mlp": torch.cat(first), "fixed": torch.zeros(pushes.count(pushes.SHAPES))}
        self.table = torch.zeros(pushes.ROWS, pushes.DIM)
        self.pushed = dict.fromkeys(pushes.CASES, 0)


@functools.cache
def server() -> Server:
    return Server()


def pull(case: str) -> Tensor:
    return server().values[case].clone()


def push(case: str, gradient: Tensor) -> Tensor:
    """One update; answers with the new values."""
    at = server()
    with at.lock:
        at.pushed[case] += 1
        at.values[case].sub_(gradient, alpha=pushes.LEARNING_RATE)
        return at.values[case].clone()  # what is sent must not change under way


def pull_rows(rows: Tensor) -> Tensor:
    at = server()
    with at.lock:
        return at.table.index_select(0, rows)


def push_rows(rows: Tensor, gradients: Tensor) -> None:
    at = server()
    with at.lock:
        at.pushed["sparse"] += 1
        at.table.index_add_(0, rows, gradients, alpha=-pushes.LEARNING_RATE)


def applied() -> dict[str, float]:
    at = server()
    found = {}
    if at.pushed["fixed"]:
        found["fixed"] = -float(at.values["fixed"][0]) / pushes.STEP / at.pushed["fixed"]
    if at.pushed["sparse"]:
        moved = -float(at.table[:, 0].double().sum()) / pushes.STEP
        found["sparse"] = moved / at.pushed["sparse"] / pushes.LOOKUPS
    return found


# -- workers ----------------------------------------------------------------------------------------------------------


class Mlp:
    """The model's parameters are views of one flat tensor."""

    def __init__(self, worker: int) -> None:
        self.flat = rpc.rpc_sync(SERVER, pull, args=("mlp",))
        parts, at = [], 0
        for shape in pushes.mlp_shapes().values():
            size = torch.Size(shape).numel()
            parts.append(self.flat[at : at + size].view(shape).requires_grad_())
            at += size
        self.parts = parts
        self.next = pushes.cycle([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pushes.batches(worker)])
        self.under_way: Any = None

    def step(self) -> None:
        x, y = self.next()
        weight, bias, weight2, bias2 = self.parts
        loss = F.cross_entropy(F.linear(F.relu(F.linear(x, weight, bias)), weight2, bias2), y)
        gradient = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, self.parts)])
        if self.under_way is not None:
            self.flat.copy_(self.under_way.wait())
        self.under_way = rpc.rpc_async(SERVER, push, args=("mlp", gradient))


class Fixed:
    def __init__(self, worker: int) -> None:
        self.gradient = torch.full((pushes.count(pushes.SHAPES),), pushes.GRADIENT)
        self.values = torch.zeros_like(self.gradient)
        self.under_way: Any = None

    def step(self) -> None:
        if self.under_way is not None:
            self.values = self.under_way.wait()
        self.under_way = rpc.rpc_async(SERVER, push, args=("fixed", self.gradient))


class Sparse:
    """The next batch's rows are asked for right behind the push."""

    def __init__(self, worker: int) -> None:
        self.next = pushes.cycle([torch.from_numpy(rows) for rows in pushes.lookups(worker)])
        self.gradients = torch.full((pushes.LOOKUPS, pushes.DIM), pushes.GRADIENT)
        self.rows = self.next()
        self.pulled = rpc.rpc_async(SERVER, pull_rows, args=(self.rows,))
        self.under_way: Any = None

    def step(self) -> None:
        self.values = self.pulled.wait()
        if self.under_way is not None:
            self.under_way.wait()
        self.under_way = rpc.rpc_async(SERVER, push_rows, args=(self.rows, self.gradients))
        self.rows = self.next()
        self.pulled = rpc.rpc_async(SERVER, pull_rows, args=(self.rows,))


WORK: dict[str, Any] = {"mlp": Mlp, "fixed": Fixed, "sparse": Sparse}


def run(case: str, worker: int, start: float, seconds: float) -> float:
    """Called by the master in a worker's process."""
    work = WORK[case](worker)
    rate = pushes.counted(work.step, start, seconds)
    work.under_way.wait()
    return rate


def join(name: str, rank: int, port: int) -> None:
    warnings.filterwarnings("ignore", message="You are using a Backend")  # RPC's own start
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=THREADS, rpc_timeout=120
    )
    rpc.init_rpc(name, rank=rank, world_size=pushes.WORKERS + 2, rpc_backend_options=options)


def process(name: str, rank: int, port: int) -> None:
    """A server or a worker: it does what it is called for until all are done."""
    pushes.end_with_parent()
    if name == SERVER:
        server()
    join(name, rank, port)
    rpc.shutdown()


def main() -> None:
    asked = pushes.options("torch.distributed.rpc as a parameter server")
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ[name] = "lo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = [SERVER, *(f"worker{worker}" for worker in range(pushes.WORKERS))]
    started = [
        get_context("spawn").Process(target=process, args=(name, rank, port), daemon=True)
        for rank, name in enumerate(names, start=1)
    ]
    for each in started:
        each.start()
    join("master", 0, port)
    rates = {}
    for case in asked.only:
        start = time.monotonic() + asked.warm_up
        found = [
            rpc.rpc_async(f"worker{worker}", run, args=(case, worker, start, asked.seconds))
            for worker in range(pushes.WORKERS)
        ]
        rates[case] = sum(each.wait() for each in found) * (pushes.LOOKUPS if case == "sparse" else 1)
    counts = rpc.rpc_sync(SERVER, applied)
    rpc.shutdown()
    for each in started:
        each.join()
    pushes.say("rpc", str(torch.__version__), rates, counts)


if __name__ == "__main__":
    main()
