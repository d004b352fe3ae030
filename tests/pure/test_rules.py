"""Each rule of arithmetic, one by one: what it demands, and that the nearest thing to it gives other bits.

The numbers are those of EXACT.md; the whole of it through real workers is in test_same_bits.py.
"""

import copy
import importlib
import json
import math
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

import shoal
from helpers.command import in_child
from shoal.collectives.group import Alone, Group
from shoal.errors import InputError
from shoal.job.dataset import open_source
from shoal.numerics import grad_norm, kernels, seeds
from shoal.numerics.digest import combine, digests, tensor_sha256
from shoal.numerics.lanes import cut, fold
from shoal.parallel.blocks import Blocks, find_blocks
from shoal.parallel.buckets import pack
from shoal.parallel.data_parallel import Closure, DataParallel, Outcome, Work
from shoal.parallel.lane_buffers import LARGE_BUFFER_BYTES
from shoal.parallel.replica import Replica
from shoal.recovery.checkpoint.directory import Checkpoints
from shoal.testing import (
    batch_norm_net,
    cross_entropy,
    dropout_net,
    everything,
    job_for,
    ranks,
    samples_for,
    tied_language_model,
)

Named = dict[str, Tensor | None]
Batch = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def generators_stay() -> Iterator[None]:
    with seeds.untouched_generators():
        torch.manual_seed(0)
        yield


# -- one step, and the same step by hand ------------------------------------------------------------------------------


def strategy_for(
    model: nn.Module,
    lanes: int,
    *,
    microbatches: int = 1,
    blocks: Sequence[str] | None = None,
    seed: int = 0,
    group: Group | None = None,
    deal: Any = None,
) -> DataParallel:
    replica = Replica(model, find_blocks(model, blocks), seed)
    deal = deal or [(0, lanes)]
    return DataParallel(replica, group or Alone(), lanes=lanes, microbatches=microbatches, deal=deal)


def take_step(
    strategy: DataParallel, data: Batch, closure: Closure, *, batch: int | None = None, step: int = 0
) -> Outcome:
    source = open_source(data, seed=0, shuffle=False)
    work = Work(
        step=step,
        indices=range(len(data[0])),
        batch=batch or len(data[0]),
        fetch=lambda indices: source.fetch(indices, 0),
    )
    strategy.compute(work, closure)
    strategy.meet()
    return strategy.finish()


def gradients(model: nn.Module) -> Named:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_hand(model: nn.Module, data: Batch, pieces: Sequence[range], loss: Callable[..., Any]) -> Named:
    """What a loop that knows nothing of Shoal would accumulate over these microbatches."""
    model = copy.deepcopy(model)
    total = len(data[0])
    for piece in pieces:
        part = tuple(tensor[piece.start : piece.stop].clone() for tensor in data)
        (loss(model, part) * (len(piece) / total)).backward()
    return gradients(model)


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(*batch[:-1]), batch[-1])


def add_named(left: Named, right: Named) -> Named:
    def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return (b if a is None else a) if a is None or b is None else a + b

    return {name: plus(left[name], right[name]) for name in left}


def in_tree(lanes: Sequence[Named | None]) -> Named:
    total = fold(len(lanes), {(lane, lane + 1): value for lane, value in enumerate(lanes)}, add_named)
    assert total is not None
    return total


def in_sequence(lanes: Sequence[Named | None]) -> Named:
    present = [lane for lane in lanes if lane is not None]
    total = present[0]
    for lane in present[1:]:
        total = add_named(total, lane)
    return total


def same(left: Named, right: Named) -> bool:
    """To the bit, the sign of zero and what is absent included."""
    bits = [digests((name, value) for name, value in side.items() if value is not None) for side in (left, right)]
    return left.keys() == right.keys() and bits[0] == bits[1]


def sha256(job: shoal.Job, workers: int = 1, **more: Any) -> str:
    return shoal.train(job, workers=workers, quiet=True, **more).weights_sha256


def mlp(width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 5))


def mlp_data(count: int) -> Batch:
    return samples_for(dropout_net, count)


# -- 1: lanes and tree ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [3, 4, 6, 8])
def test_1_lanes_are_added_in_the_tree(lanes: int) -> None:
    data, model = mlp_data(24), mlp()
    single = [by_hand(model, data, pieces, plain_loss) for pieces in cut(24, 24, lanes, 1)]
    whole = by_hand(model, data, [range(24)], plain_loss)
    outcome = take_step(strategy_for(model, lanes), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(single))
    assert not same(gradients(model), whole), "lanes are part of the arithmetic"
    if lanes > 3:  # of three lanes the tree is the sequence
        assert not same(gradients(model), in_sequence(single))
    assert outcome.samples == 24


def test_1_a_worker_holds_few_gradients_at_once() -> None:
    model, alive = mlp(), []
    strategy = strategy_for(model, 8)
    take, taken = strategy.replica.take_gradients, []

    def watched() -> list[Tensor | None]:
        values = take()
        assert values[0] is not None
        taken.append(weakref.ref(values[0]))
        alive.append(sum(reference() is not None for reference in taken))
        return values

    strategy.replica.take_gradients = watched  # type: ignore[method-assign]
    take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
    assert len(taken) == 8
    assert max(alive) <= int(math.log2(8)) + 1


# -- 2: weights before ------------------------------------------------------------------------------------------------


def test_2_losses_are_weighted_before_the_backward_pass() -> None:
    data, model = mlp_data(9), mlp()
    before = [by_hand(model, data, pieces, plain_loss) for pieces in cut(9, 9, 3, 1)]
    after = [
        {
            name: None if value is None else value * (1 / 3)
            for name, value in by_hand(model, part, [range(3)], plain_loss).items()
        }
        for part in (tuple(tensor[start : start + 3] for tensor in data) for start in (0, 3, 6))
    ]
    take_step(strategy_for(model, 3), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(before))
    assert not same(gradients(model), in_tree(after))


