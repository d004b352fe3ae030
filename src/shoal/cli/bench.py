"""`shoal bench collectives`: how fast the links between workers are, and whether the cost model agrees with the clock.

    ping-pongs, streams ──► latency and bandwidth of each level ──► predicted seconds, the choice and its reason ─┐
    all-reduce by each algorithm that fits ──────────────────────────────────────────────► measured seconds ─────┴► text

Stands above the rooms: forks ranks as tests do, on this machine or on the hosts of a lab. Memory has a formula of its
own (collectives/shm_cost.py), links between hosts have that of routes (collectives/cost_model.py).
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
from shoal.collectives.topology import LEVELS, Level, RankPlace, ranks_by_host
from shoal.driver.launchers.lab import Lab
from shoal.errors import InputError
from shoal.planner.cluster import bandwidth_text, latency_text
from shoal.testing import ranks

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
QUICK_SIZES = (4 << 10, 256 << 10)
STREAMS = (2 << 20, 10 << 20)  # bytes: what the second takes longer than the first is bandwidth alone
QUICK_STREAMS = (256 << 10, 1 << 20)
MESSAGE_BYTES = 256 << 10  # of a stream: as relays send them
PING_PONGS = 40
COPY_BYTES = 8 << 20
MIN_SECONDS = 0.02  # seconds that a timing should take: what is short is repeated
MAX_REPEATS = 100
FASTEST_RATIO = 1.05  # times the fastest: no clock tells these apart
DEADLINE_SECONDS = 600.0
BETWEEN = {"memory": "workers of a host", "host": "hosts of a rack", "rack": "racks"}

T = TypeVar("T")
Pairs = tuple[tuple[int, int], ...]


class AlgorithmTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One way to sum one tensor."""

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
    """What one group of workers found."""

    workers: int
    hosts: list[str]  # by rank
    racks: list[str]
    links: dict[str, tuple[float, float]]  # by level: seconds per message, bytes per second
    call_seconds: float | None = None  # on one host: seconds of a barrier,
    turn_seconds: float | None = None  # seconds for all to meet once more,
    copy_speed: float | None = None  # and bytes per second that each copies while all do
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
    say = _print_progress(group.rank, len(places))
    links, memory = measure_links(group, quick=quick, progress=say)
    sizes = []
    groups: dict[str, Any] = {SHARED_MEMORY: process_group}
    for num_bytes in QUICK_SIZES if quick else SIZES:
        predicted, chosen, reason = predict(places, links, memory, num_bytes)
        say(f"all-reduce of {readable_bytes(num_bytes)}: {', '.join(predicted)}")
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
    """Latency and bandwidth of every level between these workers, and on one host what shared memory costs. The same
    figures on all of them."""
    process_group, rank = group.process_group, group.rank
    places = places_of(process_group.members)
    rounds = 2 if quick else 5
    links: dict[str, tuple[float, float]] = {}
    for where, those in pairs(places).items():
        progress(f"ping-pongs and streams between {BETWEEN[where]}")
        found = _link(process_group.transport, places, rank, where, those, QUICK_STREAMS if quick else STREAMS, rounds)
        links[where] = (found.latency, found.bandwidth)
    if "rack" in links and "host" not in links:
        links["host"] = links["rack"]  # no two hosts share a rack: their own links are at least as fast
    links = _broadcast_links(links)
    return links, _memory(process_group.transport, rounds) if isinstance(
        process_group.transport, SingleHostTransport
    ) else None


def pairs(places: Sequence[RankPlace]) -> dict[Level, Pairs]:
    """Who measures which level: neighbours on each host, in each rack, between racks. All at once, as in a collective;
    and it takes all hosts of a rack to fill its uplink."""
    racks = ranks_by_host(places)
    found: dict[Level, Pairs] = {
        "memory": tuple(pair for rack in racks for host in rack for pair in _by_two(host)),
        "host": tuple(pair for rack in racks for pair in _by_two([host[0] for host in rack])),
        "rack": tuple(
            (mine[0], theirs[0]) for one, other in _by_two(racks) for mine, theirs in zip(one, other, strict=False)
        ),
    }
    return {where: those for where, those in found.items() if those}


