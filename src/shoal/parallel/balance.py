"""Blocks into pipeline stages: a row of costs cut into consecutive spans, the dearest as cheap as can be.

costs    5 1 1 1 4 4        three stages: 5 1 | 1 1 4 | 4     the dearest takes 6
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf, isfinite

from shoal.errors import PlanError
from shoal.numerics.lanes import Span


def cut_stages(
    costs: Sequence[float],
    stages: int,
    weights: Sequence[float] | None = None,
    *,
    joined: Sequence[tuple[int, int]] = (),
) -> tuple[Span, ...]:
    """One span of blocks per stage, none empty.

    The largest load (cost / weight of the stage: how fast it is) is as small as can be, then the sum of the squares
    of the loads; of what is still equal, the cuts that lie furthest left, from the last one on. Blocks from the first
    to the last of a pair in `joined` come into one stage.
    """
    weights = [1.0] * stages if weights is None else weights
    _check(costs, stages, weights, joined)
    bounds = _bounds(len(costs), joined)  # where a cut may be, with both ends
    if len(bounds) - 1 < stages:
        together = f", and those that must stay together leave {len(bounds) - 1}" if len(bounds) <= len(costs) else ""
        raise PlanError(
            f"{stages} stages but {len(costs)} block{'' if len(costs) == 1 else 's'}{together}",
            fix=f"at most {len(bounds) - 1} stage{'' if len(bounds) == 2 else 's'}, or a model cut into more blocks",
        )
    sums = [0.0, *accumulate(costs)]
    along = [sums[bound] for bound in bounds]
    least = _best(along, weights, inf)[-1][-1][0]
    best = _best(along, weights, least)
    spans: list[Span] = []
    stop = len(bounds) - 1
    for stage in range(stages, 0, -1):
        start = best[stage][stop][1]
        spans.append((bounds[start], bounds[stop]))
        stop = start
    return tuple(reversed(spans))


def _best(along: Sequence[float], weights: Sequence[float], limit: float) -> list[list[tuple[float, int]]]:
    """best[s][i]: the first s stages on all up to bound i, as (what counts, the bound where stage s begins).

    Without a limit the largest load counts; with one, the sum of squares of loads that keep it.
    """
    last = len(along) - 1
    best = [[(inf, 0)] * (last + 1) for _ in range(len(weights) + 1)]
    best[0][0] = (0.0, 0)
    for stage, weight in enumerate(weights, start=1):
        for stop in range(stage, last - (len(weights) - stage) + 1):
            found = (inf, 0)
            for start in range(stop - 1, stage - 2, -1):  # the load grows
                load = (along[stop] - along[start]) / weight
                if load > min(limit, found[0] if limit == inf else inf):
                    break
                before = best[stage - 1][start][0]
                found = min(found, (max(before, load) if limit == inf else before + load * load, start))
            best[stage][stop] = found
    return best


def _bounds(blocks: int, joined: Sequence[tuple[int, int]]) -> list[int]:
    closed = {bound for first, last in joined for bound in range(first + 1, last + 1)}
    return [bound for bound in range(blocks + 1) if bound not in closed]


def _check(costs: Sequence[float], stages: int, weights: Sequence[float], joined: Sequence[tuple[int, int]]) -> None:
    if stages < 1:
        raise PlanError(f"{stages} stages: at least 1 is needed")
    if len(weights) != stages:
        raise PlanError(f"{len(weights)} weights for {stages} stages", fix=f"{stages} weights, one for each stage")
    for stage, weight in enumerate(weights):
        if not (isfinite(weight) and weight > 0):
            raise PlanError(f"stage {stage} has the weight {weight}, not a finite number above 0")
    for block, cost in enumerate(costs):
        if not (isfinite(cost) and cost >= 0):
            raise PlanError(f"block {block} has the cost {cost}, not a finite number from 0 up")
    for first, last in joined:
        if not 0 <= first <= last < len(costs):
            raise PlanError(f"blocks {first} to {last} are to stay together, but there are {len(costs)} blocks")
