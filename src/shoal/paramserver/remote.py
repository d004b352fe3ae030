"""Tables as a worker sees them: named tensors (dense), or rows by number (sparse), wherever the shards have them.

What is pushed is packed at once, into memory that it is sent from: the caller may change its tensors right afterwards.
What is pulled is written to its place when the answer is read, which happens in a `wait` or `done` of any future.
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.cut import Flat, Part, cut_dense, flat, shard_of
from shoal.paramserver.frames import Entry as Place
from shoal.paramserver.frames import padded, tensors_in
from shoal.paramserver.futures import Future
from shoal.paramserver.messages import Declare, DenseSpec, Done, Pull, Push, Put, Request, Slot, SparseSpec, Values

if TYPE_CHECKING:
    from shoal.paramserver.client import Client

Named: TypeAlias = Mapping[str, Tensor | None] | Sequence[Tensor | None]

MOST_LAYOUTS = 64  # views of packed memory that are remembered


def wire_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Layout(NamedTuple):
    """Some parts of a shard, as they lie in the body of a request."""

    parts: tuple[Part, ...]
    flat: Flat
    places: tuple[Place, ...]
    num_bytes: int


class Packed(NamedTuple):
    """Views of one body: the flat tensors, the parts in them, and what lies between those."""

    flats: list[Tensor]
    views: list[Tensor]
    gaps: list[Tensor]


class Dense:
    """Named tensors, cut by rows over the shards. `versions`: by shard, of what was pulled last."""

    def __init__(self, client: "Client", name: str, spec: DenseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.cut = cut_dense(spec, client.shards)
        self.versions = [-1] * client.shards
        self._index = {each: index for index, each in enumerate(spec.names)}
        self._layouts: dict[tuple[int, tuple[int, ...] | None], Layout] = {}
        self._packed: dict[tuple[int, int, int], Packed] = {}

    @classmethod
    def declared(
        cls,
        client: "Client",
        name: str,
        tensors: Mapping[str, Tensor] | None,
        spec: DenseSpec | None,
        optimizer: str,
        settings: Mapping[str, float | bool],
    ) -> "Dense":
        if spec is None:
            if not tensors:
                raise InputError(f"table {name!r}: neither tensors nor a spec", fix="tensors={'w': torch.zeros(4)}")
            spec = DenseSpec(
                names=list(tensors),
                shapes=[list(tensor.shape) for tensor in tensors.values()],
                dtypes=[wire_dtype(tensor) for tensor in tensors.values()],
                optimizer=optimizer,
                settings=dict(settings),
            )
        table = cls(client, name, spec)
        declare(client, name, spec)
        if tensors is not None:
            table.put(tensors, fill=True).wait()
        return table

    def push(
        self, gradients: Named, *, ticket: int = -1, basis: int = -1, pull_into: Named | None = None
    ) -> Future[int]:
        """One update. None, or a name that is not there: no gradient. `basis`: the version that the gradients were
        computed from; -1: what was pulled last. `pull_into`: new values, all of them, are written there. The future's
        value is the highest version that a shard has after it."""
        present = self._rows(gradients)
        targets = self._targets(pull_into) if pull_into is not None else None
        versions: list[int] = []
        pushes: list[tuple[int, tuple[int, ...] | None]] = []
        for shard, parts in enumerate(self.cut):
            keys = tuple(key for key, part in enumerate(parts) if present[part.index] is not None)
            if keys or (parts and targets is not None):
                pushes.append((shard, None if len(keys) == len(parts) else keys))
        future: Future[int] = Future(self.client, lambda: max(versions, default=0), len(pushes))
        for shard, chosen in pushes:
            about = partial(
                Push, ticket=ticket, basis=self.versions[shard] if basis < 0 else basis, pull=targets is not None
            )
            self._send(shard, chosen, present, about, future, partial(self._came, shard, versions, targets), True)
        return future

    def put(self, values: Named, *, fill: bool = False) -> Future[int]:
        """Values as they are. `fill`: only where there are none yet."""
        present = self._rows(values)
        versions: list[int] = []
        puts: list[tuple[int, tuple[int, ...] | None]] = []
        for shard, parts in enumerate(self.cut):
            keys = tuple(key for key, part in enumerate(parts) if present[part.index] is not None)
            if keys:
                puts.append((shard, None if len(keys) == len(parts) else keys))
        future: Future[int] = Future(self.client, lambda: max(versions, default=0), len(puts))
        for shard, chosen in puts:
            finish = partial(self._came, shard, versions, None)
            self._send(shard, chosen, present, partial(Put, fill=fill), future, finish, False)
        return future

    def pull(self, into: Named | None = None) -> Future[dict[str, Tensor]]:
        """All values, written into these tensors, or into new ones. The future's value has them by name."""
        if into is None:
            into = [
                torch.empty(shape, dtype=getattr(torch, dtype))
                for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True)
            ]
        targets = self._targets(into)
        found = {name: tensor for name, tensor in zip(self.spec.names, targets, strict=True) if tensor is not None}
        asked = [
            shard for shard, parts in enumerate(self.cut) if any(targets[part.index] is not None for part in parts)
        ]
        future: Future[dict[str, Tensor]] = Future(self.client, lambda: found, len(asked))
        for shard in asked:
            keys = tuple(key for key, part in enumerate(self.cut[shard]) if targets[part.index] is not None)
            slot = Slot(self.name, None if len(keys) == len(self.cut[shard]) else keys)
            finish = self._finish(future, partial(self._came, shard, [], targets))
            self.client.ask(shard, Pull([slot]), (), finish, future)
        return future

    # -- packing ------------------------------------------------------------------------------------------------------

    def _send(
        self,
        shard: int,
        keys: tuple[int, ...] | None,
        present: list[Tensor | None],
        about: Callable[[list[Slot]], Request],
        future: Future[int],
        came: Callable[[Any, Sequence[Tensor]], None],
        squeeze: bool,
    ) -> None:
        """Packs the parts of one shard and asks."""
        client = self.client
        layout = self._layout(shard, keys)
        compressor = client.compressor if squeeze else None
        if compressor is not None and not (len(layout.flat.dtypes) == 1 and layout.flat.dtypes[0].is_floating_point):
            compressor = None
        ring, place = None, -1
        body: Tensor | None = None
        if compressor is None:
            body, ring, place = client.room(shard, layout.num_bytes)
        packed = self._pack(shard, layout, body, place)
        rows = [_part(present[part.index], part) for part in layout.parts]
        with torch.no_grad():
            if packed.gaps:
                torch._foreach_zero_(packed.gaps)
            if rows:
                torch._foreach_copy_(packed.views, rows)
        slot = Slot(self.name, keys)
        tensors = packed.flats
        if compressor is not None:
            count = tensors[0].numel()
            slot = Slot(self.name, keys, False, compressor.name, count)
            tensors = [compressor.encode(tensors[0], (self.name, shard, keys))]
        client.ask(shard, about([slot]), tensors, self._finish(future, came), future, ring, place)

    def _layout(self, shard: int, keys: tuple[int, ...] | None) -> Layout:
        layout = self._layouts.get((shard, keys))
        if layout is None:
            if len(self._layouts) > MOST_LAYOUTS * self.client.shards:
                self._layouts.clear()
            parts = tuple(self.cut[shard][key] for key in (range(len(self.cut[shard])) if keys is None else keys))
            laid = flat(parts, self.spec)
            places = []
            start = 0
            for dtype, total in zip(laid.dtypes, laid.totals, strict=True):
                places.append(Place(dtype, (total,), start, total * dtype.itemsize))
                start += padded(total * dtype.itemsize)
            layout = self._layouts[shard, keys] = Layout(parts, laid, tuple(places), start)
        return layout

    def _pack(self, shard: int, layout: Layout, body: Tensor | None, place: int) -> Packed:
        """Views of a body. Those of shared memory come again and again, in the same places."""
        if body is None:
            return _views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
        key = (body.data_ptr(), layout.num_bytes, id(layout))
        packed = self._packed.get(key)
        if packed is None:
            if len(self._packed) >= MOST_LAYOUTS:
                self._packed.clear()
            packed = self._packed[key] = _views(layout, body)
        return packed

    def _finish(
        self, future: Future[Any], came: Callable[[Any, Sequence[Tensor]], None]
    ) -> Callable[[Any, Sequence[Tensor], bool], None]:
        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            came(reply, tensors)
            future.part()

        return finish

    def _came(
        self,
        shard: int,
        versions: list[int],
        targets: Sequence[Tensor | None] | None,
        reply: Done | Values,
        tensors: Sequence[Tensor],
    ) -> None:
        """An answer: its version, and values, which go straight to where they belong."""
        versions.append(reply.version)
        if targets is None or not isinstance(reply, Values):
            return
        self.versions[shard] = reply.version
        at = 0
        for slot in reply.slots:
            layout = self._layout(shard, slot.keys)
            count = len(layout.flat.dtypes)
            views = layout.flat.views(tensors[at : at + count])
            at += count
            pairs = [
                (_part(targets[part.index], part), view)
                for part, view in zip(layout.parts, views, strict=True)
                if targets[part.index] is not None
            ]
            with torch.no_grad():
                torch._foreach_copy_([target for target, _ in pairs], [view for _, view in pairs])

    # -- what the caller gave -----------------------------------------------------------------------------------------

    def _in_order(self, given: Named) -> list[Tensor | None]:
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

    def _rows(self, given: Named) -> list[Tensor | None]:
        """By number; checked, since packing would stretch or convert what does not fit."""
        found = self._in_order(given)
        for index, tensor in enumerate(found):
            if tensor is not None:
                found[index] = tensor = tensor.detach()
                self._check(index, tensor)
        return found

    def _targets(self, given: Named) -> list[Tensor | None]:
        return self._rows(given)

    def _check(self, index: int, tensor: Tensor) -> None:
        spec = self.spec
        if list(tensor.shape) != spec.shapes[index]:
            raise InputError(
                f"{spec.names[index]!r} has shape {spec.shapes[index]} in table {self.name!r}, but this tensor has"
                f" {list(tensor.shape)}"
            )
        if wire_dtype(tensor) != spec.dtypes[index]:
            raise InputError(
                f"{spec.names[index]!r} is {spec.dtypes[index]} in table {self.name!r}, but this tensor is"
                f" {wire_dtype(tensor)}",
                fix=f".to(torch.{spec.dtypes[index]})",
            )


