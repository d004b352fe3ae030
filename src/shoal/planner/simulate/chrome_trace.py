"""A step as a timeline, and the same in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens.

A row is one activity of one stage: compute, send or receive. Slices of a row are in order and do not overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.planner.simulate.clock import DeliveredMessage
from shoal.planner.simulate.step import SimulatedStep

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "R": "gradients of replicas",
    "O": "optimizer",
    "M": "message",
}


class TimelineSlice(NamedTuple):
    start: float  # seconds
    end: float
    kind: str  # a letter of KINDS
    name: str
    num_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TimelineRow:
    stage: int  # rank of the pipeline
    activity: str  # compute, send, receive
    slices: tuple[TimelineSlice, ...]


def timeline(step: SimulatedStep) -> tuple[TimelineRow, ...]:
    """The rows of the slowest replica."""
    rows = []
    ranks = {device: rank for rank, device in enumerate(step.devices)}
    end = step.pipeline + step.terms["data"]
    for rank, row in enumerate(step.played.rows):
        slices = [TimelineSlice(each.start, each.end, each.action.kind, f"{each.action}") for each in row]
        start, stop = step.gradients[rank]
        if stop > start:
            slices.append(TimelineSlice(start, stop, "R", KINDS["R"]))
        if step.terms["optimizer"] > 0:
            slices.append(TimelineSlice(end, end + step.terms["optimizer"], "O", KINDS["O"]))
        rows.append(TimelineRow(stage=rank, activity="compute", slices=tuple(slices)))
        device = step.devices[rank]
        for activity in ("send", "receive"):
            found = [
                TimelineSlice(each.start, each.end, "M", _name(each, activity, ranks), each.num_bytes)
                for each in sorted(step.messages, key=lambda each: (each.start, each.end))
                if (each.source if activity == "send" else each.to) == device
            ]
            if found:
                rows.append(TimelineRow(stage=rank, activity=activity, slices=tuple(found)))
    return tuple(rows)


def _name(message: DeliveredMessage, activity: str, ranks: Mapping[int, int]) -> str:
    rank = ranks.get(message.to if activity == "send" else message.source)
    where = "another replica" if rank is None else f"stage {rank}"
    return f"{message.name} {'to' if activity == 'send' else 'from'} {where}"


def chrome_trace(rows: Sequence[TimelineRow], name: str, **more: Any) -> dict[str, Any]:
    """The format of Chrome and Perfetto: complete events ("X"), times in microseconds."""
    events: list[dict[str, Any]] = []
    for stage in dict.fromkeys(row.stage for row in rows):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": f"stage {stage}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}})
    for row in rows:
        thread = ("compute", "send", "receive").index(row.activity)
        about = {"pid": row.stage, "tid": thread}
        events.append({"ph": "M", "name": "thread_name", **about, "args": {"name": row.activity}})
        for each in row.slices:
            start, end = round(each.start * 1e6, 3), round(each.end * 1e6, 3)
            args = {"bytes": each.num_bytes} if each.kind == "M" else {}
            events.append({"ph": "X", "name": each.name, "cat": KINDS[each.kind], "ts": start,
                           "dur": round(end - start, 3), **about, "args": args})  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": name, **more}}
