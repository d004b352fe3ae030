"""Who does what in one generation: which workers make a complete replica, which lanes each replica has, and who
writes which shard of a checkpoint. Every worker decides it from the members alone, so all decide alike."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.numerics.lanes import Span, assign_lanes
from shoal.parallel.groups import ParallelGroups, make_groups
from shoal.parallel.layout import ParallelLayout, form_replicas, model_shard_of
from shoal.parallel.plan import Plan, parse_shares
from shoal.recovery.checkpoint.shards import StateShard
from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.build_model import WorkerModel
from shoal.worker.membership import RunMembership


def form_groups(layout: ParallelLayout, membership: RunMembership, built: WorkerModel) -> ParallelGroups:
    """The groups of this generation. All members form them together."""
    if not layout.sharded:
        return ParallelGroups.replicated(membership.group)
    workers = [member.worker for member in membership.view.members]
    if layout.zero:  # no member is missing: a loss restarts the run
        whole = [
            tuple(workers[first : first + layout.replica_size]) for first in range(0, len(workers), layout.replica_size)
        ]
        leftover: list[int] = []
    else:
        whole, leftover = form_replicas(workers, layout.replica_size)
    groups = make_groups(
        membership.group,
        membership.subgroup,
        replicas=[[workers.index(worker) for worker in each] for each in whole],
        leftover=[workers.index(worker) for worker in leftover],
        shards=[model_shard_of(worker, layout.replica_size) for worker in workers],
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        loss_shard=0 if built.stages is None else built.stages.last_rank * layout.tensor,
    )
    if built.tensor_group is not None:
        built.tensor_group.group = groups.tensor_group
    return groups


def checkpoint_writers(
    layout: ParallelLayout, membership: RunMembership, state_shard: StateShard | None
) -> tuple[StateShard | None, Sequence[WorkerId]]:
    """What this worker writes of a checkpoint, and the workers that write its shards: the first that hold them."""
    if state_shard is None:
        return None, ()
    first: dict[int, WorkerId] = {}
    for member in membership.view.members:
        first.setdefault(model_shard_of(member.worker, layout.shards), member)
    writers = sorted(first.values(), key=membership.view.rank)
    index = writers.index(membership.worker_id) if membership.worker_id in writers else None
    return replace(state_shard, shard_index=index, num_shards=len(writers)), writers


def assign_to_members(plan: Plan, members: Sequence[WorkerId], replicas: int) -> tuple[Span, ...]:
    """Lanes by replica: those of the plan while all planned workers are members."""
    if [member.worker for member in members] == list(range(plan.workers)):
        return plan.assignment
    speeds = [1.0] * replicas
    if plan.shares not in ("even", "auto") and not plan.layout.sharded:
        shares = parse_shares(plan.shares, plan.workers)
        speeds = [shares[member.worker] if member.worker < len(shares) else 1.0 for member in members]
    return assign_lanes(plan.lanes, speeds)
