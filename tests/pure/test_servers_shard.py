"""A parameter server's shard: cuts, tables, orders that count once, merged steps, snapshots. No process, no socket."""

import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import CheckpointError, InputError
from shoal.numerics.grad_norm import clip, global_norm, total_norm
from shoal.numerics.lanes import fold, subtrees
from shoal.paramserver.messages import (
    Apply,
    Compute,
    Contribute,
    Counted,
    Declare,
    DenseSpec,
    Done,
    Found,
    Hello,
    Keep,
    Late,
    Meet,
    Met,
    Next,
    Pull,
    Push,
    Put,
    Refused,
    Request,
    Rewind,
    Slot,
    SparseSpec,
    Squares,
    Standing,
    State,
    Stats,
    Stood,
    Values,
    Welcome,
    Who,
)
from shoal.paramserver.reduce import Rows, add_rows
from shoal.paramserver.rollback import PATIENCE, NothingInCommonError, at_one, ways_back
from shoal.paramserver.shard import Answer, Shard
from shoal.paramserver.sharding import WHOLE_BYTES, balance, cut_dense, flat
from shoal.paramserver.snapshot import Captured, Snapshots
from shoal.paramserver.step_coordinator import Pace
from shoal.paramserver.sync_mode import Mode

SHAPES: dict[str, list[int]] = {
    "wide": [300, 64],  # 76,800 bytes: cut by rows
    "bias": [300],
    "deep.weight": [65, 300],  # 78,000 bytes
    "scale": [],
    "head": [7, 65],
}


def spec_of(optimizer: str = "sgd", shapes: Mapping[str, list[int]] = SHAPES, **settings: float | bool) -> DenseSpec:
    return DenseSpec(
        names=list(shapes),
        shapes=list(shapes.values()),
        dtypes=["float32"] * len(shapes),
        optimizer=optimizer,
        settings=settings,
    )


def values_of(shapes: Mapping[str, list[int]] = SHAPES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Worker:
    """Numbers its orders and cuts whole tensors for each shard, as a client does."""

    def __init__(self, shards: Sequence[Shard], worker: int = 0, incarnation: int | None = None) -> None:
        self.shards = shards
        self.sequence = [0] * len(shards)
        self.tag = 0
        self.epoch = 0
        granted = shards[0].hello(Hello(worker, incarnation or 0))
        assert isinstance(granted, Welcome)
        self.who = Who(worker, granted.incarnation)
        for shard in shards[1:]:
            assert isinstance(shard.hello(Hello(worker, granted.incarnation)), Welcome)

    def order(self, request: Request, tensors: Sequence[Tensor] = (), shard: int = 0) -> Answer:
        """The one answer to it."""
        (answer,) = self.answers(request, tensors, shard)
        return answer

    def answers(self, request: Request, tensors: Sequence[Tensor] = (), shard: int = 0) -> list[Answer]:
        self.sequence[shard] += 1
        self.tag += 1
        return self.shards[shard].handle(self.who, self.tag, self.sequence[shard], self.epoch, request, tensors)

    def look(self, request: Request, tensors: Sequence[Tensor] = (), shard: int = 0) -> Answer:
        self.tag += 1
        (answer,) = self.shards[shard].handle(self.who, self.tag, 0, self.epoch, request, tensors)
        return answer

    # -- of a dense table ---------------------------------------------------------------------------------------------

    def declare(self, spec: DenseSpec, values: Mapping[str, Tensor], table: str = "model") -> None:
        for shard in range(len(self.shards)):
            assert self.order(Declare(table, spec), shard=shard).reply == Done(0)
            keys, flats = self.flats(spec, values, shard)
            assert keys is None
            assert self.order(Put([Slot(table)], fill=True), flats, shard).reply == Done(0)

    def flats(
        self, spec: DenseSpec, tensors: Mapping[str, Tensor], shard: int
    ) -> tuple[tuple[int, ...] | None, list[Tensor]]:
        parts = cut_dense(spec, len(self.shards))[shard]
        keys = tuple(key for key, part in enumerate(parts) if part.name in tensors)
        laid = flat([parts[key] for key in keys], spec)
        dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
        flats = [torch.zeros(total, dtype=dtype) for total in laid.totals]
        for key, view in zip(keys, laid.views(flats), strict=True):
            whole = tensors[parts[key].name]
            view.copy_(whole[parts[key].start : parts[key].stop] if whole.dim() else whole)
        return (None if len(keys) == len(parts) else keys), flats

    def push(self, spec: DenseSpec, gradients: Mapping[str, Tensor], table: str = "model", **more: Any) -> list[Answer]:
        found = []
        for shard in range(len(self.shards)):
            keys, flats = self.flats(spec, gradients, shard)
            found.append(self.order(Push([Slot(table, keys)], **more), flats, shard))
        return found

    def contribute(self, spec: DenseSpec, step: int, span: tuple[int, int], gradients: Mapping[str, Tensor]) -> None:
        for shard in range(len(self.shards)):
            keys, flats = self.flats(spec, gradients, shard)
            answers = self.answers(Contribute(step, span, [Slot("model", keys)]), flats, shard)
            assert isinstance(answers[0].reply, Done)

    def pull(self, spec: DenseSpec, table: str = "model") -> dict[str, Tensor]:
        whole = {name: torch.empty(shape) for name, shape in zip(spec.names, spec.shapes, strict=True)}
        for shard in range(len(self.shards)):
            answer = self.look(Pull([Slot(table)]), shard=shard)
            assert isinstance(answer.reply, Values)
            parts = cut_dense(spec, len(self.shards))[shard]
            for part, view in zip(parts, flat(parts, spec).views(answer.tensors), strict=True):
                target = whole[part.name]
                (target[part.start : part.stop] if target.dim() else target).copy_(view)
        return whole


def shards_of(count: int, **more: Any) -> list[Shard]:
    return [Shard(shard=number, shards=count, **more) for number in range(count)]


def one_worker(optimizer: str = "sgd", count: int = 1, **settings: float | bool) -> tuple[Worker, DenseSpec]:
    worker, spec = Worker(shards_of(count)), spec_of(optimizer, **settings)
    worker.declare(spec, values_of())
    return worker, spec


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def refused(answer: Answer, code: str) -> str:
    assert isinstance(answer.reply, Refused), answer.reply
    assert answer.reply.code == code, answer.reply
    return answer.reply.reason


# -- cuts -------------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 400), max_size=3), max_size=8),
    shards=st.integers(1, 5),
    loads=st.lists(st.floats(0.1, 100), min_size=8, max_size=8),
)
def test_every_row_is_on_one_shard_and_parts_lie_on_64_bytes(
    shapes: list[list[int]], shards: int, loads: list[float]
) -> None:
    names = [f"t{index}" for index in range(len(shapes))]
    spec = DenseSpec(names, shapes, ["float32"] * len(shapes), loads=loads[: len(shapes)])
    cut = cut_dense(spec, shards)
    assert cut == cut_dense(spec, shards)
    rows: dict[str, list[int]] = {name: [] for name in names}
    for parts in cut:
        assert len({part.name for part in parts}) == len(parts), "one range of a tensor"
        assert [part.index for part in parts] == sorted(part.index for part in parts)
        laid = flat(parts, spec)
        assert len(laid.totals) == 1
        end = 0
        for part, offset, shape, count in zip(parts, laid.offsets, laid.shapes, laid.counts, strict=True):
            rows[part.name] += range(part.start, part.stop)
            assert offset % 64 == 0 and offset >= end
            assert shape == ((part.stop - part.start, *shapes[part.index][1:]) if shapes[part.index] else ())
            end = offset + count
        assert end <= laid.totals[0] < end + 64
    for name, shape in zip(names, shapes, strict=True):
        assert sorted(rows[name]) == list(range(shape[0] if shape else 1))


