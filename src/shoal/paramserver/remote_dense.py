"""A dense table at the client: named tensors, cut by rows over the shards.

A push packs gradients at once into the memory that they are sent from: the caller may change its tensors afterwards. A
pull writes values to their tensors when the reply is received, in `wait` or `done` of any future.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver import messages
from shoal.paramserver.dense_table import Keys
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import DenseSpec, PullRequest, PushRequest, ServerRequest, Span, TableSlice, ValuesReply
from shoal.paramserver.request_client import RequestClient
from shoal.paramserver.request_layout import PackedBody, RequestLayout
from shoal.paramserver.sharding import RowRange, dtype_name, dtype_of, shard_dense

NamedTensors: TypeAlias = Mapping[str, Tensor | None] | Sequence[Tensor | None]

MAX_LAYOUTS = 64  # cached for each shard, by keys
SPLIT_BYTES = 8 << 20  # a shard's slice of a table that is larger travels in chunks
CHUNK_BYTES = 2 << 20  # of a push; a single tensor is never split
STREAM_BYTES = 2 << 20  # of a pull: small enough to stay in the cache from server to client
MAX_SINGLE_COPIES = 4  # so few tensors are copied faster one by one than in one call


@dataclass(frozen=True)
class DenseTransfer:
    """Where the replies to the requests of one push, put or pull go."""

    future: ReplyFuture[Any]
    versions: list[int]  # of the replies
    targets: Sequence[Tensor | None] | None  # values are written there; None: the replies have none


class RemoteDenseTable:
    """`versions`: by shard, of the last pull."""

    def __init__(self, client: RequestClient, name: str, spec: DenseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.ranges = shard_dense(spec, client.shards)
        self.versions = [-1] * client.shards
        self._index = {each: index for index, each in enumerate(spec.names)}
        self._shapes = [torch.Size(shape) for shape in spec.shapes]
        self._dtypes = [dtype_of(dtype) for dtype in spec.dtypes]
        self._all_shards: list[tuple[int, Keys]] = [(shard, None) for shard, ranges in enumerate(self.ranges) if ranges]
        self._layouts: dict[tuple[int, Keys], RequestLayout] = {}

    @classmethod
    def create(
        cls,
        client: RequestClient,
        name: str,
        tensors: Mapping[str, Tensor] | None,
        spec: DenseSpec | None,
        optimizer: str,
        settings: Mapping[str, float | bool],
    ) -> "RemoteDenseTable":
        if spec is None:
            if not tensors:
                raise InputError(f"table {name!r}: neither tensors nor a spec", fix="tensors={'w': torch.zeros(4)}")
            spec = DenseSpec(
                names=list(tensors),
                shapes=[list(tensor.shape) for tensor in tensors.values()],
                dtypes=[dtype_name(tensor.dtype) for tensor in tensors.values()],
                optimizer=optimizer,
                settings=dict(settings),
            )
        table = cls(client, name, spec)
        declare_table(client, name, spec)
        for shard in range(client.shards):
            client.expect_bytes(shard, table._layout(shard, None).num_bytes)
        if tensors is not None:
            table.put(tensors, fill=True).wait()
        return table

    def push(
        self, gradients: NamedTensors, *, lease: int = -1, base_version: int = -1, pull_into: NamedTensors | None = None
    ) -> ReplyFuture[int]:
        """Sends one update. A tensor that is None or not named has no gradient. `base_version`: the version that the
        gradients were computed from; -1: the last pull. `pull_into`: gets all new values. The future's value is the
        highest version of a shard after the update.

        Each shard applies its slice by itself. Without a lease, a large slice is sent and applied in chunks of full
        tensors. A refused chunk (a gradient that is not finite) does not undo the others."""
        present = self._checked(gradients)
        targets = self._checked(pull_into) if pull_into is not None else None
        plan: list[tuple[int, list[Keys], bool]] = []
        requests = 0
        for shard, keys in self._keys_by_shard(present, empty=targets is not None):
            chunks = self._chunks(shard, keys) if lease < 0 and self.client.compressor is None else [keys]
            streams = len(chunks) > 1 and keys is None and targets is not None and self._can_stream(shard, targets)
            plan.append((shard, chunks, streams))
            requests += len(chunks) + (sum(len(self._spans(shard, chunk)) for chunk in chunks) if streams else 0)
        versions: list[int] = []
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), requests)
        transfer, acknowledged = DenseTransfer(future, versions, targets), DenseTransfer(future, versions, None)
        for shard, chunks, streams in plan:
            base = self.versions[shard] if base_version < 0 else base_version
            for chunk in chunks:
                last = chunk is chunks[-1]
                pull = targets is not None and last and not streams
                make_request = partial(PushRequest, lease=lease, base_version=base, pull=pull, last=last)
                self._send(shard, chunk, present, make_request, transfer if pull else acknowledged, True)
                if streams:
                    self._pull_streamed(shard, chunk, transfer)
        return future

    def put(self, values: NamedTensors, *, fill: bool = False) -> ReplyFuture[int]:
        """Sets values. `fill`: sets only tensors without values."""
        present = self._checked(values)
        versions: list[int] = []
        puts = [(shard, chunk) for shard, keys in self._keys_by_shard(present) for chunk in self._chunks(shard, keys)]
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), len(puts))
        for shard, chunk in puts:
            transfer = DenseTransfer(future, versions, None)
            self._send(shard, chunk, present, partial(messages.PutRequest, fill=fill), transfer, False)
        return future

    def pull(self, into: NamedTensors | None = None) -> ReplyFuture[dict[str, Tensor]]:
        """Writes all values into these tensors, or into new ones, which the future's value has by name. A large table
        comes in several replies: another worker's push meanwhile may be in some of them only."""
        if into is None:
            into = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)]
        targets = self._checked(into)
        found = {name: tensor for name, tensor in zip(self.spec.names, targets, strict=True) if tensor is not None}
        plan: list[tuple[int, Keys, bool]] = []
        requests = 0
        for shard, keys in self._keys_by_shard(targets):
            spans = len(self._spans(shard, None))
            streams = keys is None and spans > 1 and self._can_stream(shard, targets)
            plan.append((shard, keys, streams))
            requests += spans if streams else 1
        future: ReplyFuture[dict[str, Tensor]] = ReplyFuture(self.client, lambda: found, requests)
        transfer = DenseTransfer(future, [], targets)
        for shard, keys, streams in plan:
            if streams:
                self.versions[shard] = -1
                self._pull_streamed(shard, None, transfer)
            else:
                on_reply = partial(self._on_reply, shard, transfer, None)
                self.client.submit(shard, PullRequest([TableSlice(self.name, keys)]), (), on_reply, future)
        return future

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _chunks(self, shard: int, keys: Keys) -> list[Keys]:
        """Divides keys into chunks for one request each."""
        layout = self._layout(shard, keys)
        if layout.num_bytes <= SPLIT_BYTES:
            return [keys]
        if layout.chunks is None:
            flat = layout.flat
            sizes = [n * flat.dtypes[buffer].itemsize for n, buffer in zip(flat.counts, flat.buffers, strict=True)]
            found: list[list[int]] = []
            size = 0
            for key, num_bytes in zip(range(len(sizes)) if keys is None else keys, sizes, strict=True):
                if not found or size + num_bytes > CHUNK_BYTES:
                    found.append([])
                    size = 0
                found[-1].append(key)
                size += num_bytes
            layout.chunks = [tuple(chunk) for chunk in found]
        return list(layout.chunks)

    def _can_stream(self, shard: int, targets: Sequence[Tensor | None]) -> bool:
        """Whether values can be written to these tensors in spans that end anywhere."""
        layout = self._layout(shard, None)
        mine = [targets[rows.index] for rows in layout.ranges]
        return len(layout.sizes) == 1 and all(target is not None and target.is_contiguous() for target in mine)

    def _spans(self, shard: int, keys: Keys) -> list[Span]:
        """Spans of a shard's flat tensor that hold these consecutive keys."""
        laid = self._layout(shard, None).flat
        first, last = (0, len(laid.offsets) - 1) if keys is None else (keys[0], keys[-1])
        if len(laid.dtypes) != 1 or last < 0:
            return []
        start, stop = laid.offsets[first], laid.offsets[last] + laid.counts[last]
        step = STREAM_BYTES // laid.dtypes[0].itemsize
        return [(begin, min(begin + step, stop)) for begin in range(start, stop, step)]

    def _pull_streamed(self, shard: int, keys: Keys, transfer: DenseTransfer) -> None:
        """Requests values in spans: the client copies one while the server copies the next."""
        layout, targets = self._layout(shard, None), transfer.targets
        assert targets is not None
        size = layout.flat.dtypes[0].itemsize
        for start, stop in self._spans(shard, keys):

            def on_reply(reply: ValuesReply, tensors: Sequence[Tensor], stays: bool, start: int = start) -> None:
                _scatter_values(tensors[0], start, layout, targets)
                transfer.versions.append(reply.version)
                self.versions[shard] = reply.version  # of the last span
                transfer.future.count_reply()

            request = PullRequest([TableSlice(self.name, span=(start, stop))])
            self.client.submit(shard, request, (), on_reply, transfer.future, reply_bytes=(stop - start) * size)

    # -- packing ------------------------------------------------------------------------------------------------------

    def _keys_by_shard(self, present: Sequence[Tensor | None], empty: bool = False) -> list[tuple[int, Keys]]:
        """The keys of these tensors by shard. `empty`: also shards that have none of them."""
        if all(tensor is not None for tensor in present):
            return self._all_shards
        found: list[tuple[int, Keys]] = []
        for shard, ranges in enumerate(self.ranges):
            keys = tuple(key for key, rows in enumerate(ranges) if present[rows.index] is not None)
            if keys or (empty and ranges):
                found.append((shard, None if len(keys) == len(ranges) else keys))
        return found

    def _send(
        self,
        shard: int,
        keys: Keys,
        present: Sequence[Tensor | None],
        make_request: Callable[[list[TableSlice]], ServerRequest],
        transfer: DenseTransfer,
        compress: bool,
    ) -> None:
        """Packs one shard's row ranges and sends them."""
        client, future = self.client, transfer.future
        layout = self._layout(shard, keys)
        dtypes = layout.flat.dtypes
        compressor = client.compressor if compress else None
        if len(dtypes) > 1 or not dtypes[0].is_floating_point:
            compressor = None
        block = client.reserve(shard, layout.num_bytes) if compressor is None else None
        packed = layout.in_ring(block.memory) if block is not None else layout.take_spare()
        _copy(packed.views, [_rows_in(present[rows.index], rows) for rows in layout.ranges])
        if compressor is not None:
            table_slice = TableSlice(self.name, keys, False, compressor.name, layout.flat.totals[0])
            payload = compressor.encode(packed.flats[0], (self.name, shard, keys))
            layout.return_spare(packed)
            on_reply = partial(self._on_reply, shard, transfer, None)
            client.submit(shard, make_request([table_slice]), [payload], on_reply, future)
            return
        on_reply = partial(self._on_reply, shard, transfer, (layout, packed) if block is None else None)
        client.submit(shard, make_request([TableSlice(self.name, keys)]), packed.flats, on_reply, future, block)

    def _layout(self, shard: int, keys: Keys) -> RequestLayout:
        layout = self._layouts.get((shard, keys))
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS * self.client.shards:
                self._layouts.clear()
            ranges = self.ranges[shard]
            layout = RequestLayout(ranges if keys is None else [ranges[key] for key in keys], self.spec)
            self._layouts[shard, keys] = layout
        return layout

    def _on_reply(
        self,
        shard: int,
        transfer: DenseTransfer,
        packed: tuple[RequestLayout, PackedBody] | None,
        reply: messages.AckReply | ValuesReply,
        tensors: Sequence[Tensor],
        stays: bool,
    ) -> None:
        """Writes a reply's values straight to their tensors. `packed`: the memory of the request."""
        if packed is not None:
            packed[0].return_spare(packed[1])
        transfer.versions.append(reply.version)
        targets = transfer.targets
        if targets is not None and isinstance(reply, ValuesReply):
            self.versions[shard] = reply.version
            at = 0
            for each in reply.slices:
                layout = self._layout(shard, each.keys)
                views = layout.flat.views(tensors[at : at + len(layout.sizes)])
                _copy([_rows_in(targets[rows.index], rows) for rows in layout.ranges], views)
                at += len(layout.sizes)
        transfer.future.count_reply()

    # -- the caller's tensors -----------------------------------------------------------------------------------------

    def _in_order(self, given: NamedTensors) -> list[Tensor | None]:
        names = self.spec.names
        if not isinstance(given, Mapping):
            if len(given) != len(names):
                raise InputError(f"{len(given)} tensors for table {self.name!r}, which has {len(names)}")
            return list(given)
        ordered: list[Tensor | None] = [None] * len(names)
        for name, tensor in given.items():
            index = self._index.get(name)
            if index is None:
                near = get_close_matches(name, names, n=1)
                raise InputError(
                    f"table {self.name!r} has no tensor {name!r}",
                    fix=f"did you mean {near[0]!r}?" if near else f"one of {', '.join(names[:8])}",
                )
            ordered[index] = tensor
        return ordered

    def _checked(self, given: NamedTensors) -> list[Tensor | None]:
        """The tensors in the order of the spec. Checked, since packing would broadcast or convert silently."""
        found = self._in_order(given)
        for index, tensor in enumerate(found):
            if tensor is None:
                continue
            if tensor.requires_grad:
                found[index] = tensor = tensor.detach()
            if tensor.shape != self._shapes[index] or tensor.dtype is not self._dtypes[index]:
                raise self._misfit(index, tensor)
        return found

    def _misfit(self, index: int, tensor: Tensor) -> InputError:
        name, shape, dtype = self.spec.names[index], self.spec.shapes[index], self.spec.dtypes[index]
        if tensor.shape != self._shapes[index]:
            given = f"this tensor has {list(tensor.shape)}"
            return InputError(f"{name!r} has shape {shape} in table {self.name!r}, but {given}")
        given = f"this tensor is {dtype_name(tensor.dtype)}"
        return InputError(f"{name!r} is {dtype} in table {self.name!r}, but {given}", fix=f".to(torch.{dtype})")


