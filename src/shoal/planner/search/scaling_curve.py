"""Scaling curves: throughput by number of devices, and the laws that fit it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.planner.cluster import Cluster
from shoal.planner.search.search import Candidate, PlanRanking
from shoal.report.scaling_laws import usl_speedup


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    hosts: int
    devices: int  # of the hosts; the plan may use fewer
    candidate: Candidate
    speedup: float  # over the first point
    efficiency: float  # speed-up over the ratio of devices


@dataclass(frozen=True, kw_only=True)
class ScalingFits:
    """Parameters of each law. Numbers of devices are relative to the first point."""

    amdahl: float  # parallel part
    gustafson: float
    contention: float  # USL's σ
    coherence: float  # USL's κ

    def speedups(self, times: float) -> dict[str, float]:
        """Speed-up by law, with `times` the devices of the first point."""
        return {
            "Amdahl": 1.0 / ((1.0 - self.amdahl) + self.amdahl / times),
            "Gustafson": (1.0 - self.gustafson) + self.gustafson * times,
            "USL": usl_speedup(self.contention, self.coherence, times),
        }


@dataclass(frozen=True, kw_only=True)
class ScalingCurve:
    points: tuple[ScalingPoint, ...]
    fits: ScalingFits | None  # None: only one point
    missing: tuple[tuple[int, str], ...] = ()  # numbers of hosts on which no plan fits, and why
    weak: bool = False  # the batch grows with the devices


def scaling_curve(
    rank: Callable[[Cluster, int], PlanRanking], clusters: Sequence[tuple[int, Cluster]], *, weak: bool = False
) -> ScalingCurve:
    """`rank` searches a cluster; its second argument is the factor for the batch."""
    found: list[tuple[int, int, Candidate]] = []
    missing: list[tuple[int, str]] = []
    least = min(hosts for hosts, _ in clusters)
    for hosts, cluster in sorted(clusters, key=lambda pair: pair[0]):
        try:
            best = rank(cluster, hosts // least if weak else 1).best
        except PlanError as error:
            missing.append((hosts, error.message))
            continue
        found.append((hosts, cluster.devices, best))
    if not found:
        raise PlanError(f"no plan fits on any of {len(clusters)} numbers of hosts: {missing[-1][1]}", fix="more hosts")
    first_devices, first_rate = found[0][1], found[0][2].rate
    points = tuple(
        ScalingPoint(hosts=hosts, devices=devices, candidate=best, speedup=best.rate / first_rate,
                     efficiency=best.rate / first_rate * first_devices / devices)
        for hosts, devices, best in found
    )  # fmt: skip
    pairs = [(point.devices / first_devices, point.speedup) for point in points]
    return ScalingCurve(
        points=points, fits=fit_laws(pairs) if len(points) > 1 else None, missing=tuple(missing), weak=weak
    )


def fit_laws(pairs: Sequence[tuple[float, float]]) -> ScalingFits:
    """Fits (relative devices, speed-up) by least squares, each law in the form in which it is linear."""
    more = [(n, s) for n, s in pairs if n > 1]
    if not more:
        raise ValueError("a law is fitted to more than one number of devices")
    contention, coherence = fit_usl(more)
    return ScalingFits(
        amdahl=fit_amdahl(more), gustafson=fit_gustafson(more), contention=contention, coherence=coherence
    )


def fit_amdahl(pairs: Sequence[tuple[float, float]]) -> float:
    """1 - 1/S = p (1 - 1/n)."""
    top = sum((1 - 1 / s) * (1 - 1 / n) for n, s in pairs)
    return min(1.0, max(0.0, top / sum((1 - 1 / n) ** 2 for n, _ in pairs)))


def fit_gustafson(pairs: Sequence[tuple[float, float]]) -> float:
    """S - 1 = p (n - 1); errors are relative to n, else the last point decides alone."""
    top = sum((s - 1) * (n - 1) / n**2 for n, s in pairs)
    return min(1.0, max(0.0, top / sum((n - 1) ** 2 / n**2 for n, _ in pairs)))


def fit_usl(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """n/S - 1 = σ (n - 1) + κ n (n - 1), neither below 0; errors relative to n."""
    rows = [((n - 1) / n, n - 1, (n / s - 1) / n) for n, s in pairs]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    both = (
        ((ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant)
        if determinant > 1e-12 * aa * bb
        else (-1.0, -1.0)
    )
    if both[0] >= 0 and both[1] >= 0:
        return both
    choices = [(max(0.0, ay / aa), 0.0), (0.0, max(0.0, by / bb))]

    def error(choice: tuple[float, float]) -> float:
        return sum((r[2] - choice[0] * r[0] - choice[1] * r[1]) ** 2 for r in rows)

    return min(choices, key=error)
