"""Scripts of the servers' simulation: what a client does in each mode."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.numerics.grad_norm import total_norm
from shoal.numerics.lanes import fold
from shoal.paramserver import messages
from shoal.paramserver.messages import TableSlice
from shoal.paramserver.rollback import NoCommonSnapshotError, are_consistent, plan_rewind
from shoal.paramserver.sync_mode import SyncMode
from shoal.testing.simulation import reference
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.reference import LANES
from shoal.testing.simulation.server_clients import Script, SimBarrier, SimCall, SimClient, SimPause, SimReply
from shoal.testing.simulation.servers_world import BUFFER, ROWS, TABLE

POLL_SECONDS = 0.05  # between two reads of servers that are not at one step
BEHIND_CODES = ("fenced", "behind", "ahead")


def push_script(client: SimClient) -> Script:
    """Pushes by itself, some at a time. Every push has a number of its own, on every server."""
    world, left = client.world, client.world.plan.steps
    while left:
        questions: list[SimCall] = []
        for _ in range(min(left, world.plan.window)):
            if world.ids < world.size:
                number = world.ids
                world.ids += 1
                questions += client.push_requests(number, pull=world.random.random() < 0.3)
            left -= 1
        if questions and world.plan.rows:
            questions += client.pull_requests()
        if questions:
            yield questions


def queue_script(client: SimClient) -> Script:
    world = client.world
    mode = SyncMode.parse(world.plan.mode)
    group = mode.group_of(client.worker)
    ask = messages.LeaseRequest(group)
    while True:
        ((reply, _),) = yield [(0, ask, [])]
        if isinstance(reply, messages.EndReply):
            world.require(reply.reason == "" and reply.steps_done == world.plan.steps, f"the end came early: {reply}")
            return
        world.require(isinstance(reply, messages.LeaseReply), f"worker {client.worker} received {reply}")
        if world.leases.setdefault(reply.lease, client.who) != client.who and len(reply.members) == 1:
            world.record_case("a lease was given to another worker")
        together = yield SimBarrier((group, reply.generation, reply.lease, "sum"), reply.members)
        if world.plan.rows:
            yield client.pull_requests()
        if together and reply.members[0] == client.worker:
            yield client.push_requests(reply.lease, lease=reply.lease, pull=True)
        together = together and (yield SimBarrier((group, reply.generation, reply.lease, "values"), reply.members))
        if not together:
            world.record_case("a group repeated a lease")
        failed = messages.LeaseRequest(group, failed_generation=reply.generation)
        ask = messages.LeaseRequest(group, finished=reply.lease) if together else failed


@dataclass
class SimPosition:
    """The step of a worker in lockstep, and its values."""

    step: int
    values: list[Tensor]  # by server
    buffer: Tensor


StepScript: TypeAlias = Generator["list[SimCall] | SimPause", Any, SimPosition | None]
EnterScript: TypeAlias = Generator["list[SimCall] | SimPause", Any, SimPosition]


def lockstep_script(client: SimClient) -> Script:
    """Trains in lockstep, as worker/server_worker/synchronous.py does."""
    at = yield from _enter(client)
    while at.step < client.world.plan.steps:
        done = yield from _step(client, at)
        at = done if done is not None else (yield from _recover(client))


def _step(client: SimClient, at: SimPosition) -> StepScript:
    """One step, or in local mode one round. None: a server restarted or rolled back."""
    world, plan, step = client.world, client.world.plan, at.step
    rows: dict[int, Tensor] = {}
    if plan.rows and world.mode.exact:
        lanes = [lane for span in world.lane_subtrees[client.worker] for lane in range(*span)]
        wanted = {row for lane in lanes for row in reference.lane_rows(step, lane)}
        mine = [torch.tensor(sorted(row for row in wanted if row % plan.shards == shard)) for shard in world.shards]
        request = messages.PullRequest([TableSlice(ROWS, sparse=True)])
        replies = yield [(shard, request, [mine[shard].long()]) for shard in world.shards]
        if _behind(replies):
            return None
        for ids, (_, (found,)) in zip(mine, replies, strict=True):
            rows |= dict(zip(ids.tolist(), found, strict=True))
    shares = _shares(client, at) if plan.buffers else []
    barrier: list[SimCall] = [(0, messages.BarrierRequest(step, b"%d" % client.worker), shares)]
    contributions = _contributions(client, at, rows)
    if plan.eager:
        *replies, (closed, came) = yield [*contributions, *barrier]
    else:
        replies = yield contributions
        if _behind(replies):
            return None
        ((closed, came),) = yield barrier
    if _behind([*replies, (closed, came)]):
        return None
    if isinstance(closed, messages.LateReply):
        world.record_case("a worker was late")
        return (yield from _enter(client))
    world.require(isinstance(closed, messages.BarrierReply), f"worker {client.worker} received {closed}")
    world.record_members(client.generation, step, closed.workers)
    world.require(len(closed.workers) >= world.mode.quorum(plan.workers), f"a barrier of {closed.workers}")
    buffer = _reduced_buffer(client, at, closed, came) if plan.buffers else at.buffer
    spans = [span for worker in closed.workers for span in world.lane_subtrees[worker]]
    norm = None
    if plan.clips:
        replies = yield client.on_all_servers(messages.SquaresRequest(step, world.lanes, spans))
        if _behind(replies):
            return None
        norm = _norm(replies)
        if norm is None:
            world.require(world.mode.name == "quorum", f"worker {client.worker} was late for a norm of step {step}")
            world.record_case("a norm came too late")
    replies = yield client.on_all_servers(
        messages.ApplyRequest(
            step,
            world.lanes,
            spans,
            scale=1 / len(closed.workers) if world.mode.name == "local" else 1.0,
            norm=norm,
            max_norm=world.max_norm if plan.clips else None,
            snapshot=step % 2 == 1,
            put=[TableSlice(BUFFER)] if plan.buffers else [],
        ),
        [buffer] if plan.buffers else [],
    )
    if _behind(replies):
        return None
    if step < client.furthest:
        world.record_case("a step was done again")
    client.furthest = max(client.furthest, step + 1)
    return SimPosition(step + 1, [tensors[0] for _, tensors in replies], buffer)


def _contributions(client: SimClient, at: SimPosition, rows: dict[int, Tensor]) -> list[SimCall]:
    world, step = client.world, at.step
    questions: list[SimCall] = []
    for span in world.lane_subtrees[client.worker]:
        sparse = reference.sum_of_rows(at.values, step, range(*span), rows) if rows else {}
        for shard in world.shards:
            slots, tensors = [TableSlice(TABLE)], [torch.zeros(world.size)]
            if world.mode.exact:
                for lane in range(*span):
                    tensors[0] += reference.lane_gradient(at.values, step, lane)
                mine = [row for row in sparse if row % len(world.shards) == shard]
                if mine:
                    slots.append(TableSlice(ROWS, sparse=True))
                    tensors += [torch.tensor(mine), torch.stack([sparse[row] for row in mine])]
            elif world.mode.name == "local":
                tensors = [reference.local_progress(at.values, step, client.worker)[shard]]
            else:
                slots, tensors = client.count_gradient(shard, [step * LANES + lane for lane in range(*span)])
            questions.append((shard, messages.ContributeRequest(step, span, slots), tensors))
    return questions


def _shares(client: SimClient, at: SimPosition) -> list[Tensor]:
    """A worker's share of the buffer: one sum for each subtree of its lanes; in local mode its own buffer."""
    if client.world.mode.name == "local":
        return [reference.own_buffer(at.values, client.worker, at.buffer)]
    share = partial(reference.buffer_share, at.values, at.buffer)
    return [reference.summed(range(*span), share, torch.add) for span in client.world.lane_subtrees[client.worker]]


