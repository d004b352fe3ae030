"""Which workers a run should have, and what becomes of the run when one is lost. Pure; the supervisor acts on it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.errors import InputError
from shoal.recovery.membership.protocol import WorkerId, covers_model, model_shard_of
from shoal.report.human import plural
from shoal.worker.run_config import Failure

FALSE_STARTS = 3  # in a row: processes that end before they take part


@dataclass(frozen=True)
class LossDecision:
    """What becomes of the run."""

    action: str
    end_reason: str = ""  # why the run cannot go on; empty: it can
    uncovered: bool = False  # it ends because no worker is left that has some shard of the model


NO_STARTER = "the process that starts workers is gone"


def unreplaced_loss(state: str, *, shards: int, left: int) -> LossDecision:
    """What becomes of the run when a worker is lost and none can be started. `state`: which of the run's state was lost
    with it; `shards` of the model, `left`: workers."""
    if state and (shards > 1 or not left):
        return LossDecision("the run ends", f"{state}, and {NO_STARTER}")
    return LossDecision(f"the others go on, since {NO_STARTER}")


@dataclass(kw_only=True)
class WorkerRoster:
    """The workers that should run, and the counts that decide how many may be lost."""

    policy: Failure
    wanted: int
    lanes: int  # 0: not known
    model_shards: int = 1  # a worker has one of them, by its number
    no_replicas: bool = False  # no two workers hold the same state: their number cannot change
    incarnations: dict[int, int] = field(default_factory=dict)  # worker -> its newest
    active: set[WorkerId] = field(default_factory=set)
    failures: int = 0
    false_starts: int = 0
    step: int = -1  # the most steps that were committed when a worker was lost
    losses_at_step: int = 0  # workers lost since then without a further commit

    def fill(self) -> list[WorkerId]:
        """Adds workers until as many are active as wanted, and returns them.

        They take free numbers from the lowest up; numbers whose shard of the model no worker has come first."""
        fresh = []
        while len(self.active) < self.wanted:
            taken, without = {who.worker for who in self.active}, uncovered_shards(self.active, self.model_shards)
            free = [number for number in range(len(taken) + self.model_shards) if number not in taken]
            number = next((number for number in free if model_shard_of(number, self.model_shards) in without), free[0])
            self.incarnations[number] = self.incarnations.get(number, -1) + 1
            who = WorkerId(number, self.incarnations[number])
            self.active.add(who)
            fresh.append(who)
        return fresh

    def worker_joined(self) -> None:
        self.false_starts = 0

    def worker_left(self, who: WorkerId, *, too_slow: bool = False, replaced: bool = False) -> None:
        """A worker ended by itself.

        It is replaced where it was too slow, which counts as a loss, or where it left because of a loss that has been
        counted (`replaced`)."""
        self.active.discard(who)
        if replaced:
            return
        if too_slow and self.policy.on_failure == "replace" and self.failures < self.policy.max_failures:
            self.failures += 1
            return
        self.wanted = min(self.wanted, max(1, len(self.active)))

    def worker_lost(self, who: WorkerId, *, took_part: bool, step: int) -> LossDecision:
        """Counts the loss and decides. `step`: steps that are known to be committed."""
        self.active.discard(who)
        self.failures += 1
        self.false_starts = 0 if took_part else self.false_starts + 1
        # Steps repeated from a checkpoint are no progress: the step that kills its workers may still be ahead.
        self.losses_at_step = 1 if step > self.step else self.losses_at_step + 1
        self.step = max(step, self.step)
        if self.policy.on_failure == "stop":
            return LossDecision("the run ends", "a worker was lost (--on-failure stop)")
        if self.failures > self.policy.max_failures:
            were = "was" if self.failures == 1 else "were"
            lost = f"{plural(self.failures, 'worker')} {were} lost (--max-failures {self.policy.max_failures})"
            return LossDecision("the run ends", lost)
        if self.false_starts >= FALSE_STARTS:
            return LossDecision("the run ends", f"{self.false_starts} processes in a row ended before they took part")
        if self.losses_at_step > 2 * self.wanted + 1:
            lost = f"{self.losses_at_step} workers in a row were lost in step {self.step}: others would be, too"
            return LossDecision("the run ends", lost)
        if self.policy.on_failure == "replace":
            return LossDecision("replaced")
        self.wanted = len(self.active)
        if self.wanted < self.policy.min_workers:
            left = f"{plural(self.wanted, 'worker')} left, and --min-workers is {self.policy.min_workers}"
            return LossDecision("the run ends", left)
        if not covers_model(self.active, self.model_shards):
            ends = f"{uncovered_text(self.active, self.model_shards)} (--on-failure shrink)"
            return LossDecision("the run ends", ends, uncovered=True)
        return LossDecision("the others go on")

    def scale(self, workers: int) -> bool:
        """Wants another number of workers. Returns False where it is that number already, or cannot be."""
        error = worker_count_error(workers, self.policy, self.lanes, self.model_shards, self.no_replicas)
        if workers == self.wanted or error is not None:
            return False
        self.wanted = workers
        return True


def uncovered_shards(workers: Collection[WorkerId], model_shards: int) -> list[int]:
    """Shards of the model that none of these workers has."""
    covered = {model_shard_of(who.worker, model_shards) for who in workers}
    return [shard for shard in range(model_shards) if shard not in covered]


def uncovered_text(workers: Collection[WorkerId], model_shards: int) -> str:
    without = uncovered_shards(workers, model_shards)
    if len(without) == model_shards:
        return "no worker is left"
    names = " and ".join(map(str, without))
    return f"no worker is left that has shard{'' if len(without) == 1 else 's'} {names} of the model"


def worker_count_error(
    workers: int, policy: Failure, lanes: int, model_shards: int = 1, no_replicas: bool = False
) -> InputError | None:
    """Returns why a run cannot have that many workers; None: it can."""
    count = plural(workers, "worker")
    if workers < 1:
        return InputError(f"{workers} workers: at least 1 is needed", fix="shoal stop ends a run")
    if no_replicas and workers != model_shards:
        return InputError(
            f"{count}, but with zero the state is shared among {model_shards}, and each has its own rows of it",
            fix="shoal stop, then --resume with another layout: a checkpoint fits any number of workers",
        )
    if workers % model_shards:
        below, above = workers // model_shards * model_shards, (workers // model_shards + 1) * model_shards
        fix = f"--workers {below} or {above}" if below else f"--workers {above}"
        return InputError(f"{count}, but the layout's replicas have {model_shards} workers each", fix=fix)
    if model_shards > 1 and lanes and workers // model_shards > lanes:
        return InputError(
            f"{workers} workers are {workers // model_shards} replicas but there are {lanes} lanes:"
            " each replica needs a lane",
            fix=f"--workers {lanes * model_shards} at the most; more lanes would be another job, with other bits",
        )
    if model_shards == 1 and lanes and workers > lanes:
        fix = f"--workers {lanes} at the most; more lanes would be another job, with other bits"
        return InputError(f"{workers} workers but {lanes} lanes: each worker needs a lane", fix=fix)
    if workers < policy.min_workers:
        return InputError(f"{count}, but the run was started with --min-workers {policy.min_workers}")
    if policy.max_workers is not None and workers > policy.max_workers:
        return InputError(f"{workers} workers, but the run was started with --max-workers {policy.max_workers}")
    return None
