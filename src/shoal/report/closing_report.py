"""The closing report, from `report.json` alone: `shoal report RUN` prints what the run printed at its end, and more.

At the end of a run of seconds only what holds for it is printed: the result and how to check it. Speed-up, its laws and
predictions are noise there; `-v` and `shoal report` have them.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from shoal.report import human, servers_text, speed_rows
from shoal.report.human import Report, Row
from shoal.report.incident_rows import incident_rows, read_incidents
from shoal.report.live_view import metric_label
from shoal.report.participation import ParticipationSpan
from shoal.report.prediction_text import prediction_rows
from shoal.report.run_folder import DEFAULT_ROOT
from shoal.report.runs_table import OUTCOME_MARKS
from shoal.report.timeline import draw
from shoal.report.worker_output import clean

_SPELLED = {"×": "x", "…": "...", "–": "-", "µ": "u", "✔": "ok", "✘": "failed", "■": "stopped"}
RowMaker = Callable[[Report], Iterable[Row]]
MEMBERS = "members"  # the row that is a drawing
SHARDS_SHOWN = 16
BRIEF_SECONDS, BRIEF_STEPS = 60.0, 100  # below either, a run is too short to judge its speed by
LOGGED_SHOWN = 12


class ClosingReport:
    """Rows of a label and a text that wraps beside it, for the width and the encoding of the console. `details`: all
    that was measured, also of a short run."""

    def __init__(self, report: Report, *, details: bool = False) -> None:
        self._report, self._details = report, details

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _encodable(_title(self._report), options)
        found = rows(self._report, details=self._details)
        label_width = max([9, *(len(label) for label, _ in found)])
        room = max(20, options.max_width - label_width - 5)
        for label, text in found:
            if label == MEMBERS:
                lines = [Text(line) for line in _timeline(self._report, room, not console.is_terminal)]
            else:
                lines = list(Text(clean(text)).wrap(console, room, overflow="fold"))
            for line in lines:
                line.rstrip()
                row = Text.assemble((f"  {label:<{label_width}}   ", "dim"), line)
                yield _encodable(row, options)
                label = ""


def _encodable(line: Text, options: ConsoleOptions) -> Text:
    if not options.ascii_only:
        return line
    plain = line.plain
    for sign, spelled in _SPELLED.items():
        plain = plain.replace(sign, spelled)
    return Text(plain.encode("ascii", "replace").decode())


def rows(report: Report, *, details: bool = False) -> list[Row]:
    """`details` adds predicted and measured times, the histogram of staleness and a row per server, and to the rows of
    a short run those of a long one."""
    first: tuple[RowMaker, ...] = (_failure, _weights, _results, _loss_scale, _notes, _layout)
    last: tuple[RowMaker, ...] = (incident_rows, _members, speed_rows.most_gain, _files, _next)
    middle: tuple[RowMaker, ...] = (speed_rows.speed, speed_rows.step, speed_rows.lanes, _model_shards)
    middle += (speed_rows.gradients, servers_text.servers)
    if details:
        middle += (servers_text.staleness, servers_text.server_rows, prediction_rows)
    elif is_brief(report):
        middle = (speed_rows.brief_speed, speed_rows.brief_step, _model_shards)
        middle += (speed_rows.brief_gradients, servers_text.servers)
        last = (incident_rows, _members, _files, _more, _next)
    parts = (*first, *middle, *last)
    return [row for part in parts for row in part(report)]


def is_brief(report: Report) -> bool:
    """Whether the run was too short to judge its speed by."""
    return bool(report["seconds"] < BRIEF_SECONDS or report["steps"] < BRIEF_STEPS)


def _loss_scale(report: Report) -> Iterator[Row]:
    found = report.get("loss_scale")
    if found is not None:
        skipped = f"{human.plural(found['skipped'], 'update')} skipped, whose scaled gradients overflowed"
        yield "loss scale", f"{found['scale']:,.10g}; {skipped if found['skipped'] else 'no update skipped'}"


def _model_shards(report: Report) -> Iterator[Row]:
    """Each worker's shard of the model and its memory, if the model was cut or memory limited."""
    shards = report.get("model_shards") or []
    cut = str(report.get("layout") or "").replace("data=", "") != str(report["workers"])
    if not shards or not (cut or any(each["limit_bytes"] for each in shards)):
        return
    for number, each in enumerate(shards[:SHARDS_SHOWN]):
        yield "memory" if number == 0 else "", _model_shard_line(each)
    bubble = report.get("bubble")
    if bubble:
        yield "bubble", f"{bubble['measured']:.1%} of the pipeline's time, {bubble['planned']:.1%} by the schedule"


