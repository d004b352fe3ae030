"""Explains a plan: compares the next best and plain data parallelism, and finds the one change that helps most.

Every statement is predicted: each "what if" is a search of its own on a changed cluster or batch. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.errors import InputError
from shoal.planner.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack, tiers
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import SearchSpace, worker_counts
from shoal.planner.search.search import Candidate, PlanRanking, gigabytes_text, memory_share_text
from shoal.report.scaling_laws import amdahl_limit, parallel_fraction

TERM_PHRASES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tensor traffic",
    "bubble": "pipeline bubble",
    "data": "exposed data traffic",
    "optimizer": "optimizer",
    "host": "host",
}
TIER_PHRASES = {
    "inside": "inside the hosts",
    "socket": "between sockets",
    "host": "between hosts",
    "rack": "between racks",
}
MIN_GAIN = 0.005  # a smaller gain does not count
RankFunction = Callable[[Workload, Cluster, SearchSpace], PlanRanking]


@dataclass(frozen=True, kw_only=True)
class WhatIfChange:
    """One change, with the best plan of a new search."""

    name: str
    gain: float  # samples a second over those of the current plan
    best: Candidate


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    sentences: tuple[str, ...]
    changes: tuple[WhatIfChange, ...]  # by gain
    parallel: float | None  # Amdahl's parallel fraction
    scaled: float | None  # Gustafson's


def explain(ranking: PlanRanking, rank: RankFunction) -> PlanExplanation:
    """`rank` searches with another workload, cluster or space."""
    best = ranking.best
    changes = what_if(ranking, rank)
    twice = {change.name: change for change in changes}
    doubled, grown = twice.get(DEVICES), twice.get(BOTH)
    parallel = None if doubled is None else parallel_fraction(doubled.gain, 2)
    scaled = None if grown is None else min(1.0, max(0.0, grown.gain - 1.0))
    sentences = [_time(best), *_compared(ranking), *_bottleneck(ranking), *_best_change(best, changes)]
    if doubled is not None and parallel is not None:
        sentences.append(_doubled(doubled, parallel, grown, scaled))
    return PlanExplanation(sentences=tuple(sentences), changes=changes, parallel=parallel, scaled=scaled)


# -- sentences --------------------------------------------------------------------------------------------------------


def _time(best: Candidate) -> str:
    parts = sorted(
        (term for term in best.terms if best.terms[term] > MIN_GAIN * best.seconds), key=best.terms.__getitem__
    )
    shares = ", ".join(f"{TERM_PHRASES[term]} {percent(best.terms[term] / best.seconds)}" for term in reversed(parts))
    return f"--layout {best.setup} takes {seconds_text(best.seconds)} a step: {shares}."


def _compared(ranking: PlanRanking) -> list[str]:
    """Compares the next best layout, and plain data parallelism."""
    best = ranking.best
    found = []
    other = next((each for each in ranking.top(200) if str(each.setup) != str(best.setup)), None)
    if other is not None:
        found.append(f"The next best layout, {other.setup}, takes {_difference(best, other)}.")
    plain = ranking.data_parallel()
    if plain is None:
        space = ranking.space
        limit = f"{space.lanes} lanes" if space.lanes is not None else f"a batch of {space.batch}"
        found.append(f"Plain data parallel has no {best.setup.devices} replicas of {limit}.")
    elif plain.setup != best.setup:
        name = f"Plain data parallel ({plain.setup})"
        if not plain.fits:
            need = f"{gigabytes_text(plain.peak)} on each worker, most of it {plain.binds}"
            found.append(f"{name} does not fit: {need}, and there are {gigabytes_text(plain.memory)}.")
        elif other is None or str(plain.setup) not in (str(best.setup), str(other.setup)):
            found.append(f"{name} takes {_difference(best, plain)}.")
    return found


def _difference(best: Candidate, other: Candidate) -> str:
    more = other.seconds / best.seconds - 1
    if more < 5e-4:
        return "the same time, with more cuts"
    gaps = {term: other.terms[term] - best.terms[term] for term in best.terms}
    worst = max(gaps, key=gaps.__getitem__)
    text = f"{percent(more, 1)} longer: {TERM_PHRASES[worst]} {seconds_text(gaps[worst])} more"
    least = min(gaps, key=gaps.__getitem__)
    if gaps[least] < -MIN_GAIN * best.seconds:
        text += f", {TERM_PHRASES[least]} {seconds_text(-gaps[least])} less"
    return text


def _bottleneck(ranking: PlanRanking) -> list[str]:
    best = ranking.best
    term = max(best.terms, key=best.terms.__getitem__)
    stage, part = ranking.full_prediction(best).binds
    memory = f"{part} of stage {stage}, {memory_share_text(best.binds_bytes, best.memory)}"
    return [f"Most of the time goes into {TERM_PHRASES[term]}; most of the memory into {memory}."]


def _best_change(best: Candidate, changes: tuple[WhatIfChange, ...]) -> list[str]:
    """Single changes; twice the devices have a sentence of their own."""
    one = [change for change in changes if change.name not in (DEVICES, BOTH)]
    helps = [change for change in one if change.gain > 1 + MIN_GAIN]
    if not helps:
        return ["No single change helps: neither bandwidth, memory, a larger batch nor faster devices."]
    first, rest = helps[0], helps[1:]
    text = f"The one change that helps most is {first.name}: {first.gain:.2f} × the samples a second"
    text += "" if str(first.best.setup) == str(best.setup) else f", with --layout {first.best.setup}"
    idle = [change.name for change in one if change not in helps]
    lines = [text + "."]
    if rest:
        lines.append(f"Then {', '.join(f'{change.name} {change.gain:.2f} ×' for change in rest)}.")
    if idle:
        lines.append(f"No gain from {', '.join(idle)}.")
    return lines


def _doubled(doubled: WhatIfChange, parallel: float, grown: WhatIfChange | None, scaled: float | None) -> str:
    limit = amdahl_limit(parallel)
    most = f"no number of devices gives more than {limit:,.{0 if limit >= 100 else 1}f} × of now"
    most = "there is no limit in it" if limit > 1e4 else most
    text = f"Twice the devices for the same batch: {doubled.gain:.2f} ×."
    text += f" By Amdahl's law {percent(parallel, 1)} of a step is parallel, and {most}."
    if grown is not None and scaled is not None:
        text += f" Twice the batch with them: {grown.gain:.2f} ×, by Gustafson's law {percent(scaled, 1)} parallel."
    return text


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


# -- what if ----------------------------------------------------------------------------------------------------------

DEVICES, BOTH = "twice the devices", "twice the devices and the batch"


def what_if(ranking: PlanRanking, rank: RankFunction) -> tuple[WhatIfChange, ...]:
    """Searches again with one thing doubled; the largest gain first."""
    work, cluster, space = ranking.work, ranking.cluster, ranking.space
    larger_work, larger_space = larger_batch(work, space)
    more, wide = more_hosts(cluster), more_devices(space)
    _, both = larger_batch(work, wide)
    asked = [
        *(
            (f"twice the bandwidth {TIER_PHRASES[tier.name]}", work, widen_links(cluster, tier.name), space)
            for tier in tiers(cluster)
            if widen_links(cluster, tier.name) != cluster
        ),
        ("twice the memory", work, scale_devices(cluster, memory=2), space),
        ("twice the batch", larger_work, cluster, larger_space),
        ("devices that compute twice as fast", work, scale_devices(cluster, peak=2), space),
        (DEVICES, work, more, wide),
        (BOTH, larger_work, more, both),
    ]
    found = []
    for name, *question in asked:
        try:
            best = rank(*question).best  # type: ignore[arg-type]
        except InputError:  # nothing divides then
            continue
        found.append(WhatIfChange(name=name, gain=best.rate / ranking.best.rate, best=best))
    return tuple(sorted(found, key=lambda change: (-change.gain, change.name)))


def larger_batch(work: Workload, space: SearchSpace, times: int = 2) -> tuple[Workload, SearchSpace]:
    """A larger batch; a job gets more microbatches in a lane, each as large as before."""
    if work.lanes is None or space.microbatches is None:
        return work, replace(space, batch=space.batch * times)
    batch, microbatches = space.batch * times, space.microbatches * times
    return (
        replace(work, batch=batch, microbatches=microbatches),
        replace(space, batch=batch, microbatches=microbatches),
    )


def more_devices(space: SearchSpace) -> SearchSpace:
    if len(space.devices) == 1:
        return replace(space, devices=(2 * space.devices[0],))
    return replace(space, devices=worker_counts(2 * space.devices[-1]))


def more_hosts(cluster: Cluster) -> Cluster:
    """Twice the hosts in every rack, and twice the uplinks."""

    def twice(rack: Rack) -> Rack:
        twins = tuple(replace(host, name=f"{host.name}-twin") for host in rack.hosts)
        return replace(rack, hosts=rack.hosts + twins, uplink=_link(rack.uplink, 2.0))

    return replace(cluster, racks=tuple(map(twice, cluster.racks)))


def widen_links(cluster: Cluster, tier: str, times: float = 2.0) -> Cluster:
    """The links of one tier with more bandwidth; the same cluster if it does not describe them."""

    def inside(host: ClusterHost) -> HostInterconnect | None:
        if host.interconnect is None or tier not in ("inside", "socket"):
            return host.interconnect
        if tier == "inside":
            return replace(host.interconnect, link=_link(host.interconnect.link, times))
        between = host.interconnect.between
        return replace(host.interconnect, between=None if between is None else _link(between, times))

    def host_of(host: ClusterHost) -> ClusterHost:
        return replace(host, interconnect=inside(host), link=_link(host.link, times if tier == "host" else 1.0))

    if tier == "rack":
        return replace(cluster, racks=tuple(replace(r, uplink=_link(r.uplink, times)) for r in cluster.racks))
    return cluster.map_hosts(host_of)


def scale_devices(cluster: Cluster, *, memory: int = 1, peak: float = 1.0) -> Cluster:
    """Devices with more memory, or that compute faster."""

    def device_of(device: Device | None) -> Device | None:
        if device is None:
            return None
        peaks, rates = ({name: rate * peak for name, rate in each.items()} for each in (device.peak, device.rates))
        return replace(device, memory=device.memory * memory, peak=peaks, rates=rates)

    return cluster.map_hosts(lambda host: replace(host, device=device_of(host.device)))


def _link(link: ClusterLink, times: float) -> ClusterLink:
    return link if times == 1.0 else replace(link, bytes_per_second=link.bytes_per_second * times)
