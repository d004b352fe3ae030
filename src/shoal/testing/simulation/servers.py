"""Simulates parameter servers under faults: every lost push is reported, none counts twice.

    run(1234)                                                        one seed: its cases, or InvariantViolated
    python -m shoal.testing.simulation --servers --seed 1234 --trace that seed, event by event
    make simulate                                                    many of them, after those of the membership

Shard, dispatcher, step coordinator and the client's session are real; clock, connections, disks and processes are
simulated. Connections keep their order, but single frames are lost or repeated at any later time. An update adds 1 to
a number of the table that no other update uses, so lost and repeated updates show in the table.

    push     every worker pushes by itself                 I1 acknowledged updates are there, or reported as lost
    queue    async, stale, groups: leases                  I2 nothing is applied twice
    lockstep sync, quorum, local: with rewinds             I3 an order that was not applied never counts as a repetition
                                                           I4 versions do not fall   I9 sync equals one process

    with rows of a sparse table    I1, I2: a push's rows are there if its number is; I9: also the bits of rows
    with a norm, with a buffer     I9: clipped and put as in one process
    local                          every round is the mean of all workers, once: the values of a run without faults
"""

from typing import Any

import torch

from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.reference import LANES
from shoal.testing.simulation.server_clients import SimClient
from shoal.testing.simulation.server_host import SimServerHost
from shoal.testing.simulation.server_scripts import SCRIPTS
from shoal.testing.simulation.servers_world import BUFFER, CASES, TABLE, SimServersWorld

__all__ = ["CASES", "SimServersRun", "run"]


class SimServersRun(SimServersWorld):
    def __init__(self, seed: int, trace: bool = False, **planned: Any) -> None:
        super().__init__(seed, trace, **planned)
        self.hosts: list[SimServerHost] = []
        for number in self.shards:
            self.hosts.append(SimServerHost(self, number, self.hosts))
        self.clients: list[SimClient] = []
        self.workers: dict[int, SimClient] = {}

    def run(self) -> set[str]:
        plan = self.plan
        for worker in range(plan.workers):
            self.after(self.random.uniform(0.0, 0.05), self._start_client, worker)
        for time, number in plan.crashes:
            self.at(time, self.hosts[number].crash)
        for time, worker in plan.deaths:
            self.at(time, self._kill, worker)
        if not self.run_events(self._over):
            raise InvariantViolated(f"no end in sight: {'; '.join(map(str, self.workers.values()))}")
        self._final()
        return self.cases

    def _over(self) -> bool:
        return (
            len(self.workers) == self.plan.workers
            and all(client.finished for client in self.workers.values())
            and all(host.up for host in self.hosts)
            and all(link.settled for client in self.workers.values() for link in client.links if not client.dead)
        )

    def _start_client(self, worker: int) -> None:
        client = SimClient(self, worker, self.hosts, self.workers)
        self.clients.append(client)
        self.workers[worker] = client
        self.log("worker %d begins", worker)
        client.start(SCRIPTS["push" if self.plan.mode == "push" else "lockstep" if self.lockstep else "queue"])

    def _kill(self, worker: int) -> None:
        """Replaces a worker. Its old process ends, or lives until a server refuses it. A process that no server has
        welcomed must end: servers cannot tell it from its successor."""
        client = self.workers.get(worker)
        if client is None or client.replaced or client.finished:
            return
        client.replaced = True
        self.record_case("a worker was replaced")
        if self.random.random() < 0.7 or not client.who.incarnation:
            client.die()
        self.log("worker %d is replaced; its old process %s", worker, "is dead" if client.dead else "lives")
        self.after(self.random.uniform(0.05, 0.3), self._start_client, worker)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def _final(self) -> None:
        for host in self.hosts:
            host.check_at_most_once()
        if self.reference:
            for host in self.hosts:
                self._check_bits(host)
        elif self.lockstep:
            self._check_quorums()
        else:
            self._check_pushes()

    def _check_bits(self, host: SimServerHost) -> None:
        """I9: bits of the last step, or of the step that the server came back with."""
        shard, learned = host.shard, self.reference[host.shard.step]
        pairs = {TABLE: (shard.numbers, learned.values[host.number])}
        if self.plan.buffers:
            pairs[BUFFER] = shard.tables.dense[BUFFER].parameters[0].detach(), learned.buffer
        if self.plan.rows:
            mine = learned.table_state["ids"] % self.plan.shards == host.number
            there = shard.rows.capture()
            pairs |= {name: (there[name], each[mine]) for name, each in learned.table_state.items() if name != "counts"}
        for name, (found, wanted) in pairs.items():
            self.require(torch.equal(found, wanted), f"server {host.number}: not the same bits in {name}")

    def _check_quorums(self) -> None:
        """All servers applied exactly the lanes of the step's members."""
        for step in range(self.plan.steps):
            generation = max(generation for generation, at in self.step_members if at == step)
            lanes = {
                lane
                for worker in self.step_members[generation, step]
                for span in self.lane_subtrees[worker]
                for lane in range(*span)
            }
            for host in (host for host in self.hosts if host.shard.step > step):
                there = {lane for lane in range(LANES) if host.shard.numbers[step * LANES + lane] == 1.0}
                self.require(there == lanes, f"step {step} has lanes {there} on server {host.number}, not {lanes}")

    def _check_pushes(self) -> None:
        """I1: acknowledged pushes are there, or reported as lost, or no living worker can report them."""
        queue = self.plan.mode != "push"
        for host in self.hosts:
            there = {at for at, times in enumerate(host.shard.numbers.tolist()) if times}
            excused: set[int] = set()
            for client in self.clients:
                link = client.links[host.number]
                gone = {at for tag, at in link.pushed.items() if tag in link.missing}
                if (client.dead or client.replaced) and link.incarnation != host.incarnation:  # it cannot see the loss
                    gone |= {at for tag, at in link.pushed.items() if tag in link.acknowledged}
                excused |= gone
                lacking = {at for tag, at in link.pushed.items() if tag in link.acknowledged} - there - gone
                text = f"{link}: {sorted(lacking)} were acknowledged, but are neither there nor lost"
                self.require(not lacking, text)
            if queue:
                lacking = set(range(self.plan.steps)) - there - excused
                self.require(not lacking, f"server {host.number} lacks leases {sorted(lacking)}")


def run(seed: int, **planned: Any) -> set[str]:
    """Returns the cases of a seed. Raises InvariantViolated with the seed's trace if an invariant does not hold."""
    try:
        return SimServersRun(seed, **planned).run()
    except InvariantViolated:
        pass
    world = SimServersRun(seed, trace=True, **planned)
    try:
        return world.run()
    except InvariantViolated as broken:
        raise InvariantViolated(f"seed {seed}: {broken}\n{world.plan}\n" + "\n".join(world.trace or [])) from None
