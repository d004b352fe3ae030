"""What `shoal plan` prints: the best layouts as a table, what does not fit and why; a curve; and the same as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS, StagePrediction
from shoal.planner.search.candidates import EXACT
from shoal.planner.search.cheapest import CheapestPlans, duration_text
from shoal.planner.search.explain import PlanExplanation, percent, seconds_text
from shoal.planner.search.scaling_curve import ScalingCurve
from shoal.planner.search.search import Candidate, PlanRanking, describe, gigabytes_text, memory_share_text
from shoal.report import chart
from shoal.report.human import columns, parts_that_add_up, rate
from shoal.report.scaling_laws import amdahl_limit, usl_peak

MOST_STAGES = 4  # of a pipeline that are shown one by one
RECOMPUTED = {"none": "–", "selective": "attention", "full": "blocks"}


def best_per_layout(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best candidate of each layout, whatever its zero, schedule, microbatch and recomputation."""
    seen: dict[tuple[object, ...], Candidate] = {}
    for each in found:
        setup = each.setup
        seen.setdefault((setup.data, setup.pipeline, setup.tensor, setup.exchange, each.hosts), each)
        if len(seen) == count:
            break
    return list(seen.values())


# -- tables -----------------------------------------------------------------------------------------------------------


def layout_lines(found: Sequence[Candidate], notes: Mapping[int, str]) -> list[str]:
    """One line for each candidate, with its `--layout`. `notes`: by number in the table, why it cannot be run."""
    priced = any(each.cost is not None for each in found)
    job = any(each.setup.lanes is not None for each in found)
    head = ["", "--layout", "schedule", "micro", "recompute", "a step", "samples/s", "a worker needs"]
    head += ["a step costs"] if priced else []
    head += ["arithmetic"] if job else []
    rows = [head]
    for number, each in enumerate(found, start=1):
        setup = each.setup
        row = [str(number), layout_text(each), _schedule(each), str(setup.microbatch), RECOMPUTED[setup.recompute],
               seconds_text(each.seconds), rate(each.rate), memory_share_text(each.peak, each.memory)]  # fmt: skip
        row += [money(each.cost, each.currency)] if priced else []
        row += [each.mark + ("; cannot be run" if number in notes else "")] if job else []
        rows.append(row)
    return columns(rows, right=(0, 3, 5, 6, 7, *((8,) if priced else ())))


def layout_text(candidate: Candidate) -> str:
    setup = candidate.setup
    text = str(setup) + (" sequence" if setup.sequence_parallel else "")
    text += f" --servers {setup.servers} --sync {setup.sync}" if setup.exchange == "servers" else ""
    return text + (f" --shares {candidate.shares}" if candidate.shares and setup.lanes is not None else "")


def _schedule(candidate: Candidate) -> str:
    setup = candidate.setup
    if setup.pipeline == 1:
        return "–"
    return setup.schedule + (f" × {setup.chunks}" if setup.chunks > 1 else "")


def heterogeneous_lines(candidate: Candidate) -> list[str]:
    """How unequal devices share the work."""
    lines = []
    if candidate.shares:
        what = "microbatches" if candidate.setup.lanes is None else "lanes"
        lines.append(f"unequal devices: {what} by replica {candidate.shares}")
    if candidate.stages:
        lines.append(f"unequal devices: stages as large as {', '.join(f'{each:g}' for each in candidate.stages)}")
    return lines


def time_lines(found: Sequence[Candidate]) -> list[str]:
    """Seconds of a step by term; the terms add up to the step."""
    unit, scale = ("s", 1.0) if found[0].seconds >= 10 else ("ms", 1e3)
    rows = [["", *TERMS, f"= {unit} a step"]]
    for number, each in enumerate(found, start=1):
        total = each.seconds * scale
        digits = 0 if total >= 1000 else 1 if total >= 10 else 3
        whole, parts = parts_that_add_up({term: each.terms[term] * scale for term in TERMS}, digits)
        rows.append([str(number), *(parts[term] for term in TERMS), whole])
    return columns(rows, right=range(len(TERMS) + 2))


