"""What is done at the border between whole and sliced tensors, each with its backward.

copy      whole  ─► the same      for operators whose workers each make a part of its gradient: these are summed
total     parts  ─► their sum     the gradient of a sum is everybody's
gather    slices ─► whole         the gradient is cut
cut       whole  ─► slices        the gradient is gathered
scatter   parts  ─► slices of their sum        (sequence)
collect   slices ─► whole, for operators whose workers each make a part of its gradient   (sequence)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.numerics.tensor_slice import evenly
from shoal.parallel.tensor.group import Team

# A whole tensor that several operators read (queries, keys and values) is copied once: its gradients are added first,
# and travel once. Kept on the tensor, with the version it was made of.
_COPIED = "_shoal_copied"


def narrowed(whole: Tensor, dim: int, team: Team, segments: int = 1) -> Tensor:
    """This worker's slice; a view where it can be one."""
    ((_, ranges),) = evenly(whole.shape, dim, team.size, team.rank, segments).cuts.items()
    parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if segments == 1 else torch.cat(parts, dim)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.sum(gradient), None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, team: Team) -> Tensor:
        return team.sum(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, segments: int, team: Team) -> Tensor:
        ctx.dim, ctx.segments, ctx.team = dim, segments, team
        found = team.gather(local, dim, segments)
        # Of a view that a function made autograd allows no writing: it would be lost with this copy of the slices.
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return narrowed(gradient, ctx.dim, ctx.team, ctx.segments), None, None, None


class _Cut(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, segments: int, team: Team) -> Tensor:
        ctx.dim, ctx.segments, ctx.team = dim, segments, team
        return narrowed(whole, dim, team, segments).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.gather(gradient, ctx.dim, ctx.segments), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, team: Team) -> Tensor:
        ctx.dim, ctx.team = dim, team
        return team.scatter_sum(part, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.gather(gradient, ctx.dim), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, team: Team) -> Tensor:
        ctx.dim, ctx.team = dim, team
        return team.gather(local, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.team.scatter_sum(gradient, ctx.dim), None, None


def _applied(function: Any, *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)
    return found


def _wants_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def copy(whole: Tensor, team: Team) -> Tensor:
    if team.size == 1 or not _wants_gradient(whole):
        return whole
    if whole.is_leaf:  # lives longer than a step, and may be given other memory
        return _applied(_Copy, whole, team)
    version, copied = getattr(whole, _COPIED, (None, whole))
    if version != whole._version:
        copied = _applied(_Copy, whole, team)
        setattr(whole, _COPIED, (whole._version, copied))
    return copied


def total(part: Tensor, team: Team) -> Tensor:
    return part if team.size == 1 else _applied(_Total, part, team)


def gather(local: Tensor, dim: int, team: Team, segments: int = 1) -> Tensor:
    return local if team.size == 1 else _applied(_Gather, local, dim, segments, team)


def cut(whole: Tensor, dim: int, team: Team, segments: int = 1) -> Tensor:
    if team.size == 1:
        return whole
    if not _wants_gradient(whole):
        return narrowed(whole, dim, team, segments)
    return _applied(_Cut, whole, dim, segments, team)


def scatter(part: Tensor, dim: int, team: Team) -> Tensor:
    return part if team.size == 1 else _applied(_Scatter, part, dim, team)


def collect(local: Tensor, dim: int, team: Team) -> Tensor:
    return local if team.size == 1 else _applied(_Collect, local, dim, team)
