"""The live objects of a run as one: captured into a snapshot between two steps, restored from one before a step."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import CheckpointError
from shoal.numerics.kernels import fingerprint
from shoal.recovery.checkpoint.arithmetic import check_arithmetic
from shoal.recovery.checkpoint.files import ShardWriteTask, Snapshot, StateShard
from shoal.recovery.checkpoint.serialize import CopyTensor, SnapshotBuffers, plain_copy, plain_view
from shoal.recovery.checkpoint.state import (
    capture_extra,
    capture_optimizer,
    capture_scheduler,
    capture_weights,
    restore_extra,
    restore_optimizer,
    restore_scheduler,
    restore_weights,
)


@dataclass(kw_only=True)
class LiveState:
    """Everything of a run that training changes; of a sharded model, what this worker holds."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    state: Mapping[str, Any]
    arithmetic: dict[str, Any]
    traits: dict[str, Any]
    state_shard: StateShard | None = None  # None: all of it
    # Further optimizers of the same parameters, which one way of training needs. A run that trains that way restores
    # them; other runs ignore them. Where a checkpoint has none, they start empty.
    extra_optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    accept: Collection[str] = ()  # fields of the arithmetic that may differ from a checkpoint's
    changed: tuple[str, ...] = ()  # those of them that did

    def capture(
        self,
        step: int,
        progress: dict[str, Any],
        buffers: SnapshotBuffers | None = None,
        *,
        task: ShardWriteTask | None = None,
    ) -> Snapshot:
        """A copy; training may continue while it is written. `progress`: what else a resumed run needs to know.

        With `buffers` the copy overwrites the one made there before. With a `task` it has only what this worker writes.
        """
        if buffers is None:
            return self._snapshot(step, progress, lambda section: plain_copy, task)
        buffers.recycle()
        return self._snapshot(step, progress, buffers.copier, task)

    def live_snapshot(self, step: int, progress: dict[str, Any]) -> Snapshot:
        """The live tensors themselves, read-only and valid until the next update, for a newcomer to copy."""
        return self._snapshot(step, progress, lambda section: plain_view)

    def _snapshot(
        self,
        step: int,
        progress: dict[str, Any],
        copier: Callable[[str], CopyTensor],
        task: ShardWriteTask | None = None,
    ) -> Snapshot:
        shard = None if task is None else task.state_shard
        weights, aliases = capture_weights(self.model, copier("weights"), None if shard is None else shard.writes)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        writes_state_of = None if shard is None else shard.writes_optimizer_of
        optimizer, optimizer_values = capture_optimizer(
            self.optimizer, names, copier("optimizer"), self._shapes, writes_state_of
        )
        state = self.state if shard is None or shard.is_leader else {}  # equal on all workers: the leader writes it
        extra, extra_values = capture_extra(state, copier("extra"))
        values: dict[str, Any] = {
            "optimizer": optimizer_values,
            "scheduler": None if self.scheduler is None else capture_scheduler(self.scheduler),
            "extra": extra_values,
            "progress": progress,
            "traits": {name: str(value) for name, value in self.traits.items()},
        }
        for label, each in self.extra_optimizers.items():
            prefixed = {id(parameter): name for name, parameter in self._prefixed(label).items()}
            tensors, captured = capture_optimizer(each, prefixed, copier("extra"))
            values.setdefault("extra_optimizers", {})[label] = captured
            extra |= tensors
        return Snapshot(
            step=step,
            weights=weights,
            aliases=aliases,
            optimizer=optimizer,
            extra=extra,
            values=values,
            arithmetic=self.arithmetic,
            fingerprint=fingerprint(self.traits),
        )

    def restore(self, snapshot: Snapshot, *, own: bool = False) -> None:
        """Restores everything, or refuses a snapshot that does not fit before anything is copied.

        With `own` no other object uses the snapshot's tensors, and the optimizer may keep them.
        """
        self.changed = check_arithmetic(snapshot.arithmetic, self.arithmetic, self.accept)
        check_traits(snapshot, self.traits)
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        values = snapshot.values
        restore_optimizer(
            self.optimizer, self.parameters, snapshot.optimizer, values["optimizer"], own=own, shapes=self._shapes
        )
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, values["scheduler"])
        restore_extra(self.state, snapshot.extra, values["extra"], own=own)
        stored = values.get("extra_optimizers", {})
        for label, each in self.extra_optimizers.items():
            each.state.clear()
            if label in stored:
                restore_optimizer(each, self._prefixed(label), snapshot.extra, stored[label], own=own)

    def _prefixed(self, label: str) -> dict[str, nn.Parameter]:
        return {f"{label}/{name}": parameter for name, parameter in self.parameters.items()}

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return None if self.state_shard is None else self.state_shard.shapes


def check_traits(snapshot: Snapshot, traits: dict[str, Any]) -> None:
    if snapshot.fingerprint == fingerprint(traits):
        return
    stored = snapshot.values["traits"]
    raise CheckpointError(
        "the checkpoint was made by kernels that compute other bits than this machine's",
        where=[
            f"{name}: {stored.get(name)} then, {now} now"
            for name, now in traits.items()
            if stored.get(name) != str(now)
        ],
        fix="resume on a machine of equal fingerprint, or pin both: isa='avx2'",
    )
