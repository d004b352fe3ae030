"""What a worker of a run with collectives holds: its share of the model, the members it trains with, its progress."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.numerics.digest import tensor_digests
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.plan import Plan
from shoal.recovery.checkpoint.files import Snapshot
from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.build_model import choose_strategy
from shoal.worker.consistency import agree_on_weights, model_digests
from shoal.worker.context import WorkerContext
from shoal.worker.lane_speeds import LaneSpeeds
from shoal.worker.membership import RunMembership
from shoal.worker.training_state import TrainingSetup, TrainingState, changes_of


class RunState(TrainingState):
    groups: ParallelGroups  # of the membership generation
    epoch = 0

    def __init__(self, setup: TrainingSetup, plan: Plan, context: WorkerContext, membership: RunMembership) -> None:
        super().__init__(setup, plan, context, membership.worker_id.worker)
        self.membership, self.layout = membership, plan.layout
        self.strategy = choose_strategy(plan, self.built, self.step_setup(), setup.objective)
        self.update.get_group = lambda: self.groups.shard_group
        self.initially_frozen = self.replica.frozen_names
        self.finished = False
        self.finished_epochs = 0  # passes that are over, with what the loop does after their last batch
        self.evaluations: tuple[int, Any] = (0, None)  # how many there were, and the metrics of the last one
        self.unevaluated = False  # the last step lacks its evaluation, which failed
        self.pending_stop = ""  # why the run was about to end when an error ended it
        self.order: Sequence[int] = ()  # of the samples in this pass
        self.writers: Sequence[WorkerId] = ()  # of the shards of checkpoints
        self.commit_generation = -1  # the membership generation in which the last step was committed
        self.disrupted_at: float | None = None  # when the members changed, until the next step is applied
        self.traffic_reported = False
        self.speeds = LaneSpeeds()
        self.live = self.live_state()
        self.checkpoints = self.open_checkpoints(
            self.live,
            survives_loss=self.recovers and not self.layout.zero,
            check_peers=lambda: self.group.raise_if_failed(),
        )

    @property
    def group(self) -> WorkerGroup:
        return self.membership.group

    @property
    def leader(self) -> bool:
        """True on the one worker that should print, log and write files."""
        return self.group.rank == 0

    @property
    def rank(self) -> int:
        """This worker's place among the present members."""
        return self.group.rank

    @property
    def workers(self) -> int:
        return self.group.size

    @property
    def member_workers(self) -> list[int]:
        """The worker numbers of the members, by rank."""
        return [member.worker for member in self.membership.view.members]

    @property
    def recovers(self) -> bool:
        """The run goes on after the loss of a worker."""
        return self.membership.elastic and self.config.failure.on_failure != "stop"

    @property
    def all_at_same_step(self) -> bool:
        """All members have come here from the same step of the same generation. After a change some may be past what
        this worker is about to do: until the next step it does alone what all could do together."""
        return self.commit_generation == self.membership.generation

    # -- tensors ------------------------------------------------------------------------------------------------------

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers, a tied weight once."""
        kept = self.model.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in self.model.named_buffers() if name in kept and not each.is_meta]
        own = self.update.optimizer_params.items() if self.update.masters else self.replica.parameters
        return [*((name, each) for name, each in own if not each.is_meta), *buffers]

    def digests(self) -> dict[str, str]:
        """One sha256 per tensor of the whole model, on every worker alike."""
        if not self.layout.sharded:
            return tensor_digests(self.named_tensors())
        assert self.built.state_shard is not None
        kept = self.model.state_dict(keep_vars=True)
        order = [*self.replica.parameter_order, *(name for name, _ in self.model.named_buffers() if name in kept)]
        slices, shapes = self.built.state_shard.slices, self.built.shapes
        return model_digests(self.group, dict(self.named_tensors()), slices, shapes, order)

    def check_same_weights(self, tensors: Mapping[str, int]) -> None:
        """Compares digests among the workers that hold the same tensors."""
        if not self.layout.sharded:
            agree_on_weights(self.group, tensors, self.step)
        elif not self.layout.zero and self.groups.replica is not None:
            agree_on_weights(self.groups.shard_group, tensors, self.step)

    # -- progress -----------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """What a resumed run, or a worker that receives the state, has to know beside the tensors."""
        return {
            "loss": self.loss,
            "metrics": self.metrics,
            "passes": self.finished_epochs,
            "evaluations": self.evaluations[0],
            **({"inexact": self.inexact} if self.inexact else {}),
            **({"changes": self.changes} if self.changes else {}),
            **({"unevaluated": True} if self.unevaluated else {}),
            **({"stop": self.pending_stop} if self.pending_stop else {}),
            **({"callbacks": self.setup.callbacks.state()} if self.setup.callbacks else {}),
            **self._frozen_by_loop(),
        }

    def note_pending_stop(self) -> None:
        """An error ends the run at the step that was its last (a target, early stopping): a resumed run ends there."""
        asked = self.setup.callbacks.stop_reason if self.setup.callbacks is not None else ""
        self.pending_stop = "" if self.resumable else self.stopped or asked

    def _frozen_by_loop(self) -> dict[str, Any]:
        """What a loop has frozen or freed on the way. A process that comes later may be past the place that does it."""
        now = self.replica.frozen_names
        if self.frozen is not None or self.layout.sharded or now == self.initially_frozen:
            return {}
        return {"frozen": {"first": self.initially_frozen, "now": now}}

    def _restore_frozen(self, stored: Mapping[str, list[str]]) -> None:
        """Unless the script begins with other frozen parameters than it did: then it was changed, and decides."""
        if stored["first"] == self.initially_frozen:
            for name, parameter in self.replica.parameters:
                if (name in stored["now"]) != (name in stored["first"]):
                    parameter.requires_grad_(name not in stored["now"])
            self.replica.follow_tied()

    def restore_progress(self, snapshot: Snapshot) -> None:
        values = snapshot.values["progress"]
        self.step = snapshot.step
        self.epoch = self.schedule.position(self.step)[0]
        self.finished_epochs = values.get("passes", self.epoch)
        if self.step:
            for each in (self.optimizer, *self.setup.optimizers.values()):
                each._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
        self.loss, self.metrics = values["loss"], values["metrics"]
        self.inexact = values.get("inexact", "")
        self.unevaluated = values.get("unevaluated", False)
        self.stopped = values.get("stop", self.stopped)
        self.changes = changes_of(values, self.live, self.step)
        if "frozen" in values:
            self._restore_frozen(values["frozen"])
        self.evaluations = (values.get("evaluations", 0), self.metrics)
        if self.setup.callbacks is not None:
            self.setup.callbacks.load_state(values.get("callbacks", {}))

    # -- samples ------------------------------------------------------------------------------------------------------

    def prefetch_samples(self, step: int) -> None:
        """Announces the samples of this worker's lanes, for the rest of the pass, to the processes that load ahead."""
        if self.source.prefetcher is None or self.plan.threads > 1:  # several kernel threads do not survive their fork
            return
        if not len(self.order):
            return
        schedule, epoch = self.schedule, self.epoch
        steps = range(step - schedule.first_step(epoch), schedule.steps_in(epoch))
        batches = [self.order[schedule.slice_of(epoch, within)] for within in steps]
        limit = None if self.step_limit is None else self.step_limit - step
        microbatches = [each for batch in batches[:limit] for each in self.microbatch_indices(epoch, batch)]
        self.source.prefetcher.announce([(tuple(indices), self.epoch) for indices in microbatches])
