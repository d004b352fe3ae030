"""A job's loss of a model, in one call or in two halves: before and after the model's own forward."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import ShoalError
from shoal.job.job import Job
from shoal.job.mean_counts import LaneCounts, MeanWatch, batch_length, labels_kept
from shoal.job.model_call import ModelCall, loss_of, model_call, target_of


class Objective:
    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model = job, model
        self.model_has_loss = job.loss == "model"
        self.closures: dict[str, Callable[[Any], Any]] = {"": self}  # of each backward pass; one has no name
        self.lane_counts = LaneCounts()
        self._local = threading.local()  # lanes may be computed by turns, each on a thread

    def __call__(self, batch: Any) -> Any:
        with self.forward_pass():
            return self.loss(self._run_model(batch), batch)

    def _run_model(self, batch: Any) -> Any:
        call = self.inputs(batch)
        try:
            return self.model(*call.args, **call.kwargs)
        except ShoalError:
            raise
        except Exception as error:
            # Of a model made of torch's own modules no line is the user's: this says what it was called with.
            error.add_note(f"the model ({type(self.model).__name__}) was called with {call}")
            if isinstance(batch, Mapping) and call.args:
                names = ", ".join(map(repr, batch))
                error.add_note(f"its forward takes none of {names} by name, and so it got the batch as it is")
            raise

    def inputs(self, batch: Any) -> ModelCall:
        """What the model is called with."""
        found = model_call(self.model, batch, model_has_loss=self.model_has_loss)
        return tree_map(_to_bf16, found) if self.job.precision == "bf16-weights" else found

    def loss(self, output: Any, batch: Any) -> Any:
        """A scalar mean, or (sum, count)."""
        output = self._to_fp32(output)
        if self.model_has_loss:
            return self._loss_of_model(output, batch)
        target = target_of(batch, model_has_loss=False)
        if not self.lane_counts.looking or not torch.is_grad_enabled():
            return self._call_loss(output, target)
        with MeanWatch() as watch:
            found = self._call_loss(output, target)
        self.lane_counts.add(watch.count_of(found), batch_length(batch))
        return found

    def _call_loss(self, output: Any, target: Any) -> Any:
        assert callable(self.job.loss)
        try:
            return self.job.loss(output, target)
        except ShoalError:
            raise
        except Exception as error:
            # Of a loss of torch's own no line is the user's: this says what it was called with.
            name = getattr(self.job.loss, "__name__", type(self.job.loss).__name__)
            second = "batch" if isinstance(target, Mapping) else "target"
            shown = ModelCall((output, target), {})
            error.add_note(f"the loss ({name}) was called with (output, {second}): {shown}")
            raise

    def _loss_of_model(self, output: Any, batch: Any) -> Any:
        """With the number of items that it is a mean over, where that is seen: a lane with more of them counts for
        more."""
        found = loss_of(output)
        watch: MeanWatch | None = getattr(self._local, "watch", None)
        if watch is None or isinstance(found, tuple):
            return found
        count = watch.count()
        if count is not None:
            return found * count, count
        if self.lane_counts.looking and torch.is_grad_enabled():
            seen = watch.count_of(found)
            self.lane_counts.add(labels_kept(batch) if seen is None else seen, batch_length(batch))
        return found

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        output, target = self._to_fp32(output), target_of(batch, model_has_loss=self.model_has_loss)
        found = {name: measure(output, target) for name, measure in self.job.metrics.items()}
        return {"loss": self.loss(output, batch), **found}

    def evaluation(self) -> Callable[[Any], dict[str, Any]]:
        """Returns a function that computes the loss and the job's metrics of a batch."""

        def closure(batch: Any) -> dict[str, Any]:
            with self.forward_pass():
                return self.metrics(self._run_model(batch), batch)

        return closure

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Every kernel of forward runs in it, and the loss."""
        # Whether a cached cast of the weights is used would depend on what ran before (docs/exact.md, rule 12).
        dtype = torch.float16 if self.job.precision == "fp16-autocast" else torch.bfloat16
        cast = torch.autocast("cpu", dtype=dtype, cache_enabled=False) if self.job.autocast else nullcontext()
        self._local.watch = watch = MeanWatch(empty_is_zero=True) if self.model_has_loss else None
        try:
            with cast, watch or nullcontext():
                yield
        finally:
            self._local.watch = None

    def _to_fp32(self, output: Any) -> Any:
        """Where the model computes in bf16, its loss is still computed in fp32."""
        return tree_map(_leaf_to_fp32, output) if self.job.precision == "bf16-weights" else output


def _to_bf16(leaf: Any) -> Any:
    return leaf.bfloat16() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _leaf_to_fp32(leaf: Any) -> Any:
    return leaf.float() if getattr(leaf, "dtype", None) == torch.bfloat16 else leaf
