"""Reduces a cluster to tiers of links, from the nearest to the farthest, for estimates.

tier       size    single     shared      8 hosts of 8 devices in 2 racks, a network card per device, uplinks 4:1
inside        8    300 GB/s   300 GB/s    between the devices of a host (of a socket, if sockets have a link)
host         32     25 GB/s    25 GB/s    between hosts of a rack: all devices of a host share its link
rack         64     25 GB/s  6.25 GB/s    between racks: all devices of a rack share its uplink

Bandwidths are nominal; `efficiency` is the share that large messages reach.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.planner.cluster.cluster import Cluster, ClusterHost, ClusterLink, HostInterconnect, Rack

TIER_NAMES = ("inside", "socket", "host", "rack")
# Defaults where a file gives no latency, as in the presets.
USUAL_LATENCY = {"nvlink": 7e-6, "pcie": 15e-6, "memory": 5e-6, "host": 3e-5}
# For hosts without a description of their interconnect, such as the lab's: processes that share memory.
DEFAULT_INTERCONNECT = HostInterconnect(link=ClusterLink(bytes_per_second=10e9), kind="memory", shared=True)


@dataclass(frozen=True, kw_only=True)
class LinkTier:
    name: str  # inside, socket, host, rack
    size: int  # devices that links up to this tier connect
    latency: float  # seconds of a message
    single_bandwidth: float  # bytes a second, one direction, for one device while no other sends
    shared_bandwidth: float  # the same for each device while all send across this tier at once
    efficiency: float = 1.0  # share of either that large messages (256 MB) reach


def tiers(cluster: Cluster) -> tuple[LinkTier, ...]:
    """The tiers of equal hosts; of unequal hosts the narrowest counts. A cluster of one device has none."""
    racks, total = len(cluster.racks) > 1, cluster.devices
    paths = []
    for rack in cluster.racks:
        size = sum(host.devices for host in rack.hosts)
        kinds = {(host.devices, host.interconnect, host.link, host.cards): host for host in rack.hosts}
        paths += [_rack_tiers(rack, host, size, total if racks else None) for host in kinds.values()]
    names = [name for name in TIER_NAMES if all(any(tier.name == name for tier in path) for path in paths)]
    return tuple(_narrowest([tier for path in paths for tier in path if tier.name == name]) for name in names)


def _rack_tiers(rack: Rack, host: ClusterHost, size: int, total: int | None) -> tuple[LinkTier, ...]:
    """Tiers that the messages of this host's devices cross. `size`: devices of the rack; `total`: of all racks."""
    found: list[LinkTier] = []
    if host.devices > 1:
        found += _host_tiers(host.interconnect or DEFAULT_INTERCONNECT, host.devices)
    if total is not None or len(rack.hosts) > 1:
        speed = host.link.bytes_per_second
        alone, each = speed / min(host.cards, host.devices), speed / host.devices
        found.append(_tier("host", size, host.link, USUAL_LATENCY["host"], alone, each))
    if total is not None:
        below, speed = found[-1], rack.uplink.bytes_per_second
        alone, each = min(below.single_bandwidth, speed), min(below.shared_bandwidth, speed / below.size)
        tier = _tier("rack", total, rack.uplink, below.latency, alone, each)
        latency, efficiency = max(tier.latency, below.latency), min(tier.efficiency, below.efficiency)
        found.append(replace(tier, latency=latency, efficiency=efficiency))
    return tuple(found)


def _host_tiers(inside: HostInterconnect, devices: int) -> Iterator[LinkTier]:
    near = devices if inside.between is None else devices // inside.sockets
    usual, alone = USUAL_LATENCY.get(inside.kind, USUAL_LATENCY["pcie"]), inside.link.bytes_per_second
    each = alone / near if inside.shared else alone
    if near > 1:
        yield _tier("inside", near, inside.link, usual, alone, each)
    if inside.between is not None:
        speed = inside.between.bytes_per_second
        yield _tier("socket", devices, inside.between, usual, min(alone, speed), min(each, speed / near))


def _tier(name: str, size: int, link: ClusterLink, usual: float, alone: float, each: float) -> LinkTier:
    latency = usual if link.latency_seconds is None else link.latency_seconds
    return LinkTier(
        name=name, size=size, latency=latency, single_bandwidth=alone, shared_bandwidth=each, efficiency=link.efficiency
    )


def _narrowest(found: Sequence[LinkTier]) -> LinkTier:
    return LinkTier(
        name=found[0].name,
        size=min(tier.size for tier in found),
        latency=max(tier.latency for tier in found),
        single_bandwidth=min(tier.single_bandwidth for tier in found),
        shared_bandwidth=min(tier.shared_bandwidth for tier in found),
        efficiency=min(tier.efficiency for tier in found),
    )
