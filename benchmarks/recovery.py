"""What safety costs, and what a failure costs:   python benchmarks/recovery.py --torchft install

Without faults, Shoal beside itself with recovery off. With kill -9 of workers, beside torchft and torchrun's restart of
all: the same model, the same kills. Then the speed at which state is handed over, and stopped processes. Prints tables
and writes benchmarks/results/recovery.json. What is measured and how to read it: README.md here.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it

import cases
import shoal
from contenders import forked, scratch_folder
from kills import (
    WORKERS,
    Kill,
    Shoal,
    Start,
    checkpoint_every,
    job_of,
    schedule,
    start_shoal,
    start_torchrun,
    suffer,
    torchft_with,
    why_no_torchft,
)
from notes import Fault, Tail
from shoal.driver.launch import train_with
from shoal.report.events import StepsCommitted, decode
from shoal.worker.run_config import RunConfig
from train import machine, publish, ratio, some_of

RESULTS = Path(__file__).parent / "results" / "recovery.json"
PARTS = ("overhead", "kill", "stop")
CONTENDERS = ("shoal", "torchrun", "torchft", "torchft 1 s")
REST = {"small": (40, 90), "large": (4, 9)}  # steps with everybody before a kill
COPIES = 5


class Kills(NamedTuple):
    """How many, in each round. Peers, which take longer, get the first of them."""

    rounds: int
    shoal: int
    peers: int


KILLS = {"small": Kills(2, 6, 2), "large": Kills(1, 10, 3)}
QUICK_KILLS = {"small": Kills(1, 2, 1), "large": Kills(1, 2, 1)}

# The targets
MOST_OVERHEAD, MOST_OVERHEAD_LONG, LONG_STEP_MS = 1.05, 1.01, 100.0
NEXT_COMMIT, ALL_BACK = 1.0, 2.0  # seconds; plus the redone step, plus copying
COPY_SHARE = 0.5

Faults = dict[str, list[Fault]]  # by contender


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    began, before = time.monotonic(), machine()
    result: dict[str, Any] = {"machine": before, "quick": options.quick, "workers": WORKERS}
    with _torchft(options) as python:
        contenders, result["skipped"] = _contenders(options.contenders, python)
        if "overhead" in options.only:
            result["overhead"] = {name: _overhead(name, options) for name in ("small", "longer")}
        if "kill" in options.only:
            result |= _kills(contenders, options)
        if "stop" in options.only:
            result["stop"] = _stops(options)
    result["seconds"] = round(time.monotonic() - began, 1)
    publish(result, text(result), options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What safety costs and what a failure costs, beside peers")
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--contenders", type=some_of(CONTENDERS), default=list(CONTENDERS), help=f"of {','.join(CONTENDERS)}"
    )
    parser.add_argument("--rounds", type=int, default=None, help="without faults: 3; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, few kills: shows that it works")
    parser.add_argument(
        "--torchft",
        default=os.environ.get("TORCHFT_PYTHON"),
        metavar="PYTHON",
        help="a Python that has torchft-nightly, or 'install': into a temporary folder (a minute)",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


# -- who is compared ------------------------------------------------------------------------------------------------


@contextmanager
def _torchft(options: argparse.Namespace) -> Iterator[Path | None]:
    """A Python that has torchft, as asked for. Never the one that Shoal is installed in: it brings a torch along."""
    wanted = any(name.startswith("torchft") for name in options.contenders) and "kill" in options.only
    if options.torchft != "install" or not wanted:
        yield None if options.torchft in (None, "install") else Path(options.torchft)
        return
    with scratch_folder() as folder:
        place = folder / "torchft"
        print(f"installing torchft-nightly into {place}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        same = f"torch=={torch.__version__.partition('+')[0]}"
        subprocess.run([place / "bin" / "pip", "install", "--quiet", same, "torchft-nightly"], check=False)
        yield place / "bin" / "python"


def _contenders(names: Sequence[str], python: Path | None) -> tuple[dict[str, Start], dict[str, str]]:
    """Those that can run here, and why the others cannot."""
    found: dict[str, Start] = {"shoal": start_shoal, "torchrun": start_torchrun}
    why = why_no_torchft(python) if any(name.startswith("torchft") for name in names) else ""
    if python is not None and not why:
        found["torchft"] = torchft_with(python)
        found["torchft 1 s"] = torchft_with(python, "--heartbeat_timeout_ms", "1000")
    skipped = {name: why for name in names if name not in found}
    for name, reason in skipped.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    return {name: found[name] for name in names if name in found}, skipped


# -- without faults -------------------------------------------------------------------------------------------------


def _overhead(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Step time with recovery and without, in turns."""
    case, rounds = cases.make(name, options.quick), options.rounds or (1 if options.quick else 3)
    found: dict[str, list[float]] = {"elastic": [], "fixed": []}
    for number in range(rounds):
        for mode in ("elastic", "fixed") if number % 2 else ("fixed", "elastic"):
            found[mode].append(_step_ms(case, elastic=mode == "elastic"))
            step = found[mode][-1]
            print(f"{name}  round {number + 1} of {rounds}  {mode:8} {step:9.2f} ms a step", file=sys.stderr)
    medians = {mode: statistics.median(steps) for mode, steps in found.items()}
    return {
        "parameters": case.parameters,
        "batch": case.batch,
        "steps": case.steps,
        "step_ms": found,
        "median_ms": medians,
        "elastic / fixed": ratio(found["elastic"], found["fixed"])
        | {"best": min(found["elastic"]) / min(found["fixed"])},
        "target": MOST_OVERHEAD_LONG if medians["fixed"] >= LONG_STEP_MS else MOST_OVERHEAD,
    }