def _copy(to: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    """Copies values to tensors, except where either is None."""
    pairs = [(into, value) for into, value in zip(to, values, strict=True) if into is not None and value is not None]
    if len(pairs) <= MAX_SINGLE_COPIES:
        for into, value in pairs:
            into.copy_(value)
    else:
        torch._foreach_copy_([into for into, _ in pairs], [value for _, value in pairs])


def _scatter_values(values: Tensor, start: int, layout: RequestLayout, targets: Sequence[Tensor | None]) -> None:
    """Writes a span of the flat tensor, which begins at `start`, to the tensors of its row ranges."""
    laid, stop = layout.flat, start + values.numel()
    first = max(0, bisect_right(laid.offsets, start) - 1)
    for key in range(first, len(laid.offsets)):
        offset = laid.offsets[key]
        if offset >= stop:
            return
        begin, end = max(start, offset), min(stop, offset + laid.counts[key])
        target = _rows_in(targets[layout.ranges[key].index], layout.ranges[key])
        if begin < end and target is not None:
            target.view(-1)[begin - offset : end - offset].copy_(values[begin - start : end - start])


def _rows_in(tensor: Tensor | None, rows: RowRange) -> Tensor | None:
    if tensor is None or not tensor.dim() or (rows.start == 0 and rows.stop == tensor.shape[0]):
        return tensor
    return tensor[rows.start : rows.stop]


def declare_table(client: RequestClient, name: str, spec: DenseSpec | messages.SparseSpec) -> None:
    """Declares a table on all shards."""
    for future in [client.request(shard, messages.DeclareRequest(name, spec)) for shard in range(client.shards)]:
        future.wait()
