"""Live objects as plain tensors and JSON, and back: model, optimizer, scheduler, and what the user adds.

Capturing copies, since training continues while a snapshot is written; a caller that needs the tensors only until the
next step can have the live ones (`copy_tensor=plain_view`). Restoring checks everything it can before it changes
anything, and changes existing objects: build model, optimizer and scheduler first, as for a new run.

A worker may hold a shard of the model: the other tensors are on the meta device, and are neither captured nor restored.
`shapes` then has the shapes of the whole model's tensors, so that all workers describe the optimizer alike.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_sha256
from shoal.recovery.checkpoint.serialize import CopyTensor, decode, encode, plain_copy

ShapesByName = Mapping[str, tuple[int, ...]]
AVERAGE = "shoal_average"  # in the optimizer's state of a parameter: the moving average of its values

# ---- weights


def capture_weights(
    model: nn.Module, copy_tensor: CopyTensor = plain_copy, only: Container[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by name, and aliases: names that share the memory of another.

    `only`: the names that are captured.
    """
    live = _live_tensors(model)
    aliases = _live_aliases(live)
    mine = [name for name in live if name not in aliases and not live[name].is_meta and (only is None or name in only)]
    return {name: copy_tensor(live[name], name) for name in mine}, aliases


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that capture_weights captures of a whole model, in its order."""
    live = _live_tensors(model)
    aliases = _live_aliases(live)
    return {name: tuple(tensor.shape) for name, tensor in live.items() if name not in aliases}


def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    whole = _live_tensors(model)
    live = {name: tensor for name, tensor in whole.items() if not tensor.is_meta}
    targets = {name: aliases.get(name, name) for name in (*weights, *aliases) if name in live or name not in whole}
    stored = {name: weights[target] for name, target in targets.items() if target in weights}
    _check_names("tensors", stored, live)
    for name, tensor in live.items():
        _check_fits(name, stored[name], tensor)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)} & live.keys()
    live_aliases = _live_aliases(live)
    for name, target in aliases.items():
        # Untied weights get gradients of their own: another job. Buffers may separate (a move to a device does that).
        separate = live_aliases.get(name, name) != live_aliases.get(target, target)
        if separate and name in parameters and target in live:
            raise CheckpointError(f"{name} and {target} are one tensor in the checkpoint, two in the model")
    for name, target in live_aliases.items():
        if tensor_sha256(stored[name]) != tensor_sha256(stored[target]):
            raise CheckpointError(f"{name} and {target} are one tensor in the model, two that differ in the checkpoint")
    with torch.no_grad():
        for name, tensor in live.items():
            if name not in live_aliases:
                tensor.copy_(stored[name])


def _live_tensors(model: nn.Module) -> dict[str, Tensor]:
    live: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"module {prefix or type(module).__name__} keeps state of its own (get_extra_state)",
                fix="keep it in buffers, or pass the object as extra state",
            )
        transient = module._non_persistent_buffers_set
        own = {**module._parameters, **{name: b for name, b in module._buffers.items() if name not in transient}}
        for name, tensor in own.items():
            if tensor is not None:
                live[f"{prefix}.{name}" if prefix else name] = tensor
    for name, tensor in live.items():
        if is_lazy(tensor):
            raise CheckpointError(
                f"{name} has no shape yet (a lazy module)", fix="run one batch through the model first"
            )
    return live


def _live_aliases(live: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in live.items():
        # Empty tensors and those on meta have the address 0: there only the same object is the same tensor.
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        memory = place if tensor.numel() and not tensor.is_meta else id(tensor)
        target = first.setdefault(memory, name)
        if target != name:
            aliases[name] = target
    return aliases


# ---- optimizer


def capture_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    copy_tensor: CopyTensor = plain_copy,
    shapes: ShapesByName | None = None,
    only: Container[str] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the state, and JSON of the groups and of the state with references to the tensors.

    `names` maps id(parameter) to its name. `only`: the parameters whose state is captured.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _capture_optimizer(optimizer, names, tensors, copy_tensor, "optimizer", shapes, only)


def _capture_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: dict[str, Tensor],
    copy_tensor: CopyTensor,
    label: str,
    shapes: ShapesByName | None = None,
    only: Container[str] | None = None,
) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        parameters = []
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"{label}: parameter {position} of group {index}, {shape_text(parameter)}, is not in the model",
                    fix="give the optimizer parameters of the model only",
                )
            name = names[id(parameter)]
            parameters.append([name, list(_whole_shape(name, parameter, shapes))])
            if parameter in optimizer.state and not parameter.is_meta and (only is None or name in only):
                state[name] = encode(dict(optimizer.state[parameter]), name, tensors, copy_tensor)
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = encode(settings, f"{label}/param_groups/{index}", tensors, copy_tensor)
        groups.append({"parameters": parameters, "settings": encoded})
    common = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    return {
        "kind": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "common": encode(common, f"{label}/state", tensors, copy_tensor),
    }


def restore_optimizer(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    own: bool = False,
    shapes: ShapesByName | None = None,
) -> None:
    """Restores an optimizer, also one before its first step. See decode() for `own`.

    load_state_dict would cast fp32 state to the dtype of a bf16 parameter.
    """
    _check_kind("the optimizer", values["kind"], type(optimizer).__name__)
    _check_groups(optimizer, named, values["groups"], shapes)
    settings = [decode(group["settings"], tensors, own=own) for group in values["groups"]]
    held = {name: state for name, state in values["state"].items() if not (name in named and named[name].is_meta)}
    states = {name: decode(state, tensors, own=own) for name, state in held.items()}
    common = decode(values["common"], tensors, own=own)

    optimizer.state.clear()
    optimizer.state.update(common)
    for group, listed, stored in zip(optimizer.param_groups, values["groups"], settings, strict=True):
        for key, value in stored.items():
            group[key] = _update_in_place(group.get(key), value)
        step_on_host = not (group.get("capturable") or group.get("fused"))
        for name, _ in listed["parameters"]:
            if name in states:
                parameter = named[name]
                for key, value in states[name].items():
                    if isinstance(value, Tensor) and not (key == "step" and step_on_host):
                        states[name][key] = value.to(parameter.device)
                optimizer.state[parameter] = states[name]


def _whole_shape(name: str, parameter: Tensor, shapes: ShapesByName | None) -> tuple[int, ...]:
    return tuple(parameter.shape if shapes is None else shapes.get(name, parameter.shape))


def _check_groups(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    groups: list[dict[str, Any]],
    shapes: ShapesByName | None = None,
) -> None:
    live_groups = optimizer.param_groups
    if len(groups) != len(live_groups):
        raise CheckpointError(f"{len(groups)} parameter groups in the checkpoint, {len(live_groups)} in the optimizer")
    live_names = {id(parameter): name for name, parameter in named.items()}
    for index, (group, live) in enumerate(zip(groups, live_groups, strict=True)):
        parameters: list[nn.Parameter] = live["params"]
        if len(group["parameters"]) != len(parameters):
            raise CheckpointError(
                f"parameter group {index}: {len(group['parameters'])} parameters in the checkpoint, "
                f"{len(parameters)} in the optimizer"
            )
        for (name, shape), parameter in zip(group["parameters"], parameters, strict=True):
            if name not in named or named[name] is not parameter:
                found = live_names.get(id(parameter), "a parameter that is not in the model")
                raise CheckpointError(
                    f"parameter group {index}: {name} in the checkpoint, {found} at its place in the optimizer"
                )
            mine = _whole_shape(name, parameter, shapes)
            if tuple(shape) != mine:
                raise CheckpointError(f"{name}: {shape_text(shape)} in the checkpoint, {shape_text(mine)} in the model")


# ---- scheduler


def capture_scheduler(scheduler: Any) -> Any:
    return {"kind": _scheduler_kind(scheduler), "state": encode(scheduler.state_dict(), "scheduler")}


def restore_scheduler(scheduler: Any, value: Any) -> None:
    _check_kind("the scheduler", value["kind"], _scheduler_kind(scheduler))
    _load(scheduler, decode(value["state"], {}), "the scheduler")


def _scheduler_kind(scheduler: Any) -> str:
    """The class, with those of the schedulers inside it: SequentialLR(LinearLR, CosineAnnealingLR)."""
    name = type(scheduler).__name__
    inner = getattr(scheduler, "_schedulers", ())
    return f"{name}({', '.join(map(_scheduler_kind, inner))})" if inner else name


# ---- the user's own state


def capture_extra(state: Mapping[str, Any], copy_tensor: CopyTensor = plain_copy) -> tuple[dict[str, Tensor], Any]:
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, item in state.items():
        kind = _extra_kind(name, item)
        if kind == "optimizer":
            held = _capture_optimizer(item, _numbered_names(item, name)[0], tensors, copy_tensor, name)
        else:
            held = encode(item.state_dict() if kind == "object" else item, name, tensors, copy_tensor)
        values[name] = {"kind": kind, "type": type(item).__name__, "state": held}
    return tensors, values


def restore_extra(state: Mapping[str, Any], tensors: Mapping[str, Tensor], values: Any, *, own: bool = False) -> None:
    _check_names("extra state", values, state)
    decoded: dict[str, Any] = {}
    for name, item in state.items():
        kind = _extra_kind(name, item)
        _check_kind(f"extra state {name!r}", values[name]["type"], type(item).__name__)
        if kind == "optimizer":
            _check_groups(item, _numbered_names(item, name)[1], values[name]["state"]["groups"])
        else:
            decoded[name] = decode(values[name]["state"], tensors, own=own)
        if kind == "tensor":
            _check_fits(name, decoded[name], item)
    for name, item in state.items():
        kind = values[name]["kind"]
        if kind == "optimizer":
            restore_optimizer(item, _numbered_names(item, name)[1], tensors, values[name]["state"], own=own)
        elif kind == "object":
            _load(item, decoded[name], f"extra state {name!r}")
        else:
            _update_in_place(item, decoded[name])


def _extra_kind(name: str, item: Any) -> str:
    if isinstance(item, Optimizer):  # its load_state_dict loses bits
        return "optimizer"
    if callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
        return "object"
    if isinstance(item, Tensor):
        return "tensor"
    if type(item) in (dict, list, OrderedDict, Counter):
        return "value"
    raise CheckpointError(
        f"extra state {name!r} is a {type(item).__name__}, which cannot be put back in place",
        fix="pass a tensor, a dict or list that holds the value, or an object with state_dict and load_state_dict",
    )


def _numbered_names(optimizer: Optimizer, label: str) -> tuple[dict[int, str], dict[str, nn.Parameter]]:
    """Names for an optimizer whose parameters belong to no known model."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = {f"{label}/{number}": parameter for number, parameter in enumerate(parameters)}
    return {id(parameter): name for name, parameter in named.items()}, named


