"""The live view of a run and its lines about events, drawn from a tally. Pure; shown by `progress`."""

import itertools
from collections.abc import Mapping

from rich.text import Text

from shoal.report import events, human, scripts
from shoal.report.aggregate import RunTally, WorkerTally
from shoal.report.participation import ENDED, JOINING, LEFT, STARTING, TAKES_PART
from shoal.report.servers import summarize_histogram
from shoal.report.speedup import SLOW, slowness
from shoal.report.wording import driver_text, paused_text, stamp
from shoal.report.worker_output import clean

BAR_WIDTH = 37
LOGGED_SHOWN = 3  # values of callbacks in the line of the loss
SPLIT_WIDTH = 40
HELD_UP_SHARE = 0.6  # of the recent steps in which one worker was last: less could be chance
HELD_UP_WAIT = 0.03  # of a step that workers wait on average: less is not shown

# name, mark, style, the fields of TimeSpent that it stands for
_SPLIT = (
    ("compute", "█", "green", ("compute",)),
    ("merge", "▓", "blue", ("merge",)),
    ("wait", "░", "yellow", ("wait",)),
    ("data", "·", "cyan", ("data",)),
    ("rest", "─", "dim", ("apply", "other")),
)


def live_lines(tally: RunTally, *, now: float, width: int, height: int, color: bool = True) -> list[Text]:
    """The live area, top to bottom, no taller than the terminal."""
    if tally.scripts.plain:
        return _script_lines(tally, now=now, height=height)
    lines = [
        Text(header(tally), style="bold"),
        _progress_line(tally, now=now, width=width, color=color),
        Text(loss_line(tally, sparks=True)),
    ]
    workers = _shown(tally)
    if any(worker.steps for worker in workers):
        below = 6 if tally.servers.count else 5  # blank, legend, servers, held up by, "more", the cursor's line
        rows = max(1, height - len(lines) - below)
        lines += [Text(), *_worker_table(workers, tally, rows=rows, width=width)]
    servers = servers_line(tally)
    if servers:
        lines.append(Text(f" {servers}"))
    held_up = held_up_by(tally)
    if held_up:
        lines.append(Text(f" {held_up}"))
    for line in lines:
        line.no_wrap = True
        line.overflow = "ellipsis"
    return lines


def _script_lines(tally: RunTally, *, now: float, height: int) -> list[Text]:
    """Of a script that has not joined: what its processes show."""
    state = scripts.state_text(tally.scripts, tally.num_workers, now=now)
    rows = [Text(f" {line}") for line in scripts.table(tally.scripts, now=now, rows=max(1, height - 6))]
    lines = [Text(header(tally), style="bold"), Text(state), Text(), *rows]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def header(tally: RunTally) -> str:
    started = tally.started
    if started is None:
        return "shoal: starting"
    hosts = len({worker.host for worker in tally.ranks if worker.host})
    on_hosts = f", {hosts} hosts" if hosts > 1 else ""
    workers = human.plural(tally.num_workers, "worker")
    if tally.incidents and tally.num_participating and tally.num_participating != tally.num_workers:
        workers = f"{tally.num_participating} of {workers}"
    line = f"shoal {started.command} {started.job}   run {started.run}   {workers}{on_hosts}"
    if started.servers:
        line += f"   {human.plural(started.servers, 'server')}{f', {started.sync_mode}' if started.sync_mode else ''}"
    if not started.lanes:  # a script reports its layout when it joins
        return line
    exact = "exact" if started.exact else "not exact"
    return f"{line}   {started.layout}, {human.plural(started.lanes, 'lane')}   {exact}"


def loss_line(tally: RunTally, *, sparks: bool = False) -> str:
    if not any(worker.steps for worker in tally.ranks):
        return f"starting {human.plural(tally.num_workers, 'worker')}"
    parts = [f"loss {human.value(tally.loss)}"]
    if sparks and len(tally.losses.points) > 1:
        parts[0] += f" {sparkline([loss for _, loss in tally.losses.points])}"
    parts += [f"{metric_label(name)} {human.value(number)}" for name, number in tally.metrics.items()]
    parts += [f"{name} {human.value(number)}" for name, number in list(tally.logged.items())[:LOGGED_SHOWN]]
    speed = tally.recent_samples_per_second
    if speed is not None:
        predicted = tally.predicted.samples_per_second if tally.predicted else None
        forecast = "" if predicted is None else f" (predicted {human.rate(predicted)})"
        parts.append(f"{human.rate(speed)} samples/s{forecast}")
    if tally.incidents and tally.commits.goodput is not None:
        parts.append(f"goodput {human.precise_percent(tally.commits.goodput)}")
    return "    ".join(parts)