def test_small_tensors_are_whole_and_large_ones_equal_shares() -> None:
    spec = spec_of(shapes={"large": [1000, 64], "small": [100], "alone": [1, 100_000]})
    cut = cut_dense(spec, 3)
    large = [(part.start, part.stop) for parts in cut for part in parts if part.name == "large"]
    assert sorted(stop - start for start, stop in large) == [333, 333, 334]
    assert [len([part for parts in cut for part in parts if part.name == name]) for name in ("small", "alone")] == [
        1,
        1,
    ]
    assert 1000 * 64 * 4 > WHOLE_BYTES > 100 * 4


def test_a_measured_load_moves_work() -> None:
    """Four equal tensors on two shards; when one is asked for as often as the others together, it has a shard alone."""
    shapes = {name: [100] for name in ("a", "b", "c", "d")}
    plain = spec_of(shapes=shapes)
    hot = DenseSpec(plain.names, plain.shapes, plain.dtypes, loads=[1.0, 1.0, 3.0, 1.0])
    assert [[part.name for part in parts] for parts in cut_dense(plain, 2)] == [["a", "c"], ["b", "d"]]
    assert [[part.name for part in parts] for parts in cut_dense(hot, 2)] == [["c"], ["a", "b", "d"]]
    assert balance([5, 1, 1, 1], [], 2) == [0, 1, 1, 1]
    # What a shard measures is what the next cut can be given.
    worker = Worker([Shard()])
    worker.declare(plain, values_of(shapes))
    for _ in range(2):
        worker.push(plain, {"c": torch.zeros(100)})
    worker.push(plain, values_of(shapes))
    assert worker.shards[0].counted().loads == {"model": [1.0, 1.0, 3.0, 1.0]}


def test_each_dtype_has_a_flat_tensor() -> None:
    spec = DenseSpec(["a", "n", "b"], [[10], [3], [70]], ["float32", "int64", "float32"])
    laid = flat(cut_dense(spec, 1)[0], spec)
    assert laid.dtypes == (torch.float32, torch.int64)
    assert (laid.buffers, laid.offsets, laid.totals) == ((0, 1, 0), (0, 0, 64), (192, 64))
    assert flat([], spec).totals == (0,)


# -- the same bits as one process -------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.01),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(named, lr=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.01),
}


def factory(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    def made(named: Any) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = make(named)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)

    return made


def gradients_of(step: int) -> dict[str, Tensor]:
    """Some are absent."""
    gradients = values_of(seed=100 + step)
    if step == 1:
        del gradients["bias"]
    if step == 3:
        return {"wide": gradients["wide"]}
    return gradients