def _by_two(row: Sequence[T]) -> list[tuple[T, T]]:
    return list(zip(row[::2], row[1::2], strict=False))


def fit_link(half_round_trip: float, streams: Sequence[tuple[int, float]]) -> LinkSpeed:
    """Latency from small messages; bandwidth from what a longer stream takes more than a shorter one."""
    (few, short), (many, long) = min(streams), max(streams)
    # A stream that gained time on a shorter one says nothing but that the machine had other things to do.
    bandwidth = (many - few) / (long - short) if long > short else many / long
    return LinkSpeed(half_round_trip, bandwidth)


def predict(
    places: Sequence[RankPlace], links: Mapping[str, tuple[float, float]], memory: MemorySpeed | None, num_bytes: int
) -> tuple[dict[str, float], str, str]:
    """Predicted seconds of each exact way; which one the cost model chooses, and why."""
    if memory is not None:
        seconds = shm_all_reduce_seconds(len(places), num_bytes, memory)
        reason = f"all {len(places)} workers share a host: {readable_seconds(seconds)} to copy and to meet"
        return {SHARED_MEMORY: seconds}, SHARED_MEMORY, reason
    choice = choose_algorithm(places, CommConfig.from_options(CommOptions(links=dict(links))).links, num_bytes)
    return {choice.name: choice.seconds, **dict(choice.alternatives)}, choice.name, choice.reason


def _link(
    way: Any, places: Sequence[RankPlace], rank: int, where: Level, those: Pairs, lengths: Sequence[int], rounds: int
) -> LinkSpeed:
    send, receive = _send_and_recv(way)
    # Hosts of a rack share its uplink: what they send counts together. All other pairs have links of their own.
    together = sum(places[one].rack == places[those[0][0]].rack for one, _ in those) if where == "rack" else 1
    peer = next((other for pair in those for mine, other in (pair, pair[::-1]) if mine == rank), None)
    first = any(rank == one for one, _ in those)
    note = torch.zeros(8, dtype=torch.uint8)

    def ping_pong(count: int) -> float:
        way.barrier()
        began = time.perf_counter()
        if rank in those[0]:  # one pair alone: the fewest processes that could be in each other's way
            for number in range(count):
                for there in (first, not first):
                    (send if there else receive)(note, peer, number).wait()
        return (time.perf_counter() - began) / count / 2

    def stream(num_bytes: int) -> float:
        """From the first of each pair to the second, which answers when it has all of it."""
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
    """Messages as relays send them: through gloo between hosts, through shared memory inside."""
    if not isinstance(way, SingleHostTransport):
        return way.router.send, way.router.receive
    what = CollectiveOp("send")
    return (
        lambda tensor, to, tag: way.send(tensor, to, tag, what),
        lambda tensor, source, tag: way.receive(tensor, source, tag, what),
    )


def _memory(way: SingleHostTransport, rounds: int) -> MemorySpeed:
    """What the formula for one host needs: calls, turns, and the speed of copies through memory that all share.

    An all-gather only copies: its own into a slot, the others' out of theirs.
    """
    outputs = [torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(way.size)]
    what = CollectiveOp("all_gather", torch.uint8, COPY_BYTES)
    call = statistics.median(_timed(dist.barrier, MAX_REPEATS) for _ in range(rounds))
    turn = statistics.median(_timed(way.barrier, MAX_REPEATS) for _ in range(rounds))
    gather = statistics.median(
        _timed(lambda: way.all_gather(outputs, outputs[way.rank], what), 2) for _ in range(rounds + 1)
    )
    copying = gather - COPY_BYTES // SLOT_BYTES * turn
    return MemorySpeed(call, turn, way.size * COPY_BYTES / max(copying, gather / 2))


