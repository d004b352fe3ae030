"""The torch.distributed backend "shoal".

    dist.all_reduce(t) ──► ShoalProcessGroup.allreduce ──► WorkQueue (order) ──► CollectiveTransport (memory, messages)

It subclasses `ProcessGroup`, since `Backend` cannot be subclassed in Python. Tensors on a GPU go to NCCL, which opens
with the first one. `registration.py` registers the backend.
"""

import functools
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.collectives.arguments import (
    FlatTensor,
    as_bytes,
    as_list,
    check_same,
    flat_outputs,
    flatten,
    move_call,
    read_op,
    read_rank_list,
    read_root,
    reduce_call,
)
from shoal.collectives.handshake import GroupMember, fresh_store
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import NAME, CommOptions
from shoal.collectives.shm_p2p import ANY_SOURCE
from shoal.collectives.transport import CollectiveTransport, TransportMessage, open_transport
from shoal.collectives.work_handles import CombinedWork, MessageWork
from shoal.collectives.work_queue import CollectiveWork, StartedCollective, WorkQueue
from shoal.errors import CallError, CollectiveError, PeerLost
from shoal.numerics.lanes import Span

_NO_LIMIT = timedelta(0)
_open_groups: "weakref.WeakSet[ShoalProcessGroup]" = weakref.WeakSet()
_leaving_processes: set[int] = set()  # those that leave their groups at their end


def _leave_at_exit(group: "ShoalProcessGroup") -> None:
    _open_groups.add(group)
    if os.getpid() not in _leaving_processes:
        _leaving_processes.add(os.getpid())
        # Unlike atexit, this also runs in processes that multiprocessing starts.
        Finalize(None, _leave_all, exitpriority=100)


def _leave_all() -> None:
    """At the end of the process, leaves the groups that were not destroyed and reports the cause to their other ranks.
    The interpreter would crash if its end found threads in torch."""
    cause = sys.exc_info()[1] or getattr(sys, "last_value", None)
    for group in list(_open_groups):
        with suppress(Exception):
            if cause is not None and not isinstance(cause, SystemExit):
                text = "".join(traceback.format_exception_only(cause)).strip().splitlines()[-1]
                group.transport.health.fail(PeerLost(f"{group.members[group.rank()]} ended with {text}"))
            group.shutdown()


def _route_by_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Sends a call whose tensors are on a GPU to that device's own backend."""

    @functools.wraps(method)
    def call(self: "ShoalProcessGroup", *arguments: Any, **named: Any) -> Any:
        tensor = _first_tensor(arguments)
        if tensor is not None and tensor.device.type != "cpu":
            return getattr(self.on_device(tensor.device), method.__name__)(*arguments, **named)
        return method(self, *arguments, **named)

    return call


def _nothing() -> None:
    return


def _hurrying(queue: WorkQueue) -> Callable[[], None]:
    """Hurries a queue, and keeps neither it nor its group."""
    known = weakref.ref(queue)

    def hurry() -> None:
        if (found := known()) is not None:
            found.hurry()

    return hurry


def _first_tensor(arguments: Any) -> Tensor | None:
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = _first_tensor(argument)
            if found is not None:
                return found
    return None


