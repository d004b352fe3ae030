"""Shoal beside plain PyTorch and DDP on this machine:   make bench   or   python benchmarks/train.py --only conv

Rounds are interleaved: each contender runs once per round, so that whatever else the machine does falls on all of
them. Prints ratios and writes benchmarks/results/train.json. What is measured and how to read it: README.md here.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it

import cases
import shoal
from contenders import CONTENDERS, Measured, in_turns
from driver_cost import Watched, watched

RESULTS = Path(__file__).parent / "results" / "train.json"

# what each ratio is called, and which two contenders it is of
RATIOS = {
    "shoal / ddp": ("shoal", "ddp"),
    "ddp on shoal / ddp": ("ddp on shoal", "ddp"),
    "shoal / plain": ("shoal", "plain"),
    "ddp / plain": ("ddp", "plain"),
    "2 workers / 1 worker": ("shoal", "shoal 1 worker"),
    "apart / plain": ("apart", "plain"),
    "shoal / apart": ("shoal", "apart"),
    "exact / inexact": ("shoal", "shoal inexact"),
    "4 lanes / 2 lanes": ("shoal 4 lanes", "shoal"),
}

Rounds = dict[str, list[Measured]]  # contender -> one per round


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    torch.set_num_threads(1)
    began, before = time.monotonic(), machine()
    found = {name: _measure(cases.make(name, options.quick), options.rounds) for name in options.only}
    driver = _driver_cost(cases.make("short", options.quick), options.rounds)
    result = {
        "machine": before,
        "quick": options.quick,
        "rounds": options.rounds,
        "seconds": round(time.monotonic() - began, 1),
        "cases": {name: summary(cases.make(name, options.quick), rounds) for name, rounds in found.items()},
        "driver": driver,
    }
    publish(result, text(result), options.json)
    return 0


def publish(result: dict[str, Any], table: str, path: Path) -> None:
    """Writes the numbers and prints the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(table)
    print(f"numbers: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Shoal beside plain PyTorch and DDP on this machine")
    parser.add_argument(
        "--only",
        type=some_of(list(cases.CASES), "case "),
        default=list(cases.CASES),
        help=f"of {','.join(cases.CASES)}",
    )
    parser.add_argument("--rounds", type=int, default=None, help="3; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def some_of(known: Sequence[str], what: str = "") -> Any:
    """For an argument: names with commas between. `what` they are names of, for errors."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {what}{', '.join(unknown)}; there are {', '.join(known)}")
        return found

    return names


def _measure(case: cases.Case, count: int) -> Rounds:
    rounds: Rounds = {name: [] for name in CONTENDERS}
    for number, name in in_turns(list(CONTENDERS), count):
        measured = CONTENDERS[name](case)
        rounds[name].append(measured)
        speed = measured.samples_per_second
        print(f"{case.name}  round {number + 1} of {count}  {name:15} {speed:9,.1f} samples/s", file=sys.stderr)
    return rounds


def summary(case: cases.Case, rounds: Rounds, ratios: Mapping[str, tuple[str, str]] = RATIOS) -> dict[str, Any]:
    speeds = {name: [each.samples_per_second for each in measured] for name, measured in rounds.items()}
    return {
        "parameters": case.parameters,
        "batch": case.batch,
        "steps": case.steps,
        "warm_up": case.warm_up,
        "contenders": {
            name: {
                "samples_per_second": speeds[name],
                "best": max(speeds[name]),
                "median": statistics.median(speeds[name]),
                "final_loss": measured[-1].final_loss,
                "step_ms": _median_split(measured),
            }
            for name, measured in rounds.items()
        },
        "ratios": {label: ratio(speeds[over], speeds[under]) for label, (over, under) in ratios.items()},
    }


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Best over best, median over median, and the range of the ratios within a round."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return {
        "best": max(over) / max(under),
        "median": statistics.median(over) / statistics.median(under),
        "lowest": min(each),
        "highest": max(each),
    }


def _median_split(measured: Sequence[Measured]) -> dict[str, float] | None:
    """Of the round with the median step, so that the parts still sum to the whole."""
    if not measured[0].step_ms:
        return None
    ordered = sorted(measured, key=lambda each: each.step_ms["total"])
    return ordered[(len(ordered) - 1) // 2].step_ms


def _driver_cost(case: cases.Case, count: int) -> dict[str, Any]:
    found: dict[str, list[Watched]] = {"quiet": [], "live": []}
    for number in range(count):
        for mode in ("quiet", "live") if number % 2 == 0 else ("live", "quiet"):
            found[mode].append(watched(case, live=mode == "live"))
            step = found[mode][-1].step_ms
            print(f"driver  round {number + 1} of {count}  {mode:15} {step:9.1f} ms a step", file=sys.stderr)
    speeds = {mode: [each.samples_per_second for each in rounds] for mode, rounds in found.items()}
    return {
        "step_ms": {mode: statistics.median(each.step_ms for each in rounds) for mode, rounds in found.items()},
        "driver_share_of_a_core": {
            mode: statistics.median(each.driver_share_of_a_core for each in rounds) for mode, rounds in found.items()
        },
        "ratios": {"live / quiet": ratio(speeds["live"], speeds["quiet"])},
    }


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shoal": shoal.__version__,
    }


# -- on the screen --------------------------------------------------------------------------------------------------

PARTS = ("compute", "wait", "merge", "apply", "data", "other")


def text(result: dict[str, Any]) -> str:
    lines: list[str] = []
    for name, case in result["cases"].items():
        lines += [*_speeds(name, case), "", *_ratios(case["ratios"]), ""]
    driver = result["driver"]
    share, step = driver["driver_share_of_a_core"], driver["step_ms"]
    live = driver["ratios"]["live / quiet"]
    lines += [
        f"the driver, at {step['quiet']:.1f} ms a step: {100 * share['quiet']:.1f} % of a core without progress,"
        f" {100 * share['live']:.1f} % with the live view",
        f"  speed with the live view over speed without: {live['median']:.3f}"
        f" ({live['lowest']:.2f} to {live['highest']:.2f})",
    ]
    return "\n".join(lines)


def _speeds(name: str, case: dict[str, Any]) -> list[str]:
    headings = "".join(f"{part:>9}" for part in PARTS)
    lines = [
        f"{name}: {case['parameters']:,} parameters, batch {case['batch']}, one thread per process",
        f"{'':16}{'samples/s':>20}{'ms of a step, by cause':>46}",
        f"{'':16}{'best':>10}{'median':>10}{headings}",
    ]
    for contender, row in case["contenders"].items():
        split = row["step_ms"]
        cells = "".join(f"{split[part]:9.1f}" for part in PARTS) if split else ""
        lines.append(f"{contender:16}{row['best']:10,.1f}{row['median']:10,.1f}{cells}")
    return lines


def _ratios(ratios: dict[str, dict[str, float]]) -> list[str]:
    lines = [f"{'ratio of speeds':24}{'best':>8}{'median':>8}   in one round"]
    for label, row in ratios.items():
        within = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        lines.append(f"{label:24}{row['best']:8.2f}{row['median']:8.2f}   {within}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
