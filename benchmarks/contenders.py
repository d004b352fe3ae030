"""Who is compared, and how everyone is measured.

Each contender trains the case in processes forked from this one, with one thread each, and worker 0 notes the time
after every optimizer step by the same hook. Start-up and warm-up are off the clock for everyone. With `places` the
processes are on hosts of a lab, one on each.
"""

import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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
from shoal.driver.launchers.base import Launcher, torchrun_environment
from shoal.driver.launchers.namespaces import LabHost, enter
from shoal.driver.launchers.programs import MASTER_PORT
from shoal.worker.run_config import RunConfig

PATIENCE_SECONDS = 900.0  # for processes of the benchmark that wait for each other


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


def ddp(case: Case, backend: str = "gloo", places: Sequence[LabHost] = ()) -> Measured:
    """torch's DistributedDataParallel with its defaults, two processes or one for each place, each with its share of
    every batch."""
    size = len(places) or 2
    with scratch_folder() as folder:

        def work(rank: int) -> None:
            if places:
                dist.init_process_group(backend)  # by the variables that torchrun sets
            else:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
            _loop(case, DistributedDataParallel(case.model), folder / "note", rank=rank, size=size)
            dist.destroy_process_group()

        forked(size, work, places)
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


def forked(count: int, work: Callable[[int], None], places: Sequence[LabHost] = ()) -> None:
    """Calls `work(rank)` in processes of their own and waits for them. The first that fails ends the others."""
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ.pop("MKL_CBWR", None)  # Shoal's setting; a plain program does not have it
                torch.set_num_threads(1)
                if places:
                    _move(places, rank)
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = _wait(children)
    if any(codes):
        raise RuntimeError(f"a process of the benchmark failed: exit codes {codes}")


def _move(places: Sequence[LabHost], rank: int) -> None:
    """To the rank's host, with what a launcher gives to a program there."""
    enter(places[rank])
    store = {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(MASTER_PORT)}
    os.environ.update(torchrun_environment(places, rank) | store | places[rank].variables)


def _wait(children: Sequence[int]) -> list[int]:
    codes: dict[int, int] = {}
    running = {os.pidfd_open(child): child for child in children}
    while running:
        ended, _, _ = select.select(list(running), [], [], PATIENCE_SECONDS)
        for handle in ended:
            child = running.pop(handle)
            os.close(handle)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not ended or any(codes.values()):
            for child in running.values():
                os.kill(child, signal.SIGKILL)  # not waited for yet, so the number is its own
    return [codes[child] for child in children]


def _read(case: Case, path: Path) -> Measured:
    note = msgspec.json.decode(path.read_bytes(), type=Note)
    return Measured(samples_per_second=speed(case, note.stamps), final_loss=note.loss)


# -- Shoal ----------------------------------------------------------------------------------------------------------


def shoal_with(case: Case, *, workers: int, lanes: int, launcher: Launcher | None = None, **settings: Any) -> Measured:
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
        usual = {"workers": workers, "run_dir": folder / "run", "quiet": True, "predict": False}
        report = train_with(job, RunConfig().changed(**usual | settings), launcher=launcher)
        stamps = msgspec.json.decode(note.read_bytes(), type=Note).stamps
        return Measured(
            samples_per_second=speed(case, stamps),
            final_loss=float(report.value["final_loss"]),
            step_ms=report.value["step_ms"],
        )


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each name once in each round, with the round's number; nobody is always first."""
    for number in range(rounds):
        first = number % len(names)
        yield from ((number, name) for name in [*names[first:], *names[:first]])


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
    "shoal inexact": lambda case: shoal_with(case, workers=2, lanes=2, inexact=True),
}
