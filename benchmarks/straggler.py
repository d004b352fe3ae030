"""One of four workers is five times slower: what each way to keep workers in step makes of it.

python benchmarks/straggler.py            about four minutes

Every sample costs a worker a fixed time, which it sleeps: four workers fit two cores, and who is slow is declared. The
job is digits, a small net. Prints a table and writes benchmarks/results/straggler.json. How to read it: README.md here.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it
from torch import Tensor, nn

import shoal
from contenders import forked, scratch_folder
from notes import Tail
from shoal.driver.launch import train_with
from shoal.paramserver.sync_mode import SyncMode
from shoal.planner.simulate.servers import SimulatedServers, simulate_servers
from shoal.planner.simulate.stragglers import StragglerModel
from shoal.report.events import StepsCommitted, decode
from shoal.worker.run_config import RunConfig
from train import machine

RESULTS = Path(__file__).parent / "results" / "straggler.json"
MODES = ("sync", "quorum:0.75", "stale:3", "async", "groups:2", "local:16")
WORKERS, SLOW, FACTOR = 4, 0, 5.0  # worker 0 is slow
SAMPLE_SECONDS = 0.8e-3  # that a worker sleeps for a sample
BATCH, LANES = 60, 12  # three and four workers have equal shares of it
TARGET, MOST_STEPS, EVALUATE_EVERY = 0.97, 1500, 12
SECONDS = 5.0  # of a run at the speed that theory foresees
SHARE = 0.9  # the issue's target, of the speed of the other three by themselves
HELD = ("quorum", "stale", "async", "groups")  # modes that the target is for


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    began, before = time.monotonic(), machine()
    rounds = options.rounds or (1 if options.quick else 2)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(rounds):
        for mode in options.modes[number % len(options.modes) :] + options.modes[: number % len(options.modes)]:
            row = measure(SyncMode.parse(mode), quick=options.quick, accuracy=options.accuracy)
            found[mode].append(row)
            said = f"{row['with_slow']:7,.0f} samples/s, the other three alone {row['alone']:7,.0f}"
            print(f"round {number + 1} of {rounds}  {mode:12} {said}", file=sys.stderr)
    result = {
        "machine": before,
        "quick": options.quick,
        "rounds": rounds,
        "workers": WORKERS,
        "slow": {"worker": SLOW, "factor": FACTOR},
        "modes": {mode: summary(SyncMode.parse(mode), found[mode]) for mode in options.modes},
        "seconds": round(time.monotonic() - began, 1),
        "load_after": os.getloadavg()[0],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(result))
    print(f"numbers: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="one of four workers is five times slower, in every mode")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES), help=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=None, help="2; with --quick 1")
    parser.add_argument("--no-accuracy", dest="accuracy", action="store_false", help="leave out the time to accuracy")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


# -- the job ----------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Imported here: scikit-learn changes the environment of whoever loads it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def job_of(steps: int, *, slow: bool, notes: Path, seconds: float, target: bool = False) -> shoal.Job:
    """Handwritten digits. The loss takes a fixed time per sample; the slow worker's takes longer. Each call of it is
    noted with its time, by worker."""
    x, y = digits()
    held_out = torch.arange(len(y)) % 5 == 0

    def loss(output: Tensor, label: Tensor) -> Tensor:
        if output.requires_grad:  # evaluation takes no such time
            worker = int(os.environ["RANK"])
            with open(notes / f"calls-{worker}", "a") as file:
                file.write(f"{time.monotonic()}\n")
            time.sleep(seconds * len(label) * (FACTOR if slow and worker == SLOW else 1.0))
        return nn.functional.cross_entropy(output, label)

    return shoal.Job(
        name="digits",
        model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
        data=(x[~held_out], y[~held_out]),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        batch=BATCH,
        lanes=LANES,
        steps=steps,
        evaluate=(x[held_out], y[held_out]) if target else None,
        evaluate_every=EVALUATE_EVERY if target else None,
        metrics={"accuracy": lambda output, label: (output.argmax(dim=1) == label).float().mean()} if target else {},
        target=f"accuracy >= {TARGET}" if target else None,
        checkpoint_every=steps,  # the last one only
    )


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    told: list[StepsCommitted]  # of whoever speaks for the run
    calls: dict[int, list[float]]  # worker -> when its loss was called
    report: dict[str, Any]


def train(mode: SyncMode, steps: int, *, workers: int, slow: bool, seconds: float, target: bool = False) -> Trained:
    """A run as `shoal train --servers 1 --sync MODE --workers N` does it."""
    with scratch_folder() as folder:
        job = job_of(steps, slow=slow, notes=folder, seconds=seconds, target=target)
        config = RunConfig().changed(
            workers=workers, servers=1, sync=str(mode), run_dir=folder / "run", quiet=True, predict=False
        )
        forked(1, lambda _: _train(job, config))
        events = [decode(line) for line in Tail(folder / "run" / "events.jsonl").lines()]
        return Trained(
            told=[event for event in events if isinstance(event, StepsCommitted) and event.leader],
            calls={
                worker: [float(line) for line in (folder / f"calls-{worker}").read_text().split()]
                for worker in range(workers)
                if (folder / f"calls-{worker}").exists()
            },
            report=msgspec.json.decode((folder / "run" / "report.json").read_bytes()),
        )


def _train(job: shoal.Job, config: RunConfig) -> None:
    train_with(job, config)


# -- what is measured -------------------------------------------------------------------------------------------------


def used(mode: SyncMode, workers: int) -> float:
    """Samples of an update: a quorum leaves the others' out."""
    return BATCH * mode.quorum(workers) / workers


