"""The closing report, from `report.json` alone, so that `shoal report RUN` prints what the run printed at its end."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shoal.report import human, servers_text
from shoal.report.incidents import Incident
from shoal.report.live_view import metric_label, unused_level_text
from shoal.report.participation import ParticipationSpan
from shoal.report.run_folder import DEFAULT_ROOT, RunLine
from shoal.report.timeline import draw
from shoal.report.wording import full_text, stamp
from shoal.report.worker_output import clean

_PARTS_IN_ORDER = ("compute", "merge", "wait", "data", "apply", "other")
_MARKS = {"done": ("✔", "bold green"), "stopped": ("■", "bold yellow"), "failed": ("✘", "bold red")}
_SPELLED = {"×": "x", "…": "...", "–": "-", "µ": "u", "✔": "ok", "✘": "failed", "■": "stopped"}
MEMBERS = "members"  # the row that is a drawing
INCIDENTS_SHOWN = 8
Report = Mapping[str, Any]
Row = tuple[str, str]


def closing(report: Report, *, prediction: bool = False) -> RenderableType:
    """Only lines whose facts exist; each is a label and a text that wraps beside it. `prediction`: line by line."""
    return _ClosingReport(report, prediction)


class _ClosingReport:
    """Drawn for the width and the alphabet of the console that it is printed on, with no blanks at line ends."""

    def __init__(self, report: Report, prediction: bool) -> None:
        self._report, self._prediction = report, prediction

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _encodable(_title(self._report), options)
        found = rows(self._report, prediction=self._prediction)
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


def rows(report: Report, *, prediction: bool = False) -> list[Row]:
    """`prediction`: line by line; and of servers the staleness as a drawing, and each by itself."""
    before = (
        _failure,
        _weights,
        _results,
        _layout,
        _speed,
        _step,
        _lanes,
        _model_shards,
        _traffic,
        servers_text.servers,
    )
    after = (_incidents, _members, _most_gain, _files, _next)
    told = (servers_text.staleness, servers_text.server_rows, _prediction) if prediction else ()
    return [row for part in (*before, *told, *after) for row in part(report)]


def runs_table(lines: Iterable[RunLine]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "job", "workers", "outcome", "steps", "loss", "measured", "when"):
        table.add_column(name, justify="right" if name in ("workers", "steps", "loss") else "left", overflow="fold")
    for line in lines:
        table.add_row(
            line.id,
            Text(line.job),
            "?" if line.workers is None else str(line.workers),
            Text(line.outcome, style=_MARKS.get(line.outcome, ("", "dim"))[1]),
            f"{line.steps:,}",
            human.value(line.loss) if line.loss is not None else "",
            Text("  ".join(f"{metric_label(name)} {human.value(number)}" for name, number in line.metrics.items())),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(line.when)),
        )
    return table


SHARDS_SHOWN = 16


def _model_shards(report: Report) -> Iterator[Row]:
    """What each worker held and what memory it took, where the model was cut or memory was limited."""
    carried = report.get("model_shards") or []
    cut = str(report.get("layout") or "").replace("data=", "") != str(report["workers"])
    if not carried or not (cut or any(each["limit_bytes"] for each in carried)):
        return
    for number, each in enumerate(carried[:SHARDS_SHOWN]):
        yield "memory" if number == 0 else "", _model_shard_line(each)
    bubble = report.get("bubble")
    if bubble:
        yield "bubble", f"{bubble['measured']:.1%} of the pipeline's time, {bubble['planned']:.1%} by the schedule"


def _model_shard_line(each: Mapping[str, Any]) -> str:
    of = f" of {human.size(each['limit_bytes'])}" if each["limit_bytes"] else ""
    blocks = each["blocks"]
    what = f"; {blocks[0]} … {blocks[-1]}" if len(blocks) > 2 else f"; {', '.join(blocks)}" if blocks else ""
    return (
        f"worker {each['rank']} (replica {each['replica']}, stage {each['stage']}, slice {each['tensor_shard']}):"
        f" peak {human.size(each['peak_bytes'])}{of}, {each['num_parameters']:,} parameters{what}"
    )


def _title(report: Report) -> Text:
    mark, style = _MARKS.get(report["outcome"], ("?", "bold"))
    steps, samples = report["steps"], report["samples"]
    job = report["job"] or "run"
    if report["outcome"] == "done":
        what = f"{human.plural(steps, 'step')}, {human.plural(samples, 'sample')} in {_duration_text(report)}"
        if report["resumed_from"] is not None:
            what += f" (since step {report['resumed_from']:,})"
    else:
        planned = f" of {report['steps_planned']:,}" if report["steps_planned"] else ""
        what = f"{report['outcome']} after step {steps:,}{planned} ({_duration_text(report)})"
        if report["stopped"]:
            what += f": {report['stopped']}"
    title = Text.assemble((f"{mark} ", style), (clean(f"{job}  {what}"), "bold"), "   ")
    if report["run"]:
        title.append(f"run {report['run']}", style="dim")
    return title


def _duration_text(report: Report) -> str:
    return human.duration(report["seconds"])


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
        how = f" --servers {servers['servers']}" if servers else ""
        check = f"    check: shoal verify {report['job']}{how}"
        check = check if report["exact"] and report["outcome"] == "done" else ""
        yield "weights", f"sha256 {sha256[:8]}…{sha256[-3:]}    {exact}{check}"
    elif report["exact"] is False:
        yield "weights", exact


def _why_not_exact(report: Report) -> str:
    if report.get("inexact_sync_mode"):
        return f"it goes on from a checkpoint of --sync {report['inexact_sync_mode']}"
    travel = report.get("traffic") or {"exact": True}
    if not travel["exact"]:
        used = [name for level, name in travel["compressors"].items() if level not in travel["unused_levels"]]
        if used:
            return f"gradients were compressed ({', '.join(used)}), and another placement can give other weights"
        if travel["transport"] == "ring":
            return "a ring adds in an order of its own, and another placement can give other weights"
    mode = (report.get("servers") or {}).get("sync_mode") or ""
    if mode and mode != "sync":
        return servers_text.why_not_exact(mode)
    if "tensor" in str(report.get("layout")):
        return (
            "operators were split, which adds in another order; shoal verify --layouts measures by how much it differs"
        )
    return "other workers, or another run, can give other weights"


def _results(report: Report) -> Iterator[Row]:
    if report["steps"]:
        yield "loss", human.value(report["final_loss"])
    target = _target_text(report)
    aim = (report["target"] or {}).get("text") or ""
    for name, number in report["metrics"].items():
        text = human.value(number)
        if target and (aim.startswith(name) or len(report["metrics"]) == 1):
            text, target = f"{text}, {target}", None
        yield metric_label(name), text
    if target:
        yield "target", target.removeprefix("target ")


def _target_text(report: Report) -> str | None:
    target = report["target"]
    if target is None:
        return None
    words = f"target {target['text']}" if target["text"] else "target"
    if not target["reached"]:
        return f"{words} not reached"
    after = f" after {human.duration(target['seconds'])}" if target["seconds"] is not None else ""
    return f"{words} reached{after} (step {target['step']:,})"


def _speed(report: Report) -> Iterator[Row]:
    speed, speedup = report["samples_per_second"], report["speedup"]
    if speed is None:
        return
    text = f"{human.rate(speed)} samples/s"
    if report.get("tokens_per_second") is not None:
        text += f", {human.rate(report['tokens_per_second'])} tokens/s"
    if report["workers"] == 1:
        yield "speed", f"{text} on 1 worker"
        return
    if speedup["over_one_worker"] is not None:
        text += f": {human.times(speedup['over_one_worker'])} worker {speedup.get('one') or 0} alone"
        if speedup["possible"] is not None:
            text += f"; these {report['workers']} workers could give {human.times(speedup['possible'])}"
    yield "speed", text
    parallel = speedup["parallel_fraction"]
    if parallel is not None:
        limit = f"limit {human.times(speedup['amdahl_limit'])}" if speedup["amdahl_limit"] else "law sets no limit"
        yield (
            "",
            f"parallel part {human.percent(parallel)}: Amdahl's {limit}, Gustafson at {report['workers']} workers "
            f"{human.times(speedup['gustafson'])} ({speedup['basis']})",
        )


def _step(report: Report) -> Iterator[Row]:
    step_ms = report["step_ms"]
    if step_ms is None:
        return
    total, parts = human.parts_that_add_up(
        {part: step_ms[part] for part in _PARTS_IN_ORDER}, human.decimals(step_ms["total"])
    )
    told = _predicted(report)
    yield "a step", f"{total} ms = " + " + ".join(f"{name} {ms}" for name, ms in parts.items() if float(ms)) + told


def _predicted(report: Report) -> str:
    found = report.get("prediction") or {}  # older reports have none
    step = found.get("step_ms")
    if not step or step["error"] is None:
        return ""
    by = " without evaluation" if found["evaluation_ms"] > 0.01 * step["measured"] else ""
    by += "" if found["named"] else f"; {found['cluster']}"
    return f"    predicted {human.milliseconds(step['predicted'])} ({error_text(step['error'])}{by})"


def error_text(error: float) -> str:
    """By how much a prediction was wrong, of what was measured."""
    if round(100 * abs(error)) == 0:
        return "right"
    if error > 1:
        return f"{human.times(1 + error)} too high"
    return f"{human.percent(abs(error))} {'high' if error > 0 else 'low'}"


def _layout(report: Report) -> Iterator[Row]:
    why = report.get("layout_reason")  # older reports have none
    if why:
        yield "layout", f"{report['layout']}: {why}"


def _prediction(report: Report) -> Iterator[Row]:
    """Line by line, predicted and measured, and what it was predicted with. Both sides add up."""
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
    tuned = f", calibrated: {found['calibration']}" if found["calibration"] else ""
    yield "", f"cluster: {found['cluster']}{tuned}" + ("" if found["named"] else "; shoal cluster probe measures yours")


def prediction_lines(prediction: Report, layout: str, why: str) -> list[str]:
    """For `--dry-run`: why this layout, and what prediction.json would say."""
    lines = [f"layout {layout}: {why}"] if why else []
    if prediction["reason"]:
        return [*lines, f"predicted: nothing: {prediction['reason']}"]
    ms = {name: 1000 * seconds for name, seconds in prediction["terms"].items()}
    total, parts = human.parts_that_add_up(ms, human.decimals(sum(ms.values())))
    split = " + ".join(f"{name} {part}" for name, part in parts.items() if float(part))
    rate = f"{human.rate(prediction['samples_per_second'])} samples/s"
    by = prediction["cluster"] + ("" if prediction["named"] else "; shoal cluster probe measures yours")
    tuned = f", calibrated: {prediction['calibration']}" if prediction["calibration"] else ""
    return [
        *lines,
        f"predicted: a step of {total} ms = {split}; {rate}",
        f"predicted: a worker's memory at the most {human.size(max(prediction['peak_bytes']))}",
        f"predicted for cluster: {by}{tuned}",
    ]


def _lanes(report: Report) -> Iterator[Row]:
    cost = report["lane_cost"]
    if cost is None or cost["share_of_step"] is None:
        return
    held = human.plural(report["lanes"], "lane")
    apart, together = (human.milliseconds(1000 * cost[key]) for key in ("separate_seconds", "joint_seconds"))
    yield (
        "lanes",
        f"{held} on {human.plural(report['workers'], 'worker')} cost {human.percent(cost['share_of_step'])} "
        f"of the step"
        + (f" ({cost['lanes']} one by one {apart} ms, at once {together} ms)" if cost["lanes"] > 1 else ""),
    )


def _traffic(report: Report) -> Iterator[Row]:
    travel = report.get("traffic")  # older reports have none
    if not travel:
        return
    rows = {"shared memory": ["through shared memory"], "": ["one worker: they do not travel"]}.get(
        travel["transport"], []
    )
    if travel["reason"]:
        rows.append(travel["reason"])
    for level in ("host", "rack"):
        if level in travel["levels"]:
            rows.append(_level(level, travel["levels"][level]))
    rows += [unused_level_text(travel["compressors"][level], level) for level in travel["unused_levels"]]
    yield from zip(["gradients"] + [""] * len(rows), rows, strict=False)


def _level(level: str, facts: Mapping[str, Any]) -> str:
    text = f"{human.size(facts['bytes_per_step'])} a step between {level}s"
    if not facts["compressor"]:
        return text
    whole = facts["bytes"] + facts["bytes_saved"]
    text += f": {facts['compressor']} saved {human.percent(facts['bytes_saved'] / whole)} of {human.size(whole)}"
    return text if facts["error"] is None else f"{text}, with an error of {100 * facts['error']:.2g} %"


def _incidents(report: Report) -> Iterator[Row]:
    """What happened, added up; then one by one."""
    happened = _incidents_of(report)
    faults = _members_lost(report, happened) if happened else []
    skipped = report["skipped_steps"]
    if skipped:
        faults.append(f"{human.plural(len(skipped), 'step')} skipped, loss not finite (first: {skipped[0]['step']:,})")
    failed = report["checkpoints_failed"]
    if failed:
        faults.append(f"{human.plural(len(failed), 'checkpoint')} not written ({failed[-1]['reason']})")
    if faults:
        yield "incidents", "; ".join(faults)
    for fault in happened[:INCIDENTS_SHOWN]:
        yield "", f"{stamp(fault.time)}  {full_text(fault)}"
        if fault.kind in ("lost", "server") and fault.log:
            yield "", f"          its last line: {fault.log[-1].strip()}"
    if len(happened) > INCIDENTS_SHOWN:
        yield "", f"and {len(happened) - INCIDENTS_SHOWN} more in report.json"


def _incidents_of(report: Report) -> list[Incident]:
    return msgspec.convert(report.get("incidents") or [], list[Incident])  # older reports have none


def _members_lost(report: Report, incidents: list[Incident]) -> list[str]:
    """In the words of one line: who was lost, what was done again, what it cost."""
    number = Counter(fault.kind for fault in incidents)
    committed = report["committed"]
    parts = [f"{human.plural(number['lost'], 'worker')} lost"] if number["lost"] else []
    parts += [f"{number[kind]} {kind}" for kind in ("left", "joined") if number[kind]]
    if number["server"]:
        parts.append(f"{human.plural(number['server'], 'server')} lost")
    if number["regrouped"]:
        parts.append(f"connections made anew {human.times_text(number['regrouped'])}")
    parts.append(f"{human.plural(committed['redone'], 'step')} done again")
    if committed["repeated"]:
        since = "snapshots of the servers" if number["server"] else "a checkpoint"
        parts.append(f"{human.plural(committed['repeated'], 'committed step')} repeated from {since}")
    if committed["unreported"]:
        parts.append(f"{human.plural(committed['unreported'], 'step')} of which nobody told")
    parts.append(f"{human.plural(committed['samples_lost'], 'sample')} lost, {committed['samples_repeated']:,} doubled")
    pushes = sum(fault.pushes_lost for fault in incidents)
    if pushes:
        parts.append(f"{human.plural(pushes, 'acknowledged update')} lost with a server")
    away = sum(fault.seconds or 0.0 for fault in incidents if fault.kind == "store")
    if number["store"]:
        parts.append(f"store away {human.times_text(number['store'])} ({human.duration(away)})")
    if number["driver"]:
        parts.append(f"driver replaced {human.times_text(number['driver'])}")
    shares = [
        f"{name} {human.precise_percent(report[name])}"
        for name in ("goodput", "participation")
        if report[name] is not None
    ]
    return [", ".join(parts), *([", ".join(shares)] if shares else [])]


def _members(report: Report) -> Iterator[Row]:
    if _timeline(report, 80, ascii_only=True):
        yield MEMBERS, ""


def _timeline(report: Report, width: int, ascii_only: bool) -> list[str]:
    began, ended = report.get("training_began"), report.get("ended")
    if began is None or ended is None:
        return []
    segments = msgspec.convert(report.get("membership") or [], list[ParticipationSpan])
    return draw(segments, _incidents_of(report), began=began, ended=ended, width=width, ascii_only=ascii_only)


def _most_gain(report: Report) -> Iterator[Row]:
    gain = report["most_gain"]
    if gain is None:
        return
    rest = "worker 0" if report["workers"] == 2 and gain["worker"] == 1 else "the rest"
    yield (
        "most gain",
        f"worker {gain['worker']} is {human.times(gain['times_slower'])} slower than {rest}; "
        f"one like the others would make a step {human.milliseconds(gain['step_ms'])} ms",
    )


def _files(report: Report) -> Iterator[Row]:
    if report["folder"]:
        yield "files", f"{report['folder'].rstrip('/')}/   {'  '.join(report['files'])}"


def _next(report: Report) -> Iterator[Row]:
    if report["outcome"] == "done":
        return
    saved = report["checkpoints"]
    if saved:
        yield "saved", f"step {saved[-1]['step']:,}: {saved[-1]['path']}"
    elif report["resumed_from"] is None:
        yield "saved", "nothing yet: no checkpoint was written"
        return
    if report["job"] and report["run"]:
        yield "next", f"shoal {report.get('command') or 'train'} {report['job']} --resume {_handle(report)}"


def _handle(report: Report) -> str:
    """What names this run on a command line: its id where `shoal` looks for runs, else its folder."""
    folder = report["folder"]
    if folder is None or Path(folder) == DEFAULT_ROOT / report["run"]:
        return str(report["run"])
    return str(folder)
