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
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import PullRequest, PushRequest, SparseSpec, TableSlice
from shoal.paramserver.remote_dense import declare_table, dtype_name
from shoal.paramserver.sharding import shard_of
from shoal.paramserver.shm_ring import RingWriter
from shoal.paramserver.unique_ids import UniqueIds, find_unique

if TYPE_CHECKING:
    from shoal.paramserver.client import ParameterClient


class RemoteSparseTable:
    """Rows by number. Ids may have any shape and come several times."""

    def __init__(self, client: "ParameterClient", name: str, spec: SparseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.versions = [-1] * client.shards
        # What was found of the ids that came last: what is pulled is mostly pushed next.
        self._last_unique: tuple[Tensor, int, UniqueIds] | None = None

    @classmethod
    def create(cls, client: "ParameterClient", name: str, spec: SparseSpec) -> "RemoteSparseTable":
        declare_table(client, name, spec)
        return cls(client, name, spec)

    def pull(self, ids: Tensor) -> ReplyFuture[Tensor]:
        """Rows of these ids: a tensor of their shape and one dimension more."""
        found = self._unique(ids)
        shape = (*ids.shape, self.spec.dim)
        shares = self._by_shard(found.ids)
        if len(shares) == 1:
            return self._pull_one_shard(shares[0][0], found, shape)
        rows = torch.empty(len(found.ids), self.spec.dim, dtype=self.dtype)
        future: ReplyFuture[Tensor] = ReplyFuture(self.client, lambda: found.expand(rows).view(shape), len(shares))
        for shard, places, mine in shares:

            def finish(
                reply: Any, tensors: Sequence[Tensor], stays: bool, shard: int = shard, places: Tensor | None = places
            ) -> None:
                self.versions[shard] = reply.version
                assert places is not None
                rows.index_copy_(0, places, tensors[-1])
                future.count_reply()

            self.client.submit(shard, PullRequest([TableSlice(self.name, None, True)]), [mine], finish, future)
        return future

    def _pull_one_shard(self, shard: int, found: UniqueIds, shape: tuple[int, ...]) -> ReplyFuture[Tensor]:
        """All from one shard: rows are copied once, from where they came."""
        came: list[Tensor] = []
        future: ReplyFuture[Tensor] = ReplyFuture(self.client, lambda: came[0].view(shape), 1)

        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            self.versions[shard] = reply.version
            rows = tensors[-1]
            came.append(found.expand(rows) if stays or found.inverse is not None else rows.clone())
            future.count_reply()

        self.client.submit(shard, PullRequest([TableSlice(self.name, None, True)]), [found.ids], finish, future)
        return future

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> ReplyFuture[int]:
        """Gradients of rows: one update on each shard that has some. Those of a repeated id are added, in order."""
        self._check_gradients(ids, gradients)
        found = self._unique(ids)
        given = gradients.detach().reshape(-1, self.spec.dim)
        shares = self._by_shard(found.ids)
        versions: list[int] = []
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), len(shares))

        def finish(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            versions.append(reply.version)
            future.count_reply()

        several = len(shares) > 1
        if several and found.inverse is not None:  # all of it first: each shard's part is taken from that
            given = found.sum_rows(given, given.new_empty(len(found.ids), self.spec.dim))
        for shard, places, mine in shares:
            slot, tensors, ring, place = self._reserve(shard, mine)
            rows = tensors[1]
            if several:
                assert places is not None
                torch.index_select(given, 0, places, out=rows)
            else:
                found.sum_rows(given, rows)
            if slot.codec:
                tensors[1] = self.client.compressor.encode(rows.view(-1), (self.name, shard))
            version = self.versions[shard] if base_version < 0 else base_version
            self.client.submit(shard, PushRequest([slot], lease, version), tensors, finish, future, ring, place)
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
                f"table {self.name!r} is {self.spec.dtype}, but these gradients are {dtype_name(gradients)}",
                fix=f".to(torch.{self.spec.dtype})",
            )

    def _unique(self, ids: Tensor) -> UniqueIds:
        known = self._last_unique
        if known is not None and known[0] is ids and known[1] == ids._version:
            return known[2]
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"ids of rows are whole numbers, but these are {dtype_name(ids)}")
        found = find_unique(ids.detach().reshape(-1).to(torch.int64))
        if len(found.ids):
            rising = found.ids.numpy()
            for row in (rising[0], rising[-1]):
                if not 0 <= row < self.spec.rows:
                    raise InputError(f"row {row:,}, but table {self.name!r} has rows 0 to {self.spec.rows - 1:,}")
        self._last_unique = ids, ids._version, found
        return found

    def _by_shard(self, ids: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
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

    def _reserve(self, shard: int, ids: Tensor) -> tuple[TableSlice, list[Tensor], RingWriter | None, int]:
        """Memory for a gradient of these rows: where it is sent from, unless it is compressed first."""
        shape = (len(ids), self.spec.dim)
        if self._compresses():
            slot = TableSlice(self.name, None, True, self.client.compressor.name, prod(shape))
            return slot, [ids, torch.empty(shape, dtype=self.dtype)], None, -1
        tensors, ring, place = self.client.reserve_tensors(shard, [(torch.int64, ids.shape), (self.dtype, shape)])
        tensors[0].copy_(ids)
        return TableSlice(self.name, None, True), tensors, ring, place

    def _compresses(self) -> bool:
        """Error feedback remembers by place, and rows come in other places each time: such are left uncompressed."""
        compressor = self.client.compressor
        return (
            compressor is not None
            and self.dtype.is_floating_point
            and not compressor.state()
            and not hasattr(compressor, "inner")
        )