def test_2_a_short_batch_is_weighted_by_what_it_has() -> None:
    data, model = mlp_data(7), mlp()  # lanes of 4, microbatches of 2: 2 2 | 2 1 | - | -
    lanes = [by_hand(model, data, pieces, plain_loss) if pieces else None for pieces in cut(7, 16, 4, 2)]
    outcome = take_step(strategy_for(model, 4, microbatches=2), data, lambda batch: plain_loss(model, batch), batch=16)
    assert same(gradients(model), in_tree(lanes))
    mean = float(plain_loss(model, data).detach())
    assert outcome.loss == pytest.approx(mean, rel=1e-6)


def test_2_a_loss_with_its_own_count_is_divided_by_the_count_of_all() -> None:
    """Very uneven counts, in fp64: a mean of the lanes' means would be far off."""
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp()
        inputs, labels = torch.randn(12, 8), torch.randint(5, (12,))
        weights = torch.tensor([1, 0, 0, 0, 0, 0, 90, 1, 1, 70, 80, 0.0])

        def summed(batch: Batch) -> tuple[Tensor, Tensor]:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (losses * batch[2]).sum(), batch[2].sum()

        plain = copy.deepcopy(model)
        total = (F.cross_entropy(plain(inputs), labels, reduction="none") * weights).sum() / weights.sum()
        total.backward()
        outcome = take_step(strategy_for(model, 4, microbatches=3), (inputs, labels, weights), summed)
        assert outcome.loss == pytest.approx(float(total.detach()), rel=1e-13)
        for (_, mine), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert mine.grad is not None and wanted.grad is not None
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-12, atol=1e-15)
    finally:
        torch.set_default_dtype(torch.float32)


# -- 3: empty is absent -----------------------------------------------------------------------------------------------


def test_3_an_empty_microbatch_is_skipped() -> None:
    seen = []
    data, model = mlp_data(3), mlp()

    def closure(batch: Batch) -> Tensor:
        seen.append(len(batch[0]))
        return plain_loss(model, batch)

    outcome = take_step(strategy_for(model, 4, microbatches=2), data, closure, batch=16)
    assert seen == [2, 1], "the mean of nothing is not a number"
    assert not outcome.not_finite
    assert math.isfinite(outcome.loss)


class Sometimes(nn.Module):
    """Uses its second part only for batches that ask for it, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


def sometimes_data(lanes_that_ask: Sequence[int]) -> Batch:
    inputs, labels = mlp_data(16)
    inputs[:, 0] = torch.tensor([1.0 if lane in lanes_that_ask else -1.0 for lane in range(4) for _ in range(4)])
    return inputs, labels


def test_3_a_parameter_without_gradient_stays_without() -> None:
    model = Sometimes()
    data = sometimes_data([1, 3])
    lanes = [by_hand(model, data, pieces, plain_loss) for pieces in cut(16, 16, 4, 1)]
    assert [lane["sometimes.weight"] is not None for lane in lanes] == [False, True, False, True]
    take_step(strategy_for(model, 4), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(lanes))
    assert model.never.weight.grad is None


def test_3_weight_decay_leaves_what_had_no_gradient_alone() -> None:
    model = Sometimes()
    before, always = model.never.weight.detach().clone(), model.always.weight.detach().clone()
    take_step(strategy_for(model, 4), sometimes_data([]), lambda batch: plain_loss(model, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(model.never.weight, before)
    assert not torch.equal(model.always.weight, always)
    model.never.weight.grad = torch.zeros_like(model.never.weight)
    optimizer.step()
    assert not torch.equal(model.never.weight, before), "zero is not nothing"


@pytest.mark.parametrize("asking", [(), (0,), (1, 3), (2,)])
def test_3_absent_in_some_workers_is_absent_in_the_sum(asking: Sequence[int]) -> None:
    model = Sometimes()
    data = sometimes_data(asking)
    data[0][:, 1] = 0.0  # gradients of exactly zero, whose sign a filler could change

    def work(group: Group) -> list[Tensor | None]:
        deal = [(0, 1), (1, 3), (3, 4)]
        take_step(strategy_for(model, 4, group=group, deal=deal), data, lambda batch: plain_loss(model, batch))
        return list(gradients(model).values())

    found = ranks(3, work)
    take_step(strategy_for(model, 4), data, lambda batch: plain_loss(model, batch))
    assert (model.sometimes.weight.grad is None) == (not asking)
    for values in found:
        assert same(dict(zip(gradients(model), values, strict=True)), gradients(model))


def test_3_the_filler_for_what_is_absent_is_minus_zero() -> None:
    (bucket,) = pack([(0, torch.empty(3)), (1, torch.empty(2, 2))])
    flat = torch.zeros(bucket.length)
    bucket.fill(bucket.views(flat), [None, torch.ones(2, 2)])
    (filled,) = (slot.view(flat) for slot in bucket.slots if slot.index == 0)
    special = torch.tensor([-0.0, 0.0, 1e-45])
    assert (filled + special).view(torch.int32).tolist() == special.view(torch.int32).tolist()
    plus_zero = torch.zeros(3) + special
    assert plus_zero.view(torch.int32).tolist() != special.view(torch.int32).tolist()


# -- 4: tied weights --------------------------------------------------------------------------------------------------


class Thrice(nn.Module):
    """One matrix, used in three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def untied(model: nn.Module) -> Thrice:
    apart = copy.deepcopy(model)
    assert isinstance(apart, Thrice)
    for part in (apart.b, apart.c):
        part.weight = nn.Parameter(apart.a.weight.detach().clone())
    return apart


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_4_tied_weights_are_added_in_block_order_after_the_last_microbatch(order: str) -> None:
    model, data = Thrice(), (torch.randn(24, 8), torch.randint(8, (24,)))
    lanes, per_microbatch = [], []
    for pieces in cut(24, 24, 2, 3):
        per_microbatch.append(by_hand(model, data, pieces, plain_loss)["a.weight"])
        apart = by_hand(untied(model), data, pieces, plain_loss)
        parts = [apart[f"{block}.weight"] for block in order]
        assert parts[0] is not None and parts[1] is not None and parts[2] is not None
        lanes.append((parts[0] + parts[1]) + parts[2])
    strategy = strategy_for(model, 2, microbatches=3, blocks=list(order))
    take_step(strategy, data, lambda batch: plain_loss(model, batch))
    assert model.a.weight.grad is not None
    assert torch.equal(model.a.weight.grad, lanes[0] + lanes[1])
    assert per_microbatch[0] is not None and per_microbatch[1] is not None
    assert not torch.equal(model.a.weight.grad, per_microbatch[0] + per_microbatch[1]), "as autograd would have it"


