"""The account of a run: the value of `report.json`, worked out from a tally. Pure; used by the driver at the end."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.report.aggregate import RunTally, WorkerTally
from shoal.report.events import ModelShardReported, TimeSpent, TrafficReported, WorkerFailed
from shoal.report.predicted_vs_measured import reconcile
from shoal.report.scaling_laws import amdahl_limit, gustafson_speedup, parallel_fraction
from shoal.report.wording import exit_text

TIME_PARTS = ("data", "compute", "wait", "merge", "apply", "other")
SLOW = 1.3  # times the time per lane of the others: less than that is not worth a word


def summarize_run(
    tally: RunTally,
    *,
    outcome: str | None = None,
    target: str | None = None,
    failure: WorkerFailed | None = None,
    folder: str | None = None,
    files: Sequence[str] = (),
    prediction: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `report.json` says. `outcome` and `failure` are read from the events unless the driver knows better.
    `prediction`: what prediction.json says."""
    started = tally.started
    lowest = min(tally.finished.values(), key=lambda each: (not each.weights_sha256, each.rank), default=None)
    outcome = outcome or _outcome(tally)
    step_ms = _step_ms(tally.ranks)
    value = {
        "run": started.run if started else None,
        "job": started.job if started else None,
        "command": started.command if started else None,
        "outcome": outcome,
        "stopped": lowest.stopped if lowest else None,
        "exact": _exact(tally),
        "inexact_sync_mode": (tally.resumed.inexact_sync_mode if tally.resumed else "") or None,
        "weights_sha256": lowest.weights_sha256 if lowest else None,
        "steps": tally.step,
        "steps_planned": started.steps if started else None,
        "samples": lowest.samples if lowest else tally.samples,
        "seconds": round(tally.seconds, 6),
        "start_up_seconds": _start_up_seconds(tally),
        "ended": tally.last_time,
        "final_loss": lowest.final_loss if lowest and not tally.is_queue else tally.loss,
        "metrics": dict(lowest.metrics if lowest and lowest.metrics and not tally.is_queue else tally.metrics),
        "target": _target(tally, target),
        "workers": tally.num_workers,
        "lanes": started.lanes if started else None,
        "layout": started.layout if started else None,
        "layout_reason": (started.layout_reason or None) if started else None,
        "assignment": [list(worker.lanes) for worker in tally.members],
        "samples_per_second": _rounded(tally.samples_per_second),
        "tokens_per_second": _tokens_per_second(tally),
        "step_ms": step_ms,
        "evaluation_ms": _evaluation_ms(tally, step_ms),
        "per_worker": [_worker(worker) for worker in tally.ranks],
        "speedup": _speedup(tally),
        "most_gain": _most_gain(tally),
        "lane_cost": _lane_cost(tally),
        "bubble": _bubble(tally),
        "model_shards": [_model_shard(each) for _, each in sorted(tally.model_shards.items())],
        "alive": tally.num_alive,
        "participating": tally.num_participating,
        "participation": _rounded(tally.participation),
        "goodput": _rounded(tally.commits.goodput),
        "lost_seconds": _rounded(tally.commits.lost_seconds),
        "committed": _committed(tally),
        "incidents": msgspec.to_builtins(tally.incidents),
        "membership": msgspec.to_builtins(tally.membership.spans) if tally.incidents else [],
        "training_began": tally.training_began,
        "losses_by_time": _losses(tally),
        "servers": _servers(tally),
        "traffic": _traffic(tally),
        "checkpoints": [
            {"step": s.step, "path": s.path, "num_bytes": s.num_bytes, "seconds": s.seconds, "final": s.final}
            for s in tally.saved
        ],
        "checkpoints_failed": [{"step": each.step, "reason": each.reason} for each in tally.save_failed],
        "assignments": [
            {"step": d.step, "assignment": [list(lanes) for lanes in d.assignment], "reason": d.reason}
            for d in tally.assignments
        ],
        "skipped_steps": [{"step": each.step, "where": [list(at) for at in each.where]} for each in tally.skipped],
        "failure": _failure(tally, failure) if outcome == "failed" else None,
        "resumed_from": tally.resumed.step if tally.resumed else None,
        "fingerprint": next((worker.fingerprint for worker in tally.ranks if worker.fingerprint), None),
        "folder": folder,
        "files": ["report.json", *(name for name in files if name != "report.json")] if folder else list(files),
    }
    return value | {"prediction": reconcile(prediction, value, overlapping=tally.is_queue)}