def _step_ms(case: cases.Case, *, elastic: bool) -> float:
    """The median over the run's own accounts of a few steps each, as the leader tells them."""
    with scratch_folder() as folder:
        job = job_of(case, case.total_steps)
        config = RunConfig().changed(
            workers=WORKERS, run_dir=folder / "run", quiet=True, predict=False, elastic=elastic
        )
        forked(1, lambda rank: _train(job, config))
        events = map(decode, Tail(folder / "run" / "events.jsonl").lines())
        told = [event for event in events if isinstance(event, StepsCommitted) and event.leader]
        late = [event for event in told if event.step - event.count >= case.warm_up] or told
        return 1000 * statistics.median(event.spent.total / event.count for event in late)


def _train(job: shoal.Job, config: RunConfig) -> None:
    train_with(job, config)


# -- with kill -9 ---------------------------------------------------------------------------------------------------


def _kills(contenders: Mapping[str, Start], options: argparse.Namespace) -> dict[str, Any]:
    """In rounds, so that whatever else the machine does falls on all of them."""
    found: dict[str, Any] = {"kill": {}}
    for name, counts in (QUICK_KILLS if options.quick else KILLS).items():
        faults: Faults = {contender: [] for contender in contenders}
        runs: list[Shoal] = []
        copies: list[dict[str, float]] = []
        for number in range(counts.rounds):
            for contender, start in contenders.items():
                if contender == "torchft 1 s" and name != "small":
                    continue
                each = counts.shoal if contender == "shoal" else counts.peers
                kills = schedule(counts.rounds * each, REST[name])[number * each : (number + 1) * each]
                faults[contender] += _suffered(name, contender, start, kills, options.quick, runs)
            if name == "large" and "shoal" in contenders:
                copies.append(_copy_speeds(cases.make(name, options.quick)))
        case = cases.make(name, options.quick)
        found["kill"][name] = {
            "parameters": case.parameters,
            "batch": case.batch,
            "checkpoint_every": checkpoint_every(name),
            "shoal_step_ms": 1000 * _median([step for run in runs for step in run.step_seconds]),
            "contenders": {contender: summary(each) for contender, each in faults.items() if each},
        }
        if copies:
            found["hand_over"] = _hand_over(runs, copies)
    return found


def _suffered(
    name: str, contender: str, start: Start, kills: Sequence[Kill], quick: bool, runs: list[Shoal]
) -> list[Fault]:
    """One run with its part of the kills."""
    with scratch_folder() as folder, start(name, quick, folder) as running:
        faults = suffer(running, kills)
        if isinstance(running, Shoal):
            runs.append(running)
    for fault in faults:
        print(
            f"{name}  {contender:12} worker {fault.worker} killed: next commit after {fault.next_commit:6.2f} s,"
            f" all back after {fault.all_back:6.2f} s, {fault.repeated} steps repeated",
            file=sys.stderr,
        )
    return faults


def summary(faults: Sequence[Fault]) -> dict[str, Any]:
    found: dict[str, Any] = {"kills": len(faults), "faults": [asdict(fault) for fault in faults]}
    for what in ("next_commit", "all_back", "repeated", "dropped"):
        values = [float(getattr(fault, what)) for fault in faults]
        found[what] = {"median": statistics.median(values), "best": min(values), "worst": max(values)}
    return found


def _stops(options: argparse.Namespace) -> dict[str, Any]:
    """SIGSTOP: nobody hears that the process is gone."""
    count = 2 if options.quick else 6
    with scratch_folder() as folder, start_shoal("small", options.quick, folder) as running:
        return summary(suffer(running, schedule(count, REST["small"], signal.SIGSTOP)))


# -- the state of a newcomer ----------------------------------------------------------------------------------------


