"""What happens to a group when one of its ranks does not do its part: on every other rank a sentence, and no hang.

Real processes, on one host and on hosts of a lab. Every survivor waits in every kind of call at once, each in a group
of its own, while one rank dies, leaves or is stopped. The times to notice are printed (`pytest -s`), and only a hang
is a failure: the groups' deadline is a minute.
"""

import functools
import gc
import importlib
import logging
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
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from shoal.collectives import shm_segment
from shoal.collectives.group import WorkerGroup
from shoal.collectives.process_group import ShoalProcessGroup
from shoal.collectives.shared_buffers import open_shared_buffers
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.namespaces import LabHost
from shoal.errors import CollectiveError, InputError, PeerLost
from shoal.planner.cluster import even_cluster
from shoal.testing import RanksFailed, ranks

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
GENEROUS_SECONDS = 10.0  # to notice, under a deadline of a minute
VICTIM = 1
Places = list[LabHost] | None
Call = Callable[[ShoalProcessGroup, int], Callable[[], Any]]


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """What DistributedDataParallel imports when it is made, once instead of in every rank."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(even_cluster(racks=1, hosts=3, workers=2)) as made:
        yield made


SPREADS: dict[str, Any] = {  # ranks, and how many of them on each host
    "one host": (3, (3,)),
    "two hosts": pytest.param(2, (1, 1), marks=root),
    "three hosts": pytest.param(3, (1, 1, 1), marks=root),
    "two and two": pytest.param(4, (2, 2), marks=root),
}


def over(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("size", "hosts"), [SPREADS[name] for name in names], ids=names)


def places(request: pytest.FixtureRequest, hosts: tuple[int, ...]) -> Places:
    if len(hosts) == 1:
        return None
    lab: Lab = request.getfixturevalue("lab")
    return [lab.hosts[host] for host, ranks_there in enumerate(hosts) for _ in range(ranks_there)]


# -- a rank dies, leaves or stops, while the others wait for it --------------------------------------------------------


class Fact:
    """A number for all processes to read: when something happened."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, number: float) -> None:
        struct.pack_into("<d", self._memory, 0, number)

    def read(self) -> float:
        return float(struct.unpack_from("<d", self._memory)[0])

    def happens(self) -> None:
        self.write(time.monotonic())

    def since(self) -> float:
        return time.monotonic() - self.read()


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
    return lambda: work.wait()


