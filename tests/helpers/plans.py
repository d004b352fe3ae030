"""The best plan of a search that gives the same bits on any cluster."""

from collections.abc import Callable

from shoal.errors import PlanError
from shoal.parallel.plan import Plan
from shoal.planner.cluster import Cluster
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import space_of, without_inexact
from shoal.planner.search.search import Candidate, PlanRanking, candidate_to_plan, search


def best_exact_plan(
    work: Workload, cluster: Cluster, *, workers: int, refuses: Callable[[Plan], bool] = lambda plan: False
) -> tuple[Plan, Candidate, PlanRanking]:
    """The fastest exact plan that the runtime can run and `refuses` lets pass."""
    ranking = search(work, cluster, space=without_inexact(space_of(work, cluster, workers=workers)))
    for row in ranking.order:
        candidate = ranking.candidate(int(row))
        if candidate.runnable and not refuses(plan := candidate_to_plan(candidate)):
            return plan, candidate, ranking
    raise PlanError(f"none of {len(ranking.order):,} plans can be run", fix="--layout data=1")
