"""Converts the optimizer's state between the servers, which hold rows of it, and the whole form of a checkpoint.

In local mode the servers' optimizer is the outer one; the job's own is the inner one, which every worker has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.parallel.server_step import DensePacker
from shoal.paramserver.dense_table import to_plain_value, with_types_of
from shoal.paramserver.messages import TableStateReply
from shoal.paramserver.sync_mode import SyncMode

ShardState = tuple[TableStateReply, Sequence[Tensor]]  # of one shard's rows
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo


def outer_optimizer(sync_mode: SyncMode, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer whose gradient is the mean movement of the workers."""
    if sync_mode.outer == "nesterov":
        return torch.optim.SGD(named, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    return torch.optim.SGD(named, lr=1.0)


def settings_of(optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """The groups' settings and the scheduler's state, as plain values."""
    groups = [
        {key: to_plain_value(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return {"groups": groups, "scheduler": None if scheduler is None else to_plain_value(scheduler.state_dict())}


def restore_settings(optimizer: Optimizer, scheduler: Any, values: Mapping[str, Any]) -> None:
    for group, stored in zip(optimizer.param_groups, values["groups"], strict=False):
        for key, value in stored.items():
            group[key] = with_types_of(group.get(key), value)
    if scheduler is not None and values["scheduler"] is not None:
        scheduler.load_state_dict(with_types_of(scheduler.state_dict(), values["scheduler"]))


def gather_state(
    optimizer: Optimizer, scheduler: Any, named: Mapping[str, Tensor], table: DensePacker, states: Sequence[ShardState]
) -> None:
    """Puts the state of all shards into an optimizer of the whole model."""
    optimizer.state.clear()
    for shard, (found, tensors) in enumerate(states):
        rows = {each.name: each for each in table.shard_slices[shard]}
        for label, tensor in zip(found.names, tensors, strict=True):
            name, _, field = label.partition("\t")
            state, parameter = optimizer.state[named[name]], named[name]
            if field not in state:
                state[field] = torch.zeros(parameter.shape, dtype=tensor.dtype)
            if parameter.dim() == 0:
                state[field].copy_(tensor)
            else:
                state[field][rows[name].start : rows[name].stop] = tensor
        for label, (value, dtype) in found.values["steps"].items():
            name, _, field = label.partition("\t")
            optimizer.state[named[name]][field] = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
        restore_settings(optimizer, scheduler, found.values)


def slice_state(
    optimizer: Optimizer, scheduler: Any, named: Mapping[str, nn.Parameter], table: DensePacker, shard: int
) -> tuple[TableStateReply, list[Tensor]]:
    """A shard's rows of an optimizer's state."""
    names: list[str] = []
    tensors: list[Tensor] = []
    steps: dict[str, list[Any]] = {}
    for rows in table.shard_slices[shard]:
        parameter = named[rows.name]
        for field, value in optimizer.state.get(parameter, {}).items():
            label = f"{rows.name}\t{field}"
            if isinstance(value, Tensor) and value.shape == parameter.shape and field != "step":
                names.append(label)
                tensors.append(value.detach() if value.dim() == 0 else value.detach()[rows.start : rows.stop])
            elif isinstance(value, Tensor):
                steps[label] = [value.tolist(), str(value.dtype).removeprefix("torch.")]
            else:
                steps[label] = [value, ""]
    return TableStateReply(names, settings_of(optimizer, scheduler) | {"steps": steps}), tensors
