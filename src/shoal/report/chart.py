"""Line charts, drawn as text in the terminal or as a picture (SVG, PNG, PDF) by matplotlib."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.errors import InputError

PICTURES = (".svg", ".png", ".pdf")
MARKERS = "●○◆◇▲△■□"
BETWEEN = "·"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines with the same x; None where a line has no value."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]  # the main one first
    log_x: bool = False
    log_y: bool = False  # else y begins at 0
    ticks: Sequence[float] = ()  # of the x axis; empty: at every x
    points: bool = True  # a mark at every value of a picture


# -- in the terminal --------------------------------------------------------------------------------------------------


def text(chart: Chart, *, width: int = 72, height: int = 14) -> str:
    """A grid with a marker at each value. The first line is joined by dots, and its markers are on top.

    speed-up
      4 ┤      ◆
        │  ·●
      1 ┤●○
        └┴──┴──┴
         1  2  4   hosts
    """
    across, up = (math.log if logarithmic else float for logarithmic in (chart.log_x, chart.log_y))
    values = [value for line in chart.lines.values() for value in line if value is not None]
    if not values or (chart.log_y and min(values) <= 0) or (chart.log_x and min(chart.x) <= 0):
        raise ValueError("a chart needs values, above 0 where it is logarithmic")
    low, high = min([*values, *([] if chart.log_y else [0.0])]), max(values)
    middle = math.sqrt(low * high) if chart.log_y else (low + high) / 2
    labels = {0: number(high), height // 2: number(middle), height - 1: number(low)}
    margin = max(map(len, labels.values())) + 1
    columns = max(8, width - margin - 2)

    def column(x: float) -> int:
        return _place(across(x), across(min(chart.x)), across(max(chart.x)), columns)

    def row(value: float) -> int:
        return height - 1 - _place(up(value), up(low), up(high), height)

    grid = [[" "] * columns for _ in range(height)]
    first = [
        (column(x), row(y)) for x, y in zip(chart.x, next(iter(chart.lines.values())), strict=True) if y is not None
    ]
    for (left, top), (right, bottom) in pairwise(first):
        for at in range(left, right + 1):
            share = (at - left) / max(1, right - left)
            grid[round(top + share * (bottom - top))][at] = BETWEEN
    marked = list(zip(MARKERS, chart.lines.items(), strict=False))
    for marker, (_, line) in reversed(marked):
        for x, y in zip(chart.x, line, strict=True):
            if y is not None:
                grid[row(y)][column(x)] = marker
    drawn = [
        f"{labels.get(n, ''):>{margin}} {'┤' if n in labels else '│'}{''.join(line)}" for n, line in enumerate(grid)
    ]
    legend = f"{'':{margin + 2}}" + "   ".join(f"{marker} {name}" for marker, (name, _) in marked)
    lines = (chart.title, chart.y_label, *drawn, *_axis(chart, column, margin, columns), legend)
    return "\n".join(line.rstrip() for line in lines)


def _axis(chart: Chart, column: Any, margin: int, columns: int) -> list[str]:
    ticks, words = ["─"] * columns, [" "] * (columns + 12)
    free = 0
    for x in chart.ticks or chart.x:
        at = column(x)
        ticks[at] = "┴"
        word = number(x)
        if at >= free:
            words[at : at + len(word)] = word
            free = at + len(word) + 1
    return [f"{'':{margin}} └{''.join(ticks)}", f"{'':{margin + 2}}{''.join(words).rstrip()}   {chart.x_label}"]


def _place(value: float, low: float, high: float, cells: int) -> int:
    return 0 if high <= low else round((value - low) / (high - low) * (cells - 1))


def round_ticks(most: float, wanted: int = 8) -> list[float]:
    """Ticks from 0 to the largest value, in steps of 1, 2 or 5 times a power of ten."""
    if not most > 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(most / wanted))
    step = next(unit * factor for factor in (1, 2, 5, 10) if most / (unit * factor) <= wanted)
    return [step * number for number in range(int(most / step + 1e-9) + 1)]


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


# -- as a picture -----------------------------------------------------------------------------------------------------


def new_figure(width: float = 8.0, height: float = 5.0) -> Any:
    """A matplotlib figure without a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("a picture needs matplotlib, which is missing", fix="pip install 'shoal[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def draw(chart: Chart, axes: Any) -> None:
    """Draws the lines on matplotlib's axes."""
    styles = ["-o", "--", ":", "-."]
    for n, (name, line) in enumerate(chart.lines.items()):
        points = [(x, y) for x, y in zip(chart.x, line, strict=True) if y is not None]
        style = styles[0] if n == 0 else styles[1 + (n - 1) % (len(styles) - 1)]
        style = style if chart.points else "-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=name, zorder=3 if n == 0 else 2)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    marks = list(chart.ticks or chart.x)
    axes.set_xticks(marks, [number(x) for x in marks])
    axes.minorticks_off()
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    axes.legend()


def check_picture(path: Path) -> None:
    """Raises if no picture can be written to this path. To be called before long computations."""
    if path.suffix.lower() not in PICTURES:
        raise InputError(f"a picture is {', '.join(PICTURES)}, not {path.name}", fix=f"{path.stem or 'curve'}.svg")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}", fix=f"mkdir -p {path.parent}")
    new_figure()


def save(figure: Any, path: Path) -> None:
    """Writes the figure. The same figure gives the same file: no dates, no random names."""
    import matplotlib

    check_picture(path)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    try:
        with matplotlib.rc_context({"svg.hashsalt": "shoal"}):
            figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", fix="another path") from None


def save_charts(charts: Sequence[Chart], path: Path) -> None:
    """Writes the charts side by side into one picture."""
    figure = new_figure(width=6.0 * len(charts), height=4.5)
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        draw(chart, axes)
    save(figure, path)
