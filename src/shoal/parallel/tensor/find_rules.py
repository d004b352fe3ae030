"""Finds rules from a model's forward pass, without data: on the meta device, with a group that moves nothing.

A Linear with a whole input becomes a column, one with slices of its last dimension a row. What is found on the way (a
fused projection, a column that only costs a gather) is recorded, and the pass begins again.
"""

import copy
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from shoal.errors import JobError
from shoal.numerics.seeds import preserve_generators
from shoal.parallel.tensor.collective_ops import own_slice
from shoal.parallel.tensor.group import MetaTensorGroup
from shoal.parallel.tensor.install import InstalledForwards
from shoal.parallel.tensor.modules import ShardedForward
from shoal.parallel.tensor.rules import TensorRule, TensorRules, check_heads, kinds_of, parse_rules
from shoal.parallel.tensor.sharded_tensor import ColumnOrigin, FusedProjectionFound, ShardedTensor, sharded_tensors_in

WHOLE = TensorRule("whole")
_FIX = 'tensor_rules={"module": "column"} that name all that is split, or a layout without tensor'


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy without memory. Weights that are tied stay tied, unlike with `model.to("meta")`."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, nn.Parameter):
                memo[id(value)] = nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
            elif isinstance(value, Tensor):
                memo[id(value)] = value.detach().to("meta")
    return copy.deepcopy(model, memo)


def find_rules(model: nn.Module, example: Any, size: int, wanted: Mapping[str, str] | None = None) -> TensorRules:
    """`model`: on meta. `example`: its inputs for one microbatch: a tensor, a tuple, or a dict by name."""
    forced = parse_rules(wanted or {}, model, size)
    if size == 1:
        return TensorRules(1)
    whole: set[str] = set()
    fused: dict[str, int] = {}
    while True:
        look = _RuleSearch(model, size, forced, whole, fused)
        try:
            look.run(example)
        except FusedProjectionFound as found:
            fused |= dict.fromkeys(_alike(found.name, model), found.segments)
            continue
        except JobError:
            raise
        except Exception as error:
            if not any(rule != WHOLE for rule in forced.values()):
                raise _located_error(error, model) from error
            look.found = {}  # the user knows what cannot be seen from here
            for name, rule in forced.items():
                look.note(name, rule)
        more = look.should_stay_whole() - whole
        if not more:
            return TensorRules(size, {name: rule for name, rule in look.found.items() if rule != WHOLE})
        for name in sorted(more & forced.keys()):
            if forced[name] != WHOLE:
                raise JobError(
                    f"tensor_rules: {name} is {forced[name]}, but its weight is also used by {look.tied_with(name)}",
                    fix=f'"{name}": "whole"',
                )
        whole |= more


def _alike(name: str, model: nn.Module) -> list[str]:
    """The same projection in every layer: one look finds it for all of them. Wrong guesses cost time, not truth."""
    pattern, wanted = re.sub(r"\d+", "#", name), model.get_submodule(name)
    return [
        other
        for other, module in model.named_modules()
        if re.sub(r"\d+", "#", other) == pattern
        and getattr(module, "weight", None) is not None
        and module.weight.shape == wanted.weight.shape
    ]


