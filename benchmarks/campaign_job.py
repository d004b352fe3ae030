"""What the kill campaign trains: small and padded, so that a run takes seconds and a fault can hit any of its steps.

Whoever updates weights, a worker or a server, adds the time to a file of its own in the folder PULSES names. So the
campaign knows when a run moved, also while nobody writes its events.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal

PULSES = "SHOAL_CAMPAIGN_PULSES"
STEPS, BATCH, LANES, CHECKPOINT_EVERY = 48, 32, 4, 12
PAD_SECONDS = 0.015  # for a lane

generator = torch.Generator().manual_seed(1)
samples = torch.randn(STEPS * BATCH, 16, generator=generator)
labels = torch.randint(4, (STEPS * BATCH,), generator=generator)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def padded_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(PAD_SECONDS)
    return F.cross_entropy(output, target)


def pulsed(optimizer: Optimizer) -> Optimizer:
    folder = os.environ.get(PULSES)
    if folder is not None:
        optimizer.register_step_post_hook(_pulse(Path(folder)))
    return optimizer


def _pulse(folder: Path) -> Callable[..., None]:
    def after(*_: Any) -> None:
        with open(folder / f"{os.getpid()}", "a") as file:
            file.write(f"{time.time():.3f}\n")

    return after


job = shoal.Job(
    name="campaign",
    model=net,
    data=(samples, labels),
    loss=padded_loss,
    optimizer=lambda named: pulsed(torch.optim.AdamW(named, lr=1e-2)),
    batch=BATCH,
    lanes=LANES,
    steps=STEPS,
    checkpoint_every=CHECKPOINT_EVERY,
)
