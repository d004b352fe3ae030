"""The driver of a run: starts the workers, watches them, replaces lost ones, tells the user, writes the report.

Its only loop is `Driver.watch`; what it learns arrives as events and from the store (overseer.py); `roster.py` says
which workers there should be, `verdict.py` what it all comes to. Without it the run goes on: `attach` takes over.
"""

import importlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from torch._C._distributed_c10d import TCPStore

from shoal.driver import outcome
from shoal.driver.failure_policy import FailurePolicy, LossDecision, WorkerRoster, uncovered_shards, uncovered_text
from shoal.driver.launchers.fork_server import LocalLauncher, ProcessExit, WorkerStartup
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.namespaces import LabHost, call_on
from shoal.driver.store_monitor import StoreMonitor
from shoal.errors import RunError, ShoalError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan
from shoal.planner.cluster import WorkerSlot
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.protocol import WorkerId, model_shard_of
from shoal.recovery.membership.store import RunStore as Records
from shoal.report.aggregate import RunTally
from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    MembershipChanged,
    RunFinished,
    RunPredicted,
    RunResumed,
    RunStarted,
    SaveFailed,
    WorkerAdded,
    WorkerExited,
    WorkerFailed,
    WorkerLeft,
    WorkerLost,
    WorkerPrinted,
    WorkerStarted,
    decode,
    encode,
)
from shoal.report.human import plural
from shoal.report.oom import OomWatch
from shoal.report.progress import Progress, choose_progress
from shoal.report.run_folder import RunFolder
from shoal.report.run_sockets import listen
from shoal.report.summarize import summarize_run
from shoal.report.tensorboard import TensorBoard
from shoal.worker.context import (
    ACK_WORD,
    DRIVER_SOCKET,
    STOP_WORD,
    UNDELIVERED,
    EventChannel,
    RunSettings,
    WorkerContext,
    torchrun_store,
)
from shoal.worker.elastic_membership import LOG_ONLY, MODEL_SHARD_LOST, TOO_SLOW
from shoal.worker.main import TRACEBACK_FOLLOWS, reporting_failures

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a first failure: how long the others may still tell theirs
DRIVER_STATE = "driver.json"  # in the run's folder: what another driver needs to take over
DRIVER_PROCESS = "driving.json"  # in the run's folder, of a run with parameter servers: which process is its driver
LAUNCHER_SOCKET = "engine.sock"  # in the run's folder: where the server that starts workers listens
DROPPED_GRACE_SECONDS = 1.0  # for a worker that the others dropped to end by itself
FILL_SECONDS = 1.0  # after taking over: for the server to tell who ended meanwhile
TORCH_NOISE = re.compile(  # stays in the log
    r"(\[rank\d+\]:)?\[[WE]\d{4} \S+ \w+\.cpp:\d+\]|Exception raised from \S+ at|frame #\d+: |"
    + (OMITTED := "<omitting ")
)
LOG_BYTES = 1 << 14  # of the end of a log in which they are looked for
LOG_LINES = 5  # of a lost worker that its story shows


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the user asked for beside the job. Flags of `shoal train` and arguments of `shoal.train` alike."""

    workers: int | None = None
    layout: ParallelLayout | None = None  # None: every worker has all of the model
    schedule: str = "1f1b"  # of a pipeline
    chunks: int | None = None  # stages of a pipeline's worker; None: as the schedule has it
    recompute: bool = False
    shares: str | None = None
    plan: Plan | None = None
    servers: int | None = None  # parameter servers; None: as a plan or the run that is resumed has it, else none
    sync: str = ""  # how they keep workers in step (paramserver/sync_mode.py); empty: as the run had it, or "sync"
    run_dir: Path | None = None
    resume: str | bool = False  # True: the newest run; else a folder or the beginning of an id
    quiet: bool = False
    plain: bool = False
    tensorboard: bool = False
    pin: bool = False  # give each worker cores of its own
    lab: Lab | None = None  # whose hosts the workers run on
    auto: bool = False  # the planner chooses the layout: asked for; it does anyway where nobody says one
    cluster: str | None = None  # a preset or a file: what predictions are made for
    calibrate: tuple[str, ...] = ()  # runs that say how good they are
    predict: bool = False  # the run is predicted, for its report
    elastic: bool = True  # workers may come and go; else the first loss ends the run, and no store is kept
    detached: bool = False  # the run goes on when this process is gone
    settings: RunSettings = field(default_factory=RunSettings)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What is to be run: a job's loop or a script, by how many workers."""

    work: Callable[[WorkerContext], None]  # in each worker
    size: int
    plan: Plan | None
    threads: int
    target: str | None
    started: RunStarted
    files: dict[Path, Any]  # what the run's folder should say about it
    model_shards: int = 1  # that the model is cut into
    no_replicas: bool = False  # no two workers hold the same
    # What is foreseen of the run, as prediction.json has it; None: not known yet. `True`: it is needed now.
    prediction: Callable[[bool], Mapping[str, Any] | None] | None = None
    servers: int = 0  # parameter servers
    serve_shard: Callable[[WorkerContext, int], None] | None = None  # in each of them, with its number
    replan: Callable[[int], Plan] | None = None  # a plan for so many workers that are left; raises if there is none


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be known of a run to watch over it, beside its events."""

    size: int
    lanes: int
    threads: int
    target: str | None
    settings: RunSettings
    command: str
    pin: bool = False
    model_shards: int = 1
    no_replicas: bool = False


class RunDriver:
    def __init__(
        self,
        launch: LaunchSpec,
        folder: RunFolder,
        settings: RunSettings,
        options: RunOptions,
        previous: "RunDriver | None" = None,
    ) -> None:
        """`before`: of the same run, which goes on with another layout."""
        self.launch, self.folder, self.settings, self.options = launch, folder, settings, options
        self.tally: RunTally = RunTally() if previous is None else previous.tally
        self.prediction: Mapping[str, Any] | None = None
        self.next_plan: tuple[Plan, str] | None = None  # that the run goes on with when this sitting is over, and why
        self.tensorboard = TensorBoard(folder) if options.tensorboard else None
        self.progress: Progress = choose_progress(Console(stderr=True), quiet=options.quiet, plain=options.plain)
        self.log_tails: dict[int, _LogTail] = {}
        self.slots = () if options.lab is None else options.lab.slots(launch.size)
        self.interrupts = 0
        self.stopping_reported = False
        self.failed_at: float | None = None
        self.ending = False  # because of a loss: nobody is started any more
        self.fatal_error = False  # an error that whoever took over would meet, too
        self.fill_at: float | None = None  # after taking over: when all ends that nobody heard of have been told
        self.roster: WorkerRoster = WorkerRoster(
            policy=failure_policy_of(settings),
            wanted=launch.size,
            lanes=launch.started.lanes,
            model_shards=launch.model_shards,
            no_replicas=launch.no_replicas,
            failures=0 if previous is None else previous.roster.failures,
        )
        self.store_monitor: StoreMonitor | None = None
        self.pending_losses: list[
            tuple[WorkerId, int | None, str]
        ] = []  # ended: with which code, and what was lost with them
        self.participants: set[WorkerId] = set()
        self.leave_reasons: dict[WorkerId, str] = {}  # why
        self.seen_events: set[bytes] = set()  # what another driver has written: workers may tell some of it again
        self.loss_reasons: dict[WorkerId, str] = {}  # how it is known that a worker is lost whose process still exists
        self.elastic = options.elastic and launch.started.command == "train"  # a script says so when it joins
        self.oom_watch = OomWatch()
        self.port = 0
        self.listener: socket.socket | None = None

    def run(self) -> dict[str, Any]:
        if not self.settings.resume:  # else they are an older run's until its checkpoint has been accepted
            self._write_files()
        # Every torch optimizer imports this when it is made, which takes a second: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        first = self.roster.fill()
        if self.options.elastic:
            place, outlives = self._host(0), self.options.detached
            store = self.settings.store
            self.store_monitor = StoreMonitor(self.folder.path, self.folder.id, store, place, detached=outlives)
            first = self.store_monitor.begin(first, resumed=self.settings.resume)
            self.roster.active, self.roster.incarnations = set(first), {who.worker: who.incarnation for who in first}
        address = self.folder.path / LAUNCHER_SOCKET if self.options.detached else None
        engine = LocalLauncher(self._run_worker, fresh_thread=self.launch.threads > 1, address=address)
        if self.options.elastic:
            standing = DriverState(
                size=self.launch.size,
                lanes=self.launch.started.lanes,
                threads=self.launch.threads,
                target=self.launch.target,
                settings=self.settings,
                command=self.launch.started.command,
                pin=self.options.pin,
                model_shards=self.launch.model_shards,
                no_replicas=self.launch.no_replicas,
            )
            self.folder.write_json(self.folder.path / DRIVER_STATE, standing)
        return self._drive(engine, lambda: self._begin(engine, first))

    def _begin(self, launcher: LocalLauncher, first: list[WorkerId]) -> None:
        self._emit(self.launch.started)
        for who in first:
            self._start(launcher, who)

    @classmethod
    def attach(cls, folder: RunFolder, options: RunOptions) -> dict[str, Any]:
        """Takes over a run whose driver is gone."""
        standing = msgspec.json.decode((folder.path / DRIVER_STATE).read_bytes(), type=DriverState)
        events = folder.read_events()
        started = next(event for event in reversed(events) if isinstance(event, RunStarted))
        launch = LaunchSpec(
            work=_no_work, size=standing.size, plan=None, threads=standing.threads, target=standing.target,
            started=started, files={}, model_shards=standing.model_shards, no_replicas=standing.no_replicas,
        )  # fmt: skip
        driver = cls(launch, folder, standing.settings, options)
        for event in events:
            driver._update(event)
        driver.seen_events = {encode(event) for event in events}
        with suppress(OSError, msgspec.MsgspecError):
            driver.prediction = msgspec.json.decode(folder.prediction.read_bytes(), type=dict[str, Any])
        driver.store_monitor = StoreMonitor(folder.path, folder.id, standing.settings.store, host=None)
        driver.store_monitor.check_no_driver()
        engine = None
        with suppress(OSError):
            engine = LocalLauncher.attach(folder.path / LAUNCHER_SOCKET)
        driver.store_monitor.take_over(launcher_alive=engine is not None)
        return driver._drive(engine, lambda: driver._take_over(engine))

    def _take_over(self, launcher: LocalLauncher | None) -> None:
        self.listener = listen(self.folder.path / DRIVER_SOCKET, socket.SOCK_STREAM)
        self.listener.setblocking(False)
        self._read_undelivered()
        if launcher is not None:
            present = {WorkerId(rank, life) for rank, life in launcher.pids}
            self.roster.active = present
            # Whoever was lost while there was no driver is told of by the server, and replaced then.
            wanted = self.tally.membership.wanted if self.settings.on_failure == "replace" else None
            self.roster.wanted = wanted or len(present)
            for who in present:
                self.roster.incarnations[who.worker] = max(who.incarnation, self.roster.incarnations.get(who.worker, 0))
            self.fill_at = time.monotonic() + FILL_SECONDS
        self._emit(DriverChanged(time=time.time(), pid=os.getpid(), host=os.uname().nodename))
        if launcher is not None:
            self._emit_members()

    def _emit_members(self) -> None:
        """Who takes part: what the workers said of it to the driver before, and it did not write down, is lost."""
        assert self.store_monitor is not None
        view, committed = self.store_monitor.taken_over
        self.participants.update(view.members)
        if view.generation > (self.tally.membership.generation or 1):
            event = MembershipChanged(
                time=time.time(),
                generation=view.generation,
                members=[who.worker for who in view.members],
                incarnations=[who.incarnation for who in view.members],
                step=max(committed, self.tally.step),
                reason=view.reason,
                restart=view.restart,
            )
            self._emit(event)

    def _drive(self, launcher: LocalLauncher | None, begin: Callable[[], None]) -> dict[str, Any]:
        try:
            # After the fork: the store has a thread, and the server must have none.
            with self._rendezvous_store() as self.port, self._handle_interrupts(launcher):
                begin()
                if launcher is not None:
                    self.watch(launcher)
        finally:
            if launcher is not None:
                launcher.close()
            self._read_undelivered()
            self._emit_prints()
            ended = outcome.outcome(self.tally, size=self.launch.size, interrupted=self.interrupts > 0)
            self._close_store(for_good=ended == "done")
            self.next_plan = self.next_plan if ended == "failed" else None
            value = self._report(ended) if self.next_plan is None else {}
            self.progress.close()
            if self.tensorboard is not None:
                self.tensorboard.close()
        if self.next_plan is not None:  # there is no end yet to report of
            return value
        error = outcome.final_error(self.tally, ended, value)
        if error is not None:
            raise error
        return value

    def watch(self, launcher: LocalLauncher) -> None:
        while launcher.running:
            for heard in launcher.poll(TICK_SECONDS):
                if isinstance(heard, ProcessExit):
                    self._worker_exited(launcher, heard)
                else:
                    self._emit(decode(heard.text))
            if self.options.detached:
                launcher.acknowledge(ACK_WORD)
            self._accept(launcher)
            self._emit_prints()
            self._poll_store(launcher)
            self._record_prediction()
            self.progress.tick(self.tally)
            self._report_stopping()
            self._tick(launcher)
            if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE_SECONDS:
                return  # the rest wait for someone who will not come; closing the engine ends them

    def _tick(self, launcher: LocalLauncher) -> None:
        """For drivers of other kinds of runs: what else is to be seen to."""

    # -- workers that come and go -----------------------------------------------------------------------------------

    def _start(self, launcher: LocalLauncher, who: WorkerId) -> None:
        log = self.folder.log(who.worker)
        self.log_tails.setdefault(who.worker, _LogTail(log)).reopen()
        environment, host = self._environment(who.worker, self.port), self._host(who.worker)
        launcher.start(who.worker, environment, log, self._cores(who.worker), host, who.incarnation)

    def _worker_exited(self, launcher: LocalLauncher, ended: ProcessExit) -> None:
        who = WorkerId(ended.rank, ended.incarnation)
        self._emit(WorkerExited(time=time.time(), rank=who.worker, code=ended.code, incarnation=who.incarnation))
        if ended.code == 0 and (who.worker in self.tally.finished or not self.elastic):
            self.roster.active.discard(who)
        elif who in self.leave_reasons and self.leave_reasons[who] != MODEL_SHARD_LOST:
            self.roster.worker_left(who, too_slow=self.leave_reasons[who] == TOO_SLOW)
            if launcher.can_start and not self.interrupts and not self.tally.finished:
                self._start_missing(launcher, "replacement")
        elif not self.elastic or self.fatal_error or self.store_monitor is None:
            self.roster.active.discard(who)
            if ended.code != 0 and self.failed_at is None:
                self.failed_at = time.monotonic()
        elif self.interrupts or self.tally.finished or (who in self.leave_reasons and self.ending):
            self.roster.active.discard(who)  # the run is ending: nobody is needed in its place
            self.store_monitor.remove(who, self._exit_text(ended.code))
        else:
            self.roster.active.discard(who)
            state = MODEL_SHARD_LOST if who in self.leave_reasons else self._lost_state()
            self.pending_losses.append((who, ended.code, state))
            self.loss_reasons[who] = (
                self.store_monitor.drop_reason(who) or self.loss_reasons.get(who) or "its process ended"
            )
            self._decide_losses(launcher)

    def _decide_losses(self, launcher: LocalLauncher) -> None:
        """What becomes of the run without those that have ended. When a part of the model is lost before anything was
        saved, whoever is left may be writing the first checkpoint: it ends by itself when that is done."""
        assert self.store_monitor is not None
        saving = self.roster.active & self.participants
        if self._lost_state() and not self._has_checkpoint and saving and self.settings.on_failure == "replace":
            for who, code, _ in self.pending_losses:
                self.store_monitor.remove(who, self._exit_text(code))
            return
        undecided, self.pending_losses = self.pending_losses, []
        for who, code, state in undecided:
            if who not in self.leave_reasons:
                self._worker_lost(launcher, who, code, state)
            elif (
                not self.ending and launcher.can_start and self._has_checkpoint
            ):  # from a checkpoint, with other processes
                self.roster.worker_left(who, replaced=True)
                self.store_monitor.remove(who, f"left: {MODEL_SHARD_LOST}")
                self._start_missing(launcher, "replacement")
            elif not self.ending:
                self._worker_lost(launcher, who, code, state)

    @property
    def _has_checkpoint(self) -> bool:
        """Whether there is a checkpoint. Whoever wrote it may have died before it could tell."""
        standing = (self.folder.path / "checkpoints").glob("step-" + "[0-9]" * 8)
        return bool(self.tally.saved) or self.tally.resumed is not None or any(standing)

    def _worker_lost(self, launcher: LocalLauncher, who: WorkerId, code: int | None, state: str) -> None:
        """`state`: whether the run's state, or a part of it, was lost with it."""
        assert self.store_monitor is not None
        step = max(self.tally.step, self.store_monitor.committed)
        decision = self.roster.worker_lost(who, took_part=who in self.participants, step=step)
        decision = self._try_another_layout(decision)
        if not decision.end_reason and state and not self._has_checkpoint:
            decision = LossDecision("the run ends", f"{state}, and no checkpoint was written")
        if not decision.end_reason and self.next_plan is None and not launcher.can_start:
            decision = LossDecision("the others go on, since the process that starts workers is gone")
            if self.launch.model_shards > 1 and state:
                decision = LossDecision("the run ends", f"{state}, and the process that starts workers is gone")
        self._emit(self._loss_event(launcher, who, code, decision))
        if decision.end_reason or self.next_plan is not None:
            self.ending = True
            self.store_monitor.request(stop=True)  # those who are left save what there is, and nobody begins anew
            self.store_monitor.remove(who, self._exit_text(code))
            self._ask_to_stop(launcher)
            if self.settings.on_failure == "stop" or not self.roster.active:
                self.failed_at = time.monotonic()
            return
        self.store_monitor.remove(who, self._exit_text(code))
        if launcher.can_start:
            self._start_missing(launcher, "replacement")

    def _loss_event(
        self, launcher: LocalLauncher, who: WorkerId, code: int | None, decision: LossDecision
    ) -> WorkerLost:
        pid = launcher.pids.get((who.worker, who.incarnation))
        known = self.tally.workers.get(who.worker)
        return WorkerLost(
            time=time.time(),
            rank=who.worker,
            incarnation=who.incarnation,
            host=known.host if known is not None and known.host else os.uname().nodename,
            pid=pid,
            detected_by=self.loss_reasons.get(who, "its process ended"),
            code=code,
            out_of_memory=code == -signal.SIGKILL and pid is not None and self.oom_watch.killed(pid),
            log=self._last_lines(who.worker),
            action=f"{decision.action}: {decision.end_reason}" if decision.end_reason else decision.action,
        )

    def _try_another_layout(self, decision: LossDecision) -> LossDecision:
        """When a part of the model is lost with all who had it and nobody comes in their place, those who are left may
        be enough for another layout: this sitting ends, and the run goes on from its newest checkpoint."""
        self.next_plan = None
        if not decision.uncovered or not self._has_checkpoint or self.launch.replan is None:
            return decision
        left = len(self.roster.active)
        try:
            self.next_plan = self.launch.replan(left), f"{plural(left, 'worker')} left"
        except ShoalError as error:
            return LossDecision(
                decision.action, f"{decision.end_reason}; no other layout for those who are left: {error.message}"
            )
        return LossDecision(f"the run goes on with layout {self.next_plan[0].layout}")

    def _lost_state(self) -> str:
        """Whether the state, or a part of it, was there once and nobody is left for it; empty while it is whole."""
        parts, having = self.launch.model_shards, self.roster.active & self.participants
        had = {model_shard_of(who.worker, parts) for who in self.participants}
        if not had.intersection(uncovered_shards(having, parts)):
            return ""
        return uncovered_text(having, parts) if having else "nobody is left who has its state"

    def _start_missing(self, launcher: LocalLauncher, reason: str) -> None:
        for fresh in self.roster.fill():
            self._emit(WorkerAdded(time=time.time(), rank=fresh.worker, incarnation=fresh.incarnation, reason=reason))
            self._start(launcher, fresh)

    def _poll_store(self, launcher: LocalLauncher) -> None:
        """What the store says: who was dropped by the others, and what the user asked for."""
        if self.store_monitor is None:
            return
        for event in self.store_monitor.poll():
            self._emit(event)
        for who, (reason, since) in self.store_monitor.dropped.items():
            if not launcher.is_running(who.worker, who.incarnation) or who in self.leave_reasons:
                continue
            self.loss_reasons.setdefault(who, reason)
            if time.monotonic() - since > DROPPED_GRACE_SECONDS:
                launcher.signal(who.worker, signal.SIGKILL, who.incarnation)
        wanted = self.store_monitor.wanted
        if wanted is not None and launcher.can_start and self.roster.scale(wanted):
            self._start_missing(launcher, f"scaled to {wanted} workers")
        if self.fill_at is not None and time.monotonic() > self.fill_at:
            # The driver before this one may have heard of an end and died before it did anything about it.
            self.fill_at = None
            ending = self.interrupts or self.tally.finished or self.failed_at is not None
            if self.settings.on_failure == "replace" and launcher.can_start and not ending:
                self._start_missing(launcher, "replacement")

    def _exit_text(self, code: int | None) -> str:
        if code is None:
            return "died"
        return f"died: {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def _last_lines(self, worker: int) -> list[str]:
        with suppress(OSError), open(self.folder.log(worker), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return []

    # -- wires of workers that another driver started -----------------------------------------------------------------

    def _accept(self, launcher: LocalLauncher) -> None:
        while self.listener is not None:
            try:
                wire, _ = self.listener.accept()
            except BlockingIOError:
                return
            wire.settimeout(1.0)
            with suppress(OSError, ValueError):
                worker, _, life = _first_line(wire).partition(".")
                wire.setblocking(True)
                launcher.add_channel(int(worker), int(life), wire)
                self._read_undelivered()

    def _read_undelivered(self) -> None:
        """What workers said while there was no driver."""
        if not self.options.detached:
            return
        found: list[AnyEvent] = []
        for path in self.folder.path.glob(f"{UNDELIVERED}*.jsonl"):
            taken = path.with_suffix(".taken")
            with suppress(OSError):
                path.rename(taken)
                for line in taken.read_bytes().splitlines():
                    with suppress(msgspec.MsgspecError):
                        found.append(decode(line))
                taken.unlink()
        for event in sorted(found, key=lambda event: event.time):
            if encode(event) not in self.seen_events:
                self._emit(event)

    def _close_store(self, for_good: bool) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.store_monitor is not None:
            self.store_monitor.close(for_good=for_good)
        for name in (DRIVER_SOCKET, LAUNCHER_SOCKET, DRIVER_STATE):
            (self.folder.path / name).unlink(missing_ok=True)

    def _report_stopping(self) -> None:
        if self.interrupts and not self.stopping_reported:
            self.stopping_reported = True
            if self.store_monitor is not None:  # a worker whose wire is not here yet hears of it, too
                self.store_monitor.request(stop=True)
            if not self.options.quiet:
                print("stopping: the step at work is finished and saved; Ctrl-C again ends at once", file=sys.stderr)

    def _update(self, event: AnyEvent) -> None:
        self.tally.add(event)
        if isinstance(event, RunStarted):  # another sitting: nobody of the one before is there
            self.participants.clear()
            self.leave_reasons.clear()
        if isinstance(event, WorkerStarted):
            self.participants.add(WorkerId(event.rank, event.incarnation))
            self.elastic = self.elastic or (event.elastic and self.options.elastic)
            self.roster.worker_joined()
            self.roster.incarnations[event.rank] = max(event.incarnation, self.roster.incarnations.get(event.rank, 0))
        if isinstance(event, WorkerFailed) and event.kind != "PeerLost":
            # One that came later and failed before it took part, as its state arrived changed, is none of the others'.
            self.fatal_error = self.fatal_error or not self._is_newcomer(event.rank) or not self.participants
        if isinstance(event, WorkerLeft):
            self.leave_reasons[WorkerId(event.rank, event.incarnation)] = event.reason

    def _is_newcomer(self, worker: int) -> bool:
        return WorkerId(worker, self.roster.incarnations.get(worker, 0)) not in self.participants

    def _emit(self, event: AnyEvent) -> None:
        if isinstance(event, WorkerFailed) and self.ending and self._is_newcomer(event.rank):
            return  # why the run ends has been said; what befalls one that never took part stays in its log
        self._update(event)
        self.folder.append_event(event)
        if self.tensorboard is not None:
            self.tensorboard.add(event)
        self.progress.show(event, self.tally)
        if isinstance(event, RunResumed):
            self._write_files()

    def _write_files(self) -> None:
        for path, value in self.launch.files.items():
            self.folder.write_json(path, value)
        if self.prediction is not None:
            self.folder.write_json(self.folder.prediction, self.prediction)

    def _record_prediction(self, now: bool = False) -> None:
        """Takes down what was foreseen of the run as soon as it is known. It is never worth an error."""
        if self.launch.prediction is None or self.prediction is not None:
            return
        found = self.launch.prediction(now)
        if found is None:
            return
        self.prediction = found
        if not self.settings.resume or self.tally.resumed is not None:
            with suppress(OSError, ShoalError):
                self.folder.write_json(self.folder.prediction, found)
        event = RunPredicted(
            time=time.time(),
            cluster=found["cluster"],
            step_seconds=found["seconds"],
            samples_per_second=found["samples_per_second"],
            reason=found["reason"] or "",
        )
        self._emit(event)

    def _emit_prints(self) -> None:
        for rank, tail in self.log_tails.items():
            for text in tail.lines():
                self._emit(WorkerPrinted(time=time.time(), rank=rank, text=text))

    # -- in the worker ----------------------------------------------------------------------------------------------

    def _run_worker(self, startup: WorkerStartup) -> int:
        """Runs in the forked process; everything the driver had loaded is there."""
        seat = self._context(startup)
        with reporting_failures(seat, str(self.folder.log(startup.rank))) as code:
            self.launch.work(seat)
        return code[0]

    def _context(self, startup: WorkerStartup) -> WorkerContext:
        name = f"{startup.rank}.{startup.incarnation}"
        return WorkerContext(
            rank=startup.rank,
            incarnation=startup.incarnation,
            size=self.launch.size,
            folder=self.folder.path,
            settings=self.settings,
            plan=self.launch.plan,
            channel=EventChannel(startup.channel, name, self.folder.path if self.options.detached else None),
            open_torch_store=torchrun_store,
            open_run_store=self._open_records if self.options.elastic else None,
            should_leave=startup.notice.claim,
            restart_store=self._revive_store,
        )

    def _revive_store(self) -> None:
        """In a worker. The store of a lab is on a host of its own, and etcd is not ours to start."""
        if self.settings.store is None and self.options.lab is None:
            sqlite_client.start_server(self.folder.path)

    def _open_records(self) -> Records:
        return open_store(self.settings.store, self.folder.path, self.folder.id)

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun sets, so that any torch.distributed script finds its group; on loopback, or in the lab."""
        found = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(self.launch.size),
            "LOCAL_WORLD_SIZE": str(self.launch.size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(self.launch.size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.folder.id,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(self.launch.threads),
            "PYTHONUNBUFFERED": "1",
        }
        found |= self.settings.communication.environment  # also for groups that a script makes itself
        lab = self.options.lab
        return found if lab is None else found | lab.variables(self._slot(rank), self.slots[0])

    def _host(self, rank: int) -> LabHost | None:
        return None if self.options.lab is None else self.options.lab.host_of(self._slot(rank))

    def _slot(self, rank: int) -> WorkerSlot:
        return self.slots[rank % len(self.slots)]

    @contextmanager
    def _rendezvous_store(self) -> Iterator[int]:
        """A key-value store where the workers of this run meet: on loopback, or on the first worker's host."""
        host = self._host(0)

        def open_store() -> tuple[TCPStore, int]:
            # A lab's host is reached by the lab alone, so there it may listen on every address.
            listener = socket.create_server(("127.0.0.1" if host is None else "0.0.0.0", 0), backlog=128)
            port = listener.getsockname()[1]
            descriptor = listener.detach()
            return TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
            ), port

        store, port = call_on(host, open_store)
        try:
            yield port
        finally:
            del store

    def _cores(self, rank: int) -> set[int] | None:
        cores = sorted(os.sched_getaffinity(0))
        if not self.options.pin or self.launch.size * self.launch.threads > len(cores):
            return None
        return set(cores[rank * self.launch.threads : (rank + 1) * self.launch.threads])

    # -- Ctrl-C -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _handle_interrupts(self, launcher: LocalLauncher | None) -> Iterator[None]:
        """Once: finish the step, save, stop. Twice: stop at once."""

        def handle(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            if launcher is not None:
                self._ask_to_stop(launcher)

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

    def _ask_to_stop(self, launcher: LocalLauncher) -> None:
        for rank in launcher.running:
            launcher.send(rank, STOP_WORD + b"\n")

    def _report(self, ended: str) -> dict[str, Any]:
        self._record_prediction(now=True)
        value = summarize_run(
            self.tally,
            outcome=ended,
            target=self.launch.target,
            failure=outcome.first_cause(self.tally) if ended == "failed" else None,
            folder=str(self.folder.path),
            files=self.folder.files(),
            prediction=self.prediction,
        )
        # A joined script's lanes are known from what its workers hold.
        value["lanes"] = value["lanes"] or max((stop for _, stop in value["assignment"]), default=0)
        self._emit(RunFinished(time=time.time(), outcome=ended))
        if ended == "failed" and self.settings.resume and self.tally.resumed is None:
            return value  # nothing was trained: the report of what was trained before stays
        try:
            self.folder.write_json(self.folder.report, value)
        except (OSError, ShoalError) as error:
            self._emit(SaveFailed(time=time.time(), step=self.tally.step, reason=f"report.json: {error}"))
        return value


class _LogTail:
    """Lines that a worker has added to its log since the last look, up to a traceback: that stays in the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial = ""
        self.ended = False
        self.omitted = False  # the last line ended a stack of torch's

    def reopen(self) -> None:
        """Another process writes to it now."""
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
        return [line for line in whole if self._is_for_users(line)]

    def _is_for_users(self, line: str) -> bool:
        after, self.omitted = self.omitted, line.startswith(OMITTED)  # torch leaves a line empty there
        return not (line.startswith(LOG_ONLY) or TORCH_NOISE.match(line) or (after and not line))


def failure_policy_of(settings: RunSettings) -> FailurePolicy:
    return FailurePolicy(
        on_failure=settings.on_failure,
        min_workers=settings.min_workers,
        max_workers=settings.max_workers,
        max_failures=settings.max_failures,
    )


def _first_line(channel: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < 64:
        more = channel.recv(1)
        if not more:
            break
        found += more
    return found.decode().strip()


def _no_work(context: WorkerContext) -> None:
    raise RunError("workers are started by the server of the first driver")