def _all_reduce(group: Any, num_bytes: int) -> Callable[[], None]:
    tensor = torch.zeros(num_bytes // 4)
    return lambda: dist.all_reduce(tensor, group=group)


def _interleaved(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Everyone once per round, so that whatever else the machine does falls on all."""
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
    """Of the slowest worker."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _broadcast_links(links: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """All choose by the same figures."""
    figures = torch.tensor([each for where in sorted(links) for each in links[where]], dtype=torch.float64)
    dist.broadcast(figures, 0)
    return {where: (pair[0], pair[1]) for where, pair in zip(sorted(links), _rows(figures), strict=True)}


def _rows(figures: Tensor) -> list[list[float]]:
    rows: list[list[float]] = figures.view(-1, 2).tolist()
    return rows


def _print_progress(rank: int, size: int) -> Callable[[str], None]:
    def say(what: str) -> None:
        if rank == 0:
            print(f"{size} workers: {what}", file=sys.stderr, flush=True)

    return say


# -- on the screen ----------------------------------------------------------------------------------------------------


def text(found: BenchResult) -> str:
    hosts, racks = len(set(zip(found.racks, found.hosts, strict=True))), len(set(found.racks))
    where = "one host" if hosts == 1 else f"{hosts} hosts in {racks} rack{'s' if racks > 1 else ''}"
    lines = [f"{found.workers} workers on {where}", ""]
    lines += [f"{'level':8} {'between':20} {'latency':>10} {'bandwidth':>14}"]
    for level in (level for level in LEVELS if level in found.links):
        latency, bandwidth = found.links[level]
        lines.append(f"{level:8} {BETWEEN[level]:20} {readable_seconds(latency):>10} {bandwidth_text(bandwidth):>14}")
    if found.call_seconds is not None and found.turn_seconds is not None and found.copy_speed is not None:
        lines.append(
            f"all at once: a barrier takes {readable_seconds(found.call_seconds)},"
            f" a turn in it {readable_seconds(found.turn_seconds)};"
            f" each copies {readable_bytes(found.copy_speed)}/s"
        )
    lines += ["", f"{'all-reduce':12} {'by':14} {'predicted':>10} {'measured':>10} {'predicted / measured':>21}"]
    for sized in found.sizes:
        for number, tried in enumerate(sized.timings):
            size = "" if number else readable_bytes(sized.num_bytes)
            ratio = tried.predicted / tried.measured
            mark = "  ◄ chosen" if tried.algorithm == sized.chosen else ""
            lines.append(
                f"{size:12} {tried.algorithm:14} {readable_seconds(tried.predicted):>10}"
                f" {readable_seconds(tried.measured):>10} {ratio:>21.2f}{mark}"
            )
    lines += ["", *(f"{readable_bytes(sized.num_bytes)}: {sized.reason}" for sized in found.sizes)]
    right = sum(sized.chosen_was_fastest for sized in found.sizes)
    if any(len(sized.timings) > 1 for sized in found.sizes):
        lines.append(f"the choice was the fastest (or within 5 % of it) at {right} of {len(found.sizes)} sizes")
    return "\n".join([*lines, "", *usage(found.links)])


def usage(links: Mapping[str, tuple[float, float]]) -> list[str]:
    """How a run gets to know what was measured here."""
    value = msgspec.json.encode({level: [float(f"{each:.3g}") for each in links[level]] for level in links}).decode()
    lines = ["to choose by these links:", f"  export SHOAL_LINKS='{value}'"]
    between_hosts = [level for level in ("host", "rack") if level in links]
    if between_hosts:
        lines.append("or in a cluster file:")
    for level in between_hosts:
        latency, bandwidth = links[level]
        lines += [
            f"  [links.{level}]",
            f'  bandwidth = "{bandwidth_text(bandwidth)}"',
            f'  latency = "{latency_text(latency)}"',
        ]
    return lines
