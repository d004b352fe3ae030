"""Tensor parallelism: a model whose operators are split is the same model, and its code does not know."""

import math
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from shoal.collectives.group import Alone, Group
from shoal.errors import JobError
from shoal.numerics.tensor_slice import WHOLE, Piece, assemble
from shoal.parallel.tensor import DryTeam, Rule, Sliced, Team, find_rules, gathered, install, on_meta
from shoal.parallel.tensor.collective_ops import copy
from shoal.parallel.tensor.reshape import relocated
from shoal.testing import ranks

B, T, C, H, V = 3, 6, 8, 4, 10
D = C // H
TOLERANCE = 1e-9  # in double precision: what remains is the order of sums


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class MLP(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu, p: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop, self.between = linear(C, 4 * C), linear(4 * C, C), nn.Dropout(p), between
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.drop(self.between(self.fc1(self.norm(x))))))


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
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


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
        return self.o(y.transpose(1, 2).flatten(2))


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
        return self.fc2(y.transpose(1, 2).flatten(2))


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
        return self.head(self.last(self.mlp(x + self.attn(self.norm(x)))))


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
        return self.fc3(self.fc2(y + z.roll(1, -1)) + z.cumsum(-1)[..., :C])


class GLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(C, 4 * C), linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=-1)
        return self.down(value * F.silu(gate))


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
    return (
        nn.CrossEntropyLoss(weight=weight, label_smoothing=0.2, reduction="sum")(logits.transpose(1, 2), ids)
        + F.nll_loss(F.log_softmax(rows, dim=-1), ids.flatten(), ignore_index=2)
        + F.cross_entropy(rows, goal.flatten(0, 1), label_smoothing=0.1)
        + F.cross_entropy(rows.masked_fill(torch.arange(V) >= V // 2, float("-inf")), ids.flatten() % (V // 2))
        + (logits.argmax(-1) == ids).double().mean()
        + (logits.softmax(-1) ** 2).mean()
    )


def words() -> Tensor:
    return torch.arange(B * T).view(B, T) * 7 % V


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-2, 2, math.prod(shape), dtype=torch.float64).sin().view(shape)


X = (B, T, C)
COLUMN, ROW, VOCAB = Rule("column"), Rule("row"), Rule("vocab")
QKV = {"c_attn": Rule("column", 3), "c_proj": ROW}
LANGUAGE = {
    "emb": VOCAB,
    "pos": VOCAB,
    "attn.c_attn": Rule("column", 3),
    "attn.c_proj": ROW,
    "mlp.fc1": COLUMN,
    "mlp.fc2": ROW,
    "head": COLUMN,
}
MHA = {"attn": Rule("attention", 3), "attn.out_proj": ROW}
LAYER = {"self_attn": MHA["attn"], "self_attn.out_proj": ROW, "linear1": COLUMN, "linear2": ROW}
ENCODER = {f"layers.{number}.{name}": rule for number in range(2) for name, rule in LAYER.items()}
Model = Callable[[], nn.Module]
Case = tuple[Model, Callable[[], Tensor], Callable[[Any, Tensor], Tensor], dict[str, Rule], dict[str, str]]


def case(model: Model, rules: dict[str, Rule], loss: Any = square, x: Any = None, **wanted: str) -> Case:
    return model, x or (lambda: numbers(*X)), loss, rules, {key.replace("__", "."): wanted[key] for key in wanted}


CASES: dict[str, Case] = {
    "mlp": case(MLP, {"fc1": COLUMN, "fc2": ROW}),
    "mlp with dropout": case(lambda: MLP(p=0.3), {"fc1": COLUMN, "fc2": ROW}),
    "glu": case(GLU, {"up": Rule("column", 2), "down": ROW}),
    **{
        f"attention {how}": case(lambda how=how: Attention(how), QKV)
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
        {**LANGUAGE, "norm": Rule("sequence"), "mlp.norm": Rule("sequence"), "last": Rule("sequence")},
        flat_entropy(),
        words,
        norm="sequence",
        mlp__norm="sequence",
        last="sequence",
    ),
}


def built(model: Model) -> nn.Module:
    torch.manual_seed(5)
    return model().double()


def passed(model: nn.Module, x: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(11)
    output = model(x)
    value = gathered(loss(output, x))
    value.backward()
    after = torch.rand(1).double()  # the generator is where one process would have left it
    row = torch.cat([gathered(output).detach().flatten(), value.detach().view(1), after])
    return row, {name: parameter.grad for name, parameter in model.named_parameters()}


def error(found: Tensor | None, truth: Tensor | None) -> float:
    if found is None or truth is None:
        return 0.0 if found is truth else math.inf
    if found.shape != truth.shape:
        return math.inf
    return float((found - truth).detach().norm() / truth.detach().norm().clamp_min(1e-30))


def split(model: nn.Module, rules: Any, rank: int) -> dict[str, Piece]:
    """Leaves the model with one worker's slices."""
    pieces = {}
    for name, parameter in model.named_parameters():
        pieces[name] = rules.piece(name, tuple(parameter.shape), rank)
        parameter.data = pieces[name].take(parameter)
    return pieces


def worst(team: Team, of: Case) -> float:
    make, x, loss, _, wanted = of
    truth, gradients = passed(built(make), x(), loss)
    model = built(make)
    rules = find_rules(on_meta(model), (x(),), team.size, wanted)
    pieces = split(model, rules, team.rank)
    installed = install(model, rules, team)
    found, slices = passed(model, x(), loss)
    installed.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    digests = [float(slices[name].sum()) for name in pieces if not pieces[name]]  # type: ignore[union-attr]
    rows = team.gather(torch.tensor([digests], dtype=torch.float64), 0) if digests else torch.zeros(1, 1)
    assert torch.equal(rows, rows[:1].expand_as(rows)), "what all workers have must not drift apart by a bit"
    wholes = {name: None if full is None else pieces[name].take(full) for name, full in gradients.items()}
    return max(error(found, truth), *(error(slices[name], wholes[name]) for name in wholes))


def automatic(team: Team) -> float:
    """bf16 autocast: the same within what bf16 can tell."""
    with torch.autocast("cpu", torch.bfloat16):
        return worst(team, CASES["language"])


def padded_evaluation(team: Team) -> float:
    """torch's encoder would take its fast path here, with half the weights."""
    layer = nn.TransformerEncoderLayer(C, H, 4 * C, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    hidden = torch.arange(T) >= torch.tensor([T, T - 2, T - 1])[:, None]
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        truth = model(numbers(*X), src_key_padding_mask=hidden)
        torch.backends.mha.set_fastpath_enabled(True)
        rules = find_rules(on_meta(model), (numbers(*X),), team.size)
        split(model, rules, team.rank)
        install(model, rules, team)
        found = model(numbers(*X), src_key_padding_mask=hidden)
    return max(error(found[row][: T - row], truth[row][: T - row]) for row in (0, 1))


def exchanged(team: Team) -> float:
    """Operators keep the team; its group can be another one."""
    group, team.group = team.group, Alone()
    alone = team.sum(torch.ones(2))
    team.group = group
    return error(team.sum(torch.ones(2)), alone * 2)


OTHER = numbers(4, 4, 8).cos()
OPERATORS: dict[str, Callable[[Tensor], Any]] = {  # of (4, 4, 8), any dimension cut
    "arithmetic": lambda x: 2 - x / 3 + 1 / (x + 9) + x**2 - 2**x + (x.detach() + 5) // 2 - x % 2 + abs(-x),
    "with the whole": lambda x: (OTHER - x) * OTHER[0] + x * OTHER[:1, :, :1] + OTHER[0, 0] + torch.tensor(2.0),
    "compared": lambda x: (x > 0.1).double() * x + (x == x) * 1.0 + (x.isnan() | ~(x <= OTHER)) * x,
    "where": lambda x: torch.where(x > OTHER, x, 0.0) + x.masked_fill(OTHER > 0, 2.0) + x.where(OTHER > 0, OTHER),
    "places": lambda x: torch.where(x > 0)[0].double(),
    "clamped": lambda x: x.clamp(min=-0.5).clamp_max(OTHER) + torch.maximum(x, OTHER) + torch.lerp(x, OTHER, 0.3),
    "activations": lambda x: F.leaky_relu(x, 0.2) + F.elu(x) + F.gelu(x, approximate="tanh") + F.softplus(x),
    "gated": lambda x: F.glu(x),
    "named": lambda x: F.softmax(input=x, dim=1) + F.relu(input=x) + torch.softmax(input=x, dim=-1),
    "softmax": lambda x: x.softmax(0) + F.log_softmax(x, 1) + x.log_softmax(-1).exp() + x.cumsum(1) + F.normalize(x),
    "norms": lambda x: F.layer_norm(x, (8,), OTHER[0, 0], OTHER[1, 1]) + F.rms_norm(x, (4, 8)),
    "sums": lambda x: x.sum() + x.mean(1, True) + x.sum((0, 2), keepdim=True) + x.mean() + x.mean(dim=-1, keepdim=True),
    "reductions": lambda x: x.amax(1) + x.logsumexp(dim=1) + x.max(1).values + x.std(1) + x.norm(dim=1) + x.prod(1),
    "largest": lambda x: torch.cat([x.argmax(dim).double().flatten() for dim in (0, 1, 2)]),
    "product": lambda x: x @ OTHER.mT + OTHER @ x.mT + torch.matmul(x, x.mT) + torch.bmm(x.mT, x)[:, :4, :4],
    "wide product": lambda x: x @ OTHER[0].T + (x[None] @ OTHER.mT).sum(0) + x.unsqueeze(1).matmul(OTHER.mT)[:, 0],
    "added product": lambda x: torch.baddbmm(OTHER[:, :, :4], x, x.mT, beta=0.5, alpha=2) + x @ x.mT,
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, OTHER) + torch.einsum("bij, cij -> bc", x, x)[:, :, None],
    "vector": lambda x: x @ OTHER[0, 0] + torch.linalg.norm(x),
    "halves": lambda x: (
        x.chunk(2, -1)[1] * x.split(4, dim=2)[0] + x[..., 4:] + x.narrow(2, 0, 4) + x.split([1, 7], 2)[0]
    ),
    "items": lambda x: x[1] + x[:, 2] + x[..., -1].unsqueeze(-1) + x[[0, 1, 2, 3], 1] + x[x[:, 0, 0].argsort()][0],
    "slices": lambda x: (
        torch.stack(x.unbind(1), 1)[:, ::2, 1:5] + torch.cat((x, OTHER), 1)[:, 3:5, :4] + x[:, None, 1, :4]
    ),
    "rows": lambda x: sum(row * (number + 1) for number, row in enumerate(x)),
    "masked": lambda x: (
        x[OTHER > 0].sum() + x.index_select(1, torch.tensor([2, 0])).sum() + x.gather(1, x.argsort(1))[0]
    ),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 4, 4, 2)) * 1j).flatten(2) + x,
    "shapes": lambda x: x.flatten().view(16, 8).T.mT.unflatten(0, (4, 4)) + x.reshape(2, -1).view_as(x),
    "types": lambda x: (
        x.float().to(torch.float64).type_as(OTHER).clone().contiguous() + torch.ones_like(x) * x.detach()
    ),
    "repeated": lambda x: (
        x.repeat(2, 1, 1) + x.repeat_interleave(2, 0) + F.pad(x, (0, 0, 0, 0, 4, 0)) + x.roll(1, 1)[0]
    ),
    "padded": lambda x: (
        torch.tril(x) + x.flip(0) + torch.flip(x, (1,)) + x.diff(dim=1, prepend=x[:, :1]) + x.roll(1, 2)
    ),
}
WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "added": lambda x: x.add_(OTHER).mul_(2).clamp_(-1, 1),
    "rows": lambda x: x.__setitem__((slice(None), 1), OTHER[:, 0]),
    "parts": lambda x: x.__setitem__((Ellipsis, slice(2, 5)), 7.0),
    "masked": lambda x: x.__setitem__(OTHER > 0, 0.5),
    "through a view": lambda x: x.transpose(0, 1)[1:3].masked_fill_(OTHER[1:3] > 0, 3.0),
    "strange": lambda x: x.index_fill_(2, torch.tensor([1, 6]), 0.5).cumsum_(0),
    "into the whole": lambda x: x.copy_(OTHER.clone().add_(x)),
    "activation": lambda x: F.relu(x, inplace=True),
}


