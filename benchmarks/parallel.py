"""Pipelines, slices and shards: by a layout of Shoal's and by hand with torch's own tools, on this machine.

    python benchmarks/parallel.py --only speed     samples/s beside torch.distributed.pipelining, tensor.parallel, fsdp
    python benchmarks/parallel.py --only bubble    how long a pipeline's workers wait, beside the formula
    python benchmarks/parallel.py --only memory    what they hold at the most, beside the formula

Rounds are interleaved, in rotating order. Prints tables and writes benchmarks/results/parallel.json. What is measured
and how to read it: README.md here.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it

import parallel_pipeline as pipeline
from parallel_cases import Equal, gpt
from parallel_contenders import KINDS, MICROBATCHES, Measured
from shoal.errors import ShoalError, Stopped
from shoal.parallel import pipeline_schedule as schedules
from shoal.report import human
from train import machine, ratio

RESULTS = Path(__file__).parent / "results" / "parallel.json"
SAME = 1e-5  # losses of two contenders, relative: sums in another order, and no more
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    torch.set_num_threads(1)
    began, before = time.monotonic(), machine()
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "speed": speeds,
        "bubble": bubbles,
        "memory": memories,
    }
    result: dict[str, Any] = {"machine": before, "quick": options.quick, "rounds": options.rounds}
    for name in options.only:
        result[name] = parts[name](options)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["load_after"] = os.getloadavg()[0]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(result))
    print(f"numbers: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    def some(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
            return text.split(",")

        return read

    parser = argparse.ArgumentParser(description="Shoal's layouts beside torch's own tools on this machine")
    names = ["speed", "bubble", "memory"]
    parser.add_argument("--only", type=some(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--kinds", type=some(list(KINDS)), default=list(KINDS), help=f"of speed: {','.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=None, help="5; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Nobody is always first."""
    return [*names[number % len(names) :], *names[: number % len(names)]]


# -- speed ------------------------------------------------------------------------------------------------------------


def speeds(options: argparse.Namespace) -> dict[str, Any]:
    """A round is one run of every contender; what cannot run is left out, with the reason."""
    found: dict[str, dict[str, list[Measured]]] = {kind: {name: [] for name in KINDS[kind]} for kind in options.kinds}
    skipped: dict[str, str] = {}
    for number in range(options.rounds):
        for kind in options.kinds:
            for name in rotated(list(KINDS[kind]), number):
                if f"{kind}: {name}" in skipped or (options.quick and not KINDS[kind][name].quick):
                    continue
                try:
                    measured = KINDS[kind][name].run(gpt(options.quick))
                except Stopped:  # by whoever runs this, not by the contender
                    raise
                except (RuntimeError, ShoalError) as error:
                    skipped[f"{kind}: {name}"] = str(error).splitlines()[0]
                    continue
                found[kind][name].append(measured)
                speed = f"{measured.samples_per_second:9,.1f} samples/s"
                print(f"{kind}  round {number + 1} of {options.rounds}  {name:24} {speed}", file=sys.stderr)
    case = gpt(options.quick)
    return {
        "parameters": case.parameters,
        "batch": case.batch,
        "microbatches": MICROBATCHES,
        "steps": case.steps,
        "kinds": {
            kind: _kind(kind, {n: rounds for n, rounds in by_name.items() if rounds and f"{kind}: {n}" not in skipped})
            for kind, by_name in found.items()
        },
        "skipped": skipped,
    }


def _kind(kind: str, found: dict[str, list[Measured]]) -> dict[str, Any]:
    rates = {name: [each.samples_per_second for each in rounds] for name, rounds in found.items()}
    costs = {name: [1 / each.cpu_ms for each in rounds] for name, rounds in found.items()}
    losses = {name: rounds[-1].final_loss for name, rounds in found.items()}
    first = next(iter(losses.values()))
    return {
        "contenders": {
            name: {
                "samples_per_second": rates[name],
                "best": max(rates[name]),
                "median": statistics.median(rates[name]),
                "cpu_ms": {"best": 1 / max(costs[name]), "median": 1 / statistics.median(costs[name])},
                "final_loss": losses[name],
            }
            for name in found
        },
        "losses_alike": all(abs(loss - first) <= SAME * abs(first) for loss in losses.values()),
        "ratios": {
            f"{name} / {peer.against}": ratio(rates[name], rates[peer.against])
            | {"cpu": ratio(costs[name], costs[peer.against])["median"]}
            for name, peer in KINDS[kind].items()
            if name in rates and peer.against in rates and len(rates[name]) == len(rates[peer.against])
        },
    }


