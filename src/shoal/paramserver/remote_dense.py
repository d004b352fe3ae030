"""Named tensors as a worker sees them, wherever the shards have them. Of rows by number: remote_rows.py.

What is pushed is packed at once, into memory that it is sent from: the caller may change its tensors right afterwards.
What is pulled is written to its place when the answer is read, which happens in a `wait` or `done` of any future.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import (
    AckReply,
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PushRequest,
    PutRequest,
    ServerRequest,
    Span,
    SparseSpec,
    TableSlice,
    ValuesReply,
)
from shoal.paramserver.sharding import RowRange, dtype_of, flat_layout, shard_dense
from shoal.paramserver.wire_format import padded

if TYPE_CHECKING:
    from shoal.paramserver.client import ParameterClient

Keys: TypeAlias = tuple[int, ...] | None
NamedTensors: TypeAlias = Mapping[str, Tensor | None] | Sequence[Tensor | None]

MAX_LAYOUTS = 64  # sets of keys that are remembered for each shard
MAX_SHARED = 32  # places of a set in shared memory
MAX_SPARE = 2  # bodies of a set that are kept for the next one
SPLIT_BYTES = 8 << 20  # of a shard's part of a table: what is larger travels in pieces; less is not worth the turns
CHUNK_BYTES = 2 << 20  # of a piece; a single tensor is pushed whole
STREAM_BYTES = 2 << 20  # of values that are pulled: they stay in the cache from one side to the other
MAX_SINGLE_COPIES = 4  # tensors that are copied one by one: faster than all in one call


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class PackedBody(NamedTuple):
    """Views of one body: the flat tensors, the parts in them, and what lies between those."""

    flats: list[Tensor]
    views: list[Tensor]
    gaps: list[Tensor]


class RequestLayout:
    """Some parts of a shard, as they lie in the body of a request. Remembers views of memory that comes again."""

    def __init__(self, ranges: Sequence[RowRange], spec: DenseSpec) -> None:
        self.ranges = tuple(ranges)
        self.flat = laid = flat_layout(ranges, spec)
        self.sizes = [total * dtype.itemsize for total, dtype in zip(laid.totals, laid.dtypes, strict=True)]
        self.num_bytes = sum(padded(size) for size in self.sizes)
        self.strides = [torch.empty(shape, device="meta").stride() for shape in laid.shapes]
        self.chunks: list[Keys] | None = None
        self._shared: dict[int, PackedBody] = {}  # by address
        self._spare: list[PackedBody] = []

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The parts, in the memory of these: one call for each."""
        laid = self.flat
        starts = [each.storage_offset() for each in flats]
        return [
            flats[buffer].as_strided(shape, stride, starts[buffer] + offset)
            for buffer, shape, stride, offset in zip(laid.buffers, laid.shapes, self.strides, laid.offsets, strict=True)
        ]

    def in_ring(self, body: Tensor) -> PackedBody:
        """In shared memory, where blocks come again and again in the same places. What others have left between the
        parts is wiped out."""
        packed = self._shared.get(body.data_ptr())
        if packed is None:
            if len(self._shared) >= MAX_SHARED:
                self._shared.clear()
            packed = self._shared[body.data_ptr()] = self._pack_over(body)
        for gap in packed.gaps:
            gap.zero_()
        return packed

    def take_spare(self) -> PackedBody:
        """In memory of this process, to be given back."""
        return self._spare.pop() if self._spare else self._pack_over(torch.zeros(self.num_bytes, dtype=torch.uint8))

    def return_spare(self, packed: PackedBody) -> None:
        if len(self._spare) < MAX_SPARE:
            self._spare.append(packed)

    def _pack_over(self, body: Tensor) -> PackedBody:
        laid, start = self.flat, 0
        flats = []
        for dtype, size in zip(laid.dtypes, self.sizes, strict=True):
            flats.append(body[start : start + size].view(dtype) if size else torch.empty(0, dtype=dtype))
            start += padded(size)
        ends = [0] * len(laid.dtypes)
        gaps = []
        for buffer, offset, count in zip(laid.buffers, laid.offsets, laid.counts, strict=True):
            if offset > ends[buffer]:
                gaps.append(flats[buffer][ends[buffer] : offset])
            ends[buffer] = offset + count
        gaps += [each[end:] for each, end in zip(flats, ends, strict=True) if end < each.numel()]
        return PackedBody(flats, self.views(flats), gaps)


