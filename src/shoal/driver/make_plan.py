"""From a job and a configuration to a plan: as asked, as the resumed run had it, or as the planner chooses."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.collectives.topology import RankPlace
from shoal.driver.auto_layout import LayoutChooser
from shoal.driver.check_plan import (
    check_compile,
    check_monitoring,
    check_passes,
    check_server_job,
    check_servers,
    check_sync_batchnorm,
)
from shoal.driver.launchers.base import Launcher
from shoal.driver.launchers.lab import LabLauncher
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.predict_run import BACKGROUND_SECONDS, RunPredictor, prediction_basis, prediction_enabled
from shoal.errors import PlanError, ShoalError
from shoal.job.job import Job
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan, make_plan, read_plan, too_few_lanes
from shoal.report import human
from shoal.report.loggers.logger import Logger
from shoal.report.run_folder import RunFolder, find_run
from shoal.worker.job_setup import OpenJob
from shoal.worker.model_partition import ModelOutline, check_memory, check_optimizer, make_outline
from shoal.worker.run_config import AUTO, RunConfig, Servers


def open_job(job: Job) -> OpenJob:
    """Opens the data and checks it against the job."""
    source, held_out = job.open_data(), job.open_held_out()
    schedule = job.schedule(source.samples, source.last)
    return OpenJob(job=job, source=source, held_out=held_out, steps=job.total_steps(schedule))


def resumed_folder(config: RunConfig) -> RunFolder:
    """The folder of the run that `resume` names."""
    resume, run_dir = config.checkpoint.resume, config.output.run_dir
    if resume is True:
        return RunFolder.open(Path(run_dir)) if run_dir is not None else find_run(None)
    return find_run(str(resume))


def resolve_servers(config: RunConfig) -> Servers:
    """The servers asked for; else those of the plan to replay, or of the resumed run."""
    asked, former = config.servers, config.parallel.fixed_plan
    if former is None and config.checkpoint.resume is not False and (asked.count is None or not asked.sync):
        with suppress(ShoalError):
            former = read_plan(resumed_folder(config).plan)
    count = asked.count if asked.count is not None else 0 if former is None else former.servers
    return Servers(count=count, sync=asked.sync or (former.sync if former is not None and count else ""))


def resolve_comm_options(config: RunConfig) -> CommOptions:
    """How gradients travel: as asked, else as the plan to replay has it, else as the environment has it."""
    asked, plan = config.comm_options, config.parallel.fixed_plan
    if plan is not None:
        algorithm, compress = asked.algorithm or plan.algorithm, asked.compress or plan.compress
        asked = structs.replace(asked, algorithm=algorithm, compress=compress)
    return options_from_environment(asked)


def plan_for(job: Job, config: RunConfig, launcher: Launcher | None = None) -> Plan:
    """The plan that the configuration asks for. `launcher`: where workers run; None: on this machine."""
    fixed = config.parallel.fixed_plan
    plan = _new_plan(job, config) if fixed is None else _replayed_plan(job, config, fixed)
    check_compile(job, plan)
    check_sync_batchnorm(job, plan, servers=bool(resolve_servers(config).count))
    check_passes(job, plan)
    if not _travels_exactly(config, plan.workers, launcher or LocalLauncher()):
        plan = structs.replace(plan, exact=False)
    servers = resolve_servers(config)
    mode = check_servers(servers, workers=plan.workers, layout=plan.layout)
    if mode is None:
        plan = structs.replace(plan, servers=0, sync="") if plan.servers else plan
    else:
        check_server_job(job, servers.count or 0)
        exact = plan.exact and mode.exact and not plan.compress
        plan = structs.replace(plan, servers=servers.count or 0, sync=str(mode), exact=exact)
    check_monitoring(job, plan)
    return plan


def _new_plan(job: Job, config: RunConfig) -> Plan:
    asked, travel = config.parallel, resolve_comm_options(config)
    layout = asked.parallel_layout
    if layout is not None:
        layout.check_workers(asked.workers)
    workers = layout.workers if layout is not None else 1 if asked.workers is None else asked.workers
    _check_lanes(job, ParallelLayout(data=workers) if layout is None else layout)
    return make_plan(
        lanes=job.lane_count,
        workers=workers,
        shares=asked.shares,
        threads=job.threads,
        exact=config.exact and (layout is None or layout.exact),
        algorithm=travel.algorithm,
        compress=travel.compress,
        layout=layout,
        schedule=asked.schedule,
        chunks=asked.chunks,
        recompute=asked.recompute,
    )


def _check_lanes(job: Job, layout: ParallelLayout) -> None:
    if layout.data > job.lane_count:
        lanes = job.lanes_for(layout.data)
        more = f"a batch of {layout.data} or more (it is {job.batch})" if lanes is None else f"--set lanes={lanes}"
        raise too_few_lanes(job.lane_count, layout, more)


def _replayed_plan(job: Job, config: RunConfig, plan: Plan) -> Plan:
    if plan.lanes != job.lane_count:
        raise PlanError(f"the plan has {plan.lanes} lanes, the job {job.lane_count}", fix="a plan made for this job")
    workers = config.parallel.workers
    if workers not in (None, plan.workers):
        raise PlanError(f"--workers {workers}, but the plan has {plan.workers}", fix="leave --workers out")
    travel = resolve_comm_options(config)
    return structs.replace(plan, algorithm=travel.algorithm, compress=travel.compress)


def _travels_exactly(config: RunConfig, workers: int, launcher: Launcher) -> bool:
    """False where gradients lose bits between hosts. On this machine alone no gradient leaves the host."""
    places = [RankPlace(host.name, host.rack) for host in launcher.hosts(workers)]
    return CommConfig.from_options(resolve_comm_options(config)).restrict_to(places).exact


class PreparedJob:
    """A job that is about to run: its plan and its prediction."""

    def __init__(self, opened: OpenJob, config: RunConfig, launcher: Launcher | None = None) -> None:
        self.opened, self.launcher = opened, launcher or LocalLauncher()
        self.config = config.with_comm_options(resolve_comm_options(config))
        self.predicted = prediction_enabled() if config.output.predict is None else config.output.predict
        self.plan = plan_for(opened.job, config, self.launcher)
        self.settings: Sequence[str] = ()  # --set, for commands in the report
        self.loggers: Sequence[Logger] = ()  # of the user's own
        self.layout_reason = ""  # why the plan is not the one asked for
        self.previous_layout = ""  # of the run, where workers were lost and it goes on with another
        self._predictor: RunPredictor | None = None
        config.failure.check_workers(self.plan.workers)

    def __enter__(self) -> "PreparedJob":
        return self

    def __exit__(self, *error: object) -> None:
        if self._predictor is not None:
            self._predictor.close()

    def predictor(self) -> RunPredictor:
        if self._predictor is None:
            asked = self.config.parallel
            known = prediction_basis(
                asked.cluster,
                asked.calibrate,
                lab=self.launcher.lab.cluster if isinstance(self.launcher, LabLauncher) else None,
                memory_capped=asked.memory is not None,
            )
            self._predictor = RunPredictor(self.opened.job, self.opened.source, known)
        return self._predictor

    def choose_plan(self) -> None:
        """Chooses the layout where the user names none, and raises what speaks against it before a folder is made."""
        asked, workers = self.config.parallel, self.plan.workers
        if self.predicted or asked.cluster is not None or asked.calibrate:
            self.predictor()
        free = asked.fixed_plan is None and asked.layout is None and asked.shares is None and not self.plan.servers
        former = _resumed_plan(self.config) if free else None
        # Without a limit of memory and without a cluster, only plain copies come into question.
        bounded = asked.memory is not None or asked.cluster is not None
        if former is not None:
            self.plan = self.chooser().choose_again(former, workers, workers)
            now = f", and there are {human.plural(workers, 'worker')} now" if workers < former.workers else ""
            self.layout_reason = f"the run had {former.layout}{now}"
        elif free and bounded and (workers > 1 or asked.plan == AUTO):
            self.plan, self.layout_reason = self.chooser().choose(workers)
        self.set_plan(self.plan)

    def set_plan(self, plan: Plan) -> None:
        made = self.check(plan)
        self.plan, self.opened = plan, replace(self.opened, outline=made if plan.layout.sharded else None)

    def check(self, plan: Plan) -> ModelOutline | None:
        """How the plan cuts the model. Raises ShoalError where the blocks, the optimizer or the memory do not fit."""
        job, limit = self.opened.job, self.config.parallel.memory_bytes
        if not plan.layout.sharded and limit is None:
            return None
        made = make_outline(job, self.opened.source, plan)
        check_optimizer(job, made, plan)
        check_memory(job, made, plan, limit)
        return made

    def chooser(self) -> LayoutChooser:
        def make(
            layout: ParallelLayout, *, schedule: str = "", chunks: int | None = None, recompute: bool = False
        ) -> Plan:
            asked = self.config.parallel
            wanted = replace(
                asked, workers=None, plan=None, layout=str(layout), schedule=schedule or asked.schedule, chunks=chunks,
                recompute=recompute or asked.recompute,
            )  # fmt: skip
            return plan_for(self.opened.job, replace(self.config, parallel=wanted), self.launcher)

        limit = self.config.parallel.memory_bytes
        return LayoutChooser(predictor=self.predictor(), make_plan=make, check=self.check, memory_limit=limit)

    def replan(self, left: int) -> Plan:
        """A plan for the workers that are left of a run."""
        return self.chooser().choose_again(self.plan, left, self.config.failure.min_workers)

    def prediction(self, now: bool) -> Mapping[str, Any] | None:
        """The content of prediction.json; None while it is not known, unless it is needed `now`."""
        found = self.predictor().predict(self.plan, wait=BACKGROUND_SECONDS if now else None)
        return None if found is None else structs.asdict(found)


def _resumed_plan(config: RunConfig) -> Plan | None:
    """The plan of the resumed run, where it cut the model and had at least as many workers as there are now."""
    workers = config.parallel.workers
    if config.checkpoint.resume is False or workers is None:
        return None
    with suppress(ShoalError):
        plan = read_plan(resumed_folder(config).plan)
        return plan if plan.layout.sharded and workers <= plan.workers else None
    return None
