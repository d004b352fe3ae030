"""What `shoal predict` prints: the step and where its time goes, memory by stage and what binds, speed."""

from collections.abc import Sequence
from itertools import groupby
from statistics import mean, median
from typing import Any

from shoal.planner.cluster import Device
from shoal.planner.cost.csv_table import kendall_tau, relative_errors
from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS, Prediction, StagePrediction
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Workload
from shoal.report.human import columns, parts_that_add_up, percent, plural, rate

MEASURED = "measured_step_seconds"
PREDICTED = "predicted_step_seconds"


def text(found: Prediction, work: Workload, device: Device, where: str, following: str) -> str:
    setup = found.setup
    room = float(device.memory - device.reserved)
    total, parts = parts_that_add_up({name: found.terms[name] * 1e3 for name in TERMS}, _digits(found.seconds))
    speed = f"{rate(setup.batch / found.seconds)} samples/s"
    if work.tokens > 1:
        speed += f", {rate(setup.batch * work.tokens / found.seconds)} tokens/s"
    peak = device.peak_of(work.dtype)
    lines = [
        f"{work.name}, batch {setup.batch:,}, {work.dtype}; {where}",
        f"--layout {setup}{_how(setup)}",
        "",
        f"a step   {total} ms = {' + '.join(f'{name} {part}' for name, part in parts.items() if float(part) > 0)}",
        f"speed    {speed}",
        f"device   {found.flops / 1e12:.4g} TFLOP/s, {percent(found.flops / peak)} of its peak"
        + (", recomputation included" if setup.recompute != "none" else ""),
        f"memory   {_binds(found, room)}",
    ]
    if found.hidden > 0:
        lines.insert(4, f"hidden   {found.hidden * 1e3:.4g} ms of data traffic, behind compute")
    if setup.pipeline > 1:
        lines += ["", *_stages(found.stages)]
    return "\n".join([*lines, "", f"next: {following}"])


def _digits(seconds: float) -> int:
    return 0 if seconds >= 1 else 2 if seconds >= 0.01 else 4


def _how(setup: Setup) -> str:
    said = [plural(setup.microbatches, "microbatch") + f" of {setup.microbatch}"]
    if setup.pipeline > 1:
        said.append(setup.schedule + (f" × {setup.chunks}" if setup.chunks > 1 else ""))
    said += [f"{setup.recompute} recomputation"] if setup.recompute != "none" else []
    said += ["sequence parallel"] if setup.sequence_parallel else []
    said += [f"{plural(setup.servers, 'server')}, {setup.sync}"] if setup.exchange == "servers" else []
    return f"   {', '.join(said)}"


def _binds(found: Prediction, room: float) -> str:
    stage, name = found.binds
    part = found.stages[stage].memory[name]
    whole = f"{found.peak / 1e9:.3g} of {room / 1e9:.3g} GB"
    most = f"{name} of stage {stage}: {part / 1e9:.3g} GB" if len(found.stages) > 1 else f"{name}: {part / 1e9:.3g} GB"
    return f"{whole}; most of it is {most}" + ("" if found.peak <= room else "; it does not fit")


def _stages(stages: Sequence[StagePrediction]) -> list[str]:
    """Equal ones are one line."""
    rows = [["stage", "blocks", "forward", "backward", *MEMORY_PARTS, "= GB"]]
    for _, group in groupby(enumerate(stages), key=lambda each: _line(each[1])):
        found = list(group)
        first, last = found[0][0], found[-1][0]
        rows.append([f"{first}–{last}" if last > first else str(first), *_line(found[0][1])])
    return columns(rows, right=range(len(rows[0])))


def _line(stage: StagePrediction) -> list[str]:
    blocks = " + ".join(map(str, stage.blocks)) if len(stage.blocks) < 4 else f"{len(stage.blocks)} × {stage.blocks[1]}"
    times = [f"{seconds * 1e3:.4g} ms" for seconds in (stage.forward, stage.backward)]
    return [blocks, *times, *(f"{stage.memory[name] / 1e9:.2f}" for name in MEMORY_PARTS), f"{stage.peak / 1e9:.2f}"]


def value(found: Prediction, work: Workload) -> dict[str, Any]:
    """As JSON."""
    setup = found.setup
    return {
        "layout": str(setup),
        "seconds": found.seconds,
        "terms": dict(found.terms),
        "hidden_seconds": found.hidden,
        "flops_per_device": found.flops,
        "samples_per_second": setup.batch / found.seconds,
        "tokens_per_second": setup.batch * work.tokens / found.seconds,
        "peak_bytes": found.peak,
        "binds": {"stage": found.binds[0], "part": found.binds[1]},
        "stages": [
            {
                "blocks": list(stage.blocks),
                "forward_seconds": stage.forward,
                "backward_seconds": stage.backward,
                "parameters": stage.parameters,
                "memory": dict(stage.memory),
                "peak_bytes": stage.peak,
            }
            for stage in found.stages
        ],
    }


def against_measured(rows: Sequence[dict[str, str]]) -> str | None:
    """One line on how near a table's predictions are; None where it has nothing measured."""
    both = [row for row in rows if row.get(MEASURED, "").strip()]
    if not both:
        return None
    predicted, measured = ([float(row[name]) for row in both] for name in (PREDICTED, MEASURED))
    off = relative_errors(predicted, measured)
    return (
        f"{plural(len(both), 'row')}: off by {100 * mean(off):.1f} % on average, {100 * median(off):.1f} % in the"
        f" median, {100 * max(off):.0f} % at most; Kendall's tau {kendall_tau(predicted, measured):.2f}"
    )
