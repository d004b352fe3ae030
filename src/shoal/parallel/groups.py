"""The groups of one epoch as one worker sees them: everyone, those that hold the same part, and its own replica.

data=2,pipeline=2         everyone  0 1 2 3     decides together, commits together
                          part      0 2 │ 1 3   hold the same stage: merge its gradients
                          line      0 1 │ 2 3   a replica: activations go along it, gradients back
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.errors import RunError


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    world: WorkerGroup
    shard_group: WorkerGroup  # of the whole replicas: whoever holds the same as this worker
    shard_ranks: tuple[int, ...]  # the same, as ranks of everyone, by replica
    replica: int | None  # this worker's, among the whole ones; None: its mates are missing, and it only follows
    pipeline_ranks: tuple[int, ...]  # of this replica, ranks of everyone by stage, in this worker's slice
    tensor_group: WorkerGroup  # of this stage
    loss_ranks: tuple[int, ...]  # ranks of everyone, by replica: who knows its losses
    followers: tuple[int, ...] = ()  # ranks of everyone that hold this part and only follow
    stage: int = 0
    sharded: bool = False  # workers hold different things

    @classmethod
    def replicated(cls, group: WorkerGroup) -> "ParallelGroups":
        """Every worker holds everything."""
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
    """All members form them together. `team`: makes a group of some ranks, this one among them. `whole`: ranks of each
    whole replica, by stage and slice; `left`: ranks whose mates are missing; `parts`: what each rank holds, as its
    place in a replica; `teller`: the place of whoever knows the losses."""
    if not replicas:
        raise RunError("no replica of the model is whole")
    place = shards[group.rank]
    stage, number = divmod(place, tensor)
    own = next((index for index, ranks in enumerate(replicas) if group.rank in ranks), None)
    part_ranks = tuple(ranks[place] for ranks in replicas)
    line = () if own is None else tuple(replicas[own][each * tensor + number] for each in range(pipeline))
    slices: WorkerGroup = SoloGroup()
    part: WorkerGroup = SoloGroup()
    if own is not None:
        if tensor > 1:
            slices = new_group([replicas[own][stage * tensor + each] for each in range(tensor)])
        part = group if part_ranks == tuple(range(group.size)) else new_group(part_ranks)
    return ParallelGroups(
        world=group,
        shard_group=part,
        shard_ranks=part_ranks,
        replica=own,
        pipeline_ranks=line,
        tensor_group=slices,
        loss_ranks=tuple(ranks[loss_shard] for ranks in replicas),
        followers=tuple(rank for rank in leftover if shards[rank] == place),
        stage=stage,
        sharded=True,
    )
