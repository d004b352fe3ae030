"""A sparse table as a worker sees it: rows by number, wherever the shards have them.

Each id of a batch travels once, and so does its gradient: what comes several times is added up here, in order. A
gradient is written straight to where it is sent from.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.futures import Future
from shoal.paramserver.messages import Pull, Push, Slot, SparseSpec
from shoal.paramserver.remote_dense import declare, wire_dtype
from shoal.paramserver.sharding import shard_of
from shoal.paramserver.shm_ring import Writer
from shoal.paramserver.unique_ids import Once, once

if TYPE_CHECKING:
    from shoal.paramserver.client import Client


class Sparse:
    """Rows by number. Ids may have any shape and come several times."""

    def __init__(self, client: "Client", name: str, spec: SparseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.versions = [-1] * client.shards
        # What was found of the ids that came last: what is pulled is mostly pushed next.
        self._known: tuple[Tensor, int, Once] | None = None

    @classmethod
    def declared(cls, client: "Client", name: str, spec: SparseSpec) -> "Sparse":
        declare(client, name, spec)
        return cls(client, name, spec)

    def pull(self, ids: Tensor) -> Future[Tensor]:
        """Rows of these ids: a tensor of their shape and one dimension more."""
        found = self._once(ids)
        shape = (*ids.shape, self.spec.dim)
        shares = self._shares(found.ids)
        if len(shares) == 1:
            return self._pull_whole(shares[0][0], found, shape)
        rows = torch.empty(len(found.ids), self.spec.dim, dtype=self.dtype)
        future: Future[Tensor] = Future(self.client, lambda: found.repeated(rows).view(shape), len(shares))
        for shard, places, mine in shares:

            def finish(
                reply: Any, tensors: Sequence[Tensor], stays: bool, shard: int = shard, places: Tensor | None = places
            ) -> None:
                self.versions[shard] = reply.version
                assert places is not None
                rows.index_copy_(0, places, tensors[-1])
                future.part()

            self.client.ask(shard, Pull([Slot(self.name, None, True)]), [mine], finish, future)
        return future

    def _pull_whole(self, shard: int, found: Once, shape: tuple[int, ...]) -> Future[Tensor]:
        """All from one shard: rows are copied once, from where they came."""
        came: list[Tensor] = []
        future: Future[Tensor] = Future(self.client, lambda: came[0].view(shape), 1)

        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            self.versions[shard] = reply.version
            rows = tensors[-1]
            came.append(found.repeated(rows) if stays or found.inverse is not None else rows.clone())
            future.part()

        self.client.ask(shard, Pull([Slot(self.name, None, True)]), [found.ids], finish, future)
        return future

    def push(self, ids: Tensor, gradients: Tensor, *, ticket: int = -1, basis: int = -1) -> Future[int]:
        """Gradients of rows: one update on each shard that has some. Those of a repeated id are added, in order."""
        self._check_gradients(ids, gradients)
        found = self._once(ids)
        given = gradients.detach().reshape(-1, self.spec.dim)
        shares = self._shares(found.ids)
        versions: list[int] = []
        future: Future[int] = Future(self.client, lambda: max(versions, default=0), len(shares))

        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            versions.append(reply.version)
            future.part()

        several = len(shares) > 1
        if several and found.inverse is not None:  # all of it first: each shard's part is taken from that
            given = found.added(given, given.new_empty(len(found.ids), self.spec.dim))
        for shard, places, mine in shares:
            slot, tensors, ring, place = self._room(shard, mine)
            rows = tensors[1]
            if several:
                assert places is not None
                torch.index_select(given, 0, places, out=rows)
            else:
                found.added(given, rows)
            if slot.codec:
                tensors[1] = self.client.compressor.encode(rows.view(-1), (self.name, shard))
            version = self.versions[shard] if basis < 0 else basis
            self.client.ask(shard, Push([slot], ticket, version), tensors, finish, future, ring, place)
        return future

    def _check_gradients(self, ids: Tensor, gradients: Tensor) -> None:
        expected = (*ids.shape, self.spec.dim)
        if gradients.shape != expected:
            raise InputError(
                f"gradients of shape {list(gradients.shape)} for ids of shape {list(ids.shape)} in table"
                f" {self.name!r}: {list(expected)} are needed"
            )
        if gradients.dtype != self.dtype:
            raise InputError(
                f"table {self.name!r} is {self.spec.dtype}, but these gradients are {wire_dtype(gradients)}",
                fix=f".to(torch.{self.spec.dtype})",
            )

    def _once(self, ids: Tensor) -> Once:
        known = self._known
        if known is not None and known[0] is ids and known[1] == ids._version:
            return known[2]
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"ids of rows are whole numbers, but these are {wire_dtype(ids)}")
        found = once(ids.detach().reshape(-1).to(torch.int64))
        if len(found.ids):
            rising = found.ids.numpy()
            for row in (rising[0], rising[-1]):
                if not 0 <= row < self.spec.rows:
                    raise InputError(f"row {row:,}, but table {self.name!r} has rows 0 to {self.spec.rows - 1:,}")
        self._known = ids, ids._version, found
        return found

    def _shares(self, ids: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """By shard that has any: where its ids are among all (None: there is no other shard), and the ids."""
        shards = self.client.shards
        if not len(ids):
            return []
        if shards == 1:
            return [(0, None, ids)]
        where = shard_of(ids, shards)
        found: list[tuple[int, Tensor | None, Tensor]] = []
        for shard in range(shards):
            places = (where == shard).nonzero().view(-1)
            if len(places):
                found.append((shard, places, ids.index_select(0, places)))
        return found

    def _room(self, shard: int, ids: Tensor) -> tuple[Slot, list[Tensor], Writer | None, int]:
        """Memory for a gradient of these rows: where it is sent from, unless it is compressed first."""
        shape = (len(ids), self.spec.dim)
        if self._compresses():
            slot = Slot(self.name, None, True, self.client.compressor.name, prod(shape))
            return slot, [ids, torch.empty(shape, dtype=self.dtype)], None, -1
        tensors, ring, place = self.client.lend(shard, [(torch.int64, ids.shape), (self.dtype, shape)])
        tensors[0].copy_(ids)
        return Slot(self.name, None, True), tensors, ring, place

    def _compresses(self) -> bool:
        """Error feedback remembers by place, and rows come in other places each time: such are left uncompressed."""
        compressor = self.client.compressor
        return (
            compressor is not None
            and self.dtype.is_floating_point
            and not compressor.state()
            and not hasattr(compressor, "inner")
        )
