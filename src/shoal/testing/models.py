"""Tiny models with their data, for tests that really train."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.job.job import Job

CLASSES, WORDS, LENGTH, WIDTH = 5, 13, 6, 8


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, CLASSES),
    )


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 24), nn.Dropout(0.4), nn.Linear(24, CLASSES)
    )


def batch_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, CLASSES),
    )


class _TransformerLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.between = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        widened: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + widened


class _MeanPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def attention() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        _TransformerLayer(0.0),
        _TransformerLayer(0.0),
        _MeanPool(),
        nn.Linear(WIDTH, CLASSES),
    )


class _TiedLanguageModel(nn.Module):
    """Predicts each next word with the table that it embeds words with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([_TransformerLayer(0.1), _TransformerLayer(0.1)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def tied_language_model() -> nn.Module:
    return _TiedLanguageModel()


class _CaptionModel(nn.Module):
    """Describes a picture: adds the picture's features to every word, then predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 6 * 6, WIDTH)
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = _TransformerLayer(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        x = self.words(words) + self.picture(pictures).unsqueeze(1)
        out: Tensor = self.head(self.layer(x))
        return out


def everything() -> nn.Module:
    return _CaptionModel()


def samples_for(build: Callable[[], nn.Module], count: int = 56) -> tuple[Tensor, ...]:
    """Random samples that fit a tiny model: its inputs, then the target."""
    generator = torch.Generator().manual_seed(count)
    pictures = torch.randn(count, 1, 8, 8, generator=generator)
    rows = torch.randn(count, WIDTH, generator=generator)
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    next_words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    forms = {
        convolution: (pictures, labels),
        attention: (words, labels),
        dropout_net: (rows, labels),
        batch_norm_net: (pictures, labels),
        tied_language_model: (words, next_words),
        everything: (pictures, words, next_words),
    }
    if build not in forms:
        known = ", ".join(form.__name__ for form in forms)
        raise InputError(f"no samples for {getattr(build, '__name__', build)}; there are some for {known}")
    return forms[build]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """A loss for every tiny model: one label per sample, or one per word."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def job_for(build: Callable[[], nn.Module], **changes: Any) -> Job:
    """A job that trains a tiny model for two passes over the data; the last batch of each is short."""
    fields: dict[str, Any] = {
        "model": build,
        "loss": cross_entropy,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "batch": 16,
        "epochs": 2,
    }
    if "data" not in changes:
        fields["data"] = samples_for(build)
    return Job(**fields | changes)