def test_4_the_model_is_the_user_s_again_afterwards() -> None:
    model = Thrice()
    strategy = strategy_for(model, 2)
    assert model.b.weight is not model.a.weight, "an accumulator of its own"
    assert model.b.weight.data_ptr() == model.a.weight.data_ptr(), "but the same numbers"
    assert [name for name, _ in strategy.replica.parameters] == ["a.weight", "a.bias", "b.bias", "c.bias"]
    strategy.replica.close()
    assert model.a.weight is model.b.weight and model.b.weight is model.c.weight


# -- 5: blocks and initial weights ------------------------------------------------------------------------------------


def test_5_blocks_are_the_model_s_parts_with_containers_opened() -> None:
    assert find_blocks(tied_language_model()).names == ("words", "layers.0", "layers.1", "head")
    assert find_blocks(everything()).names[:2] == ("picture.0", "picture.1")
    blocks = Blocks(names=("layers.1", "layers.10"))
    assert [blocks.of(name) for name in ("layers.1.weight", "layers.10.weight", "layers.2.weight")] == [1, 2, 0]
    with pytest.raises(InputError, match=r"blocks names 'layer\.0', but the model has no such module"):
        find_blocks(tied_language_model(), ["layer.0"])


def test_5_an_initial_weight_does_not_depend_on_what_was_drawn_before_it() -> None:
    def large_first() -> nn.Module:
        return nn.Sequential(nn.Linear(90, 70), nn.Linear(6, 7))

    def small_first() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(6, 7))

    left, right = seeds.initialise(large_first, 5), seeds.initialise(small_first, 5)
    assert torch.equal(left.get_parameter("1.weight"), right.get_parameter("1.weight"))
    assert torch.equal(left.get_parameter("1.bias"), right.get_parameter("1.bias"))
    assert not torch.equal(left.get_parameter("1.weight"), seeds.initialise(large_first, 6).get_parameter("1.weight"))
    torch.manual_seed(5)
    in_one_stream = [large_first().get_parameter("1.weight")]
    torch.manual_seed(5)
    in_one_stream.append(small_first().get_parameter("1.weight"))
    assert not torch.equal(*in_one_stream), "as one global stream would have it"


def test_5_each_random_operation_of_a_model_has_a_stream_of_its_own() -> None:
    drawn: list[Tensor] = seeds.initialise(lambda: [torch.randn(3), torch.rand(3), torch.randn(3)], 1)
    torch.default_generator.manual_seed(seeds.derive(1, seeds.INITIAL, 2))
    assert torch.equal(drawn[2], torch.randn(3))
    assert not torch.equal(drawn[0], drawn[2])


def generator_states() -> list[Any]:
    state: Any = numpy.random.get_state()
    return [torch.default_generator.get_state().tolist(), random.getstate(), state[1].tolist(), state[2]]


def test_5_building_a_model_leaves_the_generators_alone_and_does_not_ask_them() -> None:
    def drawing() -> tuple[nn.Module, float]:
        return mlp(), random.random() + float(numpy.random.rand())

    before = generator_states()
    first = seeds.initialise(drawing, 0)
    assert generator_states() == before
    seeds.seed_everything(123)
    second = seeds.initialise(drawing, 0)
    assert first[1] == second[1]
    assert digests(first[0].named_parameters()) == digests(second[0].named_parameters())


def test_5_the_same_seed_is_the_same_model_on_every_worker() -> None:
    def work(group: Group) -> str:
        seeds.seed_everything(group.rank)
        return combine(digests(seeds.initialise(everything, 3).named_parameters()))

    assert set(ranks(3, work)) == {combine(digests(seeds.initialise(everything, 3).named_parameters()))}


# -- 6: alignment -----------------------------------------------------------------------------------------------------


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers one element past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    assert view.data_ptr() % 64
    return view


def test_6_what_a_kernel_reads_is_contiguous_and_aligned() -> None:
    good = torch.randn(6, 4)
    assert kernels.aligned(good) is good
    for bad in (misaligned(good), good.t(), good[:, 1:], good[1:]):
        copied = kernels.aligned(bad)
        assert torch.equal(copied, bad)
        assert copied.is_contiguous() and copied.data_ptr() % 64 == 0
        assert copied.untyped_storage().data_ptr() != bad.untyped_storage().data_ptr()


def test_6_parameters_are_moved_to_aligned_memory_in_place() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.Conv2d(1, 3, 3))
    weight, kernel = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    before = weight.detach().clone()
    weight.data = misaligned(weight.data)
    kernel.data = kernel.data.transpose(2, 3)
    strategy_for(model, 1)
    assert model.get_parameter("0.weight") is weight, "the optimizer still has it"
    assert torch.equal(weight, before)
    assert all(p.data_ptr() % 64 == 0 and p.is_contiguous() for p in model.parameters())


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: Batch) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


