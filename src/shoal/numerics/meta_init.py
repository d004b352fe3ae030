"""Builds a model without its weights, then any single weight, with the bits that `initialise` gives.

    build() ──► skeleton: every large tensor on meta          materialize("h.3.weight")
        │                                                            │
        └─► tape: empty #0, uniform_ #0 (draw 0), copy_ #0 …  ──► runs the operations that #0 depends on, each random
                                                                  one seeded with its own number
A build that cannot be recorded is run in full, and the weights are taken from that model: slower, the same bits.
"""

import copy
import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from shoal.errors import JobError
from shoal.numerics.init_tape import CannotRecord, FakeCpu, InitRecorder, OpTape, RecordedView, meta_like, storage_key
from shoal.numerics.kernels import is_aligned
from shoal.numerics.seeds import INITIAL, initialise, preserve_generators, seed_everything

Keep = Callable[[Tensor], Tensor]
TensorSources = dict[str, Tensor | RecordedView]  # by name


class MetaModel:
    """`model`: all parameters and buffers on meta, but those installed. `deferred`: False if it was built in full."""

    def __init__(self, model: nn.Module, sources: TensorSources, *, copied: bool = False) -> None:
        self.model = model
        self.deferred = False
        self.reason = ""  # why it was built in full, for the log
        self._sources = sources
        self._copied = copied  # `materialize` returns copies
        self._tape: OpTape | None = None
        self._full_model: Callable[[], nn.Module] | None = None

    @classmethod
    def from_model(cls, instance: nn.Module, copy: bool = True) -> "MetaModel":
        """From an existing model. Without `copy` that model itself becomes the skeleton."""
        values = _tensor_values(instance)
        if not copy:
            _empty(instance)
            return cls(instance, values)
        return cls(_skeleton(instance), values, copied=True)

    def materialize(self, name: str, keep: Keep | None = None) -> Tensor:
        """The real tensor, dense and aligned, or the slice of it that `keep` returns."""
        source = self._sources[name]
        if isinstance(source, RecordedView):
            assert self._tape is not None and self._full_model is not None
            try:
                value = self._tape.replay([source])[0]
            except Exception:  # a kernel that behaves differently on meta
                self._sources = _tensor_values(self._full_model())
                self.deferred, self._copied, self._tape = False, False, None
                return self.materialize(name, keep)
            return _dense_aligned(value if keep is None else keep(value))
        value = source if keep is None else keep(source)
        return _dense_aligned(value, copy=self._copied and storage_key(value) == storage_key(source))

    def install(self, names: Iterable[str], keep: Callable[[str, Tensor], Tensor] | None = None) -> None:
        """Puts real tensors into the model. Names of one shared tensor share the real one, too."""
        for name in names:
            old = _find_tensor(self.model, name)
            if old.is_meta:
                real = self.materialize(name, None if keep is None else partial(keep, name))
                _replace(self.model, old, _like_original(old, real))

    def drop_unused(self) -> None:
        """Frees the sources of tensors that were not installed."""
        self._sources, self._tape, self._full_model = {}, None, None


def build_meta_model(build: Callable[[], nn.Module], seed: int) -> MetaModel:
    """The model that `initialise(build, seed)` gives, without its weights. Restores the generators."""
    tape = OpTape(seed)
    found = _record_build(build, tape)
    if isinstance(found, str):
        with suppress(Exception):
            _materialize_leftovers(tape, set())  # caches outlive the failed build
        made = MetaModel.from_model(_checked(initialise(build, seed)), copy=False)
        made.reason = found
        return made
    made = MetaModel(*found, copied=True)
    made.deferred, made._tape, made._full_model = True, tape, lambda: initialise(build, seed)
    return made


def _record_build(build: Callable[[], nn.Module], tape: OpTape) -> tuple[nn.Module, TensorSources] | str:
    """The skeleton and the sources of its tensors, or why the build cannot be recorded."""
    recorder = InitRecorder(tape)
    try:
        with preserve_generators():
            seed_everything(tape.seed, INITIAL)
            forwards = register_module_forward_pre_hook(recorder.refuse_forward)
            try:
                with recorder, FakeCpu(recorder):
                    model = build()
            finally:
                forwards.remove()
        if recorder.refused:
            return recorder.refused
        named = _named_tensors(_checked(model))
        if len({storage_key(tensor) for _, tensor in named}) < len({id(tensor) for _, tensor in named}):
            return "two tensors share memory"
        sources = {name: tape.view(tensor) if tensor.is_meta else tensor.detach() for name, tensor in named}
        del named
        _empty(model)
        _materialize_leftovers(tape, {each.storage for each in sources.values() if isinstance(each, RecordedView)})
    except Exception as error:  # also the user's own: the full build raises it again
        return recorder.refused or f"{type(error).__name__}: {error}"
    return model, sources


def _materialize_leftovers(tape: OpTape, named: set[int]) -> None:
    """Computes recorded tensors that are neither parameter nor buffer but still referenced: attributes, caches."""
    if not tape.in_use():
        return  # a look at every object costs a forked process a copy of each
    gc.collect()
    computed: dict[int, UntypedStorage] = {}
    while strays := [each for each in gc.get_objects() if issubclass(type(each), Tensor) and tape.has_recorded(each)]:
        replaced = False
        for stray in strays:
            view = tape.view(stray)
            if view.storage in named:
                raise CannotRecord("the model keeps a view of a parameter")
            if view.storage not in computed:
                computed[view.storage] = tape.replay([view])[0].untyped_storage()
            with suppress(RuntimeError):  # the base of a view goes with the view
                torch.utils.swap_tensors(stray, _like_original(stray, view.on(computed[view.storage])))
                replaced = True
        if not replaced:
            raise CannotRecord("a large tensor is referenced where it cannot be replaced")


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers under all their names, except lazy ones that have no shape yet."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = [*parameters, *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in found if not is_lazy(tensor)]


def _find_tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    found = (module._parameters | module._buffers)[leaf]
    assert found is not None
    return found


def _tensor_values(model: nn.Module) -> TensorSources:
    return {name: tensor.detach() for name, tensor in _named_tensors(model)}


def _skeleton(model: nn.Module) -> nn.Module:
    tensors = {id(tensor): tensor for _, tensor in _named_tensors(model)}
    return copy.deepcopy(model, {key: _like_original(tensor, meta_like(tensor)) for key, tensor in tensors.items()})


def _empty(model: nn.Module) -> None:
    for tensor in {id(tensor): tensor for _, tensor in _named_tensors(model)}.values():
        _replace(model, tensor, _like_original(tensor, meta_like(tensor)))


def _like_original(old: Tensor, value: Tensor) -> Tensor:
    """The value with the class, attributes and hooks of the old tensor."""
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
    """Replaces `old` by `new` wherever it is referenced."""
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # weak references, as recurrent layers have them
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name in [name for name, tensor in held.items() if tensor is old]:
                    setattr(module, name, new)


def _dense_aligned(tensor: Tensor, copy: bool = False) -> Tensor:
    """The tensor if it is dense, aligned and alone in its memory, else such a copy."""
    tensor = tensor.detach()
    dense = tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    if dense and alone and is_aligned(tensor) and not copy:
        return tensor
    layout = torch.preserve_format if dense else torch.contiguous_format
    return torch.empty_like(tensor, memory_format=layout).copy_(tensor)