def _losses(tally: RunTally) -> list[tuple[float, int, float]]:
    """Seconds since training began, step, loss."""
    began = tally.training_began or 0.0
    return [(round(max(0.0, time - began), 6), step, loss) for time, step, loss in sorted(tally.losses.timed)]


def _servers(tally: RunTally) -> dict[str, Any] | None:
    contributed = sum(worker.steps for worker in tally.ranks)
    mode = tally.started.sync_mode if tally.started else ""
    return tally.servers.summarize(sync_mode=mode, steps=tally.steps, seconds=tally.seconds, contributed=contributed)


def _exact(tally: RunTally) -> bool | None:
    if tally.started is None:
        return None
    # A script that never joined has an arithmetic of its own.
    joined = any(worker.fingerprint for worker in tally.ranks)
    before = tally.resumed is None or not tally.resumed.inexact_sync_mode
    return tally.started.exact and joined and before and all(travel.exact for travel in tally.traffic.values())


def _committed(tally: RunTally) -> dict[str, int]:
    """Steps of this sitting, as they were told, not as they should be: what was lost or seen twice would show here."""
    commits = tally.commits
    return {
        "steps": commits.steps,
        "redone": tally.incident_log.redone,  # under way when somebody was lost
        "repeated": commits.repeated,  # committed, then lost with all who had them
        "unreported": commits.unreported,  # nobody told of them
        "samples_lost": commits.samples_lost,
        "samples_repeated": commits.samples_repeated,
    }


def first_failure(tally: RunTally) -> WorkerFailed | None:
    """The first cause: when one worker fails, the others soon fail for want of it."""
    return min(tally.open_failures, key=lambda failure: failure.time, default=None)


def slowness(workers: Sequence[WorkerTally], *, recent: bool = False) -> dict[int, float]:
    """Rank -> its time per lane over the median of the others'; ranks of which that is not known are left out."""
    seconds = {w.rank: (w.recent.seconds_per_lane if recent else w.seconds_per_lane) or 0.0 for w in workers}
    ratios = {}
    for rank, own in seconds.items():
        others = [each for other, each in seconds.items() if other != rank and each]
        if own and others:
            ratios[rank] = own / statistics.median(others)
    return ratios


def _outcome(tally: RunTally) -> str:
    if tally.outcome:
        return tally.outcome
    if tally.open_failures or not tally.finished:
        return "failed"
    return "stopped" if any(each.stopped and each.resumable for each in tally.finished.values()) else "done"


def _start_up_seconds(tally: RunTally) -> float | None:
    if tally.started is None or tally.training_began is None:
        return None
    return round(max(0.0, tally.training_began - tally.started.time), 6)


def _target(tally: RunTally, text: str | None) -> dict[str, Any] | None:
    reached = tally.target_reached
    if text is None and reached is None:
        return None
    began = tally.training_began or (tally.started.time if tally.started else None)
    return {
        "text": text,
        "reached": reached is not None,
        "step": reached.step if reached else None,
        "seconds": round(max(0.0, reached.time - began), 6) if reached and began is not None else None,
    }


def _step_ms(workers: Sequence[WorkerTally]) -> dict[str, float] | None:
    """Milliseconds of a step by cause, the mean over steps and workers."""
    steps = sum(worker.steps for worker in workers)
    if not steps:
        return None
    spent = sum((worker.time_spent for worker in workers), TimeSpent())
    parts = {part: round(1000 * getattr(spent, part) / steps, 6) for part in TIME_PARTS}
    return {"total": round(sum(parts.values()), 6), **parts}


def _evaluation_ms(tally: RunTally, step_ms: dict[str, float] | None) -> float:
    """Milliseconds of a step's `other` that were evaluations."""
    steps = [worker.steps for worker in tally.ranks if worker.steps]
    if step_ms is None or not steps:
        return 0.0
    together = 1 if tally.is_queue else len(steps)  # all workers do them together; of a queue's, one does
    return round(min(step_ms["other"], 1000 * tally.evaluation_seconds * together / sum(steps)), 6)


def _worker(worker: WorkerTally) -> dict[str, Any]:
    per_lane = worker.seconds_per_lane
    return {
        "rank": worker.rank,
        "incarnation": worker.incarnation,
        "host": worker.host,
        "pid": worker.pid,
        "lanes": list(worker.lanes),
        "steps": worker.steps,
        "step_ms": _step_ms([worker]),
        "lane_ms": _rounded(1000 * per_lane if per_lane is not None else None),
        "peak_memory_bytes": worker.peak_memory,
        "slowest_in_steps": worker.times_slowest,
        "exit_code": worker.exit_code,
    }


