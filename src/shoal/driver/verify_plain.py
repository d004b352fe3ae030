"""`shoal verify --against plain`: Shoal and an ordinary PyTorch loop on the same samples and weights, in fp64."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shoal.driver.launch import train_opened
from shoal.driver.make_plan import open_job
from shoal.driver.verify import runs_folder
from shoal.errors import InputError
from shoal.job.freeze import active_patterns, is_frozen
from shoal.job.job import Job
from shoal.job.model_call import loss_of, model_call, target_of
from shoal.numerics import kernels
from shoal.numerics.kernels import map_tensors
from shoal.numerics.seeds import preserve_generators
from shoal.parallel.sync_batchnorm import synced_norms
from shoal.recovery.checkpoint.export import load_weights
from shoal.worker.build_model import build_model
from shoal.worker.job_optimizer import build_optimizers, build_scheduler
from shoal.worker.job_setup import OpenJob
from shoal.worker.run_config import RunConfig

PLAIN_TOLERANCE = 1e-8  # norm of the difference over the norm of the weights, in fp64


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    steps: int
    difference: float  # norm of the difference over the norm of the weights
    worst: str
    worst_difference: float  # norm of this tensor's difference over the norm of the weights
    batch_norm: str = "frozen"

    @property
    def good(self) -> bool:
        return self.difference <= PLAIN_TOLERANCE

    @property
    def hint(self) -> str:
        """What is most often the reason where it is more than rounding."""
        if self.good:
            return ""
        return (
            "the usual reason: the loss is a mean over something that lanes hold different numbers of (tokens, boxes),"
            ' and lanes are weighted by samples; return (sum, count) from the loss, or loss="model" for a model that'
            " returns its own; or the model sees padding, which a collate_fn adds up to the longest sample of a lane,"
            " not of the batch: mask it, or pad to one length"
        )


def against_plain(job: Job, workers: int, steps: int, *, name: str) -> PlainResult:
    """Shoal and an ordinary loop on the same samples and initial weights, in fp64, dropout off, batch norm frozen."""
    base = job.unwatched().changed(steps=steps, precision="fp32", loss_scale=None, compile=False)
    opened = open_job(base)
    _refuse_drawing_losses(base, opened)
    source = replace(opened.source, fetch=_to_fp64(opened.source.fetch))
    calm = replace(opened, job=base.changed(model=lambda: _deterministic_model(base)), source=source)
    with runs_folder() as root:
        folder = root / "run"
        config = RunConfig().changed(workers=workers, run_dir=folder, quiet=True, elastic=False, predict=False)
        train_opened(calm, config, name=name)
        weights, _ = load_weights(folder / "model.safetensors")
    kernels.configure(threads=job.threads)
    plain = dict(_plain_loop(base, calm, steps).named_parameters())
    gaps = {key: (plain[key].detach() - weights[key]).norm().item() for key in plain}
    sizes = {key: plain[key].detach().norm().item() for key in plain}
    batch_norm = "over the whole batch" if job.sync_batchnorm else "frozen"
    return plain_result(gaps, sizes, steps=steps, batch_norm=batch_norm)


def plain_result(gaps: dict[str, float], sizes: dict[str, float], *, steps: int, batch_norm: str) -> PlainResult:
    """`gaps`, `sizes`: norms of each tensor's difference, and of itself. The worst tensor is the one with the largest
    part of the difference: one that is zero but for rounding, such as the bias of a key, would be far off by its own
    measure in any run."""
    norm = sum(size**2 for size in sizes.values()) ** 0.5 or 1.0
    total = sum(gap**2 for gap in gaps.values()) ** 0.5 / norm
    worst = max(gaps, key=gaps.__getitem__)
    share = gaps[worst] / norm
    return PlainResult(steps=steps, difference=total, worst=worst, worst_difference=share, batch_norm=batch_norm)


def _deterministic_model(job: Job) -> nn.Module:
    """The model in fp64 and evaluation mode: no dropout, and batch statistics only where they are of the whole batch;
    gradients are computed."""
    model = copy.deepcopy(build_model(job)).double().eval()
    for norm in synced_norms(model):
        norm.train()
    forward = model.forward

    @functools.wraps(forward)
    def in_fp64(*args: Any, **kwargs: Any) -> Any:
        with _NoFp32():
            return forward(*args, **kwargs)

    model.forward = in_fp64
    return model


class _NoFp32(TorchFunctionMode):
    """What a model casts to fp32 (language models: their logits) stays in fp64: else the casts would be compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def _to_fp64(fetch: Callable[..., Any]) -> Callable[..., Any]:
    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return lambda indices, epoch: map_tensors(fetch(indices, epoch), double)


def _plain_loop(job: Job, opened: OpenJob, steps: int) -> nn.Module:
    """An ordinary loop on one machine. Only the order of samples and the initial weights come from Shoal."""
    schedule = job.schedule(opened.source.samples, opened.source.last)
    model = _deterministic_model(job)
    optimizers = build_optimizers(job, model, list(model.named_parameters()))
    scheduler = build_scheduler(job, optimizers)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for step in range(steps):
        if job.freeze is not None:
            _freeze(model, trained, active_patterns(job.freeze, step))
        epoch, within = schedule.position(step)
        order = opened.source.order(epoch)
        batch = opened.source.fetch(order[schedule.slice_of(epoch, within)], epoch)
        for name, optimizer in optimizers.items():
            _plain_update(job, model, optimizer, _plain_loss(job, model, name, batch))
        if scheduler is not None:
            scheduler.step()
    return model


def _plain_loss(job: Job, model: nn.Module, name: str, batch: Any) -> Any:
    """`name`: of the backward pass."""
    if isinstance(job.loss, Mapping):
        return job.loss[name](model, batch)
    inputs = model_call(model, batch, model_has_loss=job.loss == "model")
    output = model(*inputs.args, **inputs.kwargs)
    return job.loss(output, target_of(batch, model_has_loss=False)) if callable(job.loss) else loss_of(output)


def _plain_update(job: Job, model: nn.Module, optimizer: Optimizer, loss: Any) -> None:
    if isinstance(loss, tuple):
        loss = loss[0] / loss[1]
    model.zero_grad()
    loss.backward()
    if job.clip_norm is not None:
        trained = [each for group in optimizer.param_groups for each in group["params"]] if job.passes else None
        nn.utils.clip_grad_norm_(model.parameters() if trained is None else trained, job.clip_norm)
    optimizer.step()


def _refuse_drawing_losses(job: Job, opened: OpenJob) -> None:
    """The model's own noise is turned off for the comparison; that of a loss by name cannot be."""
    if not job.passes:
        return
    model = copy.deepcopy(build_model(job)).eval()
    batch = opened.source.fetch(opened.source.order(0)[: job.batch_size], 0)
    with preserve_generators(), torch.no_grad():
        for name in job.passes:
            before = torch.default_generator.get_state()
            _plain_loss(job, model, name, batch)
            if not torch.equal(before, torch.default_generator.get_state()):
                raise InputError(
                    f"--against plain: loss[{name!r}] draws random numbers, and a plain loop would draw others",
                    fix="leave --against out: verify compares placements all the same",
                )


def _freeze(model: nn.Module, trained: set[str], patterns: Sequence[str]) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and not is_frozen(patterns, names[id(parameter)]))