def _views(layout: Layout, body: Tensor) -> Packed:
    flats = tensors_in(body, layout.places)
    laid = layout.flat
    ends = [0] * len(laid.dtypes)
    gaps = []
    for buffer, offset, count in zip(laid.buffers, laid.offsets, laid.counts, strict=True):
        if offset > ends[buffer]:
            gaps.append(flats[buffer][ends[buffer] : offset])
        ends[buffer] = offset + count
    gaps += [each[end:] for each, end in zip(flats, ends, strict=True) if end < each.numel()]
    return Packed(flats, laid.views(flats), gaps)


def _part(tensor: Tensor | None, part: Part) -> Tensor:
    assert tensor is not None
    if not tensor.dim() or (part.start == 0 and part.stop == tensor.shape[0]):
        return tensor
    return tensor[part.start : part.stop]


def declare(client: "Client", name: str, spec: DenseSpec | SparseSpec) -> None:
    """On all shards."""
    asked = [client.request(shard, Declare(name, spec)) for shard in range(client.shards)]
    for each in asked:
        each.wait()


class Sparse:
    """Rows by number. Ids may have any shape and come several times."""

    def __init__(self, client: "Client", name: str, spec: SparseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.versions = [-1] * client.shards

    @classmethod
    def declared(cls, client: "Client", name: str, spec: SparseSpec) -> "Sparse":
        declare(client, name, spec)
        return cls(client, name, spec)

    def pull(self, ids: Tensor) -> Future[Tensor]:
        """Rows of these ids: a tensor of their shape and one dimension more."""
        unique, inverse = self._unique(ids)
        rows = torch.empty(len(unique), self.spec.dim, dtype=self.dtype)
        shape = (*ids.shape, self.spec.dim)
        shares = self._shares(unique)
        future: Future[Tensor] = Future(self.client, lambda: rows[inverse].view(shape), len(shares))
        for shard, places, mine in shares:

            def finish(
                reply: Any,
                tensors: Sequence[Tensor],
                stays: bool,
                shard: int = shard,
                places: Tensor | None = places,
            ) -> None:
                self.versions[shard] = reply.version
                found = tensors[-1]
                if places is None:
                    rows.copy_(found)
                else:
                    rows.index_copy_(0, places, found)
                future.part()

            self.client.ask(shard, Pull([Slot(self.name, None, True)]), [mine], finish, future)
        return future

    def push(self, ids: Tensor, gradients: Tensor, *, ticket: int = -1, basis: int = -1) -> Future[int]:
        """Gradients of rows: one update on each shard that has some. Those of a repeated id are added, in order."""
        expected = (*ids.shape, self.spec.dim)
        if tuple(gradients.shape) != expected:
            raise InputError(
                f"gradients of shape {list(gradients.shape)} for ids of shape {list(ids.shape)} in table"
                f" {self.name!r}: {list(expected)} are needed"
            )
        if gradients.dtype != self.dtype:
            raise InputError(
                f"table {self.name!r} is {self.spec.dtype}, but these gradients are {wire_dtype(gradients)}",
                fix=f".to(torch.{self.spec.dtype})",
            )
        unique, inverse = self._unique(ids)
        flat_gradients = gradients.detach().reshape(-1, self.spec.dim)
        if len(unique) == len(inverse):
            rows = torch.empty_like(flat_gradients).index_copy_(0, inverse, flat_gradients)
        else:
            rows = torch.zeros(len(unique), self.spec.dim, dtype=self.dtype).index_add_(0, inverse, flat_gradients)
        shares = self._shares(unique)
        versions: list[int] = []
        future: Future[int] = Future(self.client, lambda: max(versions, default=0), len(shares))
        compressor = self._compressor()

        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            versions.append(reply.version)
            future.part()

        for shard, places, mine in shares:
            values = rows if places is None else rows[places]
            slot = Slot(self.name, None, True)
            if compressor is not None:
                slot = Slot(self.name, None, True, compressor.name, values.numel())
                values = compressor.encode(values.view(-1), (self.name, shard))
            version = self.versions[shard] if basis < 0 else basis
            self.client.ask(shard, Push([slot], ticket, version), [mine, values], finish, future)
        return future

    def _unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Each once, rising, and where each of the given is among them."""
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"ids of rows are whole numbers, but these are {wire_dtype(ids)}")
        unique, inverse = torch.unique(ids.detach().reshape(-1).to(torch.int64), return_inverse=True)
        if len(unique):
            for row in (int(unique[0]), int(unique[-1])):
                if not 0 <= row < self.spec.rows:
                    raise InputError(f"row {row:,}, but table {self.name!r} has rows 0 to {self.spec.rows - 1:,}")
        return unique, inverse

    def _shares(self, unique: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """By shard that has any: where its ids are among all, and the ids."""
        shards = self.client.shards
        if not len(unique):
            return []
        if shards == 1:
            return [(0, None, unique)]
        where = shard_of(unique, shards)
        found: list[tuple[int, Tensor | None, Tensor]] = []
        for shard in range(shards):
            places = (where == shard).nonzero().view(-1)
            if len(places):
                found.append((shard, places, unique[places]))
        return found

    def _compressor(self) -> Any:
        """Error feedback remembers by place, and rows come in other places each time: such are left uncompressed."""
        compressor = self.client.compressor
        if compressor is None or not self.dtype.is_floating_point or compressor.state() or hasattr(compressor, "inner"):
            return None
        return compressor
