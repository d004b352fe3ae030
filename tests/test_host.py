"""Small gathers through shared memory: the same rows, and a peer that is gone or late is named."""

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch

from shoal.collectives.group import Group, PeerLost
from shoal.collectives.host import SLOT_BYTES, HostGroup, on_one_host
from shoal.testing import RanksFailed, ranks

LONG = timedelta(seconds=60)


def rows(group: Group) -> list[Any]:
    host = on_one_host(group, LONG)
    assert isinstance(host, HostGroup)
    found: list[Any] = []
    for turn in range(200):  # often enough that slots are used again and again
        row = torch.tensor([turn * 10.0 + host.rank, -0.0], dtype=torch.float64)
        found.append(host.gather(row)[:, 0].tolist())
    for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.uint8):
        told = host.gather(torch.full((3, 2), host.rank, dtype=dtype))
        found.append([list(told.shape), told[:, 1, 1].tolist()])
    large = torch.full((SLOT_BYTES // 4 + 1,), float(host.rank))  # too large for a slot
    found.append(host.gather(large)[:, -1].tolist())
    found.append(list(host.gather(torch.empty(0)).shape))
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_everyone_gets_everyones_row(workers: int) -> None:
    every = list(range(workers))
    expected: list[Any] = [[turn * 10.0 + rank for rank in every] for turn in range(200)]
    expected += [[[workers, 3, 2], [bool(rank) for rank in every]]]
    expected += [[[workers, 3, 2], every]] * 3
    expected += [[float(rank) for rank in every], [workers, 0]]
    assert ranks(workers, rows) == [expected] * workers


def killed(group: Group) -> str:
    host = on_one_host(group, LONG)
    host.gather(torch.zeros(1))
    if host.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as lost:
        host.gather(torch.zeros(1))
    return str(lost.value)


def test_a_killed_peer_is_named() -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks(3, killed)
    assert failed.value.results == {rank: f"worker {rank} lost worker 1: its process has ended" for rank in (0, 2)}


def late(group: Group) -> str:
    host = on_one_host(group, timedelta(seconds=0.2))
    told = ""
    if host.rank == 0:
        with pytest.raises(PeerLost) as lost:
            host.gather(torch.zeros(1))
        told = str(lost.value)
    group.gather(torch.zeros(1))  # the other one never came to the gather, and is let go here
    return told


def test_a_late_peer_is_named_at_the_deadline() -> None:
    assert ranks(2, late)[0] == "worker 0 waited 0.2 s for worker 1 in gather 1"
