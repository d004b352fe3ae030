"""What happens to a group when one of its ranks does not do its part: on every other rank a sentence, and no hang.

Real processes, on one host and on hosts of a lab. Every survivor waits in every kind of call at once, each in a group
of its own, while one rank dies, leaves or is stopped. The times to notice are printed (`pytest -s`), and only a hang
is a failure: the groups' deadline is a minute.
"""

import importlib
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.cluster import even_cluster
from shoal.collectives.backend import ShoalProcessGroup
from shoal.collectives.commons import open_commons
from shoal.collectives.group import Group, Workers
from shoal.engines.lab import Lab
from shoal.engines.namespaces import LabHost
from shoal.errors import CollectiveError, PeerLost
from shoal.testing import RanksFailed, ranks

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
GENEROUS_SECONDS = 10.0  # to notice, under a deadline of a minute
VICTIM = 1
Places = list[LabHost] | None
Call = Callable[[ShoalProcessGroup, int], Callable[[], Any]]
Words = dict[str, list[Any]]  # by call: the error's type, its text, seconds since the fact


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """What DistributedDataParallel imports when it is made, once instead of in every rank."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(even_cluster(racks=1, hosts=3, workers=2)) as made:
        yield made


SPREADS = {  # ranks, and how many of them on each host
    "one host": (3, (3,)),
    "two hosts": pytest.param(2, (1, 1), marks=root),
    "three hosts": pytest.param(3, (1, 1, 1), marks=root),
    "two and two": pytest.param(4, (2, 2), marks=root),
}
spread = pytest.mark.parametrize(("size", "hosts"), SPREADS.values(), ids=SPREADS.keys())


def places(request: pytest.FixtureRequest, hosts: tuple[int, ...]) -> Places:
    if len(hosts) == 1:
        return None
    lab: Lab = request.getfixturevalue("lab")
    return [lab.hosts[host] for host, ranks_there in enumerate(hosts) for _ in range(ranks_there)]


# -- a rank dies, leaves or stops, while the others wait for it --------------------------------------------------------


class Fact:
    """When it happened, for all processes to read."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def happens(self) -> None:
        struct.pack_into("<d", self._memory, 0, time.monotonic())

    def since(self) -> float:
        return time.monotonic() - float(struct.unpack_from("<d", self._memory)[0])


def all_reduce(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.ones(100), group=group)


def large_all_reduce(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.ones(1 << 20), group=group)


