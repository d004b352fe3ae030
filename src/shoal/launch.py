"""The two doors, opened: a job or a script, with what the user asked for, becomes a run of the driver."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from shoal.collectives.topology import Place
from shoal.collectives.traffic import Traffic, Wish, wish_of_environment
from shoal.driver import Driver, Launch, Options, rules_of
from shoal.errors import InputError, PlanError, RunFolderError
from shoal.exact.kernels import ISA_ENVIRONMENT, ISA_IN_FORCE
from shoal.feed import open_source
from shoal.history import committed_floor
from shoal.job import Job
from shoal.memory import read_size
from shoal.outline import check_memory, check_optimizer, check_start, outline
from shoal.plan.layout import Layout
from shoal.plan.placement import Plan, make_plan
from shoal.report.disk import try_to_write
from shoal.report.events import RunStarted
from shoal.report.folder import DEFAULT_ROOT, RunFolder, find_run
from shoal.report.tensorboard import TensorBoard
from shoal.result import Report
from shoal.roster import check
from shoal.schedule import check_name
from shoal.seat import Seat, Settings
from shoal.worker import OpenJob, run_script, train_job

# -- the job's door -----------------------------------------------------------------------------------------------


def train(
    job: Job,
    *,
    workers: int | None = None,
    layout: str | Layout | None = None,
    schedule: str = "1f1b",
    chunks: int | None = None,
    recompute: bool = False,
    shares: str | None = None,
    plan: Plan | None = None,
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
) -> Report:
    """Trains a job on workers of this machine and returns the report. Works in scripts and notebooks."""
    for name, value, known in (
        ("nonfinite", nonfinite, ("stop", "skip")),
        ("on_failure", on_failure, ("replace", "shrink", "stop")),
        ("slow", slow, ("rebalance", "evict", "ignore")),
    ):
        if value not in known:
            raise InputError(f"{name}={value!r} is not known", fix=", ".join(map(repr, known)))
    settings = Settings(
        stop_after=stop_after,
        nonfinite=nonfinite,  # type: ignore[arg-type]
        wish=Wish(algorithm=algorithm, compress=compress),
        on_failure=on_failure,  # type: ignore[arg-type]
        min_workers=min_workers,
        max_workers=max_workers,
        max_failures=max_failures,
        slow=slow,  # type: ignore[arg-type]
        store=store,
        memory=read_size(memory) if isinstance(memory, str) else memory,
    )
    options = Options(
        workers=workers,
        layout=Layout.read(layout) if isinstance(layout, str) else layout,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        shares=shares,
        plan=plan,
        run_dir=Path(run_dir) if run_dir is not None else None,
        resume=resume,
        quiet=quiet,
        tensorboard=tensorboard,
        settings=settings,
    )
    return train_with(job, options)


def open_job(job: Job) -> OpenJob:
    """Opens the data and checks it against the job."""
    source = open_source(job.data, seed=job.seed, shuffle=job.shuffle)
    held_out = None if job.evaluate is None else open_source(job.evaluate, seed=job.seed, shuffle=False)
    schedule = job.schedule(source.samples, source.last)
    return OpenJob(job=job, source=source, held_out=held_out, steps=job.total_steps(schedule))


def plan_for(job: Job, options: Options) -> Plan:
    wish = wish_of(options)
    check_name(options.schedule)
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


def wish_of(options: Options) -> Wish:
    """How gradients are to travel: as asked now, else as the plan has it, else as the environment says."""
    asked, plan = options.settings.wish, options.plan
    algorithm = asked.algorithm or (plan.algorithm if plan is not None else "")
    compress = asked.compress or (plan.compress if plan is not None else "")
    return wish_of_environment(structs.replace(asked, algorithm=algorithm, compress=compress))


def stays_exact(options: Options, workers: int) -> bool:
    """False where gradients lose something on their way: on this machine alone nothing goes between hosts."""
    places = [Place("here")]
    if options.lab is not None:
        places = [Place(slot.host.name, slot.host.rack) for slot in options.lab.slots(workers)]
    return Traffic.of(wish_of(options)).between(places).exact


def train_with(job: Job, options: Options, *, name: str | None = None) -> Report:
    check_isa(job)
    check(
        rules_of(options.settings), plan_for(job, options).workers
    )  # a placement that does not fit is said before any data is read
    return train_opened(open_job(job), options, name=name)


def train_opened(opened: OpenJob, options: Options, *, name: str | None = None) -> Report:
    job = opened.job
    plan = plan_for(job, options)
    check(rules_of(options.settings), plan.workers)
    if plan.layout.cuts or options.settings.memory is not None:  # what does not fit is said before there is a folder
        made = outline(job, opened.source, plan)
        check_optimizer(job, made, plan)
        check_memory(job, made, plan, options.settings.memory)
        opened = replace(opened, outline=made if plan.layout.cuts else None)
    check_start(job, opened.outline)
    options = replace(options, settings=replace(options.settings, wish=wish_of(options)))
    folder, settings = open_folder(options)
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
    )
    config = {"job": job.resolved(), "arithmetic": job.arithmetic(), "name": started.job} | where(options, plan.workers)
    with folder:

        def work(seat: Seat) -> None:
            train_job(opened, seat)

        launch = Launch(
            work=work,
            plan=plan,
            size=plan.workers,
            parts=plan.layout.parts,
            fixed=plan.layout.zero > 0,
            started=started,
            threads=job.threads,
            target=None if job.target is None else str(job.target),
            files={folder.config: config, folder.plan: plan},
        )
        value = Driver(launch, folder, settings, options).run()
    return Report(folder.path, value, job=job)


def where(options: Options, workers: int) -> dict[str, Any]:
    """For the run's folder: which host of a lab each worker ran on, and what was asked for the way between hosts."""
    found = {name: value for name in ("algorithm", "compress") if (value := getattr(options.settings.wish, name))}
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


