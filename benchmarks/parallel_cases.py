"""What parallel.py trains: a small GPT for speed, equal blocks for the bubble, much activation for memory.

Written once, in the form that torch's own tensor parallelism wants: queries, keys and values of a head side by side in
one projection, so that a cut between heads is a cut of consecutive rows, and `-1` where the number of heads stands.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import BATCHES, Case


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (-1, 3 * self.size)).transpose(1, 2).chunk(3, -1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        found: Tensor = x + self.out(F.gelu(self.fc(self.second(x))))
        return found


class Gpt(nn.Module):
    def __init__(self, words: int, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x))
        return found


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt(quick: bool) -> Case:
    """3.3 million parameters; a step takes 150 to 300 ms on two cores."""
    torch.manual_seed(0)
    words, width, depth, heads, context, batch = (32, 16, 2, 2, 8, 8) if quick else (256, 256, 4, 8, 64, 16)
    text = torch.randint(words, (BATCHES * batch, context + 1))
    return Case(
        name="gpt",
        model=Gpt(words, width, depth, heads, context),
        data=(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=batch,
        warm_up=2 if quick else 3,
        steps=3 if quick else 12,
    )


# -- blocks that cost the same ----------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found


NARROW = 8  # what goes in and comes out: next to nothing, so that only the blocks between cost anything


def equal_blocks(width: int, depth: int) -> nn.Module:
    """The first layer is there so that the first block, too, has an input with a gradient."""
    return nn.Sequential(nn.Linear(NARROW, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, NARROW))


class _Slow(torch.autograd.Function):
    """Takes a while forward, and as long again on the way back to what came in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        if not x.is_meta:
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class _Late(torch.autograd.Function):
    """Takes a while on the way back to a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class Timed(nn.Module):
    """A block that takes its time by the clock, and hardly any of a core's: backward twice what forward takes, half of
    it for inputs and half for weights."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(NARROW))

    def forward(self, x: Tensor) -> Tensor:
        slow, late = _Slow.apply(x, self.seconds), _Late.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        found: Tensor = slow + late
        return found


def timed_blocks(seconds: float, depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(NARROW, NARROW), *(Timed(seconds) for _ in range(depth)))


@dataclass(frozen=True, kw_only=True)
class Equal:
    """A pipeline's job: so many microbatches of so many samples."""

    width: int
    depth: int
    samples: int  # of a microbatch
    microbatches: int
    steps: int
    seconds: float | None = None  # a forward through a block, by the clock; None: it computes

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return equal_blocks(self.width, self.depth) if self.seconds is None else timed_blocks(self.seconds, self.depth)

    def job(self) -> dict[str, Any]:
        batch = self.samples * self.microbatches
        torch.manual_seed(1)
        return {
            "model": self.model(),
            "data": (torch.randn(2 * batch, NARROW), torch.randn(2 * batch, NARROW)),
            "loss": F.mse_loss,
            "batch": batch,
            "lanes": 1,
            "microbatches": self.microbatches,
            "steps": self.steps,
            "shuffle": False,
            "checkpoint_every": self.steps,
        }