def theory(mode: SyncMode, workers: int, *, slow: bool, seconds: float = SAMPLE_SECONDS) -> float:
    """Samples a second, as the simulator has it: computing alone takes time."""
    together = workers if mode.lockstep else workers / mode.number if mode.name == "groups" else 1
    stragglers = StragglerModel(name="slow", size=FACTOR) if slow else StragglerModel()
    setup = SimulatedServers(
        workers=workers,
        servers=1,
        compute=seconds * BATCH / together,
        num_bytes=0,
        bandwidth=1.0,
        sync_mode=mode,
        stragglers=stragglers,
    )
    return simulate_servers(setup, rounds=200).updates_per_second * used(mode, workers)


def steady(told: Sequence[StepsCommitted], per_update: float) -> float:
    """Samples a second in the middle of a run, without its first quarter and its last twentieth. A message's steps are
    spread over its time."""
    spans = [(event.time - event.spent.total - event.lost_seconds, event.time, event.count) for event in told]
    first, last = min(begin for begin, _, _ in spans), max(end for _, end, _ in spans)
    start, stop = first + (last - first) / 4, last - (last - first) / 20
    done = 0.0
    for begin, end, count in spans:
        inside = min(end, stop) - max(begin, start)
        if inside > 0:
            done += count * inside / (end - begin)
    return per_update * done / (stop - start)


def unbounded(calls: dict[int, list[float]], workers: Sequence[int], batches: int) -> float:
    """Samples a second of these workers while they do their first so many batches: with stale:3, while the bound is far
    enough away for all of them."""
    speeds = []
    for worker in workers:
        starts = calls[worker][::LANES]
        some = min(batches, len(starts) - 1)
        speeds.append(BATCH * some / (starts[some] - starts[0]))
    return sum(speeds)


def measure(mode: SyncMode, *, quick: bool, accuracy: bool) -> dict[str, Any]:
    seconds = SAMPLE_SECONDS / 8 if quick else SAMPLE_SECONDS
    long = 0.1 if quick else SECONDS
    others = WORKERS - 1

    def steps(workers: int, slow: bool) -> int:
        most = long * theory(mode, workers, slow=slow, seconds=seconds) / used(mode, workers)
        whole = int(mode.number) if mode.name == "local" else 1
        return max(1, round(most / whole)) * whole

    slowed = train(mode, steps(WORKERS, True), workers=WORKERS, slow=True, seconds=seconds)
    alone = train(mode, steps(others, False), workers=others, slow=False, seconds=seconds)
    servers = slowed.report["servers"]
    row: dict[str, Any] = {
        "with_slow": steady(slowed.told, used(mode, WORKERS)),
        "alone": steady(alone.told, used(mode, others)),
        "staleness": (servers["staleness"] or {}).get("mean"),
        "refused": servers["refused"],
    }
    if mode.name == "stale":
        rest = [worker for worker in range(WORKERS) if worker != SLOW]
        row["until_bound"] = unbounded(slowed.calls, rest, int(mode.number))
        row["alone_until_bound"] = unbounded(alone.calls, range(others), 10**9)
    if accuracy:
        most = 40 if quick else MOST_STEPS
        row["target"] = train(mode, most, workers=WORKERS, slow=True, seconds=seconds, target=True).report["target"]
    return row