class Reference:
    """One process, whole tensors."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in values_of().items()}
        self.optimizer, self.scheduler = factory(make)(list(self.parameters.items()))

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        self.scheduler.step()

    @property
    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_get_the_bits_of_whole_tensors(name: str, count: int) -> None:
    reference = Reference(OPTIMIZERS[name])
    worker = Worker(shards_of(count, factories={"job": factory(OPTIMIZERS[name])}))
    spec = spec_of("job")
    worker.declare(spec, values_of())
    assert all(shard.tables.dense["model"].parts for shard in worker.shards)
    for step in range(6):
        reference.step(gradients_of(step))
        for answer in worker.push(spec, gradients_of(step)):
            assert answer.reply == Done(step + 1)
        assert same(worker.pull(spec), reference.values), f"step {step}"
    held = sum(shard.held_bytes for shard in worker.shards)
    states = [
        value for state in reference.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    exact = sum(value.nbytes for value in (*reference.values.values(), *states))
    assert exact <= held < exact * 1.02


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_named_optimizers_are_torchs_own(name: str) -> None:
    worker, spec = one_worker(name, lr=0.05)
    whole = {key: nn.Parameter(value) for key, value in values_of().items()}
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": lambda named, lr: torch.optim.SGD(named, lr=lr, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
    }
    optimizer = kinds[name](list(whole.values()), lr=0.05)
    for step in range(3):
        for key, parameter in whole.items():
            parameter.grad = gradients_of(step).get(key)
        optimizer.step()
        worker.push(spec, gradients_of(step))
    assert same(worker.pull(spec), {key: parameter.detach() for key, parameter in whole.items()})


def test_gradients_of_another_dtype_are_converted() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    gradients = {name: value.bfloat16() for name, value in values_of(seed=1).items()}
    worker.push(spec, gradients)
    assert same(worker.pull(spec), {name: before[name] - gradients[name].float() for name in before})


def test_a_pull_reads_the_tables_own_memory_and_a_push_leaves_the_gradient_alone() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    answer = worker.look(Pull([Slot("model")]))
    table = worker.shards[0].tables.dense["model"]
    assert [each.data_ptr() for each in answer.tensors] == [each.data_ptr() for each in table.flats]
    assert all(parameter.data_ptr() % 64 == 0 for parameter in table.parameters)
    keys, flats = worker.flats(spec, values_of(seed=1), 0)
    kept = flats[0].clone()
    worker.order(Push([Slot("model", keys)]), flats)
    assert torch.equal(flats[0], kept)
    assert all(parameter.grad is None for parameter in table.parameters)
    some = worker.look(Pull([Slot("model", (3, 1))]))
    assert same(
        dict(zip(("scale", "bias"), flat([table.parts[3], table.parts[1]], spec).views(some.tensors), strict=True)),
        {name: worker.pull(spec)[name] for name in ("scale", "bias")},
    )


def test_compressed_gradients_are_read() -> None:
    from shoal.collectives.compression import read_compressor

    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    keys, (whole,) = worker.flats(spec, values_of(seed=1), 0)
    codec = read_compressor("bf16")
    slot = Slot("model", keys, codec="bf16", count=whole.numel())
    assert worker.order(Push([slot]), [codec.encode(whole, 0)]).reply == Done(1)
    rounded = {name: value.bfloat16().float() for name, value in values_of(seed=1).items()}
    assert same(worker.pull(spec), {name: before[name] - rounded[name] for name in before})
    nine = [torch.zeros(9, dtype=torch.uint8)]
    refused(worker.order(Push([Slot("model", codec="zip", count=whole.numel())]), nine), "codec")
    refused(worker.order(Push([Slot("model", codec="bf16", count=10**12)]), nine), "shape")
    refused(worker.order(Push([slot]), [torch.zeros(9, dtype=torch.uint8)]), "codec")


# -- what is refused --------------------------------------------------------------------------------------------------


def bad_pushes() -> dict[str, tuple[str, list[Slot], Callable[[Tensor], list[Tensor]]]]:
    """What -> code, slots, tensors made from a good flat gradient."""

    def nan(good: Tensor) -> list[Tensor]:
        good[7] = math.nan
        return [good]

    def infinities(good: Tensor) -> list[Tensor]:
        good[7], good[8] = math.inf, -math.inf
        return [good]

    model = Slot("model")
    words = Slot("words", sparse=True)
    ids = torch.tensor([1, 5])
    return {
        "unknown table": ("table", [Slot("modle")], lambda good: [good]),
        "dense as sparse": ("table", [Slot("model", sparse=True)], lambda good: [ids, torch.zeros(2, 4)]),
        "key out of range": ("key", [Slot("model", (0, 5))], lambda good: [good]),
        "key below 0": ("key", [Slot("model", (-1,))], lambda good: [good]),
        "key twice": ("key", [Slot("model", (1, 1))], lambda good: [good]),
        "too few numbers": ("shape", [model], lambda good: [good[:-64]]),
        "two dimensions": ("shape", [model], lambda good: [good.view(1, -1)]),
        "no tensor": ("shape", [model], lambda good: []),
        "one too many": ("shape", [model], lambda good: [good, good]),
        "integers": ("dtype", [model], lambda good: [good.long()]),
        "doubles": ("dtype", [model], lambda good: [good.double()]),
        "nan": ("nonfinite", [model], nan),
        "infinities": ("nonfinite", [model], infinities),
        "table twice": ("slot", [model, model], lambda good: [good, good]),
        "no optimizer": ("optimizer", [Slot("fixed")], lambda good: [torch.zeros(64)]),
        "unfilled": ("unfilled", [Slot("empty")], lambda good: [torch.zeros(64)]),
        "row out of range": ("row", [words], lambda good: [torch.tensor([1, 100]), torch.zeros(2, 4)]),
        "row below 0": ("row", [words], lambda good: [torch.tensor([-1, 1]), torch.zeros(2, 4)]),
        "row twice": ("row", [words], lambda good: [torch.tensor([1, 1]), torch.zeros(2, 4)]),
        "ids of floats": ("dtype", [words], lambda good: [ids.float(), torch.zeros(2, 4)]),
        "another dim": ("shape", [words], lambda good: [ids, torch.zeros(2, 5)]),
        "rows nan": ("nonfinite", [words], lambda good: [ids, torch.full((2, 4), math.nan)]),
        "good, then bad": ("shape", [model, words], lambda good: [good, ids, torch.zeros(3, 4)]),
    }


@pytest.mark.parametrize("what", bad_pushes())
@pytest.mark.parametrize("kind", ["push", "contribute"])
def test_what_does_not_fit_is_refused_and_changes_nothing(what: str, kind: str) -> None:
    code, slots, make = bad_pushes()[what]
    worker, spec = one_worker()
    small = DenseSpec(["t"], [[3]], ["float32"], optimizer="none")
    worker.declare(small, {"t": torch.ones(3)}, "fixed")
    worker.order(Declare("empty", DenseSpec(["t"], [[3]], ["float32"], optimizer="sgd")))
    worker.order(Declare("words", SparseSpec(rows=100, dim=4)))
    shard = worker.shards[0]
    before = shard.capture(copy=True).tensors
    _, (good,) = worker.flats(spec, values_of(seed=1), 0)
    request: Request = Push(slots) if kind == "push" else Contribute(0, (0, 1), slots)
    answer = worker.order(request, make(good.clone()))
    reason = refused(answer, code)
    assert any(slot.table in reason for slot in slots)
    assert same(shard.capture().tensors, before)
    assert shard.version == 0 and shard.counted().refused == {code: 1}
    assert not shard._steps.contributions.steps.get(0)
    # The order has its number all the same, and the next one is taken.
    assert worker.push(spec, values_of(seed=1))[0].reply == Done(1)


def test_a_finite_gradient_whose_sum_is_too_large_is_taken() -> None:
    worker, spec = one_worker()
    assert worker.push(spec, {"bias": torch.full([300], 3e38)})[0].reply == Done(1)


def test_an_unfilled_table_can_be_filled_by_several_and_the_first_counts() -> None:
    worker, spec = Worker([Shard()]), spec_of()
    assert worker.order(Declare("model", spec)).reply == Done(0)
    first, second = values_of(seed=1), values_of(seed=2)
    keys, flats = worker.flats(spec, {"wide": first["wide"]}, 0)
    worker.order(Put([Slot("model", keys)], fill=True), flats)
    reason = refused(worker.look(Pull([Slot("model")])), "unfilled")
    assert "4 of its 5" in reason
    standing = worker.look(Standing()).reply
    assert isinstance(standing, Stood) and not standing.filled
    worker.order(Put([Slot("model")], fill=True), worker.flats(spec, second, 0)[1])
    assert same(worker.pull(spec), {**second, "wide": first["wide"]})
    worker.order(Put([Slot("model")]), worker.flats(spec, first, 0)[1])
    assert same(worker.pull(spec), first)
    standing = worker.look(Standing()).reply
    assert isinstance(standing, Stood) and standing.filled


def test_another_table_of_the_same_name_is_refused() -> None:
    worker, _ = one_worker("sgd", lr=0.1)
    assert worker.order(Declare("model", spec_of("sgd", lr=0.1))).reply == Done(0)
    reason = refused(worker.order(Declare("model", spec_of("adam", lr=0.1))), "declared")
    assert "optimizer=sgd" in reason and "optimizer=adam" in reason
    assert "sparse" in refused(worker.order(Declare("model", SparseSpec(rows=5, dim=2))), "declared")
    for spec, code in (
        (DenseSpec(["a", "a"], [[1], [1]], ["float32"] * 2), "spec"),
        (DenseSpec(["a"], [[1], [1]], ["float32"]), "spec"),
        (DenseSpec(["a"], [[-1]], ["float32"]), "spec"),
        (DenseSpec(["a"], [[1]], ["float31"]), "spec"),
        (DenseSpec(["a"], [[1]], ["float32"], optimizer="adan"), "spec"),
        (DenseSpec(["a"], [[1]], ["float32"], optimizer="job"), "optimizer"),
        (SparseSpec(rows=0, dim=1), "spec"),
    ):
        refused(worker.order(Declare("other", spec)), code)
    assert worker.shards[0].tables.names == ["model"]


# -- exactly once -----------------------------------------------------------------------------------------------------

ONE = {"count": [3]}  # integers as gradients and lr=1: a parameter that counts pushes


def counting(workers: int = 1, **more: Any) -> tuple[list[Worker], DenseSpec]:
    shards = [Shard(**more)]
    crowd = [Worker(shards, number) for number in range(workers)]
    spec = spec_of("sgd", ONE, lr=1.0)
    crowd[0].declare(spec, {"count": torch.zeros(3)})
    return crowd, spec


def pushes(worker: Worker, spec: DenseSpec) -> float:
    """How many have been applied."""
    return -float(worker.pull(spec)["count"][0])


def test_a_repeated_order_is_answered_as_before_and_applied_once() -> None:
    (worker,), spec = counting()
    shard = worker.shards[0]
    request, tensors = Push([Slot("model")]), worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    assert worker.order(request, tensors).reply == Done(1)
    assert worker.order(request, tensors).reply == Done(2)
    (again,) = shard.handle(worker.who, 3, 3, 0, request, tensors)  # numbers 1 and 2 declared and filled
    assert again == Answer(worker.who, 3, Done(1), ())
    assert pushes(worker, spec) == 2 and shard.counted().duplicates == 1
    (gap,) = shard.handle(worker.who, 9, 6, 0, request, tensors)
    assert "order 6" in refused(gap, "gap") and "order 4" in refused(gap, "gap")
    (none,) = shard.handle(worker.who, 9, 0, 0, request, tensors)
    refused(none, "sequence")
    for _ in range(70):
        worker.order(request, tensors)
    (old,) = shard.handle(worker.who, 3, 3, 0, request, tensors)
    assert old.reply == Done(72), "too long ago: it was applied, with whatever came since"
    assert pushes(worker, spec) == 72


def test_a_repeated_push_with_pull_reads_the_values_again() -> None:
    (worker,), spec = counting()
    tensors = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    first = worker.order(Push([Slot("model")], pull=True), tensors)
    assert first.reply == Values(1, [Slot("model")], 0) and float(first.tensors[0][0]) == -1
    number = worker.sequence[0]
    worker.order(Push([Slot("model")]), tensors)
    (again,) = worker.shards[0].handle(worker.who, 1, number, 0, Push([Slot("model")], pull=True), tensors)
    assert again.reply == Values(2, [Slot("model")], 0) and float(again.tensors[0][0]) == -2


def test_a_new_process_of_a_worker_takes_its_place() -> None:
    (worker,), spec = counting()
    shard = worker.shards[0]
    newer = Worker([shard], 0)
    assert newer.who.incarnation > worker.who.incarnation
    reason = refused(
        worker.order(Push([Slot("model")]), worker.flats(spec, {"count": torch.ones(3)}, 0)[1]), "incarnation"
    )
    assert "worker 0" in reason
    assert isinstance(shard.hello(Hello(0, worker.who.incarnation)), Refused)
    assert newer.push(spec, {"count": torch.ones(3)})[0].reply == Done(1)
    welcome = shard.hello(Hello(0, newer.who.incarnation))
    assert isinstance(welcome, Welcome) and welcome.sequence == 1
    other = Shard(shard=1, shards=2).hello(Hello(0))
    assert isinstance(other, Refused) and other.code == "shard"
    later = Shard(boot=2).hello(Hello(0))
    assert isinstance(later, Welcome) and later.incarnation > newer.who.incarnation


def test_a_ticket_is_applied_once_whoever_pushes_it() -> None:
    (first, second), spec = counting(2)
    one = {"count": torch.ones(3)}
    assert first.push(spec, one, ticket=0)[0].reply == Done(1)
    assert first.push(spec, one, ticket=2)[0].reply == Done(2)
    assert second.push(spec, one, ticket=2)[0].reply == Done(2)
    (late,) = second.push(spec, one, ticket=0, pull=True)
    assert isinstance(late.reply, Values)
    assert second.push(spec, one, ticket=1)[0].reply == Done(3)
    shard = first.shards[0]
    assert (shard._tickets.floor, shard._tickets.above) == (3, set())
    assert pushes(first, spec) == 3 and shard.counted().refused == {"ticket": 2}


def test_parts_of_an_update_are_one_update() -> None:
    """With a ticket they are all applied or none: another worker may have to do it."""
    (first, second), spec = counting(2)
    one = {"count": torch.ones(3)}
    assert first.push(spec, one, last=False)[0].reply == Done(0)
    assert first.push(spec, one)[0].reply == Done(1)
    assert pushes(first, spec) == 2
    assert first.push(spec, one, ticket=0, last=False)[0].reply == Done(1)
    assert pushes(first, spec) == 2
    second.push(spec, one, ticket=0, last=False)
    assert second.push(spec, one, ticket=0)[0].reply == Done(2)
    assert first.push(spec, one, ticket=0)[0].reply == Done(2)
    assert pushes(first, spec) == 4
    first.push(spec, one, ticket=1, last=False)
    assert first.push(spec, one, ticket=2)[0].reply == Done(3), "it has given up the other"
    assert pushes(first, spec) == 5


def test_an_order_that_failed_is_not_tried_again() -> None:
    """The job's own optimizer may raise after it has changed something."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            raise ZeroDivisionError

    worker = Worker([Shard(factories={"job": lambda named: (Fails(named, lr=1.0), None)})])
    spec = spec_of("job", ONE)
    worker.declare(spec, {"count": torch.zeros(3)})
    with pytest.raises(ZeroDivisionError):
        worker.push(spec, {"count": torch.ones(3)})
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    (again,) = worker.shards[0].handle(worker.who, 3, 3, 0, Push([Slot("model")]), flats)
    refused(again, "failed")
    assert pushes(worker, spec) == 1