class _RuleSearch:
    """One forward pass."""

    def __init__(
        self, model: nn.Module, size: int, forced: dict[str, TensorRule], whole: set[str], fused: dict[str, int]
    ) -> None:
        self.model, self.forced, self.whole, self.fused = model, forced, whole, fused
        self.group = MetaTensorGroup(size)
        self.sequence = any(rule.kind == "sequence" for rule in forced.values())
        self.names = {module: name for name, module in model.named_modules()}
        self.found: dict[str, TensorRule] = {}
        self.origins: list[ColumnOrigin] = []
        self.users: dict[int, list[str]] = {}  # of a parameter: its names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.users.setdefault(id(parameter), []).append(name)
        self.foreign_uses: set[str] = set()  # modules whose parameters are used outside them
        self.depth = 0

    def run(self, example_inputs: Any) -> None:
        installed = InstalledForwards()
        for name, module in self.model.named_modules():
            if len(kinds_of(module)) > 1:
                installed.replace_forward(module, self._forward(name, module))
        installed.disable_fast_path(self.model)
        inputs = _as_meta(example_inputs)
        try:
            with preserve_generators(), torch.enable_grad(), torch.device("meta"), _guarded(), _ForeignUseMonitor(self):
                if isinstance(inputs, dict):
                    self.model(**inputs)
                else:
                    self.model(*((inputs,) if isinstance(inputs, Tensor) else inputs))
        finally:
            installed.remove()

    def note(self, name: str, rule: TensorRule) -> None:
        self.found[name] = rule
        if rule.kind == "attention":  # its output projection is not called, but cut with it
            self.found[f"{name}.out_proj"] = TensorRule("row")

    def _forward(self, name: str, module: nn.Module) -> Callable[..., Any]:
        def origin(width: int, segments: int) -> ColumnOrigin:
            self.origins.append(ColumnOrigin(name, width, segments))
            return self.origins[-1]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if name not in self.found:
                self.note(name, self._decide(name, module, args[0] if args else kwargs.get("input")))
            rule = self.found[name]
            self.depth += 1
            try:
                if rule == WHOLE:
                    return type(module).forward(module, *args, **kwargs)
                split = ShardedForward(module=module, rule=rule, group=self.group, sequence=self.sequence)
                split.read, split.make_origin = self._read, origin
                return split(*args, **kwargs)
            finally:
                self.depth -= 1

        return forward

    def _decide(self, name: str, module: nn.Module, value: Any) -> TensorRule:
        size, forced = self.group.size, self.forced.get(name)
        if name in self.whole:
            return WHOLE
        if forced is not None:
            fused = forced == TensorRule("column") and name in self.fused
            return TensorRule("column", self.fused[name]) if fused else forced
        if isinstance(module, nn.Linear):
            if isinstance(value, ShardedTensor) and value.shard_dim == value.ndim - 1:
                return TensorRule("row", value.segments)
            segments = self.fused.get(name, 1)
            return WHOLE if module.out_features % (size * segments) else TensorRule("column", segments)
        if isinstance(module, nn.Embedding):
            return WHOLE if module.num_embeddings % size else TensorRule("vocab")
        if isinstance(module, nn.MultiheadAttention):
            if self.forced.get(f"{name}.out_proj", TensorRule("row")).kind != "row":
                return WHOLE
            check_heads(module.num_heads, size, name)
            return TensorRule("attention", 3)
        return WHOLE

    def _read(self, module: nn.Module, leaf: str) -> Any:
        """A slice of the whole parameter, as a worker would have it."""
        value: Tensor | None = getattr(module, leaf)
        if value is None:
            return None
        rules = TensorRules(self.group.size, self.found)
        sliced = rules.slice_of(f"{self.names[module]}.{leaf}", tuple(value.shape), 0)
        for dim, ranges in sliced.cuts.items():
            value = own_slice(value, dim, self.group, len(ranges))
        return value

    def should_stay_whole(self) -> set[str]:
        """Modules that are not worth splitting, or whose weight is used in ways that do not go together."""
        useful = {origin.name for origin in self.origins if origin.useful}
        better = {origin.name for origin in self.origins} - useful - self.forced.keys()
        better |= {name for name in self.foreign_uses if self.found.get(name, WHOLE) != WHOLE}
        rules = TensorRules(self.group.size, self.found)
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for names in self.users.values():
            if len({str(rules.slice_of(name, tuple(parameters[name].shape), 0)) for name in names}) > 1:
                better |= {name.rpartition(".")[0] for name in names}
        # The halves of an attention go together.
        return better | {name.removesuffix(".out_proj") for name in better if self._is_half(name)}

    def _is_half(self, name: str) -> bool:
        outer = name.removesuffix(".out_proj")
        return outer != name and self.found.get(outer, WHOLE).kind == "attention"

    def tied_with(self, name: str) -> str:
        own = f"{name}."
        shared = [each for names in self.users.values() for each in names if any(n.startswith(own) for n in names)]
        others = [each for each in shared if not each.startswith(own)]
        return ", ".join(others) or "code outside the module"


class _ForeignUseMonitor(TorchFunctionMode):
    """Notes parameters that are used other than by their module's own forward: that code would see slices."""

    def __init__(self, search: _RuleSearch) -> None:
        super().__init__()
        self.search = search

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.search.depth and func.__name__ != "__get__":
            for value in (*args, *(kwargs or {}).values()):
                for name in self.search.users.get(id(value), ()) if isinstance(value, Tensor) else ():
                    self.search.foreign_uses.add(name.rpartition(".")[0])
        if not torch.is_grad_enabled() and next(sharded_tensors_in((args, kwargs)), None) is not None:
            _refuse_inside_function()
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> None:
    """A user's autograd function works below the level where slices are seen, and would lose their gradients."""
    raise JobError(
        f"{name} is an autograd function and got a tensor that is split over workers",
        fix='tensor_rules={"module that made it": "whole"} (of a checkpoint: use_reentrant=False)',
    )


def _refuse_inside_function() -> None:
    """One that was taken by its name before the guard stood there shows when it computes."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_back is not None:
        for value in frame.f_locals.values():
            if isinstance(value, FunctionCtx):
                _refuse(type(value).__name__.removesuffix("Backward"))
        frame = frame.f_back


@contextmanager
def _guarded() -> Iterator[None]:
    original = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if next(sharded_tensors_in((args, kwargs)), None) is not None:
            _refuse(cls.__name__)
        return original.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_as_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _as_meta(item) for key, item in value.items()}
    return value


def _located_error(error: Exception, model: nn.Module) -> JobError:
    """What went wrong, with the module and the line of the user's code."""
    names = {module: name or "the model" for name, module in model.named_modules()}
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    module, line = "the model", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            module = f"{names[owner]} ({type(owner).__name__})"
        if not frame.f_code.co_filename.startswith(own):
            line = f"{frame.f_code.co_filename}:{number}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return JobError(
        f"the forward pass cannot be followed without data: {type(error).__name__}: {first}",
        where=[f"in {module}", *([line] if line else [])],
        fix=_FIX,
    )