def crooked(items: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    inputs = torch.stack([item[0] for item in items])
    return {"inputs": [inputs.t(), misaligned(inputs)], "labels": torch.stack([item[1] for item in items])}


@pytest.mark.parametrize(
    "form",
    [
        lambda data: data,
        lambda data: (data[0][:, 1:], data[1]),
        lambda data: Samples(data),
        lambda data: torch.utils.data.DataLoader(Samples(data), batch_size=4, collate_fn=crooked),
    ],
    ids=["tensors", "views", "data set", "own collate"],
)
def test_6_a_lane_is_a_copy_never_a_view(form: Callable[[Batch], Any]) -> None:
    data = mlp_data(9)
    source = open_source(form(data), seed=0, shuffle=False)
    for indices in ([0, 1], [1, 2, 3], [5], [8, 2]):
        seen: list[Tensor] = []

        def look(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor

        kernels.map_tensors(source.fetch(indices, 0), look)
        assert len(seen) >= 2
        for tensor in seen:
            assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
            assert all(tensor.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in data)


def test_6_merged_gradients_and_restored_weights_are_aligned() -> None:
    job = job_for(everything, steps=2, epochs=None, optimizer=lambda named: CheckedSGD([p for _, p in named], lr=0.1))
    with pytest.raises(shoal.Stopped):
        shoal.train(job, workers=3, run_dir="run", stop_after=1, quiet=True)
    assert shoal.train(job, workers=2, run_dir="run", resume=True, quiet=True).steps == 2


class CheckedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            assert parameter.data_ptr() % 64 == 0
            assert parameter.grad is None or (parameter.grad.data_ptr() % 64 == 0 and parameter.grad.is_contiguous())
        return super().step(closure)


# -- 7: MKL's reproducible mode ---------------------------------------------------------------------------------------


def fresh(*programs: tuple[str, dict[str, str]]) -> list[Any]:
    """What new interpreters print as JSON, each with its code and environment, all at once: they mostly import."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "ATEN_", "SHOAL_"))}

    def run(program: tuple[str, dict[str, str]]) -> Any:
        code, environment = program
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=clean | environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(run, programs))


MKL_MODE = """
import json, os
{first}
import shoal, torch
from shoal.numerics.kernels import mkl_reproducibility
torch.ones(64, 64) @ torch.ones(64, 64)
print(json.dumps([os.environ["MKL_CBWR"], mkl_reproducibility()]))
"""


@pytest.mark.skipif(kernels.mkl_reproducibility() is None, reason="this torch is built without MKL")
def test_7_mkl_computes_reproducibly_from_the_first_kernel_on() -> None:
    (setting, mode), (_, too_late), (chosen, _) = fresh(
        (MKL_MODE.format(first=""), {}),
        (MKL_MODE.format(first="import torch; torch.ones(64, 64) @ torch.ones(64, 64)"), {}),
        (MKL_MODE.format(first=""), {"MKL_CBWR": "COMPATIBLE"}),
    )
    assert setting == "AUTO"
    assert mode != too_late, "without the setting, or after a kernel, MKL is in another mode"
    assert chosen == "COMPATIBLE", "the user's own choice stays"


# -- 8: the fingerprint -----------------------------------------------------------------------------------------------

TRAITS = """
import json, torch
from shoal.exact import kernels
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    found.append([kernels.fingerprint(kernels.traits()), kernels.traits()])
print(json.dumps(found, default=str))
"""


def test_8_a_fingerprint_tells_kernels_apart() -> None:
    first, second, other = fresh((TRAITS, {}), (TRAITS, {}), (TRAITS, {"ATEN_CPU_CAPABILITY": "default"}))
    (mine, traits), (threads, with_threads) = first
    assert [fingerprint for fingerprint, _ in second] == [mine, threads], "the same in two processes"
    assert threads != mine
    assert with_threads["threads"] == 2
    default, with_default = other[0]
    if traits["cpu capability"] != "DEFAULT":
        assert default != mine
        assert with_default["cpu capability"] == "DEFAULT"
        assert with_default["kernels"] != traits["kernels"], "the kernels themselves compute other bits"


def test_8_taking_a_fingerprint_changes_nothing() -> None:
    before = generator_states()
    assert kernels.traits() == kernels.traits()
    assert generator_states() == before


def test_8_a_worker_with_other_kernels_is_refused_by_name() -> None:
    def build() -> nn.Module:
        if os.environ.get("RANK") == "1":
            torch.set_float32_matmul_precision("high")
        return mlp()

    with pytest.raises(shoal.RunError, match="worker 1 computes other bits than worker 0") as caught:
        shoal.train(job_for(dropout_net, model=build), workers=2, quiet=True)
    assert "worker 0 has matmul precision: highest; worker 1 has matmul precision: high" in str(caught.value)


def test_8_a_checkpoint_of_other_kernels_is_refused() -> None:
    job = job_for(dropout_net)
    with pytest.raises(shoal.Stopped):
        shoal.train(job, workers=1, run_dir="run", stop_after=2, quiet=True)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(shoal.ShoalError, match="made by kernels that compute other bits") as caught:
            shoal.train(job, workers=1, run_dir="run", resume=True, quiet=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "matmul precision: highest then, high now" in str(caught.value)


def test_8_a_pinned_instruction_set_must_be_in_force() -> None:
    with pytest.raises(InputError, match="isa='avx2' must be in force before the first kernel"):
        shoal.train(job_for(dropout_net, isa="avx2"), workers=1, quiet=True)


# -- 9: threads and deterministic kernels -----------------------------------------------------------------------------


def test_9_settling_fixes_threads_and_deterministic_kernels() -> None:
    kernels.settle(threads=2)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]


def checked_loss(output: Tensor, target: Tensor) -> Tensor:
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    return cross_entropy(output, target)


def test_9_workers_train_with_the_job_s_threads() -> None:
    assert shoal.train(job_for(dropout_net, loss=checked_loss, threads=2, steps=2, epochs=None), workers=2, quiet=True)
    assert job_for(dropout_net).arithmetic() != job_for(dropout_net, threads=2).arithmetic()


def test_9_indexing_with_repeats_has_one_gradient_with_several_threads() -> None:
    def play() -> None:
        kernels.settle(threads=2)
        table, index = torch.randn(500, 64, requires_grad=True), torch.randint(500, (20_000,))
        weights = torch.randn(20_000, 64)
        once = (torch.autograd.grad((table[index] * weights).sum(), table)[0] for _ in range(8))
        assert len({tensor_sha256(gradient) for gradient in once}) == 1

    in_child(play)  # where threads are its own


# -- 10: the optimizer ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda named: torch.optim.AdamW(named, lr=0.01, foreach=False),
    "foreach": lambda named: torch.optim.AdamW(named, lr=0.01, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, lr=0.01, fused=True),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_10_every_optimizer_gives_the_same_bits_on_any_number_of_workers(name: str) -> None:
    job = job_for(everything, optimizer=OPTIMIZERS[name])
    assert sha256(job, 1) == sha256(job, 3)


def test_10_the_implementation_is_part_of_the_job() -> None:
    described = [job_for(dropout_net, optimizer=OPTIMIZERS[n]).arithmetic()["optimizer"] for n in OPTIMIZERS]
    assert len(set(described)) == len(OPTIMIZERS)
    with pytest.raises(shoal.Stopped):
        shoal.train(job_for(dropout_net, optimizer=OPTIMIZERS["loop"]), run_dir="run", stop_after=2, quiet=True)
    with pytest.raises(shoal.ShoalError, match="the job's arithmetic changed: optimizer was"):
        shoal.train(job_for(dropout_net, optimizer=OPTIMIZERS["fused"]), run_dir="run", resume=True, quiet=True)


# -- 11: clipping -----------------------------------------------------------------------------------------------------

SHAPES = [(7, 5), (3, 1), (1, 1), (64, 300), (5, 70_000), (1, 70_001), (2000, 33), (17, 3, 3, 3), (1000, 1), (40,)]


def spread(*shape: int) -> Tensor:
    """Numbers of very different magnitude."""
    return torch.randn(*shape) * 10.0 ** torch.randint(-4, 4, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_11_a_row_s_sum_of_squares_is_the_same_in_any_piece(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = spread(*shape).to(dtype)
    rows = grad_norm.row_squares(gradient)
    assert rows.shape == shape[:1] and rows.dtype == torch.float64
    for start in range(0, shape[0], max(1, shape[0] // 12)):
        for stop in {start + 1, min(shape[0], start + 3), shape[0]}:
            piece = gradient[start:stop]
            assert torch.equal(grad_norm.row_squares(piece), rows[start:stop])
            assert torch.equal(grad_norm.row_squares(piece.clone()), rows[start:stop])


def test_11_the_norm_is_the_same_whoever_computed_which_rows() -> None:
    parameters = [spread(*shape) for shape in SHAPES]
    whole = grad_norm.global_norm(parameters)
    rows = torch.cat(
        [torch.cat([grad_norm.row_squares(piece) for piece in p.split(max(1, len(p) // 3))]) for p in parameters]
    )
    assert float(rows.sum().sqrt()) == whole
    in_single = sum(float(parameter.square().sum()) for parameter in parameters) ** 0.5
    assert in_single != whole


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_11_clipping_is_torch_s_to_rounding(max_norm: float) -> None:
    mine = [torch.randn(30, 20), torch.randn(20), torch.randn(4, 3, 3, 3)]
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(theirs, mine, strict=True):
        parameter.grad = gradient.clone()
    wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert grad_norm.clip(mine, max_norm) == pytest.approx(float(wanted), rel=1e-6)
    for parameter, gradient in zip(theirs, mine, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_11_sums_are_in_fp64() -> None:
    gradient = spread(6, 5000)
    exactly = [math.fsum(float(value) ** 2 for value in row) for row in gradient]
    assert grad_norm.row_squares(gradient).tolist() == pytest.approx(exactly, rel=1e-13)


def test_11_a_tied_weight_counts_once() -> None:
    model = Thrice()
    once = dict(model.named_parameters())
    run = joined(model, (torch.randn(8, 8), torch.randint(8, (8,))))
    for _ in run.epochs(1):
        for batch in run.batches():
            run.backward(batch, lambda part: plain_loss(model, part))
            values = [p.grad.flatten().tolist() for p in once.values() if p.grad is not None]
            squares = math.fsum(value**2 for each in values for value in each)
            assert len(values) == len(once)
            assert run.clip(1e9) == pytest.approx(math.sqrt(squares), rel=1e-13)


def joined(model: nn.Module, data: Batch, batch: int = 8, **more: Any) -> shoal.Run:
    """A loop of its own, alone in this process."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=batch)
    return shoal.join(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **more)


# -- 12: bf16 ---------------------------------------------------------------------------------------------------------


class Watching(nn.Module):
    """Fails when it is not run under autocast to bf16 without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        out: Tensor = self.inner(x)
        assert out.dtype == torch.bfloat16
        return out


def test_12_autocast_runs_without_a_cache_and_keeps_fp32_weights() -> None:
    job = job_for(dropout_net, model=Watching, precision="bf16", evaluate=mlp_data(9))
    report = shoal.train(job, workers=2, quiet=True)
    assert {parameter.dtype for parameter in report.model().parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_12_autocast_gives_the_same_bits_on_any_number_of_workers() -> None:
    # Lanes of two samples: the matrices stay below the size from which oneDNN uses AMX, which some virtual machines
    # announce and do not have (plain torch fails there).
    job = job_for(everything, precision="bf16", batch=8, evaluate=samples_for(everything, 21))
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 2)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].weights_sha256 != sha256(job.changed(precision="fp32")), "an arithmetic of its own"
    assert job.arithmetic() != job.changed(precision="fp32").arithmetic()


# -- 13: torch.compile ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.dropout(torch.tanh(self.inner(x)).softmax(-1), 0.2, self.training)
        return out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_13_compiled_blocks_give_the_same_bits_on_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    job = job_for(dropout_net, model=lambda: nn.Sequential(Small()), compile=True, steps=3, epochs=None)

    def play() -> None:
        importlib.import_module("torch._inductor.compile_fx")  # once, and not in each worker
        # Not by environment variables: they are read when torch is imported.
        torch._inductor.config.compile_threads = 1
        torch._inductor.config.cpp.vec_isa_ok = True  # it need not try what the processor says that it has

        assert sha256(job, 1) == sha256(job, 2)

    in_child(play)
    assert job.arithmetic() != job.changed(compile=False).arithmetic()


# -- 14: seeds --------------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Dropout that notes what it dropped, by where in the job it was asked."""

    def __init__(self, notes: list[Tensor]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64), 0.5)
        self.notes.append(mask)
        return x * mask[:1]


class Noisy(nn.Module):
    """Two blocks with dropout, of which the second is used twice; `extra` draws are made in the first."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.extra = extra
        self.notes: list[Tensor] = []
        self.first, self.second = Noting(self.notes), Noting(self.notes)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(self.extra)  # belongs to the root
        out: Tensor = self.out(self.second(self.second(self.first(x))))
        return out


def masks(model: Noisy, *, seed: int = 0, step: int = 0, group: Group | None = None, deal: Any = None) -> list[Tensor]:
    strategy = strategy_for(model, 4, microbatches=2, seed=seed, group=group, deal=deal)
    take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch), step=step)
    return model.notes


def test_14_dropout_is_the_same_whichever_lanes_ran_before() -> None:
    alone = masks(Noisy())
    assert len(alone) == 4 * 2 * 3  # lanes, microbatches, calls
    assert len({tuple(mask.tolist()) for mask in alone}) == len(alone), "every place has a stream of its own"

    def work(group: Group) -> list[Tensor]:
        torch.rand(group.rank)  # whatever was drawn before
        return masks(Noisy(), group=group, deal=[(0, 1), (1, 4)])

    found = [mask for notes in ranks(2, work) for mask in notes]
    assert torch.equal(torch.stack(found), torch.stack(alone))


def test_14_blocks_do_not_draw_from_each_other_s_stream() -> None:
    assert torch.equal(torch.stack(masks(Noisy(extra=0))), torch.stack(masks(Noisy(extra=17))))


def test_14_a_block_used_twice_draws_two_streams() -> None:
    first, second, again = masks(Noisy())[:3]
    assert not torch.equal(second, again)
    assert not torch.equal(first, second)


def test_14_seeds_and_steps_have_streams_of_their_own() -> None:
    drawn = [masks(Noisy(), seed=seed, step=step)[0] for seed in range(3) for step in range(3)]
    assert len({tuple(mask.tolist()) for mask in drawn}) == 9


def test_14_paths_do_not_collide() -> None:
    paths = [(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    found = {seeds.derive(*path) for path in [*paths, (1,), (1, 0), (0, 1), (1, 0, 0, 0)]}
    assert len(found) == 12**3 + 4
    assert all(0 <= seed < 2**63 for seed in found)
    assert seeds.derive(1, 2, 3) == 6520558355739401531, "part of the arithmetic: it never changes"


def test_14_the_hash_does_not_depend_on_the_generators_of_the_caller() -> None:
    job = job_for(dropout_net)
    seeds.seed_everything(1)
    first = sha256(job)
    seeds.seed_everything(2)
    assert sha256(job) == first
    assert sha256(job.changed(seed=1)) != first


class Augmented(Samples):
    """Draws from all three generators for each sample, a varying number of times."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(8) + random.random() + float(numpy.random.rand())
        for _ in range(random.randrange(5)):
            noise = noise + torch.randn(8) * 0.1
        return self.data[0][index] + noise, self.data[1][index]


def test_14_augmentation_depends_on_pass_and_sample_alone() -> None:
    source = open_source(Augmented(mlp_data(20)), seed=4)
    together = source.fetch([3, 7, 11], 2)[0]
    assert torch.equal(source.fetch([7], 2)[0], together[1:2])
    assert torch.equal(source.fetch([11, 3], 2)[0], together[[2, 0]])
    assert not torch.equal(source.fetch([7], 3)[0], together[1:2]), "another pass"
    other = open_source(Augmented(mlp_data(20)), seed=5)
    assert not torch.equal(other.fetch([7], 2)[0], together[1:2]), "another seed"


def test_14_augmented_data_gives_the_same_bits_on_any_number_of_workers() -> None:
    job = job_for(dropout_net, data=Augmented(mlp_data(40)))
    assert len({sha256(job, workers) for workers in (1, 2, 4)}) == 1


# -- 15: buffers ------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Statistics, counters, flags and constants; some replaced instead of written into."""

    constant: Tensor
    mean: Tensor
    calls: Tensor
    seen: Tensor
    rare: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 5)
        self.register_buffer("constant", torch.linspace(0.1, 0.9, 7))
        self.register_buffer("mean", torch.full((8,), 0.3))
        self.register_buffer("calls", torch.tensor(10))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("rare", torch.tensor([0.7]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.calls += 1
            self.seen = torch.tensor(True)
            if x[0, 0] > 0:
                self.rare.mul_(1.1)
        out: Tensor = self.linear(self.norm(x))
        return out


def buffers_by_hand(model: nn.Module, data: Batch, cuts: Sequence[Sequence[range]]) -> dict[str, Tensor]:
    """Every lane from the step's start; then, for what changed, the average by samples in the tree."""
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = len(data[0])
    ends: list[dict[str, Tensor] | None] = []
    for pieces in cuts:
        lane = copy.deepcopy(model)
        for piece in pieces:
            plain_loss(lane, tuple(tensor[piece.start : piece.stop].clone() for tensor in data))
        ends.append(dict(lane.named_buffers()) if pieces else None)
    found = {}
    for name, before in start.items():
        if not before.is_floating_point():
            assert ends[0] is not None
            found[name] = ends[0][name]
            continue
        shares: list[Named | None] = []
        missing = 0
        for pieces, end in zip(cuts, ends, strict=True):
            samples = sum(map(len, pieces))
            if end is None or torch.equal(end[name], before):
                missing += samples
                shares.append(None)
            else:
                shares.append({name: end[name] * (samples / total)})
        if all(share is None for share in shares):
            found[name] = before
            continue
        share = in_tree(shares)[name]
        assert share is not None
        found[name] = share + before * (missing / total) if missing else share
    return found


@pytest.mark.parametrize(("count", "batch", "lanes", "microbatches"), [(24, 24, 3, 1), (24, 24, 4, 2), (20, 24, 4, 2)])
def test_15_buffers_start_anew_in_each_lane_and_are_averaged_by_samples(
    count: int, batch: int, lanes: int, microbatches: int
) -> None:
    model = Buffered()
    data = mlp_data(count)
    expected = buffers_by_hand(model, data, cut(count, batch, lanes, microbatches))
    deal = [(0, 1), (1, lanes)]

    def work(group: Group) -> dict[str, str]:
        strategy = strategy_for(model, lanes, microbatches=microbatches, group=group, deal=deal)
        take_step(strategy, data, lambda part: plain_loss(model, part), batch=batch)
        return digests(model.named_buffers())

    on_two = ranks(2, work)
    strategy = strategy_for(model, lanes, microbatches=microbatches)
    take_step(strategy, data, lambda part: plain_loss(model, part), batch=batch)
    found = dict(model.named_buffers())
    assert digests(found.items()) == digests(expected.items())
    assert on_two == [digests(expected.items())] * 2
    assert found["calls"] == 10 + microbatches, "a counter is the first lane's"
    assert found["norm.num_batches_tracked"] == microbatches
    assert found["seen"]


def test_15_a_buffer_that_no_lane_changed_keeps_its_bits() -> None:
    model, data = Buffered(), mlp_data(24)
    before = model.constant.clone()
    take_step(strategy_for(model, 3), data, lambda part: plain_loss(model, part))
    assert torch.equal(model.constant, before)
    averaged = (before * (1 / 3) + before * (1 / 3)) + before * (1 / 3)
    assert not torch.equal(averaged, before), "as an average of equal numbers would have it"


def test_15_lanes_do_not_see_each_other_s_buffers() -> None:
    model, data = Buffered(), mlp_data(24)
    chained = copy.deepcopy(model)
    for pieces in cut(24, 24, 4, 1):
        plain_loss(chained, tuple(tensor[pieces[0].start : pieces[0].stop] for tensor in data))
    take_step(strategy_for(model, 4), data, lambda part: plain_loss(model, part))
    assert not torch.equal(dict(model.named_buffers())["mean"], dict(chained.named_buffers())["mean"])
    assert dict(model.named_buffers())["calls"] != dict(chained.named_buffers())["calls"]


def test_15_large_statistics_are_kept_by_lane_too() -> None:
    """Batch norm writes its statistics without raising the version of the tensor; large or small, they count."""
    features = LARGE_BUFFER_BYTES // 4 + 8
    data = (torch.randn(8, features), torch.randint(5, (8,)))
    model = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, 5))
    expected = buffers_by_hand(model, data, cut(8, 8, 2, 1))
    take_step(strategy_for(model, 2), data, lambda part: plain_loss(model, part))
    assert digests(model.named_buffers()) == digests(expected.items())


