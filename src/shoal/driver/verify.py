"""`shoal verify`: runs a job or a script on several placements and compares the sha256."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.driver.check_plan import check_servers
from shoal.driver.launch import train_opened
from shoal.driver.launchers.lab import Lab
from shoal.driver.make_plan import open_job
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.errors import InputError
from shoal.job.job import Job
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.export import load_weights
from shoal.report.events import StepDigest, decode
from shoal.report.human import plural
from shoal.transport.owned_folder import OwnedFolder
from shoal.worker.job_setup import OpenJob
from shoal.worker.run_config import RunConfig, Servers

SPLIT_TOLERANCE, ADAPTIVE_TOLERANCE = 1e-6, 1e-4  # the same for split operators in fp32, after some 20 steps
ADAPTIVE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Rprop")

StepDigests = dict[int, dict[str, str]]  # step -> tensor -> digest


@dataclass(frozen=True, kw_only=True)
class VerifyPlacement:
    """One run to compare with the reference, which runs on one worker of this machine."""

    config: RunConfig
    lab: Lab | None = None  # whose hosts the workers run on
    resume_workers: int | None = None  # a run that stops half way goes on with so many

    @property
    def workers(self) -> int:
        layout = self.config.parallel.parallel_layout
        return (self.config.parallel.workers or 1) if layout is None else layout.workers

    @property
    def label(self) -> str:
        asked, layout, stops = self.config.parallel, self.config.parallel.parallel_layout, self.config.checkpoint
        words = [plural(self.workers, "worker") if layout is None else str(layout)]
        words += [asked.schedule] if layout is not None and layout.pipeline > 1 else []
        words += ["recomputed"] if asked.recompute else []
        words += [plural(self.config.servers.count, "server")] if self.config.servers.count else []
        if self.lab is not None:
            hosts, algorithm = self.lab.slots(self.workers)[0].host_count, self.config.communication.algorithm
            words += [plural(hosts, "lab host"), *([algorithm] if algorithm and hosts > 1 else [])]
        words += [f"overlap {self.config.communication.overlap}"] * (self.config.communication.overlap != "auto")
        words += [f"shares {asked.shares}"] if asked.shares else []
        if stops.stop_after is not None:
            words += [f"stopped at step {stops.stop_after}", f"resumed on {self.resume_workers}"]
        return ", ".join(words)

    def within(self, steps: int) -> "VerifyPlacement":
        """The same for a run of so many steps: a stop half way comes before its end."""
        stop = self.config.checkpoint.stop_after
        return (
            self
            if stop is None or stop < steps
            else replace(self, config=self.config.changed(stop_after=steps // 2 or 1))
        )

    @property
    def exact(self) -> bool:
        """False where an operator is split, which changes the order of sums: there a distance is measured."""
        layout = self.config.parallel.parallel_layout
        return layout is None or layout.exact


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """The first tensor in which two runs differ, and by how much."""

    step: int
    tensor: str
    shape: tuple[int, ...]
    differing: int
    elements: int
    largest_absolute: float
    largest_relative: float
    others: int  # further tensors that differ at that step

    def __str__(self) -> str:
        size = "×".join(map(str, self.shape)) or "scalar"
        more = f", and {self.others} more tensors" if self.others else ""
        return (
            f"first difference: step {self.step}, {self.tensor} ({size}): {self.differing} of {self.elements} elements"
            f" differ, largest absolute {self.largest_absolute:.3g}, relative {self.largest_relative:.3g}{more}"
        )


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    label: str
    weights_sha256: str
    seconds: float
    steps: int
    difference: WeightDifference | None = None
    distance: float | None = None  # of split operators: norm of the difference over the norm of the weights
    bound: float = 0.0

    @property
    def verdict(self) -> str:
        if self.distance is not None:
            within = "within" if self.difference is None else "NOT within"
            return f"{self.distance:.1e} of the weights' norm, {within} {self.bound:g}"
        return "differs" if self.difference else "equal"


def placement(**fields: Any) -> VerifyPlacement:
    return VerifyPlacement(config=RunConfig().changed(**fields))


def placements(workers: list[int], shares: list[str], resume: bool, steps: int) -> list[VerifyPlacement]:
    most = max(workers, default=1)
    found = [placement(workers=count) for count in workers]
    found += [placement(workers=most if text == "auto" else text.count(",") + 1, shares=text) for text in shares]
    if resume:
        stopped = placement(workers=most, stop_after=max(1, steps // 2))
        found.append(replace(stopped, resume_workers=max(1, most - 1)))
    return found


def layout_placements(layouts: list[str], schedule: str, recompute: bool) -> list[VerifyPlacement]:
    """One placement for each layout; for a pipeline and `schedule` "all", one for each schedule."""
    found = []
    for text in layouts:
        names = [schedule]
        if schedule == "all":
            names = list(SCHEDULE_NAMES) if ParallelLayout.parse(text).pipeline > 1 else ["1f1b"]
        found += [placement(layout=text, schedule=name, recompute=recompute) for name in names]
    return found


def server_placements(workers: list[int], servers: Servers) -> list[VerifyPlacement]:
    """The same numbers of workers with parameter servers. Raises InputError for a mode that is not exact."""
    for count in workers:
        mode = check_servers(servers, workers=count)
        if mode is not None and not mode.exact:
            fix = f"--sync sync; shoal compare FILE --sync sync,{mode} shows what it gains and costs"
            raise InputError(f"--sync {mode} gives up exactness, and verify compares bits", fix=fix)
    return [placement(workers=count, servers=servers) for count in workers if servers.count]


def exact_comm_options(asked: CommOptions) -> CommOptions:
    """The options of the run or of the environment. Raises InputError for those that give up exactness."""
    found = options_from_environment(asked)
    CommConfig.from_options(found)
    if found.compress:
        named = f"--compress {asked.compress}" if asked.compress else f"SHOAL_COMPRESS={found.compress}"
        why, fix = "compression gives up exactness", "leave it out; shoal train --compress … reports the error it makes"
    elif found.algorithm == "ring":
        named = "--algorithm ring" if asked.algorithm else "SHOAL_ALGORITHM=ring"
        why, fix = "a ring adds in an order of its own", "one of direct, tree, halving, hierarchical: the same bits"
    else:
        return found
    raise InputError(f"{why}, and verify compares bits: {named}", fix=fix)


class Verified(Protocol):
    """What is verified: a job, or a script with a loop of its own."""

    def trace(self, placed: VerifyPlacement, folder: Path, steps: int) -> tuple[VerifyRow, StepDigests]:
        """Runs it for so many steps at most, in this folder; returns its row and the digests of every step."""
        ...


@dataclass(frozen=True, kw_only=True)
class VerifiedJob:
    opened: OpenJob
    name: str

    def trace(self, placed: VerifyPlacement, folder: Path, steps: int) -> tuple[VerifyRow, StepDigests]:
        opened = replace(self.opened, steps=steps)
        config = traced_config(placed, folder, steps)
        launcher = None if placed.lab is None else placed.lab.launcher
        if config.checkpoint.stop_after is not None:
            with stops_at(config.checkpoint.stop_after):
                train_opened(opened, config, name=self.name, launcher=launcher)
            config = config.changed(workers=placed.resume_workers, resume=True, stop_after=None)
        report = train_opened(opened, config, name=self.name, launcher=launcher)
        return verify_row(placed, report.value), read_digests(folder)


def verify(job: Job, wanted: list[VerifyPlacement], steps: int, *, name: str) -> Iterator[VerifyRow]:
    """Yields a row for the reference on one worker, then one for each placement, up to the first that differs."""
    # Evaluation changes no bit, and a target would end the run early.
    opened = open_job(job.unwatched().changed(steps=steps))
    return compare_placements(VerifiedJob(opened=opened, name=name), wanted, steps)


def compare_placements(subject: Verified, wanted: list[VerifyPlacement], steps: int) -> Iterator[VerifyRow]:
    """The same for a job or a script; a script may end before so many steps."""
    with runs_folder() as root:
        reference, expected = subject.trace(placement(workers=1), root / "reference", steps)
        yield replace(reference, label="reference")
        for number, other in enumerate(each.within(reference.steps) for each in wanted):
            row, digests = subject.trace(other, root / str(number), steps)
            if not other.exact:
                row = _distance(row, root / "reference", root / str(number))
                if row.distance is not None and row.distance <= row.bound:
                    yield row
                    continue
            step = _first_difference(expected, digests)
            if step is None and row.weights_sha256 == reference.weights_sha256:
                yield row
                continue
            at = step or reference.steps
            own = digests.get(at, {})
            names = [key for key, value in expected.get(at, {}).items() if own.get(key) != value]
            yield replace(row, difference=_measure(subject, other, at, names, root))
            return


@contextmanager
def stops_at(step: int) -> Iterator[None]:
    """For a run that is stopped on purpose after a step: a stop before it is the user's."""
    try:
        yield
    except RunInterrupted as stopped:
        if stopped.report["steps"] < step:
            raise


