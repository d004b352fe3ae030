"""A small ResNet with batch norm on pictures of bars:   shoal train examples/first_day/resnet_batchnorm.py --workers 2

Batch norm takes its statistics from the samples that are computed together: here 16 of 64, a lane, on any number of
workers. The report says so. The second job, `resnet_batchnorm.py:synced`, has the statistics of all 64.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


def bars(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of 8 × 8 pixels with a bright row (class 0 to 7) or column (class 8 to 15)."""
    draw = torch.Generator().manual_seed(seed)
    pictures = torch.randn(count, 1, 8, 8, generator=draw) / 2
    classes = torch.randint(0, 16, (count,), generator=draw)
    for picture, place in zip(pictures, classes.tolist(), strict=True):
        bar = picture[0, place] if place < 8 else picture[0, :, place - 8]
        bar += 1
    return pictures, classes


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(inner)))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, Residual(16), nn.MaxPool2d(2), Residual(16), nn.Flatten(), nn.Linear(16 * 4 * 4, 16))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


job = shoal.Job(
    model=resnet,
    data=bars(1024, seed=0),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda named: torch.optim.SGD([weight for _, weight in named], lr=0.05, momentum=0.9),
    evaluate=bars(256, seed=1),
    metrics={"accuracy": accuracy},
    batch=64,
    epochs=2,
    name="resnet_batchnorm",
)
synced = job.changed(sync_batchnorm=True, name="resnet_synced")
