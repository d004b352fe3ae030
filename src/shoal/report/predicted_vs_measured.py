"""Predicted against measured, line by line, for `report.json`. Pure; both sides add up.

    line        predicted                      measured, as a mean over steps and workers
    compute     compute, recompute, tensor,    compute
                host
    waiting     bubble                         wait, as far as uneven work or a pipeline's idle time explains it
    traffic     data                           merge, and the rest of wait: messages and their latency
    optimizer   optimizer                      apply
    rest        step, and all other terms      data (loading samples) and other (checkpoints, events)

Both sides leave evaluations out. A prediction leaves out loading and checkpoints, which so add to its error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.report.human import rounded

LINES: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute", "recompute", "tensor", "host"),
    "waiting": ("bubble",),
    "traffic": ("data",),
    "optimizer": ("optimizer",),
    "rest": ("step",),
}


def reconcile(
    prediction: Mapping[str, Any] | None, report: Mapping[str, Any], *, overlapping: bool = False
) -> dict[str, Any] | None:
    """`prediction`: prediction.json, `report`: the rest of report.json. Returns None for a run without prediction.
    `overlapping`: workers do different steps at the same time, so only speeds are compared."""
    if prediction is None:
        return None
    facts = {name: prediction.get(name) for name in ("cluster", "named", "calibration", "reason", "layout")}
    seconds = prediction.get("seconds")
    if seconds is None or prediction.get("layout") != report.get("layout"):
        # The prediction of another layout is not comparable.
        return facts | dict.fromkeys(("step_ms", "evaluation_ms", "samples_per_second", "lines", "memory"))
    speeds = _pair(prediction["samples_per_second"], report.get("samples_per_second"))
    if overlapping:
        unknown = dict.fromkeys(("step_ms", "evaluation_ms", "lines", "memory"))
        return facts | unknown | {"samples_per_second": speeds}
    measured, evaluation = report["step_ms"], report.get("evaluation_ms") or 0.0
    return facts | {
        "step_ms": _pair(1000 * seconds, measured and measured["total"] - evaluation),
        "evaluation_ms": evaluation,
        "samples_per_second": speeds,
        "lines": _lines(prediction["terms"], measured, report),
        "memory": _memory(prediction, report),
    }


def _pair(predicted: float, measured: float | None) -> dict[str, float | None]:
    """`error`: of the prediction, as a share of the measured value; negative: too low."""
    error = None if not measured else predicted / measured - 1
    return {"predicted": rounded(predicted), "measured": rounded(measured), "error": rounded(error)}


def _lines(
    terms: Mapping[str, float], step_ms: Mapping[str, float] | None, report: Mapping[str, Any]
) -> dict[str, dict[str, float | None]]:
    predicted = {line: 1000 * sum(terms.get(name, 0.0) for name in names) for line, names in LINES.items()}
    known = {name for names in LINES.values() for name in names}
    predicted["rest"] += 1000 * sum(seconds for name, seconds in terms.items() if name not in known)
    measured: Mapping[str, float | None] = dict.fromkeys(LINES) if step_ms is None else _measured(step_ms, report)
    return {line: {"predicted_ms": rounded(predicted[line]), "measured_ms": rounded(measured[line])} for line in LINES}


def _measured(step_ms: Mapping[str, float], report: Mapping[str, Any]) -> dict[str, float]:
    waiting = min(step_ms["wait"], max(_uneven_ms(report["per_worker"]), _idle_ms(report.get("model_shards") or [])))
    return {
        "compute": step_ms["compute"],
        "waiting": waiting,
        "traffic": step_ms["merge"] + step_ms["wait"] - waiting,
        "optimizer": step_ms["apply"],
        "rest": step_ms["data"] + step_ms["other"] - (report.get("evaluation_ms") or 0.0),
    }


def _uneven_ms(workers: Sequence[Mapping[str, Any]]) -> float:
    """How long workers wait on average for the one with most work."""
    busy = [each["step_ms"]["data"] + each["step_ms"]["compute"] for each in workers if each["step_ms"] is not None]
    return max(busy) - sum(busy) / len(busy) if busy else 0.0


def _idle_ms(model_shards: Sequence[Mapping[str, Any]]) -> float:
    """How long the workers of a pipeline wait for other stages in a typical step."""
    idle = [
        1000 * (each["stage_seconds"] - each["busy_seconds"])
        for each in model_shards
        if each["stage_seconds"] is not None and each["busy_seconds"] is not None
    ]
    return sum(idle) / len(idle) if idle else 0.0


def _memory(prediction: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The largest peak of a worker's memory, and each worker's."""
    measured = {each["rank"]: each["peak_bytes"] for each in report.get("model_shards") or []}
    largest = max(measured.values(), default=None)
    peaks = prediction.get("peak_bytes") or []
    if not peaks:
        return None
    return {
        "predicted_bytes": max(peaks),
        "measured_bytes": largest,
        "error": rounded(max(peaks) / largest - 1) if largest else None,
        "workers": [
            {"rank": rank, "predicted_bytes": peak, "measured_bytes": measured.get(rank)}
            for rank, peak in enumerate(peaks)
        ],
    }
