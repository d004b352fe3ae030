"""The generative adversarial network of gan.py as a job: a loss and an optimizer for each of the two models.

shoal train examples/first_day/gan_job.py --workers 2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

import shoal

NOISE = 4

draw = torch.Generator().manual_seed(0)
angle = 6.2832 * torch.rand(512, generator=draw)
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(512, 2, generator=draw)


def build() -> nn.Module:
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def judge(model: nn.ModuleDict, points: Tensor, real: bool) -> Tensor:
    scores = model["discriminator"](points)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def made(model: nn.ModuleDict, count: int) -> Tensor:
    points: Tensor = model["generator"](torch.randn(count, NOISE))
    return points


def tell_apart(model: nn.ModuleDict, batch: list[Tensor]) -> Tensor:
    return judge(model, batch[0], real=True) + judge(model, made(model, len(batch[0])), real=False)


def deceive(model: nn.ModuleDict, batch: list[Tensor]) -> Tensor:
    return judge(model, made(model, len(batch[0])), real=True)


def distance(model: nn.ModuleDict, batch: list[Tensor]) -> Tensor:
    """How far made points are from the ring, in the mean."""
    return (made(model, len(batch[0])).norm(dim=1) - 1).abs().mean()


job = shoal.Job(
    model=build,
    data=(ring,),
    batch=64,
    epochs=10,
    loss={"discriminator": tell_apart, "generator": deceive},  # one backward pass each, in this order
    optimizer={
        "discriminator": lambda named: Adam(named, lr=2e-3, betas=(0.5, 0.99)),
        "generator": lambda named: Adam(named, lr=2e-3, betas=(0.5, 0.99)),
    },
    evaluate=(ring[:128],),
    metrics={"distance": distance},
)