def test_staleness_is_counted() -> None:
    (worker,), spec = counting()
    for basis in (0, 0, 1, -1):
        worker.push(spec, {"count": torch.ones(3)}, basis=basis)
    counted = worker.look(Stats()).reply
    assert isinstance(counted, Counted)
    assert counted.staleness == {0: 1, 1: 2} and counted.updates == counted.version == 4


# -- lockstep ---------------------------------------------------------------------------------------------------------

LANES = 6


def lane_gradients(lane: int, step: int) -> dict[str, Tensor]:
    """By lane; some lanes have none for some tensors."""
    gradients = values_of(seed=1000 * step + lane)
    if lane == 2:
        del gradients["bias"]
    if lane in (1, 5) and step == 1:
        del gradients["head"]
    return gradients


def partial_sums(held: tuple[int, int], step: int) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What a worker sends: sums of the subtrees that it holds."""
    found = {}
    for span in subtrees(LANES, held):
        sums = {}
        for name in SHAPES:
            lanes = {(lane, lane + 1): lane_gradients(lane, step).get(name) for lane in range(*span)}
            whole = {(lane, lane + 1): None for lane in range(LANES)} | lanes
            total = fold(LANES, whole, torch.add)
            if total is not None:
                sums[name] = total
        found[span] = sums
    return found


def merged(step: int, lanes: range = range(LANES)) -> dict[str, Tensor]:
    found = {}
    for name in SHAPES:
        parts = {
            (lane, lane + 1): lane_gradients(lane, step).get(name) if lane in lanes else None for lane in range(LANES)
        }
        total = fold(LANES, parts, torch.add)
        assert total is not None
        found[name] = total
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_merged_step_has_the_bits_of_one_process(count: int) -> None:
    """Three workers with uneven lanes, a scale, a clipped norm, a scheduler."""
    reference = Reference(OPTIMIZERS["adamw"])
    shards = shards_of(count, factories={"model": factory(OPTIMIZERS["adamw"])})
    workers = [Worker(shards, number) for number in range(3)]
    spec = spec_of("job")
    workers[0].declare(spec, values_of())
    held = [(0, 3), (3, 5), (5, 6)]
    spans = [span for lanes in held for span in subtrees(LANES, lanes)]
    for step in range(3):
        gradients = {name: value.mul_(0.25) for name, value in merged(step).items()}
        norm = clip(list(gradients.values()), 0.5)
        reference.step(gradients)
        for worker, lanes in zip(reversed(workers), reversed(held), strict=True):
            for span, sums in partial_sums(lanes, step).items():
                worker.contribute(spec, step, span, sums)
        rows: dict[str, dict[int, Tensor]] = {name: {} for name in SHAPES}
        for shard in range(count):
            answer = workers[1].look(Squares(step, LANES, spans, 0.25), shard=shard)
            assert isinstance(answer.reply, Values) and answer.reply.slots == [Slot("model")]
            (squares,) = answer.tensors
            for part in cut_dense(spec, count)[shard]:
                rows[part.name][part.start] = squares[: part.stop - part.start]
                squares = squares[part.stop - part.start :]
        told = total_norm([mine[start] for mine in rows.values() for start in sorted(mine)])
        assert told == norm
        for worker in workers:
            for shard in range(count):
                asked = Apply(step, LANES, spans, scale=0.25, norm=norm, max_norm=0.5)
                answer = worker.order(asked, shard=shard)
                assert answer.reply == Values(step + 1, [Slot("model")], step + 1)
        assert same(workers[2].pull(spec), reference.values), f"step {step}"
    assert [shard.counted().updates for shard in shards] == [3] * count


def test_a_shard_alone_knows_the_norm() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    gradients = values_of(seed=1)
    worker.contribute(spec, 0, (0, 1), gradients)
    assert isinstance(worker.order(Apply(0, 1, [(0, 1)], max_norm=0.5)).reply, Values)
    assert clip(list(gradients.values()), 0.5) == pytest.approx(global_norm(values_of(seed=1).values()))
    assert same(worker.pull(spec), {name: before[name] - gradients[name] for name in before})
    two, spec = one_worker("sgd", count=2)
    two.contribute(spec, 0, (0, 1), gradients)
    refused(two.order(Apply(0, 1, [(0, 1)], max_norm=0.5)), "norm")


def test_an_apply_waits_for_what_it_names_and_leaves_out_the_rest() -> None:
    (first, second), spec = counting(2)
    shard = first.shards[0]
    first.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    first.contribute(spec, 0, (2, 3), {"count": torch.full([3], 100.0)})
    asked = Apply(0, 3, [(0, 1), (1, 2)], pull=False)
    assert first.answers(asked) == []
    first_tag = first.tag
    # Sent again while it waits: still one answer.
    assert shard.handle(first.who, first.tag, first.sequence[0], 0, asked) == []
    second.sequence[0] += 1
    one = [torch.cat([torch.ones(3), torch.zeros(61)])]
    answers = shard.handle(second.who, 77, second.sequence[0], 0, Contribute(0, (1, 2), [Slot("model")]), one)
    assert [(answer.to, answer.tag, answer.reply) for answer in answers] == [
        (second.who, 77, Done(1)),
        (first.who, first_tag, Done(1)),
    ]
    assert pushes(first, spec) == 2
    assert second.order(Apply(0, 3, [(0, 1), (1, 2)], pull=False)).reply == Done(1), "once for each step"
    assert second.order(Contribute(0, (2, 3), [Slot("model")]), one).reply == Late(1)
    assert shard.counted().refused == {"late": 2}
    assert pushes(first, spec) == 2 and shard.step == 1


def test_a_span_counts_once_whoever_sends_it() -> None:
    (first, second), spec = counting(2)
    for worker in (first, second, first):
        worker.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    first.order(Apply(0, 1, [(0, 1)]))
    assert pushes(first, spec) == 1 and first.shards[0].counted().duplicates == 2
    held = first.shards[0]._steps.contributions
    assert not held.steps and not held.folded, "nothing of a step that is over"


def test_what_is_kept_is_a_copy() -> None:
    (worker,), spec = counting()
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    worker.order(Contribute(0, (0, 1), [Slot("model")]), flats)
    flats[0].fill_(99)
    worker.order(Apply(0, 1, [(0, 1)]))
    assert pushes(worker, spec) == 1


def test_memory_of_a_step_is_used_again_for_the_next() -> None:
    (worker,), spec = counting()
    places = []
    for step in range(3):
        for lane in (0, 1):
            worker.contribute(spec, step, (lane, lane + 1), {"count": torch.full([3], 1.0 + lane)})
        held = worker.shards[0]._steps.contributions.steps[step]
        places.append({each.flats[0].data_ptr() for part in held.values() for each in part.values()})
        worker.order(Apply(step, 2, [(0, 1), (1, 2)]))
    assert places[0] == places[1] == places[2] and len(places[0]) == 2
    assert pushes(worker, spec) == 9


def test_spans_that_are_no_tree_are_refused() -> None:
    (worker,), spec = counting()
    worker.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    for spans in ([(1, 3)], [(0, 2), (1, 2)], [(0, 9)], [(2, 1)]):
        refused(worker.order(Apply(0, 4, spans)), "spans")
    assert isinstance(worker.look(Squares(0, 4, [(0, 1)])).reply, Values)
    refused(worker.order(Apply(0, 4, [])), "spans")  # it was added up otherwise
    assert isinstance(worker.order(Apply(0, 4, [(0, 1)])).reply, Values)
    squares = worker.look(Squares(0, 4, [(0, 1)]))
    assert squares.tensors[0].tolist() == [1, 1, 1], "of the last step, for whoever is slower than who applied it"
    worker.order(Apply(1, 4, [], skip=True))
    worker.contribute(spec, 2, (0, 1), {"count": torch.ones(3)})
    worker.look(Squares(2, 4, [(0, 1)]))
    assert worker.look(Squares(0, 4, [(0, 1)])).reply == Late(2)


def test_a_skipped_step_moves_the_scheduler_alone() -> None:
    """As a loop does that calls optimizer.step() without gradients."""
    reference = Reference(OPTIMIZERS["momentum"])
    worker = Worker([Shard(factories={"job": factory(OPTIMIZERS["momentum"])})])
    spec = spec_of("job")
    worker.declare(spec, values_of())
    for step in range(4):
        gradients = {} if step == 1 else gradients_of(step)
        reference.step(gradients)
        worker.contribute(spec, step, (0, 1), gradients_of(step))
        worker.order(Apply(step, 1, [(0, 1)], skip=step == 1))
        assert same(worker.pull(spec), reference.values)


def test_nobody_is_ahead_of_a_shard() -> None:
    """But one that came back with an older state."""
    (worker,), spec = counting()
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    assert "at step 0" in refused(worker.order(Contribute(1, (0, 1), [Slot("model")]), flats), "ahead")
    refused(worker.order(Apply(1, 1, [(0, 1)])), "ahead")
    refused(worker.look(Squares(1, 1, [(0, 1)])), "ahead")
    begun = worker.order(Put([], state={"begin": [7, []]}))
    refused(begun, "begun")
    fresh = Worker([Shard()])
    assert fresh.order(Put([], state={"begin": [7, [9]]})).reply == Done(0)
    fresh.declare(spec, {"count": torch.zeros(3)})
    assert fresh.order(Contribute(6, (0, 1), [Slot("model")]), flats).reply == Late(7)
    fresh.contribute(spec, 7, (0, 1), {"count": torch.ones(3)})
    assert fresh.push(spec, {"count": torch.ones(3)}, ticket=9)[0].reply == Done(0)


def test_a_run_begins_once_however_often_that_is_said() -> None:
    """Also on a shard that has none of the model's tensors."""
    spec = DenseSpec(["count"], [[3]], ["float32"], settings={"lr": 1.0})
    shards = [Shard(shard=number, shards=2) for number in range(2)]
    holds = next(number for number in range(2) if cut_dense(spec, 2)[number])
    for number, shard in enumerate(shards):
        who = Who(0, 1)
        shard.hello(Hello(who.worker, who.incarnation))
        begin = Put([], state={"begin": [4, [6], "", 4]})
        replies = [shard.handle(who, 1, 1, 0, Declare("model", spec)), shard.handle(who, 2, 2, 0, begin)]
        if number == holds:
            replies.append(shard.handle(who, 3, 3, 0, Put([Slot("model")]), [torch.zeros(64)]))
        at = len(replies)
        replies.append(shard.handle(who, at + 1, at + 1, 0, begin))
        assert all(isinstance(answers[0].reply, Done) for answers in replies)
        other = Put([], state={"begin": [5, [], "", 5]})
        assert shard.handle(who, at + 2, at + 2, 0, other)[0].reply.code == "begun"  # type: ignore[union-attr]
        stood = shard.handle(who, at + 3, 0, 0, Standing())[0].reply
        assert isinstance(stood, Stood) and (stood.step, stood.began, stood.filled) == (4, 4, True)


