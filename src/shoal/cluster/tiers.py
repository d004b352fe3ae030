"""A cluster as estimates see it: tiers of links, from the nearest to the farthest.

tier       size    alone      each        8 hosts of 8 devices in 2 racks, uplinks 4:1
inside        8    300 GB/s   300 GB/s    between the devices of a host
host         32     25 GB/s    25 GB/s    between hosts of a rack: all devices of a host share its link
rack         64     25 GB/s  6.25 GB/s    between racks: all devices of a rack share its uplink
"""

from dataclasses import dataclass

from shoal.cluster.parts import Cluster


@dataclass(frozen=True, kw_only=True)
class Tier:
    name: str  # inside, socket, host, rack
    size: int  # devices that are connected by links up to this tier
    latency: float  # seconds of a message
    alone: float  # bytes a second, one direction, for one device while no other talks
    each: float  # the same for each device while all talk across this tier at once


def tiers(cluster: Cluster) -> tuple[Tier, ...]:
    """Of equal hosts; of unequal ones the narrowest counts."""
    raise NotImplementedError
