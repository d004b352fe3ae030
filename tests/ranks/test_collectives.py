"""Beside the standard collectives: prefix sums, merges of partial sums, memory that is summed in place."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.collectives import open_shared_buffers, ordered_reduce, prefix_sum
from shoal.collectives.group import WorkerGroup
from shoal.collectives.shm_segment import SEGMENT_BYTES
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.lanes import Span, fold, split_point, subtrees
from shoal.testing import ranks


def numbers(rank: int, count: int = 1003) -> torch.Tensor:
    """Of very different magnitude: another order of sums would round otherwise."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)


def summed(count: int, lanes: int) -> torch.Tensor:
    total = fold(lanes, {(lane, lane + 1): numbers(lane, count) for lane in range(lanes)}, torch.add)
    assert total is not None
    return total


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_prefix_sum_is_the_sum_of_the_ranks_before(size: int) -> None:
    def work(group: WorkerGroup) -> list[Any]:
        mine = numbers(group.rank).view(17, 59)
        kept = mine.clone()
        inclusive, exclusive = prefix_sum(mine), prefix_sum(mine, exclusive=True)
        large = prefix_sum(torch.full((600_000,), group.rank + 1, dtype=torch.int32))  # more than a slot
        return [inclusive, exclusive, torch.equal(mine, kept), int(large[-1]), prefix_sum(torch.empty(0)).numel()]

    for rank, (inclusive, exclusive, untouched, large, nothing) in enumerate(ranks(size, work)):
        assert torch.equal(inclusive, summed(1003, rank + 1).view(17, 59))
        assert torch.equal(exclusive, summed(1003, rank).view(17, 59) if rank else torch.zeros(17, 59))
        assert (untouched, large, nothing) == (True, (rank + 1) * (rank + 2) // 2, 0)


@pytest.mark.parametrize("deal", [((0, 4), (4, 7)), ((0, 1), (1, 7)), ((0, 3), (3, 5), (5, 7))])
def test_a_merge_is_the_same_for_every_deal(deal: tuple[Span, ...]) -> None:
    def part(node: Span) -> torch.Tensor:
        if node[1] - node[0] == 1:
            return numbers(node[0])
        return part((node[0], split_point(node))) + part((split_point(node), node[1]))

    def work(group: WorkerGroup) -> str:
        return tensor_sha256(ordered_reduce(7, deal, {node: part(node) for node in subtrees(7, deal[group.rank])}))

    assert ranks(len(deal), work) == [tensor_sha256(summed(1003, 7))] * len(deal)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_memory_summed_in_place_has_the_bits_of_an_all_reduce(size: int) -> None:
    def work(group: WorkerGroup) -> list[Any]:
        found = []
        for count in (1, 1000, 300_001):
            tensor = numbers(group.rank, count)
            commons = open_shared_buffers(4 * count)
            assert commons is not None
            own = commons.own.view(torch.float32)[:count]
            own.copy_(tensor)
            dist.all_reduce(tensor)
            commons.all_reduce(torch.float32)
            found.append([torch.equal(own, tensor), torch.equal(tensor, summed(count, group.size))])
        return found

    assert ranks(size, work) == [[[True, True]] * 3] * size


def test_shared_memory_does_not_grow_with_the_tensors() -> None:
    def work(group: WorkerGroup) -> list[int]:
        return [_shared_bytes(), [dist.all_reduce(torch.ones(4_000_000)), _shared_bytes()][1]]

    (before, after), _ = ranks(2, work)
    # Twice this rank's segment: its own and the other's. A bucket of DDP has 25 MB.
    assert before == after <= 2 * (SEGMENT_BYTES + 4096) < 25 << 20


def _shared_bytes() -> int:
    """What this process has mapped of anonymous shared memory made by Shoal."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:shoal" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines))


def test_a_group_of_another_backend_is_refused_by_name() -> None:
    with pytest.raises(shoal.InputError, match=r"this call needs a group of the backend shoal, and there is none"):
        prefix_sum(torch.ones(1))

    def work(group: WorkerGroup) -> str:
        other = dist.new_group(backend="gloo")
        with pytest.raises(shoal.InputError) as caught:
            prefix_sum(torch.ones(1), other)
        return str(caught.value)

    told = ranks(2, work)[0]
    assert re.search(
        r"needs a group of the backend shoal, and this is one of gloo\n  fix: dist.init_process_group", told
    )