def test_values_that_come_with_a_step_are_put_once_with_it() -> None:
    """Buffers: whoever applies the step says what they are."""
    (first, second), spec = counting(2)
    first.declare(DenseSpec(["b"], [[2]], ["float32"], optimizer="none"), {"b": torch.zeros(2)}, "buffers")
    put = [Slot("buffers")]
    wrong = Apply(0, 2, [(0, 1), (1, 2)], put=put)
    refused(first.order(wrong, [torch.zeros(3)]), "shape")
    values = [torch.full([64], 5.0)]
    assert first.answers(wrong, values) == [], "waits for contributions"
    values[0].fill_(9)
    first.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    answers = second.answers(Contribute(0, (1, 2), [Slot("model")]), second.flats(spec, {"count": torch.ones(3)}, 0)[1])
    assert [type(answer.reply) for answer in answers] == [Done, Values]
    assert second.order(wrong, values).reply == Values(1, [Slot("model")], 1)
    assert second.look(Pull(put)).tensors[0][:2].tolist() == [5, 5]
    assert pushes(first, spec) == 2


def test_rows_are_added_where_both_have_them() -> None:
    left = Rows(torch.tensor([1, 4, 9]), torch.tensor([[1.0], [2.0], [3.0]]))
    right = Rows(torch.tensor([0, 4, 5]), torch.tensor([[10.0], [20.0], [-0.0]]))
    ids, rows = add_rows(left, right)
    assert ids.tolist() == [0, 1, 4, 5, 9]
    assert rows.view(-1).tolist() == [10.0, 1.0, 22.0, 0.0, 3.0]
    assert math.copysign(1, float(rows[3])) == -1, "as it was, not added to zero"


