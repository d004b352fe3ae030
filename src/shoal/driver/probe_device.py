"""How fast one worker of this machine computes: the measuring part of `shoal cluster probe`.

    products of many sizes ──► FLOP/s and the size that reaches half of them      (fit_products)
    a small model of every kind of operator, each call timed by itself ──► its bytes or FLOPs a second  (rates)
    models so small that only calls are left ──► seconds of the host for one operator

Times are of this thread's processor clock, and the best of several: other load on the machine does not count.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.numerics import kernels
from shoal.numerics.seeds import seed_everything
from shoal.parallel.blocks import BlockList
from shoal.planner.cost.trace import trace
from shoal.planner.cost.workload import Op

# Rows, inputs and outputs of linear layers, from ones that are all overhead to ones that are all arithmetic.
SHAPES = (
    (8, 8, 8), (16, 32, 32), (32, 64, 64), (64, 64, 256), (128, 128, 128), (64, 256, 256), (256, 128, 384),
    (256, 512, 128), (64, 512, 512), (128, 512, 1536), (128, 2048, 512), (256, 512, 2048), (512, 1024, 1024),
)  # fmt: skip
QUICK_SHAPES = ((16, 32, 32), (64, 64, 256), (128, 128, 128), (128, 256, 512))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 3
ROUNDS, QUICK_ROUNDS = 3, 2
LONG_ENOUGH, QUICK_LONG_ENOUGH = 0.02, 0.002  # seconds that a timing takes: what is short is repeated
WALK_BYTES, MOST_COPIES = 64 << 20, 256  # of weights that products take in turn, as in a model: no cache has them all
FAR_BYTES = 64 << 20  # of a tensor that no cache holds
NEAR_BYTES, NEAR_COUNT = 1 << 20, 16  # of tensors as training has them: some are still in a cache
LEAST_SECONDS = 2e-5  # of an operator in all: what is shorter is overhead,
LEAST_BYTES = 1 << 16  # and what moves less, too
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class DeviceSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The measured speed of one worker."""

    products: dict[str, list[tuple[float, float]]]  # by dtype: FLOPs and seconds of each
    memory_speed: float  # bytes a second that an operator reads and writes of tensors that no cache holds
    cache_speed: float  # the same of tensors of ordinary size
    overhead: float  # seconds of the host for one operator, of a model of ordinary modules
    rates: dict[str, float]  # by operator: FLOP/s, or bytes a second
    model_slowdown: float = 1.0  # time of a model over that of its operators alone: caches are colder


class ContentionSample(msgspec.Struct, frozen=True, kw_only=True):
    """A short measurement, to compare one worker with several at once."""

    product: float  # seconds of a large product
    stream: float  # seconds of an operator that only reads and writes


class ProbeTimer:
    def __init__(self, quick: bool) -> None:
        self.rounds = QUICK_ROUNDS if quick else ROUNDS
        self.seconds = QUICK_LONG_ENOUGH if quick else LONG_ENOUGH

    def best(self, call: Callable[[int], Any]) -> float:
        """Seconds of one call. `call` gets the number of calls before, to work on other data each time."""
        call(0)
        began = time.thread_time()
        call(1)
        repeats = max(2, min(10_000, int(self.seconds / max(time.thread_time() - began, 1e-7))))
        found = []
        for _ in range(self.rounds):
            began = time.thread_time()
            for number in range(repeats):
                call(number)
            found.append((time.thread_time() - began) / repeats)
        return max(min(found), 1e-9)


