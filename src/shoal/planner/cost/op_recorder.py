"""Records a pass over a model: operators, lifetimes of storages, what autograd keeps. `trace.py` adds it up."""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shoal.parallel.blocks import BlockList

StorageBytes = tuple[int, int]  # a storage's number, and bytes of it
END = 1 << 62  # above autograd's sequence numbers, except that of the node that accumulates gradients
# Operators that do not read what they overwrite.
FRESH = {
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"),
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"),
}
FREE = ("empty", "new_empty", "detach", "lift", "_local_scalar", "set_")  # prefixes: the operator that fills it counts
LOOKUPS = ("embedding", "index_select", "gather")  # they read only the rows that they return
SOFTMAX = ("_softmax", "_safe_softmax", "_softmax_backward_data")
PRODUCTS = ("bmm", "baddbmm")


@dataclass(frozen=True, kw_only=True)
class TensorCut:
    """Modules and parameters that tensor parallelism would slice."""

    modules: Mapping[str, str] = field(default_factory=dict)  # name -> column, row, vocab or attention
    parameters: frozenset[str] = frozenset()


@dataclass(slots=True)
class RecordedOp:
    """An operator that ran."""

    name: str
    clock: int
    segment: int
    backward: bool
    node: int  # autograd's sequence number: in forward its own, in backward that of the forward operator
    reads: list[StorageBytes]
    writes: list[StorageBytes]
    flops: float
    sliced: bool
    core: bool = False


@dataclass(slots=True)
class RecordedStorage:
    """A storage, from its first use until it is freed."""

    size: int
    segment: int
    born: int
    kind: str  # parameter, buffer or input; empty: an operator made it
    died: int | None = None
    used: int = -1  # the last segment of forward that used it


@dataclass(slots=True)
class SavedStorage:
    """A storage that autograd keeps."""

    segment: int  # the first that kept it
    node: int
    sliced: bool


class OpRecorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, cut: TensorCut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut = cut
        self.clock = 0
        self.backward = False
        self.segment = 0
        self.names: list[str] = []  # of finished segments
        self.ops: list[RecordedOp] = []
        self.storages: list[RecordedStorage] = []
        self.saved: dict[int, SavedStorage] = {}
        self.dtypes: Counter[torch.dtype] = Counter()  # FLOPs of products, by dtype
        self.all_reduces: list[tuple[int, int]] = []  # of tensor parallelism, both passes: segment and bytes
        self.fixed: set[int] = set()  # storages whose size does not depend on the number of samples
        self.users: dict[int, set[int]] = {}  # of a parameter: the segments that use it
        self._known: dict[int, int] = {}  # address of a live storage -> its number
        self._watched: dict[int, Any] = {}
        self._bounds: list[int] = []  # autograd's number at the end of each segment
        self._depth = 0
        self._inside: list[str] = []  # kinds of the split modules that are being called
        self._sliced: set[int] = set()  # storages that are divided among tensor-parallel workers
        self._sliced_nodes: set[int] = set()
        self._in_slices = False
        self._node = -1
        self.parameters: dict[int, list[tuple[str, Tensor]]] = {}  # by storage: all names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(self._number(parameter, "parameter"), []).append((name, parameter))
        for buffer in model.buffers():
            self._number(buffer, "buffer")

    def inputs(self, *trees: Any) -> None:
        """Registers tensors from outside the model: they belong to no segment."""
        for leaf in tree_leaves(trees):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._number(leaf, "input")

    # -- storages -----------------------------------------------------------------------------------------------------

    def _number(self, tensor: Tensor, kind: str = "") -> int:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address not in self._known:
            number = self._known[address] = len(self.storages)
            self.storages.append(RecordedStorage(storage.nbytes(), self.segment, self.clock, kind))
            self.fixed |= {number} if kind in ("parameter", "buffer") else set()
            self._watched[number] = weakref.ref(storage, self._storage_freed(address, number))
        return self._known[address]

    def _storage_freed(self, address: int, number: int) -> Callable[[Any], None]:
        def callback(_: Any) -> None:
            self.storages[number].died = self.clock
            self._watched.pop(number, None)
            self._known.pop(address, None)

        return callback

    def pack(self, tensor: Tensor) -> Tensor:
        """Records that autograd keeps `tensor`. Returns it detached: with its history it would keep itself alive."""
        if tensor.layout == torch.strided:
            number = self._number(tensor, "input")
            if self.storages[number].kind not in ("parameter", "buffer"):
                self.saved.setdefault(number, SavedStorage(self.segment, _sequence() - 1, number in self._sliced))
        return tensor.detach()

    def gradients(self) -> set[int]:
        """The storages of the parameters' gradients."""
        found = [parameter.grad for named in self.parameters.values() for _, parameter in named]
        return {self._number(each) for each in found if each is not None and each.layout == torch.strided}

    # -- segments -----------------------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, model: nn.Module, blocks: BlockList) -> Iterator[None]:
        hooks = []
        for name, kind in self.cut.modules.items():
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(self._split_begins(kind), prepend=True))
            hooks.append(module.register_forward_hook(self._split_ends(kind)))
        for name in blocks.names:
            module = model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
            hooks.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0 and not self.backward:
                self.names.append(name)
                self._bounds.append(_sequence())
                self.segment += 1

        return hook

    def _split_begins(self, kind: str) -> Any:
        """Each worker makes a summand of the gradient of a column's input: one all-reduce in backward."""

        def hook(module: nn.Module, inputs: Any) -> None:
            self._inside.append(kind)
            entering = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            if kind == "attention":  # queries, keys and values, each for itself
                self.all_reduces += [(self.segment, leaf.nbytes) for leaf in entering[:3]]
            elif kind == "column":
                self.all_reduces += [(self.segment, leaf.nbytes) for leaf in entering[:1]]

        return hook

    def _split_ends(self, kind: str) -> Any:
        """The output of a column is sliced; other outputs are summed: one all-reduce in forward."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._inside.pop()
            leaving = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if kind == "column":
                self._sliced |= {self._number(leaf) for leaf in leaving}
            else:
                self._sliced -= {self._number(leaf) for leaf in leaving}
                self.all_reduces += [(self.segment, leaf.nbytes) for leaf in leaving[:1]]

        return hook

    def forward_ends(self) -> None:
        """Assigns what follows the last block, such as the loss, to it. A model without blocks is one segment."""
        self.names = self.names or ["model"]
        self._bounds = [*self._bounds[: len(self.names) - 1], END]
        last = len(self.names) - 1
        for done in self.ops:
            done.segment = min(done.segment, last)
        for storage in self.storages:
            storage.segment, storage.used = min(storage.segment, last), min(storage.used, last)
        for kept in self.saved.values():
            kept.segment = min(kept.segment, last)
        self.all_reduces = [(min(segment, last), size) for segment, size in self.all_reduces]
        self.users = {number: {min(each, last) for each in users} for number, users in self.users.items()}
        self.backward, self.segment = True, last

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a property of a tensor
            return func(*args, **kwargs)
        self.clock += 1
        self._find_place()
        reads, known = self._moved((args, kwargs)), len(self.storages)
        result = func(*args, **kwargs)
        writes = [pair for pair in self._moved(result) if pair[0] >= known or func._schema.is_mutable]
        if not self.backward:
            self._follow(reads, writes)
        name = str(func._schema.name).partition("::")[2]
        if writes and not name.startswith(FREE):
            flops = _flops(func, args, kwargs, result)
            self._note(name, _really_read(name, reads, writes), writes, flops)
            if flops:
                self.dtypes[next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))] += int(flops)
        return result

    def _follow(self, reads: list[StorageBytes], writes: list[StorageBytes]) -> None:
        """Follows weights, fixed sizes and slices from what an operator reads to what it writes, views included."""
        written = {number for number, _ in writes}
        for number, _ in reads:
            self.storages[number].used = self.segment
            if number in self.parameters:
                self.users.setdefault(number, set()).add(self.segment)
        if reads and all(number in self.fixed for number, _ in reads):
            self.fixed |= written
        else:
            self.fixed -= written - self.parameters.keys()
        self._in_slices = bool(self._inside) or any(number in self._sliced for number, _ in reads)
        if self._in_slices:
            self._sliced |= written
            self._sliced_nodes.add(self._node)

    def _find_place(self) -> None:
        """Finds autograd's sequence number of the operator, and with it the segment of backward."""
        if not self.backward:
            self._node = _sequence() - 1
            return
        current = torch._C._current_autograd_node()
        number = END if current is None else int(current._sequence_nr())
        if number < END:  # else a gradient is accumulated: still the same segment
            self._node, self.segment = number, bisect_right(self._bounds, number)

    def _note(self, name: str, reads: list[StorageBytes], writes: list[StorageBytes], flops: float) -> None:
        core = name.startswith("_scaled_dot_product") or name in SOFTMAX
        if self.backward:
            sliced = self._node in self._sliced_nodes
        else:  # every worker looks up all words; only the table of the gradient is smaller
            sliced = self._in_slices and self._inside[-1:] != ["vocab"]
        self.ops.append(
            RecordedOp(name, self.clock, self.segment, self.backward, self._node, reads, writes, flops, sliced, core)
        )

    def _moved(self, tree: Any) -> list[StorageBytes]:
        leaves = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
        found = [(self._number(leaf), leaf.nbytes) for leaf in leaves.values() if leaf.layout == torch.strided]
        return [(number, min(size, self.storages[number].size)) for number, size in found]


def _sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _really_read(name: str, reads: list[StorageBytes], writes: list[StorageBytes]) -> list[StorageBytes]:
    if name in LOOKUPS and reads:
        table, *rest = reads
        return [(table[0], sum(size for _, size in writes)), *rest]
    if name in FRESH:
        return [pair for pair in reads[1:] if pair not in writes]
    return reads


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOPs of matrix products: 2 m n k, by torch's own formulas."""
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return float(sdpa_flop_count(*(each.shape for each in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return float(sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    if packet in (torch.ops.aten.mv, torch.ops.aten.addmv):
        matrix = args[0] if packet is torch.ops.aten.mv else args[1]
        return 2.0 * float(matrix.numel())
    return 0.0
