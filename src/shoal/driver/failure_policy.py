"""Which workers a run should have, and what happens when one is lost. Pure: the driver acts on the decisions."""

from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.errors import InputError
from shoal.recovery.membership.protocol import WorkerId, covers_model, model_shard_of
from shoal.report.human import plural
from shoal.worker.run_config import Failure

FALSE_STARTS = 3  # in a row: processes that end before they take part


@dataclass(frozen=True)
class LossDecision:
    """What becomes of the run. `end_reason`: why it cannot go on; empty while it can."""

    action: str
    end_reason: str = ""
    uncovered: bool = False  # it ends because no worker is left that holds some model shard


@dataclass(kw_only=True)
class WorkerRoster:
    policy: Failure
    wanted: int
    lanes: int  # 0: not known
    model_shards: int = 1  # that the model is cut into; a worker's number decides which it holds
    no_replicas: bool = False  # every worker holds another shard: their number is fixed
    incarnations: dict[int, int] = field(default_factory=dict)  # worker -> its newest incarnation
    active: set[WorkerId] = field(default_factory=set)
    failures: int = 0
    false_starts: int = 0
    step: int = -1  # the most steps that were committed when a worker was lost
    losses_at_step: int = 0  # workers lost since then without a commit beyond it

    def fill(self) -> list[WorkerId]:
        """Processes to start so that there are as many as wanted: the lowest free numbers, but first those of model
        shards that no worker holds."""
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
        """A worker left as asked. One that was `too_slow` is replaced and counts as a failure; one that is `replaced`
        after another's loss does not count again."""
        self.active.discard(who)
        if replaced:
            return
        if too_slow and self.policy.on_failure == "replace" and self.failures < self.policy.max_failures:
            self.failures += 1
            return
        self.wanted = min(self.wanted, max(1, len(self.active)))

    def worker_lost(self, who: WorkerId, *, took_part: bool, step: int) -> LossDecision:
        """`step`: how many steps are known to be committed."""
        self.active.discard(who)
        self.failures += 1
        self.false_starts = 0 if took_part else self.false_starts + 1
        # Repeating steps from a checkpoint is no progress: the step that kills its workers is still ahead.
        self.losses_at_step = 1 if step > self.step else self.losses_at_step + 1
        self.step = max(step, self.step)
        if self.policy.on_failure == "stop":
            return LossDecision("the run ends", "a worker was lost (--on-failure stop)")
        if self.failures > self.policy.max_failures:
            count = "1 worker was" if self.failures == 1 else f"{self.failures} workers were"
            return LossDecision("the run ends", f"{count} lost (--max-failures {self.policy.max_failures})")
        if self.false_starts >= FALSE_STARTS:
            return LossDecision("the run ends", f"{self.false_starts} processes in a row ended before they took part")
        if self.losses_at_step > 2 * self.wanted + 1:
            return LossDecision(
                "the run ends",
                f"{self.losses_at_step} workers in a row were lost in step {self.step}: further ones would be, too",
            )
        if self.policy.on_failure == "replace":
            return LossDecision("replaced")
        self.wanted = len(self.active)
        if self.wanted < self.policy.min_workers:
            left = f"{plural(self.wanted, 'worker')} left"
            return LossDecision("the run ends", f"{left}, and --min-workers is {self.policy.min_workers}")
        if not covers_model(self.active, self.model_shards):
            ends = f"{uncovered_text(self.active, self.model_shards)} (--on-failure shrink)"
            return LossDecision("the run ends", ends, uncovered=True)
        return LossDecision("the others go on")

    def scale(self, workers: int) -> bool:
        """Sets the number of workers. False: it is the same, or not possible."""
        if (
            workers == self.wanted
            or worker_count_error(workers, self.policy, self.lanes, self.model_shards, self.no_replicas) is not None
        ):
            return False
        self.wanted = workers
        return True


def uncovered_shards(workers: Collection[WorkerId], model_shards: int) -> list[int]:
    """Model shards that none of the workers holds."""
    covered = {model_shard_of(who.worker, model_shards) for who in workers}
    return [part for part in range(model_shards) if part not in covered]


def uncovered_text(workers: Collection[WorkerId], model_shards: int) -> str:
    without = uncovered_shards(workers, model_shards)
    if len(without) == model_shards:
        return "no worker is left"
    names = " and ".join(map(str, without))
    return f"no worker is left that has part{'' if len(without) == 1 else 's'} {names} of the model"


def worker_count_error(
    workers: int, policy: Failure, lanes: int, model_shards: int = 1, no_replicas: bool = False
) -> InputError | None:
    """Why a run cannot have that many workers."""
    if workers < 1:
        return InputError(f"{workers} workers: at least 1 is needed", fix="shoal stop ends a run")
    count = plural(workers, "worker")
    if no_replicas and workers != model_shards:
        return InputError(
            f"{count}, but with zero the state is shared among {model_shards}, and each has its own rows of it",
            fix="shoal stop, then --resume with another layout: a checkpoint fits any number of workers",
        )
    if workers % model_shards:
        below, above = workers // model_shards * model_shards, (workers // model_shards + 1) * model_shards
        return InputError(
            f"{count}, but the layout's replicas have {model_shards} workers each",
            fix=f"--workers {below} or {above}" if below else f"--workers {above}",
        )
    if model_shards > 1 and lanes and workers // model_shards > lanes:
        return InputError(
            f"{workers} workers are {workers // model_shards} replicas but there are {lanes} lanes:"
            " each replica needs a lane",
            fix=f"--workers {lanes * model_shards} at the most; more lanes would be another job, with other bits",
        )
    if model_shards == 1 and lanes and workers > lanes:
        return InputError(
            f"{workers} workers but {lanes} lanes: each worker needs a lane",
            fix=f"--workers {lanes} at the most; more lanes would be another job, with other bits",
        )
    if workers < policy.min_workers:
        return InputError(f"{count}, but the run was started with --min-workers {policy.min_workers}")
    if policy.max_workers is not None and workers > policy.max_workers:
        return InputError(f"{workers} workers, but the run was started with --max-workers {policy.max_workers}")
    return None
