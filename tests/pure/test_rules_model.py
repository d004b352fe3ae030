"""Rules of arithmetic, one by one: blocks and initial weights, alignment, seeds, buffers.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from helpers.steps import (
    Augmented,
    Batch,
    Buffered,
    Noisy,
    Samples,
    buffers_by_hand,
    generator_states,
    gradients,
    masks,
    mlp,
    mlp_data,
    plain_loss,
    strategy_for,
    take_step,
)
from shoal.errors import InputError
from shoal.job.dataset import open_data
from shoal.numerics import kernels, seeds
from shoal.numerics.digest import tensor_digests
from shoal.numerics.lanes import cut_batch
from shoal.parallel.blocks import BlockList, find_blocks
from shoal.parallel.lane_buffers import LARGE_BUFFER_BYTES
from shoal.testing import everything, tied_language_model

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 5: blocks and initial weights ------------------------------------------------------------------------------------


def test_5_blocks_are_the_model_s_parts_with_containers_opened() -> None:
    assert find_blocks(tied_language_model()).names == ("words", "layers.0", "layers.1", "head")
    assert find_blocks(everything()).names[:2] == ("picture.0", "picture.1")
    blocks = BlockList(names=("layers.1", "layers.10"))
    assert [blocks.block_of(name) for name in ("layers.1.weight", "layers.10.weight", "layers.2.weight")] == [1, 2, 0]
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


def test_5_building_a_model_leaves_the_generators_alone_and_does_not_ask_them() -> None:
    def drawing() -> tuple[nn.Module, float]:
        return mlp(), random.random() + float(numpy.random.rand())

    before = generator_states()
    first = seeds.initialise(drawing, 0)
    assert generator_states() == before
    seeds.seed_everything(123)
    second = seeds.initialise(drawing, 0)
    assert first[1] == second[1]
    assert tensor_digests(first[0].named_parameters()) == tensor_digests(second[0].named_parameters())


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
    source = open_data(form(data), seed=0, shuffle=False)
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


# -- 14: seeds --------------------------------------------------------------------------------------------------------


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


def test_14_augmentation_depends_on_pass_and_sample_alone() -> None:
    source = open_data(Augmented(mlp_data(20)), seed=4)
    together = source.fetch([3, 7, 11], 2)[0]
    assert torch.equal(source.fetch([7], 2)[0], together[1:2])
    assert torch.equal(source.fetch([11, 3], 2)[0], together[[2, 0]])
    assert not torch.equal(source.fetch([7], 3)[0], together[1:2]), "another pass"
    other = open_data(Augmented(mlp_data(20)), seed=5)
    assert not torch.equal(other.fetch([7], 2)[0], together[1:2]), "another seed"


# -- 15: buffers ------------------------------------------------------------------------------------------------------


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
    for pieces in cut_batch(24, 24, 4, 1):
        plain_loss(chained, tuple(tensor[pieces[0].start : pieces[0].stop] for tensor in data))
    take_step(strategy_for(model, 4), data, lambda part: plain_loss(model, part))
    assert not torch.equal(dict(model.named_buffers())["mean"], dict(chained.named_buffers())["mean"])
    assert dict(model.named_buffers())["calls"] != dict(chained.named_buffers())["calls"]


def test_15_large_statistics_are_kept_by_lane_too() -> None:
    """Batch norm writes its statistics without raising the version of the tensor; large or small, they count."""
    features = LARGE_BUFFER_BYTES // 4 + 8
    data = (torch.randn(8, features), torch.randint(5, (8,)))
    model = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, 5))
    expected = buffers_by_hand(model, data, cut_batch(8, 8, 2, 1))
    take_step(strategy_for(model, 2), data, lambda part: plain_loss(model, part))
    assert tensor_digests(model.named_buffers()) == tensor_digests(expected.items())


def test_15_a_step_that_is_dropped_leaves_buffers_as_they_were() -> None:
    model, data = Buffered(), mlp_data(24)
    before = tensor_digests(model.named_buffers())
    data[0][20] = float("inf")
    outcome = take_step(strategy_for(model, 4), data, lambda part: plain_loss(model, part))
    assert [lane for _, lane in outcome.not_finite] == [3]
    assert tensor_digests(model.named_buffers()) == before
    assert all(value is None for value in gradients(model).values())
