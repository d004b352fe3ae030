"""A job with two backward passes for each batch, of which the second sees what the first has made."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import shoal


def build() -> nn.Module:
    maker = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    return nn.ModuleDict({"maker": maker, "judge": nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Linear(6, 1))})


def tell_apart(model: Any, batch: list[Tensor]) -> Tensor:
    real, noise = batch
    scores: Tensor = model["judge"](real)
    made: Tensor = model["judge"](model["maker"](noise))
    return made.mean() - scores.mean() + scores.square().mean()


def deceive(model: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    """A sum and its count."""
    scores = model["judge"](model["maker"](batch[1]))
    return -scores.sum(), len(scores)


def drawing(model: Any, batch: list[Tensor]) -> Tensor:
    score: Tensor = -model["judge"](model["maker"](torch.randn(len(batch[0]), 3))).mean()
    return score


def spread(model: Any, batch: list[Tensor]) -> Tensor:
    found: Tensor = model["maker"](torch.randn(len(batch[0]), 3)).square().mean()
    return found


def passes_job(**changes: Any) -> shoal.Job:
    draw = torch.Generator().manual_seed(1)
    real, noise = torch.randn(44, 3, generator=draw) + 2, torch.randn(44, 3, generator=draw)
    fields: dict[str, Any] = {
        "model": build,
        "data": (real, noise),
        "loss": {"judge": tell_apart, "maker": deceive},
        "optimizer": {
            "maker": lambda model, named: torch.optim.Adam([dict(named)[name] for name, _ in named], lr=0.01),
            "judge": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        },
        "scheduler": {"judge": lambda optimizer: ExponentialLR(optimizer, 0.9)},
        "clip_norm": 0.5,
        "batch": 8,
        "epochs": 3,
    }
    return shoal.Job(**fields | changes)