def _speedup(tally: RunTally) -> dict[str, Any]:
    """Against one worker that would do every lane itself. It is never run: its step is put together from that of one
    member. Where the members changed, the step is what it was on average, so nothing more is concluded from it."""
    facts: dict[str, Any] = dict.fromkeys(
        ("over_one_worker", "parallel_fraction", "amdahl_limit", "gustafson", "possible", "one_worker_step_ms", "one")
    )
    workers, step_ms = tally.members, _step_ms(tally.ranks)
    if step_ms is None or tally.started is None or not step_ms["total"]:
        return {**facts, "basis": "no step was committed"}
    if _is_sharded(tally):  # a worker's time says nothing of what one would need for the whole model
        return {**facts, "basis": "every worker has a part of the model"}
    if tally.started.sync_mode.startswith("quorum"):  # steps have as many lanes as come in time
        return {**facts, "basis": "a step is closed without whoever is late"}
    if tally.num_workers == 1:
        return {
            **facts,
            "over_one_worker": 1.0,
            "one_worker_step_ms": step_ms["total"],
            "basis": "this is the run of one worker",
        }
    measured = [(worker, worker.seconds_per_lane) for worker in workers if worker.steps]
    one, one_per_lane = next(((each, seconds) for each, seconds in measured if seconds is not None), (None, 0.0))
    if one is None:
        return {**facts, "basis": "no member computed any lanes"}
    facts["one"] = one.rank
    lanes = tally.started.lanes
    other = 0.0 if tally.is_queue else one.time_spent.other  # of a queue's worker: mostly waiting for its turn
    around = (one.time_spent.apply + other) / one.steps
    alone = one_per_lane * lanes + around
    speedup = 1000 * alone / step_ms["total"]
    if tally.is_queue and tally.seconds:  # workers' steps overlap: by the clock
        speedup = alone * tally.steps / tally.seconds
    facts["one_worker_step_ms"] = _rounded(1000 * alone)
    facts["over_one_worker"] = _rounded(speedup)
    basis = f"estimated from worker {one.rank}'s own time per lane"
    if tally.is_queue or any(fault.kind in ("lost", "left", "joined", "server") for fault in tally.incidents):
        return {**facts, "basis": basis}
    per_lane = [worker.seconds_per_lane for worker in workers]
    times = [time for time in per_lane if time]
    if times and len(times) == len(per_lane):
        facts["possible"] = _rounded(alone / (_best_share_seconds(times, lanes) + around))
    parallel = parallel_fraction(speedup, tally.num_workers) if speedup > 0 else None
    if parallel is not None:
        limit = amdahl_limit(parallel)
        facts["parallel_fraction"] = _rounded(parallel)
        facts["amdahl_limit"] = _rounded(limit) if math.isfinite(limit) else None  # None: no limit
        facts["gustafson"] = _rounded(gustafson_speedup(parallel, tally.num_workers))
    return {**facts, "basis": basis}


def _best_share_seconds(seconds_per_lane: Sequence[float], lanes: int) -> float:
    """The longest share if every lane goes to whom it delays least: what these workers could do without waste."""
    shares = [0.0] * len(seconds_per_lane)
    for _ in range(lanes):
        worker = min(range(len(shares)), key=lambda index: shares[index] + seconds_per_lane[index])
        shares[worker] += seconds_per_lane[worker]
    return max(shares)


def _most_gain(tally: RunTally) -> dict[str, Any] | None:
    """The slowest member, and what a step would take if it were like the others with the lanes as they are dealt."""
    workers, step_ms = tally.members, _step_ms(tally.ranks)
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
    return {
        "worker": rank,
        "times_slower": _rounded(slow[rank]),
        "step_ms": _rounded(max(0.0, step_ms["total"] - saved)),
    }


def _tokens_per_second(tally: RunTally) -> float | None:
    tokens = None if tally.started is None else tally.started.tokens
    speed = tally.samples_per_second
    return None if tokens is None or speed is None else _rounded(speed * tokens)


def _waits_for_all(tally: RunTally) -> bool:
    """Whether a step is over when the slowest worker is done."""
    return tally.started is None or tally.started.sync_mode.partition(":")[0] in ("", "sync", "local")


