"""A model as a row of blocks with whatever its code does between them: what a pipeline cuts.

    forward     h = self.token(x) + self.place(n)   for layer in self.layers: h = layer(h)   self.head(self.norm(h))
    the row     [token] [place] [+, layers.0] [layers.1] … [norm] [head]

The model runs once on meta tensors (shapes without values) and every operation outside of blocks is written down with
what went in and came out; a block is one operation. A segment is a block and what was done since the block before. The
record holds for inputs of the same shapes in the same mode; another shape is recorded again, which takes milliseconds.
Played back on real tensors it is the same sequence of operations as the model's own code, so it has the same bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_map, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import JobError
from shoal.numerics.lanes import Span
from shoal.numerics.user_frames import user_line
from shoal.parallel.blocks import ROOT, BlockList

MAX_ERROR_CHARS = 160  # letters of an error that is quoted
TYPE_OF = (Tensor.dtype.__get__,)  # type: ignore[attr-defined]
NUMBER_OF: dict[Any, Callable[[int], Any]] = {
    Tensor.item: int, Tensor.__int__: int, Tensor.__float__: float, Tensor.__bool__: bool
}  # fmt: skip
META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class ValueRef:
    """A tensor that some operation made, by number; inputs of the model come first."""

    number: int


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer that the model's own code uses outside of any block."""

    name: str


@dataclass(frozen=True)
class GraphOperation:
    call: Callable[..., Any] | str  # a function; or the name of a block
    arguments: Any  # (args, kwargs) with Value and Held in the places of tensors
    results: tuple[int | None, ...]  # numbers of the tensors among the leaves of what it returns
    shapes: tuple[tuple[int, ...], ...] = ()  # of what a block returns: later steps were recorded for these

    @cached_property
    def is_plain(self) -> bool:
        """No argument is a list, a dict or the like: each can be looked at for itself."""
        args, kwargs = self.arguments
        return all(tree_is_leaf(argument) for argument in (*args, *kwargs.values()))


@dataclass(frozen=True, kw_only=True)
class BlockSegment:
    """A block, and what the model's code did since the one before."""

    block: str
    operations: tuple[GraphOperation, ...]
    flops: float
    elements: int  # of what it made: a measure for work that is no matrix product


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    segments: tuple[BlockSegment, ...]
    inputs: int  # tensors among the model's inputs: values 0, 1, …
    output: Any  # what the model returns, with Values
    inseparable: tuple[Span, ...] = ()  # segments that must stay together, from the first to the last of them
    names: Mapping[int, str] = field(default_factory=dict)  # what made a value, for messages
    _boundary_values: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def costs(self) -> list[float]:
        """Work by segment: matrix products, and something for every number that is written."""
        return [segment.flops + 16.0 * segment.elements for segment in self.segments]

    def boundary_values(self, cut: int) -> tuple[int, ...]:
        """The values that segments from `cut` on need of those before. Inputs of the model are not among them: every
        stage can fetch those itself."""
        if cut not in self._boundary_values:  # asked for with every microbatch
            made = {number for segment in self.segments[:cut] for number in _made(segment)}
            used = {number for segment in self.segments[cut:] for number in _used(segment)} | set(_values(self.output))
            self._boundary_values[cut] = tuple(sorted(made & used))
        return self._boundary_values[cut]

    def tensors_used(self, span: Span) -> set[str]:
        """Parameters and buffers that the model's own code uses there."""
        operations = [each for segment in self.segments[slice(*span)] for each in segment.operations]
        leaves = [leaf for each in operations for leaf in tree_flatten(each.arguments)[0]]
        return {leaf.name for leaf in leaves if isinstance(leaf, TensorRef)}


