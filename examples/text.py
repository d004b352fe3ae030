"""A character transformer that learns to write Python:   shoal train examples/text.py --workers 2

It reads the standard library's own source, so there is nothing to download (and other Python versions give other
weights). SHOAL_DATA=folder trains on the folder's *.txt files instead. SHOAL_STEPS, SHOAL_BATCH, SHOAL_CONTEXT,
SHOAL_WIDTH, SHOAL_DEPTH and SHOAL_HEADS change the size; `--set steps=20` only ends the same run sooner.
"""

import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import shoal

SOURCES = ["argparse", "difflib", "doctest", "inspect", "pydoc", "subprocess", "tarfile", "typing"]


def size(name: str, default: int) -> int:
    return int(os.environ.get(f"SHOAL_{name}", default))


STEPS, BATCH, CONTEXT = size("STEPS", 300), size("BATCH", 32), size("CONTEXT", 64)
WIDTH, DEPTH, HEADS = size("WIDTH", 96), size("DEPTH", 3), size("HEADS", 4)


def read_text() -> str:
    folder = os.environ.get("SHOAL_DATA")
    if folder:
        paths = sorted(Path(folder).glob("*.txt"))
    else:
        paths = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in SOURCES]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    least = 20 * (CONTEXT + 1)
    if len(text) < least:
        raise shoal.InputError(
            f"{len(paths)} files with {len(text):,} characters; at least {least:,} are needed",
            fix="more text in the *.txt files of SHOAL_DATA, or a smaller SHOAL_CONTEXT",
        )
    return text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, each with the same piece one character later: what to predict from what."""

    def __init__(self, text: Tensor, stride: int) -> None:
        self.text, self.stride = text, stride

    def __len__(self) -> int:
        return (len(self.text) - CONTEXT - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = self.text[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def attend(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4).contiguous()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return attended

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        out: Tensor = x + self.dropout(self.mlp(self.before_mlp(x)))
        return out


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: one matrix reads and writes characters

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def warm_up_then_cosine(optimizer: Optimizer) -> LambdaLR:
    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / (0.1 * STEPS))
        return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / STEPS)))

    return LambdaLR(optimizer, factor)


text = read_text()
alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
numbers = torch.tensor([alphabet[character] for character in text])
boundary = len(numbers) * 9 // 10  # the last tenth is held out

job = shoal.Job(
    name="text",
    model=lambda: Transformer(len(alphabet)),
    data=Windows(numbers[:boundary], stride=max(1, CONTEXT // 4)),
    loss=loss,
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3, weight_decay=0.01),
    scheduler=warm_up_then_cosine,
    clip_norm=1.0,
    batch=BATCH,
    steps=STEPS,
    evaluate=Windows(numbers[boundary:][: 256 * CONTEXT + 1], stride=CONTEXT),
    evaluate_every=max(1, STEPS // 4),
)
