"""The contents of `report.json`, computed from a tally. Pure; used by the driver at the end."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.report.aggregate import RunTally, WorkerTally
from shoal.report.events import Event, ModelShardReported, TrafficReported, WorkerFailed
from shoal.report.human import rounded
from shoal.report.predicted_vs_measured import reconcile
from shoal.report.speedup import estimate_speedup, mean_step_ms, most_gain
from shoal.report.wording import exit_text


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
    """`outcome` and `failure` override those of the events; `prediction`: prediction.json."""
    outcome = outcome or _outcome(tally)
    value = _results(tally, outcome, target) | _speed(tally) | _history(tally)
    value |= {
        "failure": _failure(tally, failure) if outcome == "failed" else None,
        "resumed_from": tally.resumed.step if tally.resumed else None,
        "fingerprint": next((worker.fingerprint for worker in tally.ranks if worker.fingerprint), None),
        "folder": folder,
        "files": ["report.json", *(name for name in files if name != "report.json")] if folder else list(files),
    }
    return value | {"prediction": reconcile(prediction, value, overlapping=tally.is_queue)}


def _results(tally: RunTally, outcome: str, target: str | None) -> dict[str, Any]:
    started = tally.started
    lowest = min(tally.finished.values(), key=lambda each: (not each.weights_sha256, each.rank), default=None)
    return {
        "run": started.run if started else None,
        "job": started.job if started else None,
        "command": started.command if started else None,
        "arguments": list(started.arguments) if started else [],
        "settings": list(started.settings) if started else [],
        "outcome": outcome,
        "stopped": lowest.stopped if lowest else None,
        "exact": _exact(tally),
        "changes": tally.resumed.changes if tally.resumed else [],
        "inexact_sync_mode": (tally.resumed.inexact_sync_mode if tally.resumed else "") or None,
        "weights_sha256": lowest.weights_sha256 if lowest else None,
        "steps": tally.step,
        "steps_planned": started.steps if started else None,
        "samples": lowest.samples if lowest else tally.samples,
        "seconds": round(tally.seconds, 6),
        "start_up_seconds": _start_up_seconds(tally),
        "ended": tally.last_time,
        "final_loss": lowest.final_loss if lowest and not tally.is_queue else tally.loss,
        "final_losses": dict(tally.pass_losses),
        "metrics": dict(lowest.metrics if lowest and lowest.metrics and not tally.is_queue else tally.metrics),
        "target": _target(tally, target),
        "logged": dict(tally.logged),
        "best": _best(tally),
        "workers": tally.num_workers,
        "lanes": started.lanes if started else None,
        "layout": started.layout if started else None,
        "layout_reason": (started.layout_reason or None) if started else None,
        "assignment": [list(worker.lanes) for worker in tally.members],
        "notes": tally.notes,
    }


def _speed(tally: RunTally) -> dict[str, Any]:
    step_ms = mean_step_ms(tally.ranks)
    return {
        "samples_per_second": rounded(tally.samples_per_second),
        "tokens_per_second": _tokens_per_second(tally),
        "step_ms": step_ms,
        "evaluation_ms": _evaluation_ms(tally, step_ms),
        "per_worker": [_worker(worker) for worker in tally.ranks],
        "speedup": estimate_speedup(tally),
        "most_gain": most_gain(tally),
        "lane_cost": _lane_cost(tally),
        "bubble": _bubble(tally),
        "model_shards": [_fields(each) for _, each in sorted(tally.model_shards.items())],
    }


def _history(tally: RunTally) -> dict[str, Any]:
    return {
        "alive": tally.num_alive,
        "participating": tally.num_participating,
        "participation": rounded(tally.participation),
        "goodput": rounded(tally.commits.goodput),
        "lost_seconds": rounded(tally.commits.lost_seconds),
        "committed": _committed(tally),
        "incidents": msgspec.to_builtins(tally.incidents),
        "membership": msgspec.to_builtins(tally.membership.spans) if tally.incidents else [],
        "training_began": tally.training_began,
        "losses_by_time": _losses(tally),
        "servers": _servers(tally),
        "traffic": _traffic(tally),
        "checkpoints": [_fields(each) for each in tally.saved],
        "checkpoints_failed": [_fields(each) for each in tally.save_failed],
        "loggers_failed": [_fields(each) for each in tally.logger_failures],
        "assignments": [
            {"step": each.step, "assignment": [list(lanes) for lanes in each.assignment], "reason": each.reason}
            for each in tally.assignments
        ],
        "skipped_steps": [{"step": each.step, "where": [list(at) for at in each.where]} for each in tally.skipped],
        "loss_scale": None
        if tally.loss_scale is None
        else {"scale": tally.loss_scale.scale, "skipped": tally.loss_scale.skipped},
    }


def _fields(event: Event) -> dict[str, Any]:
    value = msgspec.structs.asdict(event)
    return {name: value[name] for name in value if name != "time"}


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
    joined = any(worker.fingerprint for worker in tally.ranks)  # a script that never joined is not exact
    before = tally.resumed is None or not tally.resumed.inexact_sync_mode
    return tally.started.exact and joined and before and all(traffic.exact for traffic in tally.traffic.values())


def _committed(tally: RunTally) -> dict[str, int]:
    """Steps since the run started or resumed, as workers reported them."""
    commits = tally.commits
    return {
        "steps": commits.steps,
        "redone": tally.incident_log.redone,  # under way when a worker was lost
        "repeated": commits.repeated,  # committed, then lost with all workers that had them
        "unreported": commits.unreported,
        "samples_lost": commits.samples_lost,
        "samples_repeated": commits.samples_repeated,
    }


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


def _best(tally: RunTally) -> dict[str, Any] | None:
    """The best evaluation, and the checkpoint that was kept for it; None: it is not in place."""
    if tally.best is None:
        return None
    best = tally.best
    path = next((each.path for each in tally.saved if each.step == best.step), best.path) or None
    return {"metric": best.metric, "value": best.value, "step": best.step, "checkpoint": path}


def _evaluation_ms(tally: RunTally, step_ms: dict[str, float] | None) -> float:
    """Milliseconds of a step's `other` that were evaluations."""
    steps = [worker.steps for worker in tally.ranks if worker.steps]
    if step_ms is None or not steps:
        return 0.0
    together = 1 if tally.is_queue else len(steps)  # workers evaluate together; in a queue, one does
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
        "step_ms": mean_step_ms([worker]),
        "lane_ms": rounded(1000 * per_lane if per_lane is not None else None),
        "peak_memory_bytes": worker.peak_memory,
        "slowest_in_steps": worker.times_slowest,
        "exit_code": worker.exit_code,
    }


