"""A generative adversarial network on points of a ring: two models, two optimizers, two backward passes for each batch.

shoal run examples/first_day/gan.py --workers 2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

NOISE = 4

torch.manual_seed(0)
angle = 6.2832 * torch.rand(512)
ring = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(512, 2)
loader = DataLoader(TensorDataset(ring), batch_size=64, shuffle=True)

generator = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
g_opt = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
d_opt = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))

run = shoal.join({"generator": generator, "discriminator": discriminator}, {"g": g_opt, "d": d_opt}, loader)


def judge(points: Tensor, real: bool) -> Tensor:
    scores = discriminator(points)
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def tell_apart(batch: list[Tensor]) -> Tensor:
    points = batch[0]
    return judge(points, real=True) + judge(generator(torch.randn(len(points), NOISE)), real=False)


def deceive(batch: list[Tensor]) -> Tensor:
    return judge(generator(torch.randn(len(batch[0]), NOISE)), real=True)


for _ in run.epochs(3):
    for batch in run.batches():
        d_loss = run.backward(batch, tell_apart, optimizer=d_opt)
        d_opt.step()
        g_loss = run.backward(batch, deceive, optimizer=g_opt)
        g_opt.step()
if run.leader:
    print(f"discriminator {d_loss!r} generator {g_loss!r}")
