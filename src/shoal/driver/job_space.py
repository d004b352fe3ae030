"""The layouts that this runtime can run a job with, for `shoal plan` and `--plan auto`."""

from dataclasses import replace

from shoal.driver.check_plan import check_compile, check_passes, check_sync_batchnorm, goes_with_servers
from shoal.errors import ShoalError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.parallel.plan import Plan
from shoal.parallel.tensor.find_rules import find_rules
from shoal.planner.cluster import Cluster
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import SearchSpace, space_of, without_inexact
from shoal.worker.model_partition import as_computed, check_optimizer, example_microbatch, make_outline, sketch_model


def job_space(
    job: Job, source: DataSource, work: Workload, cluster: Cluster, *, workers: int | None = None, exact: bool = False
) -> SearchSpace:
    """`exact`: only layouts with the same bits on any cluster."""
    space = space_of(work, cluster, workers=workers)
    if job.compile:  # as `check_compile` has it
        space = replace(space, tensors=(1,), recompute=("none",), zeros=(0, 1))
    if job.passes:  # as `check_passes` has it
        space = replace(space, tensors=(1,), pipelines=(1,), recompute=("none",), zeros=(0,))
    if not goes_with_servers(job):
        space = replace(space, servers=())
    if exact:
        return without_inexact(space)
    return replace(space, tensors=tensor_parallel_sizes(job, source, space.tensors))


def tensor_parallel_sizes(job: Job, source: DataSource, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those sizes over which the job's operators can be split; found on shapes alone."""
    if max(sizes) == 1:
        return (1,)
    model = as_computed(job, sketch_model(job).model)
    example = example_microbatch(job, model, source).example
    return tuple(size for size in sizes if size == 1 or _splits(job, model, example, size))


def _splits(job: Job, model: object, example: object, size: int) -> bool:
    try:
        find_rules(model, example, size, job.tensor_rules)  # type: ignore[arg-type]
    except ShoalError:
        return False
    return True


def plan_refusal(job: Job, source: DataSource, plan: Plan) -> str | None:
    """Why the runtime refuses this plan of the job; None: it does not."""
    try:
        check_compile(job, plan)
        check_sync_batchnorm(job, plan)
        check_passes(job, plan)
        if plan.layout.sharded:
            check_optimizer(job, make_outline(job, source, plan), plan)
    except ShoalError as error:
        return error.message
    return None