# -- sparse tables ----------------------------------------------------------------------------------------------------


def test_rows_are_pushed_pulled_and_merged() -> None:
    shards = shards_of(2)
    worker = Worker(shards)
    spec = SparseSpec(rows=100, dim=2, scale=0.0, optimizer="sgd", settings={"lr": 1.0})
    words = Slot("words", sparse=True)
    for shard in range(2):
        worker.order(Declare("words", spec), shard=shard)
    assert worker.order(Push([words]), [torch.tensor([2, 98]), torch.ones(2, 2)]).reply == Done(1)
    refused(worker.order(Push([words]), [torch.tensor([2, 3]), torch.ones(2, 2)]), "row")
    answer = worker.look(Pull([words]), [torch.tensor([0, 2, 98])])
    assert isinstance(answer.reply, Values) and answer.tensors[0].tolist() == [[0, 0], [-1, -1], [-1, -1]]
    worker.order(Contribute(0, (0, 1), [words]), [torch.tensor([2, 4]), torch.ones(2, 2)])
    worker.order(Contribute(0, (1, 2), [words]), [torch.tensor([4, 6]), torch.ones(2, 2)])
    squares = worker.look(Squares(0, 2, [(0, 1), (1, 2)], 0.5))
    assert squares.tensors[0].tolist() == [2, 4, 6]
    assert squares.tensors[1].tolist() == pytest.approx([0.5, 2.0, 0.5])
    assert worker.order(Apply(0, 2, [(0, 1), (1, 2)], scale=0.5, pull=False)).reply == Done(2)
    answer = worker.look(Pull([words]), [torch.tensor([2, 4, 6])])
    assert answer.tensors[0][:, 0].tolist() == [-1.5, -1.0, -0.5]
    counted = worker.look(Stats()).reply
    assert isinstance(counted, Counted) and counted.rows == {"words": 4}
    found = worker.look(State("words"))
    assert isinstance(found.reply, Found) and "ids" in found.reply.names
    fresh = Worker(shards_of(2))
    fresh.order(Declare("words", spec))
    state = {"table": "words", "names": found.reply.names}
    assert fresh.order(Put([], state=state), found.tensors).reply == Done(0)
    assert torch.equal(fresh.look(Pull([words]), [torch.tensor([2, 4, 6])]).tensors[0], answer.tensors[0])
    refused(fresh.order(Put([], state={"table": "words", "names": ["ids"]}), found.tensors[:1]), "shape")
    short = [found.tensors[0], *(each[:1] for each in found.tensors[1:])]
    refused(fresh.order(Put([], state=state), short), "shape")
    odd = [found.tensors[0] + 1, *found.tensors[1:]]
    refused(fresh.order(Put([], state=state), odd), "row")
    refused(fresh.order(Put([words]), [torch.tensor([2]), torch.ones(1, 2)]), "sparse")
    assert fresh.shards[0].counted().rows == {"words": 4}


# -- the pace ---------------------------------------------------------------------------------------------------------


def test_a_meeting_is_answered_when_all_have_come() -> None:
    shard = Shard(pace=Pace(Mode.read("sync"), 2, 10))
    first, second = Worker([shard], 0), Worker([shard], 1)
    note = torch.ones(2)
    assert first.answers(Meet(0, b"a"), [note]) == []
    note.fill_(7)  # the transport's memory is used again
    answers = second.answers(Meet(0, b"b"))
    assert {(answer.to, answer.tag) for answer in answers} == {(first.who, first.tag), (second.who, second.tag)}
    for answer in answers:
        assert answer.reply == Met(0, [0, 1], [b"a", b"b"], [1, 0])
        assert [each.tolist() for each in answer.tensors] == [[1, 1]]
    # The answer was lost: asked again, told again, tensors too.
    (again,) = shard.handle(first.who, first.tag, first.sequence[0], 0, Meet(0, b"a"))
    assert again.reply == answers[0].reply and len(again.tensors) == 1
    lone = Worker([Shard()], 0)
    refused(lone.order(Meet(0, b"")), "pace")


def test_a_lost_workers_ticket_goes_to_another() -> None:
    shard = Shard(pace=Pace(Mode.read("async"), 2, 2))
    first, second = Worker([shard], 0), Worker([shard], 1)
    assert isinstance(first.order(Next(0)).reply, Compute)
    taken = second.order(Next(1)).reply
    assert isinstance(taken, Compute) and taken.ticket == 1
    assert second.answers(Next(1, done=1)) == []
    assert shard.gone(Who(0, 1)) == [], "not its present process"
    (answer,) = shard.gone(first.who)
    assert (answer.to, answer.tag) == (second.who, second.tag)
    assert isinstance(answer.reply, Compute) and answer.reply.ticket == 0
    # Asked again after the connection broke: the same ticket.
    (again,) = shard.handle(second.who, second.tag, second.sequence[0], 0, Next(1, done=1))
    assert again.reply == answer.reply


# -- the optimizer's state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_shards_goes_to_other_shards(name: str) -> None:
    """Through messages, as a checkpoint does; from two shards to three; the bits go on."""
    from shoal.paramserver.messages import decode_reply, decode_request, encode

    reference = Reference(OPTIMIZERS[name])
    make = {"job": factory(OPTIMIZERS[name])}
    spec = spec_of("job")
    old, new = Worker(shards_of(2, factories=make)), Worker(shards_of(3, factories=make))
    old.declare(spec, values_of())
    for step in range(3):
        reference.step(gradients_of(step))
        old.push(spec, gradients_of(step))
    rows: dict[str, dict[int, Tensor]] = {}
    values: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for shard in range(2):
        answer = old.look(State("model"), shard=shard)
        found = decode_reply(encode(answer.reply))
        assert isinstance(found, Found)
        parts = {part.name: part for part in cut_dense(spec, 2)[shard]}
        for field, tensor in zip(found.names, answer.tensors, strict=True):
            rows.setdefault(field, {})[parts[field.partition("\t")[0]].start] = tensor
        values = found.values
        steps |= found.values["steps"]
    state = {
        field: pieces[min(pieces)] if len(pieces) == 1 else torch.cat([pieces[at] for at in sorted(pieces)])
        for field, pieces in rows.items()
    }
    for key, parameter in reference.parameters.items():
        for field, value in reference.optimizer.state.get(parameter, {}).items():
            if field != "step" and torch.is_tensor(value):
                assert torch.equal(state[f"{key}\t{field}"], value)
    whole = old.pull(spec)
    for shard in range(3):
        new.order(Declare("model", spec), shard=shard)
        parts = {part.name: part for part in cut_dense(spec, 3)[shard]}
        mine = {
            field: tensor[parts[key].start : parts[key].stop] if tensor.dim() else tensor
            for field, tensor in state.items()
            if (key := field.partition("\t")[0]) in parts
        }
        told = {**values, "steps": steps, "names": list(mine)}
        put = decode_request(encode(Put([Slot("model")], fill=True, state=told)))
        assert new.order(put, [*new.flats(spec, whole, shard)[1], *mine.values()], shard).reply == Done(0)
    for step in range(3, 6):
        reference.step(gradients_of(step))
        new.push(spec, gradients_of(step))
        assert same(new.pull(spec), reference.values), f"step {step}"


