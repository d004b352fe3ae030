"""Models that are cut into slices, and what must come out."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.parallel.tensor import TensorRule

B, T, C, H, V = 3, 6, 8, 4, 10
D = C // H


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class MLP(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, p: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop, self.between = linear(C, 4 * C), linear(4 * C, C), nn.Dropout(p), between
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.fc2(self.drop(self.between(self.fc1(self.norm(x))))))
        return out


class Attention(nn.Module):
    """nanoGPT's, in all its ways of writing it."""

    tril: Tensor

    def __init__(self, how: str, p: float = 0.0, heads: int = H, width: int = C) -> None:
        super().__init__()
        self.how, self.p, self.heads, self.drop = how, p, heads, nn.Dropout(p)
        self.c_attn, self.c_proj = linear(width, 3 * width, bias=how != "vit"), linear(width, width)
        if how == "alibi":
            self.slope = nn.Parameter(torch.linspace(0.1, 0.4, heads))
        self.register_buffer("tril", torch.tril(torch.ones(T, T)).view(1, 1, T, T))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        h, d = self.heads, c // self.heads
        if self.how == "vit":
            q, k, v = self.c_attn(x).reshape(b, t, 3, h, d).permute(2, 0, 3, 1, 4)
        elif self.how == "interleaved":
            q, k, v = self.c_attn(x).view(b, t, h, 3 * d).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = self.c_attn(x).split(c, dim=2)
            q, k, v = (each.view(b, t, h, d).transpose(1, 2) for each in (q, k, v))
        if self.how == "manual":
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.tril[:, :, :t, :t] == 0, float("-inf"))
            y = self.drop(F.softmax(scores, dim=-1)) @ v
        elif self.how == "einsum":
            y = torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) / d**0.5).softmax(-1), v)
        elif self.how == "bmm":
            q, k, v = (each.reshape(b * h, t, d) for each in (q, k, v))
            y = torch.bmm(torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT).softmax(-1), v).view(b, h, t, d)
        elif self.how == "alibi":  # a mask of its own for each head, and learned
            far = torch.arange(t, dtype=x.dtype, device=x.device)
            mask = self.slope.view(h, 1, 1) * (far[:, None] - far)
            y = F.scaled_dot_product_attention(q, k, v, mask)
            y = y + F.scaled_dot_product_attention(q, k, v, self.tril[0, 0, :t, :t] > 0, dropout_p=self.p)
        else:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        out: Tensor = self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))
        return out


class Separate(nn.Module):
    """Llama's: separate projections, norms of heads, rotary places, and fewer heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.o = linear(C, C), linear(C, C // 2), linear(C, C)
        self.k = linear(C, C // 2, bias=False)  # softmax does not see one: its gradient would be noise
        self.norm, self.scale = nn.LayerNorm(D), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.norm(self.q(x).view(b, t, -1, D)) * self.scale
        k, v = (one(x).view(b, t, -1, D).transpose(1, 2) for one in (self.k, self.v))
        angle = torch.arange(t, dtype=x.dtype, device=x.device)[:, None] * torch.ones(D, device=x.device)
        q = q.transpose(1, 2)
        q = q * angle.cos() + torch.cat((-q[..., D // 2 :], q[..., : D // 2]), dim=-1) * angle.sin()
        few, k = k, k[:, :, None].expand(b, H // 2, 2, t, D).reshape(b, H, t, D)
        y = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, dim=1))
        y = y + F.scaled_dot_product_attention(q, few, v, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Torch(nn.Module):
    """nn.MultiheadAttention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        first = options.pop("batch_first", True)
        self.attn = nn.MultiheadAttention(C, H, dropout=options.pop("p", 0.0), batch_first=first)
        self.more = {key: options.pop(key) for key in ("need_weights", "average_attn_weights") if key in options}

    def forward(self, x: Tensor) -> Any:
        places = x.shape[1] if self.attn.batch_first else x.shape[0]
        mask = nn.Transformer.generate_square_subsequent_mask(places, x.device, x.dtype)
        hidden = torch.zeros(B, places, dtype=x.dtype, device=x.device)
        hidden[1, -2:] = float("-inf")
        found, seen = self.attn(x, x, x, attn_mask=mask, key_padding_mask=hidden, **self.more)
        return found if seen is None else torch.cat([found.flatten(), seen.flatten()])