def _reduced_buffer(client: SimClient, at: SimPosition, closed: messages.BarrierReply, came: list[Tensor]) -> Tensor:
    """The buffer from the shares of all workers."""
    if client.world.mode.name == "local":
        return reference.mean(came)
    spans = [span for worker in closed.workers for span in client.world.lane_subtrees[worker]]
    shares = fold(LANES, dict(zip(spans, came, strict=True)), torch.add)
    assert shares is not None
    return reference.next_buffer(at.buffer, shares)


def _norm(replies: list[SimReply]) -> float | None:
    """The norm of the whole gradient: values by server, then rows, rising. None: the step is over."""
    if any(isinstance(reply, messages.LateReply) for reply, _ in replies):
        return None
    dense: list[Tensor] = []
    rows: dict[int, Tensor] = {}
    for _, tensors in replies:
        dense.append(tensors[0])
        if len(tensors) > 1:
            rows |= dict(zip(tensors[1].tolist(), tensors[2], strict=True))
    sparse = [torch.stack([rows[row] for row in sorted(rows)])] if rows else []
    return total_norm([*dense, *sparse])


def _behind(replies: list[SimReply]) -> bool:
    refused = [reply for reply, _ in replies if isinstance(reply, messages.RefusedReply)]
    for each in refused:
        if each.code not in BEHIND_CODES:
            raise InvariantViolated(f"refused: {each.reason}")
    return bool(refused)


def _enter(client: SimClient) -> EnterScript:
    """Reads the step and the values of the servers."""
    buffers = [TableSlice(BUFFER)] if client.world.plan.buffers else []
    replies = yield client.on_all_servers(messages.PullRequest([TableSlice(TABLE), *buffers]))
    if _behind(replies):
        return (yield from _recover(client))
    steps = {reply.step for reply, _ in replies}
    if len(steps) > 1 and client.world.mode.name != "quorum":
        return (yield from _recover(client))
    values = [tensors[0] for _, tensors in replies]
    return SimPosition(min(steps), values, replies[0][1][-1])


def _recover(client: SimClient) -> EnterScript:
    """Rolls all servers back to the newest step that each has kept. The first request counts."""
    world, looks = client.world, 0
    while True:
        found: list[messages.StatusReply] = [
            reply for reply, _ in (yield client.on_all_servers(messages.StatusRequest()))
        ]
        if are_consistent(found):
            break
        looks += 1
        try:
            requests = plan_rewind(found, looks)
        except NoCommonSnapshotError as nothing:
            raise InvariantViolated(f"no step is kept by all servers: {nothing}") from None
        if not requests:
            yield SimPause(POLL_SECONDS)
            continue
        world.record_case("servers were rewound")
        world.log("worker %d rewinds all to %d, generation %d", client.worker, requests[0].step, requests[0].generation)
        yield [(shard, request, []) for shard, request in enumerate(requests)]
    client.generation = found[0].generation
    return (yield from _enter(client))


SCRIPTS: dict[str, Callable[[SimClient], Script]] = {
    "push": push_script,
    "queue": queue_script,
    "lockstep": lockstep_script,
}
