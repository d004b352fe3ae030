"""Assigns workers to hosts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.errors import InputError
from shoal.planner.cluster.cluster import Cluster, ClusterHost

Order = Literal["blocks", "interleaved"]
ORDERS: tuple[Order, ...] = ("blocks", "interleaved")


@dataclass(frozen=True, kw_only=True)
class WorkerSlot:
    """The host of one worker, and its ranks there."""

    rank: int
    size: int
    host: ClusterHost
    local_rank: int
    local_size: int
    host_rank: int  # of the hosts in use, by their first worker
    host_count: int


def assign_workers(cluster: Cluster, workers: int, order: Order = "blocks") -> tuple[WorkerSlot, ...]:
    """Assigns workers to hosts, by rank: as many to each as the cluster specifies, else as evenly as possible.

    blocks       ranks 0, 1 on the first host, 2, 3 on the next: neighbours are near each other
    interleaved  consecutive ranks on different racks, while racks last: neighbours are far apart
    """
    if workers < 1:
        raise InputError(f"{workers} workers: at least 1 is needed", fix="--workers 1")
    if order == "blocks":
        used = _filled(cluster.hosts, workers)
        hosts = [host for host, count in used for _ in range(count)]
    elif order == "interleaved":
        used = _filled(list(_turns([rack.hosts for rack in cluster.racks])), workers)
        hosts = list(_turns([[host] * count for host, count in used]))
    else:
        raise InputError(f"order {order!r} is not known", fix=f"one of {', '.join(ORDERS)}")
    sizes = Counter(host.name for host in hosts)
    numbers = {name: number for number, name in enumerate(sizes)}
    slots: list[WorkerSlot] = []
    placed: Counter[str] = Counter()
    for rank, host in enumerate(hosts):
        name = host.name
        slots.append(
            WorkerSlot(rank=rank, size=workers, host=host, local_rank=placed[name], local_size=sizes[name],
                       host_rank=numbers[name], host_count=len(sizes))
        )  # fmt: skip
        placed[name] += 1
    return tuple(slots)


def _filled(hosts: Sequence[ClusterHost], workers: int) -> list[tuple[ClusterHost, int]]:
    if workers == sum(host.workers for host in hosts):
        return [(host, host.workers) for host in hosts]
    each, more = divmod(workers, len(hosts))
    return [(host, each + (number < more)) for number, host in enumerate(hosts)]


def _turns(rows: Sequence[Sequence[ClusterHost]]) -> Iterator[ClusterHost]:
    """Yields the first of each row, then the second of each, …"""
    for turn in range(max(map(len, rows))):
        yield from (row[turn] for row in rows if turn < len(row))