def _is_sharded(tally: RunTally) -> bool:
    """Whether a worker has less than the whole model."""
    return tally.started is not None and any(axis in tally.started.layout for axis in ("pipeline", "tensor"))


def _model_shard(event: ModelShardReported) -> dict[str, Any]:
    """One worker's part of the model, and its memory."""
    value = msgspec.structs.asdict(event)
    keys = {"tensor_shard": "slice", "stage_seconds": "stream_seconds"}
    return {keys.get(name, name): value[name] for name in value if name != "time"}


def _bubble(tally: RunTally) -> dict[str, Any] | None:
    """How much of its workers' time a pipeline waits: one minus what they were busy over what the slowest took."""
    replicas: dict[int, list[ModelShardReported]] = {}
    for each in tally.model_shards.values():
        if each.busy_seconds is not None and each.stage_seconds and each.tensor_shard == 0:
            replicas.setdefault(each.replica, []).append(each)
    shares = [
        1 - sum(each.busy_seconds or 0.0 for each in found) / (len(found) * max(e.stage_seconds or 0.0 for e in found))
        for found in replicas.values()
    ]
    planned = next((found[0].bubble_planned for found in replicas.values()), None)
    return {"measured": _rounded(sum(shares) / len(shares)), "planned": _rounded(planned)} if shares else None


def _lane_cost(tally: RunTally) -> dict[str, Any] | None:
    cost, step_ms = tally.lane_cost, _step_ms(tally.ranks)
    if cost is None:
        return None
    extra = max(0.0, cost.separate_seconds - cost.joint_seconds)
    return {
        "lanes": cost.lanes,
        "separate_seconds": cost.separate_seconds,
        "joint_seconds": cost.joint_seconds,
        "share_of_step": _rounded(1000 * extra / step_ms["total"]) if step_ms and step_ms["total"] else None,
    }


def _traffic(tally: RunTally) -> dict[str, Any] | None:
    """How gradients travelled; bytes and error over all workers, where the run came to its end."""
    # The leader's word, who may have changed; and at the end that of all who came so far.
    final = [each for each in tally.traffic.values() if each.final]
    first = min(final or tally.traffic.values(), key=lambda each: each.rank, default=None)
    if first is None:
        return None
    told = final if tally.steps else []
    crossed = [
        level for level in ("memory", "host", "rack") if any(each.uncompressed_bytes.get(level) for each in told)
    ]
    return {
        "transport": first.transport,
        "reason": first.reason,
        "hosts": list(first.hosts),
        "racks": list(first.racks),
        "exact": first.exact,
        "compressors": first.compressors,
        "unused_levels": list(first.unused_levels),
        "levels": {level: _level(told, level, tally.steps) for level in crossed},
    }


def _level(events: Sequence[TrafficReported], level: str, steps: int) -> dict[str, Any]:
    """What crossed a level, and the error that its compressor made: that between hosts serves racks too."""
    sent, plain = (
        sum(each.sent_bytes.get(level, 0) for each in events),
        sum(each.uncompressed_bytes.get(level, 0) for each in events),
    )
    where = "host" if level == "rack" and "rack" not in events[0].squared_errors else level
    left_out, values = (sum(each.squared_errors.get(where, (0.0, 0.0))[part] for each in events) for part in (0, 1))
    return {
        "bytes": sent,
        "bytes_saved": plain - sent,
        "bytes_per_step": _rounded(sent / steps),
        "compressor": events[0].compressors.get(where),
        # Length of what messages left out over length of what they should have carried.
        "error": math.sqrt(left_out / values) if values else None,
    }


def _failure(tally: RunTally, events: WorkerFailed | None) -> dict[str, Any] | None:
    failed = events or first_failure(tally)
    if failed is not None:
        return {
            "rank": failed.rank,
            "kind": failed.kind,
            "message": failed.message,
            "exit_code": failed.exit_code,
            "step": failed.step,
            "lane": failed.lane,
            "where": failed.where,
            "fix": failed.fix,
            "log": failed.log,
        }
    died = min((each for each in tally.silent_exits), key=lambda each: each.time, default=None)
    if died is None:
        return None
    return {
        "rank": died.rank,
        "kind": "WorkerError",
        "message": exit_text(died.code, guess=True),
        "exit_code": 1,
        "step": None,
        "lane": None,
        "where": [],
        "fix": None,
        "log": None,
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
