"""Snapshots to write and to compare, and a run that makes them."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.numerics.digest import tensor_digests
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.files import Snapshot
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.report.events import CheckpointSaved, Event, SaveFailed
from shoal.worker.checkpointer import Checkpointer


def snapshot(step: int, *, weights: dict[str, Tensor] | None = None) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    return Snapshot(
        step=step,
        weights=weights or {"z.weight": torch.randn(4, 3, generator=generator), "a.bias": torch.ones(3)},
        aliases={"tied.weight": next(iter(weights))} if weights else {"tied.weight": "z.weight"},
        optimizer={"z.weight/exp_avg": torch.randn(4, 3, generator=generator), "z.weight/step": torch.tensor(3.0)},
        extra={"ema/shadow": torch.arange(5)},
        values={"scheduler": {"last_epoch": step, "lr": 0.1 + 0.2}, "big": 1 << 127},
        arithmetic={"lanes": 4, "dtype": "float32"},
        fingerprint="f1",
    )


def assert_same(left: Snapshot, right: Snapshot) -> None:
    for part in ("weights", "optimizer", "extra"):
        assert list(getattr(left, part)) == list(getattr(right, part)), "order is part of a digest"
        assert tensor_digests(getattr(left, part).items()) == tensor_digests(getattr(right, part).items())
    for part in ("step", "aliases", "values", "arithmetic", "fingerprint"):
        assert getattr(left, part) == getattr(right, part)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found(checkpoints: CheckpointDirectory) -> tuple[int, list[str]]:
    newest = checkpoints.newest()
    assert newest is not None
    return newest.snapshot.step, newest.skipped


# ---- the keeper: a run's live objects on one side, checkpoints on the other
def run_of(size: int = 3) -> LiveState:
    model = nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parameters = dict(model.named_parameters())
    return LiveState(
        model=model, parameters=parameters, optimizer=optimizer, scheduler=None, state={}, arithmetic={}, traits={}
    )


def train(live: LiveState) -> None:
    for parameter in live.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    live.optimizer.step()


def writer(folder: Path, live: LiveState, emit: Callable[[Event], None]) -> Checkpointer:
    keeper = Checkpointer(folder, live, emit)
    keeper.writes = True
    return keeper


def wait(keeper: Checkpointer) -> None:
    keeper._wait()


def told(events: list[Event]) -> list[tuple[str, int]]:
    return [(type(event).__name__, event.step) for event in events if isinstance(event, CheckpointSaved | SaveFailed)]
