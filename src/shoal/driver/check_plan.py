"""What does not go together in a plan, found before anything starts. Pure."""

from collections.abc import Mapping

from shoal.errors import PlanError
from shoal.job.job import Job
from shoal.job.optimizer_call import takes_model
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan
from shoal.parallel.sync_batchnorm import NO_MEETING, NO_MEETING_FIX
from shoal.paramserver.sync_mode import SyncMode
from shoal.worker.run_config import Servers

COPIES = "--workers N alone: any number of workers gives the same bits"


def check_compile(job: Job, plan: Plan) -> None:
    """Raises PlanError where the plan changes the blocks that the job compiles."""
    if job.compile and (plan.tensor > 1 or plan.recompute or plan.zero >= 2):
        what = "tensor" if plan.tensor > 1 else "recompute" if plan.recompute else f"zero={plan.zero}"
        raise PlanError(f"compile=True does not go with {what}", fix="compile=False, or another layout")


def goes_with_servers(job: Job) -> bool:
    try:
        check_server_job(job, 1)
    except PlanError:
        return False
    return not _monitors(job) and not job.sync_batchnorm


def _monitors(job: Job) -> list[str]:
    return [name for name in ("callbacks", "patience", "keep_best", "ema") if getattr(job, name)]


def check_monitoring(job: Job, plan: Plan) -> None:
    """Raises PlanError where the plan cannot call the job's callbacks, or has no place for its average."""
    asked = _monitors(job)
    if asked and plan.servers:
        raise PlanError(
            f"{asked[0]} does not go with --servers {plan.servers}: servers hold the weights and the optimizer, and the"
            " workers see neither step alike",
            fix="leave --servers out: any number of workers gives the same bits",
        )
    if job.evaluate_ema and plan.zero:
        raise PlanError(
            f"evaluate_ema=True does not go with zero={plan.zero}: no worker holds the whole average",
            fix="evaluate_ema=False (ema.safetensors is written all the same), or a layout without zero",
        )


def check_sync_batchnorm(job: Job, plan: Plan, *, servers: bool = False) -> None:
    """Raises PlanError where the lanes of a plan cannot meet at a batch norm."""
    if job.sync_batchnorm and (plan.pipeline > 1 or plan.tensor > 1 or plan.zero or plan.recompute or servers):
        raise PlanError(NO_MEETING, fix=NO_MEETING_FIX)


def check_passes(job: Job, plan: Plan) -> None:
    """Raises PlanError where the job has several backward passes, and the plan is not one of plain copies."""
    if job.passes and (plan.layout.sharded or plan.recompute):
        if plan.layout.sharded:
            why = f"layout {plan.layout}: every worker has all of the model"
        else:
            why = "--recompute: its losses may call any part of the model"
        raise PlanError(f"{several_passes(job)} does not go with {why}", fix=COPIES)


def several_passes(job: Job) -> str:
    return f"a job with several losses ({', '.join(job.passes)})"


def check_servers(servers: Servers, *, workers: int, layout: ParallelLayout | None = None) -> SyncMode | None:
    """The mode of the servers (by default "sync"); None where the run has no servers."""
    if not servers.count:
        if servers.sync:
            fix = f"--servers 1 --sync {servers.mode}, or leave --sync out"
            raise PlanError(f"--sync {servers.mode}: servers keep workers in step so, and the run has none", fix=fix)
        return None
    if layout is not None and layout.sharded:
        raise PlanError(
            f"--servers {servers.count} and layout {layout}: with servers every worker computes the whole model",
            fix=f"--workers {workers} without a layout, or without --servers",
        )
    mode = servers.mode or SyncMode()
    mode.check_workers(workers)
    return mode


def check_server_job(job: Job, servers: int) -> None:
    """Raises PlanError where the job needs what workers of a run with servers do not have."""
    if isinstance(job.optimizer, Mapping):
        raise PlanError(
            f"{several_passes(job)} does not go with --servers {servers}: a server takes one gradient for a step",
            fix=COPIES,
        )
    if job.loss_scaling is not None:
        raise PlanError(
            f"precision={job.precision!r} with a loss scale and --servers {servers}: servers apply every step they are"
            " given, and a step whose scaled gradients overflow must be left out",
            fix="precision='bf16', which needs no loss scale; or without --servers",
        )
    if len(job.accumulation) > 1:
        raise PlanError(
            f"accumulate={job.accumulate!r} and --servers {servers}: servers count steps, as many in each pass",
            fix="one number for all passes, accumulate=4; or without --servers",
        )
    if takes_model(job.optimizer):
        raise PlanError(
            f"optimizer takes (model, named) and --servers {servers}: a server has rows of parameters, and no modules",
            fix="an optimizer of (named), which tells parameters apart by name; or without --servers",
        )


def read_sync_modes(text: str) -> list[SyncMode]:
    """`sync,stale:3,local:16,outer=nesterov`: an option belongs to the mode before it. Each mode once."""
    modes: list[str] = []
    for item in text.split(","):
        if "=" in item and modes:
            modes[-1] += f",{item.strip()}"
        else:
            modes.append(item.strip())
    return list(dict.fromkeys(SyncMode.parse(mode) for mode in modes))
