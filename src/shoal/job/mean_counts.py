"""Over how many items a loss is a mean: seen where torch computes it.

The mean of lanes' means is the mean over all only if every lane has as many items. Padding, `ignore_index` and class
weights make that untrue, and the number is known only inside of the loss (a causal language model shifts its labels,
another does not). So the loss functions of torch are watched while the model or the loss runs.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.numerics.kernels import map_tensors

IGNORED_LABEL = -100  # the default of torch and of transformers


@dataclass(frozen=True)
class SeenMean:
    result: Tensor
    count: float


def _class_count(given: dict[str, Any]) -> float:
    """Of cross entropy: targets that are not ignored, each with the weight of its class."""
    scores, target, weight = given["input"], given["target"], given["weight"]
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() // scores.shape[1 if scores.dim() > 1 else 0])
    kept = target != given["ignore_index"]
    return float(kept.sum() if weight is None else weight.detach()[target[kept]].double().sum())


def _element_count(given: dict[str, Any]) -> float:
    return float(math.prod(torch.broadcast_shapes(given["input"].shape, given["target"].shape)))


COUNTED: dict[Any, Callable[[dict[str, Any]], float]] = {
    F.cross_entropy: _class_count,
    F.nll_loss: _class_count,
    F.mse_loss: _element_count,
    F.l1_loss: _element_count,
    F.smooth_l1_loss: _element_count,
    F.huber_loss: _element_count,
    F.binary_cross_entropy: _element_count,
    F.binary_cross_entropy_with_logits: _element_count,
}
SIGNATURES = {function: inspect.signature(function) for function in COUNTED}
MEANS = (torch.mean, Tensor.mean)
QUOTIENTS = (torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, Tensor.true_divide)


class MeanWatch(TorchFunctionMode):
    """Sees every mean that a loss function of torch makes while it is entered. `empty_is_zero`: the mean of nothing is
    0 instead of NaN, for a loss that is weighted by its count; otherwise watching changes no result."""

    def __init__(self, *, empty_is_zero: bool = False) -> None:
        super().__init__()
        self.empty_is_zero = empty_is_zero
        self.losses: list[SeenMean] = []
        self.other: list[SeenMean] = []  # x.mean(), and x / n where n is a tensor: they may be a loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COUNTED:
            return self._loss(func, args, kwargs)
        result = func(*args, **kwargs)
        if (func in MEANS or func in QUOTIENTS) and isinstance(result, Tensor) and result.dim() == 0:
            self._note_other(func, args, result)
        return result

    def _loss(self, function: Any, args: Any, kwargs: Any) -> Any:
        bound = SIGNATURES[function].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        legacy = given["size_average"] is not None or given["reduce"] is not None
        if given["reduction"] != "mean" or legacy or not _has_values(given["target"]):
            return function(*args, **kwargs)
        count = COUNTED[function](given)
        if count == 0 and self.empty_is_zero:  # it weighs nothing
            given["reduction"] = "sum"
            result = function(**given)
        else:
            result = function(*args, **kwargs)
        self.losses.append(SeenMean(result, count))
        return result

    def _note_other(self, function: Any, args: Any, result: Tensor) -> None:
        if function in MEANS:
            self.other.append(SeenMean(result, float(args[0].numel())))
        elif len(args) == 2 and isinstance(args[1], Tensor) and _is_number(args[1]):
            self.other.append(SeenMean(result, float(args[1])))

    def count(self) -> float | None:
        """Of the model's loss: the count that all losses seen agree on."""
        counts = {each.count for each in self.losses}
        return counts.pop() if len(counts) == 1 else None

    def count_of(self, loss: Any) -> float | None:
        """Of this very tensor, however it became a mean."""
        found = [each.count for each in (*self.losses, *self.other) if each.result is loss]
        return found[-1] if found else None


def _is_number(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and not tensor.requires_grad and _has_values(tensor)


def _has_values(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


UNEVEN_MEANS = (
    "the loss is a mean over a number of items that differs between lanes, so a token or element of a short lane counts"
    " for more than one of a long lane: return (sum, count) from the loss for the mean over the whole batch"
)


class LaneCounts:
    """Whether the means of this worker's microbatches are over equally many items a sample. Looks at the first few."""

    LOOKS = 16

    def __init__(self) -> None:
        self.left = self.LOOKS
        self.per_sample: set[float] = set()

    @property
    def looking(self) -> bool:
        return self.left > 0 and not self.uneven

    @property
    def uneven(self) -> bool:
        return len(self.per_sample) > 1

    def begin(self) -> None:
        """What comes now is compared with itself alone: a loop may have another loss in each step."""
        if not self.uneven:
            self.per_sample.clear()

    def add(self, count: float | None, samples: int) -> None:
        self.left -= 1
        if count is not None and samples:
            self.per_sample.add(count / samples)


def batch_length(batch: Any) -> int:
    """Samples of a batch: the first length that a tensor in it has; 0 without one."""
    found: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim():
            found.append(len(tensor))
        return tensor

    map_tensors(batch, look)
    return found[0] if found else 0


def labels_kept(batch: Any) -> float | None:
    """Labels of a batch by name that are not -100, which losses ignore by custom."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not _has_values(labels):
        return None
    return float((labels != IGNORED_LABEL).sum())