def memory_lines(stages: Sequence[StagePrediction], limit: float) -> list[str]:
    """Memory of a worker of each stage; of many stages, the first ones and the last."""
    shown = list(range(len(stages)))
    if len(shown) > MOST_STAGES:
        shown = [*shown[: MOST_STAGES - 1], len(stages) - 1]
    unit, scale = ("GB", 1e9) if max(stage.peak for stage in stages) >= 1e9 else ("MB", 1e6)
    rows = [["worker of stage", *MEMORY_PARTS, f"= {unit}", f"of {gigabytes_text(limit)}"]]
    for stage in shown:
        held = stages[stage].memory
        whole, parts = parts_that_add_up({name: held[name] / scale for name in MEMORY_PARTS}, 2 if unit == "GB" else 1)
        used = stages[stage].peak / limit
        rows.append([f"{stage}", *(parts[name] for name in MEMORY_PARTS), whole, percent(used)])
    return columns(rows, right=range(len(MEMORY_PARTS) + 3))


def rejected_lines(ranking: PlanRanking, most: int = 3) -> list[str]:
    """How many candidates were looked at, and which memory binds those that do not fit."""
    lines = [
        f"looked at {len(ranking.setups):,} ways; {len(ranking.rejected):,} do not fit"
        f" in {gigabytes_text(ranking.memory)}"
    ]
    for part, (count, fastest) in list(ranking.rejections().items())[:most]:
        needs = f"{gigabytes_text(fastest.peak)}, {gigabytes_text(fastest.binds_bytes)} of it {part}"
        lines.append(
            f"  {count:,} bound by {part}; the fastest of them would take {seconds_text(fastest.seconds)}:"
            f" {describe(fastest)} needs {needs}"
        )
    if len(ranking.inexact):
        first = ranking.candidate(int(ranking.inexact[0]))
        lines.append(
            f"  set aside: {len(ranking.inexact):,} that train otherwise (workers do not wait for each other);"
            f" the fastest, {layout_text(first)}, takes {seconds_text(first.seconds)}: --inexact ranks them too"
        )
    return lines


def bill_lines(bill: CheapestPlans) -> list[str]:
    """Time and cost of all steps of the best plan."""
    best = bill.chosen[0][0]
    if bill.steps is None or best.cost is None:
        return []
    text = f"{bill.steps:,} steps take {duration_text(best.seconds * bill.steps)} on {best.hosts} of the hosts and cost"
    text += f" {money(best.cost * bill.steps, best.currency)}"
    limit = "" if bill.deadline is None else f"; the deadline is {duration_text(bill.deadline)}"
    return [f"{text}{limit}", f"looked at {bill.looked_at:,} ways on 1, 2, 4, … hosts; of those on {best.hosts}:"]


def money(amount: float | None, currency: str) -> str:
    if amount is None:
        return "?"
    digits = 2 if amount >= 1 else 4 if amount >= 0.01 else 6
    return f"{amount:,.{digits}f} {currency}"


# -- curves -----------------------------------------------------------------------------------------------------------


def curve_lines(curve: ScalingCurve, *, width: int = 78) -> list[str]:
    rows = [["hosts", "devices", "--layout", "a step", "samples/s", "speed-up", "efficiency"]]
    for point in curve.points:
        best = point.candidate
        row = [f"{point.hosts:,}", f"{point.devices:,}", layout_text(best), seconds_text(best.seconds), rate(best.rate)]
        rows.append([*row, f"{point.speedup:.2f} ×", percent(point.efficiency)])
    lines = columns(rows, right=(0, 1, 3, 4, 5, 6))
    lines += [f"{hosts:,} hosts: {reason}" for hosts, reason in curve.missing]
    if curve.fits is None:
        return lines
    for each in charts(curve):
        lines += ["", *chart.text(each, width=width, height=11).splitlines()]
    return [*lines, "", *law_lines(curve)]


def law_lines(curve: ScalingCurve) -> list[str]:
    fits, first = curve.fits, curve.points[0].devices
    assert fits is not None
    limit, peak = amdahl_limit(fits.amdahl), usl_peak(fits.contention, fits.coherence)
    most = "no limit" if limit > 1e4 else f"at most {limit:.3g} × of {first:,} devices"
    turn = "never slower with more" if peak == float("inf") else f"fastest with {peak * first:,.0f} devices"
    errors = _errors(curve)
    laws = {
        "Amdahl": (f"{percent(fits.amdahl, 2)} parallel", most),
        "Gustafson": (f"{percent(fits.gustafson, 2)} parallel", "speed-up that grows without end"),
        "USL": (f"σ {fits.contention:.3g}, κ {fits.coherence:.3g}", turn),
    }
    return columns([[law, *words, errors[law]] for law, words in laws.items()])


