"""The two doors, opened: a job or a script, with what the user asked for, becomes a run of the driver."""

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.collectives.topology import RankPlace
from shoal.driver.auto_layout import LayoutChooser
from shoal.driver.check_servers import check_servers
from shoal.driver.driver import LaunchSpec, RunDriver, RunOptions, failure_policy_of
from shoal.driver.failure_policy import check_policy
from shoal.driver.predict_run import BACKGROUND_SECONDS, RunPredictor, prediction_basis, prediction_enabled
from shoal.driver.result import Report
from shoal.errors import InputError, PlanError, RunFolderError, ShoalError
from shoal.job.dataset import open_data
from shoal.job.job import Job
from shoal.numerics.kernels import ISA_ENVIRONMENT, ISA_IN_FORCE
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import check_schedule_name
from shoal.parallel.plan import Plan, make_plan, read_plan
from shoal.report import human
from shoal.report.atomic_write import try_to_write
from shoal.report.event_queries import committed_floor
from shoal.report.events import RunStarted
from shoal.report.run_folder import DEFAULT_ROOT, RunFolder, find_run
from shoal.report.tensorboard import TensorBoard
from shoal.worker.context import RunSettings, WorkerContext
from shoal.worker.main import OpenJob, run_script, train_job
from shoal.worker.memory import parse_size
from shoal.worker.model_partition import (
    ModelOutline,
    check_initial_weights,
    check_memory,
    check_optimizer,
    make_outline,
)

# -- the job's door -----------------------------------------------------------------------------------------------


def train(
    job: Job,
    *,
    workers: int | None = None,
    layout: str | ParallelLayout | None = None,
    schedule: str = "1f1b",
    chunks: int | None = None,
    recompute: bool = False,
    shares: str | None = None,
    plan: Plan | str | None = None,
    cluster: str | Path | None = None,
    calibrate: Sequence[str | Path] = (),
    run_dir: str | Path | None = None,
    resume: str | bool = False,
    stop_after: int | None = None,
    nonfinite: str = "stop",
    quiet: bool = False,
    tensorboard: bool = False,
    compress: str = "",
    algorithm: str = "",
    on_failure: str = "replace",
    min_workers: int = 1,
    max_workers: int | None = None,
    max_failures: int = 100,
    slow: str = "rebalance",
    store: str | None = None,
    memory: str | int | None = None,
    servers: int | None = None,
    sync: str = "",
) -> Report:
    """Trains a job on workers of this machine and returns the report. Works in scripts and notebooks.

    `plan`: one that was saved, or "auto": the planner chooses, as it does with several workers where nobody says how.
    `cluster`: a preset or a file that the run is predicted for, `calibrate`: runs that say how good predictions are.
    `servers`: parameter servers that hold the weights; `sync`: how they keep the workers in step ("stale:3")."""
    if isinstance(plan, str) and plan != "auto":
        plan = read_plan(Path(plan))
    for name, value, known in (
        ("nonfinite", nonfinite, ("stop", "skip")),
        ("on_failure", on_failure, ("replace", "shrink", "stop")),
        ("slow", slow, ("rebalance", "evict", "ignore")),
    ):
        if value not in known:
            raise InputError(f"{name}={value!r} is not known", fix=", ".join(map(repr, known)))
    settings = RunSettings(
        stop_after=stop_after,
        nonfinite=nonfinite,  # type: ignore[arg-type]
        communication=CommOptions(algorithm=algorithm, compress=compress),
        on_failure=on_failure,  # type: ignore[arg-type]
        min_workers=min_workers,
        max_workers=max_workers,
        max_failures=max_failures,
        slow=slow,  # type: ignore[arg-type]
        store=store,
        memory=parse_size(memory) if isinstance(memory, str) else memory,
    )
    options = RunOptions(
        workers=workers,
        layout=ParallelLayout.parse(layout) if isinstance(layout, str) else layout,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        shares=shares,
        plan=None if isinstance(plan, str) else plan,
        auto=plan == "auto",
        cluster=None if cluster is None else str(cluster),
        calibrate=tuple(map(str, calibrate)),
        predict=prediction_enabled(),
        servers=servers,
        sync=sync,
        run_dir=Path(run_dir) if run_dir is not None else None,
        resume=resume,
        quiet=quiet,
        tensorboard=tensorboard,
        settings=settings,
    )
    return train_with(job, options)


def open_job(job: Job) -> OpenJob:
    """Opens the data and checks it against the job."""
    source = open_data(job.data, seed=job.seed, shuffle=job.shuffle)
    held_out = None if job.evaluate is None else open_data(job.evaluate, seed=job.seed, shuffle=False)
    schedule = job.schedule(source.samples, source.last)
    return OpenJob(job=job, source=source, held_out=held_out, steps=job.total_steps(schedule))


