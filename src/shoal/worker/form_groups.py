"""Who does what in one epoch: which workers are whole replicas, which lanes each of those has, who writes which part of
a checkpoint. Everybody decides it from the members alone, so all come to the same."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.numerics.lanes import Span, deal
from shoal.parallel.groups import Teams, form_teams
from shoal.parallel.layout import Layout, part_of, replicas
from shoal.parallel.plan import Plan, read_shares
from shoal.recovery.checkpoint.shards import Holding
from shoal.recovery.membership.protocol import Who
from shoal.worker.build_model import Built
from shoal.worker.elastic_membership import Membership


def form(layout: Layout, crew: Membership, built: Built) -> Teams:
    """The groups of this epoch. All members form them together."""
    if not layout.cuts:
        return Teams.equal(crew.group)
    workers = [who.worker for who in crew.view.members]
    if layout.zero:  # nobody is missing: a loss ends in another term
        whole = [tuple(workers[first : first + layout.span]) for first in range(0, len(workers), layout.span)]
        left: list[int] = []
    else:
        whole, left = replicas(workers, layout.span)
    teams = form_teams(
        crew.group,
        crew.team,
        whole=[[workers.index(worker) for worker in each] for each in whole],
        left=[workers.index(worker) for worker in left],
        parts=[part_of(worker, layout.span) for worker in workers],
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        teller=0 if built.stages is None else built.stages.last * layout.tensor,
    )
    if built.slices is not None:
        built.slices.group = teams.slices
    return teams


def roles(layout: Layout, crew: Membership, holding: Holding | None) -> tuple[Holding | None, Sequence[Who]]:
    """What this worker writes of a checkpoint, and who writes the parts: the first that hold them."""
    if holding is None:
        return None, ()
    first: dict[int, Who] = {}
    for who in crew.view.members:
        first.setdefault(part_of(who.worker, layout.parts), who)
    writers = sorted(first.values(), key=crew.view.rank)
    part = writers.index(crew.who) if crew.who in writers else None
    return replace(holding, part=part, parts=len(writers)), writers


def deal_to(plan: Plan, members: Sequence[Who], replicas: int) -> tuple[Span, ...]:
    """Lanes for as many replicas: as planned while all are there."""
    if [who.worker for who in members] == list(range(plan.workers)):
        return plan.deal
    speeds = [1.0] * replicas
    if plan.shares not in ("even", "auto") and not plan.layout.cuts:
        shares = read_shares(plan.shares, plan.workers)
        speeds = [shares[who.worker] if who.worker < len(shares) else 1.0 for who in members]
    return deal(plan.lanes, speeds)
