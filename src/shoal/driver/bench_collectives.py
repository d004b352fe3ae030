"""Measures the links between workers, and whether the cost model agrees with the clock (`shoal bench collectives`).

    ping-pongs, streams ──► latency and bandwidth of each level ──► predicted seconds, the choice and its reason
    all-reduce by each algorithm that fits ─────────────────────► measured seconds

Ranks run on this machine or on the hosts of a lab. The formula of shared memory is in collectives/shm_cost.py, that of
links between hosts in collectives/cost_model.py.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.choose_algorithm import choose_algorithm, readable_bytes, readable_seconds
from shoal.collectives.cost_model import LinkSpeed
from shoal.collectives.group import DistributedGroup
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import CommConfig, CommOptions
from shoal.collectives.shm_cost import MemorySpeed, shm_all_reduce_seconds
from shoal.collectives.shm_segment import SLOT_BYTES
from shoal.collectives.single_host import SingleHostTransport
from shoal.collectives.stats import SHARED_MEMORY, places_of
from shoal.collectives.topology import Level, RankPlace, ranks_by_host
from shoal.driver.launchers.lab import Lab
from shoal.driver.local_ranks import ranks
from shoal.errors import InputError

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
QUICK_SIZES = (4 << 10, 256 << 10)
STREAMS = (2 << 20, 10 << 20)  # bytes: what the second takes longer than the first is bandwidth alone
QUICK_STREAMS = (256 << 10, 1 << 20)
MESSAGE_BYTES = 256 << 10  # of a stream: as relays send them
PING_PONGS = 40
COPY_BYTES = 8 << 20
MIN_SECONDS = 0.02  # seconds that a timing should take: what is short is repeated
MAX_REPEATS = 100
FASTEST_RATIO = 1.05  # times the fastest: within the clock's noise
DEADLINE_SECONDS = 600.0
BETWEEN = {"memory": "workers of a host", "host": "hosts of a rack", "rack": "racks"}

T = TypeVar("T")
Pairs = tuple[tuple[int, int], ...]


class AlgorithmTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm for one tensor size."""

    algorithm: str
    predicted: float  # seconds
    measured: float  # seconds of the slowest worker; median of all rounds


