"""A model without its weights, and any of its weights by itself, with the bits that `initialise` gives them.

    build() ──► skeleton: every large tensor on meta          fill("h.3.weight")
        │                                                            │
        └─► tape: empty #0, uniform_ #0 (draw 0), copy_ #0 …  ──► only the operations that #0 depends on, each random
                                                                  one seeded with its own number
A tensor on the tape is a storage and a geometry, so views, `.data` and in-place operations on parts need no care of
their own. Tensors of a few kilobytes that depend on nothing large are simply real. Whatever cannot be recorded is
refused; then the model is built whole, and handed out from there: slower and larger, never other bits.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.errors import JobError
from shoal.numerics.kernels import is_aligned
from shoal.numerics.seeds import INITIAL, initialise, preserve_generators, seed_everything, seed_torch

SMALL = 4096  # bytes; what is no larger is made for real while the model is built
CPU, META = torch.device("cpu"), torch.device("meta")

Keep = Callable[[Tensor], Tensor]


class MetaModel:
    """`model`: all parameters and buffers on meta, but those installed. `deferred`: False if it was built whole."""

    def __init__(self, model: nn.Module, sources: "dict[str, Tensor | _RecordedView]", *, copied: bool = False) -> None:
        self.model = model
        self.deferred = False
        self.reason = ""  # it was built whole, for the log
        self._sources = sources
        self._copied = copied  # what is handed out is a copy
        self._tape: _OpTape | None = None
        self._full_model: Callable[[], nn.Module] | None = None

    @classmethod
    def from_model(cls, instance: nn.Module, copy: bool = True) -> "MetaModel":
        """Of a model that is there. Without `copy` it is itself taken apart: it becomes the skeleton."""
        values = _tensor_values(instance)
        if not copy:
            _empty(instance)
            return cls(instance, values)
        return cls(_skeleton(instance), values, copied=True)

    def materialize(self, name: str, keep: Keep | None = None) -> Tensor:
        """The real tensor, dense and aligned; of it only what `keep` takes."""
        source = self._sources[name]
        if isinstance(source, _RecordedView):
            assert self._tape is not None and self._full_model is not None
            try:
                value = self._tape.replay([source])[0]
            except Exception:  # a kernel that does not do what its shadow on meta did
                self._sources = _tensor_values(self._full_model())
                self.deferred, self._copied, self._tape = False, False, None
                return self.materialize(name, keep)
            return _dense_aligned(value if keep is None else keep(value))
        value = source if keep is None else keep(source)
        return _dense_aligned(value, copy=self._copied and _memory(value) == _memory(source))

    def install(self, names: Iterable[str], keep: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Puts real tensors into the model. Names that share one get the same object again."""
        for name in names:
            old = _find_tensor(self.model, name)
            if old.is_meta:
                real = self.materialize(name, None if keep is None else partial(keep, name))
                _replace(self.model, old, _like_original(old, real))

    def drop_unused(self) -> None:
        """Frees whatever is kept for names that were not asked for."""
        self._sources, self._tape, self._full_model = {}, None, None


def build_meta_model(build: Callable[[], nn.Module], seed: int) -> MetaModel:
    """The model that `initialise(build, seed)` gives, without its weights. Leaves the generators alone."""
    tape = _OpTape(seed)
    found = _record_build(build, tape)
    if isinstance(found, str):
        with suppress(Exception):
            _materialize_leftovers(tape, set())  # caches outlive it
        made = MetaModel.from_model(_checked(initialise(build, seed)), copy=False)
        made.reason = found
        return made
    made = MetaModel(*found, copied=True)
    made.deferred, made._tape, made._full_model = True, tape, lambda: initialise(build, seed)
    return made


