"""Real processes: what a group gathers, sends and merges is, bit for bit, what one process would have computed."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.group_sums import expected, held_parts
from shoal.collectives import transport
from shoal.collectives.group import DistributedGroup, WorkerGroup
from shoal.errors import PeerLost
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.lanes import Span, subtrees
from shoal.testing import RanksFailed, ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SIZES = (1, 63, 64, 1000)

# Even and uneven deals, with one partial sum per worker and with several.
DEALS: dict[str, tuple[int, tuple[Span, ...]]] = {
    "2 even": (4, ((0, 2), (2, 4))),
    "2 uneven": (4, ((0, 3), (3, 4))),
    "2 of 7": (7, ((0, 1), (1, 7))),
    "3 of 4": (4, ((0, 2), (2, 3), (3, 4))),
    "3 of 8": (8, ((0, 3), (3, 6), (6, 8))),
    "4 even": (4, ((0, 1), (1, 2), (2, 3), (3, 4))),
    "4 of 6": (6, ((0, 1), (1, 3), (3, 4), (4, 6))),
    "4 of 11": (11, ((0, 5), (5, 6), (6, 9), (9, 11))),
}


@pytest.mark.parametrize("name", DEALS)
def test_a_merge_has_the_bits_of_one_process(name: str) -> None:
    lanes, deal = DEALS[name]

    def work(group: WorkerGroup) -> list[str]:
        # All merges are begun before the first is waited for, as a step with many buckets does.
        pending = [
            group.ordered_reduce(lanes, deal, held_parts(lanes, deal[group.rank], size, dtype))
            for dtype in DTYPES
            for size in SIZES
        ]
        return [tensor_sha256(merge.wait()) for merge in pending]

    wanted = [tensor_sha256(expected(lanes, size, dtype)) for dtype in DTYPES for size in SIZES]
    assert ranks(len(deal), work) == [wanted] * len(deal)


@pytest.mark.parametrize(("bandwidth", "compress", "packs"), [(1e8, "", True), (1e8, "bf16", False), (1e9, "", False)])
def test_floats_are_packed_for_links_of_medium_speed_unless_sums_are_compressed(
    bandwidth: float, compress: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressing is work enough for the cores."""
    monkeypatch.setattr(transport, "host_identity", lambda: str(os.getpid()))
    monkeypatch.setenv("SHOAL_LINKS", f'{{"host": [1e-4, {bandwidth}]}}')
    monkeypatch.setenv("SHOAL_COMPRESS", compress)

    def work(group: DistributedGroup) -> bool:
        return 1 - group.rank in group.process_group.transport.router.tcp._medium

    assert ranks(2, work) == [packs] * 2


@pytest.mark.parametrize("name", ["2 uneven", "3 of 8", "4 of 11"])
def test_merges_between_hosts_are_under_way_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones in chunks and small ones that every rank adds itself, with rows between them, in one order of calls on
    all ranks. Some are begun by the caller, some by the queue's thread, and they are awaited last first."""
    monkeypatch.setattr(transport, "host_identity", lambda: str(os.getpid()))  # each rank is a host
    (lanes, deal), sizes = DEALS[name], (1, 64, 4096, 4097, 300_000, 1000, 700_000, 5)

    def work(group: DistributedGroup) -> list[Any]:
        few = held_parts(lanes, deal[group.rank], 9, torch.float32)
        group.ordered_reduce(lanes, deal, few, attended=True).wait()  # no thread yet
        assert group.comm_stats().transport == "gather"
        found: list[Any] = []
        for attended in (True, False):
            pending = []
            for number, size in enumerate(sizes):
                parts = held_parts(lanes, deal[group.rank], size, torch.float32)
                pending.append(group.ordered_reduce(lanes, deal, parts, attended=attended))
                if number % 3 == 2:
                    found.append(group.gather_rows(torch.tensor([group.rank, number])).tolist())
                    assert all(merge.done for merge in pending), "collectives end in the order of their calls"
            if attended:
                assert [merge.done for merge in pending[-2:]] == [False, False]
                assert len(group.process_group.transport._started) == 2, "both have begun, and neither was waited for"
            found += [tensor_sha256(merge.wait()) for merge in reversed(pending)]
        return found

    rows = [[[rank, number] for rank in range(len(deal))] for number in (2, 5)]
    wanted = [*rows, *(tensor_sha256(expected(lanes, size, torch.float32)) for size in reversed(sizes))]
    assert ranks(len(deal), work) == [wanted * 2] * len(deal)


