"""How long a pipeline waits, and what its stages hold, beside what the formulas say."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from contenders import scratch_folder
from parallel_cases import Equal
from shoal.driver.launch import train_with
from shoal.driver.make_plan import open_job, plan_for
from shoal.parallel import pipeline_schedule as schedules
from shoal.worker.memory import MemoryEstimate
from shoal.worker.model_partition import make_outline, memory_of
from shoal.worker.run_config import RunConfig

GENEROUS = 6 << 30  # a cap that nobody comes near: freed memory goes back to the kernel, so a peak is what was alive


def run(case: Equal, layout: str, schedule: str = "1f1b", *, capped: bool = False, **more: Any) -> dict[str, Any]:
    """The report."""
    with scratch_folder() as folder:
        config = RunConfig().changed(
            layout=layout,
            schedule=schedule,
            run_dir=folder / "run",
            quiet=True,
            predict=False,
            memory=GENEROUS if capped else None,
        )
        found: dict[str, Any] = train_with(make_job(case, **more), config).value
        return found


def make_job(case: Equal, **more: Any) -> shoal.Job:
    fixed = {"optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3), **case.job()}
    return shoal.Job(**{**fixed, **more})


# -- the bubble -------------------------------------------------------------------------------------------------------


def bubble(case: Equal, ranks: int, schedule: str) -> dict[str, float]:
    """Of one run: measured, by the schedule and by the formula; and how unlike its stages were."""
    value = run(case, f"pipeline={ranks}", schedule)
    busy = [each["busy_seconds"] for each in value["model_shards"]]
    return {"measured": value["bubble"]["measured"], "busiest_over_mean": max(busy) / (sum(busy) / len(busy))}


def bubble_in_theory(ranks: int, schedule: str, microbatches: int) -> float:
    """By formula; where there is none, what the schedule comes to when it is played with backward = 2 forward."""
    found = schedules.ideal_bubble(schedule, ranks, microbatches)
    if found is not None:
        return found
    return schedules.time_schedule(schedules.make_schedule(schedule, ranks=ranks, microbatches=microbatches)).bubble


# -- memory -----------------------------------------------------------------------------------------------------------


def peaks(case: Equal, layout: str, schedule: str = "1f1b", **more: Any) -> list[int]:
    """Bytes, by worker: above what the process had when it began."""
    return [each["peak_bytes"] for each in run(case, layout, schedule, capped=True, **more)["model_shards"]]


def held(case: Equal, ranks: int) -> list[int]:
    """Bytes that one microbatch keeps alive in each stage from its forward to its backward, counted, not measured: what
    autograd saves, without weights, and what came in and goes out."""
    job, config = make_job(case), RunConfig().changed(layout=f"pipeline={ranks}")
    stages = make_outline(job, open_job(job).source, plan_for(job, config)).stages
    assert stages is not None
    model = case.model()
    x = torch.zeros(case.samples, *job.data[0].shape[1:])
    found = []
    for rank in range(ranks):
        piece = nn.Sequential(*(copy.deepcopy(model.get_submodule(name)) for name in stages.blocks_of(rank)))
        num_bytes, x = _alive(piece, x, first=rank == 0)
        found.append(num_bytes)
    return found


def _alive(piece: nn.Module, came: Tensor, *, first: bool) -> tuple[int, Tensor]:
    came = came.detach().requires_grad_(not first)
    known = {parameter.untyped_storage().data_ptr() for parameter in piece.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage's address is its own while it lives

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = piece(came)
    note(came)
    note(out)
    return sum(storages.values()), out


def in_flight(schedule: str, ranks: int, microbatches: int) -> list[int]:
    made = schedules.make_schedule(schedule, ranks=ranks, microbatches=microbatches)
    return [schedules.in_flight(made, rank) for rank in range(ranks)]


def needed(case: Equal, layout: str, **more: Any) -> MemoryEstimate:
    """The formula for weights, gradients and optimizer of worker 0; activations come on top."""
    job = make_job(case, **more)
    plan = plan_for(job, RunConfig().changed(layout=layout))
    return memory_of(job, make_outline(job, open_job(job).source, plan), plan, 0)
