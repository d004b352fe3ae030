"""Lines about a run's prediction: in the closing report, and for `--dry-run`."""

from collections.abc import Iterator

from shoal.report import human
from shoal.report.human import Report, Row


def predicted_text(report: Report) -> str:
    found = report.get("prediction") or {}
    step = found.get("step_ms")
    if not step or step["error"] is None:
        return ""
    by = " without evaluation" if found["evaluation_ms"] > 0.01 * step["measured"] else ""
    by += "" if found["named"] else f"; {found['cluster']}"
    return f"    predicted {human.milliseconds(step['predicted'])} ({error_text(step['error'])}{by})"


def error_text(error: float) -> str:
    """The error of a prediction, as a share of the measured value."""
    if round(100 * abs(error)) == 0:
        return "right"
    if error > 1:
        return f"{human.times(1 + error)} too high"
    return f"{human.percent(abs(error))} {'high' if error > 0 else 'low'}"


def prediction_rows(report: Report) -> Iterator[Row]:
    """A table of predicted and measured times, and the cluster and calibration of the prediction."""
    found = report.get("prediction")
    if not found or found["layout"] != report["layout"]:
        return
    if found["reason"]:
        yield "predicted", f"nothing: {found['reason']}"
        return
    if found["step_ms"] is None:
        rates = [human.rate(found["samples_per_second"][side] or 0.0) for side in ("predicted", "measured")]
        yield "predicted", f"{rates[0]} samples/s, and {rates[1]} were measured; cluster: {found['cluster']}"
        return
    lines, measured = found["lines"], found["step_ms"]["measured"]
    if measured is not None:
        digits = human.decimals(measured)
        sides = [
            human.parts_that_add_up({name: line[side] for name, line in lines.items()}, digits)
            for side in ("predicted_ms", "measured_ms")
        ]
        table = [("ms", "predicted", "measured"), ("a step", *(total for total, _ in sides))]
        table += [(name, *(parts[name] for _, parts in sides)) for name in lines]
        for number, cells in enumerate(table):
            yield "" if number else "predicted", f"{cells[0]:<9}  {cells[1]:>9}  {cells[2]:>9}"
        if found["evaluation_ms"] > 0.01 * measured:
            yield "", f"besides: evaluation {human.milliseconds(found['evaluation_ms'])} ms a step"
    memory = found["memory"]
    if memory and memory["error"] is not None:
        sizes = [human.size(memory[f"{side}_bytes"]) for side in ("predicted", "measured")]
        yield "", f"{'memory':<9}  {sizes[0]:>9}  {sizes[1]:>9}  ({error_text(memory['error'])})"
    yield "", f"cluster: {_cluster_text(found)}"


def prediction_lines(prediction: Report, layout: str, why: str) -> list[str]:
    """For `--dry-run`: the reason for the layout, and the prediction."""
    lines = [f"layout {layout}: {why}"] if why else []
    if prediction["reason"]:
        return [*lines, f"predicted: nothing: {prediction['reason']}"]
    ms = {name: 1000 * seconds for name, seconds in prediction["terms"].items()}
    total, parts = human.parts_that_add_up(ms, human.decimals(sum(ms.values())))
    split = " + ".join(f"{name} {part}" for name, part in parts.items() if float(part))
    rate = f"{human.rate(prediction['samples_per_second'])} samples/s"
    return [
        *lines,
        f"predicted: a step of {total} ms = {split}; {rate}",
        f"predicted: a worker's memory at most {human.size(max(prediction['peak_bytes']))}",
        f"predicted for cluster: {_cluster_text(prediction)}",
    ]


def _cluster_text(prediction: Report) -> str:
    calibrated = f", calibrated: {prediction['calibration']}" if prediction["calibration"] else ""
    probe = "" if prediction["named"] else "; shoal cluster probe measures yours"
    return f"{prediction['cluster']}{calibrated}{probe}"