def plan_for(job: Job, options: RunOptions) -> Plan:
    plan = _plan_with_layout(job, options)
    servers, sync = servers_of(options)
    mode = check_servers(servers, sync, workers=plan.workers, layout=plan.layout)
    if mode is None:
        return structs.replace(plan, servers=0, sync="") if plan.servers else plan
    exact = plan.exact and mode.exact and not plan.compress
    return structs.replace(plan, servers=servers, sync=str(mode), exact=exact)


def servers_of(options: RunOptions) -> tuple[int, str]:
    """How many, and in which mode: as asked, else as the plan or the run that is gone on with has it."""
    former = options.plan
    if former is None and options.resume is not False and (options.servers is None or not options.sync):
        with suppress(ShoalError):
            former = read_plan(_resumed_folder(options).plan)
    servers = options.servers if options.servers is not None else 0 if former is None else former.servers
    return servers, options.sync or (former.sync if former is not None and servers else "")


def _plan_with_layout(job: Job, options: RunOptions) -> Plan:
    wish = comm_options_of(options)
    check_schedule_name(options.schedule)
    if options.plan is None:
        layout = options.layout
        if layout is not None:
            layout.check_workers(options.workers)
        workers = layout.workers if layout is not None else 1 if options.workers is None else options.workers
        plan = make_plan(
            lanes=job.lane_count,
            workers=workers,
            shares=options.shares,
            threads=job.threads,
            exact=options.settings.exact and (layout is None or layout.exact),
            algorithm=wish.algorithm,
            compress=wish.compress,
            layout=layout,
            schedule=options.schedule,
            chunks=options.chunks,
            recompute=options.recompute,
        )
        check_fits(job, plan)
        return plan if stays_exact(options, workers) else structs.replace(plan, exact=False)
    plan = options.plan
    if plan.lanes != job.lane_count:
        raise PlanError(f"the plan has {plan.lanes} lanes, the job {job.lane_count}", fix="a plan made for this job")
    if options.workers not in (None, plan.workers):
        raise PlanError(f"--workers {options.workers}, but the plan has {plan.workers}", fix="leave --workers out")
    check_fits(job, plan)
    exact = plan.exact and stays_exact(options, plan.workers)
    return structs.replace(plan, algorithm=wish.algorithm, compress=wish.compress, exact=exact)


def check_fits(job: Job, plan: Plan) -> None:
    """What a job cannot have under a layout."""
    if job.compile and (plan.tensor > 1 or plan.recompute or plan.zero >= 2):
        what = "tensor" if plan.tensor > 1 else "recompute" if plan.recompute else f"zero={plan.zero}"
        raise PlanError(f"compile=True does not go with {what}", fix="compile=False, or another layout")


def comm_options_of(options: RunOptions) -> CommOptions:
    """How gradients are to travel: as asked now, else as the plan has it, else as the environment says."""
    asked, plan = options.settings.communication, options.plan
    algorithm = asked.algorithm or (plan.algorithm if plan is not None else "")
    compress = asked.compress or (plan.compress if plan is not None else "")
    return options_from_environment(structs.replace(asked, algorithm=algorithm, compress=compress))


def stays_exact(options: RunOptions, workers: int) -> bool:
    """False where gradients lose something on their way: on this machine alone nothing goes between hosts."""
    places = [RankPlace("here")]
    if options.lab is not None:
        places = [RankPlace(slot.host.name, slot.host.rack) for slot in options.lab.slots(workers)]
    return CommConfig.from_options(comm_options_of(options)).restrict_to(places).exact


def train_with(job: Job, options: RunOptions, *, name: str | None = None) -> Report:
    check_isa(job)
    check_policy(
        failure_policy_of(options.settings), plan_for(job, options).workers
    )  # a placement that does not fit is said before any data is read
    return train_opened(open_job(job), options, name=name)


def train_opened(opened: OpenJob, options: RunOptions, *, name: str | None = None) -> Report:
    with PreparedJob(opened, options) as prepared:
        prepared.choose_plan()
        check_initial_weights(opened.job, prepared.opened.outline)
        options = replace(options, settings=replace(options.settings, communication=comm_options_of(options)))
        folder, settings = open_folder(options)
        with folder:
            if options.predict:
                prepared.predictor().start_trace()  # works beside the start of the workers
            driver = driver_class(prepared.plan.servers)(
                _launch_spec(prepared, folder, options, name), folder, settings, options
            )
            value = driver.run()
            while driver.next_plan is not None:  # the same run, with another layout
                driver = _next_driver(prepared, driver, *driver.next_plan, name)
                value = driver.run()
    return Report(folder.path, value, job=opened.job)