def open_folder(options: Options) -> tuple[RunFolder, Settings]:
    """A fresh folder, or the one to go on with."""
    if options.tensorboard:  # a missing package is said before there is a folder
        TensorBoard(RunFolder(DEFAULT_ROOT))
    if options.resume is False:
        return RunFolder.create(options.run_dir), options.settings
    if options.resume is True:
        folder = RunFolder.open(options.run_dir) if options.run_dir is not None else find_run(None)
    else:
        folder = find_run(str(options.resume))
    try:
        try_to_write(folder.path)
    except OSError as error:
        fix = "free some space there or make it writable; the run's checkpoints are as they were"
        raise RunFolderError(f"cannot write to {folder.path}: {error.strerror}", fix=fix) from None
    return folder, replace(options.settings, resume=True, committed=committed_floor(folder.read_events()))


# -- any script's door ----------------------------------------------------------------------------------------------


def run_with(script: Path, arguments: list[str], options: Options) -> Report:
    """Starts any script on a number of workers, with what torchrun would have set; one that joins is watched."""
    if not script.is_file():
        raise InputError(f"there is no script {script}")
    size = options.workers if options.workers is not None else options.plan.workers if options.plan else 1
    if size < 1:
        raise InputError(f"{size} workers: at least 1 is needed", fix="--workers 1")
    if options.plan is not None and options.plan.workers != size:
        raise PlanError(f"--workers {size}, but the plan has {options.plan.workers}", fix="leave --workers out")
    check(rules_of(options.settings), size)
    options = replace(options, settings=replace(options.settings, wish=wish_of(options)))
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
    )
    config = {"script": str(script), "arguments": arguments, "workers": size} | where(options, size)
    with folder:
        launch = Launch(
            work=lambda seat: run_script(script, arguments, seat),
            plan=options.plan,
            size=size,
            started=started,
            threads=1,
            target=None,
            files={folder.config: config},
        )
        value = Driver(launch, folder, settings, options).run()
    return Report(folder.path, value, job=None)
