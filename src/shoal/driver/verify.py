"""`shoal verify`: the same job on several placements, one sha256 each; and against a plain loop that knows no Shoal."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.driver.check_plan import check_servers
from shoal.driver.launch import train_opened
from shoal.driver.launchers.lab import Lab
from shoal.driver.make_plan import open_job
from shoal.errors import InputError, Stopped
from shoal.job.job import Job
from shoal.job.loss import split_sample
from shoal.numerics import kernels
from shoal.numerics.kernels import map_tensors
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, check_schedule_name
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.export import load_weights
from shoal.report.events import StepDigest, decode
from shoal.worker.build_model import build_model
from shoal.worker.main import OpenJob
from shoal.worker.run_config import RunConfig, Servers

PLAIN_TOLERANCE = 1e-8  # norm of the difference over the norm of the weights, in fp64
SPLIT_TOLERANCE, ADAPTIVE_TOLERANCE = 1e-6, 1e-4  # the same for split operators in fp32, after some 20 steps
ADAPTIVE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Rprop")


@dataclass(frozen=True, kw_only=True)
class VerifyPlacement:
    workers: int
    shares: str | None = None
    stop_after: int | None = None  # then resumed, on `then` workers
    resume_workers: int | None = None
    layout: ParallelLayout | None = None
    schedule: str = "1f1b"
    recompute: bool = False
    servers: int = 0  # parameter servers that hold the weights
    sync_mode: str = ""  # how they keep workers in step
    lab: Lab | None = None  # whose hosts its workers run on; the reference runs on this machine
    comm_options: CommOptions = field(default_factory=CommOptions)  # how gradients travel between them

    @property
    def label(self) -> str:
        text = f"{self.workers} worker{'s' if self.workers > 1 else ''}" if self.layout is None else str(self.layout)
        text += f", {self.schedule}" if self.layout is not None and self.layout.pipeline > 1 else ""
        text += ", recomputed" if self.recompute else ""
        text += f", {self.servers} server{'s' if self.servers > 1 else ''}" if self.servers else ""
        if self.lab is not None:
            hosts = self.lab.slots(self.workers)[0].host_count
            text += f", {hosts} lab host{'s' if hosts > 1 else ''}"
            text += f", {self.comm_options.algorithm}" if self.comm_options.algorithm and hosts > 1 else ""
        if self.shares:
            text += f", shares {self.shares}"
        if self.stop_after is not None:
            text += f", stopped at step {self.stop_after}, resumed on {self.resume_workers}"
        return text

    @property
    def exact(self) -> bool:
        """Splitting an operator changes the order of sums: there a distance is measured."""
        return self.layout is None or self.layout.exact

    def config(self) -> RunConfig:
        return RunConfig().changed(
            workers=self.workers,
            layout=self.layout,
            schedule=self.schedule,
            recompute=self.recompute,
            shares=self.shares,
            servers=self.servers or None,
            sync=self.sync_mode,
        )


@dataclass(frozen=True, kw_only=True)
class WeightDifference:
    """The first place where two runs part."""

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


def placements(
    workers: list[int],
    shares: list[str],
    resume: bool,
    steps: int,
    lab: Lab | None = None,
    comm_options: CommOptions | None = None,
) -> list[VerifyPlacement]:
    most = max(workers, default=1)
    found = [VerifyPlacement(workers=count) for count in workers]
    found += [VerifyPlacement(workers=most if text == "auto" else text.count(",") + 1, shares=text) for text in shares]
    if resume:
        found.append(VerifyPlacement(workers=most, stop_after=max(1, steps // 2), resume_workers=max(1, most - 1)))
    return [replace(placement, lab=lab, comm_options=comm_options or CommOptions()) for placement in found]


def layout_placements(
    layouts: list[str], schedule: str, recompute: bool, lab: Lab | None = None, comm_options: CommOptions | None = None
) -> list[VerifyPlacement]:
    """One each; for pipelines one per schedule where all of them are asked for."""
    if schedule != "all":
        check_schedule_name(schedule)
    found = []
    for text in layouts:
        layout = ParallelLayout.parse(text)
        names = (
            SCHEDULE_NAMES if schedule == "all" and layout.pipeline > 1 else ["1f1b" if schedule == "all" else schedule]
        )
        for name in names:
            found.append(
                VerifyPlacement(
                    workers=layout.workers,
                    layout=layout,
                    schedule=name,
                    recompute=recompute,
                    lab=lab,
                    comm_options=comm_options or CommOptions(),
                )
            )
    return found


def server_placements(workers: list[int], servers: int | None, sync_mode: str) -> list[VerifyPlacement]:
    """The same numbers of workers with servers, where they are asked for. Only one mode is exact."""
    for count in workers or [1]:
        mode = check_servers(Servers(count=servers, sync=sync_mode), workers=count)
        if mode is not None and not mode.exact:
            raise InputError(
                f"--sync {mode} gives up exactness, and verify compares bits",
                fix=f"--sync sync; shoal compare FILE --sync sync,{mode} shows what it gains and costs",
            )
    return [VerifyPlacement(workers=count, servers=servers, sync_mode=sync_mode) for count in workers if servers]


def exact_comm_options(asked: CommOptions) -> CommOptions:
    """How gradients are to travel; refused where that gives up exactness, which is what is verified."""
    wish = options_from_environment(asked)
    CommConfig.from_options(wish)
    if wish.compress:
        given = f"--compress {asked.compress}" if asked.compress else f"SHOAL_COMPRESS={wish.compress}"
        raise InputError(
            f"compression gives up exactness, and verify compares bits: {given}",
            fix="leave it out; shoal train --compress … reports the error that it makes",
        )
    if wish.algorithm == "ring":
        given = "--algorithm ring" if asked.algorithm else "SHOAL_ALGORITHM=ring"
        raise InputError(
            f"a ring adds in an order of its own, and verify compares bits: {given}",
            fix="one of direct, tree, halving, hierarchical, which give the same bits",
        )
    return wish


def verify(job: Job, wanted: list[VerifyPlacement], steps: int, *, name: str) -> Iterator[VerifyRow]:
    """Rows as they come: the reference on one worker first, then each placement, up to the first that differs."""
    # Time to accuracy is not the question here, and evaluation changes no bit.
    opened = open_job(job.changed(steps=steps, target=None, evaluate=None))
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as text:
        root = Path(text)
        reference, expected = _trace(opened, VerifyPlacement(workers=1), root / "reference", name)
        yield replace(reference, label="reference")
        for number, placement in enumerate(wanted):
            row, digests = _trace(opened, placement, root / str(number), name)
            if not placement.exact:
                row = _distance(row, root / "reference", root / str(number))
                if row.distance is not None and row.distance <= row.bound:
                    yield row
                    continue
            step = _first_difference(expected, digests)
            if step is None and row.weights_sha256 == reference.weights_sha256:
                yield row
                continue
            at = step or steps
            yield replace(row, difference=_measure(opened, placement, at, expected, digests, root, name))
            return


def _trace(
    opened: OpenJob, placement: VerifyPlacement, folder: Path, name: str
) -> tuple[VerifyRow, dict[int, dict[str, str]]]:
    config = placement.config().with_comm_options(placement.comm_options)
    config = config.changed(
        digests=True, checkpoint_every=opened.steps + 1, run_dir=folder, quiet=True, elastic=False, predict=False
    )
    launcher = None if placement.lab is None else placement.lab.launcher
    if placement.stop_after is not None:
        with suppress(Stopped):
            train_opened(opened, config.changed(stop_after=placement.stop_after), name=name, launcher=launcher)
        config = config.changed(workers=placement.resume_workers, resume=True)
    report = train_opened(opened, config, name=name, launcher=launcher)
    row = VerifyRow(
        label=placement.label, weights_sha256=report.weights_sha256, seconds=report.seconds, steps=report.steps
    )
    events = (decode(line) for line in (folder / "events.jsonl").read_bytes().splitlines())
    return row, {event.step: event.tensors for event in events if isinstance(event, StepDigest)}


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


def _first_difference(expected: dict[int, dict[str, str]], found: dict[int, dict[str, str]]) -> int | None:
    for step in sorted(expected):
        if found.get(step) != expected[step]:
            return step
    return None


def _measure(
    opened: OpenJob,
    placement: VerifyPlacement,
    step: int,
    expected: dict[int, dict[str, str]],
    found: dict[int, dict[str, str]],
    root: Path,
    name: str,
) -> WeightDifference:
    """Runs both again up to the step where they part, and looks at the numbers."""
    names = [key for key, value in expected.get(step, {}).items() if found.get(step, {}).get(key) != value]
    short = replace(opened, steps=step)
    again = replace(placement, stop_after=None, resume_workers=None)
    _trace(short, VerifyPlacement(workers=1), root / "reference-again", name)
    _trace(short, again, root / "again", name)
    left, _ = load_weights(root / "reference-again" / "model.safetensors")
    right, _ = load_weights(root / "again" / "model.safetensors")
    tensor = next(
        (key for key in names if not torch.equal(left[key], right[key])), names[0] if names else next(iter(left))
    )
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


# -- against a plain loop ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlainResult:
    steps: int
    difference: float  # norm of the difference over the norm of the weights
    worst: str
    worst_difference: float

    @property
    def good(self) -> bool:
        return self.difference <= PLAIN_TOLERANCE


def against_plain(job: Job, workers: int, steps: int, *, name: str) -> PlainResult:
    """Shoal and an ordinary loop on the same samples and initial weights, in fp64, dropout off, batch norm frozen."""
    base = job.changed(steps=steps, target=None, evaluate=None, precision="fp32", compile=False)
    opened = open_job(base)
    source = replace(opened.source, fetch=_to_fp64(opened.source.fetch))
    calm = replace(opened, job=base.changed(model=lambda: _deterministic_model(base)), source=source)
    with tempfile.TemporaryDirectory(prefix="shoal-plain-") as text:
        folder = Path(text) / "run"
        config = RunConfig().changed(workers=workers, run_dir=folder, quiet=True, elastic=False, predict=False)
        train_opened(calm, config, name=name)
        weights, _ = load_weights(folder / "model.safetensors")
    kernels.configure(threads=job.threads)
    plain = dict(_plain_loop(base, calm, steps).named_parameters())
    gaps = {key: (plain[key].detach() - weights[key]).norm().item() for key in plain}
    sizes = {key: plain[key].detach().norm().item() for key in plain}
    worst = max(gaps, key=lambda key: gaps[key] / (sizes[key] or 1.0))
    total = sum(gap**2 for gap in gaps.values()) ** 0.5 / (sum(size**2 for size in sizes.values()) ** 0.5 or 1.0)
    return PlainResult(steps=steps, difference=total, worst=worst, worst_difference=gaps[worst] / (sizes[worst] or 1.0))


def _deterministic_model(job: Job) -> nn.Module:
    """The model in fp64 and evaluation mode: no dropout, no batch statistics, gradients as ever."""
    return copy.deepcopy(build_model(job)).double().eval()


def _to_fp64(fetch: Callable[..., Any]) -> Callable[..., Any]:
    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return lambda indices, epoch: map_tensors(fetch(indices, epoch), double)


def _plain_loop(job: Job, opened: OpenJob, steps: int) -> nn.Module:
    """What a user would write on one machine. From Shoal come only the order of samples and the initial weights."""
    schedule = job.schedule(opened.source.samples, opened.source.last)
    model = _deterministic_model(job)
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
    for step in range(steps):
        epoch, within = schedule.position(step)
        order = opened.source.order(epoch)
        batch = opened.source.fetch(order[within * schedule.batch : (within + 1) * schedule.batch], epoch)
        inputs, target = split_sample(batch)
        loss = job.loss(model(*inputs), target)
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        optimizer.zero_grad()
        loss.backward()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model


def check_workers(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--workers {text}: numbers are needed", fix="--workers 1,2,4") from None
    if not counts or min(counts) < 1:
        raise InputError(f"--workers {text}: at least 1 worker each", fix="--workers 1,2,4")
    return counts
