"""Rows of the closing report about speed: of a step and its parts, of lanes, and of how gradients travel.

The brief ones are for a run that was too short to judge its speed by.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.report import human
from shoal.report.human import Report, Row
from shoal.report.live_view import unused_level_text
from shoal.report.prediction_text import predicted_text

_PARTS_IN_ORDER = ("compute", "merge", "wait", "data", "apply", "other")


def brief_speed(report: Report) -> Iterator[Row]:
    text = _rate(report)
    if text:
        yield "speed", f"{text} on {human.plural(report['workers'], 'worker')}"


def _rate(report: Report) -> str:
    if report["samples_per_second"] is None:
        return ""
    text = f"{human.rate(report['samples_per_second'])} samples/s"
    if report.get("tokens_per_second") is not None:
        text += f", {human.rate(report['tokens_per_second'])} tokens/s"
    return text


def speed(report: Report) -> Iterator[Row]:
    text, speedup = _rate(report), report["speedup"]
    if not text:
        return
    if report["workers"] == 1:
        yield from brief_speed(report)
        return
    if speedup["over_one_worker"] is not None:
        text += f": {human.times(speedup['over_one_worker'])} worker {speedup.get('reference_worker') or 0} alone"
        if speedup["possible"] is not None:
            text += f"; these {report['workers']} workers could give {human.times(speedup['possible'])}"
    yield "speed", text
    parallel = speedup["parallel_fraction"]
    if parallel is not None:
        limit = f"limit {human.times(speedup['amdahl_limit'])}" if speedup["amdahl_limit"] else "law sets no limit"
        gustafson = f"Gustafson at {report['workers']} workers {human.times(speedup['gustafson'])}"
        yield "", f"parallel part {human.percent(parallel)}: Amdahl's {limit}, {gustafson} ({speedup['basis']})"


def step(report: Report) -> Iterator[Row]:
    for label, text in brief_step(report):
        yield label, f"{text}{predicted_text(report)}"


def brief_step(report: Report) -> Iterator[Row]:
    step_ms = report["step_ms"]
    if step_ms is None:
        return
    total, parts = human.parts_that_add_up(
        {part: step_ms[part] for part in _PARTS_IN_ORDER}, human.decimals(step_ms["total"])
    )
    split = " + ".join(f"{name} {ms}" for name, ms in parts.items() if float(ms))
    yield "a step", f"{total} ms = {split}"


def lanes(report: Report) -> Iterator[Row]:
    cost = report["lane_cost"]
    if cost is None or cost["share_of_step"] is None:
        return
    held = human.plural(report["lanes"], "lane")
    separate, joint = (human.milliseconds(1000 * cost[key]) for key in ("separate_seconds", "joint_seconds"))
    share = f"{human.percent(cost['share_of_step'])} of the step"
    compared = f" ({cost['lanes']} one by one {separate} ms, at once {joint} ms)" if cost["lanes"] > 1 else ""
    yield "lanes", f"{held} on {human.plural(report['workers'], 'worker')} cost {share}{compared}"


def brief_gradients(report: Report) -> Iterator[Row]:
    """Gradients that leave the host, or were meant to travel in another way than they did."""
    traffic = report.get("traffic")
    if traffic and (traffic["transport"] not in ("", "shared memory") or traffic["unused_levels"] or traffic["reason"]):
        yield from gradients(report)


def gradients(report: Report) -> Iterator[Row]:
    traffic = report.get("traffic")
    if not traffic:
        return
    direct = {"shared memory": ["through shared memory"], "": ["one worker: they do not travel"]}
    rows = direct.get(traffic["transport"], [])
    if traffic["reason"]:
        rows.append(traffic["reason"])
    if traffic.get("overlapped"):
        rows.append("they leave during the backward pass")
    for level in ("host", "rack"):
        if level in traffic["levels"]:
            rows.append(_level(level, traffic["levels"][level]))
    rows += [unused_level_text(traffic["compressors"][level], level) for level in traffic["unused_levels"]]
    yield from zip(["gradients"] + [""] * len(rows), rows, strict=False)


def _level(level: str, facts: Mapping[str, Any]) -> str:
    text = f"{human.size(facts['bytes_per_step'])} a step between {level}s"
    if not facts["compressor"]:
        return text
    total = facts["bytes"] + facts["bytes_saved"]
    text += f": {facts['compressor']} saved {human.percent(facts['bytes_saved'] / total)} of {human.size(total)}"
    return text if facts["error"] is None else f"{text}, with an error of {100 * facts['error']:.2g} %"


def most_gain(report: Report) -> Iterator[Row]:
    gain = report["most_gain"]
    if gain is None:
        return
    rest = "worker 0" if report["workers"] == 2 and gain["worker"] == 1 else "the rest"
    slower = f"worker {gain['worker']} is {human.times(gain['times_slower'])} slower than {rest}"
    yield "most gain", f"{slower}; one like the others would make a step {human.milliseconds(gain['step_ms'])} ms"
