"""What a few hot rows do to a sparse table:   python benchmarks/hotkeys.py

Two servers hold a table of a million rows of 64 numbers; two workers look up batches of rows and push a gradient for
each lookup, with row-wise Adagrad on the servers. Rows are drawn evenly, or by Zipf's law with exponent 1.1: then one
lookup in eight is of the same row. Both without a cache and with one of 4096 rows that may be 4 steps old. The four
take turns, so that whatever else the machine does falls on all. Prints medians, writes benchmarks/results/hotkeys.json.
"""

import argparse
import json
import mmap
import os
import statistics
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contenders import forked, scratch_folder
from shoal.paramserver.client import ParameterClient, RemoteSparseTable
from shoal.paramserver.local_servers import LocalServers
from shoal.paramserver.messages import SparseSpec, StatsReply, StatsRequest
from shoal.paramserver.row_cache import RowCache
from train import machine

RESULTS = Path(__file__).parent / "results" / "hotkeys.json"
SERVERS, WORKERS = 2, 2
ROWS, DIM, BATCH = 1_000_000, 64, 8192
EXPONENT = 1.1
CACHE, BOUND = 4096, 4
TARGET = 0.8  # Zipf's speed over that of even access, of the issue
CASES = [(law, cached) for law in ("uniform", "zipf") for cached in (False, True)]
SCATTER = 0x9E3779B1  # hot rows lie anywhere in the table, not at its start

Notes = dict[str, list[dict[str, float]]]


def draw(law: str, batches: int, generator: np.random.Generator, rows: int) -> list[Tensor]:
    if law == "uniform":
        ids = generator.integers(rows, size=(batches, BATCH))
    else:
        shares = np.cumsum(np.arange(1, rows + 1) ** -EXPONENT)
        ranks = np.searchsorted(shares, generator.random((batches, BATCH)) * shares[-1])
        ids = ranks * SCATTER % rows
    return list(torch.from_numpy(ids))


class Meeting:
    """All workers start together: each counts itself in, in memory that they share."""

    def __init__(self, workers: int) -> None:
        self._workers, self._map = workers, mmap.mmap(-1, 8 * workers)

    def wait(self, rank: int) -> None:
        (mine,) = struct.unpack_from("q", self._map, 8 * rank)
        struct.pack_into("q", self._map, 8 * rank, mine + 1)
        while min(struct.unpack_from(f"{self._workers}q", self._map)) <= mine:
            time.sleep(0.0005)


def work(
    rank: int, servers: LocalServers, meeting: Meeting, folder: Path, *, rows: int, batches: int, rounds: int
) -> None:
    generator = np.random.default_rng(rank)
    spec = SparseSpec(rows=rows, dim=DIM, optimizer="row_adagrad", settings={"lr": 0.01})
    gradient = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(rank))
    with ParameterClient(servers.addresses, worker=rank) as client:
        table = client.sparse("rows", spec)
        for start in range(rank * BATCH, rows, WORKERS * BATCH):  # every row is held before anything is timed
            some = torch.arange(start, min(start + BATCH, rows))
            table.push(some, gradient[: len(some)]).wait()
        caches = {case: RowCache(table, CACHE, BOUND) for case in CASES if case[1]}
        found: Notes = {_name(case): [] for case in CASES}
        for turn in range(rounds + 1):  # the first one warms up
            for case in CASES:
                drawn = draw(case[0], batches, generator, rows)
                meeting.wait(rank)
                note = _timed(caches.get(case, table), drawn, gradient, turn * batches)
                if turn:
                    found[_name(case)].append(note)
        if rank == 0:
            counted = [client.request(shard, StatsRequest()).wait()[0] for shard in range(SERVERS)]
            (folder / "servers").write_text(json.dumps([_told(each) for each in counted]))
    (folder / str(rank)).write_text(json.dumps(found))


