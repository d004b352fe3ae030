"""What `shoal simulate` prints and draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.planner.cluster import bandwidth_text
from shoal.planner.cost.prediction import TERMS
from shoal.planner.simulate.chrome_trace import KINDS, TimelineRow
from shoal.planner.simulate.failures import CAUSES, FailureOutcome
from shoal.planner.simulate.servers import SimulatedServerRun, SimulatedServers
from shoal.planner.simulate.step import SimulatedStep
from shoal.planner.simulate.stragglers import StragglerModel
from shoal.planner.simulate.time_to_accuracy import ASSUMPTIONS, ConvergenceLaw, TimeToAccuracy

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b", "R": "#e45756", "O": "#b279a2",
           "M": "#9d9da1"}  # fmt: skip
MOST_ROWS = 16  # of the picture in the terminal


# -- in words ---------------------------------------------------------------------------------------------------------


def step_lines(step: SimulatedStep, *, width: int = 100, rows: Sequence[TimelineRow] = ()) -> list[str]:
    terms = " + ".join(f"{name} {seconds(step.terms[name])}" for name in TERMS if step.terms[name] > 1e-9)
    predicted = step.prediction.seconds
    gap = step.seconds / predicted - 1
    setup = step.prediction.setup
    order = f"{step.schedule.name}, " if setup.pipeline > 1 else ""
    lines = [
        f"layout {setup}: {setup.devices:,} devices, {order}{setup.microbatches} microbatch"
        f"{'' if setup.microbatches == 1 else 'es'} of {setup.microbatch}, as {step.runtime} does it",
        f"  a step      {seconds(step.seconds)} = {terms}",
        f"              predicted {seconds(predicted)}, {abs(gap):.1%} {'less' if gap > 0 else 'more'};"
        f" {setup.batch / step.seconds:,.4g} samples/s, {step.flops / 1e12:,.3g} TFLOP/s for each device",
        f"  played      {step.cells} kind{'s' * (step.cells > 1)} of replica for {step.replicas:,};"
        f" gradients go by {step.route}",
        f"  stages busy {_stages(step)}",
    ]
    for number, link in enumerate(step.links):
        each = f"{bandwidth_text(link.bandwidth)} for each device"
        share = f"{link.busy / step.seconds:.1%} of the step in use, {_bytes(link.num_bytes)} sent"
        lines.append(f"  {'links' if not number else '':<11} {link.tier:<7} {each:<30} {share}")
    if rows:
        lines += ["", *picture(rows, width=width), *_legend(rows)]
    return lines


def _stages(step: SimulatedStep) -> str:
    shares = [busy / step.seconds for busy in step.busy]
    if len(shares) == 1:
        return f"{shares[0]:.1%}"
    if len(shares) <= 8:
        return "  ".join(f"{rank}: {share:.0%}" for rank, share in enumerate(shares))
    low, high = int(np.argmin(shares)), int(np.argmax(shares))
    mean = sum(shares) / len(shares)
    return f"{mean:.1%} on average; least stage {low} ({shares[low]:.1%}), most stage {high} ({shares[high]:.1%})"


def picture(rows: Sequence[TimelineRow], *, width: int = 100) -> list[str]:
    """Time to the right, a line for each stage: the letter of what takes most of each column, blank where it waits.
    Where the shortest action would be less than a column, the beginning and the end are shown."""
    compute = [row for row in rows if row.activity == "compute"]
    total = max(each.end for row in compute for each in row.slices)
    shortest = min(each.end - each.start for row in compute for each in row.slices if each.kind in "FBIW")
    margin = len(f"stage {compute[-1].stage}") + 2
    columns = max(12, width - margin)
    lines = []
    for row in _some(compute):
        if row is None:
            lines.append("…")
            continue
        if total / shortest <= columns:
            drawn = _letters(row, 0.0, total, columns)
        else:
            half = (columns - 3) // 2
            ends = (_letters(row, start, half * shortest, half) for start in (0.0, total - half * shortest))
            drawn = " … ".join(ends)
        lines.append(f"stage {row.stage}".ljust(margin) + drawn.rstrip())
    return lines


def _letters(row: TimelineRow, start: float, length: float, columns: int) -> str:
    filled = [dict[str, float]() for _ in range(columns)]
    for each in row.slices:
        first, last = (each.start - start) / length * columns, (each.end - start) / length * columns
        for column in range(max(0, int(first)), min(columns, int(np.ceil(last)))):
            part = min(last, column + 1) - max(first, column)
            filled[column][each.kind] = filled[column].get(each.kind, 0.0) + part
    return "".join(max(cell, key=lambda kind: cell[kind]) if sum(cell.values()) > 0.5 else " " for cell in filled)


def _some(rows: Sequence[TimelineRow]) -> list[TimelineRow | None]:
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [*rows[: MOST_ROWS // 2], None, *rows[-MOST_ROWS // 2 + 1 :]]


def _legend(rows: Sequence[TimelineRow]) -> list[str]:
    kinds = dict.fromkeys(each.kind for row in rows if row.activity == "compute" for each in row.slices)
    total = max(each.end for row in rows for each in row.slices)
    return [f"{', '.join(f'{kind} {KINDS[kind]}' for kind in kinds)}; {seconds(total)} from begin to end"]


def straggler_lines(step: SimulatedStep, times: np.ndarray, stragglers: StragglerModel, seed: int) -> list[str]:
    mean, late = float(times.mean()), float(np.quantile(times, 0.95))
    return [
        f"stragglers {stragglers}, {len(times)} steps, seed {seed}",
        f"  a step      {seconds(mean)} on average, 5 % take {seconds(late)} or longer;"
        f" {seconds(mean - step.seconds)} ({mean / step.seconds - 1:.1%}) is waiting for the slowest",
    ]


def server_lines(
    setup: SimulatedServers,
    results: Sequence[SimulatedServerRun],
    reached: Sequence[TimeToAccuracy],
    law: ConvergenceLaw,
    *,
    relative: bool,
) -> list[str]:
    """One table: sync against quorum against stale against async."""
    first = reached[0].seconds
    lines = [
        f"parameter servers: {setup.workers} workers, {setup.servers} servers, {_bytes(setup.num_bytes)} each way,"
        f" {bandwidth_text(setup.bandwidth)} a worker,"
        f" {bandwidth_text(setup.pool / setup.servers)} a server",
        f"  {seconds(setup.compute)} of compute, stragglers {setup.stragglers}",
        f"  {'mode':<11}{'updates/s':>10}{'gradients/s':>12}{'useful':>8}{'dropped':>9}{'staleness':>11}"
        f"{'to accuracy':>14}{'against ' + str(results[0].sync_mode):>16}",
    ]
    for each, there in zip(results, reached, strict=True):
        when = "" if relative else seconds(there.seconds)
        lines.append(
            f"  {each.sync_mode!s:<11}{each.updates_per_second:>10.4g}{each.gradients_per_second:>12.4g}"
            f"{each.computing:>8.1%}{each.dropped / max(1, each.dropped + each.gradients):>9.1%}"
            f"{each.mean_staleness:>11.3g}{when:>14}{first / there.seconds:>14.2f} ×"
        )
    assumed = f"least updates {law.min_updates:g}, noise batch {law.noise_batch:g}, staleness penalty {law.penalty:g}"
    lines.append(f"  assumed: {assumed if not relative else 'noise batch as large as the batch (--accuracy sets it)'}")
    return [*lines, *(f"           {line}" for line in ASSUMPTIONS)]


def days_lines(endured: Sequence[FailureOutcome], assumptions: Sequence[str]) -> list[str]:
    """A column for each policy; shares of all time add up to 1."""
    first = endured[0]
    rows: list[tuple[str, list[str]]] = [
        ("goodput", [f"{each.goodput:.2%}" for each in endured]),
        *((f"lost: {cause}", [f"{each.lost[cause] / each.seconds:.2%}" for each in endured]) for cause in CAUSES),
        ("available", [f"{each.availability:.2%}" for each in endured]),
        ("steps", [f"{each.steps:,}" for each in endured]),
        ("restarts of all", [f"{each.restarts:,}" for each in endured]),
        ("a checkpoint", ["never" if np.isinf(each.interval) else f"every {span(each.interval)}" for each in endured]),
    ]
    title = f"{first.seconds / 86400:.4g} days with {first.failures:,} failure{'' if first.failures == 1 else 's'}"
    lines = [f"{title:<34}" + "".join(f"{each.policy.name:>16}" for each in endured)]
    lines += [f"  {name:<32}" + "".join(f"{text:>16}" for text in texts) for name, texts in rows]
    return [*lines, *(f"  {'assumed:' if not n else '        '} {line}" for n, line in enumerate(assumptions))]


# -- as values --------------------------------------------------------------------------------------------------------


def step_value(step: SimulatedStep) -> dict[str, Any]:
    setup = step.prediction.setup
    return {
        "layout": str(setup),
        "devices": setup.devices,
        "runtime": step.runtime,
        "schedule": step.schedule.name,
        "microbatches": setup.microbatches,
        "seconds": step.seconds,
        "terms": dict(step.terms),
        "predicted_seconds": step.prediction.seconds,
        "samples_per_second": setup.batch / step.seconds,
        "flops": step.flops,
        "stages_busy": [busy / step.seconds for busy in step.busy],
        "links": [
            {
                "tier": link.tier,
                "bytes_per_second": link.bandwidth,
                "bytes": link.num_bytes,
                "busy": link.busy / step.seconds,
            }
            for link in step.links
        ],
        "kinds_played": step.cells,
        "replicas": step.replicas,
        "route": step.route,
    }


def straggler_value(times: np.ndarray, stragglers: StragglerModel) -> dict[str, Any]:
    return {
        "distribution": str(stragglers),
        "steps": len(times),
        "mean_seconds": float(times.mean()),
        "p50_seconds": float(np.quantile(times, 0.5)),
        "p95_seconds": float(np.quantile(times, 0.95)),
        "most_seconds": float(times.max()),
    }


def server_value(served: Sequence[SimulatedServerRun], reached: Sequence[TimeToAccuracy]) -> list[dict[str, Any]]:
    return [
        {
            "mode": str(each.sync_mode),
            "updates_per_second": each.updates_per_second,
            "gradients_per_second": each.gradients_per_second,
            "useful": each.computing,
            "dropped": each.dropped,
            "staleness": {str(late): count for late, count in each.staleness.items()},
            "mean_staleness": each.mean_staleness,
            "rounds_ahead": each.ahead,
            "batch": there.batch,
            "updates_needed": there.updates,
            "seconds_to_accuracy": there.seconds,
        }
        for each, there in zip(served, reached, strict=True)
    ]


def days_value(endured: Sequence[FailureOutcome]) -> list[dict[str, Any]]:
    return [
        {
            "policy": each.policy.name,
            "seconds": each.seconds,
            "failures": each.failures,
            "goodput": each.goodput,
            "availability": each.availability,
            "steps": each.steps,
            "restarts": each.restarts,
            "checkpoint_seconds": None if np.isinf(each.interval) else each.interval,
            "lost_seconds": dict(each.lost),
            "useful_seconds": each.useful,
        }
        for each in endured
    ]


# -- as a picture -----------------------------------------------------------------------------------------------------


def save_picture(rows: Sequence[TimelineRow], title: str, path: Path) -> None:
    """The timeline of a step, by matplotlib."""
    from shoal.report import chart

    compute = [row for row in rows if row.activity == "compute"]
    figure = chart.new_figure(width=12.0, height=max(2.5, 0.35 * len(rows) + 1.2))
    axes = figure.subplots()
    total = max(each.end for row in rows for each in row.slices)
    scale, unit = _unit(total)
    labels = []
    for line, row in enumerate(rows):
        labels.append(f"stage {row.stage}" if row.activity == "compute" else row.activity)
        bars: dict[str, list[tuple[float, float]]] = {}
        for each in row.slices:
            bars.setdefault(each.kind, []).append((each.start * scale, (each.end - each.start) * scale))
        for kind, found in bars.items():
            edge = COLOURS[kind] if kind == "M" else "white"  # messages may be thinner than an edge
            axes.broken_barh(found, (line - 0.4, 0.8), facecolors=COLOURS[kind], edgecolor=edge, linewidth=0.3)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit, xlim=(0, total * scale))
    kinds = dict.fromkeys(each.kind for row in (*compute, *rows) for each in row.slices)
    for kind in kinds:
        axes.bar(0, 0, color=COLOURS[kind], label=KINDS[kind])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(kinds), fontsize=7, frameon=False)
    chart.save(figure, path)


def _unit(total: float) -> tuple[float, str]:
    return (1.0, "seconds") if total >= 1 else (1e3, "milliseconds") if total >= 1e-3 else (1e6, "microseconds")


# -- numbers ----------------------------------------------------------------------------------------------------------


def seconds(value: float) -> str:
    size = abs(value)
    if size >= 3600:
        return span(value)
    if size >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.3g} ms" if size >= 1e-3 else f"{value * 1e6:.3g} µs"


def span(value: float) -> str:
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} s"


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
