"""Pre-training of a small GPT on real text, under any layout:

    shoal train examples/gpt.py                                   one worker
    shoal train examples/gpt.py --layout pipeline=2               two stages: the same weights, to the bit
    shoal train examples/gpt.py --layout data=2,pipeline=2        two copies of two stages: the same again
    shoal train examples/gpt.py --layout tensor=2                 operators on two workers: equal up to rounding
    shoal train examples/gpt.py:larger --layout pipeline=2 --memory 400MB    more than one such worker can hold

It reads bytes: those of Python's own sources, or of the *.txt files in the folder SHOAL_DATA. See docs/gpt.md.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shoal

SOURCES = ["argparse", "difflib", "doctest", "inspect", "pydoc", "subprocess", "tarfile", "typing"]
VOCABULARY, CONTEXT = 256, 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.before_attention(x)).split(width, dim=2)
        apart = (batch, length, self.heads, width // self.heads)
        query, key, value = (each.view(apart).transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))


class GPT(nn.Module):
    """An ordinary model: nothing in it knows of layouts."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if name.endswith("down.weight") else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_bytes() -> Tensor:
    folder = os.environ.get("SHOAL_DATA")
    paths = (
        sorted(Path(folder).glob("*.txt"))
        if folder
        else [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in SOURCES]
    )
    text = b"\n".join(path.read_bytes() for path in paths)
    if len(text) < 20 * (CONTEXT + 1):
        raise shoal.InputError(
            f"{len(paths)} files with {len(text):,} bytes of text: too little", fix="SHOAL_DATA=folder"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces of the text, each with the same piece one byte later: what to predict from what."""
    rows = (len(text) - 1) // CONTEXT
    inputs, targets = (text[shift : shift + rows * CONTEXT].view(rows, CONTEXT).long() for shift in (0, 1))
    return inputs, targets


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def optimizer(named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """Matrices decay, the rest does not."""
    matrices = [pair for pair in named if pair[1].dim() > 1]
    rest = [pair for pair in named if pair[1].dim() <= 1]
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)


def warm_up(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


text = read_bytes()
held_out = len(text) // 20
job = shoal.Job(
    name="gpt",
    model=lambda: GPT(width=128, depth=4, heads=4),
    data=windows(text[held_out:]),
    evaluate=windows(text[:held_out][: 64 * CONTEXT + 1]),
    loss=loss,
    optimizer=optimizer,
    scheduler=warm_up,
    clip_norm=1.0,
    batch=32,
    lanes=4,
    microbatches=2,
    steps=200,
    evaluate_every=50,
    tokens=CONTEXT,
)
larger = job.changed(
    name="larger gpt", model=lambda: GPT(width=512, depth=6, heads=8), batch=8, microbatches=1, steps=20
)
