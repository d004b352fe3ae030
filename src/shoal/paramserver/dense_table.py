"""The dense tensors of a shard: flat memory, parameters that are views of it, and torch's own optimizer on them.

    flat       [ w0 rows 0 to 40 ......|0000| b0 .|000| w2 rows 0 to 8 ....]      aligned to 64 elements (sharding.py)
                     │                     │            │
    parameters    Parameter w0         Parameter b0  Parameter w2               what the optimizer sees

A read of the full table returns the flat tensors themselves, and a flat gradient is used in place through `.grad`
views. Elementwise optimizers give the same bits on row ranges as on full tensors (docs/exact.md).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.paramserver.messages import DenseSpec, TableStateReply
from shoal.paramserver.optimizers import bare_step, make_optimizer
from shoal.paramserver.sharding import FlatLayout, RowRange, dtype_name, flat_layout

NamedParameters: TypeAlias = list[tuple[str, nn.Parameter]]
OptimizerFactory: TypeAlias = Callable[[NamedParameters], tuple[Optimizer, Any]]  # the second: a scheduler or None
Keys: TypeAlias = tuple[int, ...] | None  # None: all

_MAX_LAYOUTS = 256  # cached, by keys
_ALIGN_BYTES = 64  # alignment that torch's kernels want


class DenseLayout(NamedTuple):
    """Some row ranges of the table: their layout in the flat tensors of a request, and their parameters."""

    flat: FlatLayout
    parameters: tuple[nn.Parameter, ...]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return self.flat.views(flats)


class DenseTable:
    def __init__(self, spec: DenseSpec, ranges: Sequence[RowRange], factory: OptimizerFactory | None = None) -> None:
        """`factory` makes the optimizer if the spec has "job"."""
        self.spec = spec
        self.ranges = list(ranges)
        self.flat = flat_layout(ranges, spec)
        self.flats = self.flat.zeros()
        self.parameters = [
            nn.Parameter(view, requires_grad=view.is_floating_point()) for view in self.flat.views(self.flats)
        ]
        self.filled = [False] * len(self.ranges)
        self.ready = not self.ranges  # every range has values
        self.all_keys = tuple(range(len(self.ranges)))
        self.optimizer: Optimizer | None = None
        self.scheduler: Any = None
        self._step: Callable[[], Any] = lambda: None
        named = list(zip((rows.name for rows in self.ranges), self.parameters, strict=True))
        if spec.optimizer == "job":
            assert factory is not None
            if named:
                self.optimizer, self.scheduler = factory(named)
                self._step = self.optimizer.step
        elif spec.optimizer != "none" and named:
            self.optimizer = make_optimizer(spec.optimizer, spec.settings, named)
            self._step = bare_step(self.optimizer)
        self._layouts: dict[Keys, DenseLayout] = {}
        self._full_layout = self.layout(None)
        self._full_accesses = 0
        self._accesses = [0] * len(self.ranges)

    @property
    def has_optimizer(self) -> bool:
        return self.spec.optimizer != "none"

    def layout(self, keys: Keys) -> DenseLayout:
        """The layout of these keys, which are valid and unique."""
        found = self._layouts.get(keys)
        if found is None:
            chosen = range(len(self.ranges)) if keys is None else keys
            laid = flat_layout([self.ranges[key] for key in chosen], self.spec)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[keys] = DenseLayout(laid, tuple(self.parameters[key] for key in chosen))
        return found

    def push(self, flats: Sequence[Tensor], keys: Keys = None, *, last: bool = True) -> None:
        """Updates these keys; the others have no gradient. The scheduler steps with the `last` push of an update.
        The flat tensors are only read."""
        layout = self._full_layout if keys is None else self.layout(keys)
        fitting = [
            each if each.dtype == dtype and not each.data_ptr() % _ALIGN_BYTES else each.to(dtype, copy=True)
            for each, dtype in zip(flats, layout.flat.dtypes, strict=True)
        ]
        if self.optimizer is not None:
            for parameter, gradient in zip(layout.parameters, layout.views(fitting), strict=True):
                parameter.grad = gradient
            self._step()
            for parameter in layout.parameters:
                parameter.grad = None
        if last:
            self.end_update()

    def end_update(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def values(self, keys: Keys = None) -> list[Tensor]:
        """Without keys, returns the flat tensors themselves, which the next push changes."""
        if keys is None:
            return self.flats
        layout = self.layout(keys)
        flats = layout.flat.zeros()
        for view, parameter in zip(layout.views(flats), layout.parameters, strict=True):
            view.copy_(parameter.detach())
        return flats

    def put(self, flats: Sequence[Tensor], keys: Keys = None, *, fill: bool = False) -> None:
        """`fill`: a range that has values keeps them."""
        chosen = range(len(self.ranges)) if keys is None else keys
        layout = self.layout(keys)
        with torch.no_grad():
            for key, view, parameter in zip(chosen, layout.views(flats), layout.parameters, strict=True):
                if not (fill and self.filled[key]):
                    parameter.copy_(view)
                    self.filled[key] = True
        self.ready = all(self.filled)

    def count_access(self, keys: Keys) -> None:
        if keys is None:
            self._full_accesses += 1
        else:
            for key in keys:
                self._accesses[key] += 1

    @property
    def loads(self) -> list[float]:
        """Accesses by key."""
        return [float(self._full_accesses + each) for each in self._accesses]

    @property
    def nbytes(self) -> int:
        """Of values and the optimizer's state."""
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(each.nbytes for each in (*self.flats, *held))

    def state(self) -> tuple[TableStateReply, list[Tensor]]:
        """Returns the state tensors of a parameter's shape, named "<parameter>\\t<field>". Other state (step counters)
        is in `values["steps"]` under such a name, with its dtype ("": a plain number)."""
        names: list[str] = []
        tensors: list[Tensor] = []
        steps: dict[str, list[Any]] = {}
        groups: list[dict[str, Any]] = []
        if self.optimizer is not None:
            for rows, parameter in zip(self.ranges, self.parameters, strict=True):
                for field, value in self.optimizer.state.get(parameter, {}).items():
                    name = f"{rows.name}\t{field}"
                    if isinstance(value, Tensor) and value.shape == parameter.shape and field != "step":
                        names.append(name)
                        tensors.append(value.detach())
                    elif isinstance(value, Tensor):
                        steps[name] = [value.tolist(), dtype_name(value.dtype)]
                    else:
                        steps[name] = [value, ""]
            groups = [
                {key: to_plain_value(value) for key, value in group.items() if key not in ("params", "param_names")}
                for group in self.optimizer.param_groups
            ]
        scheduler = None if self.scheduler is None else to_plain_value(self.scheduler.state_dict())
        return TableStateReply(names, {"groups": groups, "scheduler": scheduler, "steps": steps}), tensors

    def put_state(self, names: Sequence[str], tensors: Sequence[Tensor], values: Mapping[str, Any]) -> None:
        """Restores what `state` of this or another process returned; ignores parameters that are not here."""
        if self.optimizer is None:
            return
        mine = {rows.name: parameter for rows, parameter in zip(self.ranges, self.parameters, strict=True)}
        self.optimizer.state.clear()
        for name, tensor in zip(names, tensors, strict=True):
            owner, _, field = name.partition("\t")
            if owner in mine:
                self.optimizer.state[mine[owner]][field] = tensor.detach().clone()
        for name, (value, dtype) in values.get("steps", {}).items():
            owner, _, field = name.partition("\t")
            if owner in mine:
                made = torch.tensor(value, dtype=getattr(torch, dtype)) if dtype else value
                self.optimizer.state[mine[owner]][field] = made
        for group, stored in zip(self.optimizer.param_groups, values.get("groups", ()), strict=False):
            for key, value in stored.items():
                group[key] = with_types_of(group.get(key), value)
        if self.scheduler is not None and values.get("scheduler") is not None:
            self.scheduler.load_state_dict(with_types_of(self.scheduler.state_dict(), values["scheduler"]))
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns about the scheduler

    def capture(self) -> dict[str, Any]:
        found, tensors = self.state()
        return {
            "flats": list(self.flats),
            "filled": list(self.filled),
            "names": found.names,
            "tensors": tensors,
            "values": found.values,
            "accesses": [self._full_accesses, *self._accesses],
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for mine, stored in zip(self.flats, captured["flats"], strict=True):
                mine.copy_(stored)
        self.filled = list(captured["filled"])
        self.ready = all(self.filled)
        self.put_state(captured["names"], captured["tensors"], captured["values"])
        self._full_accesses, *self._accesses = captured["accesses"]


def to_plain_value(value: Any) -> Any:
    """Converts to numbers, text, lists and dicts; other values become None, and `with_types_of` keeps the live ones."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: to_plain_value(each) for key, each in value.items() if isinstance(key, int | float | str | bool)}
    if isinstance(value, list | tuple):
        return [to_plain_value(each) for each in value]
    return None


def with_types_of(live: Any, stored: Any) -> Any:
    """Converts a plain value to the types of the live one that it replaces."""
    if isinstance(live, Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(stored))
    if isinstance(live, tuple) and isinstance(stored, list):
        same_size = len(live) == len(stored)
        return tuple(with_types_of(a, b) for a, b in zip(live, stored, strict=True)) if same_size else live
    if isinstance(live, Counter):
        return Counter(stored)
    if isinstance(live, dict) and isinstance(stored, dict):
        return {key: with_types_of(live.get(key), value) for key, value in stored.items()}
    if isinstance(live, list) and isinstance(stored, list) and len(live) == len(stored):
        return [with_types_of(a, b) for a, b in zip(live, stored, strict=True)]
    if stored is None and callable(live):
        return live
    return stored
