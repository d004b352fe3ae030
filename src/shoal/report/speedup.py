"""What more workers gained in a run: speed-up, its limits, and the worker that slows the others. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from shoal.report.aggregate import RunTally, WorkerTally
from shoal.report.events import TIME_PARTS, TimeSpent
from shoal.report.human import rounded
from shoal.report.scaling_laws import amdahl_limit, gustafson_speedup, parallel_fraction

SLOW = 1.3  # times the others' time per lane: less is not reported


def slowness(workers: Sequence[WorkerTally], *, recent: bool = False) -> dict[int, float]:
    """Rank -> its time per lane over the median of the others'; ranks without a measurement are left out."""
    seconds = {w.rank: (w.recent.seconds_per_lane if recent else w.seconds_per_lane) or 0.0 for w in workers}
    ratios = {}
    for rank, own in seconds.items():
        others = [each for other, each in seconds.items() if other != rank and each]
        if own and others:
            ratios[rank] = own / statistics.median(others)
    return ratios


def mean_step_ms(workers: Sequence[WorkerTally]) -> dict[str, float] | None:
    """Milliseconds of a step by cause, the mean over steps and workers."""
    steps = sum(worker.steps for worker in workers)
    if not steps:
        return None
    spent = sum((worker.time_spent for worker in workers), TimeSpent())
    parts = {part: round(1000 * getattr(spent, part) / steps, 6) for part in TIME_PARTS}
    return {"total": round(sum(parts.values()), 6), **parts}


def estimate_speedup(tally: RunTally) -> dict[str, Any]:
    """The speed-up over one worker that computes every lane: an estimate from one member's time per lane. Where the
    members changed, step times are averages over different members, so no law is fitted to them."""
    names = ("over_one_worker", "parallel_fraction", "amdahl_limit", "gustafson", "possible", "one_worker_step_ms")
    facts: dict[str, Any] = dict.fromkeys((*names, "reference_worker"))
    workers, step_ms = tally.members, mean_step_ms(tally.ranks)
    if step_ms is None or tally.started is None or not step_ms["total"]:
        return facts | {"basis": "no step was committed"}
    if _is_sharded(tally):  # no worker's time is that of the whole model
        return facts | {"basis": "every worker has a shard of the model"}
    if tally.started.sync_mode.startswith("quorum"):  # the number of lanes in a step varies
        return facts | {"basis": "a step is closed without late workers"}
    if tally.num_workers == 1:
        basis = "this is the run of one worker"
        return facts | {"over_one_worker": 1.0, "one_worker_step_ms": step_ms["total"], "basis": basis}
    measured = [(worker, worker.seconds_per_lane) for worker in workers if worker.steps]
    reference, per_lane = next(((each, seconds) for each, seconds in measured if seconds is not None), (None, 0.0))
    if reference is None:
        return facts | {"basis": "no member computed any lanes"}
    lanes = tally.started.lanes
    other = 0.0 if tally.is_queue else reference.time_spent.other  # in a queue mostly waiting for the next step
    around = (reference.time_spent.apply + other) / reference.steps
    alone = per_lane * lanes + around
    speedup = 1000 * alone / step_ms["total"]
    if tally.is_queue and tally.seconds:  # workers' steps overlap
        speedup = alone * tally.steps / tally.seconds
    facts |= {
        "one_worker_step_ms": rounded(1000 * alone),
        "over_one_worker": rounded(speedup),
        "reference_worker": reference.rank,
        "basis": f"estimated from worker {reference.rank}'s own time per lane",
    }
    if tally.is_queue or any(each.kind in ("lost", "left", "joined", "server-lost") for each in tally.incidents):
        return facts
    times = [worker.seconds_per_lane or 0.0 for worker in workers]
    if times and all(times):
        facts["possible"] = rounded(alone / (_best_share_seconds(times, lanes) + around))
    parallel = parallel_fraction(speedup, tally.num_workers) if speedup > 0 else None
    if parallel is not None:
        limit = amdahl_limit(parallel)
        facts["parallel_fraction"] = rounded(parallel)
        facts["amdahl_limit"] = rounded(limit) if math.isfinite(limit) else None  # None: no limit
        facts["gustafson"] = rounded(gustafson_speedup(parallel, tally.num_workers))
    return facts


def _best_share_seconds(seconds_per_lane: Sequence[float], lanes: int) -> float:
    """The time of the slowest worker if each lane is assigned to the worker that it delays least."""
    shares = [0.0] * len(seconds_per_lane)
    for _ in range(lanes):
        worker = min(range(len(shares)), key=lambda index: shares[index] + seconds_per_lane[index])
        shares[worker] += seconds_per_lane[worker]
    return max(shares)


def most_gain(tally: RunTally) -> dict[str, Any] | None:
    """The slowest member, and the time of a step if it were like the others and kept its lanes."""
    workers, step_ms = tally.members, mean_step_ms(tally.ranks)
    slow = slowness(workers)
    if step_ms is None or not slow or _is_sharded(tally) or not _waits_for_all(tally):
        return None
    rank = max(slow, key=lambda each: slow[each])
    if slow[rank] < SLOW:
        return None
    busy = {w.rank: 1000 * (w.time_spent.data + w.time_spent.compute) / w.steps for w in workers if w.steps}
    longest = max(busy.values())
    busy[rank] /= slow[rank]
    saved = longest - max(busy.values())
    faster_ms = rounded(max(0.0, step_ms["total"] - saved))
    return {"worker": rank, "times_slower": rounded(slow[rank]), "step_ms": faster_ms}


def _waits_for_all(tally: RunTally) -> bool:
    """Whether a step ends when the slowest worker is done."""
    return tally.started is None or tally.started.sync_mode.partition(":")[0] in ("", "sync", "local")


def _is_sharded(tally: RunTally) -> bool:
    return tally.started is not None and any(axis in tally.started.layout for axis in ("pipeline", "tensor"))
