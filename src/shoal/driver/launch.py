"""Launches a run: hands a job (`shoal.train`) or a script (`shoal run`), with a configuration, to the driver."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.driver.check_plan import check_servers
from shoal.driver.driver import RunDriver
from shoal.driver.launch_spec import LaunchSpec
from shoal.driver.launchers.base import LOOPBACK, Launcher
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.make_plan import PreparedJob, open_job, plan_for, resolve_comm_options, resumed_folder
from shoal.driver.result import Report
from shoal.driver.script_control import never_joined
from shoal.errors import InputError, PlanError, RunFolderError
from shoal.job.job import Job
from shoal.job.load import nearest_file
from shoal.numerics.kernels import ISA_IN_FORCE, isa_environment
from shoal.parallel.plan import Plan
from shoal.report.atomic_write import try_to_write
from shoal.report.event_queries import committed_floor
from shoal.report.events import RunStarted
from shoal.report.loggers.logger import Logger, open_loggers, split_loggers
from shoal.report.run_folder import DEFAULT_ROOT, FORMAT, RunFolder
from shoal.report.run_index import add_run
from shoal.transport.owned_folder import remove_orphans
from shoal.worker.context import WorkerContext, note_training
from shoal.worker.job_setup import OpenJob
from shoal.worker.main import run_script, train_job
from shoal.worker.model_partition import check_initial_weights
from shoal.worker.run_config import RunConfig

# -- jobs -------------------------------------------------------------------------------------------------------------


def train(
    job: Job, config: RunConfig | None = None, *, log: str | Sequence[str | Logger] | None = None, **given: Any
) -> Report:
    """Trains a job on workers of this machine and returns the report. Works in scripts and notebooks.

    `given` changes the configuration: groups (`failure=shoal.Failure(lease=2.0)`), or single fields by the names that
    their flags have in `shoal train --help-all` (`workers=4, layout="pipeline=2", checkpoint="auto"`). `log`: as in
    `--log`, or a list of such names and of loggers of your own (`begin(run)`, `log(step, values)`, `finish(report)`).
    """
    note_training()
    names, own = split_loggers([log] if isinstance(log, str) else log or [])
    given |= {} if log is None else {"log": names}
    return train_with(job, (config or RunConfig()).changed(**given), loggers=own)


def train_with(
    job: Job,
    config: RunConfig,
    *,
    name: str | None = None,
    settings: Sequence[str] = (),
    launcher: Launcher | None = None,
    loggers: Sequence[Logger] = (),
) -> Report:
    """`name` and `settings`: the job's in the report, as a command line has them. `launcher`: where workers run; None:
    on this machine. `loggers`: of the user's own."""
    check_isa(job)
    config.failure.check_workers(plan_for(job, config, launcher).workers)  # before any data is read
    return train_opened(open_job(job), config, name=name, settings=settings, launcher=launcher, loggers=loggers)


def train_opened(
    opened: OpenJob,
    config: RunConfig,
    *,
    name: str | None,
    settings: Sequence[str] = (),
    launcher: Launcher | None = None,
    loggers: Sequence[Logger] = (),
) -> Report:
    with PreparedJob(opened, config, launcher) as prepared:
        prepared.settings, prepared.loggers = settings, loggers
        prepared.choose_plan()
        check_initial_weights(opened.job, prepared.opened.outline)
        with open_folder(config) as folder:
            if prepared.predicted:
                prepared.predictor().start_trace()  # while the workers start
            launch = _launch_spec(prepared, folder, name, resumed=config.checkpoint.resume is not False)
            driver = driver_class(prepared.plan.servers)(_or_again(launch, folder), folder, prepared.config)
            value = driver.run()
            while driver.next_plan is not None:  # the same run, with another layout
                driver = _next_driver(prepared, driver, *driver.next_plan, name)
                value = driver.run()
    return Report(folder.path, value, job=opened.job)


def _or_again(launch: LaunchSpec, folder: RunFolder) -> LaunchSpec:
    """A run that goes on from its checkpoint begins again where it ended before it had written one."""
    if not launch.resumed or not folder.never_saved:
        return launch
    return replace(launch, resumed=False, begins_again=not never_joined(folder))


def driver_class(servers: int) -> type[RunDriver]:
    """Imports the modules of parameter servers only for a run that has some."""
    if not servers:
        return RunDriver
    from shoal.driver.server_driver import ServerRunDriver

    return ServerRunDriver