@pytest.mark.parametrize("name", ["2 even", "2 uneven", "3 of 4"])
def test_zeros_keep_their_sign_and_what_is_not_finite_stays(name: str) -> None:
    lanes, deal = DEALS[name]
    special = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 1e-45, -3.5])

    def work(group: WorkerGroup) -> Tensor:
        first = group.rank == 0
        parts = {
            node: special.clone() if first and number == 0 else torch.full((6,), -0.0)
            for number, node in enumerate(subtrees(lanes, deal[group.rank]))
        }
        return group.ordered_reduce(lanes, deal, parts).wait()

    for merged in ranks(len(deal), work):
        assert merged.view(torch.int32).tolist() == special.view(torch.int32).tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather_and_broadcast(size: int) -> None:
    def work(group: WorkerGroup) -> dict[str, Any]:
        mine = torch.tensor([group.rank + 0.5, -group.rank], dtype=torch.float64)
        from_each = []
        for source in range(group.size):
            sent = torch.full((5,), float(group.rank)).to(torch.bfloat16)
            group.broadcast(sent, source)
            from_each.append(sent)
        return {"rank": group.rank, "size": group.size, "rows": group.gather_rows(mine), "sent": torch.stack(from_each)}

    rows = torch.tensor([[rank + 0.5, -rank] for rank in range(size)], dtype=torch.float64)
    for rank, found in enumerate(ranks(size, work)):
        assert (found["rank"], found["size"]) == (rank, size)
        assert torch.equal(found["rows"], rows)
        assert found["sent"][:, 0].tolist() == list(range(size))


@pytest.mark.parametrize("operation", ["gather", "broadcast", "merge"])
def test_a_killed_peer_is_an_error_on_all_others(operation: str) -> None:
    deal = ((0, 1), (1, 2), (2, 4))

    def work(group: WorkerGroup) -> str:
        group.gather_rows(torch.zeros(1))  # everybody is connected
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if operation == "gather":
                group.gather_rows(torch.zeros(1))
            elif operation == "broadcast":
                group.broadcast(torch.zeros(1), 1)
            else:
                group.ordered_reduce(4, deal, {node: torch.ones(300) for node in subtrees(4, deal[group.rank])}).wait()
        except PeerLost as error:
            return str(error)
        return "nothing was noticed"

    with pytest.raises(RanksFailed, match="rank 1 ended with code -9") as caught:
        ranks(3, work)
    assert list(caught.value.failures) == [1]
    for rank, told in caught.value.results.items():
        # Whoever notices first passes it on: the other may hear it from there.
        assert "lost rank 1 on " in told and "its process has ended" in told, f"rank {rank}: {told}"


# -- the harness itself -----------------------------------------------------------------------------------------------


def test_ranks_return_what_they_computed() -> None:
    def work(group: WorkerGroup) -> dict[str, Any]:
        return {
            "plain": [None, True, 1, -2.5, "text", [group.rank]],
            "bf16": torch.tensor([1.5, -0.0]).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7),
            "flags": torch.tensor([True, False]),
            "slanted": torch.arange(6).reshape(2, 3).t(),
        }

    for rank, found in enumerate(ranks(2, work)):
        assert found["plain"] == [None, True, 1, -2.5, "text", [rank]]
        assert found["bf16"].dtype == torch.bfloat16 and found["bf16"].signbit().tolist() == [False, True]
        assert found["empty"].shape == (0, 3)
        assert found["scalar"].shape == () and found["scalar"].item() == 7
        assert found["flags"].tolist() == [True, False]
        assert found["slanted"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def work(group: WorkerGroup) -> None:
        if group.rank == 1:
            raise ValueError("out of fish")
        group.gather_rows(torch.zeros(1))  # this one loses a peer, which is not the cause

    with pytest.raises(RanksFailed, match=r"(?s)^rank 1 raised.*test_group.py.*ValueError: out of fish"):
        ranks(2, work)


def test_a_rank_that_hangs_is_killed() -> None:
    def work(group: WorkerGroup) -> str:
        if group.rank == 0:
            signal.pause()
        return "done"

    with pytest.raises(RanksFailed, match=r"rank 0 did not answer within 0.5 s and was killed") as caught:
        ranks(2, work, timeout=0.5)
    assert caught.value.results == {1: "done"}


def test_what_cannot_be_sent_back_is_an_error_that_says_so() -> None:
    with pytest.raises(RanksFailed, match="a rank returned object; it can return numbers, strings and tensors"):
        ranks(1, lambda group: object())
