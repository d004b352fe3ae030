"""Handwritten digits with a small convolutional net:   shoal train examples/digits.py --workers 2

Nothing below knows how many workers there are, so the trained weights are the same bits on 1, 2, 3 or 4 of them:
shoal verify examples/digits.py --workers 1,2,3 --steps 40
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shoal

images, labels = load_digits(return_X_y=True)  # 1,797 scans of 8 x 8 pixels, each 0 to 16
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
held_out = torch.arange(len(y)) % 5 == 0  # every fifth digit is only for testing


def block(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def net() -> nn.Module:
    return nn.Sequential(
        *block(1, 32),
        *block(32, 64),
        nn.MaxPool2d(2),
        *block(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 2 * 2, 10),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


job = shoal.Job(
    name="digits",
    model=net,
    data=(x[~held_out], y[~held_out]),
    loss=nn.functional.cross_entropy,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
    batch=64,
    epochs=12,
    evaluate=(x[held_out], y[held_out]),
    metrics={"accuracy": accuracy},
    target="accuracy >= 0.97",
)