def test_15_a_step_that_is_dropped_leaves_buffers_as_they_were() -> None:
    model, data = Buffered(), mlp_data(24)
    before = digests(model.named_buffers())
    data[0][20] = float("inf")
    outcome = take_step(strategy_for(model, 4), data, lambda part: plain_loss(model, part))
    assert [lane for _, lane in outcome.not_finite] == [3]
    assert digests(model.named_buffers()) == before
    assert all(value is None for value in gradients(model).values())


def test_15_batch_norm_gives_the_same_bits_on_any_number_of_workers() -> None:
    job = job_for(batch_norm_net, microbatches=2)
    assert len({sha256(job, workers) for workers in (1, 2, 3)}) == 1


# -- 18: evaluation, and what is decided on merged values -------------------------------------------------------------


def target_mean(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return target.double().sum(), len(target)


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def test_18_each_sample_counts_once_on_any_number_of_workers() -> None:
    held_out = mlp_data(37)  # neither batch nor lanes divide it
    job = job_for(dropout_net, evaluate=held_out, metrics={"target mean": target_mean, "accuracy": hits}, lanes=4)
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 2, 3)]
    assert reports[0].metrics == reports[1].metrics == reports[2].metrics
    assert reports[0].metrics["target mean"] == pytest.approx(float(held_out[1].double().mean()), rel=1e-12)
    model = reports[0].model().eval()
    with torch.no_grad():
        wanted = float(cross_entropy(model(held_out[0]), held_out[1]))
        accuracy = float(hits(model(held_out[0]), held_out[1]))
    assert reports[0].metrics["loss"] == pytest.approx(wanted, rel=1e-6)
    assert reports[0].metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_18_evaluation_touches_no_generator_buffer_or_mode() -> None:
    model = nn.Sequential(Buffered(), nn.Dropout(0.5))
    model[1].eval()
    run = joined(model, mlp_data(8))
    before = generator_states(), digests(model.named_buffers()), [module.training for module in model.modules()]

    def closure(batch: Batch) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3), random.random(), numpy.random.rand()
        return plain_loss(model, batch)

    first = run.evaluate(mlp_data(11), closure)
    assert (generator_states(), digests(model.named_buffers()), [m.training for m in model.modules()]) == before
    assert run.evaluate(Augmented(mlp_data(11)), closure) != first
    assert generator_states() == before[0]
    assert run.evaluate(mlp_data(11), closure) == first
    assert torch.is_grad_enabled()
    finish(run, model)