def _launch_spec(prepared: PreparedJob, folder: RunFolder, name: str | None, *, resumed: bool) -> LaunchSpec:
    opened, plan, job = prepared.opened, prepared.plan, prepared.opened.job
    schedule = job.schedule(opened.source.samples, opened.source.last)
    started = RunStarted(
        run=folder.id,
        job=name or job.name,
        settings=list(prepared.settings),
        workers=plan.workers,
        layout=str(plan.layout),
        lanes=plan.lanes,
        exact=plan.exact,
        steps=opened.steps,
        steps_per_epoch=schedule.steps_per_epoch,
        tokens=job.tokens,
        servers=plan.servers,
        sync_mode=plan.sync,
        layout_reason=prepared.layout_reason,
        previous_layout=prepared.previous_layout,
    )
    described = {"name": started.job, "job": job.resolved(), "arithmetic": job.arithmetic()}
    record = _run_record(described, prepared.config, prepared.launcher, plan.workers)

    if plan.servers:
        served = importlib.import_module("shoal.worker.server_worker.server_process")  # once, before the forks

    def work(context: WorkerContext) -> None:
        served.train_with_servers(opened, context) if plan.servers else train_job(opened, context)

    def serve(context: WorkerContext, number: int) -> None:
        served.serve_job(opened, context, number)

    return LaunchSpec(
        work=work,
        started=started,
        plan=plan,
        threads=job.threads,
        target=None if job.target is None else str(job.target),
        resumed=resumed,
        committed_before=committed_floor(folder.read_events()) if resumed else 0,
        launcher=prepared.launcher,
        files={folder.config: record, folder.plan: plan},
        loggers=prepared.loggers,
        prediction=prepared.prediction if prepared.predicted else None,
        serve_shard=serve if plan.servers else None,
        replan=prepared.replan,
    )


def _next_driver(prepared: PreparedJob, driver: RunDriver, plan: Plan, why: str, name: str | None) -> RunDriver:
    """The driver that goes on with the run from its newest checkpoint, with another layout."""
    prepared.previous_layout, prepared.layout_reason = str(prepared.plan.layout), why
    prepared.set_plan(plan)
    launch = _launch_spec(prepared, driver.folder, name, resumed=True)
    return RunDriver(launch, driver.folder, driver.config, previous=driver)


def _run_record(described: dict[str, Any], config: RunConfig, launcher: Launcher, workers: int) -> dict[str, Any]:
    """The content of config.json."""
    hosts = [host.name for host in launcher.hosts(workers) if host.address != LOOPBACK]
    return {"format": FORMAT, **described, **({"hosts": hosts} if hosts else {}), "run_config": config}


def check_isa(job: Job) -> None:
    """Raises InputError unless the job's instruction set is in force: a process chooses it before its first kernel."""
    if job.isa is not None and os.environ.get(ISA_IN_FORCE) != job.isa:
        settings = " ".join(f"{name}={value}" for name, value in isa_environment(job.isa).items())
        raise InputError(
            f"isa={job.isa!r} must be in force before the first kernel of the process, and it is not",
            fix=f"`shoal train` does it by itself; for plain Python: {settings} python …",
        )


def open_folder(config: RunConfig) -> RunFolder:
    """A fresh folder, or that of the resumed run; both can be written to."""
    remove_orphans()
    open_loggers(config.output.loggers)  # a missing package is reported before a folder is made
    if config.checkpoint.resume is False:
        return _listed(RunFolder.create(None if config.output.run_dir is None else Path(config.output.run_dir)), config)
    folder = resumed_folder(config)
    try:
        try_to_write(folder.path)
    except OSError as error:
        fix = "free some space there or make it writable; the run's checkpoints are as they were"
        raise RunFolderError(f"cannot write to {folder.path}: {error.strerror}", fix=fix) from None
    return _listed(folder, config)


def _listed(folder: RunFolder, config: RunConfig) -> RunFolder:
    if config.output.listed:
        add_run(folder.path, DEFAULT_ROOT)
    return folder


# -- scripts ----------------------------------------------------------------------------------------------------------


def run_with(script: Path, arguments: list[str], config: RunConfig, *, launcher: Launcher | None = None) -> Report:
    """Starts any script on workers with the environment that torchrun sets. A script that joins has a report."""
    if not script.is_file():
        raise InputError(f"there is no script {script}", fix=nearest_file(script) or "shoal run path/to/script.py")
    workers, plan = config.parallel.workers, config.parallel.fixed_plan
    size = workers if workers is not None else plan.workers if plan else 1
    if plan is not None and plan.workers != size:
        raise PlanError(f"--workers {size}, but the plan has {plan.workers}", fix="leave --workers out")
    launcher = LocalLauncher() if launcher is None else launcher
    config.failure.check_workers(size)
    servers = config.servers.count or 0
    check_servers(config.servers, workers=size)
    config = config.with_comm_options(resolve_comm_options(config))
    with open_folder(config) as folder:
        resumed = config.checkpoint.resume is not False
        described = {"script": str(script), "arguments": arguments, "workers": size}
        started = RunStarted.of_script(folder.id, str(script), arguments, workers=size, exact=config.exact)
        launch = LaunchSpec(
            work=lambda context: run_script(script, arguments, context),
            started=structs.replace(started, servers=servers),
            plan=plan,
            resumed=resumed,
            committed_before=committed_floor(folder.read_events()) if resumed else 0,
            launcher=launcher,
            files={folder.config: _run_record(described, config, launcher, size)},
            serve_shard=_serve_script if servers else None,
        )
        value = driver_class(servers)(_or_again(launch, folder), folder, config).run()
    return Report(folder.path, value, job=None)


def _serve_script(context: WorkerContext, number: int) -> None:
    from shoal.worker.server_worker.server_process import serve_script

    serve_script(context, number)
