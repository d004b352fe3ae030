"""The driver: a plan and an engine become a run. Starts the workers, watches them, tells the user, writes the report.

Its only loop is `_Driver.watch`; everything it learns arrives as events.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch._C._distributed_c10d import TCPStore

from shoal.engines.local import Exit, LocalEngine, Post
from shoal.errors import InputError, MismatchError, PlanError, RunFolderError, ShoalError, Stopped, WorkerError
from shoal.exact.kernels import ISA_ENVIRONMENT, ISA_IN_FORCE
from shoal.feed import open_source
from shoal.job import Job
from shoal.plan.placement import Plan, make_plan
from shoal.report.account import exit_text, report
from shoal.report.disk import try_to_write
from shoal.report.events import (
    Failed,
    Printed,
    Resumed,
    RunFinished,
    RunStarted,
    SaveFailed,
    WorkerExited,
    decode,
)
from shoal.report.folder import DEFAULT_ROOT, RunFolder, find_run
from shoal.report.progress import Progress, choose
from shoal.report.tally import Tally
from shoal.report.tensorboard import TensorBoard
from shoal.result import Report
from shoal.seat import Seat, Settings, Wire, environment_store
from shoal.worker import TRACEBACK_FOLLOWS, OpenJob, run_script, told, train_job

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a first failure: how long the others may still tell theirs


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for beside the job. Flags of `shoal train` and arguments of `shoal.train` alike."""

    workers: int | None = None
    shares: str | None = None
    plan: Plan | None = None
    run_dir: Path | None = None
    resume: str | bool = False  # True: the newest run; else a folder or the beginning of an id
    quiet: bool = False
    plain: bool = False
    tensorboard: bool = False
    pin: bool = False  # give each worker cores of its own
    settings: Settings = field(default_factory=Settings)


# -- the job's door -----------------------------------------------------------------------------------------------