def _record_build(
    build: Callable[[], nn.Module], tape: "_OpTape"
) -> "tuple[nn.Module, dict[str, Tensor | _RecordedView]] | str":
    """The skeleton and where its tensors come from; or why it cannot be recorded."""
    recorder = _InitRecorder(tape)
    try:
        with preserve_generators():
            seed_everything(tape.seed, INITIAL)
            forwards = register_module_forward_pre_hook(recorder.refuse_forward)
            try:
                with recorder, _PretendCpuMode(recorder):
                    model = build()
            finally:
                forwards.remove()
        if recorder.refused:
            return recorder.refused
        named = _named_tensors(_checked(model))
        if len({_memory(tensor) for _, tensor in named}) < len({id(tensor) for _, tensor in named}):
            return "tensors share memory that are not one"
        sources = {name: tape.view(tensor) if tensor.is_meta else tensor.detach() for name, tensor in named}
        del named
        _empty(model)
        _materialize_leftovers(
            tape, {source.storage for source in sources.values() if isinstance(source, _RecordedView)}
        )
    except Exception as error:  # also the user's own: building whole raises it again
        return recorder.refused or f"{type(error).__name__}: {error}"
    return model, sources


def _materialize_leftovers(tape: "_OpTape", named: set[int]) -> None:
    """Makes real what is neither parameter nor buffer and yet in somebody's hands: plain attributes, caches."""
    if not tape.in_use():
        return  # to look at every object costs a forked process a copy of each
    gc.collect()
    there: dict[int, UntypedStorage] = {}
    while strays := [each for each in gc.get_objects() if issubclass(type(each), Tensor) and tape.has_recorded(each)]:
        settled = False
        for stray in strays:
            view = tape.view(stray)
            if view.storage in named:
                raise _CannotRecord("a view of a parameter is kept")
            if view.storage not in there:
                there[view.storage] = tape.replay([view])[0].untyped_storage()
            with suppress(RuntimeError):  # the base of a view: it goes with the view
                torch.utils.swap_tensors(stray, _like_original(stray, view.on(there[view.storage])))
                settled = True
        if not settled:
            raise _CannotRecord("a large tensor is kept where it cannot be reached")


# -- the tape ---------------------------------------------------------------------------------------------------------