def _model_shard_line(each: Mapping[str, Any]) -> str:
    of = f" of {human.size(each['limit_bytes'])}" if each["limit_bytes"] else ""
    blocks = each["blocks"]
    what = f"; {blocks[0]} … {blocks[-1]}" if len(blocks) > 2 else f"; {', '.join(blocks)}" if blocks else ""
    place = f"replica {each['replica']}, stage {each['stage']}, tensor shard {each['tensor_shard']}"
    peak = f"peak {human.size(each['peak_bytes'])}{of}"
    return f"worker {each['rank']} ({place}): {peak}, {each['num_parameters']:,} parameters{what}"


def _title(report: Report) -> Text:
    mark, style = OUTCOME_MARKS.get(report["outcome"], ("?", "bold"))
    steps, samples, seconds = report["steps"], report["samples"], human.duration(report["seconds"])
    job = report["job"] or "run"
    if report["outcome"] == "done":
        what = f"{human.plural(steps, 'step')}, {human.plural(samples, 'sample')} in {seconds}"
        if report["resumed_from"] is not None:
            what += f" (since step {report['resumed_from']:,})"
    else:
        planned = f" of {report['steps_planned']:,}" if report["steps_planned"] else ""
        what = f"{report['outcome']} after step {steps:,}{planned} ({seconds})"
        if report["stopped"]:
            what += f": {report['stopped']}"
    title = Text.assemble((f"{mark} ", style), (clean(f"{job}  {what}"), "bold"), "   ")
    if report["run"]:
        title.append(f"run {report['run']}", style="dim")
    return title


def _failure(report: Report) -> Iterator[Row]:
    failure = report["failure"]
    if failure is None:
        return
    at = [f"worker {failure['rank']}"]
    if failure["step"] is not None:
        at.append(f"step {failure['step']:,}")
    if failure["lane"] is not None:
        at.append(f"lane {failure['lane']}")
    yield "error", f"{', '.join(at)}: {failure['message']}"
    for line in failure["where"]:
        yield "", line
    if failure["fix"]:
        yield "fix", failure["fix"]
    if failure["log"]:
        yield "log", failure["log"]


def _weights(report: Report) -> Iterator[Row]:
    sha256 = report["weights_sha256"]
    if report["exact"]:
        exact = "exact: the same on any number of workers"
    else:
        exact = f"not exact: {_why_not_exact(report)}"
    if sha256:
        servers = report.get("servers")
        how = ["--servers", str(servers["servers"])] if servers else []
        check = f"    check: {_command(report, 'verify', *how)}" if _is_file(report) else ""
        whole = report["exact"] and report["outcome"] == "done" and not report.get("changes")
        check = check if whole else ""
        yield "weights", f"sha256 {sha256[:8]}…{sha256[-3:]}    {exact}{check}"
    elif report["exact"] is False:
        yield "weights", exact


def _why_not_exact(report: Report) -> str:
    if report.get("inexact_sync_mode"):
        return f"it goes on from a checkpoint of --sync {report['inexact_sync_mode']}"
    traffic = report.get("traffic") or {"exact": True}
    if not traffic["exact"]:
        used = [name for level, name in traffic["compressors"].items() if level not in traffic["unused_levels"]]
        if used:
            return f"gradients were compressed ({', '.join(used)}), and another placement can give other weights"
        if traffic["transport"] == "ring":
            return "a ring adds in an order of its own, and another placement can give other weights"
    mode = (report.get("servers") or {}).get("sync_mode") or ""
    if mode and mode != "sync":
        return servers_text.why_not_exact(mode)
    if "tensor" in str(report.get("layout")):
        return "split operators add in another order; shoal verify --layouts measures the difference"
    return "other workers, or another run, can give other weights"


