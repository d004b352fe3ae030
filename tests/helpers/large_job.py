"""A job that is too large for one worker under its cap."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WIDTH, LAYERS, CAP = 384, 6, "80MB"  # 7.1 million parameters: 28 MB of weights, 113 MB with gradients and AdamW's state


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return x + out


def large() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def job(**changes: Any) -> shoal.Job:
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    fields: dict[str, Any] = {
        "model": large,
        "data": (rows, rows.roll(1, 1)),
        "loss": F.mse_loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3),
        "batch": 8,
        "lanes": 1,
        "microbatches": 2,
        "steps": 3,
    }
    return shoal.Job(**fields | changes)