def summary(mode: SyncMode, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of rounds. `share`: of what the other three do by themselves; with a bound on staleness, until it."""
    top, bottom = ("until_bound", "alone_until_bound") if mode.name == "stale" else ("with_slow", "alone")
    shares = [row[top] / row[bottom] for row in rows]
    ideal = theory(mode, WORKERS - 1, slow=False)
    reached = [row["target"] for row in rows if row.get("target")]
    in_time = [target["seconds"] for target in reached if target["reached"]]
    whole = ideal if mode.name == "stale" else theory(mode, WORKERS, slow=True)
    return {
        "rounds": list(rows),
        "samples_per_second": {what: _median(rows, what) for what in ("with_slow", "alone")},
        "updates_per_second": _median(rows, "with_slow") / used(mode, WORKERS),
        "share": {"median": statistics.median(shares), "lowest": min(shares), "highest": max(shares)},
        "share_in_the_end": statistics.median(row["with_slow"] / row["alone"] for row in rows),
        "theory": {
            "with_slow": theory(mode, WORKERS, slow=True),
            "alone": ideal,
            "share": whole / ideal,
            "share_in_the_end": theory(mode, WORKERS, slow=True) / ideal,
        },
        "target": SHARE if mode.name in HELD else None,
        "seconds_to_accuracy": statistics.median(in_time) if in_time and len(in_time) == len(reached) else None,
        "steps_to_accuracy": [target["step"] for target in reached],
        "groups": _groups(mode),
    }


def _median(rows: Sequence[dict[str, Any]], what: str) -> float:
    return statistics.median(float(row[what]) for row in rows)


def _groups(mode: SyncMode) -> list[list[int]]:
    if mode.name != "groups":
        return []
    return [[each for each in range(WORKERS) if mode.group_of(each) == group] for group in range(int(mode.number))]


# -- on the screen ----------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    slow = result["slow"]
    lines = [
        f"{result['workers']} workers, 1 server; worker {slow['worker']} is {slow['factor']:g} × slower; a share is of"
        " what the other three do alone, in samples/s",
        f"{'':14}{'updates/s':>10}{'samples/s':>11}{'alone':>8}{'share':>8}{'in rounds':>14}{'theory':>8}{'target':>8}"
        f"{'s to ' + format(TARGET, 'g'):>11}{'steps':>7}",
    ]
    for mode, row in result["modes"].items():
        samples, share = row["samples_per_second"], row["share"]
        took, steps = row["seconds_to_accuracy"], row["steps_to_accuracy"]
        lines.append(
            f"{mode:14}{row['updates_per_second']:10.1f}{samples['with_slow']:11,.0f}{samples['alone']:8,.0f}"
            f"{share['median']:8.2f}{share['lowest']:8.2f}–{share['highest']:.2f}{row['theory']['share']:9.2f}"
            f"{'' if row['target'] is None else format(row['target'], 'g'):>8}"
            f"{'' if took is None else format(took, '.1f'):>11}{'' if not any(steps) else min(filter(None, steps)):>7}"
        )
        if mode.startswith("stale"):
            found, ideal = row["share_in_the_end"], row["theory"]["share_in_the_end"]
            lines.append(f"{'  at its bound':32}{'':11}{found:8.2f}{'':13}{ideal:9.2f}")
    for mode, row in result["modes"].items():
        if row["groups"]:
            groups = ", ".join(" and ".join(map(str, group)) for group in row["groups"])
            lines.append(f"{mode}: workers {groups}")
    cores, before, after = result["machine"]["cores"], result["machine"]["load_before"], result["load_after"]
    return "\n".join([*lines, f"{cores} cores; load {before:.1f} before, {after:.1f} after (its own included)"])


if __name__ == "__main__":
    sys.exit(main())
