"""The table that `shoal runs` prints."""

import time
from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal.report import human
from shoal.report.live_view import metric_label
from shoal.report.run_folder import RunLine

OUTCOME_MARKS = {"done": ("✔", "bold green"), "stopped": ("■", "bold yellow"), "failed": ("✘", "bold red")}


def runs_table(lines: Iterable[RunLine]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "job", "workers", "outcome", "steps", "loss", "measured", "when"):
        right, whole = name in ("workers", "steps", "loss"), name not in ("run", "job", "measured")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=whole)
    for line in lines:
        table.add_row(
            Text(line.path if line.elsewhere else line.id),
            Text(line.job),
            "?" if line.workers is None else str(line.workers),
            Text(line.outcome, style=OUTCOME_MARKS.get(line.outcome, ("", "dim"))[1]),
            f"{line.steps:,}",
            human.value(line.loss) if line.loss is not None else "",
            Text("  ".join(f"{metric_label(name)} {human.value(number)}" for name, number in line.metrics.items())),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(line.when)),
        )
    return table
