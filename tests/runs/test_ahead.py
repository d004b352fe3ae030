"""A DataLoader's own processes load samples ahead; the bits do not know it."""

import os
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.job.dataset import open_data
from shoal.job.prefetch import Prefetcher


class Augmented(Dataset[Any]):
    """Draws from every generator, and says which process loaded it."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(8) + random.random() + float(numpy.random.rand())
        return torch.full((8,), float(index)) + noise, os.getpid()


def job(processes: int) -> shoal.Job:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.square().mean()

    return shoal.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2)),
        data=DataLoader(Augmented(), batch_size=16, shuffle=True, num_workers=processes),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-5),
        epochs=2,
        microbatches=2,
    )


def test_loading_ahead_changes_no_bit() -> None:
    alone = shoal.train(job(0), workers=1, quiet=True).weights_sha256
    assert shoal.train(job(1), workers=2, quiet=True).weights_sha256 == alone
    assert shoal.train(job(2), workers=1, quiet=True, shares="auto").weights_sha256 == alone


@pytest.mark.parametrize("announced", [True, False])
def test_what_was_announced_is_loaded_elsewhere(announced: bool) -> None:
    source = open_data(DataLoader(Augmented(), batch_size=16, num_workers=1), seed=3)
    assert source.prefetcher is not None
    if announced:
        source.prefetcher.announce([((4, 9), 0), ((1, 2), 0)])
    first, where = source.fetch([4, 9], 0)
    assert (where[0].item() != os.getpid()) == announced
    again, here = Prefetcher(Augmented(), torch.utils.data.default_collate, 3).load([4, 9], 0)
    assert here[0].item() == os.getpid()
    assert torch.equal(first, again)
    assert first.data_ptr() % 64 == 0
    # Something else than announced, such as lanes dealt anew, is loaded here and now.
    assert source.fetch([7], 0)[1].item() == os.getpid()
    source.prefetcher.announce([])