def _tokens_per_second(tally: RunTally) -> float | None:
    tokens = None if tally.started is None else tally.started.tokens
    speed = tally.samples_per_second
    return None if tokens is None or speed is None else rounded(speed * tokens)


def _bubble(tally: RunTally) -> dict[str, Any] | None:
    """The share of the workers' time that a pipeline waits: one minus busy time over the slowest stage's time."""
    replicas: dict[int, list[ModelShardReported]] = {}
    for each in tally.model_shards.values():
        if each.busy_seconds is not None and each.stage_seconds and each.tensor_shard == 0:
            replicas.setdefault(each.replica, []).append(each)
    shares = [
        1 - sum(each.busy_seconds or 0.0 for each in found) / (len(found) * max(e.stage_seconds or 0.0 for e in found))
        for found in replicas.values()
    ]
    planned = next((found[0].bubble_planned for found in replicas.values()), None)
    return {"measured": rounded(sum(shares) / len(shares)), "planned": rounded(planned)} if shares else None


def _lane_cost(tally: RunTally) -> dict[str, Any] | None:
    cost, step_ms = tally.lane_cost, mean_step_ms(tally.ranks)
    if cost is None:
        return None
    extra = max(0.0, cost.separate_seconds - cost.joint_seconds)
    return {
        "lanes": cost.lanes,
        "separate_seconds": cost.separate_seconds,
        "joint_seconds": cost.joint_seconds,
        "share_of_step": rounded(1000 * extra / step_ms["total"]) if step_ms and step_ms["total"] else None,
    }


def _traffic(tally: RunTally) -> dict[str, Any] | None:
    """How gradients travelled; bytes and error are sums over the workers that reached the end."""
    final = [each for each in tally.traffic.values() if each.final]
    first = min(final or tally.traffic.values(), key=lambda each: each.rank, default=None)
    if first is None:
        return None
    counted = final if tally.steps else []
    levels = [
        level for level in ("memory", "host", "rack") if any(each.uncompressed_bytes.get(level) for each in counted)
    ]
    return {
        "transport": first.transport,
        "reason": first.reason,
        "hosts": list(first.hosts),
        "racks": list(first.racks),
        "exact": first.exact,
        "compressors": first.compressors,
        "unused_levels": list(first.unused_levels),
        "overlapped": first.overlapped,
        "levels": {level: _level(counted, level, tally.steps) for level in levels},
        "network": _network(counted),
    }


def _network(events: Sequence[TrafficReported]) -> dict[str, dict[str, int]]:
    """Messages and bytes of all kinds through sockets between hosts, over all workers, by level."""
    found: dict[str, Counter[str]] = {}
    for event in events:
        for level, counts in event.network.items():
            found.setdefault(level, Counter()).update(counts)
    return {level: dict(counts) for level, counts in found.items()}


def _level(events: Sequence[TrafficReported], level: str, steps: int) -> dict[str, Any]:
    """Bytes that crossed a level, and its compressor's error; without one for racks, that for hosts."""
    sent = sum(each.sent_bytes.get(level, 0) for each in events)
    plain = sum(each.uncompressed_bytes.get(level, 0) for each in events)
    where = "host" if level == "rack" and "rack" not in events[0].squared_errors else level
    left_out, values = (sum(each.squared_errors.get(where, (0.0, 0.0))[part] for each in events) for part in (0, 1))
    return {
        "bytes": sent,
        "bytes_saved": plain - sent,
        "bytes_per_step": rounded(sent / steps),
        "compressor": events[0].compressors.get(where),
        "error": math.sqrt(left_out / values) if values else None,  # of norms: what messages left out over the gradient
    }


def _failure(tally: RunTally, failed: WorkerFailed | None) -> dict[str, Any] | None:
    # The first failure is the likely cause of the later ones.
    failed = failed or min(tally.open_failures, key=lambda failure: failure.time, default=None)
    died = min(tally.silent_exits, key=lambda each: each.time, default=None)
    if failed is None and died is not None:
        message = exit_text(died.code, guess=True)
        failed = WorkerFailed(time=died.time, rank=died.rank, kind="WorkerError", message=message)
    return None if failed is None else _fields(failed)