class RemoteDenseTable:
    """Named tensors, cut by rows over the shards. `versions`: by shard, of what was pulled last."""

    def __init__(self, client: "ParameterClient", name: str, spec: DenseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.ranges = shard_dense(spec, client.shards)
        self.versions = [-1] * client.shards
        self._index = {each: index for index, each in enumerate(spec.names)}
        self._shapes = [torch.Size(shape) for shape in spec.shapes]
        self._dtypes = [dtype_of(dtype) for dtype in spec.dtypes]
        self._all_shards: list[tuple[int, Keys]] = [(shard, None) for shard, parts in enumerate(self.ranges) if parts]
        self._layouts: dict[tuple[int, Keys], RequestLayout] = {}

    @classmethod
    def create(
        cls,
        client: "ParameterClient",
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
                dtypes=[dtype_name(tensor) for tensor in tensors.values()],
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
        """One update. None, or a name that is not there: no gradient. `basis`: the version that the gradients were
        computed from; -1: what was pulled last. `pull_into`: new values, all of them, are written there. The future's
        value is the highest version that a shard has after it.

        Each shard applies its part by itself; without a ticket, a large part is sent and applied in pieces of whole
        tensors. What is refused (a gradient that is not finite) leaves the other shards and pieces as they are."""
        present = self._checked(gradients)
        targets = self._checked(pull_into) if pull_into is not None else None
        versions: list[int] = []
        plan: list[tuple[int, list[Keys], bool]] = []
        requests = 0
        for shard, keys in self._keys_by_shard(present, empty=targets is not None):
            pieces = self._chunks(shard, keys) if lease < 0 and self.client.compressor is None else [keys]
            streams = len(pieces) > 1 and keys is None and targets is not None and self._can_stream(shard, targets)
            plan.append((shard, pieces, streams))
            requests += len(pieces) + (sum(len(self._spans(shard, piece)) for piece in pieces) if streams else 0)
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), requests)
        for shard, pieces, streams in plan:
            known = self.versions[shard] if base_version < 0 else base_version
            for piece in pieces:
                last = piece is pieces[-1]
                whole = targets is not None and last and not streams
                about = partial(PushRequest, lease=lease, base_version=known, pull=whole, last=last)
                self._send(shard, piece, present, about, future, versions, targets if whole else None, True)
                if streams and targets is not None:
                    self._pull_streamed(shard, piece, targets, future, versions)
        return future

    def put(self, values: NamedTensors, *, fill: bool = False) -> ReplyFuture[int]:
        """Values as they are. `fill`: only where there are none yet."""
        present = self._checked(values)
        versions: list[int] = []
        puts = [(shard, piece) for shard, keys in self._keys_by_shard(present) for piece in self._chunks(shard, keys)]
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), len(puts))
        for shard, piece in puts:
            self._send(shard, piece, present, partial(PutRequest, fill=fill), future, versions, None, False)
        return future

    def pull(self, into: NamedTensors | None = None) -> ReplyFuture[dict[str, Tensor]]:
        """All values, written into these tensors, or into new ones. The future's value has them by name. A large table
        comes in stretches: what others push meanwhile may be in some of them and not in others."""
        if into is None:
            into = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(self._shapes, self._dtypes, strict=True)]
        targets = self._checked(into)
        found = {name: tensor for name, tensor in zip(self.spec.names, targets, strict=True) if tensor is not None}
        plan: list[tuple[int, Keys, bool]] = []
        requests = 0
        for shard, keys in self._keys_by_shard(targets):
            streams = keys is None and len(self._spans(shard, None)) > 1 and self._can_stream(shard, targets)
            plan.append((shard, keys, streams))
            requests += len(self._spans(shard, None)) if streams else 1
        future: ReplyFuture[dict[str, Tensor]] = ReplyFuture(self.client, lambda: found, requests)
        for shard, keys, streams in plan:
            if streams:
                self.versions[shard] = -1
                self._pull_streamed(shard, None, targets, future, [])
            else:
                finish = partial(self._on_reply, shard, [], targets, future, None)
                self.client.submit(shard, PullRequest([TableSlice(self.name, keys)]), (), finish, future)
        return future

    # -- in pieces ----------------------------------------------------------------------------------------------------

    def _chunks(self, shard: int, keys: Keys) -> list[Keys]:
        """Keys that go together, in order: as many as make a piece, or one."""
        layout = self._layout(shard, keys)
        if layout.num_bytes <= SPLIT_BYTES:
            return [keys]
        if layout.chunks is None:
            sizes = [
                count * layout.flat.dtypes[buffer].itemsize
                for count, buffer in zip(layout.flat.counts, layout.flat.buffers, strict=True)
            ]
            found: list[list[int]] = []
            size = 0
            for key, num_bytes in zip(range(len(sizes)) if keys is None else keys, sizes, strict=True):
                if not found or size + num_bytes > CHUNK_BYTES:
                    found.append([])
                    size = 0
                found[-1].append(key)
                size += num_bytes
            layout.chunks = [tuple(piece) for piece in found]
        return list(layout.chunks)

    def _can_stream(self, shard: int, targets: Sequence[Tensor | None]) -> bool:
        """Whether values can be written to these tensors in stretches that end anywhere."""
        layout = self._layout(shard, None)
        return len(layout.sizes) == 1 and all(
            target is not None and target.is_contiguous() for target in (targets[part.index] for part in layout.ranges)
        )

    def _spans(self, shard: int, keys: Keys) -> list[Span]:
        """Stretches of a shard's flat tensor that hold these consecutive keys."""
        laid = self._layout(shard, None).flat
        first, last = (0, len(laid.offsets) - 1) if keys is None else (keys[0], keys[-1])
        if len(laid.dtypes) != 1 or last < 0:
            return []
        start, stop = laid.offsets[first], laid.offsets[last] + laid.counts[last]
        step = STREAM_BYTES // laid.dtypes[0].itemsize
        return [(begin, min(begin + step, stop)) for begin in range(start, stop, step)]

    def _pull_streamed(
        self, shard: int, keys: Keys, targets: Sequence[Tensor | None], future: ReplyFuture[Any], versions: list[int]
    ) -> None:
        """Asks for values in stretches: one is copied here while the server copies the next."""
        layout = self._layout(shard, None)
        size = layout.flat.dtypes[0].itemsize
        for start, stop in self._spans(shard, keys):

            def finish(reply: ValuesReply, tensors: Sequence[Tensor], stays: bool, start: int = start) -> None:
                _scatter_values(tensors[0], start, layout, targets)
                versions.append(reply.version)
                self.versions[shard] = reply.version  # of the last: what others pushed in between counts as seen
                future.count_reply()

            slot = TableSlice(self.name, span=(start, stop))
            self.client.submit(shard, PullRequest([slot]), (), finish, future, reply_bytes=(stop - start) * size)

    # -- packing ------------------------------------------------------------------------------------------------------

    def _keys_by_shard(self, present: Sequence[Tensor | None], empty: bool = False) -> list[tuple[int, Keys]]:
        """By shard that has any of these: their keys. `empty`: shards that have none of them, too."""
        if all(tensor is not None for tensor in present):
            return self._all_shards
        found: list[tuple[int, Keys]] = []
        for shard, parts in enumerate(self.ranges):
            keys = tuple(key for key, part in enumerate(parts) if present[part.index] is not None)
            if keys or (empty and parts):
                found.append((shard, None if len(keys) == len(parts) else keys))
        return found

    def _send(
        self,
        shard: int,
        keys: Keys,
        present: Sequence[Tensor | None],
        make_request: Callable[[list[TableSlice]], ServerRequest],
        future: ReplyFuture[int],
        versions: list[int],
        targets: Sequence[Tensor | None] | None,
        compressible: bool,
    ) -> None:
        """Packs the parts of one shard and asks."""
        client = self.client
        layout = self._layout(shard, keys)
        laid = layout.flat
        compressor = client.compressor if compressible else None
        if compressor is not None and (len(laid.dtypes) > 1 or not laid.dtypes[0].is_floating_point):
            compressor = None
        body, ring, place = (None, None, -1) if compressor is not None else client.reserve(shard, layout.num_bytes)
        packed = layout.in_ring(body) if body is not None else layout.take_spare()
        _copy(packed.views, [_rows_in(present[part.index], part) for part in layout.ranges])
        mine = (layout, packed) if body is None else None
        if compressor is not None:
            slot = TableSlice(self.name, keys, False, compressor.name, laid.totals[0])
            payload = compressor.encode(packed.flats[0], (self.name, shard, keys))
            layout.return_spare(packed)
            finish = partial(self._on_reply, shard, versions, targets, future, None)
            client.submit(shard, make_request([slot]), [payload], finish, future)
            return
        finish = partial(self._on_reply, shard, versions, targets, future, mine)
        client.submit(shard, make_request([TableSlice(self.name, keys)]), packed.flats, finish, future, ring, place)

    def _layout(self, shard: int, keys: Keys) -> RequestLayout:
        layout = self._layouts.get((shard, keys))
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS * self.client.shards:
                self._layouts.clear()
            parts = self.ranges[shard]
            layout = RequestLayout(parts if keys is None else [parts[key] for key in keys], self.spec)
            self._layouts[shard, keys] = layout
        return layout

    def _on_reply(
        self,
        shard: int,
        versions: list[int],
        targets: Sequence[Tensor | None] | None,
        future: ReplyFuture[Any],
        packed: tuple[RequestLayout, PackedBody] | None,
        reply: AckReply | ValuesReply,
        tensors: Sequence[Tensor],
        stays: bool,
    ) -> None:
        """An answer: its version, and values, which go straight to where they belong. `packed`: what was sent."""
        if packed is not None:
            packed[0].return_spare(packed[1])
        versions.append(reply.version)
        if targets is not None and isinstance(reply, ValuesReply):
            self.versions[shard] = reply.version
            at = 0
            for slot in reply.slices:
                layout = self._layout(shard, slot.keys)
                count = len(layout.sizes)
                _copy(
                    [_rows_in(targets[part.index], part) for part in layout.ranges],
                    layout.views(tensors[at : at + count]),
                )
                at += count
        future.count_reply()

    # -- what the caller gave -----------------------------------------------------------------------------------------

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
        """By number; checked, since packing would stretch or convert what does not fit."""
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
        spec = self.spec
        if tensor.shape != self._shapes[index]:
            return InputError(
                f"{spec.names[index]!r} has shape {spec.shapes[index]} in table {self.name!r}, but this tensor has"
                f" {list(tensor.shape)}"
            )
        return InputError(
            f"{spec.names[index]!r} is {spec.dtypes[index]} in table {self.name!r}, but this tensor is"
            f" {dtype_name(tensor)}",
            fix=f".to(torch.{spec.dtypes[index]})",
        )


def _copy(to: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    """Each to its place; None: left out."""
    pairs = [(there, value) for there, value in zip(to, values, strict=True) if there is not None and value is not None]
    if len(pairs) <= MAX_SINGLE_COPIES:
        for there, value in pairs:
            there.copy_(value)
    else:
        torch._foreach_copy_([there for there, _ in pairs], [value for _, value in pairs])


def _scatter_values(values: Tensor, start: int, layout: RequestLayout, targets: Sequence[Tensor | None]) -> None:
    """Writes a stretch of the flat tensor, from `start` on, to where it belongs."""
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


def declare_table(client: "ParameterClient", name: str, spec: DenseSpec | SparseSpec) -> None:
    """On all shards."""
    asked = [client.request(shard, DeclareRequest(name, spec)) for shard in range(client.shards)]
    for each in asked:
        each.wait()
