"""A job's loss of a model, in one call or in two halves: before and after the model's own forward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.job.job import Job


def split_sample(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """(inputs, target) of a batch. The last of a tuple is the target; anything else is input and target at once."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    return (batch,), batch


class Objective:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model = job, model

    def __call__(self, batch: Any) -> Any:
        with self.precision():
            return self.loss(self.model(*self.inputs(batch)), batch)

    def inputs(self, batch: Any) -> Sequence[Any]:
        found, _ = split_sample(batch)
        return tree_map(_to_bf16, found) if self.job.precision == "bf16-weights" else found

    def loss(self, output: Any, batch: Any) -> Any:
        return self.job.loss(self._to_fp32(output), split_sample(batch)[1])

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        output, target = self._to_fp32(output), split_sample(batch)[1]
        measures = {"loss": self.job.loss, **self.job.metrics}
        return {name: measure(output, target) for name, measure in measures.items()}

    def evaluation(self) -> Callable[[Any], dict[str, Any]]:
        """Returns a function that computes the loss and the job's metrics of a batch."""

        def closure(batch: Any) -> dict[str, Any]:
            with self.precision():
                return self.metrics(self.model(*self.inputs(batch)), batch)

        return closure

    def precision(self) -> Any:
        # Whether a cached cast of the weights is used would depend on what ran before (docs/exact.md, rule 12).
        autocast = self.job.precision == "bf16-autocast"
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False) if autocast else nullcontext()

    def _to_fp32(self, output: Any) -> Any:
        """Where the model computes in bf16, its loss is still computed in fp32."""
        return tree_map(_leaf_to_fp32, output) if self.job.precision == "bf16-weights" else output


def _to_bf16(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _leaf_to_fp32(leaf: Any) -> Any:
    return leaf.float() if getattr(leaf, "dtype", None) == torch.bfloat16 else leaf