@contextmanager
def runs_folder() -> Iterator[Path]:
    """A temporary folder for the runs. Of a run that failed, all but its checkpoints stays: the error names its log."""
    owned = OwnedFolder("verify")
    root = owned.path
    kept: Path | None = None
    try:
        yield root
    except RunFailed as error:
        kept = Path(error.report["folder"])
        error.where = (*error.where, f"kept: {kept}")
        raise
    except RunInterrupted as error:  # its folder goes with the others, so there is nothing to resume
        error.message, error.where, error.fix = "stopped before all runs were compared: nothing is kept", (), None
        error.exit_code = 130
        raise
    finally:
        for folder in root.iterdir():
            shutil.rmtree(folder / "checkpoints" if folder == kept else folder, ignore_errors=True)
        if kept is None:
            owned.remove()
        else:
            owned.keep()


def traced_config(placed: VerifyPlacement, folder: Path, steps: int) -> RunConfig:
    """The configuration of a run whose every step is recorded."""
    return placed.config.changed(
        digests=True, checkpoint_every=steps + 1, run_dir=folder, quiet=True, elastic=False, predict=False
    )


def verify_row(placed: VerifyPlacement, report: dict[str, Any]) -> VerifyRow:
    sha256, seconds = str(report["weights_sha256"]), float(report["seconds"])
    return VerifyRow(label=placed.label, weights_sha256=sha256, seconds=seconds, steps=int(report["steps"]))


