"""A model over two workers by hand, with torch's own tools, and by a layout of Shoal's.

By hand: forked from this process like all else, once over gloo and once with `init_process_group("shoal")`. Shoal: one
job, one layout. Everyone has the same weights, batches, optimizer and microbatches, and the same clock: a hook of the
optimizer, start-up and the first steps not on it.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import shoal
from cases import Case
from contenders import forked, scratch_folder
from parallel_cases import Gpt
from shoal.collectives.group import DistributedGroup
from shoal.driver.launch import train_with
from shoal.driver.make_plan import open_job, plan_for
from shoal.parallel.tensor.group import TensorGroup
from shoal.worker.model_partition import make_outline
from shoal.worker.run_config import RunConfig

MICROBATCHES = 8  # of a pipeline
WHOLE = {"embed": "whole", "place": "whole", "head": "whole"}  # what the one by hand leaves as it is, too


@dataclass(frozen=True, kw_only=True)
class Measured:
    samples_per_second: float
    cpu_ms: float  # of both workers together, a step
    final_loss: float


class Note(msgspec.Struct):
    """What a worker leaves behind: the time after each step, by the wall's clock and by its own processor's."""

    wall: list[float] = msgspec.field(default_factory=list)
    cpu: list[float] = msgspec.field(default_factory=list)
    loss: float = 0.0


def stamped(optimizer: torch.optim.Optimizer, note: Note, then: Callable[[Note], None]) -> torch.optim.Optimizer:
    def after(*_: Any) -> None:
        note.wall.append(time.perf_counter())
        note.cpu.append(time.process_time())
        then(note)

    optimizer.register_step_post_hook(after)
    return optimizer


def measured(case: Case, folder: Path, loss: float | None = None) -> Measured:
    """Of the median step: the machine's other business falls on some steps, not on all."""
    notes = [msgspec.json.decode((folder / str(rank)).read_bytes(), type=Note) for rank in range(2)]

    def typical(stamps: list[float]) -> float:
        return statistics.median(b - a for a, b in pairwise(stamps[case.warm_up - 1 :]))

    return Measured(
        samples_per_second=case.batch / typical(notes[0].wall),
        cpu_ms=1000 * sum(typical(note.cpu) for note in notes),
        final_loss=notes[1].loss if loss is None else loss,
    )


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Who runs, on which backend, and who is its measure."""

    run: Callable[[Case], Measured]
    against: str | None = None
    quick: bool = True  # runs with --quick, too


Loop = Callable[[Case, int, Note], float]  # trains as one of two ranks; the last step's loss, where it knows it


def by_hand(case: Case, backend: str, loop: Loop) -> Measured:
    with scratch_folder() as folder:

        def work(rank: int) -> None:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
            note = Note()
            note.loss = loop(case, rank, note)
            (folder / str(rank)).write_bytes(msgspec.json.encode(note))
            dist.barrier()
            dist.destroy_process_group()

        forked(2, work)
        return measured(case, folder)


def _optimizer(case: Case, model: nn.Module, note: Note) -> torch.optim.Optimizer:
    return stamped(case.optimizer(model.parameters()), note, lambda _: None)


# -- pipeline ---------------------------------------------------------------------------------------------------------


class Half(nn.Module):
    """A stage by hand: its own blocks of the model, and at the ends what lies before and after them."""

    def __init__(self, model: Gpt, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[number] for number in blocks)
        self.before = nn.ModuleList([model.embed, model.place] if blocks.start == 0 else [])
        self.after = nn.Sequential(*([model.norm, model.head] if blocks.stop == len(model.blocks) else []))

    def forward(self, x: Tensor) -> Tensor:
        if len(self.before):
            x = self.before[0](x) + self.before[1](torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.after(x)
        return found


def border(case: Case) -> int:
    """How many blocks the first stage has: as Shoal cuts it, so that both compute the same."""
    job, config = (_job(case, {"microbatches": MICROBATCHES}), RunConfig().changed(layout="pipeline=2"))
    stages = make_outline(job, open_job(job).source, plan_for(job, config)).stages
    assert stages is not None
    return sum(name.startswith("blocks.") for name in stages.blocks_of(0))


def _pipeline(case: Case, rank: int, note: Note) -> float:
    model = case.model
    assert isinstance(model, Gpt)
    middle = border(case)
    half = Half(model, range(middle) if rank == 0 else range(middle, len(model.blocks)))
    optimizer = _optimizer(case, half, note)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=case.loss)
    losses: list[Tensor] = []
    for step in range(case.total_steps):
        inputs, target = case.share(step, 0, 1)
        losses.clear()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
    return sum(float(loss.detach()) for loss in losses) / MICROBATCHES


# -- tensor -----------------------------------------------------------------------------------------------------------


def _tensor(case: Case, rank: int, note: Note) -> float:
    kinds: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(),
        "proj": RowwiseParallel(),
        "fc": ColwiseParallel(),
        "out": RowwiseParallel(),
    }
    plan = {f"blocks.*.{name}": kind for name, kind in kinds.items()}
    model = parallelize_module(case.model, init_device_mesh("cpu", (2,)), plan)
    return _plain_loop(case, model, note, rank=0, size=1)


def _plain_loop(case: Case, model: nn.Module, note: Note, *, rank: int, size: int) -> float:
    optimizer = _optimizer(case, model, note)
    for step in range(case.total_steps):
        inputs, target = case.share(step, rank, size)
        loss = case.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = loss.detach().clone()
    if size > 1:
        dist.all_reduce(last)
    return float(last) / size


# -- sharding ---------------------------------------------------------------------------------------------------------


def _sharded(keep: bool) -> Loop:
    """`keep`: weights stay from forward to backward, as with zero=2."""

    def loop(case: Case, rank: int, note: Note) -> float:
        model = case.model
        assert isinstance(model, Gpt)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
        return _plain_loop(case, model, note, rank=rank, size=2)

    return loop


# -- Shoal ------------------------------------------------------------------------------------------------------------


def _job(case: Case, more: Mapping[str, Any]) -> shoal.Job:
    fixed = {
        "name": case.name,
        "model": case.model,
        "data": case.data,
        "loss": case.loss,
        "optimizer": case.optimizer,
        "batch": case.batch,
        "lanes": 1,
        "steps": case.total_steps,
        "shuffle": False,
        "checkpoint_every": case.total_steps,  # the last one only: after the clock has stopped
    }
    return shoal.Job(**{**fixed, **more})


def by_layout(case: Case, layout: str, **more: Any) -> Measured:
    with scratch_folder() as folder:

        def keep(note: Note) -> None:
            if len(note.wall) == case.total_steps:
                (folder / os.environ["RANK"]).write_bytes(msgspec.json.encode(note))

        def optimizer(named: Any) -> torch.optim.Optimizer:
            return stamped(case.optimizer(named), Note(), keep)

        job = _job(case, {"optimizer": optimizer, **more})
        config = RunConfig().changed(layout=layout, run_dir=folder / "run", quiet=True, predict=False)
        value = train_with(job, config).value
        return measured(case, folder, loss=float(value["final_loss"]))


@contextmanager
def over_gloo() -> Iterator[None]:
    """Shoal's own code for a pipeline and for slices, with everything that travels in a step going over gloo: what is
    left of a difference is not the backend's. For measuring only."""
    kept = {
        name: vars(DistributedGroup)[name]
        for name in ("__init__", "subgroup", "gather_rows", "send", "receive", "isend")
    }
    own = vars(TensorGroup)["_process_group"]

    def begin(self: Any, *args: Any, **named: Any) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        kept["__init__"](self, *args, **named)
        self.gloo = dist.new_group(backend="gloo")

    def subgroup(self: Any, ranks: Any) -> Any:
        made: Any = kept["subgroup"](self, ranks)
        if isinstance(made, DistributedGroup):
            made.gloo = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        return made

    def gather_rows(self: Any, row: Tensor) -> Tensor:
        rows = row.new_empty((self.size, *row.shape))
        dist.all_gather_into_tensor(rows.view(-1), row.contiguous().view(-1), group=self.gloo)
        return rows

    def send(self: Any, tensor: Tensor, to: int) -> None:
        self.gloo.send([tensor], to, 0).wait()

    def receive(self: Any, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.gloo.recv([tensor], source, tag).wait()

    class Sent:
        def __init__(self, tensor: Tensor, work: Any) -> None:
            self.tensor, self._work = tensor, work

        @property
        def done(self) -> bool:
            return bool(self._work.is_completed())

        def wait(self) -> Tensor:
            self._work.wait()
            return self.tensor

    def isend(self: Any, tensor: Tensor, to: int, tag: int) -> Any:
        return Sent(tensor, self.gloo.send([tensor], to, tag))

    new = {
        "__init__": begin,
        "subgroup": subgroup,
        "gather_rows": gather_rows,
        "send": send,
        "receive": receive,
        "isend": isend,
    }
    for name, method in new.items():
        setattr(DistributedGroup, name, method)
    TensorGroup._process_group = property(lambda self: self.group.gloo)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(DistributedGroup, name, method)
        TensorGroup._process_group = own  # type: ignore[method-assign]


def by_layout_over_gloo(case: Case, layout: str, **more: Any) -> Measured:
    with over_gloo():
        return by_layout(case, layout, **more)


def _hand(backend: str, loop: Loop) -> Callable[[Case], Measured]:
    return lambda case: by_hand(case, backend, loop)


def _ours(layout: str, run: Callable[..., Measured] = by_layout, **more: Any) -> Callable[[Case], Measured]:
    return lambda case: run(case, layout, **more)


HAND, HAND_SHOAL = "by hand, gloo", "by hand, shoal"
KINDS: dict[str, dict[str, Peer]] = {
    "pipeline": {
        HAND: Peer(run=_hand("gloo", _pipeline)),
        HAND_SHOAL: Peer(run=_hand("shoal", _pipeline), against=HAND),
        "pipeline=2": Peer(run=_ours("pipeline=2", microbatches=MICROBATCHES), against=HAND_SHOAL),
        "pipeline=2, gloo": Peer(run=_ours("pipeline=2", by_layout_over_gloo, microbatches=MICROBATCHES), against=HAND),
        "pipeline=2, 4 lanes": Peer(
            run=_ours("pipeline=2", lanes=4, microbatches=MICROBATCHES // 4), against=HAND_SHOAL, quick=False
        ),
    },
    "tensor": {
        HAND: Peer(run=_hand("gloo", _tensor)),
        HAND_SHOAL: Peer(run=_hand("shoal", _tensor), against=HAND),
        "tensor=2": Peer(run=_ours("tensor=2", tensor_rules=WHOLE), against=HAND_SHOAL),
        "tensor=2, gloo": Peer(run=_ours("tensor=2", by_layout_over_gloo, tensor_rules=WHOLE), against=HAND),
        "tensor=2, its own rules": Peer(run=_ours("tensor=2"), against=HAND_SHOAL, quick=False),
    },
    "sharding": {
        HAND: Peer(run=_hand("gloo", _sharded(keep=False))),
        HAND_SHOAL: Peer(run=_hand("shoal", _sharded(keep=False)), against=HAND),
        "by hand, shoal, kept": Peer(run=_hand("shoal", _sharded(keep=True))),
        "data=2": Peer(run=_ours("data=2", lanes=2), against=HAND_SHOAL),
        "zero=1": Peer(run=_ours("data=2,zero=1", lanes=2), against=HAND_SHOAL),
        "zero=2": Peer(run=_ours("data=2,zero=2", lanes=2), against="by hand, shoal, kept"),
        "zero=3": Peer(run=_ours("data=2,zero=3", lanes=2), against=HAND_SHOAL),
    },
}