def _hand_over(runs: Sequence[Shoal], copies: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    handed = [event for run in runs for event in run.handed]
    speeds = [event.num_bytes / event.seconds for event in handed]
    copied = {how: statistics.median(each[how] for each in copies) for how in copies[0]}
    speed = _median(speeds)
    return {
        "num_bytes": handed[0].num_bytes if handed else 0,
        "seconds": [event.seconds for event in handed],
        "bytes_per_second": {"median": speed, "best": max(speeds, default=0.0)},
        "copy_bytes_per_second": copied,
        "hand-over / copy": {how: speed / each for how, each in copied.items()},
        "target": COPY_SHARE,
    }


def _copy_speeds(case: cases.Case) -> dict[str, float]:
    """Bytes per second of copy_ for weights and two moments: over memory that is there, and into new memory, which is
    what a process needs that has just been started."""
    with scratch_folder() as folder:
        note = folder / "copied"

        def work(rank: int) -> None:
            state = [torch.randn_like(each) for each in case.model.parameters() for _ in range(3)]
            total = sum(each.nbytes for each in state)
            target = [torch.empty_like(each) for each in state]
            new = _copy_seconds(state, target)
            again = min(_copy_seconds(state, target) for _ in range(COPIES))
            note.write_bytes(msgspec.json.encode({"again": total / again, "into new memory": total / new}))

        forked(1, work)
        return msgspec.json.decode(note.read_bytes(), type=dict[str, float])


def _copy_seconds(state: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> float:
    began = time.perf_counter()
    for each, room in zip(state, target, strict=True):
        room.copy_(each)
    return time.perf_counter() - began


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# -- on the screen --------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    lines: list[str] = []
    if "overhead" in result:
        lines += [*_overhead_text(result["overhead"]), ""]
    for name, case in result.get("kill", {}).items():
        lines += [*_kill_text(name, case, result["workers"]), ""]
    if "hand_over" in result:
        lines += [*_hand_over_text(result["hand_over"]), ""]
    if "stop" in result:
        found = result["stop"]["next_commit"]
        lines += [f"after SIGSTOP of a worker: next commit {_range(found)} s, of {result['stop']['kills']}", ""]
    lines += [f"{name} was left out: {reason}" for name, reason in result["skipped"].items()]
    return "\n".join(lines)


def _overhead_text(overhead: dict[str, Any]) -> list[str]:
    lines = [
        f"{'without faults, ms a step':28}{'recovery on':>12}{'off':>8}",
        f"{'':28}{'median':>12}{'median':>8}   ratio: {'best':>6}{'median':>8}{'target':>8}   in one round",
    ]
    for name, row in overhead.items():
        found, ms = row["elastic / fixed"], row["median_ms"]
        within = f"{found['lowest']:.3f} to {found['highest']:.3f}"
        ratios = f"{found['best']:6.3f}{found['median']:8.3f}{row['target']:8.2f}"
        lines.append(f"{name:28}{ms['elastic']:12.2f}{ms['fixed']:8.2f}          {ratios}   {within}")
    return lines


def _kill_text(name: str, case: dict[str, Any], workers: int) -> list[str]:
    lines = [
        f"{name}: {case['parameters']:,} parameters, {workers} workers, kill -9 of one;"
        f" a step of Shoal takes {case['shoal_step_ms']:.0f} ms",
        f"{'seconds, median (range)':24}{'next commit':>24}{'all back':>24}{'repeated':>10}{'dropped':>9}{'kills':>7}",
    ]
    for contender, row in case["contenders"].items():
        cells = f"{_range(row['next_commit']):>24}{_range(row['all_back']):>24}"
        counts = f"{row['repeated']['median']:10.0f}{row['dropped']['median']:9.0f}{row['kills']:7}"
        lines.append(f"{contender:24}{cells}{counts}")
    lines.append(
        f"{'target for Shoal':24}{f'≤ {NEXT_COMMIT:.0f} + the redone step':>24}{f'≤ {ALL_BACK:.0f} + copying':>24}"
    )
    return lines


def _hand_over_text(found: dict[str, Any]) -> list[str]:
    shares = ", ".join(
        f"{found['hand-over / copy'][how]:.2f} of a copy {how} ({speed / 1e9:.2f} GB/s)"
        for how, speed in found["copy_bytes_per_second"].items()
    )
    speed = found["bytes_per_second"]
    return [
        f"hand-over of {found['num_bytes'] / 1e6:.0f} MB, digests and restoring included:"
        f" {speed['median'] / 1e9:.2f} GB/s (best {speed['best'] / 1e9:.2f});",
        f"  {shares}; target ≥ {found['target']:.2f}",
    ]


def _range(found: Mapping[str, float]) -> str:
    return f"{found['median']:.2f} ({found['best']:.2f} to {found['worst']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
