"""Optimizers by name: torch's own for dense tensors, and the same arithmetic on single rows for sparse tables.

    name           dense          rows                          state of a row
    sgd            SGD            p - lr g                      nothing
    momentum       SGD            lazy                          dim
    adam, adamw    Adam, AdamW    lazy, a step count per row    2 dim + 1
    adagrad        Adagrad        the same as dense             dim
    row_adagrad    -              one sum for the whole row     1

A row kernel repeats torch's loop over tensors operation by operation, so a row that is updated in every step has
torch's bits. Lazy: a row without a gradient does not change. Dense momentum would still move it, and dense Adam would
decay its averages; here averages stay, bias correction counts the row's own steps, and weight decay applies to updated
rows only. Sgd and Adagrad without weight decay never change a row without a gradient: there lazy and dense agree.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import InputError

Settings = Mapping[str, float | bool]

# name -> its settings with torch's defaults
DEFAULTS: dict[str, dict[str, float | bool]] = {
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
    "momentum": {"lr": 1e-3, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "initial": 0.0, "weight_decay": 0.0},
    "row_adagrad": {"lr": 1e-2, "eps": 1e-10, "initial": 0.0},
}
DENSE_NAMES = tuple(name for name in DEFAULTS if name != "row_adagrad")
SPARSE_NAMES = tuple(DEFAULTS)


def check_settings(name: str, settings: Settings, names: Sequence[str] = SPARSE_NAMES) -> dict[str, float | bool]:
    """Checks the given settings and adds defaults for the rest."""
    if name not in names:
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        raise InputError(
            f"{name} is for sparse tables only" if name in SPARSE_NAMES else f"there is no optimizer {name!r}",
            fix=f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}",
        )
    defaults = DEFAULTS[name]
    for key, value in settings.items():
        if key not in defaults:
            raise InputError(f"{name} has no setting {key!r}", fix=_nearest_setting(name, key))
        _check_value(name, key, value)
    return {**defaults, **settings}


def _nearest_setting(name: str, key: str) -> str:
    if name == "sgd" and key in DEFAULTS["momentum"]:
        return "the optimizer momentum has it"
    near = get_close_matches(key, DEFAULTS[name], n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(DEFAULTS[name])}"


def _check_value(name: str, key: str, value: float | bool) -> None:
    if isinstance(DEFAULTS[name][key], bool):
        if not isinstance(value, bool):
            raise InputError(f"{name}: {key} is True or False, and got {value!r}", fix=f"{key}=True")
        return
    below_one = key in ("beta1", "beta2", "momentum")
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good or (below_one and value >= 1):
        wanted = "from 0 up to, not including, 1" if below_one else "a number from 0 on"
        raise InputError(f"{name}: {key} is {wanted}, and got {value!r}", fix=f"{key}={DEFAULTS[name][key]}")


def make_optimizer(name: str, settings: Settings, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Makes torch's optimizer, for dense tensors."""
    from torch import optim

    known = check_settings(name, settings, DENSE_NAMES)
    lr, decay = known["lr"], known["weight_decay"]
    parameters = list(named)
    if name == "sgd":
        return optim.SGD(parameters, lr=lr, weight_decay=decay)
    if name == "momentum":
        momentum, nesterov = known["momentum"], bool(known["nesterov"])
        return optim.SGD(parameters, lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    if name == "adagrad":
        initial, eps = known["initial"], known["eps"]
        return optim.Adagrad(parameters, lr=lr, weight_decay=decay, initial_accumulator_value=initial, eps=eps)
    kind = optim.Adam if name == "adam" else optim.AdamW
    return kind(parameters, lr=lr, weight_decay=decay, betas=(known["beta1"], known["beta2"]), eps=known["eps"])


def bare_step(optimizer: Optimizer) -> Callable[[], None]:
    """The optimizer's step without torch's wrappers for profilers and hooks, which take half of a small step's time. An
    optimizer of `make_optimizer` has no hooks."""
    step = unwrap(type(optimizer).step)

    def call() -> None:
        with torch.no_grad():
            step(optimizer)

    return call


@dataclass(frozen=True)
class RowStateField:
    """State of each row."""

    width: int = 0  # numbers; 0: as many as the row has
    initial: float = 0.0
    is_count: bool = False  # an integer


@dataclass(frozen=True)
class RowKernel:
    """`update(values, gradient, *state)` changes rows and their state in place, and may change the gradient. Rows are
    contiguous, one for each row of the gradient."""

    fields: dict[str, RowStateField]
    update: Callable[..., None]


def row_kernel(name: str, settings: Settings) -> RowKernel:
    known = {key: float(value) for key, value in check_settings(name, settings).items()}
    return _KERNELS[name](**known)


def _decayed(gradient: Tensor, values: Tensor, weight_decay: float) -> Tensor:
    return gradient.add(values, alpha=weight_decay) if weight_decay else gradient


def _sgd(lr: float, weight_decay: float) -> RowKernel:
    def update(values: Tensor, gradient: Tensor) -> None:
        values.add_(_decayed(gradient, values, weight_decay), alpha=-lr)

    return RowKernel({}, update)


def _momentum(lr: float, momentum: float, nesterov: float, weight_decay: float) -> RowKernel:
    def update(values: Tensor, gradient: Tensor, buffer: Tensor) -> None:
        gradient = _decayed(gradient, values, weight_decay)
        buffer.mul_(momentum).add_(gradient, alpha=1)
        values.add_(gradient.add(buffer, alpha=momentum) if nesterov else buffer, alpha=-lr)

    return RowKernel({"momentum_buffer": RowStateField()}, update)


def _adagrad(lr: float, eps: float, initial: float, weight_decay: float) -> RowKernel:
    def update(values: Tensor, gradient: Tensor, total: Tensor) -> None:
        gradient = _decayed(gradient, values, weight_decay)
        total.addcmul_(gradient, gradient, value=1)
        values.addcdiv_(gradient, total.sqrt().add_(eps), value=-lr)

    return RowKernel({"sum": RowStateField(initial=initial)}, update)


def _row_adagrad(lr: float, eps: float, initial: float) -> RowKernel:
    def update(values: Tensor, gradient: Tensor, total: Tensor) -> None:
        total.add_(_sum_of_rows(gradient * gradient), alpha=1 / gradient.shape[1])
        values.addcdiv_(gradient, total.sqrt().add_(eps), value=-lr)

    return RowKernel({"sum": RowStateField(width=1, initial=initial)}, update)


def _sum_of_rows(rows: Tensor) -> Tensor:
    """Adds by halves, in place: a row's sum does not depend on the other rows of its batch."""
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half].add_(rows[:, half:width])
        width = half
    return rows[:, :1]


