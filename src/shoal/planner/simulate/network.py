"""Finds the links between two devices of a cluster. Devices are numbered host by host, rack by rack.

A path leaves out links that their users cannot saturate: where every device has a network card of its own, nothing is
shared between it and the switch. Other links are `SimulatedLink`s, one for each direction.
"""

from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from shoal.planner.cluster import Cluster, ClusterHost, tiers
from shoal.planner.cluster.tiers import DEFAULT_INTERCONNECT, LinkTier
from shoal.planner.simulate.clock import LinkPath, SimulatedLink


class DeviceLocation(NamedTuple):
    rack: int
    host: int
    local: int  # number of the device on its host


class LinkTopology:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        self.tiers: dict[str, LinkTier] = {tier.name: tier for tier in tiers(cluster)}
        self._racks = [number for number, rack in enumerate(cluster.racks) for _ in rack.hosts]
        self._starts = [0, *accumulate(host.devices for host in self.hosts)]  # the first device of each host
        self._saturable = {  # racks whose uplink is narrower than its hosts' links together
            number
            for number, rack in enumerate(cluster.racks)
            if rack.uplink.bytes_per_second * rack.uplink.efficiency < sum(map(_host_speed, rack.hosts)) * (1 - 1e-9)
        }
        self.path = lru_cache(maxsize=1 << 16)(self._find_path)

    @cached_property
    def first_of_kinds(self) -> tuple[int, ...]:
        """The first device of each kind of host, by its links."""
        found: dict[object, int] = {}
        for number, host in enumerate(self.hosts):
            found.setdefault((host.devices, host.link, host.interconnect, host.cards), self._starts[number])
        return tuple(found.values())

    @property
    def unit(self) -> int | None:
        """Devices after which the links repeat: a host, or a rack if there are several; None: never."""
        racks = self.cluster.racks
        if len(self.first_of_kinds) > 1 or len({(len(rack.hosts), rack.uplink) for rack in racks}) > 1:
            return None
        return self.hosts[0].devices * (len(racks[0].hosts) if len(racks) > 1 else 1)

    @property
    def devices(self) -> int:
        return self._starts[-1]

    def location(self, device: int) -> DeviceLocation:
        host = bisect_right(self._starts, device) - 1
        return DeviceLocation(self._racks[host], host, device - self._starts[host])

    def host_of(self, device: int) -> ClusterHost:
        return self.hosts[self.location(device).host]

    def _find_path(self, source: int, to: int, slices: int = 1) -> LinkPath:
        """`slices` devices from `source` on send at once, each to its counterpart from `to` on; one is simulated."""
        here, there = self.location(source), self.location(to)
        if here.host == there.host:
            return self._inside(here, there, slices)
        left, right = self.hosts[here.host], self.hosts[there.host]
        crossing = min(slices, left.devices - here.local), min(slices, right.devices - there.local)
        speed = min(_card(left), _card(right))
        links = [
            SimulatedLink(f"host {number} {direction}", "host", _host_speed(host), times)
            for number, host, direction, times in (
                (here.host, left, "out", crossing[0]),
                (there.host, right, "in", crossing[1]),
            )
            if min(host.cards, host.devices) < host.devices
        ]
        if here.rack == there.rack:
            return LinkPath("host", self.tiers["host"].latency, speed, tuple(links))
        for number, direction, times in ((here.rack, "out", crossing[0]), (there.rack, "in", crossing[1])):
            uplink = self.cluster.racks[number].uplink
            capacity = uplink.bytes_per_second * uplink.efficiency
            speed = min(speed, capacity)
            if number in self._saturable:
                links.append(SimulatedLink(f"rack {number} {direction}", "rack", capacity, times))
        return LinkPath("rack", self.tiers["rack"].latency, speed, tuple(links))

    def _inside(self, here: DeviceLocation, there: DeviceLocation, slices: int) -> LinkPath:
        host = self.hosts[here.host]
        inside = host.interconnect or DEFAULT_INTERCONNECT
        near = max(1, host.devices // inside.sockets)
        sockets = here.local // near, there.local // near
        tier = "socket" if sockets[0] != sockets[1] and "socket" in self.tiers else "inside"
        tier = tier if tier in self.tiers else next(iter(self.tiers))
        speed = inside.link.bytes_per_second * inside.link.efficiency
        links = []
        if inside.shared:
            for socket, direction in ((sockets[0], "out"), (sockets[1], "in")):
                links.append(
                    SimulatedLink(f"inside {here.host}.{socket} {direction}", "inside", speed, min(slices, near))
                )
        if inside.between is not None and sockets[0] != sockets[1]:
            capacity = inside.between.bytes_per_second * inside.between.efficiency
            speed = min(speed, capacity)
            links.append(SimulatedLink(f"socket {here.host}.{sockets[0]} out", "socket", capacity, min(slices, near)))
        return LinkPath(tier, self.tiers[tier].latency, speed, tuple(links))


def _card(host: ClusterHost) -> float:
    """The bandwidth of its host's link for one device while the others do not send."""
    return _host_speed(host) / min(host.cards, host.devices)


def _host_speed(host: ClusterHost) -> float:
    return host.link.bytes_per_second * host.link.efficiency