class ShoalProcessGroup(dist.ProcessGroup):
    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, options: CommOptions | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only form that a subclass may use
        store = fresh_store(store, rank)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self.members: list[GroupMember]
        self.transport: CollectiveTransport
        self.members, self.transport = open_transport(store, rank, size, timeout, options)
        _leave_at_exit(self)
        self._overlapping = self.transport.overlapping
        wake = self._overlapping.wake if self._overlapping is not None else _nothing
        self._queue = WorkQueue("shoal collectives", self._limit, self.transport.abandon, wake)
        if self._overlapping is not None:
            self._overlapping.call_each_tick(_hurrying(self._queue))
        self._coalesced: list[Any] | None = None  # works since _start_coalescing
        self._all_reduce_calls: dict[Any, tuple[CollectiveOp, Any]] = {}  # by operation, type and shape
        self._name = self._description = ""
        self._barriers = 0
        self._on_device: dict[str, Any] = {}
        self._closed = False

    # -- names and sizes ------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getBackendName = _get_backend_name = name  # torch uses all three
    getRank, getSize = rank, size

    # Torch's implementation of these reads the backends of a C++ group, and this group has none.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(torch.device(kind) for kind in self._on_device)]

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cpu" else self.on_device(torch.device(device))

    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def on_device(self, device: torch.device) -> Any:
        """The backend for tensors on a GPU: NCCL, which all ranks open with their first such tensor. Not tested."""
        if device.type not in self._on_device:
            if device.type != "cuda" or not dist.is_nccl_available():
                raise CollectiveError(
                    f"the backend {NAME} moves CPU tensors, and CUDA ones through NCCL; this one is on {device}"
                )
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            prefixed = PrefixStore(f"{device.type}/", self._store)
            self._on_device[device.type] = dist.ProcessGroupNCCL(prefixed, self._rank, self._size, options)
        return self._on_device[device.type]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.transport.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def _limit(self, limit: timedelta | None) -> None:
        self.transport.set_timeout((self._timeout if limit is None else limit).total_seconds())

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        return self.transport.sequence

    # -- issuing --------------------------------------------------------------------------------------------------

    def _issue(
        self,
        action: Callable[[], None],
        value: Any,
        options: Any,
        begin: Callable[[], StartedCollective] | None = None,
        lazy: bool = False,
    ) -> CollectiveWork:
        """`begin`: the same, but it may be left when it has begun. `lazy`: see `WorkQueue.run`."""
        limit = getattr(options, "timeout", None)
        chosen: Callable[[], Any] = action if begin is None else begin
        if limit is not None and limit > _NO_LIMIT and limit != self._timeout:
            chosen, begin = functools.partial(self._run_within, limit, action), None
        asynchronous = self._coalesced is not None or options is None or getattr(options, "asyncOp", True)
        work = self._queue.run(chosen, value, asynchronous, leaves=begin is not None, lazy=lazy)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def run_in_order(self, action: Callable[[], None]) -> None:
        """Runs the caller's action in the order of the group's collectives."""
        self._queue.run(action, None, asynchronous=False)

    def _run_within(self, limit: timedelta, action: Callable[[], None]) -> None:
        self._limit(limit)
        try:
            action()
        finally:
            self._limit(None)

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> CombinedWork:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # -- reductions -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> CollectiveWork:  # type: ignore[override]
        tensors, op = as_list(tensors), read_op(opts)
        if not tensors:
            raise CallError("all_reduce requires non-empty tensor list, and was given none")
        if not tensors[0].is_cpu:
            return self.on_device(tensors[0].device).allreduce(tensors, opts)  # type: ignore[no-any-return]
        if len(tensors) == 1 and tensors[0].layout is torch.strided:
            tensor = tensors[0]
            key = (getattr(op, "op", op), tensor.dtype, tensor.shape)
            found = self._all_reduce_calls.get(key)
            if found is None:
                found = reduce_call("all_reduce", tensor, op)
                if found[1].factor is None:
                    self._all_reduce_calls[key] = found
            call, reduction = found
            begin = None
            if (overlapping := self._overlapping) is not None and tensor.is_contiguous():
                begin = functools.partial(overlapping.begin_all_reduce, flatten(tensor), reduction, call)
            return self._issue(lambda: self._all_reduce(tensor, reduction, call), tensors, opts, begin)
        # Several tensors of each rank become one sum.
        check_same("all_reduce", "a tensor", tensors, "another", tensors)
        call, reduction = reduce_call("all_reduce", tensors[0], op)
        if tensors[0].is_sparse and reduction.name != "sum":
            raise CollectiveError(
                f"unsupported reduction operation: sparse tensors have no {reduction.name}; they have sum"
            )

        def action() -> None:
            total = functools.reduce(reduction.combine, tensors)
            if total.is_sparse:
                self._sparse_all_reduce(total)
            else:
                self._all_reduce(total, reduction, call)
            for tensor in tensors:
                if tensor is not total:
                    tensor.detach().copy_(total)

        return self._issue(action, tensors, opts)

    def _all_reduce(self, tensor: Tensor, reduction: Any, op: CollectiveOp) -> None:
        flat = flatten(tensor)
        self.transport.all_reduce(flat, reduction, op)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))

    def _sparse_all_reduce(self, tensor: Tensor) -> None:
        """Sums sparse tensors in rank order. The ranks may hold values at different indices."""
        own = tensor.coalesce()
        counts = self._gather_rows(torch.tensor([own._nnz()])).view(-1).tolist()
        most = max(counts)
        indices = torch.zeros(own.sparse_dim(), most, dtype=torch.int64)
        indices[:, : own._nnz()] = own.indices()
        values = torch.zeros(most, *own.values().shape[1:], dtype=own.dtype)
        values[: own._nnz()] = own.values()
        gathered = zip(self._gather_rows(indices), self._gather_rows(values), counts, strict=True)
        operands = [
            torch.sparse_coo_tensor(each[:, :length], found[:length], own.shape, check_invariants=False)
            for each, found, length in gathered
        ]
        tensor.copy_(functools.reduce(torch.add, operands).coalesce())

    @_route_by_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> CollectiveWork:
        """Reduces each tensor, one after the other."""
        op = read_op(opts)
        if not tensors:
            raise CallError("all_reduce requires non-empty tensor list, and was given none")
        if any(tensor.is_sparse for tensor in tensors):
            raise CallError(
                "all_reduce of several: unsupported layout or invalid tensor layout at index: one is sparse"
            )
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise CallError("all_reduce of several: tensors must all have the same type")
        calls = [(tensor, *reduce_call("all_reduce", tensor, op)) for tensor in tensors]

        def action() -> None:
            for tensor, call, reduction in calls:
                self._all_reduce(tensor, reduction, call)

        return self._issue(action, list(tensors), opts)

    @_route_by_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = dist.ReduceOp.SUM, root: int = 0) -> CollectiveWork:
        (tensor,) = as_list(tensors)
        root = self._root("reduce", opts, root)
        call, reduction = reduce_call("reduce", tensor, getattr(opts, "reduceOp", op), root)

        def action() -> None:
            with FlatTensor(tensor, write_back=self._rank == root) as flat:
                self.transport.reduce(flat, root, reduction, call)

        return self._issue(action, [tensor], opts)

    @_route_by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CollectiveWork:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        op = read_op(opts)

        def action() -> None:
            for output, row in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, row, op)

        for output, row in zip(outputs, inputs, strict=True):
            if len(row) != self._size:
                raise CallError(
                    f"reduce_scatter needs an input for each of {self._size} ranks, and was given {len(row)}"
                )
            check_same("reduce_scatter", "the output", [output], "this rank's input", [row[self._rank]])
            check_same("reduce_scatter", "the output", [output], "an input", row, counts=False)
            reduce_call("reduce_scatter", output, op)
        return self._issue(action, outputs, opts)

    def _reduce_scatter(self, output: Tensor, row: Sequence[Tensor], op: Any) -> None:
        _, reduction = reduce_call("reduce_scatter", output, op)
        count = sum(source.numel() for source in row)
        call = CollectiveOp("reduce_scatter", output.dtype, count, (), reduction.name)
        with FlatTensor(output, write_back=True) as flat:
            self.transport.reduce_scatter([flatten(source) for source in row], flat, reduction, call)

    @_route_by_device
    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)  # type: ignore[no-any-return]

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    @_route_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> CollectiveWork:
        op = read_op(opts)
        for output, source in zip(outputs, sources, strict=True):
            if output.numel() * self._size != source.numel():
                raise CallError(
                    f"reduce_scatter of {self._size} ranks: the input has {source.numel()} elements,"
                    f" and the output {output.numel()}; the input must be {self._size} times the output"
                )
            check_same("reduce_scatter", "the output", [output], "the input", [source], counts=False)
            reduce_call("reduce_scatter", output, op)

        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                flat = flatten(source)
                row = flat.view(self._size, -1).unbind(0) if source.numel() else [flat] * self._size
                self._reduce_scatter(output, row, op)

        return self._issue(action, list(outputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def ordered_reduce(
        self,
        lanes: int,
        assignment: Sequence[Span],
        partials: Mapping[Span, Tensor],
        key: Hashable = None,
        attended: bool = False,
    ) -> CollectiveWork:
        """Sums the partial sums of all ranks, given by subtree of the lanes' tree, in the order of the tree.

        The sum overwrites each rank's first partial sum. All are flat contiguous tensors of one length. `attended`: the
        caller will wait for it soon.
        """
        first = next(iter(partials.values()))
        # The record has the assignment and not the partial sums: ranks may hold different numbers of them.
        spans = tuple(lane for span in assignment for lane in span)
        call = CollectiveOp("ordered_reduce", first.dtype, first.numel(), spans)

        given = (lanes, assignment, partials, key, call)
        if self._overlapping is None:
            return self._issue(functools.partial(self.transport.ordered_reduce, *given), [first], None)
        begin = functools.partial(self._overlapping.begin_ordered_reduce, *given)
        return self._queue.run(begin, [first], asynchronous=True, leaves=True, attended=attended)

    def prefix_sum(self, tensor: Tensor, exclusive: bool = False) -> Tensor:
        """The all-reduce over the ranks up to this one; `exclusive`: over the ranks below it."""
        call, reduction = reduce_call("prefix_sum", tensor, dist.ReduceOp.SUM)
        found: list[Tensor] = []
        self.run_in_order(lambda: found.append(self.transport.prefix_sum(flatten(tensor), reduction, call, exclusive)))
        return found[0].view(tensor.shape)

    # -- moves ----------------------------------------------------------------------------------------------------

    @_route_by_device
    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0) -> CollectiveWork:
        tensors, root = as_list(tensors), self._root("broadcast", opts, root)
        first = getattr(opts, "rootTensor", 0)
        if not 0 <= first < len(tensors):
            raise CallError(f"broadcast: invalid root tensor: there is no number {first} among {len(tensors)}")
        check_same("broadcast", "a tensor", tensors, "another", tensors)
        chosen = tensors[first]
        call = move_call("broadcast", chosen, root)
        flat = as_bytes(flatten(chosen))
        overlapping, in_place = self._overlapping, len(tensors) == 1 and flat.data_ptr() == chosen.data_ptr()
        if overlapping is not None and in_place:
            begin = functools.partial(overlapping.begin_broadcast, flat, root, call)
            lazy = overlapping.goes_straight(flat.nbytes)
            return self._issue(lambda: self.transport.broadcast(flat, root, call), tensors, opts, begin, lazy)

        def action() -> None:
            with FlatTensor(chosen, write_back=self._rank != root) as flat:
                self.transport.broadcast(as_bytes(flat), root, call)
            for tensor in tensors:
                if tensor is not chosen:
                    tensor.detach().copy_(chosen)

        return self._issue(action, tensors, opts)

    @_route_by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> CollectiveWork:
        """One tensor per rank, or several: then every output list holds all of them, rank by rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        each = len(inputs)
        if not inputs or len(outputs) != each:
            raise CallError(
                f"all_gather requires non-empty lists of equal length: {len(outputs)} outputs, {each} inputs"
            )
        if each == 1:
            return self._gather_lists(outputs, inputs, opts)
        if any(len(row) != each * self._size for row in outputs):
            raise CallError(f"all_gather: invalid output tensor list: {each * self._size} tensors each are needed")
        first = [[outputs[0][rank * each + number] for rank in range(self._size)] for number in range(each)]
        work = self._gather_lists(first, inputs, opts)
        work.wait()
        for row in outputs[1:]:
            for target, source in zip(row, outputs[0], strict=True):
                target.detach().copy_(source)
        return work

    @_route_by_device
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> CollectiveWork:
        """`outputs`: by rank, then by tensor."""
        return self._gather_lists([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def _gather_lists(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> CollectiveWork:
        for row, source in zip(outputs, inputs, strict=True):
            if len(row) != self._size:
                raise CallError(f"all_gather needs an output for each of {self._size} ranks, and was given {len(row)}")
            check_same("all_gather", "the input", [source], "an output", row)

        def action() -> None:
            for row, source in zip(outputs, inputs, strict=True):
                with flat_outputs(row) as flats:
                    self.transport.all_gather(flats, as_bytes(flatten(source)), move_call("all_gather", source))

        return self._issue(action, outputs, opts)

    @_route_by_device
    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [source], opts)  # type: ignore[no-any-return]

    _allgather_base = all_gather_into_tensor = all_gather_single

    @_route_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> CollectiveWork:
        for output, source in zip(outputs, sources, strict=True):
            if source.numel() * self._size != output.numel():
                raise CallError(
                    f"all_gather of {self._size} ranks: the output has {output.numel()} elements,"
                    f" and the input {source.numel()}; the output must be {self._size} times the input"
                )
            check_same("all_gather", "the input", [source], "the output", [output], counts=False)

        def action() -> None:
            for output, source in zip(outputs, sources, strict=True):
                with FlatTensor(output, write_back=True) as flat:
                    width = source.numel() * source.element_size()
                    rows = as_bytes(flat).split(width) if width else [as_bytes(flat)] * self._size
                    self.transport.all_gather(list(rows), as_bytes(flatten(source)), move_call("all_gather", source))

        return self._issue(action, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather_rows(self, row: Tensor) -> Tensor:
        """Returns the row of each rank as a row of one tensor. Beside collectives that are under way, if it can be."""
        rows, given = self._rows_like(row)
        if self._overlapping is None:
            self.run_in_order(lambda: self.transport.all_gather(*given))
        else:
            begin = functools.partial(self._overlapping.begin_all_gather, *given)
            self._queue.run(begin, None, asynchronous=False, leaves=True)
        return rows

    def _gather_rows(self, row: Tensor) -> Tensor:
        rows, given = self._rows_like(row)
        self.transport.all_gather(*given)
        return rows

    def _rows_like(self, row: Tensor) -> tuple[Tensor, tuple[list[Tensor], Tensor, CollectiveOp]]:
        """Memory for the row of each rank, and what an all-gather into it needs."""
        rows = torch.empty(self._size, *row.shape, dtype=row.dtype)
        flats = list(as_bytes(rows).view(self._size, row.nbytes).unbind(0))
        shape = tuple(row.shape) if row.dim() > 1 else ()
        call = CollectiveOp("all_gather", row.dtype, row.numel(), shape)
        return rows, (flats, as_bytes(flatten(row)), call)

    @_route_by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> CollectiveWork:
        (source,) = as_list(inputs)
        root = self._root("gather", opts, root)
        row = read_rank_list(outputs)
        self._check_root_list("gather", "outputs", row, source, root)
        call = move_call("gather", source, root)

        def action() -> None:
            with flat_outputs(row) as flats:
                self.transport.gather(flats if self._rank == root else None, as_bytes(flatten(source)), root, call)

        return self._issue(action, [row], opts)

    @_route_by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> CollectiveWork:
        (output,) = as_list(outputs)
        root = self._root("scatter", opts, root)
        row = read_rank_list(inputs)
        self._check_root_list("scatter", "inputs", row, output, root)
        call = move_call("scatter", output, root)

        def action() -> None:
            with FlatTensor(output, write_back=True) as flat:
                sources = [as_bytes(flatten(each)) for each in row] if self._rank == root else None
                self.transport.scatter(sources, as_bytes(flat), root, call)

        return self._issue(action, [output], opts)

    def _check_root_list(self, name: str, side: str, row: Sequence[Tensor], other: Tensor, root: int) -> None:
        if self._rank != root:
            if row:
                raise CallError(f"{name}: rank {self._rank} is not the root ({root}) and must give no {side}")
        elif len(row) != self._size:
            raise CallError(f"{name}: the root must give {self._size} {side}, one per rank, and gave {len(row)}")
        else:
            check_same(name, f"one of the {side}", row, "the other side", [other])

    @_route_by_device
    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> CollectiveWork:
        check_same("all_to_all", "the input", [source], "the output", [output], counts=False)
        rows_out = self._splits(output, output_sizes, "output")
        rows_in = self._splits(source, input_sizes, "input")
        call = CollectiveOp("all_to_all", source.dtype)

        def action() -> None:
            with FlatTensor(output, write_back=True) as flat:
                inputs = [as_bytes(each) for each in flatten(source).split(rows_in)]
                self.transport.all_to_all([as_bytes(each) for each in flat.split(rows_out)], inputs, call)

        return self._issue(action, [output], opts)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: Tensor, sizes: Sequence[int], side: str) -> list[int]:
        """Elements for each rank. `sizes` counts rows of the first dimension."""
        if not sizes:
            if tensor.numel() and (not tensor.dim() or tensor.shape[0] % self._size):
                raise CallError(
                    f"all_to_all: the {side} has shape {list(tensor.shape)},"
                    f" and its first dimension must divide by {self._size} ranks"
                )
            return [tensor.numel() // self._size] * self._size
        rows = tensor.shape[0] if tensor.dim() else 1
        if len(sizes) != self._size or sum(sizes) != rows:
            raise CallError(
                f"all_to_all: the {side} split sizes {list(sizes)} must be {self._size} and add up to"
                f" the {side}'s first dimension, {rows}"
            )
        width = tensor.numel() // rows if rows else 0
        return [size * width for size in sizes]

    @_route_by_device
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> CollectiveWork:
        for side, row in (("outputs", outputs), ("inputs", inputs)):
            if len(row) != self._size:
                raise CallError(f"all_to_all needs {self._size} {side}, one per rank, and was given {len(row)}")
        check_same("all_to_all", "an input", inputs, "an output", outputs, counts=False)
        call = CollectiveOp("all_to_all", inputs[0].dtype)

        def action() -> None:
            with flat_outputs(outputs) as flats:
                self.transport.all_to_all(flats, [as_bytes(flatten(each)) for each in inputs], call)

        return self._issue(action, list(outputs), opts)

    @_route_by_device
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> CollectiveWork:
        return self._issue(self.transport.barrier, [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the missing ranks. It uses the store, so the group stays usable."""
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)
        timeout = self._timeout if timeout is None else timeout
        limit = int(timeout.total_seconds() * 1000)
        if limit <= 0 and self._rank == 0:
            raise PeerLost(f"Rank 0 timed out in monitoredBarrier after {limit} ms")
        self._barriers += 1
        key = f"monitored/{self._barriers}"
        self._store.set(f"{key}/{self._rank}", "")
        if self._rank == 0:
            missing = self._missing(key, timeout, wait_all_ranks)
            ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            where = ", ".join(str(self.members[rank]) for rank in missing)
            verdict = f"{ranks} failed to pass monitoredBarrier in {limit} ms ({where})" if missing else ""
            self._store.set(f"{key}/verdict", verdict)
        else:
            try:
                self._store.wait([f"{key}/verdict"], timeout + timedelta(seconds=1))
                verdict = bytes(self._store.get(f"{key}/verdict")).decode()
            except RuntimeError:
                verdict = "it did not answer"
            if verdict:
                verdict = (
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting"
                    f" for send/recv from rank 0. Please check rank 0 logs for faulty rank: {verdict}"
                )
        if verdict:
            raise PeerLost(verdict)

    def _missing(self, key: str, timeout: timedelta, all_of_them: bool) -> list[int]:
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        try:
            self._store.wait(keys, timeout)
        except RuntimeError:
            late = [rank for rank, each in enumerate(keys) if not self._store.check([each])]
            return late if all_of_them else late[:1]
        return []

    # -- messages -------------------------------------------------------------------------------------------------

    @_route_by_device
    def send(self, tensors: Any, to: int, tag: int = 0) -> MessageWork:
        (tensor,) = as_list(tensors)
        self._check_peer(to, "send")
        message = self.transport.send(as_bytes(flatten(tensor)), to, tag, move_call("send", tensor, to))
        return self._message_work(message, tensor, None)

    @_route_by_device
    def recv(self, tensors: Any, source: int, tag: int = 0) -> MessageWork:
        self._check_peer(source, "recv")
        return self._receive(tensors, source, tag)

    @_route_by_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        return self._receive(tensors, ANY_SOURCE, tag)

    def _receive(self, tensors: Any, source: int, tag: int) -> MessageWork:
        (tensor,) = as_list(tensors)
        flat = FlatTensor(tensor, write_back=True)
        message = self.transport.receive(as_bytes(flat.flat), source, tag, move_call("recv", tensor, source))
        return self._message_work(message, tensor, flat)

    def _message_work(self, message: TransportMessage, tensor: Tensor, flat: FlatTensor | None) -> MessageWork:
        work = MessageWork(message, [tensor], flat, self._timeout.total_seconds())
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_peer(self, rank: int, name: str) -> None:
        self._check_rank(rank, name)
        if rank == self._rank:
            raise CallError(f"{name}: rank {rank} is this rank itself, and a message needs two ranks")

    def _root(self, name: str, options: Any, root: int) -> int:
        root = read_root(options, root)
        self._check_rank(root, name)
        return root

    def _check_rank(self, rank: int, name: str) -> None:
        if not 0 <= rank < self._size:
            raise CallError(f"{name}: invalid root rank or peer: there is no rank {rank} in a group of {self._size}")

    # -- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            _open_groups.discard(self)
            self.transport.close()
            self._queue.close()
            del self._store  # with its last reference it closes, and the next group can open one at the same port
            for backend in self._on_device.values():
                backend.shutdown()

    abort = shutdown