def driver_class(servers: int) -> type[RunDriver]:
    """Whoever trains without servers does not wait for their modules."""
    if not servers:
        return RunDriver
    from shoal.driver.server_driver import ServerRunDriver

    return ServerRunDriver


class PreparedJob:
    """A job that is about to run: its plan, and what is foreseen of it."""

    def __init__(self, opened: OpenJob, options: RunOptions) -> None:
        self.opened, self.options = opened, options
        self.plan = plan_for(opened.job, options)
        self.layout_reason = ""  # another plan than was asked for
        self._predictor: RunPredictor | None = None
        check_policy(failure_policy_of(options.settings), self.plan.workers)

    def __enter__(self) -> "PreparedJob":
        return self

    def __exit__(self, *error: object) -> None:
        if self._predictor is not None:
            self._predictor.close()

    def predictor(self) -> RunPredictor:
        if self._predictor is None:
            options, lab = self.options, self.options.lab
            known = prediction_basis(
                options.cluster,
                options.calibrate,
                lab=None if lab is None else lab.cluster,
                memory_capped=options.settings.memory is not None,
            )
            self._predictor = RunPredictor(self.opened.job, self.opened.source, known)
        return self._predictor

    def choose_plan(self) -> None:
        """The layout, where it was left to the planner; and what does not fit is said before there is a folder."""
        options, workers = self.options, self.plan.workers
        if options.predict or options.cluster is not None or options.calibrate:
            self.predictor()
        free = options.plan is None and options.layout is None and options.shares is None and not self.plan.servers
        former = _previous_plan(options) if free else None
        known = options.settings.memory is not None or options.cluster is not None  # else plain copies are all there is
        if former is not None:
            self.plan = self.chooser().choose_again(former, workers, workers)
            now = f", and there are {human.plural(workers, 'worker')} now" if workers < former.workers else ""
            self.layout_reason = f"the run had {former.layout}{now}"
        elif free and known and (workers > 1 or options.auto):
            self.plan, self.layout_reason = self.chooser().choose(workers)
        self.set_plan(self.plan)

    def set_plan(self, plan: Plan) -> None:
        """With this plan."""
        made = self.check(plan)
        self.plan, self.opened = plan, replace(self.opened, outline=made if plan.layout.sharded else None)

    def check(self, plan: Plan) -> ModelOutline | None:
        """How the model is cut. Whatever does not fit is an error."""
        job, limit = self.opened.job, self.options.settings.memory
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
            asked = self.options
            recompute = recompute or asked.recompute
            wanted = replace(
                asked, workers=None, layout=layout, schedule=schedule or asked.schedule, chunks=chunks,
                recompute=recompute,
            )  # fmt: skip
            return plan_for(self.opened.job, wanted)

        def refuse(plan: Plan) -> None:
            self.check(plan)

        limit = self.options.settings.memory
        return LayoutChooser(predictor=self.predictor(), make_plan=make, check=refuse, memory_limit=limit)

    def replan(self, left: int) -> Plan:
        """For the workers that are left of a run."""
        return self.chooser().choose_again(self.plan, left, self.options.settings.min_workers)

    def prediction(self, now: bool) -> Mapping[str, Any] | None:
        """As prediction.json has it."""
        found = self.predictor().predict(self.plan, wait=BACKGROUND_SECONDS if now else None)
        return None if found is None else structs.asdict(found)


def _previous_plan(options: RunOptions) -> Plan | None:
    """The plan of the run that is resumed, where it cut the model and had as many workers as there are now, or more."""
    if options.resume is False or options.workers is None:
        return None
    with suppress(ShoalError):
        plan = read_plan(_resumed_folder(options).plan)
        return plan if plan.layout.sharded and options.workers <= plan.workers else None
    return None


def _launch_spec(
    prepared: PreparedJob, folder: RunFolder, options: RunOptions, name: str | None, previous_layout: str = ""
) -> LaunchSpec:
    opened, plan = prepared.opened, prepared.plan
    job = opened.job
    schedule = job.schedule(opened.source.samples, opened.source.last)
    started = RunStarted(
        time=time.time(),
        run=folder.id,
        job=name or job.name,
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
        previous_layout=previous_layout,
    )
    config = {"job": job.resolved(), "arithmetic": job.arithmetic(), "name": started.job} | placement_record(
        options, plan.workers
    )

    if plan.servers:
        served = importlib.import_module("shoal.worker.server_worker.server_process")  # now, not in each process

    def work(seat: WorkerContext) -> None:
        served.train_with_servers(opened, seat) if plan.servers else train_job(opened, seat)

    def serve(seat: WorkerContext, number: int) -> None:
        served.serve_job(opened, seat, number)

    return LaunchSpec(
        work=work,
        plan=plan,
        size=plan.workers,
        model_shards=plan.layout.shards,
        no_replicas=plan.layout.zero > 0,
        started=started,
        threads=job.threads,
        target=None if job.target is None else str(job.target),
        files={folder.config: config, folder.plan: plan},
        prediction=prepared.prediction if options.predict else None,
        servers=plan.servers,
        serve_shard=serve if plan.servers else None,
        replan=prepared.replan,
    )