def operators(team: Team) -> list[str]:
    """Each of them and its gradient, however the tensor is cut."""
    wrong = []
    writers = {
        f"{name}, written": lambda x, write=write: (y := x * 1, write(y), y)[2] for name, write in WRITERS.items()
    }
    for name, function in {**OPERATORS, **writers}.items():
        whole = numbers(4, 4, 8).requires_grad_()
        truth = function(whole)
        weights = numbers(*truth.shape).exp() if truth.dim() else torch.ones(())
        for cut, segments in ((0, 1), (0, 2), (1, 1), (2, 1), (2, 2), (2, 4)):
            piece = Piece({cut: slices(whole.shape[cut], team.size, team.rank, segments)})
            local = piece.take(whole).requires_grad_()
            try:
                found = gathered(function(Sliced(local, cut, team, segments)))
                wide = [error(found, truth)]
                if truth.requires_grad:
                    (truth_gradient,) = torch.autograd.grad((truth * weights).sum(), whole, retain_graph=True)
                    (gradient,) = torch.autograd.grad((found * weights).sum(), local)
                    wide.append(error(gradient, piece.take(truth_gradient)))
                if max(wide) > TOLERANCE:
                    wrong.append(f"{name}, cut {cut} in {segments}: {wide}")
            except Exception as problem:
                refused = "view was created inside a custom Function" in str(problem)
                what = "refused" if refused else repr(problem)[:300]
                wrong.append(f"{name}, cut {cut} in {segments}: {what}")
    return wrong


