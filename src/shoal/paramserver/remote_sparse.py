"""A sparse table at the client: rows by number, spread over the shards.

Each id of a batch is sent once, and so is its gradient: the client adds the gradients of a repeated id, in order, in
the memory that they are sent from.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import PullRequest, PushRequest, SparseSpec, TableSlice
from shoal.paramserver.request_client import RequestClient
from shoal.paramserver.sharding import dtype_name, shard_of
from shoal.paramserver.unique_ids import UniqueIds, find_unique
from shoal.transport.shm_ring import RingBlock

_NO_INDICES = torch.empty(0, dtype=torch.int64)


class RemoteSparseTable:
    """Ids may have any shape and may repeat."""

    def __init__(self, client: RequestClient, name: str, spec: SparseSpec) -> None:
        self.client, self.name, self.spec = client, name, spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.versions = [-1] * client.shards
        # Cached, since a worker pushes to the ids that it has pulled: the ids, their version, the result.
        self._last_unique: tuple[Tensor, int, UniqueIds] | None = None

    def pull(self, ids: Tensor) -> ReplyFuture[Tensor]:
        """Returns a future of the rows: a tensor of the ids' shape and one dimension more."""
        found = self._unique(ids)
        shape = (*ids.shape, self.spec.dim)
        by_shard = self._by_shard(found.ids)
        if len(by_shard) == 1:
            return self._pull_one_shard(by_shard[0][0], found, shape)
        rows = torch.empty(len(found.ids), self.spec.dim, dtype=self.dtype)
        future: ReplyFuture[Tensor] = ReplyFuture(self.client, lambda: found.expand(rows).view(shape), len(by_shard))

        def on_reply(shard: int, indices: Tensor, reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            self.versions[shard] = reply.version
            rows.index_copy_(0, indices, tensors[-1])
            future.count_reply()

        request = PullRequest([TableSlice(self.name, None, True)])
        for shard, indices, mine in by_shard:
            self.client.submit(shard, request, [mine], partial(on_reply, shard, indices), future)
        return future

    def _pull_one_shard(self, shard: int, found: UniqueIds, shape: tuple[int, ...]) -> ReplyFuture[Tensor]:
        """Pulls all rows from one shard, and copies them once."""
        received: list[Tensor] = []
        future: ReplyFuture[Tensor] = ReplyFuture(self.client, lambda: received[0].view(shape), 1)

        def on_reply(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            self.versions[shard] = reply.version
            rows = tensors[-1]
            received.append(found.expand(rows) if stays or found.inverse is not None else rows.clone())
            future.count_reply()

        self.client.submit(shard, PullRequest([TableSlice(self.name, None, True)]), [found.ids], on_reply, future)
        return future

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> ReplyFuture[int]:
        """Sends gradients of rows: one update on each shard that has some of them."""
        self._check_gradients(ids, gradients)
        found = self._unique(ids)
        given = gradients.detach().reshape(-1, self.spec.dim)
        by_shard = self._by_shard(found.ids)
        versions: list[int] = []
        future: ReplyFuture[int] = ReplyFuture(self.client, lambda: max(versions, default=0), len(by_shard))

        def on_reply(reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
            versions.append(reply.version)
            future.count_reply()

        several = len(by_shard) > 1
        if several and found.inverse is not None:
            given = found.sum_rows(given, given.new_empty(len(found.ids), self.spec.dim))
        for shard, indices, mine in by_shard:
            table_slice, tensors, block = self._reserve(shard, mine)
            rows = tensors[1]
            if several:
                torch.index_select(given, 0, indices, out=rows)
            else:
                found.sum_rows(given, rows)
            if table_slice.codec:
                tensors[1] = self.client.compressor.encode(rows.view(-1), (self.name, shard))
            version = self.versions[shard] if base_version < 0 else base_version
            self.client.submit(shard, PushRequest([table_slice], lease, version), tensors, on_reply, future, block)
        return future

    def _check_gradients(self, ids: Tensor, gradients: Tensor) -> None:
        expected = (*ids.shape, self.spec.dim)
        if gradients.shape != expected:
            given = f"gradients of shape {list(gradients.shape)} for ids of shape {list(ids.shape)}"
            raise InputError(f"{given} in table {self.name!r}: {list(expected)} are needed")
        if gradients.dtype != self.dtype:
            given = f"these gradients are {dtype_name(gradients.dtype)}"
            fix = f".to(torch.{self.spec.dtype})"
            raise InputError(f"table {self.name!r} is {self.spec.dtype}, but {given}", fix=fix)

    def _unique(self, ids: Tensor) -> UniqueIds:
        known = self._last_unique
        if known is not None and known[0] is ids and known[1] == ids._version:
            return known[2]
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise InputError(f"ids of rows are integers, but these are {dtype_name(ids.dtype)}", fix="ids.long()")
        found = find_unique(ids.detach().reshape(-1).to(torch.int64))
        if len(found.ids):
            rising = found.ids.numpy()
            for row in (rising[0], rising[-1]):
                if not 0 <= row < self.spec.rows:
                    raise InputError(f"row {row:,}, but table {self.name!r} has rows 0 to {self.spec.rows - 1:,}")
        self._last_unique = ids, ids._version, found
        return found

    def _by_shard(self, ids: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Divides ids by shard: (shard, indices of its ids, its ids). With one shard there are no indices."""
        shards = self.client.shards
        if not len(ids):
            return []
        if shards == 1:
            return [(0, _NO_INDICES, ids)]
        owners = shard_of(ids, shards)
        found: list[tuple[int, Tensor, Tensor]] = []
        for shard in range(shards):
            indices = (owners == shard).nonzero().view(-1)
            if len(indices):
                found.append((shard, indices, ids.index_select(0, indices)))
        return found

    def _reserve(self, shard: int, ids: Tensor) -> tuple[TableSlice, list[Tensor], RingBlock | None]:
        """Memory for a gradient of these rows: it is sent from there, unless it is compressed first."""
        shape = (len(ids), self.spec.dim)
        if self._compresses():
            table_slice = TableSlice(self.name, None, True, self.client.compressor.name, prod(shape))
            return table_slice, [ids, torch.empty(shape, dtype=self.dtype)], None
        tensors, block = self.client.reserve_tensors(shard, [(torch.int64, ids.shape), (self.dtype, shape)])
        tensors[0].copy_(ids)
        return TableSlice(self.name, None, True), tensors, block

    def _compresses(self) -> bool:
        """Error feedback remembers by position, and rows change position in every push: it is not used for rows."""
        compressor = self.client.compressor
        if compressor is None or not self.dtype.is_floating_point:
            return False
        return not compressor.state() and not hasattr(compressor, "inner")