def _next_driver(prepared: PreparedJob, driver: RunDriver, plan: Plan, why: str, name: str | None) -> RunDriver:
    """The run goes on from its newest checkpoint, with another layout."""
    old, prepared.layout_reason = prepared.plan.layout, why
    prepared.set_plan(plan)
    folder = driver.folder
    settings = replace(driver.settings, resume=True, committed_before=committed_floor(folder.read_events()))
    launch = _launch_spec(prepared, folder, driver.options, name, previous_layout=str(old))
    return RunDriver(launch, folder, settings, driver.options, previous=driver)


def placement_record(options: RunOptions, workers: int) -> dict[str, Any]:
    """For the run's folder: which host of a lab each worker ran on, and what was asked for the way between hosts."""
    found = {
        name: value for name in ("algorithm", "compress") if (value := getattr(options.settings.communication, name))
    }
    return found if options.lab is None else found | {"hosts": [s.host.name for s in options.lab.slots(workers)]}


def check_isa(job: Job) -> None:
    """An instruction set is chosen before a process's first kernel, so it must be in force already."""
    if job.isa is not None and os.environ.get(ISA_IN_FORCE) != job.isa:
        settings = " ".join(f"{name}={value}" for name, value in isa_environment(job.isa).items())
        raise InputError(
            f"isa={job.isa!r} must be in force before the first kernel of the process, and it is not",
            fix=f"`shoal train` does it by itself; for plain Python: {settings} python …",
        )


def isa_environment(isa: str) -> dict[str, str]:
    return ISA_ENVIRONMENT[isa] | {ISA_IN_FORCE: isa}


def _resumed_folder(options: RunOptions) -> RunFolder:
    if options.resume is True:
        return RunFolder.open(options.run_dir) if options.run_dir is not None else find_run(None)
    return find_run(str(options.resume))


def open_folder(options: RunOptions) -> tuple[RunFolder, RunSettings]:
    """A fresh folder, or the one to go on with."""
    if options.tensorboard:  # a missing package is said before there is a folder
        TensorBoard(RunFolder(DEFAULT_ROOT))
    if options.resume is False:
        return RunFolder.create(options.run_dir), options.settings
    folder = _resumed_folder(options)
    try:
        try_to_write(folder.path)
    except OSError as error:
        fix = "free some space there or make it writable; the run's checkpoints are as they were"
        raise RunFolderError(f"cannot write to {folder.path}: {error.strerror}", fix=fix) from None
    return folder, replace(options.settings, resume=True, committed_before=committed_floor(folder.read_events()))


# -- any script's door ----------------------------------------------------------------------------------------------


def run_with(script: Path, arguments: list[str], options: RunOptions) -> Report:
    """Starts any script on a number of workers, with what torchrun would have set; one that joins is watched."""
    if not script.is_file():
        raise InputError(f"there is no script {script}")
    size = options.workers if options.workers is not None else options.plan.workers if options.plan else 1
    if size < 1:
        raise InputError(f"{size} workers: at least 1 is needed", fix="--workers 1")
    if options.plan is not None and options.plan.workers != size:
        raise PlanError(f"--workers {size}, but the plan has {options.plan.workers}", fix="leave --workers out")
    check_policy(failure_policy_of(options.settings), size)
    servers = options.servers or 0
    check_servers(servers, options.sync, workers=size)
    options = replace(options, settings=replace(options.settings, communication=comm_options_of(options)))
    folder, settings = open_folder(options)
    started = RunStarted(
        time=time.time(),
        run=folder.id,
        job=script.name,
        command="run",
        workers=size,
        layout=f"data={size}",
        lanes=0,
        exact=settings.exact,
        steps=None,
        steps_per_epoch=None,
        servers=servers,
    )
    config = {"script": str(script), "arguments": arguments, "workers": size} | placement_record(options, size)
    with folder:
        launch = LaunchSpec(
            work=lambda seat: run_script(script, arguments, seat),
            plan=options.plan,
            size=size,
            started=started,
            threads=1,
            target=None,
            files={folder.config: config},
            servers=servers,
            serve_shard=_serve_script if servers else None,
        )
        value = driver_class(servers)(launch, folder, settings, options).run()
    return Report(folder.path, value, job=None)


def _serve_script(context: WorkerContext, number: int) -> None:
    from shoal.worker.server_worker.server_process import serve_script

    serve_script(context, number)
