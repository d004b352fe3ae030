"""The tape of a model's initialisation: which operations made which large tensor. Used by `meta_init`.

A tensor on the tape is a storage and a geometry, so views, `.data` and in-place operations on slices need no special
case. A tensor of at most `SMALL` bytes that depends on no large one is computed at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.numerics.seeds import INITIAL, preserve_generators, seed_torch

SMALL = 4096  # bytes
CPU, META = torch.device("cpu"), torch.device("meta")


class CannotRecord(Exception):
    pass


@dataclass(frozen=True, slots=True)
class RecordedView:
    """A tensor of the build: its storage's number and its geometry."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True)
class InitOp:
    func: Any
    args: Any  # with a view for each tensor of the tape
    kwargs: Any
    number: int | None  # of the draw, if it is random
    covers: int | None = None  # the storage that it overwrites entirely, without reading it
    makes: list[RecordedView | None] = field(default_factory=list)  # by output: a new storage, or None
    uses: frozenset[int] = frozenset()  # existing storages

    def __post_init__(self) -> None:
        leaves = tree_leaves((self.args, self.kwargs))
        self.uses = frozenset(leaf.storage for leaf in leaves if isinstance(leaf, RecordedView))


class OpTape:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._held: list[UntypedStorage] = []  # on meta; held so that no address is used twice
        self._numbers: dict[int, int] = {}
        self._writers: list[list[int]] = []  # by storage: the operations that made or changed it, in order
        self._operations: list[InitOp] = []

    def has_recorded(self, tensor: Tensor) -> bool:
        return tensor.is_meta and storage_key(tensor) in self._numbers

    def in_use(self) -> bool:
        """Whether a recorded tensor is still referenced elsewhere."""
        return any(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in self._held)

    def view(self, tensor: Tensor) -> RecordedView:
        number = self._numbers.get(storage_key(tensor))
        if number is None or tensor.is_conj() or tensor.is_neg():
            raise CannotRecord("a tensor on meta that no recorded operation made")
        return RecordedView(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def covers(self, view: RecordedView) -> bool:
        dense = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=META)
        return dense.is_contiguous() and dense.nbytes == self._held[view.storage].nbytes()

    def add(self, operation: InitOp, writes: Iterable[int], outputs: Any) -> None:
        for output in tree_leaves(outputs):
            new = isinstance(output, Tensor) and not self.has_recorded(output)
            if new:
                storage = output.untyped_storage()
                self._numbers[storage._cdata] = len(self._held)
                self._held.append(storage)
                self._writers.append([])
                writes = {*writes, len(self._held) - 1}
            operation.makes.append(self.view(output) if new else None)
        for each in writes:
            self._writers[each].append(len(self._operations))
        self._operations.append(operation)

    def replay(self, wanted: Sequence[RecordedView]) -> list[Tensor]:
        """Computes these tensors, and only what they depend on. Frees each input after its last use."""
        chosen = self._dependencies({view.storage for view in wanted})
        made = {view.storage for index in chosen for view in self._operations[index].makes if view is not None}
        last = {each: index for index in chosen for each in self._operations[index].uses}
        last |= {view.storage: len(self._operations) for view in wanted}
        computed: dict[int, UntypedStorage] = {}

        def real(view: RecordedView) -> Tensor:
            if view.storage not in computed:
                assert view.storage not in made
                size = self._held[view.storage].nbytes()
                computed[view.storage] = torch.empty(size, dtype=torch.uint8).untyped_storage()
            return view.on(computed[view.storage])

        with preserve_generators(), torch.no_grad(), _disable_current_modes():
            for index in chosen:
                operation = self._operations[index]
                args, kwargs = tree_map_only(RecordedView, real, (operation.args, operation.kwargs))
                if operation.number is not None:
                    seed_torch(self.seed, INITIAL, operation.number)
                outputs = tree_leaves(operation.func(*args, **kwargs))
                del args, kwargs
                for view, output in zip(operation.makes, outputs, strict=True):
                    if view is not None and last.get(view.storage, -1) > index:
                        computed[view.storage] = output.untyped_storage()
                        if _geometry(output) != (view.dtype, view.size, view.stride, view.offset):
                            raise CannotRecord(f"{operation.func} made another geometry than on meta")
                del outputs
                for each in operation.uses:
                    if last[each] == index:
                        computed.pop(each, None)
            return [real(view) for view in wanted]

    def _dependencies(self, storages: set[int]) -> list[int]:
        """The operations that these storages depend on, in order, except those whose result is overwritten unread."""
        todo = [(storage, len(self._operations)) for storage in storages]
        chosen: set[int] = set()
        seen: set[tuple[int, int]] = set()
        while todo:
            storage, before = todo.pop()
            index = next((each for each in reversed(self._writers[storage]) if each < before), None)
            if index is None or (storage, index) in seen:
                continue
            seen.add((storage, index))
            operation = self._operations[index]
            todo += [(each, index) for each in operation.uses if each != operation.covers]
            chosen.add(index)
        return sorted(chosen)


def storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


# Operations that read a tensor's dtype and shape, not its values.
_SHAPE_ONLY = {
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
}
# In-place operations that do not read what they overwrite.
_FRESH = {
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("exponential_", "log_normal_", "cauchy_", "geometric_"),
}


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


class InitRecorder(TorchDispatchMode):
    def __init__(self, tape: OpTape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.drawn = 0
        self.refused = ""  # kept, since the user's code may catch the exception

    def refuse(self, why: str) -> None:
        self.refused = why
        raise CannotRecord(why)

    def refuse_forward(self, module: nn.Module, inputs: Any) -> None:
        """A forward pass may choose other kernels on meta."""
        self.refuse(f"{type(module).__name__} is called while the model is built")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # without FakeCpu
            return self._number(func, args, kwargs)

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            number = self.drawn
            self.drawn += 1
            seed_torch(self.tape.seed, INITIAL, number)
        try:
            return self._run_op(func, args, dict(kwargs or {}), number)
        except CannotRecord as error:
            return self.refuse(str(error))

    def _run_op(self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._check(func, leaves, tensors, kwargs)
        schema = func._schema
        values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        changed = [
            leaf
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(values.get(argument.name))
            if isinstance(leaf, Tensor)
        ]
        if any(argument.name == "device" for argument in schema.arguments):
            kwargs["device"] = CPU
        if changed:
            if all(tensor.is_meta for tensor in changed):
                return self._run_in_place(func, args, kwargs, number, changed)
            if any(tensor.is_meta for tensor in changed):
                self.refuse(f"{func} changes both a large and a small tensor")
            return self._run_real(func, args, kwargs, number)
        if any(result.alias_info is not None for result in schema.returns):
            return func(*args, **kwargs)  # a view
        if not any("Tensor" in str(result.type) for result in schema.returns):
            return self._run_real(func, args, kwargs, number)
        return self._run_factory(func, args, kwargs, number)

    def _check(self, func: Any, leaves: list[Any], tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        name = _name(func)
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.refuse("the build uses its own generator")
        if kwargs.get("device") not in (None, CPU, META) or kwargs.get("pin_memory"):
            self.refuse(f"{func} on {kwargs.get('device')}")
        if name == "_to_copy" and tensors[0].is_meta and kwargs.get("device") == CPU:
            self.refuse("a move of a large tensor to the CPU")
        if "batch_norm" in name and not name.endswith("_legit"):
            self.refuse(f"{func} changes tensors beyond its schema")
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device not in (CPU, META) or tensor.is_quantized:
                self.refuse(f"{func} on a tensor of an unsupported kind")
            if tensor.is_meta:
                self.tape.view(tensor)

    def _run_factory(self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None) -> Any:
        """Creates tensors: real ones if they are small and depend on no large one."""
        try:
            outputs = self._run_on_meta(func, args, kwargs)
        except Exception:  # the size depends on values, or meta does not support the operation
            return self._run_real(func, args, kwargs, number)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        reads = [] if _name(func) in _SHAPE_ONLY else tree_leaves((args, kwargs))
        large = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in reads)
        if not large and sum(tensor.untyped_storage().nbytes() for tensor in made) <= SMALL:
            return self._run_real(func, args, kwargs, number)
        if kwargs.get("dtype") is None and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs["dtype"] = made[0].dtype  # the default may have changed at replay
        self.tape.add(InitOp(func, *self._recorded(func, args, kwargs), number), (), outputs)
        return outputs

    def _run_in_place(self, func: Any, args: Any, kwargs: Any, number: int | None, changed: list[Tensor]) -> Any:
        """Changes large tensors in place."""
        writes = {self.tape.view(tensor).storage for tensor in changed}
        recorded = self._recorded(func, args, kwargs)
        covers = None
        if _name(func) in _FRESH and self.tape.covers(self.tape.view(changed[0])):
            sources = tree_leaves((recorded[0][1:], recorded[1]))
            read = {leaf.storage for leaf in sources if isinstance(leaf, RecordedView)}
            covers = None if writes & read else min(writes)
        try:
            outputs = self._run_on_meta(func, args, kwargs)
        except NotImplementedError:  # depends on values; an in-place operation keeps the shape
            outputs = args[0]
        self.tape.add(InitOp(func, *recorded, number, covers), writes, outputs)
        return outputs

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for the tape. Real tensors are copied, since they may change later."""

        def own(tensor: Tensor) -> Any:
            if _name(func) in _SHAPE_ONLY:
                return meta_like(tensor)
            return self.tape.view(tensor) if tensor.is_meta else tensor.detach().clone()

        return tree_map_only(Tensor, own, args), tree_map_only(Tensor, own, kwargs)

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda each: each if each.is_meta else meta_like(each), (args, kwargs))
        return func(*args, **(kwargs | {"device": META} if "device" in kwargs else kwargs))

    def _run_real(self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None) -> Any:
        """Runs the operation on its tensors' present values."""
        if _name(func) not in _SHAPE_ONLY:
            args, kwargs = tree_map_only(Tensor, self.real, (args, kwargs))
        if number is not None:
            seed_torch(self.tape.seed, INITIAL, number)
        return func(*args, **kwargs)

    def real(self, tensor: Tensor) -> Tensor:
        return self.tape.replay([self.tape.view(tensor)])[0] if tensor.is_meta else tensor


_CPU_ANSWERS: dict[Any, Any] = {
    Tensor.device.__get__: CPU,
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
_MEMORY_NAMES = ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__reduce_ex__")
_MEMORY_ACCESS = {getattr(Tensor, name) for name in _MEMORY_NAMES}


class FakeCpu(TorchFunctionMode):
    """Makes large tensors report that they are on the CPU: torch's own initialisation does nothing on meta."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args or not isinstance(args[0], Tensor) or is_lazy(args[0]):
            return func(*args, **kwargs)
        if func is Tensor.to:  # everything is on the CPU: only the dtype can differ
            if "other" in kwargs:
                self.recorder.refuse("a move to another tensor's device")
            args = (args[0], *(each.dtype if isinstance(each, Tensor) else each for each in args[1:]))
        if not args[0].is_meta:
            return func(*args, **kwargs)
        if func in _CPU_ANSWERS:
            return _CPU_ANSWERS[func]
        if func in _MEMORY_ACCESS:
            self.recorder.refuse(f"{func} needs a large tensor's memory")
        if func is Tensor.tolist:
            return self.recorder.real(args[0]).tolist()
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.to:
            args = tuple(META if _is_cpu(each) else each for each in args)
            kwargs = {key: META if _is_cpu(each) else each for key, each in kwargs.items()}
        if func is Tensor.new_tensor:
            kwargs.setdefault("device", CPU)
        return func(*args, **kwargs)


def _is_cpu(value: Any) -> bool:
    return value == "cpu" or (isinstance(value, torch.device) and value.type == "cpu")
