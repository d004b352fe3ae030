"""Predictions held against the clock on this machine: step time and peak memory of jobs under many layouts.

    python benchmarks/planner.py                     probes, predicts, trains; about six minutes on two free cores
    python benchmarks/planner.py --cluster FILE      with what `shoal cluster probe` wrote before
    python benchmarks/planner.py --only gpt,mlp      some of the jobs

Rounds are interleaved; a pair's figure is its best round, a round's its median step. Prints tables and writes
benchmarks/results/planner.json. What is measured and how to read it: README.md here.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo  # optimizers load it at their first step; loaded here once, every forked process has it
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.driver.make_plan import open_job
from shoal.driver.probe_machine import cluster_of, probe
from shoal.parallel.layout import ParallelLayout
from shoal.planner.cluster import Cluster, find_cluster
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import Prediction
from shoal.planner.cost.runtime import SHOAL
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Workload
from shoal.planner.trace_job import workload_of
from shoal.report.events import TIME_PARTS, StepsCommitted
from shoal.report.run_folder import RunFolder
from train import machine

RESULTS = Path(__file__).parent / "results" / "planner.json"
EXAMPLES = Path(__file__).parent.parent / "examples"
WARM_UP = 3  # steps that are not counted
SECONDS, QUICK_SECONDS = 2.0, 0.3  # that a run's steps should take
LEAST_STEPS, MOST_STEPS = 6, 150
TIME_GOAL, MEMORY_GOAL, CHOICE_GOAL = 0.15, 0.10, 0.10
# Parts of a measured step beside the terms of a prediction that they should come to.
BESIDE: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "compute": (("compute",), ("compute", "recompute", "host", "tensor")),
    "traffic": (("wait", "merge", "data"), ("bubble", "data")),
    "update": (("apply", "other"), ("optimizer",)),
}


# -- jobs and layouts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Way:
    """A layout of a job."""

    layout: str
    recompute: bool = False

    def __str__(self) -> str:
        return self.layout + (" again" if self.recompute else "")


def read_way(text: str) -> Way:
    layout, _, again = text.partition(" ")
    return Way(layout=layout, recompute=again == "again")


WAYS: Mapping[str, Sequence[str]] = {
    "gpt": ("data=1", "data=2", "data=4", "pipeline=2", "data=2,pipeline=2", "data=2,zero=1", "data=2,zero=2",
            "data=2,zero=3", "tensor=2"),
    "larger gpt": ("data=1", "data=2", "pipeline=2", "data=2,zero=2", "data=2 again"),
    "mlp": ("data=1", "data=2", "data=3", "data=4", "data=2,zero=3"),
    "conv": ("data=1", "data=2", "data=4"),
    "text": ("data=1", "data=2"),
}  # fmt: skip


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def mlp() -> shoal.Job:
    return shoal.Job(
        name="mlp",
        model=lambda: nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, 10),
        ),
        data=(torch.rand(4096, 256), torch.arange(4096) % 10),
        loss=F.cross_entropy,
        optimizer=_adam,
        batch=512,
        steps=10,
    )  # fmt: skip


def conv() -> shoal.Job:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 10),
        )  # fmt: skip

    return shoal.Job(
        name="conv",
        model=model,
        data=(torch.rand(512, 3, 32, 32), torch.arange(512) % 10),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9),
        batch=64,
        steps=10,
    )


def jobs(names: Sequence[str]) -> dict[str, shoal.Job]:
    """Without evaluation: what is predicted is a step."""
    makes: Mapping[str, Callable[[], shoal.Job]] = {
        "gpt": lambda: example("gpt").job,
        "larger gpt": lambda: example("gpt").larger,
        "mlp": mlp,
        "conv": conv,
        "text": lambda: example("text").job,
    }
    return {name: makes[name]().changed(evaluate=None, evaluate_every=None, epochs=None, steps=10) for name in names}


def setup_of(job: shoal.Job, way: Way) -> Setup:
    layout = ParallelLayout.parse(way.layout)
    return Setup(
        data=layout.data,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        batch=job.batch_size,
        microbatch=job.batch_size // (job.lane_count * job.microbatches),
        lanes=job.lane_count,
        recompute="full" if way.recompute else "none",
    )


# -- one run ----------------------------------------------------------------------------------------------------------


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # of the median step
    parts: dict[str, float]  # seconds by cause, mean of all workers
    peak: float  # bytes of the worker that held most


def run(job: shoal.Job, way: Way, steps: int) -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        report = shoal.train(
            job.changed(steps=WARM_UP + steps),
            layout=way.layout,
            recompute=way.recompute,
            run_dir=Path(scratch) / "run",
            quiet=True,
            slow="ignore",
        )
        told = [event for event in RunFolder.open(report.folder).read_events() if isinstance(event, StepsCommitted)]
        return measured(told, [each["peak_bytes"] for each in report.value["model_shards"]])


def measured(told: Sequence[StepsCommitted], peaks: Sequence[float]) -> Measured:
    """Of what the workers told after the first steps. A message tells of one step or of a few."""
    later = [each for each in told if each.step - each.count >= WARM_UP - 1 and each.count]
    laps = [(each.spent.total / each.count) for each in later for _ in range(each.count)]
    count = sum(each.count for each in later)
    parts = {part: sum(getattr(each.spent, part) for each in later) / count for part in TIME_PARTS}
    return Measured(seconds=statistics.median(laps), parts=parts, peak=max(peaks))


# -- a table ----------------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    way: str
    workers: int
    predicted: float
    measured: float
    predicted_terms: dict[str, float]
    measured_parts: dict[str, float]
    predicted_peak: float
    measured_peak: float
    rounds: list[float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float:
        return self.predicted_peak / self.measured_peak - 1


def row(name: str, way: Way, told: Prediction, rounds: Sequence[Measured]) -> Row:
    best = min(rounds, key=lambda each: each.seconds)
    return Row(
        job=name,
        way=str(way),
        workers=told.setup.devices,
        predicted=told.seconds,
        measured=best.seconds,
        predicted_terms=dict(told.terms),
        measured_parts=best.parts,
        predicted_peak=told.peak,
        measured_peak=statistics.median(each.peak for each in rounds),
        rounds=[each.seconds for each in rounds],
    )


def choices(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By job: the layout that is predicted to be the best, the best one, and how much longer the first one takes."""
    found = {}
    for job in dict.fromkeys(each.job for each in rows):
        own = [each for each in rows if each.job == job]
        chosen, best = min(own, key=lambda each: each.predicted), min(own, key=lambda each: each.measured)
        found[job] = {"chosen": chosen.way, "best": best.way, "longer": chosen.measured / best.measured - 1}
    return found


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "pairs": len(rows),
        "step_error": statistics.median(abs(each.error) for each in rows),
        "peak_error": statistics.median(abs(each.peak_error) for each in rows),
        "choices": choices(rows),
    }


