"""A worker's client: tables on all shards.

with ParameterClient(["unix:/tmp/s0", "unix:/tmp/s1"]) as client:
    weights = client.dense("weights", dict(model.named_parameters()), optimizer="adam", lr=1e-3)
    weights.push({"w": gradient}, pull_into={"w": w}).wait()
"""

from collections.abc import Mapping

from torch import Tensor

from shoal.paramserver.connections import (
    ClientNotice,
    RefusedError,
    ServerAwayNotice,
    ServerUnreachable,
    WritesLostNotice,
)
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import DenseSpec, SparseSpec
from shoal.paramserver.remote_dense import RemoteDenseTable, declare_table
from shoal.paramserver.remote_sparse import RemoteSparseTable
from shoal.paramserver.request_client import RequestClient

__all__ = [
    "ClientNotice", "ParameterClient", "RefusedError", "RemoteDenseTable", "RemoteSparseTable", "ReplyFuture",
    "ServerAwayNotice", "ServerUnreachable", "WritesLostNotice",
]  # fmt: skip


class ParameterClient(RequestClient):
    def dense(
        self,
        name: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        spec: DenseSpec | None = None,
        optimizer: str = "sgd",
        **settings: float | bool,
    ) -> RemoteDenseTable:
        """A table of named tensors, cut over all shards. The values of `tensors` fill it, unless another worker has
        filled it. All workers must give the same names, shapes, dtypes and optimizer."""
        return RemoteDenseTable.create(self, name, tensors, spec, optimizer, settings)

    def sparse(self, name: str, spec: SparseSpec) -> RemoteSparseTable:
        """A table of rows that are created at their first update."""
        declare_table(self, name, spec)
        return RemoteSparseTable(self, name, spec)
