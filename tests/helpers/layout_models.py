"""Models with whatever makes a model hard to cut, and jobs for them. Used by the tests of layouts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

WORDS, LENGTH, WIDTH, LABELS = 19, 6, 16, 5
SAMPLES = 37  # two batches of 16 and one of 5: some of its lanes are short, some empty


class Pair(nn.Module):
    """Returns a tuple; the second of it has no gradient."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tanh(self.one(x)), {"gate": torch.sigmoid(self.two(x)), "sign": x.detach() > 0}


class Turned(nn.Module):
    """What it returns is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(x.flatten(2))
        return out.transpose(1, 2)


class Winding(nn.Module):
    """A picture's way: batch norm, activations in place, dropout, a skip over many blocks, a tuple, a transpose, a
    module that is called twice, dropout and parameters in the model's own code, frozen and unused parameters."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1)
        )
        self.down = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4))
        self.pair = Pair(4)
        self.frozen = nn.Conv2d(4, 4, 1)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(4, 1, 1))
        self.again = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.2))
        self.up = nn.Conv2d(8, 4, 3, padding=1)
        self.turned = Turned(64)
        self.offset = nn.Parameter(torch.zeros(4))
        self.norm = nn.LayerNorm(4)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(64 * 4, LABELS)
        self.register_buffer("table", torch.linspace(0, 1, 64).reshape(64, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        skip = self.stem(pictures)
        x = F.dropout(self.down(skip), 0.1, self.training)
        x, more = self.pair(x)
        x = x * more["gate"] + more["sign"] * self.gain
        x = self.frozen(x)
        x = self.again(self.again(x))
        x = self.up(torch.cat([x, skip], 1))
        x = self.turned(x) + self.table * self.offset
        out: Tensor = self.head(self.norm(x).flatten(1))
        return out


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (4, -1)).transpose(1, 2)
            for each in self.query_key_value(self.before(x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))
        return out


class Body(nn.Module):
    """A stack of layers that is no container."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.h = nn.ModuleList([Layer(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.place
        for layer in self.h:
            x = layer(x, mask)
        out: Tensor = self.norm(x)
        return out


class Language(nn.Module):
    """Tied words, a stack of layers inside of a module, two inputs of which one goes to every block."""

    def __init__(self, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.body = Body(layers, dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.words(words), mask))
        return out


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, LABELS)
    )


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the words that count."""
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return loss, (target != 0).sum()


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


def decayed(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not; what is called head learns faster."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, name.startswith("head")), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": found, "weight_decay": 0.1 if matrix else 0.0, "lr": 2e-2 if head else 1e-2}
            for (matrix, head), found in groups.items()
        ]
    )


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def winding_job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    labels = torch.randint(LABELS, (SAMPLES,), generator=generator)
    fields: dict[str, Any] = {
        "model": Winding,
        "data": (pictures, labels),
        "loss": F.cross_entropy,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01),
        "clip_norm": 0.5,
        "batch": 16,
        "epochs": 2,
        "evaluate": (pictures[:21], labels[:21]),
        "metrics": {"right": right},
    }
    return shoal.Job(**fields | changes)


def language_job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.rand(SAMPLES, LENGTH, generator=generator) > 0.2
    mask[:, 0] = True
    target = torch.where(mask, words.roll(-1, 1), 0)
    fields: dict[str, Any] = {
        "model": Language,
        "data": (words, mask, target),
        "loss": counted,
        "optimizer": decayed,
        "scheduler": cosine,
        "clip_norm": 1.0,
        "batch": 16,
        "microbatches": 2,
        "epochs": 2,
        "evaluate": (words[:21], mask[:21], target[:21]),
        "metrics": {"right": right},
    }
    return shoal.Job(**fields | changes)


def perceptron_job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(3)
    rows, labels = torch.randn(SAMPLES, 12, generator=generator), torch.randint(LABELS, (SAMPLES,), generator=generator)
    fields: dict[str, Any] = {
        "model": perceptron,
        "data": (rows, labels),
        "loss": F.cross_entropy,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "batch": 16,
        "epochs": 2,
    }
    return shoal.Job(**fields | changes)