def run_segments(
    graph: BlockGraph,
    span: Span,
    values: dict[int, Tensor],
    *,
    module: Callable[[str], nn.Module],
    tensor: Callable[[str], Tensor],
    device: torch.device = CPU,
) -> Any:
    """Runs a span of the row. `values` has what it needs by number and gets what it makes. Returns the model's output
    if the span is the last, else None."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            return values[leaf.number]
        if isinstance(leaf, TensorRef):
            return tensor(leaf.name)
        return device if isinstance(leaf, torch.device) and leaf == META else leaf

    for segment in graph.segments[slice(*span)]:
        for each in segment.operations:
            args, kwargs = each.arguments
            if each.is_plain:
                args, kwargs = [real(leaf) for leaf in args], {name: real(leaf) for name, leaf in kwargs.items()}
            else:
                args, kwargs = tree_map(real, each.arguments)
            call = module(each.call) if isinstance(each.call, str) else each.call
            result = call(*args, **kwargs)
            leaves = [result] if isinstance(result, Tensor) else tree_flatten(result)[0]
            if isinstance(each.call, str):
                _check_shapes(each, leaves)
            for number, leaf in zip(each.results, leaves, strict=True):
                if number is not None:
                    values[number] = leaf
    return tree_map(real, graph.output) if span[1] == len(graph.segments) else None


def _check_shapes(block: GraphOperation, leaves: Sequence[Any]) -> None:
    found = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
    if found != block.shapes:
        raise JobError(
            f"the model cannot be cut: what block {block.call} returns has the shapes {_listed(found)} and by the"
            f" shapes of its inputs should have {_listed(block.shapes)}, so they depend on values",
            fix="shapes that follow from the shapes of inputs (padding, with a mask); or a layout without pipeline",
        )


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join("×".join(map(str, shape)) or "scalar" for shape in shapes) or "none"


def record_graph(model: nn.Module, blocks: BlockList, inputs: Any, *, autocast: bool = False) -> BlockGraph:
    """Records a model, whose tensors may be real or on meta, for inputs (args, kwargs) like these. `autocast`: it will
    be played under it, which meta tensors know nothing of."""
    args, kwargs = tree_map(_to_meta, tuple(inputs))
    return _GraphRecorder(model, blocks, autocast).record(args, kwargs)


def check_blocks(graph: BlockGraph, blocks: Sequence[str], when: str) -> None:
    found = [segment.block for segment in graph.segments]
    if found != list(blocks):
        first = next((one for one, other in zip(found, blocks, strict=False) if one != other), "the end")
        raise JobError(
            f"{when} the model calls {len(found)} blocks, and it is cut for {len(blocks)}; they part at {first}",
            fix="a forward that calls the same blocks in the same order for every batch; or a layout without pipeline",
        )


def _to_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device=META) if isinstance(leaf, Tensor) else leaf


def _keeps_meta(value: Any, depth: int = 4) -> bool:
    """Whether an object holds tensors on meta, however deep."""
    if isinstance(value, Tensor):
        return value.is_meta
    if depth == 0 or isinstance(value, nn.Module | type):
        return False
    inside = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, list | tuple | set | dict):
        inside += value.values() if isinstance(value, dict) else value
    return any(_keeps_meta(item, depth - 1) for item in inside)


def _values(tree: Any) -> Iterable[int]:
    return (leaf.number for leaf in tree_flatten(tree)[0] if isinstance(leaf, ValueRef))


def _made(segment: BlockSegment) -> set[int]:
    return {number for each in segment.operations for number in each.results if number is not None}


def _used(segment: BlockSegment) -> set[int]:
    return {number for each in segment.operations for number in _values(each.arguments)}


class _GraphRecorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, blocks: BlockList, autocast: bool) -> None:
        super().__init__()
        self.model, self.blocks, self.autocast = model, blocks, autocast
        self.numbers: dict[int, int] = {}  # id of a tensor -> its number
        self.kept: list[Any] = []  # tensors stay while their ids are in use
        self.names: dict[int, str] = {}
        self.operations: list[GraphOperation] = []
        self.segments: list[BlockSegment] = []
        self.block_depth = 0
        self.elements = 0  # elements
        self.module_stack: list[str] = []  # the modules that are being called
        self.meta_tensors: dict[str, Tensor] = {}  # the model's tensors on meta, by name
        self.tensor_names: dict[int, str] = {}
        self.tensor_ids: dict[str, int] = {}  # what a name is the name of: tied weights have several

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockGraph:
        for kind in (self.model.named_parameters, self.model.named_buffers):
            for name, tensor in kind(remove_duplicate=False):
                shadow = torch.empty_like(tensor, device=META).requires_grad_(tensor.requires_grad)
                self.meta_tensors[name] = shadow
                self.tensor_names[id(shadow)] = name
                self.tensor_ids[name] = id(tensor)
                self.kept.append(shadow)
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        for leaf in leaves:
            self._number(leaf, "an input of the model")
        self.inputs = len(leaves)
        hooks = []
        for name, module in self.model.named_modules():
            if name not in self.blocks.names:
                hooks.append(module.register_forward_pre_hook(self._enter(name, 0), prepend=True))
                hooks.append(module.register_forward_hook(self._pass()))
        for name in self.blocks.names:
            module = self.model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(self._enter(name, 1), prepend=True))
            hooks.append(module.register_forward_hook(self._leave(name), with_kwargs=True, always_call=False))
        self.counter = FlopCounterMode(display=False)
        self.flops_counted = 0.0
        try:
            with self.counter, torch.device(META), self:
                output = torch.func.functional_call(self.model, self.meta_tensors, args, kwargs, tie_weights=False)
        except JobError:
            raise
        except Exception as error:
            raise self._refused(error) from error
        finally:
            for hook in hooks:
                hook.remove()
        self._check_replaced()
        if not self.segments:
            raise JobError(
                "the model's code calls none of its blocks, so there is nothing to cut between",
                fix="blocks=[names of modules that forward calls one after the other]",
            )
        if self.operations:  # what follows the last block belongs to it
            last = self.segments[-1]
            self.segments[-1] = BlockSegment(
                block=last.block,
                operations=last.operations + tuple(self.operations),
                flops=last.flops + self._flops(),
                elements=last.elements + self.elements,
            )
        return BlockGraph(
            segments=tuple(self.segments),
            inputs=len(leaves),
            output=self._described(output),
            inseparable=self._inseparable(),
            names=self.names,
        )

    def _refused(self, error: Exception) -> JobError:
        called = [name for name in self.module_stack if name != ROOT]
        done = f"after block {self.segments[-1].block}" if self.segments else "before its first block"
        place = f"in {called[-1]}" if called else f"in the model's own forward, {done},"
        text = str(error).split("\n")[0]
        text = text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS].rsplit(" ", 1)[0] + " …"
        if "meta" not in text.lower():  # a mistake that any input would show
            what = f"{place.removesuffix(',')}: {type(error).__name__}: {text}"
            return JobError(f"the model fails {what}", where=user_line(error))
        return JobError(
            f"the model cannot be cut: {place} it does what needs values, not only shapes:"
            f" {type(error).__name__}: {text}",
            where=user_line(error),
            fix="a forward whose steps and shapes follow from the shapes of its inputs (torch.where for a choice by"
            " value); or a layout without pipeline and tensor",
        )

    def _check_replaced(self) -> None:
        """functional_call leaves what the model's code put in the place of a buffer."""
        names = self.tensor_names
        shadows = {names[id(each)]: each for each in self.kept if id(each) in names}
        for name, tensor in self.meta_tensors.items():
            if tensor is not shadows[name] and self._block_of(name) not in {each.block for each in self.segments}:
                raise JobError(
                    f"the model cannot be cut: its own code puts another tensor in the place of {name}",
                    fix=f"change it in place ({name.rpartition('.')[2]}.copy_(…)), or do it inside of a block",
                )

    def _inseparable(self) -> tuple[Span, ...]:
        first: dict[str, int] = {}
        spans: dict[str, Span] = {}
        for number, segment in enumerate(self.segments):
            if segment.block in first:
                spans[segment.block] = (first[segment.block], number)
            first.setdefault(segment.block, number)
        # What belongs to no block is held by one stage: all that use it stay together.
        for number, segment in enumerate(self.segments):
            leaves = [leaf for each in segment.operations for leaf in tree_flatten(each.arguments)[0]]
            for name in {leaf.name for leaf in leaves if isinstance(leaf, TensorRef)}:
                key = f"{self.tensor_ids[name]} of {self.blocks.block_of(name)}"
                owner = first.get(self._block_of(name), number)
                begun, ended = spans.get(key, (owner, owner))
                spans[key] = (min(begun, number), max(ended, number))
        return tuple(span for span in spans.values() if span[1] > span[0])

    def _block_of(self, name: str) -> str:
        number = self.blocks.block_of(name)
        return ROOT if number == 0 else self.blocks.names[number - 1]

    # -- blocks -----------------------------------------------------------------------------------------------------

    def _enter(self, name: str, deeper: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.module_stack.append(name)
            self.block_depth += deeper

        return hook

    def _pass(self) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.module_stack.pop()

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.module_stack.pop()
            self.block_depth -= 1
            if self.block_depth:
                return
            self._check_keepers(name, (args, kwargs))
            self._write(name, (args, kwargs), output)
            operations, flops = tuple(self.operations), self._flops()
            self.segments.append(BlockSegment(block=name, operations=operations, flops=flops, elements=self.elements))
            self.operations, self.elements = [], 0

        return hook

    def _check_keepers(self, block: str, arguments: Any) -> None:
        """An object that keeps tensors from block to block would have those of the record when it is played."""
        for leaf in tree_flatten(arguments)[0]:
            if not isinstance(leaf, Tensor) and _keeps_meta(leaf):
                raise JobError(
                    f"the model cannot be cut: block {block} gets a {type(leaf).__name__}, which keeps tensors between"
                    " blocks",
                    fix="a model that passes tensors on as tensors (of transformers: use_cache=False in its config); or"
                    " a layout without pipeline",
                )

    def _flops(self) -> float:
        total = float(self.counter.get_total_flops())
        found, self.flops_counted = total - self.flops_counted, total
        return found

    # -- everything else --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if self.autocast and not self.block_depth and func in TYPE_OF and args[0].is_floating_point():
            self._check_type(args[0])
        if self.block_depth and func in NUMBER_OF and id(args[0]) in self.tensor_names:
            return NUMBER_OF[func](1)  # a counter; if a shape depends on it, that is found when it is played
        real, kept = tree_map(self._as_meta, given), given
        result = func(*real[0], **real[1])
        if not self.block_depth:
            leaves = tree_flatten(result)[0]
            if any(isinstance(leaf, Tensor) for leaf in leaves):
                self._write(func, kept, result)
        else:
            self.elements += sum(leaf.numel() for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
        return result

    def _check_type(self, tensor: Tensor) -> None:
        if id(tensor) in self.numbers and self.numbers[id(tensor)] >= self.inputs:
            raise JobError(
                "the model cannot be cut under autocast: its own code asks for the dtype of what"
                f" {self.names[self.numbers[id(tensor)]]} made, which is known only when it runs",
                fix="a dtype that is written down, or that code inside of a block",
            )

    def _as_meta(self, leaf: Any) -> Any:
        """A real tensor that the model keeps beside its parameters goes in as it is when the record is played."""
        return _to_meta(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

    def _write(self, call: Callable[..., Any] | str, arguments: Any, result: Any) -> None:
        described = self._described(arguments)
        results = []
        label = call if isinstance(call, str) else getattr(call, "__name__", str(call))
        for leaf in tree_flatten(result)[0]:
            results.append(self._number(leaf, label) if isinstance(leaf, Tensor) else None)
            self.elements += leaf.numel() if isinstance(leaf, Tensor) and not isinstance(call, str) else 0
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        shapes = tuple(tuple(leaf.shape) for leaf in tensors) if isinstance(call, str) else ()
        self.operations.append(GraphOperation(call, described, tuple(results), shapes))

    def _described(self, tree: Any) -> Any:
        leaves, shape = tree_flatten(tree)
        return tree_unflatten([self._leaf(leaf) for leaf in leaves], shape)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self.tensor_names:
            return TensorRef(self.tensor_names[id(leaf)])
        if id(leaf) in self.numbers:
            return ValueRef(self.numbers[id(leaf)])
        if leaf.is_meta:
            raise JobError(
                "the model cannot be cut: its code uses a tensor that was made while it was recorded in another way",
                fix="keep such tensors in buffers",
            )
        return leaf

    def _number(self, tensor: Tensor, label: str) -> int:
        """A tensor that was changed in place is a value of its own from then on."""
        self.kept.append(tensor)
        number = len(self.names)
        self.numbers[id(tensor)] = number
        self.names[number] = label
        return number