def progress_text(tally: RunTally, *, now: float) -> str:
    """A plain line: step, share, loss, speed, time."""
    started = tally.started
    if tally.scripts.plain:
        return scripts.progress_text(tally.scripts, tally.num_workers, now=now)
    parts = [f"step {tally.step:,}"]
    if started and started.steps:
        parts = [f"step {tally.step:,} / {started.steps:,}", human.percent(min(1.0, tally.step / started.steps))]
    parts += [loss_line(tally), *_times(tally, now=now), f"epoch {tally.epoch}"]
    return "    ".join(parts)


def event_line(event: events.AnyEvent, *, routine: bool) -> str | None:
    """A line about an event, or None. `routine` includes evaluations and written checkpoints."""
    text = _event_text(event, routine=routine)
    return None if text is None else f"{stamp(event.time)}  {clean(text)}"


def metric_label(name: str) -> str:
    """An evaluation's metric, named differently from the training loss."""
    return human.with_spaces(name if name.startswith(("val", "eval", "test")) else f"val {name}")


def unused_level_text(compressor: str, level: str) -> str:
    return f"{compressor}@{level} has nothing to do: no gradient crosses {level}s, and nothing is lost"


def histogram(counts: Mapping[int, int], *, width: int = 40, rows: int = 12) -> list[str]:
    """A bar for each value or range of values, with its share.

    0  ███████████████▌  62 %
    1  ████▏             17 %
    """
    total = sum(counts.values())
    values = range(max(counts) + 1)
    if len(values) > rows:
        step = -(-len(values) // rows)
        bins = [(first, min(first + step - 1, values[-1])) for first in values[::step]]
    else:
        bins = [(value, value) for value in values]
    names = [str(first) if first == last else f"{first}–{last}" for first, last in bins]
    shares = [sum(counts.get(value, 0) for value in range(first, last + 1)) / total for first, last in bins]
    across, longest = max(map(len, names)), max(shares)
    return [
        f"{name:>{across}}  {_bar(width * share / longest):<{width}}  {100 * share:4.1f} %"
        for name, share in zip(names, shares, strict=True)
    ]


def _bar(length: float) -> str:
    """A bar in eighths of a character; at least one eighth above 0."""
    eighths = round(8 * length) or (1 if length > 0 else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def sparkline(losses: list[float], width: int = 12) -> str:
    """The losses of the whole run in a few characters, each the mean of an equal section."""
    cuts = [round(index * len(losses) / width) for index in range(width + 1)]
    sections = [losses[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    means = [sum(section) / len(section) for section in sections]
    low, high = min(means), max(means)
    scale = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇"[round(6 * (mean - low) / scale)] for mean in means)


def servers_line(tally: RunTally) -> str | None:
    servers = tally.servers
    if not servers.count or not (servers.started or servers.reports):
        return None
    parts = []
    speed = tally.recent_steps_per_second
    if speed is not None:
        parts.append(f"{human.rate(speed)} steps/s")
    stale = summarize_histogram(servers.staleness)
    if stale:
        parts.append(f"staleness {stale['mean']:.2f}, at most {stale['max']}")
    if servers.refused:
        parts.append(f"{sum(servers.refused.values()):,} refused")
    busy = {shard: share for shard in sorted(servers.reports) if (share := servers.busy(shard)) is not None}
    if busy:
        parts.append("busy " + "  ".join(f"{shard}: {human.percent(share)}" for shard, share in busy.items()))
    held = sum(each.held_bytes for each in servers.reports.values())
    if held:
        parts.append(human.size(held))
    return f"{human.plural(servers.count, 'server')}   {'   '.join(parts) or 'listening'}"


def held_up_by(tally: RunTally) -> str | None:
    if tally.num_workers < 2:
        return None
    recent = tally.recent
    slowest = recent.slowest.most_common(1)
    spent = sum((worker.recent.time_spent for worker in tally.members), events.TimeSpent())
    if not slowest or slowest[0][1] < HELD_UP_SHARE * recent.steps or spent.wait < HELD_UP_WAIT * spent.total:
        return None
    rank, count = slowest[0]
    cause = _cause(tally, rank)
    return f"held up by worker {rank}{cause}, in {count} of the last {human.plural(recent.steps, 'step')}"


def _cause(tally: RunTally, rank: int) -> str:
    """Where the worker exceeds the others most: in compute or in data."""
    own = tally.workers.get(rank)
    others = [worker for worker in tally.members if worker.rank != rank and worker.recent.steps]
    if own is None or not own.recent.steps or not others:
        return ""

    def excess(part: str) -> float:
        mean = sum(getattr(each.recent.time_spent, part) / each.recent.steps for each in others) / len(others)
        return float(getattr(own.recent.time_spent, part) / own.recent.steps - mean)

    return f", {max(('compute', 'data'), key=excess)}"


def _progress_line(tally: RunTally, *, now: float, width: int, color: bool) -> Text:
    started = tally.started
    tail = "    ".join([", ".join(_times(tally, now=now)), f"epoch {tally.epoch}"])
    if started is None or not started.steps:
        return Text(f"step {tally.step:,}    {tail}")
    share = min(1.0, tally.step / started.steps)
    line = Text(f"step {tally.step:,} / {started.steps:,}  ")
    end = f"  {human.percent(share):>5}    {tail}"
    room = max(5, min(BAR_WIDTH, width - len(line) - len(end)))
    filled = int(share * room)
    line.append("━" * filled, style="green")
    if filled < room:
        line.append("╸", style="green")
        line.append(("━" if color else "─") * (room - filled - 1), style="dim")
    return line.append(end)


def _times(tally: RunTally, *, now: float) -> list[str]:
    gone = f"{human.clock(now - tally.started.time)} gone" if tally.started else "0:00 gone"
    left = tally.seconds_left
    return [gone] if left is None else [gone, f"{human.clock(left)} left"]


def _shown(tally: RunTally) -> list[WorkerTally]:
    """Members, and workers that are dead, silent or starting; not those that left or ended."""
    hidden = (LEFT, ENDED)
    members = tally.membership.members
    known = {*members, *tally.membership.states}
    return [
        tally.workers.get(rank) or WorkerTally(rank=rank)
        for rank in sorted(known)
        if rank in members or tally.state(rank) not in hidden
    ]


def _worker_table(workers: list[WorkerTally], tally: RunTally, *, rows: int, width: int) -> list[Text]:
    at_work = [worker for worker in workers if tally.state(worker.rank) in (TAKES_PART, ENDED)]
    idle = {worker.rank: float("inf") for worker in workers if worker not in at_work}  # shown before slow ones
    slow = dict.fromkeys((worker.rank for worker in workers), 0.0) | slowness(at_work, recent=True) | idle
    shown = workers
    if len(workers) > rows:  # show the slowest
        keep = set(sorted(slow, key=lambda rank: -slow[rank])[:rows])
        shown = [worker for worker in workers if worker.rank in keep]
    names = {worker.rank: f"{worker.rank} {worker.host}".strip() for worker in shown}
    held = {worker.rank: human.lanes(worker.lanes) if worker in at_work else "" for worker in shown}
    name_width = max(6, *(len(name) for name in names.values()))
    lane_width = max(5, *(len(text) for text in held.values()))
    split_width = max(10, min(SPLIT_WIDTH, width - name_width - lane_width - 30))
    legend = Text(f" {'worker':<{name_width}}   {'lanes':<{lane_width}}   ")
    for name, mark, style, _ in _SPLIT:
        legend.append(mark, style=style).append(f" {name}  ")
    before_ms = name_width + lane_width + split_width + 7
    legend.pad_right(max(0, before_ms - len(legend)))
    legend.append("      ms   memory")
    longest = max((_step_seconds(worker) for worker in at_work), default=0.0) or 1.0
    lines = [legend]
    for worker in shown:
        seconds, state = _step_seconds(worker), tally.state(worker.rank)
        line = Text(f" {names[worker.rank]:<{name_width}}   {held[worker.rank]:<{lane_width}}   ")
        lines.append(line)
        if worker not in at_work:
            line.append(state, style="yellow" if state in (STARTING, JOINING) else "red")
            continue
        if not worker.recent.steps:
            line.append("no step yet", style="dim")
            continue
        line.append_text(_split_bar(worker, round(split_width * seconds / longest)))
        line.pad_right(max(0, max(before_ms, len(legend) - 17) - len(line)))
        line.append(f"{human.milliseconds(1000 * seconds):>8}   {human.size(worker.memory)}")
        if slow[worker.rank] >= SLOW:
            line.append(f"   {human.times(slow[worker.rank])} slow", style="yellow")
    if len(shown) < len(workers):
        lines.append(Text(f" and {len(workers) - len(shown)} more that are faster", style="dim"))
    return lines


def _step_seconds(worker: WorkerTally) -> float:
    return worker.recent.time_spent.total / worker.recent.steps if worker.recent.steps else 0.0


def _split_bar(worker: WorkerTally, width: int) -> Text:
    spent = worker.recent.time_spent
    bar = Text()
    reached = 0.0
    for _, mark, style, parts in _SPLIT:
        start = round(width * reached)
        reached += sum(getattr(spent, part) for part in parts) / (spent.total or 1.0)
        bar.append(mark * (round(width * reached) - start), style=style)
    return bar


def _event_text(event: events.AnyEvent, *, routine: bool) -> str | None:
    match event:
        case events.RunStarted(layout_reason=why) if why:
            before = f"{event.previous_layout} → " if event.previous_layout else ""
            return f"layout {before}{event.layout}: {why}"
        case events.ModelEvaluated():
            text = "  ".join(f"{metric_label(name)} {human.value(number)}" for name, number in event.metrics.items())
            if event.target_reached:
                return f"step {event.step:,}: {text}: target reached"
            return f"step {event.step:,}: {text}" if routine else None
        case events.CheckpointSaved():
            what = "final checkpoint" if event.final else "checkpoint"
            text = f"step {event.step:,}: {what}, {human.size(event.num_bytes)} in {human.duration(event.seconds)}"
            return text if routine else None
        case events.BestCheckpointFound():
            best = f"step {event.step:,}: the best {event.metric} so far, {human.value(event.value)}, is kept"
            return best if routine else None
        case events.LoggerFailed():
            return f"logger {event.logger} failed, and gets no more values: {event.reason}; training goes on"
        case events.SaveFailed():
            return f"step {event.step:,}: checkpoint not written: {event.reason}; training goes on"
        case events.LanesAssigned():
            assigned = zip(event.members or range(len(event.assignment)), event.assignment, strict=True)
            lanes = "  ".join(f"worker {rank}: {human.lanes(lanes)}" for rank, lanes in assigned)
            return f"step {event.step:,}: lanes assigned anew ({event.reason}): {lanes}"
        case events.RunResumed():
            skipped = "".join(f"; not usable: {each}" for each in event.skipped)
            repeated = f"; {human.plural(event.repeated, 'step')} repeated" if event.repeated else ""
            if not event.path:
                return f"no checkpoint was written: the run begins again from the fresh model{repeated}"
            return f"resumed from step {event.step:,} ({event.path}){repeated}{skipped}"
        case events.RunStalled():
            return f"nothing committed for {human.duration(event.seconds)}: {event.text}"
        case events.StepSkipped():
            where = ", ".join(f"worker {worker} lane {lane}" for worker, lane in event.where)
            return f"step {event.step:,} skipped: loss not finite{f' ({where})' if where else ''}"
        case events.LossScaleChanged(overflowed=True):
            now = f"the loss scale is {event.scale:,.10g} now"
            return f"step {event.step:,}: update skipped, scaled gradients overflowed; {now}" if routine else None
        case events.TrafficReported(final=False):
            return _traffic_text(event, routine=routine)
        case events.WorkerFailed():
            at = f" at step {event.step:,}" if event.step is not None else ""
            return f"worker {event.rank} failed{at}: {(event.message.splitlines() or [event.kind])[0]}"
        case events.DriverChanged():
            return driver_text(event)
        case events.EventsDropped():
            return f"worker {event.rank}: {human.plural(event.count, 'event')} lost, since nothing could be written"
        case events.ProcessPaused():
            return paused_text(event)
        case events.ScriptAdvised():
            return f"hint: {event.text}" if event.rank is None else f"hint, worker {event.rank}: {event.text}"
        case events.CheckpointIntervalChanged():
            return _interval_text(event) if routine else None
    return None


def _interval_text(event: events.CheckpointIntervalChanged) -> str:
    cost, mean = human.duration(event.save_seconds), human.duration(event.failure_seconds)
    advice = "" if event.auto else " would pay (--checkpoint auto)"
    every = f"a checkpoint every {human.plural(event.every, 'step')}{advice}"
    return f"step {event.step:,}: {every}: one costs {cost}, and a failure is due every {mean}"


def _traffic_text(event: events.TrafficReported, *, routine: bool) -> str | None:
    shared = f"through {event.transport}" if event.transport == "shared memory" else ""
    used = {level: name for level, name in event.compressors.items() if level not in event.unused_levels}
    lossy = ", ".join(f"{name} between {level}s" for level, name in used.items())
    parts = [
        *(part for part in (shared, event.reason) if part),
        *([f"{lossy}: not exact"] if lossy else []),
        *(unused_level_text(event.compressors[level], level) for level in event.unused_levels),
    ]
    return f"gradients: {'; '.join(parts)}" if routine or parts != [shared] else None
