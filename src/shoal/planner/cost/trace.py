"""Measures a model's work, operator by operator, in one pass over shapes: nothing is allocated.

    forward    every operator with its FLOPs, the bytes that it reads and writes, and the segment in which it ran
    saved      what autograd keeps for backward: each storage once, in the segment that kept it first
    backward   every operator again; autograd's sequence numbers give the operator of forward that it belongs to
    alive      when each storage was made and freed, and so the most that is alive at once

A segment is a block and what the model's code did since the block before, as in a pipeline's row. Views are left out.
Tensors are fake: they hold nothing and report the CPU as their device, so torch takes the code paths of the CPU.
"""

import copy
import logging
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import JobError
from shoal.numerics.user_frames import user_line
from shoal.parallel.blocks import BlockList
from shoal.planner.cost.op_recorder import PRODUCTS, OpRecorder, RecordedOp, TensorCut
from shoal.planner.cost.workload import Block, Op

ONE_TO_ONE = ("add", "add_", "_to_copy", "copy_", "clone", "mul", "mul_", "div")
MAX_ERROR_LETTERS = 160  # of an error that is quoted

__all__ = ["TensorCut", "TracedModel", "fake_batch", "fake_copy", "fake_mode", "needs_values", "trace"]


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    blocks: tuple[Block, ...]
    tied: float  # parameters that are counted in more than one block
    dtype: str  # of most matrix products, by its name in Device.peak
    notes: tuple[str, ...] = ()  # sentences about what the trace had to assume


# -- tensors without memory -------------------------------------------------------------------------------------------


def fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """A copy with fake tensors; tied parameters stay tied. `model` may be on meta."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = fake(value, mode)
    return copy.deepcopy(model, memo)


def fake_batch(batch: Any, mode: Any) -> Any:
    return tree_map(lambda leaf: fake(leaf, mode) if isinstance(leaf, Tensor) else leaf, batch)


def fake(tensor: Tensor, mode: Any) -> Tensor:
    with mode:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(found, requires_grad=tensor.requires_grad)
        return found.requires_grad_() if tensor.requires_grad and tensor.is_leaf else found


# -- one pass ---------------------------------------------------------------------------------------------------------


def trace(
    model: nn.Module, blocks: BlockList, loss: Callable[[], Tensor], *, inputs: Any = (), cut: TensorCut | None = None
) -> TracedModel:
    """Traces `loss()`, which calls the model with `inputs` and returns the loss. Model and inputs are fake, in an
    active fake mode, or real if they are small."""
    recorder = OpRecorder(model, cut or TensorCut())
    recorder.inputs(inputs)
    notes: list[str] = []
    with recorder.recording(model, blocks), _quiet():
        try:
            with (
                torch.enable_grad(),
                recorder,
                torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda packed: packed),
            ):
                found = loss()
        except JobError:
            raise
        except Exception as error:
            raise _refused(error, model) from error
        recorder.forward_ends()
        forward = len(recorder.ops)
        try:
            with recorder:
                found.backward()
        except Exception as error:
            notes.append(f"backward cannot be traced, and counts as twice forward: {_error_text(error)}")
            del recorder.ops[forward:]
            recorder.ops += [replace(each, backward=True) for each in recorder.ops for _ in range(2)]
        del found
    dtype = "bf16" if any(each.itemsize == 2 for each, _ in recorder.dtypes.most_common(1)) else "fp32"
    traced, sizes = _blocks(recorder), {each: named[0][1].numel() for each, named in recorder.parameters.items()}
    tied = float(sum((len(users) - 1) * sizes[number] for number, users in recorder.users.items()))
    return TracedModel(blocks=traced, tied=tied, dtype=dtype, notes=tuple(notes))


def needs_values(error: BaseException) -> bool:
    """Whether the error comes from reading the values of a tensor without memory."""
    from torch._subclasses import fake_tensor

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )
    words = ("faketensor", "fake tensor", "meta tensor", "meta device")
    return isinstance(error, kinds) or any(word in str(error).lower() for word in words)


def _refused(error: Exception, model: nn.Module) -> JobError:
    where = [*_module_of(error, model), *user_line(error)]
    if not needs_values(error):  # an error with any input
        return JobError(f"the model fails: {_error_text(error)}", where=where)
    return JobError(
        f"the model cannot be traced: it needs values, not only shapes: {_error_text(error)}",
        where=where,
        fix="a forward whose steps and shapes follow from the shapes of its inputs (torch.where for a choice by value)",
    )


def _module_of(error: Exception, model: nn.Module) -> list[str]:
    """The innermost module whose forward raised the error."""
    names = {module: name for name, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [each for each in owners if isinstance(each, nn.Module) and names.get(each)]
    return [f"in {names[inside[-1]]} ({type(inside[-1]).__name__})"] if inside else []


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's log of a traceback that is raised here anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _error_text(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    text = text if len(text) <= MAX_ERROR_LETTERS else text[:MAX_ERROR_LETTERS].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {text}"


# -- summary ----------------------------------------------------------------------------------------------------------


def _blocks(recorder: OpRecorder) -> tuple[Block, ...]:
    """Blocks in order; equal blocks are one object."""
    for number, named in recorder.parameters.items():
        owners = (at for at, name in enumerate(recorder.names) if named[0][0].startswith(f"{name}."))
        recorder.users.setdefault(number, {next(owners, 0)})  # nothing uses it
    gradients = recorder.gradients()
    fixed = _fixed(recorder, gradients)
    core = _core(recorder)
    working, crossing = _working(recorder, gradients), _crossing(recorder)
    equal: dict[Block, list[str]] = {}  # block without digits in its name -> names
    order: list[Block] = []
    inputs = sum(each.size for each in recorder.storages if each.kind == "input" and each.used >= 0)
    for segment, name in enumerate(recorder.names):
        entering = crossing[segment - 1] if segment else float(inputs)
        block = _block(recorder, segment, fixed, core)
        block = replace(block, working=working[segment], output=crossing[segment], saved_input=entering)
        key = replace(block, name=re.sub(r"\d+", "*", name))
        equal.setdefault(key, []).append(name)
        order.append(key)
    found = {key: replace(key, name=_one_name(key.name, names)) for key, names in equal.items()}
    return tuple(found[key] for key in order)


def _one_name(pattern: str, names: Sequence[str]) -> str:
    """`layers.1–3` for layers.1, layers.2 and layers.3."""
    if len(names) == 1 or pattern.count("*") != 1:
        return names[0] if len(names) == 1 else pattern
    numbers = [int(number) for name in names for number in re.findall(r"\d+", name)]
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    return pattern.replace("*", f"{numbers[0]}–{numbers[-1]}" if consecutive else ",".join(map(str, numbers)))


def _block(recorder: OpRecorder, segment: int, fixed: set[int], core: set[int]) -> Block:
    ops = Counter(
        _op(each, fixed, number in core) for number, each in enumerate(recorder.ops) if each.segment == segment
    )
    own = [recorder.parameters[number][0] for number, users in recorder.users.items() if segment in users]
    nodes = {each.node for number, each in enumerate(recorder.ops) if number in core and not each.backward}
    kept = [
        (recorder.storages[number].size, number, each)
        for number, each in recorder.saved.items()
        if each.segment == segment
    ]
    sums = [size for place, size in recorder.all_reduces if place == segment]
    return Block(
        name=recorder.names[segment],
        ops=tuple(op._replace(times=float(times)) for op, times in ops.items()),
        parameters=float(sum(each.numel() for _, each in own)),
        sliced=float(sum(each.numel() for known, each in own if known in recorder.cut.parameters)),
        tensors=len(own),
        saved=float(sum(size for size, _, _ in kept)),
        saved_sliced=float(sum(size for size, _, each in kept if each.sliced)),
        saved_core=float(sum(size for size, _, each in kept if each.sliced and each.node in nodes)),
        saved_fixed=float(sum(size for size, number, _ in kept if number in fixed)),
        reduced=sum(sums) / len(sums) if sums else 0.0,
        reductions=len(sums) / 2,
    )


def _op(done: RecordedOp, fixed: set[int], core: bool) -> Op:
    moved = [*done.reads, *done.writes]
    return Op(
        name=done.name,
        flops=done.flops,
        bytes=float(sum(size for _, size in moved)),
        fixed=float(sum(size for number, size in moved if number in fixed)),
        backward=done.backward,
        sliced=done.sliced,
        core=core,
    )


def _fixed(recorder: OpRecorder, gradients: set[int]) -> set[int]:
    """Storages whose size does not depend on the number of samples: parameters, buffers, tensors made of them alone
    (weights in another dtype), gradients, and tensors that become gradients one to one."""
    fixed = recorder.fixed | gradients
    for done in reversed(recorder.ops):
        if done.backward and done.name in ONE_TO_ONE and all(number in fixed for number, _ in done.writes):
            fixed |= {number for number, _ in done.reads}
    return fixed


def _core(recorder: OpRecorder) -> set[int]:
    """Indices of the operators of attention's core: from the product before a softmax to the product after it, or one
    fused operator."""
    found: set[int] = set()
    for place, done in enumerate(recorder.ops):
        if not done.core:
            continue
        found.add(place)
        if "softmax" in done.name:
            for step in (-1, 1):
                near = [at for at in range(place + step, place + step * 12, step) if 0 <= at < len(recorder.ops)]
                stop = next((at for at in near if _is_product(recorder.ops[at], done)), None)
                found |= set() if stop is None else set(range(min(place, stop), max(place, stop) + 1))
    return found


def _is_product(other: RecordedOp, softmax: RecordedOp) -> bool:
    return other.name in PRODUCTS and (other.segment, other.backward) == (softmax.segment, softmax.backward)


def _working(recorder: OpRecorder, gradients: set[int]) -> list[float]:
    """By segment: the most that is alive while it runs, besides what it and earlier segments have saved."""
    change: Counter[int] = Counter()
    for number, storage in enumerate(recorder.storages):
        held = storage.kind in ("parameter", "buffer") or number in gradients
        if not held and (storage.kind != "input" or number in recorder.saved):
            change[storage.born] += storage.size
            change[(recorder.clock if storage.died is None else storage.died) + 1] -= storage.size
    saved = [0.0] * len(recorder.names)
    for number, kept in recorder.saved.items():
        saved[kept.segment] += recorder.storages[number].size
    most, alive, clock = [0.0] * len(saved), 0, -1
    for done in recorder.ops:
        for now in range(clock + 1, done.clock + 1):
            alive += change[now]
        clock = max(clock, done.clock)
        most[done.segment] = max(most[done.segment], alive - sum(saved[: done.segment + 1]))
    return most


def _crossing(recorder: OpRecorder) -> list[float]:
    """By segment: bytes of it and earlier segments that later segments need."""
    found = [0.0] * len(recorder.names)
    for storage in recorder.storages:
        if not storage.kind:
            for segment in range(storage.segment, storage.used):
                found[segment] += storage.size
    return found