def text(rows: Sequence[Row]) -> str:
    lines = [f"{'job':11} {'layout':18} {'predicted':>10} {'measured':>10} {'error':>6}   "
             f"{'compute':>15} {'traffic':>15} {'update':>13}   {'memory':>15} {'error':>6}"]  # fmt: skip
    for each in rows:
        lines.append(
            f"{each.job:11} {each.way:18} {1e3 * each.predicted:7.1f} ms {1e3 * each.measured:7.1f} ms"
            f" {each.error:+6.0%}   {_beside(each, 'compute'):>15} {_beside(each, 'traffic'):>15}"
            f" {_beside(each, 'update'):>13}   {each.predicted_peak / 1e6:6.1f} : {each.measured_peak / 1e6:5.1f}M"
            f" {each.peak_error:+6.0%}"
        )
    found = summary(rows)
    lines += ["", f"median error of step time {found['step_error']:.1%} (goal {TIME_GOAL:.0%}), of peak memory"
              f" {found['peak_error']:.1%} (goal {MEMORY_GOAL:.0%}), {len(rows)} pairs; parts are predicted : measured,"
              " in ms"]  # fmt: skip
    for job, choice in found["choices"].items():
        lines.append(
            f"{job:11} predicted best {choice['chosen']}, measured best {choice['best']}: {choice['longer']:.1%} longer"
            f" (goal {CHOICE_GOAL:.0%})"
        )
    return "\n".join(lines)


def _beside(row: Row, part: str) -> str:
    ours, theirs = BESIDE[part]
    predicted = 1e3 * sum(row.predicted_terms[name] for name in theirs)
    seen = 1e3 * sum(row.measured_parts[name] for name in ours)
    return f"{predicted:.1f} : {seen:.1f}"


# -- the benchmark ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 3)
    torch.set_num_threads(1)
    began, before = time.monotonic(), machine()
    cluster = find_cluster(str(options.cluster)) if options.cluster else _probed(options.quick)
    pairs = _pairs(options.only, options.quick)
    predictions = {
        (name, str(way)): predict(work, setup_of(job, way), cluster, SHOAL) for name, job, work, way in pairs
    }
    found: dict[tuple[str, str], list[Measured]] = {key: [] for key in predictions}
    for number in range(rounds if not options.dry else 0):
        for name, job, _, way in pairs:
            key = name, str(way)
            aim = (QUICK_SECONDS if options.quick else SECONDS) / predictions[key].seconds
            steps = round(min(MOST_STEPS, max(LEAST_STEPS, aim)))
            found[key].append(run(job, way, steps))
            seconds = found[key][-1].seconds
            print(f"round {number + 1} of {rounds}  {name:11} {way!s:18} {1e3 * seconds:8.1f} ms", file=sys.stderr)
    if options.dry:
        for key, each in predictions.items():
            print(f"{key[0]:11} {key[1]:18} {1e3 * each.seconds:8.1f} ms {each.peak / 1e6:8.1f} MB")
        return 0
    rows = [row(name, way, predictions[name, str(way)], found[name, str(way)]) for name, _, _, way in pairs]
    result = {
        "machine": before,
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "load_after": os.getloadavg()[0],
        "rows": [msgspec.to_builtins(each) | {"error": each.error, "peak_error": each.peak_error} for each in rows],
        **summary(rows),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(rows))
    print(f"numbers: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    def some(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in WAYS]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(WAYS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description="predicted against measured steps on this machine")
    parser.add_argument("--cluster", type=Path, help="what a probe wrote; without it, this machine is probed first")
    parser.add_argument("--only", type=some, default=list(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=None, help="3; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="fewer pairs and steps: about a minute; rough")
    parser.add_argument("--dry", action="store_true", help="predicts and runs nothing")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def _probed(quick: bool) -> Cluster:
    return cluster_of(probe(quick=quick, progress=lambda what: print(what, file=sys.stderr)))


def _pairs(names: Sequence[str], quick: bool) -> list[tuple[str, shoal.Job, Workload, Way]]:
    found = []
    for name, job in jobs(names).items():
        work = workload_of(job, open_job(job).source)
        ways = [read_way(each) for each in WAYS[name]]
        found += [(name, job, work, way) for way in (ways[:2] if quick else ways)]
    return found


if __name__ == "__main__":
    sys.exit(main())
