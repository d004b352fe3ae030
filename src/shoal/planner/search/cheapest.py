"""Finds the cheapest plan that finishes before a deadline, on all hosts of a cluster or on its first 1, 2, 4, …"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.errors import PlanError
from shoal.planner.cluster import Cluster
from shoal.planner.search.heterogeneous import device_kinds
from shoal.planner.search.search import Candidate, PlanRanking, describe


def first_hosts(cluster: Cluster, count: int) -> Cluster:
    """The cluster of the first `count` hosts."""
    if not 1 <= count <= len(cluster.hosts):
        raise PlanError(f"{count} hosts of a cluster that has {len(cluster.hosts)}", fix=f"1 to {len(cluster.hosts)}")
    racks, left = [], count
    for rack in cluster.racks:
        if left > 0:
            racks.append(replace(rack, hosts=rack.hosts[:left]))
            left -= len(rack.hosts)
    return replace(cluster, racks=tuple(racks))


def host_counts(hosts: int) -> tuple[int, ...]:
    """1, 2, 4, … and all of them."""
    return tuple(sorted({hosts, *(1 << n for n in range(hosts.bit_length()) if 1 << n <= hosts)}))


@dataclass(frozen=True, kw_only=True)
class CheapestPlans:
    """The cheapest plans that finish in time, cheapest first, with their rankings."""

    chosen: tuple[tuple[Candidate, PlanRanking], ...]
    looked_at: int
    steps: int | None
    deadline: float | None  # seconds


def cheapest_plans(
    rank: Callable[[Cluster], PlanRanking],
    cluster: Cluster,
    *,
    steps: int | None = None,
    deadline: float | None = None,
    each: int = 5,
) -> CheapestPlans:
    """The cheapest plans of the whole cluster and of its first 1, 2, 4, … hosts. `rank` searches one of them."""
    unpriced = [device.name for device in device_kinds(cluster) if device.price is None]
    if unpriced:
        raise PlanError(
            f"the cluster has no price for {', '.join(unpriced)}: costs cannot be compared",
            fix=f'[devices.{unpriced[0]}] price = "2.5 USD/h" in a cluster file, or --objective time',
        )
    if deadline is not None and steps is None:
        raise PlanError("a deadline without a number of steps", fix="--steps 100000")
    rankings, refused = _rankings(rank, cluster)
    if not rankings:
        raise refused[-1]
    found = [(candidate, ranking) for ranking in rankings for candidate in ranking.top(each)]
    fastest = min(found, key=lambda pair: pair[0].seconds)[0]
    if deadline is not None and steps is not None:
        found = [pair for pair in found if pair[0].seconds * steps <= deadline]
        if not found:
            time = fastest.seconds * steps
            raise PlanError(
                f"no plan does {steps:,} steps in {duration_text(deadline)}: the fastest takes {duration_text(time)},"
                f" on {fastest.hosts} of {len(cluster.hosts)} hosts with --layout {describe(fastest)}",
                fix=f"--deadline {duration_text(time * 1.02).replace(' ', '')}, more hosts, or fewer steps",
            )
    found.sort(key=lambda pair: (pair[0].cost or 0.0, pair[0].seconds, pair[0].hosts))
    looked = sum(len(ranking.setups) for ranking in rankings)
    return CheapestPlans(chosen=tuple(found), looked_at=looked, steps=steps, deadline=deadline)


def _rankings(rank: Callable[[Cluster], PlanRanking], cluster: Cluster) -> tuple[list[PlanRanking], list[PlanError]]:
    found, refused = [], []
    for count in host_counts(len(cluster.hosts)):
        try:
            found.append(rank(first_hosts(cluster, count)))
        except PlanError as error:  # too little memory on these hosts, or nothing divides
            refused.append(error)
    return found, refused


def duration_text(seconds: float) -> str:
    """3.2 d, 5.1 h, 12 min or 40 s."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