def _errors(curve: ScalingCurve) -> dict[str, str]:
    """The largest error of each law."""
    assert curve.fits is not None
    worst: dict[str, float] = {}
    for point in curve.points:
        for law, speedup in curve.fits.speedups(point.devices / curve.points[0].devices).items():
            worst[law] = max(worst.get(law, 0.0), abs(speedup / point.speedup - 1))
    return {law: f"within {percent(error, 1)}" for law, error in worst.items()}


def charts(curve: ScalingCurve) -> tuple[chart.Chart, chart.Chart]:
    """Throughput and efficiency, predicted and fitted by each law."""
    assert curve.fits is not None
    x = [point.devices for point in curve.points]
    times = [each / x[0] for each in x]
    laws = [curve.fits.speedups(each) for each in times]
    lines = {"predicted": [point.candidate.rate for point in curve.points]}
    unit = curve.points[0].candidate.rate
    lines |= {law: [fitted[law] * unit for fitted in laws] for law in laws[0]}
    lines["ideal"] = [each * unit for each in times]
    shares = {name: [y / ideal for y, ideal in zip(line, lines["ideal"], strict=True)] for name, line in lines.items()}
    del shares["ideal"]
    title = "Throughput" + (", batch grows with the devices" if curve.weak else "")
    common: Any = {"x_label": "devices", "x": x, "log_x": True}
    return (
        chart.Chart(title=title, y_label="samples/s", lines=lines, log_y=True, **common),
        chart.Chart(title="Efficiency", y_label="of ideal", lines=shares, **common),
    )


# -- as JSON ----------------------------------------------------------------------------------------------------------


def candidate_value(candidate: Candidate, refused: str | None = None) -> dict[str, Any]:
    value = asdict(candidate) | {
        "layout": str(candidate.setup),
        "samples_per_second": candidate.rate,
        "cost": candidate.cost,
        "exact": candidate.mark == EXACT,
        "refused": refused,
    }
    value["runnable"] = candidate.runnable and refused is None
    return value


def ranking_value(ranking: PlanRanking, shown: Sequence[Candidate], notes: Mapping[int, str]) -> dict[str, Any]:
    return {
        "work": ranking.work.name,
        "batch": ranking.space.batch,
        "devices": ranking.cluster.devices,
        "hosts": len(ranking.cluster.hosts),
        "memory": ranking.memory,
        "looked_at": len(ranking.setups),
        "fit": len(ranking.order),
        "set_aside": len(ranking.inexact),
        "best": [candidate_value(each, notes.get(number)) for number, each in enumerate(shown, start=1)],
        "stages": [
            {"blocks": stage.blocks, "memory": dict(stage.memory)} for stage in ranking.full_prediction(shown[0]).stages
        ],
        "rejected": {
            part: {"count": count, "fastest": candidate_value(fastest)}
            for part, (count, fastest) in ranking.rejections().items()
        },
    }


def bill_value(bill: CheapestPlans) -> dict[str, Any]:
    best = bill.chosen[0][0]
    return {
        "steps": bill.steps,
        "deadline_seconds": bill.deadline,
        "seconds": None if bill.steps is None else best.seconds * bill.steps,
        "cost": None if bill.steps is None or best.cost is None else best.cost * bill.steps,
        "currency": best.currency,
        "hosts": best.hosts,
        "looked_at": bill.looked_at,
    }


def explanation_value(explanation: PlanExplanation) -> dict[str, Any]:
    return {
        "sentences": explanation.sentences,
        "parallel": explanation.parallel,
        "scaled": explanation.scaled,
        "changes": [
            {"name": each.name, "gain": each.gain, "best": candidate_value(each.best)} for each in explanation.changes
        ],
    }


def curve_value(curve: ScalingCurve) -> dict[str, Any]:
    return {
        "weak": curve.weak,
        "points": [
            {
                "hosts": point.hosts,
                "devices": point.devices,
                "samples_per_second": point.candidate.rate,
                "speedup": point.speedup,
                "efficiency": point.efficiency,
                "best": candidate_value(point.candidate),
            }
            for point in curve.points
        ],
        "fits": None if curve.fits is None else asdict(curve.fits),
        "missing": [{"hosts": hosts, "reason": reason} for hosts, reason in curve.missing],
    }