class _CannotRecord(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _RecordedView:
    """A tensor of the build, as numbers."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True)
class _RecordedOp:
    func: Any
    args: Any  # with a view for each tensor of the tape
    kwargs: Any
    number: int | None  # of the draw, if it is random
    uses: frozenset[int]  # storages that were there before
    covers: int | None  # the storage that it overwrites whole, whatever was there
    makes: list[_RecordedView | None] = field(default_factory=list)  # by output: a storage that is new


class _OpTape:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._held: list[UntypedStorage] = []  # on meta; held so that no address is used twice
        self._numbers: dict[int, int] = {}
        self._writers: list[list[int]] = []  # by storage: the operations that made or changed it, in order
        self._operations: list[_RecordedOp] = []

    def has_recorded(self, tensor: Tensor) -> bool:
        return tensor.is_meta and _memory(tensor) in self._numbers

    def in_use(self) -> bool:
        """Whether anybody else holds a tensor of the tape."""
        return any(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in self._held)

    def view(self, tensor: Tensor) -> _RecordedView:
        number = self._numbers.get(_memory(tensor))
        if number is None or tensor.is_conj() or tensor.is_neg():
            raise _CannotRecord("a tensor on meta that no recorded operation made")
        return _RecordedView(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def covers(self, view: _RecordedView) -> bool:
        dense = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=META)
        return dense.is_contiguous() and dense.nbytes == self._held[view.storage].nbytes()

    def add(self, operation: _RecordedOp, writes: Iterable[int], outputs: Any) -> None:
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

    def replay(self, wanted: Sequence[_RecordedView]) -> list[Tensor]:
        """What these tensors hold by now. Computes only what they depend on, and frees it as soon as it can."""
        chosen = self._dependencies({view.storage for view in wanted})
        made = {view.storage for index in chosen for view in self._operations[index].makes if view is not None}
        last = {each: index for index in chosen for each in self._operations[index].uses}
        last |= {view.storage: len(self._operations) for view in wanted}
        there: dict[int, UntypedStorage] = {}

        def real(view: _RecordedView) -> Tensor:
            if view.storage not in there:
                assert view.storage not in made
                there[view.storage] = torch.empty(
                    self._held[view.storage].nbytes(), dtype=torch.uint8
                ).untyped_storage()
            return view.on(there[view.storage])

        with preserve_generators(), torch.no_grad(), _disable_current_modes():
            for index in chosen:
                operation = self._operations[index]
                args, kwargs = tree_map_only(_RecordedView, real, (operation.args, operation.kwargs))
                if operation.number is not None:
                    seed_torch(self.seed, INITIAL, operation.number)
                outputs = tree_leaves(operation.func(*args, **kwargs))
                del args, kwargs
                for view, output in zip(operation.makes, outputs, strict=True):
                    if view is not None and last.get(view.storage, -1) > index:
                        there[view.storage] = output.untyped_storage()
                        if _geometry(output) != (view.dtype, view.size, view.stride, view.offset):
                            raise _CannotRecord(f"{operation.func} made another geometry than on meta")
                del outputs
                for each in operation.uses:
                    if last[each] == index:
                        there.pop(each, None)
            return [real(view) for view in wanted]

    def _dependencies(self, storages: set[int]) -> list[int]:
        """The operations that these storages depend on, in order. What is overwritten unread is no part of it."""
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


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


# -- recording --------------------------------------------------------------------------------------------------------

# Operations that look at a tensor's type and shape, not at what it holds.
_SHAPE_ONLY = {
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
}
# Operations in place that do not read what they overwrite.
_FRESH = {
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("exponential_", "log_normal_", "cauchy_", "geometric_"),
}


def _name(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


class _InitRecorder(TorchDispatchMode):
    def __init__(self, tape: _OpTape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.drawn = 0
        self.refused = ""  # kept, since the user's code may catch the exception

    def refuse(self, why: str) -> None:
        self.refused = why
        raise _CannotRecord(why)

    def refuse_forward(self, module: nn.Module, inputs: Any) -> None:
        """Which kernels a forward pass uses may depend on the device."""
        self.refuse(f"{type(module).__name__} is called while the model is built")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here nothing is disguised
            return self._number(func, args, kwargs)

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            number = self.drawn
            self.drawn += 1
            seed_torch(self.tape.seed, INITIAL, number)
        try:
            return self._run_op(func, args, dict(kwargs or {}), number)
        except _CannotRecord as error:
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
            self.refuse("a generator of the build's own")
        if kwargs.get("device") not in (None, CPU, META) or kwargs.get("pin_memory"):
            self.refuse(f"{func} on {kwargs.get('device')}")
        if name == "_to_copy" and tensors[0].is_meta and kwargs.get("device") == CPU:
            self.refuse("a move to the CPU that would have been none")
        if "batch_norm" in name and not name.endswith("_legit"):
            self.refuse(f"{func} changes more than it says")
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.device not in (CPU, META) or tensor.is_quantized:
                self.refuse(f"{func} on a tensor of an unknown kind")
            if tensor.is_meta:
                self.tape.view(tensor)

    def _run_factory(self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None) -> Any:
        """New tensors: real if they are small and depend on nothing large."""
        try:
            outputs = self._run_on_meta(func, args, kwargs)
        except Exception:  # how large it will be depends on values, or nobody knows how to tell
            return self._run_real(func, args, kwargs, number)
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        reads = [] if _name(func) in _SHAPE_ONLY else tree_leaves((args, kwargs))
        large = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in reads)
        if not large and sum(tensor.untyped_storage().nbytes() for tensor in made) <= SMALL:
            return self._run_real(func, args, kwargs, number)
        if kwargs.get("dtype") is None and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs["dtype"] = made[0].dtype  # whatever the default is by then
        self._append(func, self._recorded(func, args, kwargs), number, (), None, outputs)
        return outputs

    def _run_in_place(
        self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None, changed: list[Tensor]
    ) -> Any:
        """Large tensors, in place."""
        writes = {self.tape.view(tensor).storage for tensor in changed}
        recorded = self._recorded(func, args, kwargs)
        covers = None
        if _name(func) in _FRESH and self.tape.covers(self.tape.view(changed[0])):
            sources = [
                leaf.storage for leaf in tree_leaves((recorded[0][1:], recorded[1])) if isinstance(leaf, _RecordedView)
            ]
            covers = None if writes & set(sources) else min(writes)
        try:
            outputs = self._run_on_meta(func, args, kwargs)
        except NotImplementedError:  # depends on values; what is changed in place keeps its shape
            outputs = args[0]
        self._append(func, recorded, number, writes, covers, outputs)
        return outputs

    def _append(
        self, func: Any, recorded: Any, number: int | None, writes: Iterable[int], covers: int | None, outputs: Any
    ) -> None:
        uses = frozenset(leaf.storage for leaf in tree_leaves(recorded) if isinstance(leaf, _RecordedView))
        args, kwargs = recorded
        self.tape.add(_RecordedOp(func, args, kwargs, number, uses, covers), writes, outputs)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Real tensors may change later: the tape has its own."""

        def own(tensor: Tensor) -> Any:
            if _name(func) in _SHAPE_ONLY:
                return _meta(tensor)
            return self.tape.view(tensor) if tensor.is_meta else tensor.detach().clone()

        return tree_map_only(Tensor, own, (args, kwargs))

    def _run_on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation on meta."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else _meta(tensor), (args, kwargs))
        return func(*args, **(kwargs | {"device": META} if "device" in kwargs else kwargs))

    def _run_real(self, func: Any, args: Any, kwargs: dict[str, Any], number: int | None) -> Any:
        """The operation on what its tensors hold by now."""
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
_MEMORY_ACCESS = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.__reduce_ex__,
}