# -- the bubble -------------------------------------------------------------------------------------------------------


def bubbles(options: argparse.Namespace) -> dict[str, Any]:
    """Of stages that compute, as many as there are cores; and of stages that only take their time."""
    cores = len(os.sched_getaffinity(0))
    cells = [
        Cell(kind, ranks, schedule, size)
        for kind in ("timed", "computing")
        for ranks in ((2,) if options.quick else (2, 4))
        if kind == "timed" or ranks <= cores
        for schedule in (SCHEDULES[1:2] if options.quick else SCHEDULES)
        for size in ((4,) if options.quick else (4, 8, 16))
        if not options.quick or kind == "timed"
    ]
    found: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    for number in range(options.rounds):
        for cell in cells[number % len(cells) :] + cells[: number % len(cells)]:
            found[cell].append(pipeline.bubble(_bubble_case(cell, options.quick), cell.ranks, cell.schedule))
            print(f"bubble  round {number + 1}  {cell}: {found[cell][-1]['measured']:.3f}", file=sys.stderr)
    return {"cores": cores, "rows": [_bubble_row(cell, rows) for cell, rows in found.items()]}


class Cell(NamedTuple):
    kind: str
    ranks: int
    schedule: str
    microbatches: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.schedule}, {self.ranks} x {self.microbatches}"


def _bubble_case(cell: Cell, quick: bool) -> Equal:
    if cell.kind == "computing":
        return Equal(width=512, depth=8, samples=128, microbatches=cell.microbatches, steps=12)
    # A stage's forward takes 20 ms, however many stages there are and blocks in each.
    depth = 8
    stages = cell.ranks * (1 if cell.schedule in schedules.ONE_STAGE else 2)
    seconds = 0.002 if quick else 0.02 * stages / depth
    return Equal(width=0, depth=depth, samples=1, microbatches=cell.microbatches, steps=6, seconds=seconds)


def _bubble_row(cell: Cell, found: list[dict[str, float]]) -> dict[str, Any]:
    theory = pipeline.bubble_in_theory(cell.ranks, cell.schedule, cell.microbatches)
    all_measured = [each["measured"] for each in found]
    best, median = min(all_measured), statistics.median(all_measured)
    return {
        **cell._asdict(),
        "theory": theory,
        "measured": all_measured,
        "best": best,
        "median": median,
        "best_relative": best / theory - 1,
        "median_relative": median / theory - 1,
        "best_absolute": best - theory,
        "median_absolute": median - theory,
        "busiest_over_mean": statistics.median(each["busiest_over_mean"] for each in found),
    }


# -- memory -----------------------------------------------------------------------------------------------------------


def memories(options: argparse.Namespace) -> dict[str, Any]:
    sizes = (4,) if options.quick else (8, 16)
    rows = []
    for size in sizes:
        width, samples = (16, 64) if options.quick else (64, 8192)
        case = Equal(width=width, depth=8, samples=samples, microbatches=size, steps=3)
        peak = {schedule: pipeline.peaks(case, "pipeline=2", schedule) for schedule in ("gpipe", "1f1b")}
        each = pipeline.held(case, 2)
        flying = {schedule: pipeline.in_flight(schedule, 2, size) for schedule in peak}
        for stage in range(2):
            measured = peak["gpipe"][stage] - peak["1f1b"][stage]
            predicted = (flying["gpipe"][stage] - flying["1f1b"][stage]) * each[stage]
            rows.append(
                {
                    "microbatches": size,
                    "stage": stage,
                    "held_by_a_microbatch": each[stage],
                    "in_flight": {schedule: flying[schedule][stage] for schedule in peak},
                    "peak": {schedule: peak[schedule][stage] for schedule in peak},
                    "difference": measured,
                    "predicted": predicted,
                    "relative": measured / predicted - 1,
                }
            )
            print(f"memory  {size} microbatches, stage {stage}: {measured} of {predicted}", file=sys.stderr)
    return {"pipeline": rows, **_sharded_memory(options)}