def _timed(table: RemoteSparseTable | RowCache, drawn: list[Tensor], gradient: Tensor, step: int) -> dict[str, float]:
    asked, served = getattr(table, "lookups", 0), getattr(table, "hits", 0)
    began = time.perf_counter()
    pushed = None
    for number, ids in enumerate(drawn):
        if isinstance(table, RowCache):
            table.begin_step(step + number)
        rows = table.pull(ids).wait()
        assert len(rows) == len(ids)
        if pushed is not None:
            pushed.wait()  # the last one: a push is on its way while the next rows are asked for
        pushed = table.push(ids, gradient)
    if pushed is not None:
        pushed.wait()
    seconds = time.perf_counter() - began
    asked, served = getattr(table, "lookups", 0) - asked, getattr(table, "hits", 0) - served
    return {"seconds": seconds, "served": served / asked if asked else 0.0}


def _told(counted: StatsReply) -> dict[str, Any]:
    loads = counted.loads["rows"]
    mean = sum(loads) / len(loads)
    return {
        "rows": counted.rows["rows"],
        "updates": counted.updates,
        "busiest_range_over_mean": max(loads) / mean,
        "hot": counted.hot_rows["rows"][:5],
    }


def _name(case: tuple[str, bool]) -> str:
    return f"{case[0]}, {'cached' if case[1] else 'no cache'}"


def measure(*, rows: int, batches: int, rounds: int) -> dict[str, Any]:
    meeting = Meeting(WORKERS)
    with scratch_folder() as folder, LocalServers(SERVERS) as servers:
        forked(WORKERS, lambda rank: work(rank, servers, meeting, folder, rows=rows, batches=batches, rounds=rounds))
        notes = [json.loads((folder / str(rank)).read_text()) for rank in range(WORKERS)]
        told = json.loads((folder / "servers").read_text())
    cases = {}
    for name in notes[0]:
        seconds = [max(each["seconds"] for each in turn) for turn in zip(*(note[name] for note in notes), strict=True)]
        speeds = [WORKERS * batches * BATCH / each for each in seconds]
        served = [each["served"] for note in notes for each in note[name]]
        cases[name] = {
            "lookups_per_second": {"median": statistics.median(speeds), "best": max(speeds), "all": speeds},
            "served_from_cache": statistics.median(served),
        }
    return {"cases": cases, "servers": told}


def ratios(cases: dict[str, Any]) -> dict[str, float]:
    """Zipf's speed over that of even access, without and with the cache; and what the cache is worth."""
    speed = {name: each["lookups_per_second"]["median"] for name, each in cases.items()}
    return {
        "zipf / uniform, no cache": speed["zipf, no cache"] / speed["uniform, no cache"],
        "zipf cached / uniform, no cache": speed["zipf, cached"] / speed["uniform, no cache"],
        "zipf: cached / no cache": speed["zipf, cached"] / speed["zipf, no cache"],
        "uniform: cached / no cache": speed["uniform, cached"] / speed["uniform, no cache"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small table: shows that it works, not how fast it is")
    given = parser.parse_args()
    rows, batches, rounds = (20_000, 2, 1) if given.quick else (ROWS, 40, given.rounds)
    before = machine()
    value = {
        "machine": before,
        "quick": given.quick,
        "rounds": rounds,
        "table": {"rows": rows, "dim": DIM, "batch": BATCH, "servers": SERVERS, "workers": WORKERS},
        **measure(rows=rows, batches=batches, rounds=rounds),
    }
    value["ratios"] = ratios(value["cases"])
    value["target"] = {"zipf / uniform": TARGET}
    value["load_after"] = os.getloadavg()[0]
    if not given.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(value, indent=1) + "\n")
    if given.json:
        print(json.dumps(value))
        return
    print(f"{rows:,} rows of {DIM} on {SERVERS} servers; {WORKERS} workers, batches of {BATCH}; median of {rounds}")
    print(f"{'':<24}{'lookups/s, pulled and pushed':>30}{'best':>14}{'from the cache':>17}")
    for name, each in value["cases"].items():
        speed = each["lookups_per_second"]
        print(f"{name:<24}{speed['median']:>30,.0f}{speed['best']:>14,.0f}{each['served_from_cache']:>17.0%}")
    for name, ratio in value["ratios"].items():
        wanted = f"   (at least {TARGET})" if name.startswith("zipf") and "uniform" in name else ""
        print(f"{name:<40}{ratio:>14.2f}{wanted}")
    print(f"{before['cores']} cores; load {before['load_before']:.1f} before, {value['load_after']:.1f} after")


if __name__ == "__main__":
    main()