def finish(run: shoal.Run, model: nn.Module) -> None:
    for _ in run.epochs(1):
        for batch in run.batches():
            run.backward(batch, lambda part: plain_loss(model, part))


def test_18_a_mode_comes_back_after_an_error_too() -> None:
    model = Buffered()
    run = joined(model, mlp_data(8))
    with pytest.raises(ZeroDivisionError):
        run.evaluate(mlp_data(8), lambda batch: 1 / 0)
    assert all(module.training for module in model.modules())
    finish(run, model)


def test_18_training_is_the_same_with_and_without_evaluation() -> None:
    job = job_for(everything)
    often = job.changed(evaluate=samples_for(everything, 19), evaluate_every=1)
    assert sha256(job, 2) == sha256(often, 2)


def test_18_a_target_stops_every_worker_at_the_same_step() -> None:
    easy = mlp_data(40)
    job = job_for(dropout_net, data=easy, evaluate=easy, evaluate_every=1, target="loss <= 1.45", epochs=20)
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 3)]
    assert 0 < reports[0].steps < 20 * 3
    assert reports[0].steps == reports[1].steps
    assert reports[0].weights_sha256 == reports[1].weights_sha256


def test_18_a_step_that_is_not_finite_is_left_out_everywhere() -> None:
    data = mlp_data(40)
    data[0][11] = float("nan")
    job = job_for(dropout_net, data=data)
    reports = [shoal.train(job, workers=workers, nonfinite="skip", quiet=True) for workers in (1, 3)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    assert all(bool(p.isfinite().all()) for p in reports[0].model().parameters())
    with pytest.raises(shoal.RunError, match=r"step \d: the loss is not finite \(worker \d lane \d\)"):
        shoal.train(job, workers=3, quiet=True)


# -- 21: what is on disk ----------------------------------------------------------------------------------------------


def slanted() -> nn.Module:
    """A tied model with a parameter that is not contiguous."""
    model = tied_language_model()
    model.register_parameter("slanted", nn.Parameter(torch.randn(5, 4).t()))
    return model


def test_21_tied_and_crooked_tensors_are_stored_once_and_come_back() -> None:
    job = job_for(
        tied_language_model,
        model=slanted,
        data=samples_for(tied_language_model),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    )
    whole = sha256(job)
    with pytest.raises(shoal.Stopped):
        shoal.train(job, run_dir="run", stop_after=3, quiet=True)
    found = Checkpoints(Path("run/checkpoints")).newest()
    assert found is not None
    with safe_open(found.path / "model.safetensors", "pt") as file:
        assert "words.weight" in file.keys() and "head.weight" not in file.keys()  # noqa: SIM118
    state = json.loads((found.path / "state.json").read_text())
    assert state["aliases"] == {"head.weight": "words.weight"}
    assert state["values"]["scheduler"]["kind"] == "CosineAnnealingLR"
    report = shoal.train(job, workers=2, run_dir="run", resume=True, quiet=True)
    assert report.weights_sha256 == whole
    model = report.model()
    assert model.get_parameter("head.weight") is model.get_parameter("words.weight")


def test_21_state_that_does_not_fit_is_refused() -> None:
    job = job_for(dropout_net, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(shoal.Stopped):
        shoal.train(job, run_dir="run", stop_after=3, quiet=True)
    other = job.changed(lanes=2)
    with pytest.raises(
        shoal.ShoalError, match="the job's arithmetic changed: lanes was 4 in the checkpoint and is 2 now"
    ):
        shoal.train(other, run_dir="run", resume=True, quiet=True)


# -- a job, and the forms of its data ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": None}, "batch is missing"),
        ({"batch": 0}, "batch=0 must be a whole number from 1 up"),
        ({"batch": 16.0}, "batch=16.0 must be a whole number"),
        ({"batch": True}, "batch=True must be a whole number"),
        ({"lanes": 3}, "a batch of 16 cannot be cut into 3 lanes"),
        ({"lanes": 4, "microbatches": 8}, r"16 cannot be cut into 4 lanes of 8 microbatches \(32 pieces\)"),
        ({"microbatches": 0}, "microbatches=0 must be"),
        ({"steps": 3}, "a job has steps or epochs; this one has both"),
        ({"epochs": None}, "a job has steps or epochs; this one has neither"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0 up"),
        ({"precision": "fp8"}, "precision='fp8' is not known"),
        ({"last": "pad"}, "last='pad' is not known"),
        ({"isa": "sse"}, "isa='sse' is not known"),
        ({"clip_norm": 0}, "clip_norm=0 must be a number above 0"),
        ({"loss": 3}, "loss must be callable, not int"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "optimizer"),
        ({"target": "loss <= 1"}, "target 'loss <= 1' without evaluate"),
        ({"target": "accuracy >= 1", "evaluate": ()}, "names the metric 'accuracy', but the job measures loss"),
        ({"target": "better"}, "target 'better' is not understood"),
        ({"metrics": ["accuracy"]}, "metrics must map names to functions"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_for(dropout_net, **changes)


@pytest.mark.parametrize(("batch", "lanes"), [(64, 4), (6, 2), (5, 1), (4, 4), (12, 4), (1, 1)])
def test_lanes_follow_from_the_batch(batch: int, lanes: int) -> None:
    assert job_for(dropout_net, batch=batch).lanes == lanes


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InputError, match="the data has 56 samples, fewer than one batch of 64"):
        shoal.train(job_for(dropout_net, batch=64), quiet=True)


def loader(data: Any, **more: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data, batch_size=16, **more)


def test_every_form_of_the_same_data_gives_the_same_bits() -> None:
    data = samples_for(dropout_net)
    forms = {
        "tensors": data,
        "list": list(data),
        "data set": Samples(data),
        "torch's data set": torch.utils.data.TensorDataset(*data),
        "loader": loader(Samples(data), shuffle=True),
        "function": lambda: data,
        "function of a loader": lambda: loader(Samples(data), shuffle=True),
    }
    found = {name: sha256(job_for(dropout_net, data=form)) for name, form in forms.items()}
    assert len(set(found.values())) == 1, found


def test_a_loader_is_read_for_order_length_batch_and_collate() -> None:
    data = samples_for(dropout_net)
    shuffled = sha256(job_for(dropout_net, data=data))
    in_order = sha256(job_for(dropout_net, data=data, shuffle=False))
    dropped = sha256(job_for(dropout_net, data=data, last="drop"))
    assert len({shuffled, in_order, dropped}) == 3
    assert sha256(job_for(dropout_net, data=loader(Samples(data)))) == in_order
    assert sha256(job_for(dropout_net, data=loader(Samples(data), shuffle=True, drop_last=True))) == dropped
    without_batch = job_for(dropout_net, data=loader(Samples(data), shuffle=True), batch=None)
    assert without_batch.batch == 16
    assert sha256(without_batch) == shuffled


def halved(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([item[0] for item in items]) / 2, torch.stack([item[1] for item in items])


def test_a_loader_s_own_collate_and_sampler_are_used_on_every_worker() -> None:
    data = samples_for(dropout_net)
    by_collate = job_for(dropout_net, data=loader(Samples(data), shuffle=True, collate_fn=halved))
    assert sha256(by_collate, 2) == sha256(job_for(dropout_net, data=(data[0] / 2, data[1])))
    weighted = torch.utils.data.WeightedRandomSampler(list(range(1, 57)), 48)
    by_sampler = job_for(dropout_net, data=loader(Samples(data), sampler=weighted))
    reports = [shoal.train(by_sampler, workers=workers, quiet=True) for workers in (1, 2)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    assert reports[0].samples == 2 * 48


class Endless(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: Endless(), "an IterableDataset has no sample numbers"),
        (lambda: loader(Endless()), "a DataLoader over an IterableDataset"),
        (lambda: (torch.ones(20, 8), torch.ones(19)), "tensors of different lengths: 20, 19"),
        (lambda: 7, "int is none of the forms that data can have"),
        (
            lambda: loader(
                Samples(mlp_data(20)),
                sampler=torch.utils.data.DistributedSampler(Samples(mlp_data(20)), num_replicas=2, rank=0),
            ),
            "already cut",
        ),
    ],
)
def test_data_without_an_exact_order_is_refused(data: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shoal.train(job_for(dropout_net, data=data), quiet=True)