def future(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    work = dist.all_reduce(torch.ones(100), group=group, async_op=True)
    return lambda: work.get_future().wait()


def gather_rows(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    return lambda: group.gather_rows(torch.ones(3))


def merge(group: ShoalProcessGroup, rank: int) -> Callable[[], Any]:
    lanes = group.size()
    deal = [(lane, lane + 1) for lane in range(lanes)]
    return lambda: group.ordered_reduce(lanes, deal, {deal[rank]: torch.ones(100)}).wait()


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
) -> Callable[[WorkerGroup], Any]:
    """What each rank does: the victim what `happens`, the others wait for it in all calls at once."""

    def play(group: WorkerGroup) -> Any:
        store = dist.distributed_c10d._get_default_store()
        limit = timedelta(seconds=timeout)
        made: dict[str, Any] = {name: dist.new_group(timeout=limit) for name in [*(c.__name__ for c in calls), *OTHERS]}
        commons = open_shared_buffers(made["commons"], 1 << 16)
        model = DistributedDataParallel(nn.Linear(4, 4), process_group=made["backward"])
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        for each in made.values():
            dist.barrier(group=each)
        if group.rank == VICTIM:
            time.sleep(0.4)
            fact.happens()
            return happens()
        waits = {call.__name__: call(made[call.__name__], group.rank) for call in calls}
        waits["backward"] = lambda: model(torch.ones(2, 4)).sum().backward()
        if commons is not None:
            waits["commons"] = commons.all_reduce
        words = in_threads(waits, fact)
        victim = made["recv"].members[VICTIM].pid
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
    own = PrefixStore("again", store)
    dist.init_process_group("shoal", store=own, rank=left.index(rank), world_size=len(left))
    total = torch.ones(1000)
    dist.all_reduce(total)
    dist.destroy_process_group()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shoal")] == []
    return float(total[0])


def witnesses(size: int, function: Callable[[WorkerGroup], Any], where: Places, code: int | None) -> dict[int, Any]:
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
            assert f"rank {VICTIM} on {host}" in text and fact in text, about_it
            assert "with tag 0" in text or ", number " in text, about_it
            assert seconds < GENEROUS_SECONDS, about_it
            slowest[call] = max(slowest.get(call, 0.0), seconds)
    print(f"\n{about}: " + ", ".join(f"{call} {1000 * seconds:.0f} ms" for call, seconds in slowest.items()))
    rank, words = next(iter(said.items()))
    print("\n".join(f"    {words[call][1].splitlines()[0]}" for call in ("all_reduce", "recv", "hear_from_another")))


def host_of(where: Places, rank: int) -> str:
    return os.uname().nodename if where is None else where[rank].name


@over("one host", "two hosts", "three hosts", "two and two")
def test_a_killed_rank_is_named_by_all_others(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    said = witnesses(size, scene(lambda: os.kill(os.getpid(), signal.SIGKILL), fact), where, -signal.SIGKILL)
    check(said, host_of(where, VICTIM), "its process has ended", f"killed, {hosts}")


@over("one host", "three hosts", "two and two")
def test_a_rank_that_left_is_named_by_all_others(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    # Who waits for anyone waits for the rest, too: that one has left is no failure while another may send.
    calls = [call for call in CALLS if call is not recv_any or size == 2]
    said = witnesses(size, scene(dist.destroy_process_group, fact, calls=calls), where, None)
    check(said, host_of(where, VICTIM), "it has left the group", f"left, {hosts}")


@over("one host", "two hosts", "two and two")
def test_a_stopped_rank_is_named_at_the_deadline(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()
    calls = [call for call in CALLS if call is not recv_any or size == 2]
    happens = scene(lambda: os.kill(os.getpid(), signal.SIGSTOP), fact, calls=calls, timeout=2.0)
    said = witnesses(size, happens, where, -signal.SIGKILL)
    check(said, host_of(where, VICTIM), "", f"stopped, deadline 2 s, {hosts}")


def die(fact: Fact) -> None:
    fact.happens()
    os.kill(os.getpid(), signal.SIGKILL)


@over("one host", "two and two")
def test_a_rank_killed_in_the_middle_of_a_large_sum(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where, fact = places(request, hosts), Fact()

    def play(group: WorkerGroup) -> Any:
        large = torch.ones(1 << 22)
        dist.all_reduce(large)
        if group.rank == VICTIM:
            threading.Timer(0.2, die, [fact]).start()
        try:
            for _ in range(2000):
                dist.all_reduce(large)
        except PeerLost as error:
            return [str(error), fact.since()]
        return ["nothing", 0.0]

    said = witnesses(size, play, where, -signal.SIGKILL)
    print(f"\nkilled in the middle, {hosts}: {1000 * max(seconds for _, seconds in said.values()):.0f} ms")
    for text, seconds in said.values():
        assert f"lost rank {VICTIM} on {host_of(where, VICTIM)}" in text and "all_reduce (sum of float32" in text, text
        assert 0 < seconds < GENEROUS_SECONDS


@root
def test_a_killed_rank_is_missed_though_its_child_holds_its_connections(lab: Lab) -> None:
    """A data loader's workers, say: forked, they have all that was open, and outlive their parent for a while."""
    fact, child = Fact(), Fact()

    def play(group: WorkerGroup) -> Any:
        if group.rank == VICTIM:
            forked = os.fork()
            if not forked:
                for name in os.listdir("/proc/self/fd"):
                    with suppress(OSError):
                        if os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                            os.close(int(name))  # the one on which this rank is to answer
                time.sleep(60)
                os._exit(0)
            child.write(float(forked))
            time.sleep(0.3)
            die(fact)
        with pytest.raises(PeerLost) as raised:
            dist.all_reduce(torch.ones(5))
        return [str(raised.value), fact.since()]

    try:
        text, seconds = witnesses(2, play, list(lab.hosts[:2]), -signal.SIGKILL)[0]
    finally:
        os.kill(int(child.read()), signal.SIGKILL)
    print(f"\nkilled, with a child: {1000 * seconds:.0f} ms")
    assert "lost rank 1 on r0h1: its process has ended" in text and seconds < GENEROUS_SECONDS


@root
def test_a_rank_killed_in_the_middle_of_a_message(lab: Lab) -> None:
    """Nobody waits for the rest of it, nor for room to send more."""
    fact = Fact()

    def play(group: WorkerGroup) -> Any:
        own = dist.new_group()
        large = torch.ones(1 << 25)
        dist.barrier()
        if group.rank == VICTIM:
            threading.Timer(0.03, die, [fact]).start()
            dist.send(large, 0)
            time.sleep(10)
        return in_threads(
            {"recv": lambda: dist.recv(large, VICTIM), "send": lambda: dist.send(large, VICTIM, own)}, fact
        )

    words = witnesses(2, play, list(lab.hosts[:2]), -signal.SIGKILL)[0]
    for name, (kind, text, seconds) in words.items():
        print(f"\nkilled in the middle of a message, {name}: {1000 * seconds:.0f} ms")
        assert kind == "PeerLost" and "lost rank 1 on r0h1: its process has ended" in text, text
        assert seconds < GENEROUS_SECONDS


@over("one host", "three hosts")
def test_a_rank_that_breaks_off_tells_why(size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    """An exception of its own (Ctrl-C, say) in the middle of a collective: the rank lives, but cannot go on in it."""

    def play(group: WorkerGroup) -> Any:
        if group.rank == VICTIM:
            signal.signal(signal.SIGALRM, interrupted)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError):
                dist.all_reduce(torch.ones(7))
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(1.0)  # it lives
        else:
            time.sleep(0.5)
            with suppress(PeerLost):  # between hosts; on one host its part of the first was there already
                dist.all_reduce(torch.ones(7))
        with pytest.raises(PeerLost) as raised:
            dist.all_reduce(torch.ones(7))
        return str(raised.value)

    where = places(request, hosts)
    expected = f"rank {VICTIM} on {host_of(where, VICTIM)} broke off all_reduce (sum of float32 [7]), number 1"
    for text in ranks(size, play, places=where):
        assert expected in text and "TimeoutError: enough" in text


def interrupted(number: int, frame: Any) -> None:
    raise TimeoutError("enough")


# -- ranks that do not do the same thing -------------------------------------------------------------------------------


def different(name: str, rank: int, group: Any) -> Any:
    """A call in which one rank does something else than the others."""
    other = rank == VICTIM
    if name == "collective" and other:
        return dist.barrier(group=group)
    if name == "root":
        return dist.broadcast(torch.ones(4), VICTIM if other else 0, group=group)
    if name == "message" and rank in (0, VICTIM):
        message = torch.ones(5 if other else 4)
        return dist.recv(message, 0, group=group) if other else dist.send(message, VICTIM, group=group)
    shape = {"shape": [2, 3], "count": [7], "large": [1 << 17]}.get(name, [6]) if other else [6]
    dtype = torch.float64 if name == "dtype" and other else torch.float32
    op = dist.ReduceOp.MAX if name == "operation" and other else dist.ReduceOp.SUM
    return dist.all_reduce(torch.ones(shape, dtype=dtype), op, group=group)


DIFFERENCES = {
    "collective": ("does all_reduce (sum of float32 [6])", "does barrier"),
    "shape": ("[6]", "[2, 3]"),
    "count": ("[6]", "[7]"),
    "large": ("[6]", "[131072]"),
    "dtype": ("float32", "float64"),
    "operation": ("sum of float32", "max of float32"),
    "root": ("root rank 0", "root rank 1"),
}


@over("one host", "two hosts", "two and two")
def test_ranks_that_do_different_things_say_which(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where = places(request, hosts)

    def play(group: WorkerGroup) -> Any:
        made = {name: dist.new_group() for name in DIFFERENCES}
        fact = Fact()
        fact.happens()

        def call(name: str) -> None:
            different(name, group.rank, made[name])
            while True:  # one whose part is done, the root of a broadcast, hears of it in a later collective
                dist.barrier(group=made[name])
                time.sleep(0.2)

        words = in_threads({name: functools.partial(call, name) for name in made}, fact)
        dist.destroy_process_group()
        return words

    said = ranks(size, play, places=where)
    slowest = max(seconds for words in said for _, _, seconds in words.values())
    print(f"\ndifferent things, {hosts}: {1000 * slowest:.0f} ms at the latest")
    for rank, words in enumerate(said):
        for name, (kind, text, seconds) in words.items():
            about = f"rank {rank}, {name}: {kind}: {text}"
            assert kind == "CollectiveError" and all(side in text for side in DIFFERENCES[name]), about
            assert "number 1" in text and f"rank {VICTIM} on {host_of(where, VICTIM)}" in text, about
            assert seconds < GENEROUS_SECONDS, about


@over("one host", "two hosts")
def test_a_message_of_another_size_is_refused(
    size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    where = places(request, hosts)

    def play(group: WorkerGroup) -> Any:
        try:
            if group.rank in (0, VICTIM):
                different("message", group.rank, dist.group.WORLD)
        except CollectiveError as error:
            return str(error)
        return ""

    said = ranks(size, play, places=where)
    assert "sent 16 bytes with tag 0" in said[VICTIM] and "has room for 20" in said[VICTIM], said


# -- beginning and end -------------------------------------------------------------------------------------------------


def held() -> dict[str, int]:
    """What a process has: threads of ours, descriptors, shared memory that it maps."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": len([thread for thread in threading.enumerate() if thread.name.startswith("shoal")]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": maps.count("memfd:shoal"),
        "system threads": len(os.listdir("/proc/self/task")),
    }


def held_at_rest() -> dict[str, int]:
    """The kernel lists a thread for a moment more after it was joined."""
    deadline = time.monotonic() + 2.0
    while (found := held())["system threads"] > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


@over("one host", "two and two")
def test_groups_come_and_go_without_a_trace(size: int, hosts: tuple[int, ...], request: pytest.FixtureRequest) -> None:
    """Also those that are torn down while one of their collectives waits in vain."""
    rounds = 10

    def play(group: WorkerGroup) -> Any:
        own = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        vars(group).pop("process_group")
        found: list[dict[str, int]] = []
        slowest = 0.0
        for number in range(rounds):
            limit = timedelta(seconds=60)
            dist.init_process_group("shoal", store=own, rank=group.rank, world_size=group.size, timeout=limit)
            dist.all_reduce(torch.ones(1 << 16))
            pending: list[Any] = []
            if number % 2 and group.rank != VICTIM:
                pending.append(dist.all_reduce(torch.ones(100), async_op=True))
                pending.append(dist.irecv(torch.ones(3), VICTIM))
            time.sleep(0.05)
            began = time.monotonic()
            dist.destroy_process_group()
            slowest = max(slowest, time.monotonic() - began)
            while pending:
                with pytest.raises(CollectiveError):
                    pending.pop().wait()
            if number in (1, rounds - 1):
                gc.collect()
                found.append(held_at_rest())
        return [*found, slowest]

    for first, last, slowest in ranks(size, play, places=places(request, hosts)):
        print(f"\n{rounds} groups, {hosts}: {first} -> {last}, slowest to close {slowest:.2f} s")
        assert last == first and last["threads"] == last["segments"] == 0
        assert slowest < GENEROUS_SECONDS


NEVER_DESTROYED = """
    import resource, sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from shoal.collectives.registration import register

    rank = int(sys.argv[1])
    register()
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
    dist.init_process_group("shoal", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    sockets = dist.new_group()
    for group in (None, sockets):
        dist.all_reduce(torch.ones(8), group=group)
    pending = []
    if rank == 1:
        time.sleep(0.5)
        raise ValueError("a bad batch")
    for group in (None, sockets):
        pending += [dist.all_reduce(torch.ones(8), group=group, async_op=True), dist.irecv(torch.ones(8), 1, group)]
    if rank == 0:
        for group in (None, sockets):
            try:
                dist.recv(torch.ones(8), 1, group=group, tag=3)
            except RuntimeError as error:
                print(error)
"""


def test_an_interpreter_ends_with_groups_that_were_never_destroyed(tmp_path: Path) -> None:
    """One rank with an exception, one that waits for it, one that just ends; all in the middle of something."""
    script = tmp_path / "never.py"
    script.write_text(textwrap.dedent(NEVER_DESTROYED))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(script)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=50) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 1, 0], said
    lines = said[0][0].splitlines()
    assert len(lines) == 2 and all("has left the group" in line or "a bad batch" in line for line in lines), said


@root
def test_the_store_dies_with_the_rank_that_has_it(lab: Lab) -> None:
    fact = Fact()

    def play(group: WorkerGroup) -> Any:
        outside = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()
        if group.rank == 0:
            store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            outside.set("port", str(store.port))
        else:
            store = TCPStore(lab.hosts[0].address, int(outside.get("port")), is_master=False)
        dist.init_process_group("shoal", store=store, rank=group.rank, world_size=group.size)
        dist.barrier()
        if group.rank == 0:
            time.sleep(0.5)
            fact.happens()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if group.rank == 1:
                dist.recv(torch.ones(3), 2)  # does not talk to rank 0 at all
            dist.all_reduce(torch.ones(3))
        except PeerLost as error:
            seconds = fact.since()
            dist.destroy_process_group()
            return [str(error), seconds]
        return ["nothing", 0.0]

    with pytest.raises(RanksFailed) as failed:
        ranks(3, play, places=[lab.hosts[0], lab.hosts[1], lab.hosts[2]])
    assert set(failed.value.failures) == {0} and "code -9" in str(failed.value), failed.value.failures
    for text, seconds in failed.value.results.values():
        print(f"\nstore gone after {1000 * seconds:.0f} ms: {text}")
        assert "lost rank 0 on r0h0: its process has ended" in text and seconds < GENEROUS_SECONDS


@root
@pytest.mark.parametrize(
    ("at", "address", "sentence"),
    [
        (1, "10.99.0.1", "rank 1 on r0h1 cannot listen on 10.99.0.1: Cannot assign requested address"),
        (0, "127.0.0.1", "rank 1 on r0h1 (10.77.0.2) cannot reach rank 0 on r0h0 at 127.0.0.1: Connection refused"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(lab: Lab, at: int, address: str, sentence: str) -> None:
    def play(group: WorkerGroup) -> Any:
        if group.rank == at:
            os.environ["SHOAL_ADDRESS"] = address
        with pytest.raises(PeerLost) as raised:
            dist.new_group()
        return str(raised.value)

    for text in ranks(2, play, places=lab.hosts[:2]):
        assert text.startswith(sentence) and "fix: SHOAL_ADDRESS" in text


def test_without_shared_memory_tensors_go_through_sockets_and_are_the_same() -> None:
    def play(group: WorkerGroup) -> Any:
        said: list[str] = []
        logging.getLogger("shoal.collectives").addHandler(Listener(said))
        torch.manual_seed(group.rank)
        own = torch.randn(100_000)
        sums = [summed(own, None)]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        sums += [summed(own, dist.new_group()) for _ in range(2)]
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if group.rank == 1:
            shm_segment.MAX_FREE_SHARE = 0.0
        sums.append(summed(own, dist.new_group()))
        alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
        return [sums, said, torch.equal(summed(own, alone), own)]

    found = ranks(3, play)
    expected = found[0][0][0]
    for sums, _, alone in found:
        assert all(torch.equal(each, expected) for each in sums) and alone
    notes = found[0][1]
    assert len(notes) == 2 and not found[2][1], "each reason once, by the first rank of the host"
    assert "through sockets" in notes[0] and "File too large" in notes[0] and "rank 0 on" in notes[0]
    assert "rank 1 on" in notes[1] and "MB free" in notes[1]


def summed(own: Tensor, group: Any) -> Tensor:
    total = own.clone()
    dist.all_reduce(total, group=group)
    return total


class Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


# -- wrong input -------------------------------------------------------------------------------------------------------


def test_what_is_not_supported_says_what_is() -> None:
    def play(group: WorkerGroup) -> Any:
        said = []
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e5m2)),
            lambda: dist.broadcast(torch.empty(3, dtype=torch.bits8), 0),
        ]
        for call in calls:
            with pytest.raises(CollectiveError) as raised:
                call()
            said.append(str(raised.value))
        dist.barrier()  # nothing is broken by it
        return said

    band, eight, bits = ranks(2, play)[0]
    assert band == "all_reduce has no band for float32; it has sum, avg, premul_sum, product, min, max"
    assert "float8_e5m2" in eight and "cast" in eight
    assert bits.startswith("broadcast does not move bits8; it moves uint8, int8,") and "bfloat16" in bits


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("SHOAL_ALGORITHM", "rng", "unknown algorithm 'rng'"),
        ("SHOAL_COMPRESS", "int9", "int9"),
        ("SHOAL_COMPRESS", "int8@planet", "planet"),
        ("SHOAL_LINKS", "{1}", "SHOAL_LINKS is '{1}'"),
        ("pg_options", "", "pg_options of the backend shoal are a shoal.collectives.CommOptions, not list"),
    ],
)
def test_a_wrong_setting_on_one_rank_is_an_error_on_all(variable: str, value: str, sentence: str) -> None:
    def play(group: WorkerGroup) -> Any:
        options = None
        if group.rank == VICTIM:
            if variable == "pg_options":
                options = [1]
            else:
                os.environ[variable] = value
        began = time.monotonic()
        with pytest.raises(InputError) as raised:
            dist.new_group(pg_options=options)
        return [str(raised.value), time.monotonic() - began]

    for rank, (text, seconds) in enumerate(ranks(3, play)):
        assert sentence in text and seconds < GENEROUS_SECONDS
        assert rank == VICTIM or text.startswith(f"rank {VICTIM} on {os.uname().nodename} cannot join the group: ")