class Cross(nn.Module):
    """Other keys than queries, of another size, with a mask for each head; then without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(C, H, bias=False, kdim=4, vdim=6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        keys = x.repeat(1, 2, 1)
        hidden = torch.arange(B * H * T * 2 * T, device=x.device).view(B * H, T, 2 * T) % 5 == 0
        late = torch.arange(2 * T, device=x.device).expand(B, -1) > T
        found, seen = self.attn(x, keys[..., :4], keys[..., 2:], attn_mask=hidden, key_padding_mask=late)
        single, _ = self.attn(x[0], keys[1, :, :4], keys[0, :, :6], need_weights=False)
        return torch.cat([found.flatten(), seen.flatten(), single.flatten()])


class Permuted(nn.Module):
    """Masks are drawn in the order of memory, sliced or gathered (asinh is in no table)."""

    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop, self.heads = linear(C, C), linear(C, C), nn.Dropout(0.4), heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.silu(self.fc1(x).view(B, T, self.heads, -1).transpose(1, 2)))
        y = self.drop(torch.asinh(y))
        out: Tensor = self.fc2(y.transpose(1, 2).flatten(2))
        return out


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(C, C), MLP(p=0.3)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)


def encoder(p: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(C, H, 4 * C, dropout=p, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class LM(nn.Module):
    def __init__(self, tied: bool = True, p: float = 0.0, how: str = "flash") -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(V, C, padding_idx=7), nn.Embedding(T, C)
        self.norm, self.attn, self.mlp = nn.LayerNorm(C), Attention(how, p), MLP(p=p)
        self.last, self.head = nn.LayerNorm(C), linear(C, V, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.head(self.last(self.mlp(x + self.attn(self.norm(x)))))
        return out


class Odd(nn.Module):
    """Operators that nobody has thought of, and writing in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            linear(C, 2 * C),
            linear(2 * C, C),
            linear(C, 3),
        )  # three classes: whole, if it were a column

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc1(x))
        y = torch.sort(y, dim=-1).values * torch.linalg.vector_norm(y)
        z = F.relu(self.fc1(x) * 2, inplace=True).clone()
        z[:, 0] = 2.0 * z[:, 1]
        z += 1
        z.index_fill_(-1, torch.tensor([1, 3]), 0.5)
        out: Tensor = self.fc3(self.fc2(y + z.roll(1, -1)) + z.cumsum(-1)[..., :C])
        return out


class GLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 4 * C), linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(value * F.silu(gate))
        return out