def everything(group: Group) -> dict[str, Any]:
    team = Team(group)
    checks: dict[str, Callable[[], float]] = {name: lambda of=of: worst(team, of) for name, of in CASES.items()}
    checks |= {f"{each.__name__}": lambda each=each: each(team) for each in (automatic, padded_evaluation, exchanged)}
    found: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception:  # so that the others are seen too
            found[name] = traceback.format_exc()[-1500:]
    found["operators"] = operators(team)
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """All cases on two workers, in one start of two processes."""
    return ranks(2, everything, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_is_the_whole_model(name: str, two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two):
        assert isinstance(found[name], float), f"rank {rank}: {found[name]}"
        assert found[name] < TOLERANCE


def test_an_operator_on_slices_is_the_operator_on_the_whole(two: list[dict[str, Any]]) -> None:
    for found in two:
        # What would be written into a copy is refused, by autograd.
        assert found["operators"] == ["through a view, written, cut 1 in 1: refused"]


@pytest.mark.parametrize(("name", "limit"), [("automatic", 0.05), ("padded_evaluation", 1e-9), ("exchanged", 1e-9)])
def test_also(name: str, limit: float, two: list[dict[str, Any]]) -> None:
    for found in two:
        assert isinstance(found[name], float), found[name]
        assert found[name] < limit


@pytest.mark.parametrize("name", CASES)
def test_rules_that_are_found(name: str) -> None:
    make, x, _, expected, wanted = CASES[name]
    assert dict(find_rules(on_meta(make()), (x(),), 2, wanted).modules) == expected


# -- shapes, without workers -----------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Any]] = {  # of (2, 12, 36, 12), any dimension cut; None: it must be gathered
    "heads": lambda x: x.view(2, 12, 12, 3, 12),
    "flat": lambda x: x.flatten(),
    "two": lambda x: x.flatten(1, 2),
    "first": lambda x: x.reshape(-1, 12),
    "back": lambda x: x.flatten(0, 2).view(2, 12, 36, 12),
    "unflatten": lambda x: x.unflatten(2, (12, -1)).unflatten(1, (-1, 1)),
    "permute": lambda x: x.permute(3, 1, 0, 2).transpose(0, -1).movedim(1, 2).swapaxes(0, 1),
    "matrix": lambda x: x.mT.unsqueeze(1).squeeze(),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1, -1).reshape(6, 12, 36, 12),
    "index": lambda x: x[1, ..., None],
    "row": lambda x: x.select(0, 1),
    "list": lambda x: x[[1, 0, 1]],
    "chunks": lambda x: x.chunk(2, 0)[1],
    "unbind": lambda x: x.unbind(0)[1],
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "repeat": lambda x: x.repeat_interleave(3, dim=2),
    "where": lambda x: torch.where(x > 0, x, torch.arange(12.0)),
    "sum": lambda x: x.sum(0),
    "keep": lambda x: x.amax(0, keepdim=True),
}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", VIEWS)
def test_slices_of_a_view_are_views_of_slices(name: str, size: int, segments: int) -> None:
    whole = torch.arange(2.0 * 12 * 36 * 12).view(2, 12, 36, 12).sin()
    expected = VIEWS[name](whole)
    local = 0
    for cut in (1, 2, 3):
        if whole.shape[cut] % (size * segments):
            continue
        parts = []
        for rank in range(size):
            team = DryTeam(size, rank)
            piece = Piece({cut: slices(whole.shape[cut], size, rank, segments)})
            found = VIEWS[name](Sliced(piece.take(whole), cut, team, segments))
            if not isinstance(found, Sliced):
                assert name in ("heads", "unflatten"), "only these have views that slices have not"
                break
            assert found.shape == expected.shape
            into = Piece({found.cut: slices(found.shape[found.cut], size, rank, found.segments)})
            parts.append((into, found.local))
        else:
            local += 1
            assert torch.equal(assemble(tuple(expected.shape), torch.float32, parts), expected)
    assert local > 0 or (name in ("heads", "unflatten") and size * segments == 9)


