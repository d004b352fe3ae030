"""Simulates every message of every device: what the planner's simulation of one message must agree with."""

from collections.abc import Sequence
from functools import partial

from shoal.parallel.pipeline_schedule import PipelineSchedule
from shoal.planner.simulate.clock import SimulatedClock, SimulatedNetwork
from shoal.planner.simulate.comm import CollectivePhase, MessageTrace, StridedGroup, collective_phases
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.pipeline import (
    RankPath,
    SimulatedPipelines,
    SimulatedReplica,
    StageCost,
    simulate_pipelines,
)
from shoal.planner.simulate.servers import SimulatedServers


def simulate_pipeline(
    schedule: PipelineSchedule, costs: Sequence[StageCost], path: RankPath | None = None
) -> SimulatedPipelines:
    """One pipeline whose ranks are devices 0, 1, 2, …"""
    replica = SimulatedReplica(devices=tuple(range(schedule.ranks)), path=path or (lambda source, to: None))
    return simulate_pipelines(schedule, costs, [replica])


def max_rate(setup: SimulatedServers) -> float:
    """Gradients a second that the workers or the servers' links can reach, without stragglers."""
    largest = max(map(len, setup.parties))
    exchange = setup.group_seconds(largest) + 2 * setup.latency + setup.bytes_moved / setup.bandwidth
    each = setup.steps * setup.workers / len(setup.parties)  # gradients of an exchange
    links = each * setup.pool / setup.bytes_moved if setup.num_bytes else float("inf")
    return min(setup.workers / (setup.compute + exchange / setup.steps), links)


def simulate_every_message(
    topology: LinkTopology, group: StridedGroup, num_bytes: float, passes: int = 2
) -> MessageTrace:
    """A tiered collective with every message of every device."""
    network = SimulatedNetwork(SimulatedClock())
    devices = range(topology.devices)
    todo = [phase for phase in collective_phases(topology, group, num_bytes, passes) for _ in range(phase.rounds)]
    received = dict.fromkeys(devices, 0)
    begun = dict.fromkeys(devices, 0)

    def go(device: int) -> None:
        """Begins a round once the message of the round before has arrived, and its own has left."""
        number = begun[device]
        if number >= len(todo) or received[device] < number:
            return
        begun[device] += 1
        to = _next(device, todo[number])
        network.send(device, to, todo[number].num_bytes, topology.path(device, to), partial(arrived, to))

    def arrived(device: int) -> None:
        received[device] += 1
        go(device)

    for device in devices:
        go(device)
    return MessageTrace(seconds=network.clock.run(), messages=tuple(network.sent))


def _next(device: int, phase: CollectivePhase) -> int:
    """The next device of its ring, or the other of its pair."""
    if phase.pairwise:
        return device + (phase.distance if device // phase.distance % 2 == 0 else -phase.distance)
    ring = phase.distance * phase.parts
    start = device // ring * ring
    return start + (device - start + phase.distance) % ring


def simulate_every_ring(topology: LinkTopology, group: StridedGroup, num_bytes: float, passes: int = 2) -> MessageTrace:
    """Rings with every message of every device; a device has a port inside its host and one to the network."""
    network = SimulatedNetwork(SimulatedClock())
    host = topology.hosts[0].devices
    near = max(1, min(group.size, host // group.stride))
    each = num_bytes / near / group.size
    rounds = passes * (group.size - 1)
    for first in [start for start in range(topology.devices) if start // group.stride % group.size == 0]:
        members = [first + number * group.stride for number in range(group.size)]
        for ring in range(near):
            _SimulatedRing(network, topology, _ring_order(members, near, ring), each, rounds).begin()
    return MessageTrace(seconds=network.clock.run(), messages=tuple(network.sent))


def _ring_order(members: Sequence[int], near: int, ring: int) -> list[int]:
    """Host by host; each ring leaves a host by a different device."""
    order = []
    for start in range(0, len(members), near):
        on_host = members[start : start + near]
        order += [on_host[(ring + 1 + number) % len(on_host)] for number in range(len(on_host))]
    return order


class _SimulatedRing:
    def __init__(
        self, network: SimulatedNetwork, topology: LinkTopology, order: Sequence[int], num_bytes: float, rounds: int
    ) -> None:
        self.network, self.topology, self.order = network, topology, order
        self.num_bytes, self.rounds = num_bytes, rounds

    def begin(self) -> None:
        for place in range(len(self.order)):
            self._send(place, 0)

    def _send(self, place: int, number: int) -> None:
        """Sends its own slice in the first round, then what it received in the round before."""
        if number == self.rounds:
            return
        there = (place + 1) % len(self.order)
        source, to = self.order[place], self.order[there]
        path = self.topology.path(source, to)
        outside = 0 if path.tier in ("inside", "socket") else self.topology.devices
        on_arrival = partial(self._send, there, number + 1)
        self.network.send(source + outside, to + outside, self.num_bytes, path, on_arrival, priority=number)