# ---- checks and helpers


def _update_in_place(live: Any, stored: Any) -> Any:
    """Puts `stored` into the live object if that can be changed in place, since other code may refer to it."""
    if isinstance(live, Tensor) and isinstance(stored, Tensor):
        if live.shape != stored.shape or live.dtype != stored.dtype:
            return stored
        with torch.no_grad():
            return live.copy_(stored)
    if isinstance(live, dict) and type(live) is type(stored):
        items = {key: _update_in_place(live.get(key), value) for key, value in stored.items()}
        live.clear()
        live.update(items)
        return live
    if isinstance(live, list) and type(live) is type(stored):
        live[:] = [_update_in_place(live[i] if i < len(live) else None, value) for i, value in enumerate(stored)]
        return live
    return stored


def _load(target: Any, state: Any, label: str) -> None:
    try:
        target.load_state_dict(state)
    except Exception as error:  # of the user's code or torch's: the state did not fit
        raise CheckpointError(f"{label} did not take its state: {type(error).__name__}: {error}") from error


def _check_kind(what: str, stored: str, live: str) -> None:
    if stored != live:
        raise CheckpointError(f"{what} is a {stored} in the checkpoint, a {live} in the job")


def _check_names(what: str, stored: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    missing, unknown = [n for n in live if n not in stored], [n for n in stored if n not in live]
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint holds other {what} than the job",
            where=[
                f"{len(names)} only in the {side}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
                for side, names in (("job", missing), ("checkpoint", unknown))
                if names
            ],
        )


def _check_fits(name: str, stored: Tensor, live: Tensor) -> None:
    if stored.shape != live.shape or stored.dtype != live.dtype:
        then, now = (f"{shape_text(each)} {each.dtype}" for each in (stored, live))
        raise CheckpointError(f"{name}: {then} in the checkpoint, {now} in the model")


def shape_text(tensor: Any) -> str:
    """4×3, for a tensor or its shape."""
    return "×".join(map(str, getattr(tensor, "shape", tensor))) or "scalar"
