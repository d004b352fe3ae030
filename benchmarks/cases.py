"""What is trained in the benchmark: one model bound by compute, one transformer, one bound by traffic.

A case is the same for every contender: the same initial weights, the same batches in the same order, the same
optimizer. Sizes are for one core; `quick` ones are for tests and say nothing about speed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Any], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model: nn.Module  # an instance: everyone begins with its weights
    data: tuple[Tensor, Tensor]  # whole batches, taken in order, again and again
    loss: Loss
    optimizer: MakeOptimizer
    batch: int
    warm_up: int  # steps before the clock starts
    steps: int  # steps on the clock

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def total_steps(self) -> int:
        return self.warm_up + self.steps

    def positions(self, step: int) -> range:
        """Which samples a step sees."""
        batches = len(self.data[0]) // self.batch
        start = step % batches * self.batch
        return range(start, start + self.batch)

    def share(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """What one of several workers trains on in a step."""
        each = self.batch // size
        chosen = torch.as_tensor(self.positions(step)[rank * each : (rank + 1) * each], dtype=torch.int64)
        return self.data[0].index_select(0, chosen), self.data[1].index_select(0, chosen)


BATCHES = 8  # of data in memory


def conv(quick: bool) -> Case:
    """Bound by compute: a convolutional net with batch norm on 32 x 32 pictures, few parameters."""
    width, size, batch = (8, 8, 8) if quick else (32, 32, 64)
    layers = [
        *_convolution(3, width),
        *_convolution(width, width),
        nn.MaxPool2d(2),
        *_convolution(width, 2 * width),
        *_convolution(2 * width, 2 * width),
        *_classifier(2 * width),
    ]
    return _pictures("conv", layers, size, batch, warm_up=2 if quick else 5, steps=6 if quick else 40)


def wide(quick: bool) -> Case:
    """For hosts.py: a convolutional net of 1.6 million parameters, most of them in its last layer, so that a reduction
    can begin soon after the backward pass does."""
    widths, size, batch = ((4, 8, 8, 16), 8, 8) if quick else ((64, 128, 256, 512), 16, 32)
    layers = [*_convolution(3, widths[0]), *_convolution(widths[0], widths[1])]
    for inputs, outputs in pairwise(widths[1:]):
        layers += [nn.MaxPool2d(2), *_convolution(inputs, outputs)]
    layers += _classifier(widths[-1])
    return _pictures("wide", layers, size, batch, warm_up=2 if quick else 3, steps=3 if quick else 12)


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _classifier(features: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 10)]


def _pictures(name: str, layers: list[nn.Module], size: int, batch: int, *, warm_up: int, steps: int) -> Case:
    return Case(
        name=name,
        model=nn.Sequential(*layers),
        data=(torch.randn(BATCHES * batch, 3, size, size), torch.randint(10, (BATCHES * batch,))),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch=batch,
        warm_up=warm_up,
        steps=steps,
    )


class _Transformer(nn.Module):
    def __init__(self, characters: int, width: int, depth: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embed(text) + self.place(torch.arange(length))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def transformer(quick: bool) -> Case:
    """A character transformer with AdamW: compute and traffic in the usual proportion."""
    characters, width, depth, context, batch = (32, 16, 1, 8, 8) if quick else (128, 192, 4, 64, 16)
    text = torch.randint(characters, (BATCHES * batch, context + 1))
    return Case(
        name="transformer",
        model=_Transformer(characters, width, depth, context),
        data=(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        loss=_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=batch,
        warm_up=2 if quick else 5,
        steps=6 if quick else 24,
    )


def mlp(quick: bool) -> Case:
    """Bound by traffic: 23 million parameters (92 MB of gradients a step) and a small batch."""
    return _layers(
        "mlp",
        *((32, 4, 8) if quick else (2400, 4, 32)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        warm_up=2 if quick else 4,
        steps=6 if quick else 12,
    )


def _layers(
    name: str, width: int, depth: int, batch: int, *, optimizer: MakeOptimizer, warm_up: int, steps: int
) -> Case:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return Case(
        name=name,
        model=nn.Sequential(*layers, nn.Linear(width, 10)),
        data=(torch.randn(BATCHES * batch, width), torch.randint(10, (BATCHES * batch,))),
        loss=F.cross_entropy,
        optimizer=optimizer,
        batch=batch,
        warm_up=warm_up,
        steps=steps,
    )


def short(quick: bool) -> Case:
    """Steps of about 20 ms on two workers: here whatever the driver and its progress cost would show."""
    width, batch = (32, 8) if quick else (768, 192)
    return Case(
        name="short",
        model=nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
        ),
        data=(torch.randn(BATCHES * batch, width), torch.randint(10, (BATCHES * batch,))),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=batch,
        warm_up=2 if quick else 20,
        steps=6 if quick else 200,
    )


# For recovery.py: `warm_up` and `steps` are for its runs without faults.


def small(quick: bool) -> Case:
    """Half a million parameters, steps of 10 to 20 ms on two workers."""
    return _with_adam("small", *((32, 2, 8, 2, 20) if quick else (384, 3, 768, 40, 260)))


def longer(quick: bool) -> Case:
    """The same with steps of about 100 ms."""
    return _with_adam("longer", *((32, 2, 64, 2, 20) if quick else (384, 3, 9216, 6, 48)))


def large(quick: bool) -> Case:
    """The parameters of `mlp`: with the two moments of AdamW a state of 277 MB."""
    return _with_adam("large", *((256, 4, 8, 2, 6) if quick else (2400, 4, 32, 2, 12)))


def _with_adam(name: str, width: int, depth: int, batch: int, warm_up: int, steps: int) -> Case:
    def optimizer(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    return _layers(name, width, depth, batch, optimizer=optimizer, warm_up=warm_up, steps=steps)


CASES: dict[str, Callable[[bool], Case]] = {"conv": conv, "transformer": transformer, "mlp": mlp}
OTHERS: dict[str, Callable[[bool], Case]] = {
    "wide": wide,
    "short": short,
    "small": small,
    "longer": longer,
    "large": large,
}


def make(name: str, quick: bool) -> Case:
    torch.manual_seed(0)
    return (CASES | OTHERS)[name](quick)
