"""Who is compared, and how everyone is measured.

Each contender trains the case in processes forked from this one, with one thread each, and worker 0 notes the time
after every optimizer step by the same hook. Start-up and warm-up are off the clock for everyone.
"""

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import shoal
from cases import Case
from shoal.driver.launch import train_with
from shoal.worker.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Measured:
    samples_per_second: float
    final_loss: float
    step_ms: dict[str, float] = field(default_factory=dict)  # where a step's time goes; Shoal's own account


class Note(msgspec.Struct, frozen=True):
    """What worker 0 leaves behind."""

    stamps: list[float]
    loss: float = 0.0


def stamped(optimizer: Optimizer, note: Callable[[list[float]], None], steps: int) -> Optimizer:
    """Notes the time after each step and hands the list over after the last."""
    stamps: list[float] = []

    def after(*_: Any) -> None:
        stamps.append(time.perf_counter())
        if len(stamps) == steps:
            note(stamps)

    optimizer.register_step_post_hook(after)
    return optimizer


def speed(case: Case, stamps: list[float]) -> float:
    """Samples per second on the clock: from the end of the last warm-up step to the end of the last step."""
    return case.steps * case.batch / (stamps[-1] - stamps[case.warm_up - 1])


# -- plain PyTorch and DDP ------------------------------------------------------------------------------------------


def plain(case: Case) -> Measured:
    """One process, the loop that everyone writes."""
    with scratch_folder() as folder:
        forked(1, lambda rank: _loop(case, case.model, folder / "note", rank=0, size=1))
        return _read(case, folder / "note")


def ddp(case: Case, backend: str = "gloo") -> Measured:
    """torch's DistributedDataParallel with its defaults, two processes, each with half of every batch."""
    with scratch_folder() as folder:

        def work(rank: int) -> None:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
            _loop(case, DistributedDataParallel(case.model), folder / "note", rank=rank, size=2)
            dist.destroy_process_group()

        forked(2, work)
        return _read(case, folder / "note")


def apart(case: Case) -> Measured:
    """Two processes that know nothing of each other, each with half of every batch: as fast as this machine can be."""
    with scratch_folder() as folder:

        def work(rank: int) -> None:
            _loop(case, case.model, folder / str(rank), rank=rank, size=2, joined=False)

        forked(2, work)
        notes = [msgspec.json.decode((folder / str(rank)).read_bytes(), type=Note) for rank in range(2)]
        slower = min(speed(case, note.stamps) for note in notes)
        return Measured(samples_per_second=slower, final_loss=sum(note.loss for note in notes) / 2)


def _loop(case: Case, model: nn.Module, note: Path, *, rank: int, size: int, joined: bool = True) -> None:
    found: list[float] = []
    optimizer = stamped(case.optimizer(model.parameters()), found.extend, case.total_steps)
    for step in range(case.total_steps):
        inputs, target = case.share(step, rank, size)
        loss = case.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.detach()
    if size > 1 and joined:
        dist.all_reduce(last)
        last /= size
    if rank == 0 or not joined:
        note.write_bytes(msgspec.json.encode(Note(found, last.item())))


def forked(count: int, work: Callable[[int], None]) -> None:
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.pop("MKL_CBWR", None)  # Shoal's setting; a plain program does not have it
                torch.set_num_threads(1)
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"a process of the benchmark failed: exit codes {codes}")


def _read(case: Case, path: Path) -> Measured:
    note = msgspec.json.decode(path.read_bytes(), type=Note)
    return Measured(samples_per_second=speed(case, note.stamps), final_loss=note.loss)


# -- Shoal ----------------------------------------------------------------------------------------------------------


def shoal_with(case: Case, *, workers: int, lanes: int, exact: bool = True, quiet: bool = True) -> Measured:
    """A job on Shoal, through the same driver, run folder and report as `shoal train`."""
    with scratch_folder() as folder:
        note = folder / "note"

        def keep(stamps: list[float]) -> None:
            if os.environ["RANK"] == "0":
                note.write_bytes(msgspec.json.encode(Note(stamps)))

        job = shoal.Job(
            name=case.name,
            model=case.model,
            data=case.data,
            loss=case.loss,
            optimizer=lambda named: stamped(case.optimizer(named), keep, case.total_steps),
            batch=case.batch,
            lanes=lanes,
            steps=case.total_steps,
            shuffle=False,
            checkpoint_every=case.total_steps,  # the last one only: after the clock has stopped
        )
        where = {"run_dir": folder / "run", "quiet": quiet, "predict": False}
        report = train_with(job, RunConfig().changed(workers=workers, inexact=not exact, **where))
        stamps = msgspec.json.decode(note.read_bytes(), type=Note).stamps
        return Measured(
            samples_per_second=speed(case, stamps),
            final_loss=float(report.value["final_loss"]),
            step_ms=report.value["step_ms"],
        )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        yield Path(name)


CONTENDERS: dict[str, Callable[[Case], Measured]] = {
    "plain": plain,
    "apart": apart,
    "ddp": ddp,
    "ddp on shoal": lambda case: ddp(case, "shoal"),
    "shoal": lambda case: shoal_with(case, workers=2, lanes=2),
    "shoal 4 lanes": lambda case: shoal_with(case, workers=2, lanes=4),
    "shoal 1 worker": lambda case: shoal_with(case, workers=1, lanes=2),
    "shoal inexact": lambda case: shoal_with(case, workers=2, lanes=2, exact=False),
}
