"""Rules of arithmetic, one by one: blocks and initial weights, alignment, seeds, buffers, by real processes.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from helpers.steps import (
    Augmented,
    Buffered,
    Noisy,
    buffers_by_hand,
    masks,
    mlp_data,
    plain_loss,
    sha256,
    strategy_for,
    take_step,
)
from shoal.collectives.group import WorkerGroup
from shoal.numerics import seeds
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.numerics.lanes import cut_batch
from shoal.testing import batch_norm_net, dropout_net, everything, job_for, ranks

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 5: blocks and initial weights ------------------------------------------------------------------------------------


def test_5_the_same_seed_is_the_same_model_on_every_worker() -> None:
    def work(group: WorkerGroup) -> str:
        seeds.seed_everything(group.rank)
        return model_digest(tensor_digests(seeds.initialise(everything, 3).named_parameters()))

    assert set(ranks(3, work)) == {model_digest(tensor_digests(seeds.initialise(everything, 3).named_parameters()))}


# -- 6: alignment -----------------------------------------------------------------------------------------------------


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


# -- 14: seeds --------------------------------------------------------------------------------------------------------


def test_14_dropout_is_the_same_whichever_lanes_ran_before() -> None:
    alone = masks(Noisy())
    assert len(alone) == 4 * 2 * 3  # lanes, microbatches, calls
    assert len({tuple(mask.tolist()) for mask in alone}) == len(alone), "every place has a stream of its own"

    def work(group: WorkerGroup) -> list[Tensor]:
        torch.rand(group.rank)  # whatever was drawn before
        return masks(Noisy(), group=group, deal=[(0, 1), (1, 4)])

    found = [mask for notes in ranks(2, work) for mask in notes]
    assert torch.equal(torch.stack(found), torch.stack(alone))


def test_14_the_hash_does_not_depend_on_the_generators_of_the_caller() -> None:
    job = job_for(dropout_net)
    seeds.seed_everything(1)
    first = sha256(job)
    seeds.seed_everything(2)
    assert sha256(job) == first
    assert sha256(job.changed(seed=1)) != first


def test_14_augmented_data_gives_the_same_bits_on_any_number_of_workers() -> None:
    job = job_for(dropout_net, data=Augmented(mlp_data(40)))
    assert len({sha256(job, workers) for workers in (1, 2, 4)}) == 1


# -- 15: buffers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "batch", "lanes", "microbatches"), [(24, 24, 3, 1), (24, 24, 4, 2), (20, 24, 4, 2)])
def test_15_buffers_start_anew_in_each_lane_and_are_averaged_by_samples(
    count: int, batch: int, lanes: int, microbatches: int
) -> None:
    model = Buffered()
    data = mlp_data(count)
    expected = buffers_by_hand(model, data, cut_batch(count, batch, lanes, microbatches))
    deal = [(0, 1), (1, lanes)]

    def work(group: WorkerGroup) -> dict[str, str]:
        strategy = strategy_for(model, lanes, microbatches=microbatches, group=group, deal=deal)
        take_step(strategy, data, lambda part: plain_loss(model, part), batch=batch)
        return tensor_digests(model.named_buffers())

    on_two = ranks(2, work)
    strategy = strategy_for(model, lanes, microbatches=microbatches)
    take_step(strategy, data, lambda part: plain_loss(model, part), batch=batch)
    found = dict(model.named_buffers())
    assert tensor_digests(found.items()) == tensor_digests(expected.items())
    assert on_two == [tensor_digests(expected.items())] * 2
    assert found["calls"] == 10 + microbatches, "a counter is the first lane's"
    assert found["norm.num_batches_tracked"] == microbatches
    assert found["seen"]


def test_15_batch_norm_gives_the_same_bits_on_any_number_of_workers() -> None:
    job = job_for(batch_norm_net, microbatches=2)
    assert len({sha256(job, workers) for workers in (1, 2, 3)}) == 1
