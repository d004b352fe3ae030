"""Rules of arithmetic, one by one: a job, and the forms of its data.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.steps import Samples, loader, mlp_data
from shoal.errors import InputError
from shoal.testing import dropout_net, job_for

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- a job, and the forms of its data ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": None}, "batch is missing"),
        ({"batch": 0}, "batch=0 must be a whole number from 1 up"),
        ({"batch": 16.0}, "batch=16.0 must be a whole number"),
        ({"batch": True}, "batch=True must be a whole number"),
        ({"lanes": 3}, "a batch of 16 cannot be cut into 3 lanes"),
        ({"lanes": 4, "microbatches": 8}, r"16 cannot be cut into 4 lanes of 8 microbatches \(32 in all\)"),
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
        ({"metrics": {"top\n5": max}}, r"metrics: 'top\\n5' is no name, which is text in one line"),
        ({"metrics": {"loss": max}}, "metrics: 'loss' is the job's own loss"),
        ({"metrics": {5: max}}, "metrics: 5 is no name"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job_for(dropout_net, **changes)


@pytest.mark.parametrize(("batch", "lanes"), [(64, 4), (6, 2), (5, 1), (4, 4), (12, 4), (1, 1)])
def test_lanes_follow_from_the_batch(batch: int, lanes: int) -> None:
    assert job_for(dropout_net, batch=batch).lanes == lanes


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InputError, match="the data has 56 samples, fewer than a batch of 64"):
        shoal.train(job_for(dropout_net, batch=64), quiet=True)


class Endless(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: Endless(), "an IterableDataset has no sample numbers"),
        (lambda: loader(Endless()), "a DataLoader over an IterableDataset"),
        (lambda: (torch.ones(20, 8), torch.ones(19)), "tensors of different lengths: 20, 19"),
        (lambda: 7, "int is not a supported type"),
        (
            lambda: loader(
                Samples(mlp_data(20)),
                sampler=torch.utils.data.DistributedSampler(Samples(mlp_data(20)), num_replicas=2, rank=0),
            ),
            "has one rank's samples",
        ),
    ],
)
def test_data_without_an_exact_order_is_refused(data: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shoal.train(job_for(dropout_net, data=data), quiet=True)