def test_a_table_that_was_filled_keeps_its_optimizers_state() -> None:
    """A worker that comes late says the same as the first did at the start."""
    worker, spec = one_worker("momentum")
    worker.push(spec, values_of(seed=1))
    before = worker.shards[0].capture(copy=True).tensors
    state = {"names": ["bias\tmomentum_buffer"], "groups": [], "steps": {}}
    put = Put([Slot("model")], fill=True, state=state)
    assert worker.order(put, [*worker.flats(spec, values_of(), 0)[1], torch.zeros(300)]).reply == Done(1)
    assert same(worker.shards[0].capture().tensors, before)


def test_state_of_another_shape_is_refused() -> None:
    worker, spec = one_worker("momentum")
    before = worker.shards[0].capture(copy=True).tensors
    state = {"names": ["bias\tmomentum_buffer"], "groups": [], "steps": {}}
    flats = worker.flats(spec, values_of(seed=1), 0)[1]
    refused(worker.order(Put([Slot("model")], state=state), [*flats, torch.zeros(7)]), "shape")
    refused(worker.order(Put([Slot("model")], state=state), flats), "shape")
    assert same(worker.shards[0].capture().tensors, before)


# -- capture, restore, rewind -----------------------------------------------------------------------------------------


def history(shard: Shard, begin: int, end: int) -> list[Answer]:
    """Orders of two workers: pushes, a repeated one, a refused one, rows, contributions, tickets."""
    found: list[Answer] = []
    spec = spec_of("adam", lr=0.01)
    words = Slot("words", sparse=True)
    for step in range(begin, end):
        for worker in (0, 1):
            who = Who(worker, (1 << 32) + 1 + worker)
            welcome = shard.hello(Hello(worker, who.incarnation))
            assert isinstance(welcome, Welcome)
            number = welcome.sequence
            if not number:
                requests: list[tuple[Request, list[Tensor]]] = [
                    (Declare("model", spec), []),
                    (Declare("words", SparseSpec(rows=1000, dim=3, optimizer="adam")), []),
                    (Put([Slot("model")], fill=True), flat_of(spec, values_of())),
                ]
            else:
                ids = torch.arange(step, 900, 97)
                rows = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(step))
                push = Push([Slot("model"), words], ticket=2 * step + worker, basis=step)
                requests = [
                    (Meet(step - 1, b"note"), [torch.ones(worker)]),
                    (push, [*flat_of(spec, values_of(seed=step)), ids, rows]),
                    (Push([Slot("model")]), [torch.zeros(1)]),
                    (
                        Contribute(step - 1, (worker, worker + 1), [Slot("model")]),
                        flat_of(spec, values_of(seed=50 + step)),
                    ),
                    (Apply(step - 1, 2, [(0, 1), (1, 2)], scale=0.5, pull=False), []),
                ]
            for request, tensors in requests:
                number += 1
                for _ in range(2):  # everything twice
                    found += shard.handle(who, number, number, 0, request, tensors)
    return found


def flat_of(spec: DenseSpec, values: Mapping[str, Tensor]) -> list[Tensor]:
    laid = flat(cut_dense(spec, 1)[0], spec)
    flats = laid.zeros()
    for view, name in zip(laid.views(flats), spec.names, strict=True):
        view.copy_(values[name])
    return flats


def equal(left: Captured, right: Captured) -> bool:
    return left.values == right.values and same(left.tensors, right.tensors)


def a_shard() -> Shard:
    return Shard(pace=Pace(Mode.read("sync"), 2, 100))


def test_the_same_orders_give_the_same_bits_also_across_a_restart(tmp_path: Path) -> None:
    first, second, third = a_shard(), a_shard(), a_shard()
    answers = history(first, 0, 6)
    assert [answer.reply for answer in history(second, 0, 6)] == [answer.reply for answer in answers]
    assert equal(first.capture(), second.capture())
    assert first.counted().refused["shape"] == 10 and first.counted().duplicates > 20
    assert first.version == 15 and first.held_bytes > 0
    # ... and through a file.
    with Snapshots(tmp_path / "shard-0") as snapshots:
        snapshots.write(first.capture())
        captured = snapshots.newest()
    assert captured is not None
    third.restore(captured)
    assert equal(third.capture(), second.capture())
    more = [answer.reply for answer in history(first, 6, 9)]
    assert [answer.reply for answer in history(third, 6, 9)] == more
    assert equal(third.capture(), first.capture())
    assert not equal(third.capture(), second.capture())
    with pytest.raises(CheckpointError, match="shard 0 of 1, and this is shard 1 of 2"):
        Shard(shard=1, shards=2).restore(captured)


