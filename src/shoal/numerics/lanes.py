"""Lanes: a batch cut into fixed slices, and the tree in which their sums are added (docs/exact.md, rules 1 and 3).

4 lanes      6 lanes            The tree splits at the largest power of two below the number of lanes.
  ┌─┴─┐        ┌──┴──┐          It belongs to the job: however lanes are assigned, the same numbers are
 ┌┴┐ ┌┴┐     ┌─┴─┐  ┌┴┐         added in the same order. A worker adds up the subtrees whose lanes it
 0 1 2 3    ┌┴┐ ┌┴┐ 4 5         holds, and sends the partial sums.
            0 1 2 3
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")
Span = tuple[int, int]  # lanes from the first up to, not including, the second


def split_point(span: Span) -> int:
    """The first lane of a subtree's right half."""
    count = span[1] - span[0]
    return span[0] + (1 << ((count - 1).bit_length() - 1))


def subtrees(lanes: int, held: Span) -> tuple[Span, ...]:
    """The largest subtrees inside `held`, from left to right."""

    def inside(node: Span) -> tuple[Span, ...]:
        if node[1] <= held[0] or held[1] <= node[0]:
            return ()
        if held[0] <= node[0] and node[1] <= held[1]:
            return (node,)
        middle = split_point(node)
        return inside((node[0], middle)) + inside((middle, node[1]))

    return inside((0, lanes))


def left_siblings(node: Span, lane: int) -> list[Span]:
    """The subtrees to the left of the way from a node down to one of its lanes. The node's sum is theirs and the
    lane's, if no lane to the right of it has a value: the lane is added to the last of them, that to the one before."""
    found = []
    while node[1] - node[0] > 1:
        middle = split_point(node)
        if lane < middle:
            node = (node[0], middle)
        else:
            found.append((node[0], middle))
            node = (middle, node[1])
    return found


def fold(lanes: int, partials: Mapping[Span, T | None], add: Callable[[T, T], T]) -> T | None:
    """Adds partial sums in the order of the tree. An absent one (None) is no operand."""

    def value(node: Span) -> T | None:
        if node in partials:
            return partials[node]
        middle = split_point(node)
        left, right = value((node[0], middle)), value((middle, node[1]))
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    return value((0, lanes))


class TreeAccumulator(Generic[T]):
    """Adds up the lanes of the subtrees in `held`: lanes arrive in any order, and a pair is added once complete."""

    def __init__(self, lanes: int, held: Span, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._above: dict[Span, tuple[Span, Span, Span]] = {}  # a child -> its parent, and the parent's two children
        self.partials: dict[Span, T] = {}
        pending = list(subtrees(lanes, held))
        while pending:
            node = pending.pop()
            if node[1] - node[0] > 1:
                middle = split_point(node)
                left, right = (node[0], middle), (middle, node[1])
                self._above[left] = self._above[right] = (node, left, right)
                pending += [left, right]

    def add(self, lane: int, value: T) -> None:
        node = (lane, lane + 1)
        self.partials[node] = value
        while node in self._above:
            parent, left, right = self._above[node]
            if left not in self.partials or right not in self.partials:
                return
            self.partials[parent] = self._add(self.partials.pop(left), self.partials.pop(right))
            node = parent


def cut_batch(count: int, batch: int, lanes: int, microbatches: int) -> list[list[range]]:
    """Positions within a batch, by lane and microbatch. A short batch (count < batch) fills lanes in order; an empty
    microbatch is left out."""
    lane_size = batch // lanes
    size = lane_size // microbatches
    return [
        [range(start, min(start + size, count)) for start in range(first, min(first + lane_size, count), size)]
        for first in range(0, batch, lane_size)
    ]


def assign_lanes(lanes: int, speeds: Sequence[float]) -> tuple[Span, ...]:
    """Assigns neighbouring lanes to workers in rank order, at least one each. Minimizes the time of the slowest
    worker, then the number of partial sums: aligned subtrees where speed allows."""
    return _assign_lanes(lanes, tuple(speeds))


@lru_cache(maxsize=256)
def _assign_lanes(lanes: int, speeds: tuple[float, ...]) -> tuple[Span, ...]:
    workers = len(speeds)
    # best[w][l]: (time, partial sums, where worker w's lanes begin) for the first w workers on the first l lanes.
    never = (float("inf"), 0)

    def table(limit: float) -> list[list[tuple[tuple[float, int], int]]]:
        best = [[(never, 0)] * (lanes + 1) for _ in range(workers + 1)]
        best[0][0] = ((0.0, 0), 0)
        for worker in range(1, workers + 1):
            for stop in range(worker, lanes - (workers - worker) + 1):
                choices = []
                for start in range(worker - 1, stop):
                    (time, sums), _ = best[worker - 1][start]
                    time = max(time, (stop - start) / speeds[worker - 1])
                    if time <= limit:
                        # Under a limit only the number of partial sums counts; without one, only time.
                        partial = sums + len(subtrees(lanes, (start, stop))) if limit < float("inf") else 0
                        choices.append(((0.0 if limit < float("inf") else time, partial), start))
                best[worker][stop] = min(choices, default=(never, 0))
        return best

    shortest = table(float("inf"))[workers][lanes][0][0]
    best = table(shortest)
    spans: list[Span] = []
    stop = lanes
    for worker in range(workers, 0, -1):
        start = best[worker][stop][1]
        spans.append((start, stop))
        stop = start
    return tuple(reversed(spans))


def reassign_lanes(
    assignment: Sequence[Span], seconds: Sequence[float], *, min_gain: float = 0.1
) -> tuple[tuple[Span, ...], str] | None:
    """A better assignment for workers whose speed has drifted, with the reason; None if it gains less than `min_gain`.
    `seconds`: what each worker lately needed for the lanes it holds."""
    if min(seconds) <= 0:
        return None
    counts = [stop - start for start, stop in assignment]
    speeds = [count / second for count, second in zip(counts, seconds, strict=True)]
    if max(seconds) < sum(counts) / sum(speeds) * (1 + min_gain):
        return None  # even a perfectly even split would gain too little
    better = assign_lanes(assignment[-1][1], speeds)
    expected = max((stop - start) / speed for (start, stop), speed in zip(better, speeds, strict=True))
    if better == tuple(assignment) or max(seconds) < expected * (1 + min_gain):
        return None
    fastest = max(speeds)
    relative = ", ".join(f"{speed / fastest:.2f}" for speed in speeds)
    reason = f"relative speeds {relative}: {max(seconds) * 1e3:.1f} ms a step becomes {expected * 1e3:.1f} ms"
    return better, reason


def find_stragglers(
    assignment: Sequence[Span], seconds: Sequence[float], *, min_left: int = 1, factor: float = 3.0
) -> list[int]:
    """Ranks that need more than `factor` times the median time for a lane, slowest first; never so many that fewer
    than `min_left` workers remain."""
    per_lane = [second / (stop - start) for (start, stop), second in zip(assignment, seconds, strict=True)]
    limit = factor * sorted(per_lane)[(len(per_lane) - 1) // 2]
    slow = sorted((rank for rank, time in enumerate(per_lane) if time > limit), key=lambda rank: -per_lane[rank])
    return slow[: max(0, len(per_lane) - max(1, min_left))]