def train(
    job: Job,
    *,
    workers: int | None = None,
    shares: str | None = None,
    plan: Plan | None = None,
    run_dir: str | Path | None = None,
    resume: str | bool = False,
    stop_after: int | None = None,
    nonfinite: str = "stop",
    quiet: bool = False,
    tensorboard: bool = False,
) -> Report:
    """Trains a job on workers of this machine and returns the report. Works in scripts and notebooks."""
    if nonfinite not in ("stop", "skip"):
        raise InputError(f"nonfinite={nonfinite!r} is not known", fix="'stop' or 'skip'")
    settings = Settings(stop_after=stop_after, nonfinite=nonfinite)  # type: ignore[arg-type]
    options = Options(
        workers=workers,
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
    if options.plan is None:
        return make_plan(
            lanes=job.lane_count,
            workers=1 if options.workers is None else options.workers,
            shares=options.shares,
            threads=job.threads,
            exact=options.settings.exact,
        )
    plan = options.plan
    if plan.lanes != job.lane_count:
        raise PlanError(f"the plan has {plan.lanes} lanes, the job {job.lane_count}", fix="a plan made for this job")
    if options.workers not in (None, plan.workers):
        raise PlanError(f"--workers {options.workers}, but the plan has {plan.workers}", fix="leave --workers out")
    return plan


def train_with(job: Job, options: Options, *, name: str | None = None) -> Report:
    check_isa(job)
    plan_for(job, options)  # a placement that does not fit is said before any data is read
    return train_opened(open_job(job), options, name=name)


def train_opened(opened: OpenJob, options: Options, *, name: str | None = None) -> Report:
    job = opened.job
    plan = plan_for(job, options)
    folder, settings = open_folder(options)
    schedule = job.schedule(opened.source.samples, opened.source.last)
    started = RunStarted(
        time=time.time(),
        run=folder.id,
        job=name or job.name,
        workers=plan.workers,
        layout=plan.layout,
        lanes=plan.lanes,
        exact=plan.exact,
        steps=opened.steps,
        steps_per_epoch=schedule.steps_per_epoch,
    )
    config = {"job": job.resolved(), "arithmetic": job.arithmetic(), "name": started.job}
    with folder:

        def work(seat: Seat) -> None:
            train_job(opened, seat)

        driver = _Driver(
            work=work,
            plan=plan,
            size=plan.workers,
            folder=folder,
            settings=settings,
            options=options,
            started=started,
            threads=job.threads,
            target=None if job.target is None else str(job.target),
            files={folder.config: config, folder.plan: plan},
        )
        value = driver.run()
    return Report(folder.path, value, job=job)


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
    return folder, replace(options.settings, resume=True)


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
    with folder:
        driver = _Driver(
            work=lambda seat: run_script(script, arguments, seat),
            plan=options.plan,
            size=size,
            folder=folder,
            settings=settings,
            options=options,
            started=started,
            threads=1,
            target=None,
            files={folder.config: {"script": str(script), "arguments": arguments, "workers": size}},
        )
        value = driver.run()
    return Report(folder.path, value, job=None)


# -- the driver -------------------------------------------------------------------------------------------------------


class _Driver:
    def __init__(
        self,
        *,
        work: Callable[[Seat], None],
        plan: Plan | None,
        size: int,
        folder: RunFolder,
        settings: Settings,
        options: Options,
        started: RunStarted,
        threads: int,
        target: str | None,
        files: dict[Path, Any],
    ) -> None:
        self.work, self.plan, self.size, self.folder = work, plan, size, folder
        self.settings, self.options, self.started = settings, options, started
        self.threads, self.target, self.files = threads, target, files
        self.tally = Tally()
        self.board = TensorBoard(folder) if options.tensorboard else None
        self.progress: Progress = choose(Console(stderr=True), quiet=options.quiet, plain=options.plain)
        self.tails = {rank: _Tail(folder.log(rank)) for rank in range(size)}
        self.interrupts = 0
        self.said_stopping = False
        self.failed_at: float | None = None

    def run(self) -> dict[str, Any]:
        if not self.settings.resume:  # else they are an older run's until its checkpoint has been accepted
            self._write_files()
        # Every torch optimizer imports this when it is made, which takes a second: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        engine = LocalEngine(self._worker, fresh_thread=self.threads > 1)
        try:
            # After the fork: the store has a thread, and the server must have none.
            with _store() as port, self._interrupts(engine):
                self._tell(self.started)
                for rank in range(self.size):
                    engine.start(rank, self._environment(rank, port), self.folder.log(rank), self._cores(rank))
                self.watch(engine)
        finally:
            engine.close()
            self._hear_prints()
            outcome = self._outcome()
            value = self._report(outcome)
            self.progress.close()
            if self.board is not None:
                self.board.close()
        self._raise(outcome, value)
        return value

    def watch(self, engine: LocalEngine) -> None:
        while engine.running:
            for heard in engine.wait(TICK_SECONDS):
                if isinstance(heard, Exit):
                    self._tell(WorkerExited(time=time.time(), rank=heard.rank, code=heard.code))
                    if heard.code != 0 and self.failed_at is None:
                        self.failed_at = time.monotonic()
                else:
                    self._tell(decode(heard.text))
            self._hear_prints()
            self.progress.tick(self.tally)
            self._say_stopping()
            if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE_SECONDS:
                return  # the rest wait for someone who will not come; closing the engine ends them

    def _say_stopping(self) -> None:
        if self.interrupts and not self.said_stopping:
            self.said_stopping = True
            if not self.options.quiet:
                print("stopping: the step at work is finished and saved; Ctrl-C again ends at once", file=sys.stderr)

    def _tell(self, event: Any) -> None:
        self.tally.add(event)
        self.folder.append_event(event)
        if self.board is not None:
            self.board.add(event)
        self.progress.show(event, self.tally)
        if isinstance(event, Resumed):
            self._write_files()

    def _write_files(self) -> None:
        for path, value in self.files.items():
            self.folder.write_json(path, value)

    def _hear_prints(self) -> None:
        for rank, tail in self.tails.items():
            for text in tail.lines():
                self._tell(Printed(time=time.time(), rank=rank, text=text))

    # -- in the worker ----------------------------------------------------------------------------------------------

    def _worker(self, post: Post) -> int:
        """Runs in the forked process; everything the driver had loaded is there."""
        seat = Seat(
            rank=post.rank,
            size=self.size,
            folder=self.folder.path,
            settings=self.settings,
            plan=self.plan,
            wire=Wire(post.wire),
            store=environment_store,
        )
        with told(seat, str(self.folder.log(post.rank))) as code:
            self.work(seat)
        return code[0]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun sets, so that any torch.distributed script finds its group; on loopback only."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(self.size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.folder.id,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONUNBUFFERED": "1",
        }

    def _cores(self, rank: int) -> set[int] | None:
        cores = sorted(os.sched_getaffinity(0))
        if not self.options.pin or self.size * self.threads > len(cores):
            return None
        return set(cores[rank * self.threads : (rank + 1) * self.threads])

    # -- Ctrl-C -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self, engine: LocalEngine) -> Iterator[None]:
        """Once: finish the step, save, stop. Twice: stop at once."""

        def handle(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            for rank in range(self.size):
                engine.tell(rank, b"stop\n")

        try:
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever has it decides
            yield
            return
        try:
            yield
        except KeyboardInterrupt:
            return
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- the end ------------------------------------------------------------------------------------------------

    def _outcome(self) -> str:
        finished = self.tally.finished
        if len(finished) == self.size and not self.tally.failures:
            return "stopped" if any(each.resumable for each in finished.values()) else "done"
        if self.interrupts:
            return "stopped"
        exits = self.tally.exits
        joined = any(worker.fingerprint for worker in self.tally.ranks)
        if not joined and len(exits) == self.size and all(each.code == 0 for each in exits):
            return "done"  # a script that never joined
        return "failed"

    def _cause(self) -> Failed | None:
        """The first cause: an error of somebody's own before a death by signal, and that before a lost peer."""

        def rank_of(failure: Failed) -> tuple[bool, float]:
            return failure.kind == "PeerLost", failure.time

        told_of = sorted(self.tally.failures, key=rank_of)
        if told_of and told_of[0].kind != "PeerLost":
            return told_of[0]
        for leave in self.tally.exits:
            if leave.code != 0 and not any(failure.rank == leave.rank for failure in told_of):
                return Failed(
                    time=leave.time,
                    rank=leave.rank,
                    kind="WorkerError",
                    message=f"the process was {exit_text(leave.code)}" if leave.code < 0 else exit_text(leave.code),
                    # Steps are told of a few times a second, so the one it died in is not known.
                    where=[f"last heard of after step {self.tally.step}"] if self.tally.step else [],
                    log=str(self.folder.log(leave.rank)),
                )
        return told_of[0] if told_of else None

    def _report(self, outcome: str) -> dict[str, Any]:
        failure = self._cause() if outcome == "failed" else None
        value = report(
            self.tally,
            outcome=outcome,
            target=self.target,
            failure=failure,
            folder=str(self.folder.path),
            files=self.folder.files(),
        )
        # A joined script's lanes are known from what its workers hold.
        value["lanes"] = value["lanes"] or max((stop for _, stop in value["deal"]), default=0)
        self._tell(RunFinished(time=time.time(), outcome=outcome))
        if outcome == "failed" and self.settings.resume and self.tally.resumed is None:
            return value  # nothing was trained: the report of what was trained before stays
        try:
            self.folder.write_json(self.folder.report, value)
        except (OSError, ShoalError) as error:
            self._tell(SaveFailed(time=time.time(), step=self.tally.step, reason=f"report.json: {error}"))
        return value

    def _raise(self, outcome: str, value: dict[str, Any]) -> None:
        if outcome == "done":
            self._check_equal()
            self._check_saved(value)
            return
        saved = self._saved_steps()
        at = f"checkpoint: step {max(saved)}" if saved else "no checkpoint was written"
        if outcome == "stopped":
            raise Interrupted(
                f"stopped after step {self.tally.step}: {value['stopped'] or 'interrupted'}",
                where=at,
                fix=f"go on with --resume {self.folder.path}" if saved else None,
                report=value,
            )
        failure = self._cause()
        if failure is None:
            raise RunFailed("the run ended before it was done", where=at, report=value)
        place = [f"worker {failure.rank}"]
        if failure.step is not None:
            place.append(f"step {failure.step}")
        if failure.lane is not None:
            place.append(f"lane {failure.lane}")
        own = failure.kind in ("CheckpointError", "JobError", "MismatchError", "NonFiniteError")
        message = failure.message if own else f"{', '.join(place)}: {failure.message}"
        where = [*failure.where]
        if not own or failure.kind == "NonFiniteError":
            where += [at, f"log: {failure.log}"]
        error = RunFailed(message, where=where, fix=failure.fix, report=value)
        error.exit_code = failure.exit_code
        raise error

    def _check_equal(self) -> None:
        hashes = {each.weights_sha256 for each in self.tally.finished.values()}
        if len(hashes) > 1:
            raise MismatchError(f"workers ended with different weights: {', '.join(sorted(hashes))}")

    def _check_saved(self, value: dict[str, Any]) -> None:
        """Whoever goes on with the weights after a good end must find them."""
        lost = [event.reason for event in self.tally.save_failed if event.step == self.tally.step]
        if lost and self.tally.step not in self._saved_steps():
            reason, *where = (line.strip() for line in lost[0].split("\n"))
            raise RunFailed(f"trained to step {self.tally.step}, but not saved: {reason}", where=where, report=value)

    def _saved_steps(self) -> list[int]:
        return [event.step for event in (*self.tally.saved, self.tally.resumed) if event is not None]


class RunFailed(WorkerError):
    def __init__(self, message: str, *, report: dict[str, Any], **more: Any) -> None:
        super().__init__(message, **more)
        self.report = report


class Interrupted(Stopped):
    def __init__(self, message: str, *, report: dict[str, Any], **more: Any) -> None:
        super().__init__(message, **more)
        self.report = report


@contextmanager
def _store() -> Iterator[int]:
    """A key-value store where the workers of this run meet, on loopback, at a port of the kernel's choice."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store


class _Tail:
    """Lines that a worker has added to its log since the last look, up to a traceback: that stays in the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial = ""
        self.ended = False

    def lines(self) -> list[str]:
        try:
            size = self.path.stat().st_size
            if self.ended or size <= self.offset:
                return []
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                found = file.read(1 << 20)
        except OSError:
            return []
        self.offset += len(found)
        *whole, self.partial = (self.partial + found.decode(errors="replace")).split("\n")
        if TRACEBACK_FOLLOWS in whole:
            self.ended = True
            whole = whole[: whole.index(TRACEBACK_FOLLOWS)]
        return whole