def measure(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> DeviceSpeed:
    """Everything, in this process, as a worker computes: one thread, deterministic kernels. Several times over, so that
    a moment in which the machine had other things to do is not the only one."""
    kernels.configure(threads=1)
    clock = ProbeTimer(quick)
    found = []
    for turn in range(1 if quick else PASSES):
        progress(f"one worker: products, memory and operators{'' if quick else f', {turn + 1} of {PASSES}'}")
        found.append(_pass(clock, quick))
    best = best_of(found)
    progress("one worker: whole models")
    return msgspec.structs.replace(best, model_slowdown=_model_slowdown(best, clock, quick))


def _pass(clock: ProbeTimer, quick: bool) -> DeviceSpeed:
    return DeviceSpeed(
        products={name: _products(dtype, clock, quick) for name, dtype in DTYPES.items()},
        memory_speed=_stream(clock, FAR_BYTES >> (1 if quick else 0), 1),
        cache_speed=_stream(clock, NEAR_BYTES, NEAR_COUNT),
        overhead=_overhead(clock),
        rates=operator_rates(clock),
    )


def best_of(found: Sequence[DeviceSpeed]) -> DeviceSpeed:
    """Of several passes, by each figure."""
    first = found[0]
    return DeviceSpeed(
        products={
            name: [(each[0][0], min(seconds for _, seconds in each)) for each in zip(*samples, strict=True)]
            for name in first.products
            for samples in [[one.products[name] for one in found]]
        },
        memory_speed=max(one.memory_speed for one in found),
        cache_speed=max(one.cache_speed for one in found),
        overhead=min(one.overhead for one in found),
        rates={name: max(one.rates.get(name, 0.0) for one in found) for name in first.rates},
    )


def sample_contention(*, quick: bool = False) -> ContentionSample:
    kernels.configure(threads=1)
    clock = ProbeTimer(quick)
    size = 128 if quick else 512
    left, right = torch.rand(size, size), torch.rand(size, size)
    stream = 2 * NEAR_BYTES / _stream(clock, NEAR_BYTES, NEAR_COUNT)
    return ContentionSample(product=clock.best(lambda _: left @ right), stream=stream)


# -- products ---------------------------------------------------------------------------------------------------------


def _products(dtype: torch.dtype, clock: ProbeTimer, quick: bool) -> list[tuple[float, float]]:
    """The three products of a linear layer, as autograd calls them: weights and their gradients are far, as many others
    came between; what flows through the layer is near."""
    found: list[tuple[float, float]] = []
    for rows, inputs, outputs in QUICK_SHAPES if quick else SHAPES:
        count = max(1, min(MOST_COPIES, (WALK_BYTES >> (3 if quick else 0)) // (inputs * outputs * 4)))
        weights = [torch.rand(outputs, inputs).to(dtype) for _ in range(count)]
        gradients = [torch.empty(0)] * count
        given, back = torch.rand(rows, inputs).to(dtype), torch.rand(rows, outputs).to(dtype)

        def forward(turn: int, x: Tensor = given, w: list[Tensor] = weights) -> None:
            torch.mm(x, w[turn % len(w)].t())

        def backward(turn: int, g: Tensor = back, w: list[Tensor] = weights) -> None:
            torch.mm(g, w[turn % len(w)])

        def of_weights(turn: int, g: Tensor = back, x: Tensor = given, kept: list[Tensor] = gradients) -> None:
            kept[turn % len(kept)] = torch.mm(g.t(), x)

        found += [(2.0 * rows * inputs * outputs, clock.best(call)) for call in (forward, backward, of_weights)]
    return found


def fit_products(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """FLOP/s of the largest products, and FLOPs of one that reaches half of that: seconds = (x + x0) / R.

    Linear in 1/R and x0/R, so least squares of the relative errors have one answer. A call itself costs something, too:
    the constant part is no less than nothing.
    """
    flops, seconds = np.array(samples, dtype=float).T
    slope, constant = np.linalg.lstsq(np.c_[flops / seconds, 1 / seconds], np.ones(len(flops)), rcond=None)[0]
    if slope <= 0:  # a clock that was disturbed
        return float((flops / seconds).max()), 0.0
    if constant < 0:
        slope, constant = float(np.median(seconds / flops)), 0.0
    return float(1 / slope), float(constant / slope)


# -- memory -----------------------------------------------------------------------------------------------------------


def _stream(clock: ProbeTimer, num_bytes: int, count: int) -> float:
    """Bytes a second of an operator that reads one tensor and writes another."""
    tensors = [torch.ones(num_bytes // 4) for _ in range(count + 1)]
    seconds = clock.best(lambda turn: torch.add(tensors[turn % count], 1.0, out=tensors[(turn + 1) % (count + 1)]))
    return 2 * num_bytes / seconds


# -- operators --------------------------------------------------------------------------------------------------------


class _TransformerBlock(nn.Module):
    """A transformer's block, as people write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        apart = (batch, length, self.heads, width // self.heads)
        query, key, value = (one.view(apart).transpose(1, 2) for one in self.qkv(self.norms[0](x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        found: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))
        return found


def _words(width: int, length: int, batch: int) -> Callable[[], Tensor]:
    embed, block, head = nn.Embedding(256, width), _TransformerBlock(width, 4), nn.Linear(width, 256)
    tokens = torch.arange(batch * length).view(batch, length) % 251
    return lambda: F.cross_entropy(head(block(embed(tokens))).flatten(0, 1), tokens.flatten())


def _pictures(channels: int, side: int, batch: int) -> Callable[[], Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * channels, 10),
    )  # fmt: skip
    images, labels = torch.rand(batch, 3, side, side), torch.arange(batch) % 10
    return lambda: F.cross_entropy(model(images), labels)


def _curves(size: int) -> Callable[[], Tensor]:
    x = torch.rand(size, size, requires_grad=True)
    return lambda: (torch.tanh(x) + torch.sigmoid(x) + F.silu(x) + F.relu(x) + F.softmax(x, dim=-1) + x.exp()).mean()


def _overhead(clock: ProbeTimer) -> float:
    """Seconds of one operator, as a trace counts them, of models so small that hardly anything is computed; what
    modules, views and autograd take around it is part of it."""
    seed_everything(0)
    tiny = (_words(8, 2, 1), _pictures(1, 4, 1), _curves(2))
    seconds = sum(clock.best(lambda _, loss=each: loss().backward()) for each in tiny)  # type: ignore[misc]
    return seconds / sum(op.times for op in _traced(tiny))


def _layers(width: int, depth: int, rows: int) -> Callable[[], Tensor]:
    model = nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())))
    x = torch.rand(rows, width)

    def loss() -> Tensor:
        model.zero_grad()
        return cast(Tensor, model(x).mean())

    return loss


def _model_slowdown(speed: DeviceSpeed, clock: ProbeTimer, quick: bool) -> float:
    seed_everything(0)
    models = (_words(128, 64, 8), _pictures(32, 32, 16), _layers(256 if quick else 1024, 4, 128))
    ratios = []
    for loss in models:
        best = min(clock.best(lambda _, loss=loss: loss().backward()) for _ in range(PASSES))  # type: ignore[misc]
        ratios.append(best / sum_of_parts(speed, _traced([loss])))
    return max(1.0, sum(ratios) / len(ratios))


def sum_of_parts(measured: DeviceSpeed, ops: Sequence[Op]) -> float:
    """Seconds of operators by what is known of each, as a prediction adds them up (planner/cost/compute.py)."""
    speed, half = fit_products(measured.products["fp32"])
    total = 0.0
    for op in ops:
        known = measured.rates.get(op.name)
        if known is not None:
            seconds = (op.flops or op.bytes) / known
        else:
            seconds = max((op.flops + half) / speed if op.flops else 0.0, op.bytes / measured.memory_speed)
        total += op.times * (seconds + measured.overhead)
    return total


def operator_rates(clock: ProbeTimer) -> dict[str, float]:
    """Of each operator: FLOPs of those that are counted in FLOPs, bytes of the rest, over its seconds."""
    seed_everything(0)
    zoo = (_words(128, 64, 8), _pictures(32, 32, 16), _curves(512))
    passes = []
    for _ in range(clock.rounds + 1):
        with _TimedOperators() as timed:
            for loss in zoo:
                loss().backward()
        passes.append(timed.calls)
    seconds: dict[str, float] = {}
    for calls in zip(*passes[1:], strict=False):
        seconds[calls[0][0]] = seconds.get(calls[0][0], 0.0) + min(call[1] for call in calls)
    return per_second(_traced(zoo), seconds)


def per_second(ops: Sequence[Op], seconds: Mapping[str, float]) -> dict[str, float]:
    """By name, in order of the alphabet; without plain products, which have a curve, and without those that are over
    too soon for any clock."""
    work: dict[str, tuple[float, float]] = {}
    for op in ops:
        flops, size = work.get(op.name, (0.0, 0.0))
        work[op.name] = flops + op.flops * op.times, size + op.bytes * op.times
    return {
        name: (flops or size) / seconds[name]
        for name, (flops, size) in sorted(work.items())
        if seconds.get(name, 0.0) >= LEAST_SECONDS and size >= LEAST_BYTES and name not in PRODUCTS
    }


def _traced(losses: Sequence[Callable[[], Tensor]]) -> list[Op]:
    nothing = nn.Module()
    return [op for loss in losses for block in trace(nothing, BlockList(names=()), loss).blocks for op in block.ops]


class _TimedOperators(TorchDispatchMode):
    """Every operator with its seconds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()
        out = func(*args, **(kwargs or {}))
        self.calls.append((str(func._schema.name).partition("::")[2], time.thread_time() - began))
        return out