class Functional(nn.Module):
    """Uses the embedding's weight as a function: it must stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc1, self.fc2 = nn.Embedding(V, C), linear(C, 2 * C), linear(2 * C, C)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.fc2(self.fc1(self.emb(ids)).relu()), self.emb.weight)


def square(output: Tensor, _: Tensor) -> Tensor:
    return (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).pow(2).sum()


def flat_entropy(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        found = F.cross_entropy(logits.view(-1, V), ids.reshape(-1), **options)
        return found if found.dim() == 0 else (found * torch.arange(1.0, 1 + found.numel()).double()).sum()

    return loss


def many_losses(logits: Tensor, ids: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, V).double()
    goal = torch.softmax(torch.arange(logits.numel()).view(logits.shape).double() % 7, -1)
    rows = logits.flatten(0, 1)
    out: Tensor = (
        nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2, reduction="sum")(logits.transpose(1, 2), ids)
        + F.nll_loss(F.log_softmax(rows, dim=-1), ids.flatten(), ignore_index=2)
        + F.cross_entropy(rows, goal.flatten(0, 1), label_smoothing=0.1)
        + F.cross_entropy(rows.masked_fill(torch.arange(V) >= V // 2, float("-inf")), ids.flatten() % (V // 2))
        + (logits.argmax(-1) == ids).double().mean()
        + (logits.softmax(-1) ** 2).mean()
    )
    return out


def words() -> Tensor:
    return torch.arange(B * T).view(B, T) * 7 % V


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, math.prod(shape), dtype=torch.float64).sin().view(shape)


X = (B, T, C)
COLUMN, ROW, VOCAB = TensorRule("column"), TensorRule("row"), TensorRule("vocab")
QKV = {"c_attn": TensorRule("column", 3), "c_proj": ROW}
LANGUAGE = {
    "emb": VOCAB,
    "pos": VOCAB,
    "attn.c_attn": TensorRule("column", 3),
    "attn.c_proj": ROW,
    "mlp.fc1": COLUMN,
    "mlp.fc2": ROW,
    "head": COLUMN,
}
MHA = {"attn": TensorRule("attention", 3), "attn.out_proj": ROW}
LAYER = {"self_attn": MHA["attn"], "self_attn.out_proj": ROW, "linear1": COLUMN, "linear2": ROW}
ENCODER = {f"layers.{number}.{name}": rule for number in range(2) for name, rule in LAYER.items()}
Model = Callable[[], nn.Module]
Case = tuple[Model, Callable[[], Tensor], Callable[[Any, Tensor], Tensor], dict[str, TensorRule], dict[str, str]]


def case(model: Model, rules: dict[str, TensorRule], loss: Any = square, x: Any = None, **wanted: str) -> Case:
    return model, x or (lambda: numbers(*X)), loss, rules, {key.replace("__", "."): wanted[key] for key in wanted}


CASES: dict[str, Case] = {
    "mlp": case(MLP, {"fc1": COLUMN, "fc2": ROW}),
    "mlp with dropout": case(lambda: MLP(p=0.3), {"fc1": COLUMN, "fc2": ROW}),
    "glu": case(GLU, {"up": TensorRule("column", 2), "down": ROW}),
    **{
        f"attention {how}": case(partial(Attention, how), QKV)
        for how in ("flash", "manual", "vit", "einsum", "bmm", "alibi")
    },
    "attention interleaved": case(lambda: Attention("interleaved"), {"c_attn": COLUMN, "c_proj": ROW}),
    "attention flash with dropout": case(lambda: Attention("flash", 0.3), QKV),
    "attention manual with dropout": case(lambda: Attention("manual", 0.3), QKV),
    "separate": case(Separate, {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW}),
    "torch attention": case(lambda: Torch(need_weights=False), MHA),
    "torch attention with dropout": case(lambda: Torch(need_weights=False, p=0.3), MHA),
    "torch attention, sequence first": case(lambda: Torch(batch_first=False), MHA, x=lambda: numbers(T, B, C)),
    "torch attention, all weights": case(lambda: Torch(average_attn_weights=False, p=0.2), MHA),
    "attention alibi with dropout": case(lambda: Attention("alibi", 0.3), QKV),
    "torch attention, others' keys": case(Cross, MHA),
    "permuted": case(Permuted, {"fc1": COLUMN, "fc2": COLUMN}),
    "permuted, a head each": case(lambda: Permuted(2), {"fc1": COLUMN, "fc2": COLUMN}),
    "recomputed": case(Recomputed, {"second.fc1": COLUMN, "second.fc2": ROW}),
    "column after column": case(
        lambda: nn.Sequential(linear(C, 2 * C), nn.ReLU(), linear(2 * C, C)),
        {"0": COLUMN, "2": COLUMN},
        **{"2": "column"},
    ),
    "torch encoder": case(encoder, ENCODER),
    "torch encoder with dropout": case(lambda: encoder(0.2), ENCODER),
    "torch encoder, evaluated": case(lambda: encoder(0.2).eval(), ENCODER),
    "language": case(LM, LANGUAGE, flat_entropy(), words),
    "language, untied": case(lambda: LM(tied=False, p=0.2), LANGUAGE, flat_entropy(reduction="none"), words),
    "ignored": case(LM, LANGUAGE, flat_entropy(ignore_index=3, label_smoothing=0.1), words),
    "all ignored but a sum": case(LM, LANGUAGE, flat_entropy(ignore_index=3, reduction="sum"), words),
    "many losses": case(LM, LANGUAGE, many_losses, words),
    "odd": case(Odd, {"fc1": COLUMN, "fc2": COLUMN, "fc3": ROW}),
    "functional": case(Functional, {"fc1": COLUMN, "fc2": ROW}, x=words),
    "wanted": case(MLP, {"fc1": ROW, "fc2": COLUMN}, fc1="row", fc2="column"),
    "wanted whole": case(
        LM, {k: v for k, v in LANGUAGE.items() if "attn" not in k}, flat_entropy(), words, attn="whole"
    ),
    "sequence": case(
        LM,
        {
            **LANGUAGE,
            "norm": TensorRule("sequence"),
            "mlp.norm": TensorRule("sequence"),
            "last": TensorRule("sequence"),
        },
        flat_entropy(),
        words,
        norm="sequence",
        mlp__norm="sequence",
        last="sequence",
    ),
}


def slices(length: int, size: int, rank: int, segments: int) -> tuple[tuple[int, int], ...]:
    run, each = length // segments, length // segments // size
    return tuple((start + rank * each, start + (rank + 1) * each) for start in range(0, length, run))
