"""Rules of arithmetic, one by one: a job, and the forms of its data, by real processes.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import pytest
import torch
from torch import Tensor

import shoal
from helpers.steps import Samples, loader, sha256
from shoal.testing import dropout_net, job_for, samples_for

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- a job, and the forms of its data ---------------------------------------------------------------------------------


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
