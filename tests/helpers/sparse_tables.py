"""Tables of rows."""

from typing import Any

from shoal.paramserver.messages import SparseSpec
from shoal.paramserver.sparse_table import SparseTable

DIM = 10


def table(**fields: Any) -> SparseTable:
    usual: dict[str, Any] = {"rows": 50, "dim": DIM, "seed": 3, "scale": 0.1, "optimizer": "sgd"}
    shard, shards = fields.pop("shard", 0), fields.pop("shards", 1)
    return SparseTable(SparseSpec(**usual | fields), shard, shards, name="words")
