"""Draws the members of a run over time, one row per worker. Pure; for the closing report.

worker   0:00                                  2:44
0        ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
3        ━━━━━━━━━━━✗╌╌▶━━━━━━━━━━━━━━━━━━━━━━━━━━━
━ takes part  ╌ alive  ✗ died  ▶ joined
"""

from collections.abc import Sequence

from shoal.report import human
from shoal.report.incidents import Incident
from shoal.report.participation import ALIVE, PARTICIPATING, ParticipationSpan, participation_span

# meaning: sign, and its ASCII form
SIGNS = {
    "takes part": ("━", "="),
    "alive": ("╌", "-"),
    "died": ("✗", "x"),
    "silent": ("◌", "?"),
    "joined": ("▶", ">"),
    "left": ("◀", "<"),
}
MOST_ROWS = 16
WIDEST, NARROWEST = 72, 12


def draw(
    spans: Sequence[ParticipationSpan],
    incidents: Sequence[Incident],
    *,
    began: float,
    ended: float,
    width: int,
    ascii_only: bool = False,
) -> list[str]:
    """A row for each worker, or where they are many, for each with an incident. Empty without incidents."""
    marks = [mark for incident in incidents for mark in _marks(incident)]
    changed = {worker for worker, _, _ in marks}
    period = participation_span(spans, began, ended)
    if not changed or period is None:
        return []
    began, ended = period
    workers = sorted({each.worker for each in spans})
    shown = workers if len(workers) <= MOST_ROWS else [each for each in workers if each in changed][:MOST_ROWS]
    names = max(len("worker"), *(len(str(each)) for each in shown))
    cells = max(NARROWEST, min(WIDEST, width - names - 2))
    last = human.duration(ended - began)
    lines = [f"{'worker':<{names}}  {'0:00':<{max(0, cells - len(last))}}{last}"]
    used: set[str] = set()
    for worker in shown:
        row = _row(
            [each for each in spans if each.worker == worker],
            [(when, what) for whose, when, what in marks if whose == worker],
            began=began,
            ended=ended,
            cells=cells,
        )
        used |= set(row)
        lines.append(f"{worker:<{names}}  {''.join(_sign(what, ascii_only) for what in row)}".rstrip())
    legend = [f"{_sign(what, ascii_only)} {what}" for what in SIGNS if what in used]
    rest = len(workers) - len(shown)
    if rest:
        more = any(each in changed for each in workers if each not in shown)
        legend.append(f"and {rest} more" if more else f"and {rest} more that took part all the time")
    return [*lines, "  ".join(legend)]


def _row(
    spans: Sequence[ParticipationSpan], marks: Sequence[tuple[float, str]], *, began: float, ended: float, cells: int
) -> list[str]:
    def cell(when: float) -> int:
        return max(0, min(cells - 1, int(cells * (when - began) / (ended - began))))

    row = [""] * cells
    for state, what in ((ALIVE, "alive"), (PARTICIPATING, "takes part")):
        for each in spans:
            if each.state == state and each.start <= ended and (each.end is None or each.end >= began):
                first, past = cell(each.start), cells if each.end is None else cell(each.end) + 1
                row[first:past] = [what] * (past - first)
    for when, what in sorted(marks):
        if began <= when <= ended:
            at = cell(when)
            # A second mark goes beside the first.
            row[at if row[at] in ("", "alive", "takes part") else min(at + 1, cells - 1)] = what
    return row


def _marks(incident: Incident) -> list[tuple[int, float, str]]:
    if incident.worker is None or incident.kind not in ("lost", "left", "joined"):
        return []
    if incident.kind == "joined":
        return [] if incident.committed_at is None else [(incident.worker, incident.committed_at, "joined")]
    what = "left" if incident.kind == "left" else "silent" if incident.code is None or incident.unresponsive else "died"
    marks = [(incident.worker, incident.time, what)]
    if incident.rejoin_seconds is not None:
        marks.append((incident.worker, incident.time + incident.rejoin_seconds, "joined"))
    return marks


def _sign(what: str, ascii_only: bool) -> str:
    return SIGNS[what][ascii_only] if what else " "