def slices(length: int, size: int, rank: int, segments: int) -> tuple[tuple[int, int], ...]:
    run, each = length // segments, length // segments // size
    return tuple((start + rank * each, start + (rank + 1) * each) for start in range(0, length, run))


@pytest.mark.parametrize(
    ("shape", "cut", "segments", "size", "target", "expected"),
    [
        ((2, 5, 8), 2, 1, 2, (2, 5, 4, 2), (2, 1)),  # heads
        ((2, 5, 24), 2, 3, 2, (2, 5, 3, 4, 2), (3, 1)),  # fused
        ((2, 4, 5, 2), 1, 1, 2, (8, 5, 2), (0, 2)),  # each sample's heads
        ((8, 5, 2), 0, 2, 2, (2, 4, 5, 2), (1, 1)),  # and back
        ((2, 5, 24), 2, 1, 2, (2, 5, 3, 8), None),  # three heads, two workers
        ((2, 5, 24), 2, 1, 3, (2, 5, 3, 8), (2, 1)),
        ((2, 5, 8), 2, 1, 2, (2, 40), (1, 5)),
        ((2, 5, 8), 2, 1, 4, (80,), (0, 10)),
    ],
)
def test_where_a_cut_is_after_a_view(
    shape: Any, cut: int, segments: int, size: int, target: Any, expected: Any
) -> None:
    assert relocated(shape, cut, segments, size, target) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_three_projections_in_one_are_cut_each(size: int) -> None:
    rules = find_rules(on_meta(LM()), (words(),), size, {"emb": "whole", "head": "whole"} if V % size else {})
    assert rules.modules["attn.c_attn"] == Rule("column", 3)
    rows = rules.piece("attn.c_attn.weight", (3 * C, C), 1).cuts[0]
    assert rows == tuple((start + C // size, start + 2 * C // size) for start in (0, C, 2 * C))
    assert rules.piece("attn.c_attn.bias", (3 * C,), 1).cuts[0] == rows
    assert rules.piece("mlp.fc2.weight", (C, 4 * C), 0).cuts == {1: ((0, 4 * C // size),)}
    assert rules.piece("mlp.fc2.bias", (C,), 0) is WHOLE
    assert rules.piece("norm.weight", (C,), 0) is WHOLE
    assert "attn.c_attn  column, 3 segments" in rules.lines()


def test_a_wish_for_a_column_does_not_forbid_its_segments() -> None:
    rules = find_rules(on_meta(Attention("flash")), numbers(*X), 2, {"c_*": "column"})
    assert dict(rules.modules) == {"c_attn": Rule("column", 3), "c_proj": COLUMN}


def test_three_workers_do_not_get_queries_keys_and_values() -> None:
    rules = find_rules(on_meta(Attention("vit", heads=3, width=12)), (numbers(B, T, 12),), 3)
    assert rules.modules["c_attn"] == Rule("column", 3)


def test_what_several_operators_read_is_copied_once() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    first = copy(x, DryTeam(2))
    assert first is copy(x, DryTeam(2)) and first is not x
    x.add_(torch.ones(3, requires_grad=True))
    assert copy(x, DryTeam(2)) is not first, "it is not the same value any more, and has another gradient"
    leaf = torch.ones(3, requires_grad=True)
    assert copy(leaf, DryTeam(2)) is not copy(leaf, DryTeam(2)), "it outlives the step"


def test_one_worker_splits_nothing() -> None:
    model = MLP()
    rules = find_rules(on_meta(model), (numbers(*X),), 1)
    install(model, rules, Team(Alone()))
    assert rules.modules == {} and "forward" not in vars(model.fc1)


def test_what_is_gathered_at_once_is_whole() -> None:
    model = nn.Sequential(linear(C, C), nn.LayerNorm(C), linear(C, 2 * C), nn.ReLU(), linear(2 * C, 4), linear(4, 3))
    assert dict(find_rules(on_meta(model), (numbers(*X),), 2).modules) == {"2": COLUMN, "4": ROW}
    stream = nn.Sequential(linear(C, C), nn.Dropout(0.1), MLP(), MLP())  # a residual stream that would be sliced
    pair = {"fc1": COLUMN, "fc2": ROW}
    expected = {f"{number}.{name}": rule for number in (2, 3) for name, rule in pair.items()}
    assert dict(find_rules(on_meta(stream), (numbers(*X),), 2).modules) == expected


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


def test_modules_that_do_more_than_their_kind_are_whole() -> None:
    lookup = nn.Sequential(nn.Embedding(V, C, max_norm=1.0), Own(C, C), weight_norm(linear(C, C)), nn.LayerNorm(C))
    assert find_rules(on_meta(lookup), words(), 2).modules == {}
    layer = nn.TransformerEncoderLayer(C, H, 4 * C, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(C, H, add_zero_attn=True, batch_first=True)
    assert dict(find_rules(on_meta(layer), numbers(*X).float(), 2).modules) == {"linear1": COLUMN, "linear2": ROW}


def test_weights_that_want_different_slices_are_whole() -> None:
    model = nn.Sequential(linear(C, C), nn.ReLU(), linear(C, C))
    model[2].weight = model[0].weight
    assert find_rules(on_meta(model), (numbers(*X),), 2).modules == {}
    with pytest.raises(JobError, match="also used by 2"):
        find_rules(on_meta(model), (numbers(*X),), 2, {"0": "column"})


def test_heads_that_do_not_divide_are_named() -> None:
    for model in (Attention("flash", heads=3, width=12), nn.TransformerEncoderLayer(12, 3, batch_first=True)):
        with pytest.raises(JobError, match="3 heads cannot be split over tensor=2"):
            find_rules(on_meta(model), (numbers(B, T, 12),), 2)
    assert find_rules(on_meta(Attention("flash", heads=3, width=12)), (numbers(B, T, 12),), 2, {"c_attn": "whole"})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"fc1": "colum"}, "'colum', which is not known; the nearest is 'column'"),
        ({"fc9": "row"}, r"'fc9' matches no module\n  fix: the nearest is 'fc[12]'"),
        ({"norm": "row"}, "norm is a LayerNorm\n  fix: it can be sequence, whole"),
        ({"fc1": "column:5"}, "fc1: out_features=32 cannot be split over tensor=2 in 5 segments"),
        ({"fc1": "vocab"}, "fc1 is a Linear"),
        ({"fc1": "column:x"}, "fix: column:3"),
    ],
)
def test_rules_that_are_wrong_are_told(wanted: dict[str, str], message: str) -> None:
    with pytest.raises(JobError) as told:
        find_rules(on_meta(MLP()), (numbers(*X),), 2, wanted)
    assert re.search(message, str(told.value))


def test_code_that_looks_at_data_is_named() -> None:
    def curious(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(JobError, match=r"cannot be followed without data.*(\n.*)+the model \(MLP\)\n.*test_tensor.py:"):
        find_rules(on_meta(MLP(curious)), (numbers(*X),), 2)
    found = find_rules(on_meta(MLP(curious)), (numbers(*X),), 2, {"fc1": "column", "fc2": "row"})
    assert dict(found.modules) == {"fc1": COLUMN, "fc2": ROW}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_a_function_that_would_lose_gradients_is_told() -> None:
    with pytest.raises(JobError, match="Twice is an autograd function"):
        find_rules(on_meta(MLP(Twice.apply)), (numbers(*X),), 2)
    rules = find_rules(on_meta(MLP(Twice.apply)), (numbers(*X),), 2, {"fc1": "whole"})
    assert dict(rules.modules) == {"fc2": COLUMN}
    assert Twice.apply(torch.ones(1)) == 2


def test_finding_leaves_model_and_generator_alone() -> None:
    model = on_meta(LM(p=0.5))
    state = torch.get_rng_state()
    find_rules(model, (words(),), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.head.weight is model.emb.weight  # type: ignore[union-attr]
