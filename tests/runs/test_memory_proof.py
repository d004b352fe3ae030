"""A model that one worker cannot hold is trained by four that cannot either: the kernel enforces the cap."""

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.large_job import CAP, job, large
from shoal.driver import make_plan

pytestmark = pytest.mark.clean_heap


def test_the_kernel_refuses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_plan, "check_memory", lambda *arguments: None)
    with pytest.raises(shoal.RunError) as caught:
        shoal.train(job(), memory=CAP, quiet=True)
    assert "out of memory: it may use 80 MB (--memory), and no more" in caught.value.message
    assert "more stages or slices" in (caught.value.fix or "")


def test_four_workers_train_it_under_the_same_cap() -> None:
    report = shoal.train(job(), layout="pipeline=2,tensor=2", memory=CAP, quiet=True)
    assert report.steps == 3
    carried = report.value["model_shards"]
    assert [(each["stage"], each["tensor_shard"]) for each in carried] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    whole = sum(parameter.numel() for parameter in large().parameters())
    for each in carried:
        assert each["limit_bytes"] == 80_000_000
        assert 28_000_000 < each["peak_bytes"] < 80_000_000, carried
        assert each["num_parameters"] < 0.27 * whole
    alone = shoal.train(job(), quiet=True)
    assert alone.value["model_shards"][0]["peak_bytes"] > 113_000_000, "it does need what it is said to need"
    assert report.final_loss == pytest.approx(alone.final_loss, rel=1e-4)


class Wide(nn.Module):
    """Holds sixteen numbers for each that goes in; the activation is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.bend = nn.Linear(64, 1024), nn.Linear(1024, 64), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.bend(self.up(x)))
        return x + out


def test_recomputed_blocks_hold_their_inputs_alone() -> None:
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2))
    wide = job(model=lambda: nn.Sequential(*(Wide() for _ in range(8))), data=(rows, rows), batch=4096, steps=2)
    plain, spared = (shoal.train(wide, memory="1GB", recompute=flag, quiet=True) for flag in (False, True))
    assert spared.weights_sha256 == plain.weights_sha256
    peaks = [report.value["model_shards"][0]["peak_bytes"] for report in (plain, spared)]
    assert peaks[1] < peaks[0] - 30_000_000, "8 blocks, each with 8 MB between its layers"
