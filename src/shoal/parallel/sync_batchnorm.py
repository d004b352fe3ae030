"""Batch norm with the statistics of the whole global batch, combined in the tree's order: the same bits on any number
of workers (docs/exact.md rule 15). In the style of torch's `SyncBatchNorm.convert_sync_batchnorm`.

Each lane finds count, mean and squared deviations of its samples in fp64; two neighbours in the tree are combined
stably (Chan, Golub and LeVeque); what a lane does with the result depends on nothing else. Backward needs two sums over
the batch, which are added in the tree in the same way.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from shoal.errors import JobError
from shoal.parallel.lane_threads import LaneThread, Meeting, current_lane

NO_MEETING = "batch norm over the whole batch (sync_batchnorm) needs every lane on one worker, whole"
NO_MEETING_FIX = "replicas: --workers N, or a layout of data=N; or batch norm by lane (sync_batchnorm=False)"
LOW_PRECISION = (torch.bfloat16, torch.float16)


class SyncedBatchNorm(_BatchNorm):
    """In training under Shoal: over all lanes. Otherwise an ordinary batch norm."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm expects at least 2 dimensions (got {input.dim()})")

    def forward(self, input: Tensor) -> Tensor:
        lane = current_lane()
        uses_batch = self.training or self.running_mean is None
        if lane is None or not uses_batch:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.no_grad():
            total = lane.meet(Meeting(self, "forward", moments(input)))
            count, mean, deviations = total[0], total[1 : 1 + self.num_features], total[1 + self.num_features :]
            if count <= 1:
                raise ValueError("batch norm expects more than 1 value per channel when training")
            if self.training:
                self._update(count, mean, deviations)
            scale = torch.rsqrt(deviations / count + self.eps)
        parts = (self.weight, self.bias, mean, scale, count)
        return _Normalize.apply(input, *parts, lane, self)  # type: ignore[no-any-return, no-untyped-call]

    def _update(self, count: Tensor, mean: Tensor, deviations: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if factor is None else factor
        for kept, new in ((self.running_mean, mean), (self.running_var, deviations / (count - 1))):
            kept.copy_(kept.double() * (1 - (factor or 0.0)) + new * (factor or 0.0))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, count: Tensor, lane: Any, norm: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.lane, ctx.norm = lane, norm
        found = _standardized(x, mean, scale)
        if weight is not None:
            found = found * _by_channel(weight, found)
        if bias is not None:
            found = found + _by_channel(bias, found)
        return found.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        lane: LaneThread = ctx.lane
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        x_hat = _standardized(x, mean, scale)
        sums = torch.cat([_channel_sums(grad), _channel_sums(grad.double() * x_hat)])
        own_bias, own_weight = sums.chunk(2)
        grad_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            total = lane.meet(Meeting(ctx.norm, "backward", sums))
            by_bias, by_weight = (each / count for each in total.chunk(2))
            factor = scale if weight is None else scale * weight.double()
            centred = grad - _by_channel(by_bias, grad) - x_hat * _by_channel(by_weight, grad)
            grad_x = (centred * _by_channel(factor, grad)).to(x.dtype)
        dtype = grad.dtype if weight is None else weight.dtype
        parts = (own_weight if ctx.needs_input_grad[1] else None, own_bias if ctx.needs_input_grad[2] else None)
        return grad_x, *(None if part is None else part.to(dtype) for part in parts), None, None, None, None, None


def moments(x: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations, by channel, as one row in fp64."""
    wide = x.detach().double()
    count = x.numel() // x.shape[1]
    variance, mean = torch.var_mean(wide, dim=_others(x), correction=0)
    return torch.cat([torch.tensor([float(count)], dtype=torch.float64), mean, variance * count])


def combine_moments(left: Tensor, right: Tensor) -> Tensor:
    """Of two sets of samples, those of both together."""
    channels = (len(left) - 1) // 2
    (a, mean_a, squares_a), (b, mean_b, squares_b) = (each.split([1, channels, channels]) for each in (left, right))
    count, gap = a + b, mean_b - mean_a
    return torch.cat([count, mean_a + gap * (b / count), squares_a + squares_b + gap * gap * (a * b / count)])


def _others(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _channel_sums(x: Tensor) -> Tensor:
    return x.double().sum(dim=_others(x))


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _standardized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    wide = x.float() if x.dtype in LOW_PRECISION else x
    return (wide - _by_channel(mean, wide)) * _by_channel(scale, wide)


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """The model with every batch norm replaced by one over the whole global batch. Parameters and buffers stay the
    same objects; a model that is a batch norm itself is returned as a new module."""
    made: dict[nn.Module, SyncedBatchNorm] = {}  # one that is used in two places stays one
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and _is_plain(child):
                made[child] = made.get(child) or _converted(child)
                setattr(module, name, made[child])
    return _converted(model) if _is_plain(model) else model


def _is_plain(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncedBatchNorm)


def _converted(norm: _BatchNorm) -> SyncedBatchNorm:
    if isinstance(norm, LazyModuleMixin) and norm.has_uninitialized_params():
        raise JobError(f"a {type(norm).__name__} has no size yet", fix="run the model once before it is converted")
    found = SyncedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    found._parameters, found._buffers, found.training = norm._parameters, norm._buffers, norm.training
    return found


def synced_norms(model: nn.Module) -> list[SyncedBatchNorm]:
    return [each for each in model.modules() if isinstance(each, SyncedBatchNorm)]
