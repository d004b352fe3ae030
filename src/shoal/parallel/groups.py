"""The groups of one epoch as one worker sees them: everyone, those that hold the same part, and its own replica.

data=2,pipeline=2         everyone  0 1 2 3     decides together, commits together
                          part      0 2 │ 1 3   hold the same stage: merge its gradients
                          line      0 1 │ 2 3   a replica: activations go along it, gradients back
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.collectives.group import Alone, Group
from shoal.errors import RunError


@dataclass(frozen=True, kw_only=True)
class Teams:
    everyone: Group
    part: Group  # of the whole replicas: whoever holds the same as this worker
    part_ranks: tuple[int, ...]  # the same, as ranks of everyone, by replica
    replica: int | None  # this worker's, among the whole ones; None: its mates are missing, and it only follows
    line: tuple[int, ...]  # of this replica, ranks of everyone by stage, in this worker's slice
    slices: Group  # of this stage
    tellers: tuple[int, ...]  # ranks of everyone, by replica: who knows its losses
    followers: tuple[int, ...] = ()  # ranks of everyone that hold this part and only follow
    stage: int = 0
    cut: bool = False  # workers hold different things

    @classmethod
    def equal(cls, group: Group) -> "Teams":
        """Every worker holds everything."""
        ranks = tuple(range(group.size))
        return cls(
            everyone=group,
            part=group,
            part_ranks=ranks,
            replica=group.rank,
            line=(group.rank,),
            slices=Alone(),
            tellers=ranks,
        )

    @property
    def replicas(self) -> int:
        return len(self.tellers)


def form_teams(
    group: Group,
    team: Callable[[Sequence[int]], Group],
    *,
    whole: Sequence[Sequence[int]],
    left: Sequence[int],
    parts: Sequence[int],
    pipeline: int,
    tensor: int,
    teller: int,
) -> Teams:
    """All members form them together. `team`: makes a group of some ranks, this one among them. `whole`: ranks of each
    whole replica, by stage and slice; `left`: ranks whose mates are missing; `parts`: what each rank holds, as its
    place in a replica; `teller`: the place of whoever knows the losses."""
    if not whole:
        raise RunError("no replica of the model is whole")
    place = parts[group.rank]
    stage, number = divmod(place, tensor)
    own = next((index for index, ranks in enumerate(whole) if group.rank in ranks), None)
    part_ranks = tuple(ranks[place] for ranks in whole)
    line = () if own is None else tuple(whole[own][each * tensor + number] for each in range(pipeline))
    slices: Group = Alone()
    part: Group = Alone()
    if own is not None:
        if tensor > 1:
            slices = team([whole[own][stage * tensor + each] for each in range(tensor)])
        part = group if part_ranks == tuple(range(group.size)) else team(part_ranks)
    return Teams(
        everyone=group,
        part=part,
        part_ranks=part_ranks,
        replica=own,
        line=line,
        slices=slices,
        tellers=tuple(ranks[teller] for ranks in whole),
        followers=tuple(rank for rank in left if parts[rank] == place),
        stage=stage,
        cut=True,
    )