def _sharded_memory(options: argparse.Namespace) -> dict[str, Any]:
    width, depth = (32, 2) if options.quick else (1024, 8)
    case = Equal(width=width, depth=depth, samples=4, microbatches=2, steps=3)
    rows, skipped = [], {}
    layouts = ("data=2", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3")
    for layout in layouts[3:] if options.quick else layouts:
        more: dict[str, Any] = {"lanes": 2, "microbatches": 1}
        try:
            peak = max(pipeline.peaks(case, layout, **more))
            need = pipeline.needed(case, layout, **more)
        except Stopped:
            raise
        except (RuntimeError, ShoalError) as error:
            skipped[layout] = str(error).splitlines()[0]
            continue
        rows.append(
            {
                "layout": layout,
                "peak": peak,
                "formula": need.total,
                "parts": need.by_category(),
                "ratio": peak / need.total,
            }
        )
        print(f"memory  {layout}: {peak} of {need.total}", file=sys.stderr)
    return {"sharding": rows, "parameters": sum(p.numel() for p in case.model().parameters()), "skipped": skipped}


# -- on the screen ----------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, show in (("speed", _show_speed), ("bubble", _show_bubble), ("memory", _show_memory)):
        if name in result:
            lines += [*show(result[name]), ""]
    return "\n".join(lines)


def _show_speed(found: dict[str, Any]) -> list[str]:
    lines = [
        f"a GPT of {found['parameters']:,} parameters, batch {found['batch']}, 2 workers of one thread each",
        f"pipeline: {found['microbatches']} microbatches, which a job has as 1 lane x {found['microbatches']}"
        f" (or 4 lanes x {found['microbatches'] // 4}); sharding: half a batch each, which a job has as 2 lanes",
    ]
    for kind, row in found["kinds"].items():
        lines += ["", f"{kind:28}{'samples/s: best':>16}{'median':>10}{'cpu ms a step':>16}{'last loss':>12}"]
        for name, each in row["contenders"].items():
            speed, cpu = f"{each['best']:16,.1f}{each['median']:10,.1f}", f"{each['cpu_ms']['median']:16,.1f}"
            lines.append(f"  {name:26}{speed}{cpu}{each['final_loss']:12.6f}")
        lines.append("  losses are alike" if row["losses_alike"] else "  LOSSES DIFFER: not the same work")
        lines.append(f"  {'ratio of speeds':48}{'best':>6}{'median':>8}{'by cpu':>8}   in one round")
        for label, each in row["ratios"].items():
            within = f"{each['lowest']:.2f} to {each['highest']:.2f}"
            lines.append(f"  {label:48}{each['best']:6.2f}{each['median']:8.2f}{each['cpu']:8.2f}   {within}")
    return [*lines, *(f"left out: {name}: {reason}" for name, reason in found["skipped"].items())]


def _show_bubble(found: dict[str, Any]) -> list[str]:
    lines = [
        f"bubble: equal stages, which compute (on {found['cores']} cores) or only take their time (timed)",
        f"{'':30}{'theory':>8}{'best':>8}{'off':>8}{'points':>8}{'median':>9}{'off':>8}{'points':>8}",
    ]
    for row in found["rows"]:
        name = str(Cell(*(row[field] for field in Cell._fields)))
        lines.append(
            f"{name:30}{row['theory']:8.3f}{row['best']:8.3f}{row['best_relative']:+8.0%}"
            f"{100 * row['best_absolute']:+8.1f}{row['median']:9.3f}{row['median_relative']:+8.0%}"
            f"{100 * row['median_absolute']:+8.1f}"
        )
    return [*lines, "off: over what theory says; points: hundredths of the workers' time"]


def _show_memory(found: dict[str, Any]) -> list[str]:
    lines = [f"{'memory of a stage at its peak':32}{'gpipe':>10}{'1f1b':>10}{'less':>10}{'formula':>10}{'off':>7}"]
    for row in found["pipeline"]:
        name = f"{row['microbatches']} microbatches, stage {row['stage']}"
        cells = (row["peak"]["gpipe"], row["peak"]["1f1b"], row["difference"], row["predicted"])
        lines.append(f"{name:32}" + "".join(f"{human.size(each):>10}" for each in cells) + f"{row['relative']:+7.0%}")
    lines += ["", f"{found['parameters']:,} parameters, AdamW{'':12}{'peak':>10}{'formula':>10}{'over it':>9}"]
    for row in found["sharding"]:
        sizes = f"{human.size(row['peak']):>10}{human.size(row['formula']):>10}"
        lines.append(f"  {row['layout']:36}{sizes}{row['ratio']:9.2f}")
    return [*lines, *(f"left out: {name}: {reason}" for name, reason in found["skipped"].items())]


if __name__ == "__main__":
    sys.exit(main())
