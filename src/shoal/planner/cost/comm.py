"""Seconds of messages and collectives on a cluster's tiers of links. Pure; on arrays.

A group of n devices that are `stride` apart fills tier after tier: inside a host, between hosts, between racks. Rings
go through all tiers; the devices of a group that are nearer to each other than a tier (`below`) share what crosses it:

    passes · (n−1)/n · S / below / W       on each tier, n: devices that it connects
    passes/2 · (n + 3) · α                 latency: once more for each device, three to begin

Passes: 2 for an all-reduce, 1 for a reduce-scatter, an all-gather or an all-to-all. Tiers work at the same time: the
slowest counts, and a tenth of the others. The latency of the farthest tier counts. This fits measured efficiencies: 16
MB reach a third of the link on 2 hosts of 8 and less than a tenth on 16, 1 GB reaches 0.9 and 0.76. Very large groups
use trees, whose latency grows with log n.
"""

from collections.abc import Sequence

import numpy as np

from shoal.planner.cluster import LinkTier

ALL_REDUCE = 2.0
HALF = 1.0  # reduce-scatter, all-gather, all-to-all
OVERLAPPED = 0.9  # share of a collective's shorter phases that hides behind the longest
TREE = 20.0  # latency of a tree for each doubling of the group, in latencies of a link


def collective_seconds(
    tiers: Sequence[LinkTier], n: np.ndarray, stride: np.ndarray, size: np.ndarray, passes: float = ALL_REDUCE
) -> np.ndarray:
    """Seconds until n devices, `stride` apart, have the result of `size` bytes, while all other devices of the cluster
    do the same in groups of their own and take their share of each link."""
    n, stride, size = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (n, stride, size)))
    total, longest, latency = np.zeros(n.shape), np.zeros(n.shape), np.zeros(n.shape)
    reached = np.ones(n.shape)  # devices of the group below this tier
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        members = n if last else np.maximum(reached, np.minimum(n, np.floor(tier.size / stride)))
        crossing = members > reached
        share = np.where(crossing, (members - 1) / members, 0.0)
        phase = passes * share * (size / reached) / (tier.shared_bandwidth * tier.efficiency)
        total += phase
        longest = np.maximum(longest, phase)
        latency = np.where(crossing, tier.latency, latency)
        reached = members
    hops = np.minimum(n + 3, TREE * np.log2(np.maximum(n, 2)))
    seconds = longest + (1 - OVERLAPPED) * (total - longest) + passes / 2 * hops * latency
    return np.where((n > 1) & (size > 0), seconds, 0.0)


def message_seconds(tiers: Sequence[LinkTier], n: np.ndarray, stride: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Seconds of a message to the next of n devices that are `stride` apart: the slowest hop among them."""
    n, stride, size = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (n, stride, size)))
    seconds = np.zeros(n.shape)
    for tier in reversed(tiers):
        time = tier.latency + size / (tier.shared_bandwidth * tier.efficiency)
        within = n * stride <= tier.size
        seconds = np.where(within | (seconds == 0), time, seconds)
    return np.where((n > 1) & (size > 0), seconds, 0.0)


def server_seconds(size: np.ndarray, workers: np.ndarray, servers: np.ndarray, bandwidth: float, latency: float,
                   *, duplex: bool = True) -> np.ndarray:  # fmt: skip
    """Seconds of a synchronous exchange with parameter servers: `size` bytes up and as many down. A worker's link takes
    2S/W (S/W if it sends and receives at once), a server's S·w/(kW) each direction; the larger one counts."""
    directions = 1.0 if duplex else 2.0
    servers = np.maximum(servers, 1)
    return np.asarray(2 * latency + directions * np.maximum(size, size * workers / servers) / bandwidth)


def updates_per_second(step: float, size: float, workers: int, servers: int, bandwidth: float) -> float:
    """Updates of asynchronous servers: min(w/T, kW/(2S)). Staleness is about w − 1."""
    return min(workers / step, servers * bandwidth / (2 * size))
