"""The model on parameter servers: weights, buffers and tables, sent to the shards and pulled from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.collectives.compression import Compressor, parse_compression
from shoal.numerics.digest import tensor_digests
from shoal.parallel.plan import Plan
from shoal.parallel.replica import ModelReplica
from shoal.parallel.server_step import DensePacker, split_rows
from shoal.paramserver.client import ParameterClient, ReplyFuture
from shoal.paramserver.embedding import Embedding
from shoal.paramserver.messages import (
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PutRequest,
    SnapshotRequest,
    StatusReply,
    StatusRequest,
    TableSlice,
    TableStateRequest,
)
from shoal.paramserver.reduce import SparseGradient
from shoal.worker.build_model import WorkerModel
from shoal.worker.server_worker.optimizer_state import gather_state, slice_state

MODEL, BUFFERS = "/model", "/buffers"  # tables; those of modules have their paths for names
DIGEST_BYTES = 256 << 20  # of a table that is fetched for a digest


class RemoteModel:
    def __init__(
        self,
        client: ParameterClient,
        plan: Plan,
        built: WorkerModel,
        replica: ModelReplica,
        tables: list[tuple[str, Embedding]],
    ) -> None:
        self.client, self.built, self.tables = client, built, tables
        self.shards, servers = range(plan.servers), plan.servers
        self.versions = [-1] * servers  # of the values that are here, by shard
        self.compressor: Compressor | None = parse_compression(plan.compress).get("host") if plan.compress else None
        self.values = {name: each.detach() for name, each in built.update.optimizer_params.items()}
        self.model_table = DensePacker(MODEL, _spec(self.values, "job"), servers)
        self.parameter_names = [name for name, _ in replica.parameters]
        self.buffer_names = replica.buffers.names
        buffers = self.buffer_values()
        self.buffer_table = DensePacker(BUFFERS, _spec(buffers, "none"), servers) if buffers else None

    def buffer_values(self) -> dict[str, Tensor]:
        return {name: self.built.model.get_buffer(name).detach() for name in self.buffer_names}

    # -- the start ----------------------------------------------------------------------------------------------------

    def declare(self, seed: int) -> None:
        """Makes every shard create the tables, unless it has them."""
        specs: list[tuple[str, Any]] = [(MODEL, self.model_table.spec)]
        specs += [(BUFFERS, self.buffer_table.spec)] if self.buffer_table is not None else []
        specs += [(name, table.spec(seed)) for name, table in self.tables]
        requests = [DeclareRequest(name, spec) for name, spec in specs]
        wait_all([self.client.request(shard, request) for request in requests for shard in self.shards])

    def attach_tables(self, seed: int, exact: bool) -> None:
        for name, table in self.tables:
            table.cache = 0 if exact else table.cache  # cached rows may be some steps old
            table.attach(name, self.client.sparse(name, table.spec(seed)))

    def status(self) -> list[StatusReply]:
        """What each shard holds."""
        return [reply for reply, _ in wait_all([self.client.request(shard, StatusRequest()) for shard in self.shards])]

    def fill_shard(self, shard: int) -> None:
        """Sends a shard its first values. With them its tables are complete; when all are, other workers begin."""
        slices: list[TableSlice] = []
        tensors: list[Tensor] = []
        tables = [(self.model_table, self.values)]
        tables += [(self.buffer_table, self.buffer_values())] if self.buffer_table is not None else []
        for table, values in tables:
            packed = table.pack(shard, values)
            if packed is not None:
                slices.append(packed[0])
                tensors += packed[1]
        self.client.request(shard, PutRequest(slices, fill=True), tensors).wait()

    def snapshot(self, shards: Sequence[int]) -> None:
        """Makes shards write what they hold to disk."""
        wait_all([self.client.request(shard, SnapshotRequest()) for shard in shards])

    # -- the optimizer's state ----------------------------------------------------------------------------------------

    def put_optimizer_state(self, shard: int, optimizer: Optimizer, scheduler: Any) -> None:
        """Sends a shard its rows of an optimizer's state."""
        found, tensors = slice_state(optimizer, scheduler, self.built.update.optimizer_params, self.model_table, shard)
        state = {"table": MODEL, "names": found.names} | found.values
        self.client.request(shard, PutRequest([], fill=True, state=state), tensors).wait()  # the values follow

    def fetch_optimizer_state(self, optimizer: Optimizer, scheduler: Any) -> None:
        """Gathers the state of the servers' optimizer, which has it row by row."""
        states = wait_all([self.client.request(shard, TableStateRequest(MODEL)) for shard in self.shards])
        gather_state(optimizer, scheduler, self.built.update.optimizer_params, self.model_table, states)

    # -- values -------------------------------------------------------------------------------------------------------

    def pull(self) -> list[int]:
        """Weights and buffers as they are on the servers now. Returns the step of each shard, as it counts."""
        slices = [TableSlice(MODEL), *([TableSlice(BUFFERS)] if self.buffer_table is not None else [])]
        steps = []
        futures = [self.client.request(shard, PullRequest(slices)) for shard in self.shards]
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            steps.append(reply.step)
            self.store(shard, reply.version, tensors)
            if self.buffer_table is not None:
                self.buffer_table.unpack(shard, tensors[self.model_table.flat_count(shard) :], self.buffer_values())
        self.built.update.after_step()
        return steps

    def store(self, shard: int, version: int, tensors: Sequence[Tensor]) -> None:
        """Stores a shard's weights, as it sent them."""
        self.versions[shard] = version
        self.model_table.unpack(shard, tensors[: self.model_table.flat_count(shard)], self.values)

    def pack_buffers(self, shard: int) -> tuple[list[TableSlice], list[Tensor]]:
        """A shard's share of the buffers."""
        packed = self.buffer_table.pack(shard, self.buffer_values()) if self.buffer_table is not None else None
        return ([], []) if packed is None else ([packed[0]], packed[1])

    def put_buffers(self, shard: int) -> list[ReplyFuture[Any]]:
        """Sends a shard its share of the buffers, if it has one."""
        slices, tensors = self.pack_buffers(shard)
        return [self.client.request(shard, PutRequest(slices), tensors)] if slices else []

    def pack_gradients(
        self, shard: int, gradients: Mapping[str, Tensor | None], rows: Sequence[SparseGradient | None], key: Any = None
    ) -> tuple[list[TableSlice], list[Tensor]]:
        """A shard's share of a gradient. `key`: names it, for what a compressor remembers."""
        slices: list[TableSlice] = []
        tensors: list[Tensor] = []
        packed = self.model_table.pack(shard, gradients)
        if packed is not None:
            table_slice, flats = packed
            if self.compressor is not None and len(flats) == 1:
                payload = self.compressor.encode(flats[0], (MODEL, shard, key))
                table_slice = TableSlice(MODEL, table_slice.keys, codec=self.compressor.name, count=flats[0].numel())
                flats = [payload]
            slices.append(table_slice)
            tensors += flats
        for (name, _), sparse in zip(self.tables, rows, strict=True):
            mine = None if sparse is None else split_rows(sparse, len(self.shards))[shard]
            if mine is not None:
                slices.append(TableSlice(name, sparse=True))
                tensors += mine
        return slices, tensors

    def named_gradients(self, values: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        names = self.parameter_names
        return dict(zip(names, values[: len(names)], strict=True))

    # -- digests ------------------------------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """One sha256 per tensor, of the values that are here and of the rows of tables."""
        saved = self.built.saved_model
        kept = saved.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in saved.named_buffers() if name in kept]
        return tensor_digests([*self.values.items(), *buffers, *self._table_rows()])

    def _table_rows(self) -> list[tuple[str, Tensor]]:
        """Rows of tables by rising id, of tables that are small enough to be fetched for a digest."""
        found: list[tuple[str, Tensor]] = []
        for name, _ in self.tables:
            replies = wait_all([self.client.request(shard, TableStateRequest(name)) for shard in self.shards])
            tables = [dict(zip(reply.names, tensors, strict=True)) for reply, tensors in replies]
            ids, rows = (torch.cat([each[key] for each in tables]) for key in ("ids", "values"))
            if rows.nbytes <= DIGEST_BYTES:
                order = torch.argsort(ids)
                found += [(f"{name}.ids", ids[order]), (f"{name}.rows", rows[order])]
        return found


def wait_all(futures: Sequence[ReplyFuture[Any]]) -> list[tuple[Any, Sequence[Tensor]]]:
    """The replies, in order, with their tensors."""
    return [future.wait() for future in futures]


def _spec(tensors: Mapping[str, Tensor], optimizer: str) -> DenseSpec:
    shapes = [list(each.shape) for each in tensors.values()]
    dtypes = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
    return DenseSpec(names=list(tensors), shapes=shapes, dtypes=dtypes, optimizer=optimizer)
