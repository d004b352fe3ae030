"""The closing report, from `report.json` alone: `shoal report RUN` prints what the run printed at its end, and more.

At the end of a run of seconds only what holds for it is printed: the result and how to check it. Speed-up, its laws and
predictions are noise there; `-v` and `shoal report` have them.
"""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shoal.report import human, servers_text
from shoal.report.human import Report, Row
from shoal.report.incident_rows import incident_rows, read_incidents
from shoal.report.live_view import metric_label, unused_level_text
from shoal.report.participation import ParticipationSpan
from shoal.report.prediction_text import predicted_text, prediction_rows
from shoal.report.run_folder import DEFAULT_ROOT, RunLine
from shoal.report.timeline import draw
from shoal.report.worker_output import clean

_PARTS_IN_ORDER = ("compute", "merge", "wait", "data", "apply", "other")
_MARKS = {"done": ("✔", "bold green"), "stopped": ("■", "bold yellow"), "failed": ("✘", "bold red")}
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
    if is_brief(report) and not details:
        parts: tuple[RowMaker, ...] = (
            _failure,
            _weights,
            _results,
            _loss_scale,
            _notes,
            _layout,
            _brief_speed,
            _brief_step,
            _model_shards,
        )
        parts += (_brief_traffic, servers_text.servers, incident_rows, _members, _files, _more, _next)
    else:
        parts = (_failure, _weights, _results, _loss_scale, _notes, _layout, _speed, _step, _lanes, _model_shards)
        parts += (_traffic, servers_text.servers)
        parts += (servers_text.staleness, servers_text.server_rows, prediction_rows) if details else ()
        parts += (incident_rows, _members, _most_gain, _files, _next)
    return [row for part in parts for row in part(report)]


def is_brief(report: Report) -> bool:
    """Whether the run was too short to judge its speed by."""
    return bool(report["seconds"] < BRIEF_SECONDS or report["steps"] < BRIEF_STEPS)


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
            Text(line.outcome, style=_MARKS.get(line.outcome, ("", "dim"))[1]),
            f"{line.steps:,}",
            human.value(line.loss) if line.loss is not None else "",
            Text("  ".join(f"{metric_label(name)} {human.value(number)}" for name, number in line.metrics.items())),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(line.when)),
        )
    return table


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
    mark, style = _MARKS.get(report["outcome"], ("?", "bold"))
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
        check = check if report["exact"] and report["outcome"] == "done" else ""
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
        yield "loss", human.value(report["final_loss"])
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


def _brief_speed(report: Report) -> Iterator[Row]:
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


def _speed(report: Report) -> Iterator[Row]:
    text, speedup = _rate(report), report["speedup"]
    if not text:
        return
    if report["workers"] == 1:
        yield from _brief_speed(report)
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


def _step(report: Report) -> Iterator[Row]:
    for label, text in _brief_step(report):
        yield label, f"{text}{predicted_text(report)}"


def _brief_step(report: Report) -> Iterator[Row]:
    step_ms = report["step_ms"]
    if step_ms is None:
        return
    total, parts = human.parts_that_add_up(
        {part: step_ms[part] for part in _PARTS_IN_ORDER}, human.decimals(step_ms["total"])
    )
    split = " + ".join(f"{name} {ms}" for name, ms in parts.items() if float(ms))
    yield "a step", f"{total} ms = {split}"


def _notes(report: Report) -> Iterator[Row]:
    for number, text in enumerate(report.get("notes") or []):
        yield "note" if number == 0 else "", text


def _layout(report: Report) -> Iterator[Row]:
    if report.get("layout_reason"):
        yield "layout", f"{report['layout']}: {report['layout_reason']}"


def _lanes(report: Report) -> Iterator[Row]:
    cost = report["lane_cost"]
    if cost is None or cost["share_of_step"] is None:
        return
    held = human.plural(report["lanes"], "lane")
    separate, joint = (human.milliseconds(1000 * cost[key]) for key in ("separate_seconds", "joint_seconds"))
    share = f"{human.percent(cost['share_of_step'])} of the step"
    compared = f" ({cost['lanes']} one by one {separate} ms, at once {joint} ms)" if cost["lanes"] > 1 else ""
    yield "lanes", f"{held} on {human.plural(report['workers'], 'worker')} cost {share}{compared}"


def _brief_traffic(report: Report) -> Iterator[Row]:
    """Gradients that leave the host, or were meant to travel in another way than they did."""
    traffic = report.get("traffic")
    if traffic and (traffic["transport"] not in ("", "shared memory") or traffic["unused_levels"] or traffic["reason"]):
        yield from _traffic(report)


def _traffic(report: Report) -> Iterator[Row]:
    traffic = report.get("traffic")
    if not traffic:
        return
    direct = {"shared memory": ["through shared memory"], "": ["one worker: they do not travel"]}
    rows = direct.get(traffic["transport"], [])
    if traffic["reason"]:
        rows.append(traffic["reason"])
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


def _members(report: Report) -> Iterator[Row]:
    if _timeline(report, 80, ascii_only=True):
        yield MEMBERS, ""


def _timeline(report: Report, width: int, ascii_only: bool) -> list[str]:
    began, ended = report.get("training_began"), report.get("ended")
    if began is None or ended is None:
        return []
    spans = msgspec.convert(report.get("membership") or [], list[ParticipationSpan])
    return draw(spans, read_incidents(report), began=began, ended=ended, width=width, ascii_only=ascii_only)


def _most_gain(report: Report) -> Iterator[Row]:
    gain = report["most_gain"]
    if gain is None:
        return
    rest = "worker 0" if report["workers"] == 2 and gain["worker"] == 1 else "the rest"
    slower = f"worker {gain['worker']} is {human.times(gain['times_slower'])} slower than {rest}"
    yield "most gain", f"{slower}; one like the others would make a step {human.milliseconds(gain['step_ms'])} ms"


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
    elif report["resumed_from"] is None:
        yield "saved", "nothing: no checkpoint was written"
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
