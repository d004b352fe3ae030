"""What `shoal compare` prints and draws."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.report import human
from shoal.report.chart import Chart, round_ticks
from shoal.report.chart import text as chart_text
from shoal.report.compare_runs import ComparedRun, LossPoint, best, labels
from shoal.report.live_view import metric_label

DRAWN = 60  # values of a line in a chart: more would be noise

Cell = Callable[[ComparedRun], str]


def value(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """For `--json`."""
    found = best(runs)
    winner, why = found if found is not None else (None, "")
    return {
        "runs": [msgspec.to_builtins(run) | {"label": label} for run, label in zip(runs, labels(runs), strict=True)],
        "best": None if winner is None else {"run": winner.run, "folder": winner.folder, "why": why},
    }


def table(runs: Sequence[ComparedRun]) -> Table:
    """A line for each run; empty columns are left out."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    names = dict(zip((run.folder for run in runs), labels(runs), strict=True))
    columns: list[tuple[str, Cell]] = [
        ("", lambda run: names[run.folder]),
        ("run", lambda run: run.run),
        ("job", lambda run: run.job if len({each.job for each in runs}) > 1 else ""),
        ("workers", lambda run: str(run.workers) if len({each.workers for each in runs}) > 1 else ""),
        ("outcome", lambda run: run.outcome if any(each.outcome != "done" for each in runs) else ""),
        ("steps", lambda run: f"{run.steps:,}"),
        ("seconds", lambda run: f"{run.seconds:,.1f}" if run.seconds >= 1 else f"{run.seconds:.2f}"),
        ("updates/s", lambda run: _rate(run.updates_per_second)),
        ("samples/s", lambda run: _rate(run.samples_per_second)),
        ("loss", lambda run: human.value(run.loss) if run.steps else ""),
        *_metric_columns(runs),
        (_target(runs), _to_target),
        ("staleness", _staleness),
        ("refused", _refused),
        ("exact", lambda run: {True: "yes", False: "no", None: ""}[run.exact]),
    ]
    for heading, cell in columns:
        if any(cell(run) for run in runs):
            left = heading in ("", "run", "job", "outcome", "exact")
            made.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for run in runs:
        made.add_row(*(Text(cell(run)) for _, cell in columns if any(cell(each) for each in runs)))
    return made


def text(runs: Sequence[ComparedRun], *, width: int) -> str:
    """Table, both charts, and the run that did best."""
    console = Console(width=max(width, 160), no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table(runs))
    parts = ["\n".join(line.rstrip() for line in captured.get().rstrip().split("\n"))]
    parts += [chart_text(chart, width=min(width, 100)) for chart in charts(runs)]
    jobs = sorted({run.job for run in runs})
    if len(jobs) > 1:
        names = ", ".join(jobs)
        parts.append(f"these are runs of different jobs ({names}): their losses and speeds are hard to compare")
    found = best(runs)
    if found is not None:
        parts.append(found[1])
    return "\n\n".join(parts)


def charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Loss against time, and against steps; none where no losses are known."""
    drawn = [(label, run) for run, label in zip(runs, labels(runs), strict=True) if run.loss_curve]
    if not drawn:
        return []
    by_time = {label: [(point.seconds, point.loss) for point in run.loss_curve] for label, run in drawn}
    by_step = {label: _by_step(run.loss_curve) for label, run in drawn}
    return [_chart("Loss against time", "seconds", by_time), _chart("Loss against steps", "steps", by_step)]


def _by_step(curve: Sequence[LossPoint]) -> list[tuple[float, float]]:
    return sorted((float(point.step), point.loss) for point in curve)


def _chart(title: str, x_label: str, lines: dict[str, list[tuple[float, float]]]) -> Chart:
    most = max(x for line in lines.values() for x, _ in line)
    thin = {label: dict(thinned(line, most)) for label, line in lines.items()}
    x = sorted({0.0, *(each for line in thin.values() for each in line)})
    return Chart(
        title=title,
        x_label=x_label,
        y_label="loss",
        x=x,
        lines={label: [line.get(each) for each in x] for label, line in thin.items()},
        ticks=round_ticks(most),
        points=False,
    )


def thinned(line: Sequence[tuple[float, float]], most: float, number: int = DRAWN) -> list[tuple[float, float]]:
    """Means over equal stretches of x up to `most`."""
    cells: dict[int, list[tuple[float, float]]] = {}
    for x, y in line:
        cells.setdefault(min(number - 1, int(number * x / most)) if most else 0, []).append((x, y))
    ordered = [cells[number] for number in sorted(cells)]
    return [(sum(x for x, _ in cell) / len(cell), sum(y for _, y in cell) / len(cell)) for cell in ordered]


def _metric_columns(runs: Sequence[ComparedRun]) -> list[tuple[str, Cell]]:
    """The metric that the target is about, else the first that is no loss, else the first."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    aims = [name for run in runs for name in names if (run.target or "").startswith(name)]
    chosen = next(iter([*aims, *(name for name in names if "loss" not in name), *names]), None)
    if chosen is None:
        return []
    name = chosen
    return [(metric_label(name), lambda run: human.value(run.metrics[name]) if name in run.metrics else "")]


def _target(runs: Sequence[ComparedRun]) -> str:
    texts = {run.target for run in runs if run.target}
    return f"to {next(iter(texts))}" if len(texts) == 1 else "to target"


def _to_target(run: ComparedRun) -> str:
    if run.target_seconds is not None:
        return human.duration(run.target_seconds)
    return "not reached" if run.target else ""


def _staleness(run: ComparedRun) -> str:
    return "" if run.staleness is None else f"{run.staleness:.2f}, at most {run.staleness_max}"


def _refused(run: ComparedRun) -> str:
    if not run.refused:
        return ""
    return f"{run.refused:,}" if run.refused_share is None else f"{run.refused:,} ({100 * run.refused_share:.1f} %)"


def _rate(number: float | None) -> str:
    return "" if number is None else human.rate(number)