def read_digests(folder: Path) -> StepDigests:
    events = (decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines())
    return {event.step: event.tensors for event in events if isinstance(event, StepDigest)}


def _distance(row: VerifyRow, reference: Path, folder: Path) -> VerifyRow:
    left, _ = load_weights(reference / "model.safetensors")
    right, _ = load_weights(folder / "model.safetensors")
    numbers = {name: tensor.double() for name, tensor in left.items() if tensor.is_floating_point()}
    gap = sum((right[name].double() - tensor).square().sum().item() for name, tensor in numbers.items()) ** 0.5
    size = sum(tensor.square().sum().item() for tensor in numbers.values()) ** 0.5
    found = CheckpointDirectory(reference / "checkpoints").newest()
    kind = "" if found is None else found.snapshot.values["optimizer"]["kind"]
    bound = ADAPTIVE_TOLERANCE if kind in ADAPTIVE else SPLIT_TOLERANCE
    return replace(row, distance=gap / (size or 1.0), bound=bound)


def _first_difference(expected: StepDigests, found: StepDigests) -> int | None:
    return next((step for step in sorted(expected) if found.get(step) != expected[step]), None)


def _measure(subject: Verified, other: VerifyPlacement, step: int, names: list[str], root: Path) -> WeightDifference:
    """Runs both again up to the first step that differs, and compares the numbers. `names`: tensors that differ."""
    again = replace(other, config=other.config.changed(stop_after=None))
    subject.trace(placement(workers=1), root / "reference-again", step)
    subject.trace(again, root / "again", step)
    left, _ = load_weights(root / "reference-again" / "model.safetensors")
    right, _ = load_weights(root / "again" / "model.safetensors")
    differing = [key for key in names if not torch.equal(left[key], right[key])]
    tensor = [*differing, *names, *left][0]
    a, b = left[tensor].double(), right[tensor].double()
    gap = (a - b).abs()
    relative = gap / a.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return WeightDifference(
        step=step,
        tensor=tensor,
        shape=tuple(a.shape),
        differing=int((left[tensor] != right[tensor]).sum()),
        elements=a.numel(),
        largest_absolute=float(gap.max()) if gap.numel() else 0.0,
        largest_relative=float(relative.max()) if gap.numel() else 0.0,
        others=max(0, len(names) - 1),
    )