def test_rewind_goes_back_to_a_snapshot_once_for_each_epoch(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "shard-0") as snapshots:
        shard = Shard(kept=snapshots.rewind, pace=Pace(Mode.read("sync"), 1, 100))
        worker, spec = Worker([shard]), spec_of("adam", ONE, lr=1.0)
        worker.declare(spec, {"count": torch.zeros(3)})
        seen = {}
        for step in range(5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(Apply(step, 1, [(0, 1)], snapshot=step in (1, 3)))
            seen[step] = worker.pull(spec)
            assert shard.due == (step in (1, 3))
            if shard.due:
                shard.begun()
                snapshots.write(shard.capture())
                assert shard.stood(snapshots.steps()) == []
        standing = worker.look(Standing()).reply
        assert isinstance(standing, Stood) and standing.kept == [2, 4] and standing.step == 5
        assert worker.answers(Apply(5, 1, [(0, 1)])) == []
        waiting = worker.tag
        refused(worker.order(Rewind(1, 3)), "snapshot")
        answers = worker.answers(Rewind(1, 2))
        assert answers[0].reply == Done(2) and shard.epoch == 1 and shard.step == 2
        assert (answers[1].tag, refused(answers[1], "fenced") != "") == (waiting, True)
        refused(worker.look(Pull([Slot("model")])), "fenced")
        refused(worker.order(Push([Slot("model")])), "fenced")
        worker.epoch = 2
        refused(worker.look(Pull([Slot("model")])), "behind")
        worker.epoch = 1
        assert same(worker.pull(spec), seen[1])
        assert worker.order(Rewind(1, 2)).reply == Done(2), "once"
        refused(worker.order(Rewind(1, 4)), "rewind")
        assert snapshots.steps() == [2], "what came after it is undone"
        for step in range(2, 5):
            worker.contribute(spec, step, (0, 1), {"count": torch.full([3], step + 1.0)})
            worker.order(Apply(step, 1, [(0, 1)]))
            assert same(worker.pull(spec), seen[step])
    lone, _ = one_worker()
    refused(lone.order(Rewind(1, 0)), "snapshot")


def test_a_rewind_is_for_one_process_of_a_shard() -> None:
    """Sent again to the next one it would bring an epoch back that others think they are in."""
    (worker,), _ = counting()
    first = worker.shards[0]
    captured = first.capture(copy=True)
    second = Shard(boot=2, pace=Pace(Mode.read("sync"), 1, 100), kept=lambda step: captured)
    second.restore(captured)
    worker.shards = [second]
    assert "process 1 of shard 0 was to go back, and this is process 2" in refused(
        worker.order(Rewind(7, 0, boot=1)), "fenced"
    )
    assert second.epoch == 0
    assert isinstance(worker.order(Rewind(7, 0, boot=2)).reply, Done) and second.epoch == 7


def stood(boot: int = 1, epoch: int = 0, step: int = 4, kept: Sequence[int] = (2, 4), back: bool = False) -> Stood:
    return Stood(boot=boot, epoch=epoch, version=step, step=step, filled=True, kept=list(kept), came_back=back)


def test_servers_that_are_not_at_one_step_go_back_to_one_that_all_have_kept() -> None:
    assert at_one([stood(), stood()])
    assert not at_one([stood(), stood(step=5)]) and not at_one([stood(), stood(epoch=1)])
    assert not at_one([stood(), stood(boot=2, back=True)]), "its contributions are gone"

    back = [stood(step=7, kept=[4, 6]), stood(boot=2, back=True)]
    first, second = ways_back(back, looks=1)
    assert (first.step, first.boot, second.step, second.boot) == (4, 1, 4, 2) and first.epoch == second.epoch

    # Whatever it has forgotten: no epoch comes again, not even when all were lost.
    again = [stood(boot=2, back=True), stood(boot=3, back=True)]
    assert ways_back(again, looks=1)[0].epoch > first.epoch > 0

    # Another one is at it, or an update is under way: look again, but not for ever.
    begun = [stood(epoch=first.epoch), stood(boot=2, back=True)]
    midway = [stood(step=5), stood()]
    assert ways_back(begun, looks=PATIENCE - 1) == ways_back(midway, looks=PATIENCE - 1) == []
    assert ways_back(begun, looks=PATIENCE)[0].epoch == first.epoch + 1
    assert [each.step for each in ways_back(midway, looks=PATIENCE)] == [4, 4]
    with pytest.raises(NothingInCommonError, match=r"server 0 has \[2\]; server 1 has \[4\]"):
        ways_back([stood(kept=[2]), stood(boot=2, kept=[4], back=True)], looks=1)


def test_keep_is_answered_when_it_stands() -> None:
    (worker,), _ = counting()
    shard = worker.shards[0]
    assert shard.handle(worker.who, 50, 0, 0, Keep()) == [] and shard.due
    shard.begun()
    assert not shard.due
    assert shard.handle(worker.who, 51, 0, 0, Keep()) == [] and shard.due, "after the other began"
    (answer,) = shard.stood([0])
    assert (answer.tag, answer.reply) == (50, Done(0))
    shard.begun()
    (answer,) = shard.stood([0], "no space left on device")
    assert answer.tag == 51 and "no space left" in refused(answer, "snapshot")


# -- files ------------------------------------------------------------------------------------------------------------


def captured_at(step: int) -> Captured:
    tensors = {
        "a": torch.full([1000], float(step)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "n": torch.tensor(step),
    }
    return Captured(step=step, version=step, values={"step": step, "who": {7: [b"x", None]}}, tensors=tensors)


def test_two_snapshots_are_kept_and_read_back(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
        assert snapshots.newest() is None and snapshots.steps() == []
        for step in (1, 5, 9):
            snapshots.write(captured_at(step))
        assert snapshots.steps() == [5, 9]
        newest = snapshots.newest()
        assert newest is not None and equal(newest, captured_at(9)) and newest.step == newest.version == 9
        assert equal(snapshots.of_step(5), captured_at(5))
        with pytest.raises(CheckpointError, match="no snapshot of step 7, only of 5, 9"):
            snapshots.of_step(7)
        snapshots.write(captured_at(6))
        assert snapshots.steps() == [5, 6], "9 was undone"
        snapshots.clear()
        assert snapshots.newest() is None


@pytest.mark.parametrize("name", ["values.msgpack", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flipped", "torn", "missing"])
def test_a_damaged_snapshot_falls_back_to_the_older(name: str, harm: str, tmp_path: Path) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        snapshots.write(captured_at(2))
        path = max((tmp_path / "s").glob("snapshot-*")) / name
        data = bytearray(path.read_bytes())
        if harm == "flipped":
            data[len(data) // 2] ^= 1
        path.unlink() if harm == "missing" else path.write_bytes(data[: len(data) // 2] if harm == "torn" else data)
        newest = snapshots.newest()
        assert newest is not None and equal(newest, captured_at(1))
        assert snapshots.steps() == [1]
        snapshots.write(captured_at(3))
        assert snapshots.steps() == [1, 3]


def test_when_all_are_damaged_it_is_said(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        (path,) = (tmp_path / "s").glob("snapshot-*")
        (path / "values.msgpack").write_bytes(b"")
        with pytest.raises(CheckpointError, match="none of the 1 snapshots in s is whole"):
            snapshots.newest()
        assert path.exists()


def test_a_failed_write_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Snapshots(tmp_path / "s") as snapshots:
        snapshots.write(captured_at(1))
        calls = []

        def full(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                snapshots.write(captured_at(2))
        assert snapshots.steps() == [1]
        assert sorted(entry.name for entry in (tmp_path / "s").iterdir()) == ["lock", "snapshot-00000001"]


def test_starts_are_counted_and_two_processes_never_serve_one_shard(tmp_path: Path) -> None:
    with Snapshots(tmp_path / "shard-3") as snapshots:
        assert snapshots.boot() == 1
        with pytest.raises(InputError, match=f"shard 3 is already served by process {os.getpid()}"):
            Snapshots(tmp_path / "shard-3")
    with Snapshots(tmp_path / "shard-3") as again:
        assert again.boot() == 2
    (tmp_path / "shard-3" / "boot").write_text("two")
    with Snapshots(tmp_path / "shard-3") as broken, pytest.raises(InputError, match="does not hold a number"):
        broken.boot()


def test_a_killed_servers_folder_is_free_when_its_last_snapshot_is_written(tmp_path: Path) -> None:
    """Its child may still be writing: that holds the folder until it is done."""
    said, says = os.pipe()
    goes, go = os.pipe()
    server = os.fork()
    if server == 0:
        with Snapshots(tmp_path / "shard-0") as snapshots:
            snapshots.boot()
            if os.fork() == 0:  # the child that writes
                os.close(go)
                os.write(says, b"w")
                os.read(goes, 1)  # until the server is dead and somebody waits
                snapshots.write(captured_at(3))
                os._exit(0)
            signal.pause()
    try:
        os.close(says)
        assert os.read(said, 1) == b"w"
        with pytest.raises(InputError, match=f"shard 0 is already served by process {server}"):
            Snapshots(tmp_path / "shard-0")
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # dead, and still to be waited for
        waiter = threading.Timer(0.05, os.write, (go, b"g"))
        waiter.start()
        with Snapshots(tmp_path / "shard-0") as snapshots:  # waits
            assert snapshots.boot() == 2 and snapshots.steps() == [3]
        waiter.join()
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        assert os.read(said, 1) == b"", "the child has ended, too"
        for descriptor in (said, goes, go):
            os.close(descriptor)