class _PretendCpuMode(TorchFunctionMode):
    """Large tensors say that they are on the CPU: torch's own initialisation does nothing on meta."""

    def __init__(self, recorder: _InitRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args or not isinstance(args[0], Tensor) or is_lazy(args[0]):
            return func(*args, **kwargs)
        if func is Tensor.to:  # everything is on the CPU: only the type can differ
            if "other" in kwargs:
                self.recorder.refuse("a move to where another tensor is")
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


# -- models -----------------------------------------------------------------------------------------------------------


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All names, also those of one object. What has no shape yet is left out."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = [*parameters, *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in found if not is_lazy(tensor)]


def _find_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    found = (module._parameters | module._buffers)[leaf]
    assert found is not None
    return found


def _tensor_values(model: nn.Module) -> "dict[str, Tensor | _RecordedView]":
    return {name: tensor.detach() for name, tensor in _named_tensors(model)}


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _skeleton(model: nn.Module) -> nn.Module:
    tensors = {id(tensor): tensor for _, tensor in _named_tensors(model)}
    return copy.deepcopy(model, {key: _like_original(tensor, _meta(tensor)) for key, tensor in tensors.items()})


def _empty(model: nn.Module) -> None:
    for tensor in {id(tensor): tensor for _, tensor in _named_tensors(model)}.values():
        _replace(model, tensor, _like_original(tensor, _meta(tensor)))


def _like_original(old: Tensor, value: Tensor) -> Tensor:
    """The value as the same kind of thing: class, attributes, hooks."""
    if isinstance(old, nn.Parameter):
        value = torch.Tensor._make_subclass(type(old), value.detach(), old.requires_grad)
    elif old.requires_grad and old.is_leaf:
        value = value.detach().requires_grad_()
    value.__dict__.update(old.__dict__)
    for hook in (old._backward_hooks or {}).values():
        value.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        value.register_post_accumulate_grad_hook(hook)
    return value


def _replace(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Wherever `old` is held, it is `new` from now on."""
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # weak references, as recurrent layers have them
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name in [name for name, tensor in held.items() if tensor is old]:
                    setattr(module, name, new)


def _dense_aligned(tensor: Tensor, copy: bool = False) -> Tensor:
    """Dense, aligned, and with no more memory than it needs; else a copy that is."""
    tensor = tensor.detach()
    dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    if dense and alone and is_aligned(tensor) and not copy:
        return tensor
    layout = torch.preserve_format if dense else torch.contiguous_format
    return torch.empty_like(tensor, memory_format=layout).copy_(tensor)
