"""Backward in two halves, for schedules that put off the gradients of weights: first those that the stage before waits
for, later the rest. Torch's own code for it, where it gives all that a whole backward would.

It finds weights by the paths between a stage's inputs and its outputs; one that lies on none of them (a table that is
added to what came in) would get no gradient. Such a stage goes backward whole, at the moment of the first half.

Torch's pipelines take a second to import, so it is done where they are needed: in the driver, when it makes a schedule
with halves, and in workers for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class PendingWeightGrads:
    """What the second half begins with; None: there is nothing left to do."""

    param_groups: list[dict[str, Any]] | None


def backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[nn.Parameter],
) -> PendingWeightGrads:
    """Leaves the inputs' gradients in their `.grad`."""
    from torch.distributed.pipelining._backward import stage_backward_input

    given = None if gradients is None else list(gradients)
    wanted = [weight for weight in weights if weight.requires_grad]
    if not inputs or not _separable(outputs, inputs, wanted):
        torch.autograd.backward(list(outputs), given)
        return PendingWeightGrads(None)
    # A result that nothing led to has no gradient to give on.
    _, groups = stage_backward_input(list(outputs), given, list(inputs), iter(wanted))
    return PendingWeightGrads(groups)


def backward_of_weights(pending: PendingWeightGrads, weights: Sequence[nn.Parameter]) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    if pending.param_groups is not None:
        groups = [group for group in pending.param_groups if group.get("grads") is not None]
        stage_backward_weight(iter([weight for weight in weights if weight.requires_grad]), groups)


def _separable(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> bool:
    """Whether every weight that the outputs depend on lies beside a path from the inputs."""
    from torch.distributed.pipelining import _backward as torchs

    node_of = torchs._get_grad_fn_or_grad_acc
    nodes = {id(weight): node_of(weight) for weight in weights}
    roots = [node for node in map(node_of, outputs) if node is not None]
    edges = torchs.construct_reverse_graph(roots)
    reached = {node for node in nodes.values() if node is not None and edges.get(node)}
    groups = torchs.get_param_groups([node for node in map(node_of, inputs) if node is not None], list(reached), edges)
    covered = {node for group in groups for node in group["params"]}
    return reached <= covered