class SizeTimings(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    chosen: str
    reason: str
    timings: list[AlgorithmTiming]  # the fastest first

    @property
    def chosen_was_fastest(self) -> bool:
        measured = {each.algorithm: each.measured for each in self.timings}
        return measured[self.chosen] <= FASTEST_RATIO * min(measured.values())


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one group of workers."""

    workers: int
    hosts: list[str]  # by rank
    racks: list[str]
    links: dict[str, tuple[float, float]]  # by level: seconds per message, bytes per second
    call_seconds: float | None = None  # on one host: seconds of a barrier call,
    turn_seconds: float | None = None  # seconds of one more barrier inside an operation,
    copy_speed: float | None = None  # bytes per second that each worker copies while all do
    sizes: list[SizeTimings]


def bench_collectives(workers: Sequence[int], *, quick: bool = False, lab: Lab | None = None) -> list[BenchResult]:
    for count in workers:
        if count < 2:
            raise InputError(f"--workers {count}: it takes 2 to send anything", fix="--workers 2,4")
    found = []
    for count in workers:
        places = None if lab is None else lab.rank_hosts(count)
        first, *_ = ranks(count, lambda group: _work(group, quick), timeout=DEADLINE_SECONDS, places=places)
        found.append(msgspec.convert(first, BenchResult))
    return found


# -- in the workers ---------------------------------------------------------------------------------------------------


def _work(group: Any, quick: bool) -> Any:
    assert isinstance(group, DistributedGroup)
    process_group, rounds = group.process_group, 2 if quick else 5
    places = places_of(process_group.members)
    progress = _print_progress(group.rank, len(places))
    links, memory = measure_links(group, quick=quick, progress=progress)
    sizes = []
    groups: dict[str, Any] = {SHARED_MEMORY: process_group}
    for num_bytes in QUICK_SIZES if quick else SIZES:
        predicted, chosen, reason = predict(places, links, memory, num_bytes)
        progress(f"all-reduce of {readable_bytes(num_bytes)}: {', '.join(predicted)}")
        for way in predicted:
            if way not in groups:
                groups[way] = dist.new_group(backend="shoal", pg_options=CommOptions(algorithm=way, links=links))
        calls = {way: _all_reduce(groups[way], num_bytes) for way in predicted}
        measured = _interleaved(calls, rounds)
        tried = [AlgorithmTiming(algorithm=way, predicted=predicted[way], measured=measured[way]) for way in predicted]
        tried.sort(key=lambda each: each.measured)
        sizes.append(SizeTimings(num_bytes=num_bytes, chosen=chosen, reason=reason, timings=tried))
    return msgspec.to_builtins(
        BenchResult(
            workers=len(places),
            hosts=[place.host for place in places],
            racks=[place.rack for place in places],
            links=links,
            call_seconds=None if memory is None else memory.call,
            turn_seconds=None if memory is None else memory.turn,
            copy_speed=None if memory is None else memory.bandwidth,
            sizes=sizes,
        )
    )


def measure_links(
    group: DistributedGroup, *, quick: bool, progress: Callable[[str], None]
) -> tuple[dict[str, tuple[float, float]], MemorySpeed | None]:
    """Latency and bandwidth of every level between these workers, and on one host the speed of shared memory. Every
    worker returns the same figures."""
    transport, places = group.process_group.transport, places_of(group.process_group.members)
    rounds, streams = (2, QUICK_STREAMS) if quick else (5, STREAMS)
    links: dict[str, tuple[float, float]] = {}
    for where, those in pairs(places).items():
        progress(f"ping-pongs and streams between {BETWEEN[where]}")
        # Hosts of a rack share its uplink, so the bytes of all of them count. Other pairs have links of their own.
        together = sum(places[one].rack == places[those[0][0]].rack for one, _ in those) if where == "rack" else 1
        found = _link(transport, group.rank, those, together, streams, rounds)
        links[where] = (found.latency, found.bandwidth)
    if "rack" in links and "host" not in links:
        links["host"] = links["rack"]  # no two hosts share a rack: their own links are at least as fast
    links = _broadcast_links(links)
    return links, _memory(transport, rounds) if isinstance(transport, SingleHostTransport) else None


def pairs(places: Sequence[RankPlace]) -> dict[Level, Pairs]:
    """Pairs of ranks that measure each level: neighbours on each host, in each rack, between racks. All pairs of a
    level run at once, as in a collective: only all hosts of a rack together fill its uplink."""
    racks = ranks_by_host(places)
    found: dict[Level, Pairs] = {
        "memory": tuple(pair for rack in racks for host in rack for pair in _by_two(host)),
        "host": tuple(pair for rack in racks for pair in _by_two([host[0] for host in rack])),
        "rack": tuple((a[0], b[0]) for one, other in _by_two(racks) for a, b in zip(one, other, strict=False)),
    }
    return {where: those for where, those in found.items() if those}


def _by_two(row: Sequence[T]) -> list[tuple[T, T]]:
    return list(zip(row[::2], row[1::2], strict=False))


def fit_link(half_round_trip: float, streams: Sequence[tuple[int, float]]) -> LinkSpeed:
    """Latency from small messages; bandwidth from what a longer stream takes more than a shorter one."""
    (few, short), (many, long) = min(streams), max(streams)
    # A longer stream that was faster than a shorter one only shows that the machine had other load.
    bandwidth = (many - few) / (long - short) if long > short else many / long
    return LinkSpeed(half_round_trip, bandwidth)


def predict(
    places: Sequence[RankPlace], links: Mapping[str, tuple[float, float]], memory: MemorySpeed | None, num_bytes: int
) -> tuple[dict[str, float], str, str]:
    """Predicted seconds of each exact algorithm; the one that the cost model chooses, and why."""
    if memory is not None:
        seconds = shm_all_reduce_seconds(len(places), num_bytes, memory)
        reason = f"all {len(places)} workers share a host: {readable_seconds(seconds)} to copy and to wait"
        return {SHARED_MEMORY: seconds}, SHARED_MEMORY, reason
    choice = choose_algorithm(places, CommConfig.from_options(CommOptions(links=dict(links))).links, num_bytes)
    return {choice.name: choice.seconds, **dict(choice.alternatives)}, choice.name, choice.reason


def _link(way: Any, rank: int, those: Pairs, together: int, lengths: Sequence[int], rounds: int) -> LinkSpeed:
    """`together`: pairs that share a link."""
    send, receive = _send_and_recv(way)
    peer = next((other for pair in those for mine, other in (pair, pair[::-1]) if mine == rank), None)
    first = any(rank == one for one, _ in those)
    note = torch.zeros(8, dtype=torch.uint8)

    def ping_pong(count: int) -> float:
        way.barrier()
        began = time.perf_counter()
        if rank in those[0]:  # one pair alone: the fewest processes that disturb each other
            for number in range(count):
                for there in (first, not first):
                    (send if there else receive)(note, peer, number).wait()
        return (time.perf_counter() - began) / count / 2

    def stream(num_bytes: int) -> float:
        """Seconds from the first of each pair to the second, which answers when it has received everything."""
        messages = torch.zeros(num_bytes, dtype=torch.uint8).split(MESSAGE_BYTES)
        act = send if first else receive
        letters = [] if peer is None or first else [act(each, peer, tag) for tag, each in enumerate(messages)]
        way.barrier()
        began = time.perf_counter()
        if peer is not None:
            if first:
                letters = [act(each, peer, tag) for tag, each in enumerate(messages)]
            for letter in letters:
                letter.wait()
            (receive if first else send)(note, peer, len(messages)).wait()
        return time.perf_counter() - began

    ping_pong(PING_PONGS // 4)
    latency = min(_slowest_of_all(ping_pong(PING_PONGS)) for _ in range(rounds))
    samples = []
    for length in lengths:
        stream(length)
        samples.append((together * length, statistics.median(_slowest_of_all(stream(length)) for _ in range(rounds))))
    return fit_link(latency, samples)


def _send_and_recv(way: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Point-to-point calls of the transport: through TCP between hosts, through shared memory on one."""
    op = CollectiveOp("send")
    if not isinstance(way, SingleHostTransport):
        messages = way.router.messages_of(op, 0)
        return messages.send, messages.receive
    return lambda data, to, tag: way.send(data, to, tag, op), lambda data, peer, tag: way.receive(data, peer, tag, op)


def _memory(way: SingleHostTransport, rounds: int) -> MemorySpeed:
    """The figures of the formula for one host: calls, barriers, and the speed of copies through shared memory.

    An all-gather only copies: a rank's own tensor into a slot, the others' tensors out of theirs.
    """
    outputs = [torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(way.size)]
    what = CollectiveOp("all_gather", torch.uint8, COPY_BYTES)
    call = statistics.median(_timed(dist.barrier, MAX_REPEATS) for _ in range(rounds))
    turn = statistics.median(_timed(way.barrier, MAX_REPEATS) for _ in range(rounds))
    times = [_timed(lambda: way.all_gather(outputs, outputs[way.rank], what), 2) for _ in range(rounds + 1)]
    gather = statistics.median(times)
    copying = gather - COPY_BYTES // SLOT_BYTES * turn
    return MemorySpeed(call, turn, way.size * COPY_BYTES / max(copying, gather / 2))


def _all_reduce(group: Any, num_bytes: int) -> Callable[[], None]:
    tensor = torch.zeros(num_bytes // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def _interleaved(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds by algorithm. Rounds time each one once, so that other load on the machine falls on all."""
    repeats = {}
    for name, call in calls.items():
        _timed(call, 1)
        repeats[name] = max(1, min(MAX_REPEATS, int(MIN_SECONDS / _timed(call, 2))))
    seconds = [{name: _timed(call, repeats[name]) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in seconds) for name in calls}


def _timed(call: Callable[[], None], repeats: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return _slowest_of_all((time.perf_counter() - began) / repeats)


def _slowest_of_all(seconds: float) -> float:
    """The time of the slowest worker, on all workers."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _broadcast_links(links: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The first worker's links on all workers, so that all choose alike."""
    figures = torch.tensor([each for where in sorted(links) for each in links[where]], dtype=torch.float64)
    dist.broadcast(figures, 0)
    return {where: (pair[0], pair[1]) for where, pair in zip(sorted(links), _rows(figures), strict=True)}


def _rows(figures: Tensor) -> list[list[float]]:
    rows: list[list[float]] = figures.view(-1, 2).tolist()
    return rows


def _print_progress(rank: int, size: int) -> Callable[[str], None]:
    def show(what: str) -> None:
        if rank == 0:
            print(f"{size} workers: {what}", file=sys.stderr, flush=True)

    return show