def _results(report: Report) -> Iterator[Row]:
    if report["steps"]:
        passes = report.get("final_losses") or {}
        named = "   ".join(f"{name} {human.value(number)}" for name, number in passes.items())
        yield "loss", named or human.value(report["final_loss"])
    target = _target_text(report)
    wanted = (report["target"] or {}).get("text") or ""
    for name, number in report["metrics"].items():
        text = human.value(number)
        if target and (wanted.startswith(name) or len(report["metrics"]) == 1):
            text, target = f"{text}, {target}", None
        yield metric_label(name), text
    if target:
        yield "target", target.removeprefix("target ")
    stopped = report["stopped"] or ""
    if report["outcome"] == "done" and stopped and not stopped.startswith("target "):  # that has been said
        yield "ended", stopped
    for name, number in list((report.get("logged") or {}).items())[:LOGGED_SHOWN]:
        yield human.with_spaces(name), human.value(number)
    best = report.get("best")
    if best:
        where = f"{best['checkpoint']}" if best["checkpoint"] else "its checkpoint was not written"
        files = ", best.safetensors" if "best.safetensors" in report["files"] else ""
        yield "best", f"{best['metric']} {human.value(best['value'])} after step {best['step']:,}: {where}{files}"


def _target_text(report: Report) -> str | None:
    target = report["target"]
    if target is None:
        return None
    words = f"target {target['text']}" if target["text"] else "target"
    if not target["reached"]:
        return f"{words} not reached"
    after = f" after {human.duration(target['seconds'])}" if target["seconds"] is not None else ""
    return f"{words} reached{after} (step {target['step']:,})"


def _notes(report: Report) -> Iterator[Row]:
    for number, text in enumerate(report.get("notes") or []):
        yield "note" if number == 0 else "", text


def _layout(report: Report) -> Iterator[Row]:
    if report.get("layout_reason"):
        yield "layout", f"{report['layout']}: {report['layout_reason']}"


def _members(report: Report) -> Iterator[Row]:
    if _timeline(report, 80, ascii_only=True):
        yield MEMBERS, ""


def _timeline(report: Report, width: int, ascii_only: bool) -> list[str]:
    began, ended = report.get("training_began"), report.get("ended")
    if began is None or ended is None:
        return []
    spans = msgspec.convert(report.get("membership") or [], list[ParticipationSpan])
    return draw(spans, read_incidents(report), began=began, ended=ended, width=width, ascii_only=ascii_only)


def _files(report: Report) -> Iterator[Row]:
    if report["folder"]:
        yield "files", f"{report['folder'].rstrip('/')}/   {'  '.join(report['files'])}"


def _more(report: Report) -> Iterator[Row]:
    if report["folder"] and report["step_ms"] is not None:
        yield "more", f"shoal report {shlex.quote(_handle(report))}"


def _next(report: Report) -> Iterator[Row]:
    if report["outcome"] == "done":
        return
    saved = report["checkpoints"]
    if saved:
        yield "saved", f"step {saved[-1]['step']:,}: {saved[-1]['path']}"
    elif not report["resumed_from"]:
        yield "saved", "nothing: no checkpoint was written"
        if not report["steps"]:
            return
    if report["job"] and report["run"]:
        yield "next", _command(report, report.get("command") or "train", "--resume", _handle(report))


def _is_file(report: Report) -> bool:
    """Whether the run's job or script is a file: `shoal.train` in Python has only a name for it."""
    return str(report["job"]).partition(":")[0].endswith(".py")


def _command(report: Report, command: str, *options: str) -> str:
    """A command about the run's job or script, to be pasted into a shell."""
    settings = [word for text in report.get("settings") or [] for word in ("--set", text)]
    arguments = ["--", *report["arguments"]] if report.get("arguments") else []
    return shlex.join(["shoal", command, str(report["job"]), *settings, *options, *arguments])


def _handle(report: Report) -> str:
    """The run's name on a command line: its id where `shoal` looks for runs, else its folder."""
    folder = report["folder"]
    if folder is None or Path(folder) == DEFAULT_ROOT / report["run"]:
        return str(report["run"])
    return str(folder)
