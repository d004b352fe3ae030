"""Sparse tables on disk. They are too large to pass through a worker: a checkpoint links the servers' snapshots.

    RUN/tables/step-00000100/shard-0/snapshot-…      links to what the server wrote; two steps are kept

A run that resumes with another number of servers reads all of them, and each server takes its own rows.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError, InputError
from shoal.paramserver.embedding import tables_of
from shoal.paramserver.sharding import shard_of
from shoal.paramserver.snapshot import SnapshotFolder, insert_tensors
from shoal.paramserver.sparse_table import SparseTable

TABLES = "tables"
STEPS_KEPT = 2
TableRows = dict[str, Tensor]  # a table's rows as a shard captures them


def save_rows(run: Path, step: int, servers: int) -> str:
    """Keeps what the servers have just written as this step's rows. Returns their name, for the checkpoint."""
    name = f"step-{step:08d}"
    beside = run / TABLES / f".{name}"
    shutil.rmtree(beside, ignore_errors=True)
    for number in range(servers):  # folders of more servers may be there, from before a resume
        shard = run / "servers" / f"shard-{number}"
        newest = max(shard.glob("snapshot-*"))
        target = beside / shard.name / newest.name
        target.mkdir(parents=True)
        for file in newest.iterdir():
            os.link(file, target / file.name)
    shutil.rmtree(run / TABLES / name, ignore_errors=True)
    beside.rename(run / TABLES / name)
    for older in sorted((run / TABLES).glob("step-*"))[:-STEPS_KEPT]:
        shutil.rmtree(older, ignore_errors=True)
    return name


def read_rows(run: Path, name: str) -> dict[str, list[TableRows]]:
    """The rows of each server, by table."""
    found: dict[str, list[TableRows]] = {}
    folders = sorted((run / TABLES / name).glob("shard-*"))
    if not folders:
        raise CheckpointError(f"the rows of tables that belong to the checkpoint are gone: {TABLES}/{name}")
    for folder in folders:
        with SnapshotFolder(folder) as snapshots:
            captured = snapshots.newest()
        if captured is None:
            raise CheckpointError(f"{TABLES}/{name}/{folder.name} holds no snapshot")
        for table, kept in insert_tensors(captured.values["tables"]["sparse"], captured.tensors).items():
            found.setdefault(table, []).append(kept["rows"])
    return found


def rows_of_shard(run: Path, name: str, shard: int, shards: int) -> Mapping[str, TableRows]:
    """The rows that belong to this shard, by table."""
    found: dict[str, TableRows] = {}
    for table, shard_rows in read_rows(run, name).items():
        mine: list[TableRows] = []
        for each in shard_rows:
            ids = each["ids"]
            keep = shard_of(ids, shards) == shard
            mine.append({key: value[keep] for key, value in each.items() if len(value) == len(ids) and key != "counts"})
        whole = {key: torch.cat([each[key] for each in mine]) for key in mine[0]}
        order = torch.argsort(whole["ids"])
        found[table] = {key: value[order] for key, value in whole.items()} | {"counts": torch.tensor([0, 0])}
    return found


def rows_of_run(run: Path, table: str) -> tuple[Tensor, Tensor]:
    """The rows of a run's table at its end: ids, rising, and their rows."""
    steps = sorted((run / TABLES).glob("step-*"))
    if not steps:
        raise InputError(f"{run} has no tables", fix="a run of a model with shoal.Embedding")
    found = read_rows(run, steps[-1].name)
    if table not in found:
        raise InputError(f"{run} has no table {table!r}", fix=f"one of {', '.join(sorted(found))}")
    ids = torch.cat([each["ids"] for each in found[table]])
    rows = torch.cat([each["values"] for each in found[table]])
    order = torch.argsort(ids)
    return ids[order], rows[order]


def attach_rows(model: nn.Module, run: Path, seed: int) -> None:
    """Makes every `shoal.Embedding` of the model look rows up in a run's tables; rows that are not there are new."""
    tables = tables_of(model)
    if not tables:
        return
    steps = sorted((run / TABLES).glob("step-*"))
    kept = rows_of_shard(run, steps[-1].name, 0, 1) if steps else {}
    for name, embedding in tables:
        if name not in kept:
            raise CheckpointError(f"{run} has no rows of table {name}: it was stopped before the first checkpoint")
        embedding.name = name
        table = SparseTable(embedding.spec(seed), name=name)
        table.restore(kept[name])
        embedding.attach(name, table)
