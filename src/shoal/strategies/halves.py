"""Backward in two halves, for schedules that put off the gradients of weights: first those that the stage before waits
for, later the rest. Torch's own code for it, where it gives all that a whole backward would.

It finds weights by the paths between a stage's inputs and its outputs; one that lies on none of them (a table that is
added to what came in) would get no gradient. Such a stage goes backward whole, at the moment of the first half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward_input,
    stage_backward_weight,
)


@dataclass
class Halves:
    """What the second half begins with; None: there is nothing left to do."""

    groups: list[dict[str, Any]] | None


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> Halves:
    """Leaves the inputs' gradients in their `.grad`."""
    wanted = [weight for weight in weights if weight.requires_grad]
    if not inputs or not _separable(outputs, inputs, wanted):
        torch.autograd.backward(list(outputs), None if gradients is None else list(gradients))
        return Halves(None)
    # A result that nothing led to has no gradient to give on.
    _, groups = stage_backward_input(
        list(outputs), None if gradients is None else list(gradients), list(inputs), iter(wanted)
    )
    return Halves(groups)


def backward_of_weights(halves: Halves, weights: Sequence[nn.Parameter]) -> None:
    if halves.groups is not None:
        groups = [group for group in halves.groups if group.get("grads") is not None]
        stage_backward_weight(iter([weight for weight in weights if weight.requires_grad]), groups)


def _separable(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> bool:
    """Whether every weight that the outputs depend on lies beside a path from the inputs."""
    nodes = {id(weight): _get_grad_fn_or_grad_acc(weight) for weight in weights}
    roots = [node for node in map(_get_grad_fn_or_grad_acc, outputs) if node is not None]
    edges = construct_reverse_graph(roots)
    reached = {node for node in nodes.values() if node is not None and edges.get(node)}
    groups = get_param_groups(
        [node for node in map(_get_grad_fn_or_grad_acc, inputs) if node is not None], list(reached), edges
    )
    covered = {node for group in groups for node in group["params"]}
    return reached <= covered
