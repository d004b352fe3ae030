"""Sparse tables: with real processes."""

from typing import Any

import msgspec
import pytest
import torch

from helpers.command import in_child, program
from helpers.places import BENCHMARKS
from helpers.sparse_tables import table
from shoal.paramserver.client import ParameterClient
from shoal.paramserver.embedding import Embedding
from shoal.paramserver.local_servers import LocalServers
from shoal.paramserver.messages import StatsRequest
from shoal.worker import memory

# -- on servers -------------------------------------------------------------------------------------------------------

LARGE = {"rows": 100_000, "dim": 128, "optimizer": "row_adagrad"}  # 51 MB of values
CAP = 24_000_000


@pytest.mark.clean_heap
def test_a_table_larger_than_a_workers_memory() -> None:
    """A worker that may have 24 MB trains every row of a table of 51 MB; by itself it cannot."""

    def train(module: Embedding, push: Any) -> None:
        everybody = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
        for step, looked in enumerate(everybody.split(5000)):
            module.begin_step(step)
            module(looked).square().sum().backward()
            taken = module.take_gradient()
            assert taken is not None
            push(*taken)

    def alone() -> None:
        memory.cap_memory(CAP)
        module = Embedding(**LARGE)
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            train(module, lambda *taken: module.table.push(*taken, 0))
        assert memory.is_out_of_memory(caught.value), caught.value

    def with_servers() -> None:
        module = Embedding(**LARGE)
        with ParameterClient(servers.addresses) as client:
            memory.cap_memory(CAP)
            table = client.sparse("large", module.spec())
            module.attach("large", table)
            train(module, lambda *taken: table.push(*taken).wait())
            counted = [client.request(shard, StatsRequest()).wait()[0] for shard in range(2)]
            assert [each.rows["large"] for each in counted] == [50_000, 50_000]

    in_child(alone)
    with LocalServers(2) as servers:
        in_child(with_servers)


@pytest.mark.clean_heap
def test_a_table_takes_little_more_than_values_and_state() -> None:
    def fill() -> None:
        held = table(rows=300_000, dim=64, optimizer="adagrad")
        meter = memory.MemoryMeter()
        for some in torch.randperm(200_000, generator=torch.Generator().manual_seed(0)).split(2000):
            held.push(some, torch.ones(2000, 64), 1)
        assert held.nbytes == 200_000 * 64 * 8
        assert meter.peak_bytes() < 1.1 * held.nbytes, (meter.peak_bytes(), held.nbytes)

    in_child(fill)


# -- the benchmark ----------------------------------------------------------------------------------------------------


def test_the_benchmark_of_hot_keys_works() -> None:
    """Two servers and two workers, in a small table: not how fast it is."""
    done = program(BENCHMARKS / "hotkeys.py", "--quick", "--json")
    assert done.code == 0, done.err
    found = msgspec.json.decode(done.out)
    assert list(found["cases"]) == ["uniform, no cache", "uniform, cached", "zipf, no cache", "zipf, cached"]
    assert all(each["lookups_per_second"]["median"] > 0 for each in found["cases"].values())
    assert found["cases"]["zipf, cached"]["served_from_cache"] > 0.1
    assert [each["rows"] for each in found["servers"]] == [10_000, 10_000], "every row is held"