def _adam(*, decoupled: bool) -> Callable[..., RowKernel]:
    def make(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> RowKernel:
        corrections = _BiasCorrections(lr, beta1, beta2)

        def update(values: Tensor, gradient: Tensor, steps: Tensor, average: Tensor, square: Tensor) -> None:
            steps.add_(1)
            if weight_decay and decoupled:
                values.mul_(1 - lr * weight_decay)
            else:
                gradient = _decayed(gradient, values, weight_decay)
            average.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            size, root = corrections(steps, values.dtype)
            values.add_((average * size).div_(square.sqrt().div_(root).add_(eps)))

        step, average = RowStateField(width=1, is_count=True), RowStateField()
        return RowKernel({"step": step, "exp_avg": average, "exp_avg_sq": average}, update)

    return make


class _BiasCorrections:
    """Adam's factors by number of steps: -lr / (1 - beta1 ^ n), and the root of 1 - beta2 ^ n. Computed one by one in
    double precision, as torch does, and cached."""

    def __init__(self, lr: float, beta1: float, beta2: float) -> None:
        self._lr, self._betas = lr, (beta1, beta2)
        slowest = max(beta1, beta2)
        self._last = math.ceil(math.log(1e-17) / math.log(slowest)) if slowest else 1  # from here on both are constant
        self._table = torch.zeros(1, 2, dtype=torch.float64)

    def __call__(self, steps: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The two factors as columns, for a column of steps."""
        steps = steps.view(-1).clamp(max=self._last)
        most = int(steps.max())
        if most >= len(self._table):
            more = [self._at(float(step)) for step in range(len(self._table), most + 1 + most // 4)]
            self._table = torch.cat([self._table, torch.tensor(more, dtype=torch.float64).view(-1, 2)])
        found = self._table.index_select(0, steps).to(dtype)
        return found[:, :1], found[:, 1:]

    def _at(self, step: float) -> tuple[float, float]:
        first, second = (1 - beta**step for beta in self._betas)
        return -(self._lr / first), second**0.5


_KERNELS: dict[str, Callable[..., RowKernel]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adam": _adam(decoupled=False),
    "adamw": _adam(decoupled=True),
    "adagrad": _adagrad,
    "row_adagrad": _row_adagrad,
}
