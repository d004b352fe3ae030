"""The groups of one generation as one worker sees them: all workers, those with the same model shard, its replica.

data=2,pipeline=2         world       0 1 2 3     decide together, commit together
                          shard       0 2 │ 1 3   hold the same stage: reduce its gradients
                          pipeline    0 1 │ 2 3   a replica: activations go along it, gradients back
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.errors import RunError


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    world: WorkerGroup
    shard_group: WorkerGroup  # the workers of complete replicas that hold the same as this worker
    shard_ranks: tuple[int, ...]  # the same, as world ranks, by replica
    replica: int | None  # this worker's, of the complete ones; None: workers of its replica are missing, it follows
    pipeline_ranks: tuple[int, ...]  # of this replica: world ranks by stage, with this worker's tensor rank
    tensor_group: WorkerGroup  # of this stage
    loss_ranks: tuple[int, ...]  # world ranks, by replica: the worker that knows its losses
    followers: tuple[int, ...] = ()  # world ranks that hold this model shard and follow
    stage: int = 0
    sharded: bool = False  # workers hold different model shards

    @classmethod
    def replicated(cls, group: WorkerGroup) -> "ParallelGroups":
        """Every worker holds the whole model."""
        ranks = tuple(range(group.size))
        return cls(
            world=group,
            shard_group=group,
            shard_ranks=ranks,
            replica=group.rank,
            pipeline_ranks=(group.rank,),
            tensor_group=SoloGroup(),
            loss_ranks=ranks,
        )

    @property
    def replicas(self) -> int:
        return len(self.loss_ranks)


def make_groups(
    group: WorkerGroup,
    new_group: Callable[[Sequence[int]], WorkerGroup],
    *,
    replicas: Sequence[Sequence[int]],
    leftover: Sequence[int],
    shards: Sequence[int],
    pipeline: int,
    tensor: int,
    loss_shard: int,
) -> ParallelGroups:
    """Forms the groups; all members do it together. `new_group`: makes a group of some ranks, this one among them.
    `replicas`: ranks of each complete replica, by stage and tensor rank. `leftover`: ranks of incomplete replicas.
    `shards`: the model shard of each rank. `loss_shard`: the shard whose worker knows the losses."""
    if not replicas:
        raise RunError("no replica of the model is whole")
    place = shards[group.rank]
    stage, number = divmod(place, tensor)
    own = next((index for index, ranks in enumerate(replicas) if group.rank in ranks), None)
    shard_ranks = tuple(ranks[place] for ranks in replicas)
    pipeline_ranks = () if own is None else tuple(replicas[own][each * tensor + number] for each in range(pipeline))
    tensor_group: WorkerGroup = SoloGroup()
    shard_group: WorkerGroup = SoloGroup()
    if own is not None:
        if tensor > 1:
            tensor_group = new_group([replicas[own][stage * tensor + each] for each in range(tensor)])
        shard_group = group if shard_ranks == tuple(range(group.size)) else new_group(shard_ranks)
    return ParallelGroups(
        world=group,
        shard_group=shard_group,
        shard_ranks=shard_ranks,
        replica=own,
        pipeline_ranks=pipeline_ranks,
        tensor_group=tensor_group,
        loss_ranks=tuple(ranks[loss_shard] for ranks in replicas),
        followers=tuple(rank for rank in leftover if shards[rank] == place),
        stage=stage,
        sharded=True,
    )
