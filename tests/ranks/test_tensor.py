"""Tensor parallelism: with real processes."""

import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.tensor_cases import CASES, C, Case, H, Model, T, X, numbers, slices
from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.numerics.tensor_slice import TensorSlice
from shoal.parallel.tensor import ShardedTensor, TensorGroup, copy_to_meta, find_rules, gather_tree, install
from shoal.testing import ranks

TOLERANCE = 1e-9  # in double precision: what remains is the order of sums


def built(model: Model) -> nn.Module:
    torch.manual_seed(5)
    return model().double()


def passed(model: nn.Module, x: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(11)
    output = model(x)
    value = gather_tree(loss(output, x))
    value.backward()
    after = torch.rand(1).double()  # the generator is where one process would have left it
    row = torch.cat([gather_tree(output).detach().flatten(), value.detach().view(1), after])
    return row, {name: parameter.grad for name, parameter in model.named_parameters()}


def error(found: Tensor | None, truth: Tensor | None) -> float:
    if found is None or truth is None:
        return 0.0 if found is truth else math.inf
    if found.shape != truth.shape:
        return math.inf
    return float((found - truth).detach().norm() / truth.detach().norm().clamp_min(1e-30))


def split(model: nn.Module, rules: Any, rank: int) -> dict[str, TensorSlice]:
    """Leaves the model with one worker's slices."""
    pieces = {}
    for name, parameter in model.named_parameters():
        pieces[name] = rules.slice_of(name, tuple(parameter.shape), rank)
        parameter.data = pieces[name].extract(parameter)
    return pieces


def worst(team: TensorGroup, of: Case) -> float:
    make, x, loss, _, wanted = of
    truth, gradients = passed(built(make), x(), loss)
    model = built(make)
    rules = find_rules(copy_to_meta(model), (x(),), team.size, wanted)
    pieces = split(model, rules, team.rank)
    installed = install(model, rules, team)
    found, slices = passed(model, x(), loss)
    installed.remove()
    assert not any("forward" in vars(module) for module in model.modules())
    digests = [float(slices[name].sum()) for name in pieces if not pieces[name]]  # type: ignore[union-attr]
    rows = team.gather(torch.tensor([digests], dtype=torch.float64), 0) if digests else torch.zeros(1, 1)
    assert torch.equal(rows, rows[:1].expand_as(rows)), "what all workers have must not drift apart by a bit"
    wholes = {name: None if full is None else pieces[name].extract(full) for name, full in gradients.items()}
    return max(error(found, truth), *(error(slices[name], wholes[name]) for name in wholes))


def automatic(team: TensorGroup) -> float:
    """bf16 autocast: the same within what bf16 can tell."""
    with torch.autocast("cpu", torch.bfloat16):
        return worst(team, CASES["language"])


def padded_evaluation(team: TensorGroup) -> float:
    """torch's encoder would take its fast path here, with half the weights."""
    layer = nn.TransformerEncoderLayer(C, H, 4 * C, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    hidden = torch.arange(T) >= torch.tensor([T, T - 2, T - 1])[:, None]
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        truth = model(numbers(*X), src_key_padding_mask=hidden)
        torch.backends.mha.set_fastpath_enabled(True)
        rules = find_rules(copy_to_meta(model), (numbers(*X),), team.size)
        split(model, rules, team.rank)
        install(model, rules, team)
        found = model(numbers(*X), src_key_padding_mask=hidden)
    return max(error(found[row][: T - row], truth[row][: T - row]) for row in (0, 1))


def exchanged(team: TensorGroup) -> float:
    """Operators keep the team; its group can be another one."""
    group, team.group = team.group, SoloGroup()
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


def operators(team: TensorGroup) -> list[str]:
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
            piece = TensorSlice({cut: slices(whole.shape[cut], team.size, team.rank, segments)})
            local = piece.extract(whole).requires_grad_()
            try:
                found = gather_tree(function(ShardedTensor(local, cut, team, segments)))
                wide = [error(found, truth)]
                if truth.requires_grad:
                    (truth_gradient,) = torch.autograd.grad((truth * weights).sum(), whole, retain_graph=True)
                    (gradient,) = torch.autograd.grad((found * weights).sum(), local)
                    wide.append(error(gradient, piece.extract(truth_gradient)))
                if max(wide) > TOLERANCE:
                    wrong.append(f"{name}, cut {cut} in {segments}: {wide}")
            except Exception as problem:
                refused = "view was created inside a custom Function" in str(problem)
                what = "refused" if refused else repr(problem)[:300]
                wrong.append(f"{name}, cut {cut} in {segments}: {what}")
    return wrong


def everything(group: WorkerGroup) -> dict[str, Any]:
    team = TensorGroup(group)
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