def recv(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: dist.recv(torch.ones(5), VICTIM, group=group)


def recv_any(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: dist.recv(torch.ones(5), group=group)


def send(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: dist.send(torch.ones(1 << 21), VICTIM, group=group)


def waited_for_later(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
    return work.wait


def future(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
    return lambda: work.get_future().wait()


def gather_rows(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: group.gather_rows(torch.ones(3))


def merge(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    lanes = group.size()
    deal = [(lane, lane + 1) for lane in range(lanes)]
    return lambda: group.merge(lanes, deal, {deal[rank]: torch.ones(100)}).wait()


def hear_from_another(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    """One rank waits for the victim; the next for that one; and so on."""
    chain = [VICTIM, *(each for each in range(group.size()) if each != VICTIM)]
    before = chain[chain.index(rank) - 1]
    return lambda: dist.recv(torch.ones(5), before, group=group)


CALLS = (
    all_reduce,
    large_all_reduce,
    recv,
    recv_any,
    send,
    waited_for_later,
    future,
    gather_rows,
    merge,
    hear_from_another,
)
OTHERS = ("commons", "backward")  # which need something that all ranks make together


def scene(
    happens: Callable[[], Any], fact: Fact, *, calls: Sequence[Call] = CALLS, timeout: float = 60.0
) -> Callable[[Group], Any]:
    """What each rank does: the victim what `happens`, the others wait for it in all calls at once."""

    def play(group: Group) -> Any:
        store = dist.distributed_c10d._get_default_store()
        limit = timedelta(seconds=timeout)
        made: dict[str, Any] = {name: dist.new_group(timeout=limit) for name in [*(c.__name__ for c in calls), *OTHERS]}
        commons = open_commons(made["commons"], 1 << 16)
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=made["backward"])
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        group.gather(torch.ones(1))
        if group.rank == VICTIM:
            time.sleep(0.4)
            fact.happens()
            return happens()
        waits = {call.__name__: call(made[call.__name__], group.rank) for call in calls}
        waits["backward"] = lambda: model(torch.ones(2, 4)).sum().backward()
        if commons is not None:
            waits["commons"] = commons.all_reduce
        words = in_threads(waits, fact)
        victim = made["recv"].members[VICTIM].process
        dist.destroy_process_group()
        words["again"] = again(store, group.rank, group.size)
        if group.rank == 0:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)  # it may be stopped
        return words

    return play


def in_threads(waits: dict[str, Callable[[], Any]], fact: Fact) -> dict[str, Any]:
    words: dict[str, Any] = {name: ["nothing: it hangs", "", 0.0] for name in waits}

    def wait(name: str) -> None:
        try:
            waits[name]()
            words[name] = ["nothing: it returned", "", fact.since()]
        except BaseException as error:
            words[name] = [type(error).__name__, str(error), fact.since()]

    threads = [threading.Thread(target=wait, args=(name,), daemon=True) for name in waits]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return words


def again(store: Any, rank: int, size: int) -> float:
    """A new group of the survivors, in the same processes."""
    left = [each for each in range(size) if each != VICTIM]
    own = dist.PrefixStore("again", store)
    dist.init_process_group("shoal", store=own, rank=left.index(rank), world_size=len(left))
    total = torch.ones(1000)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")] == []
    return float(total[0])


def witnesses(size: int, function: Callable[[Group], Any], where: Places, code: int | None) -> dict[int, Any]:
    """What the survivors said. `code`: how the victim ended; None: it lives and answered."""
    try:
        said = dict(enumerate(ranks(size, function, places=where)))
        assert code is None, "nobody was lost"
        said.pop(VICTIM)
        return said
    except RanksFailed as failed:
        if code is None or set(failed.failures) != {VICTIM} or f"ended with code {code} " not in str(failed):
            raise
        return failed.results


def check(said: dict[int, Any], host: str, fact: str, about: str) -> None:
    slowest: dict[str, float] = {}
    for rank, words in said.items():
        assert words.pop("again") == len(said)
        for call, (kind, text, seconds) in words.items():
            about_it = f"rank {rank} in {call}: {kind}: {text}"
            assert kind == "PeerLost" or (call in ("future", "backward") and kind == "RuntimeError"), about_it
            by_name = f"rank {VICTIM}" if call == "hear_from_another" else f"rank {VICTIM} on {host}"
            assert by_name in text and fact in text, about_it
            assert "with tag 0" in text or ", number " in text, about_it
            assert seconds < GENEROUS_SECONDS, about_it
            slowest[call] = max(slowest.get(call, 0.0), seconds)
    print(f"\n{about}: " + ", ".join(f"{call} {1000 * seconds:.0f} ms" for call, seconds in slowest.items()))
    rank, words = next(iter(said.items()))
    print(
        "\n".join(f"    {words[call][1].splitlines()[0]}" for call in ("all_reduce", "recv", "hear_from_another"))
    )


def host_of(where: Places, rank: int) -> str:
    return os.uname().nodename if where is None else where[rank].name


@spread
def test_a_killed_rank_is_named_by_all_others(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    said = witnesses(size, scene(lambda: os.kill(os.getpid(), signal.SIGKILL), fact), where, -signal.SIGKILL)
    check(said, host_of(where, VICTIM), "its process has ended", f"killed, {hosts}")


@spread
def test_a_rank_that_left_is_named_by_all_others(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    # Who waits for anyone waits for the rest, too: that one has left is no failure while another may send.
    calls = [call for call in CALLS if call is not recv_any or size == 2]
    said = witnesses(size, scene(dist.destroy_process_group, fact, calls=calls), where, None)
    check(said, host_of(where, VICTIM), "it has left the group", f"left, {hosts}")


@spread
def test_a_stopped_rank_is_named_at_the_deadline(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    calls = [call for call in CALLS if call is not recv_any or size == 2]
    happens = scene(lambda: os.kill(os.getpid(), signal.SIGSTOP), fact, calls=calls, timeout=2.0)
    said = witnesses(size, happens, where, -signal.SIGKILL)
    check(said, host_of(where, VICTIM), "", f"stopped, deadline 2 s, {hosts}")
