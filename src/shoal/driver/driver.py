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
from shoal.driver.failure_policy import Roster, Rules, Verdict, nobody_has, without_worker
from shoal.driver.launchers.fork_server import Exit, LocalEngine, Post
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.namespaces import LabHost, call_on
from shoal.driver.store_monitor import Overseer
from shoal.errors import RunError, ShoalError
from shoal.parallel.layout import Layout
from shoal.parallel.plan import Plan
from shoal.planner.cluster import Slot
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.protocol import Who, part_of
from shoal.recovery.membership.store import Store as Records
from shoal.report.aggregate import Tally
from shoal.report.events import (
    AnyEvent,
    Changed,
    DriverChanged,
    Failed,
    Predicted,
    Printed,
    Replaced,
    Resumed,
    RunFinished,
    RunStarted,
    SaveFailed,
    WorkerExited,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
    decode,
    encode,
)
from shoal.report.human import plural
from shoal.report.oom import OomWatch
from shoal.report.progress import Progress, choose
from shoal.report.run_folder import RunFolder
from shoal.report.run_sockets import listen
from shoal.report.summarize import report
from shoal.report.tensorboard import TensorBoard
from shoal.worker.context import DRIVER_SOCKET, HEARD_WORD, STOP_WORD, UNHEARD, Seat, Settings, Wire, environment_store
from shoal.worker.elastic_membership import LOG_ONLY, PART_LOST, TOO_SLOW
from shoal.worker.main import TRACEBACK_FOLLOWS, told

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a first failure: how long the others may still tell theirs
STANDING = "driver.json"  # in the run's folder: what another driver needs to take over
DRIVING = "driving.json"  # in the run's folder, of a run with parameter servers: which process is its driver
ENGINE_SOCKET = "engine.sock"  # in the run's folder: where the server that starts workers listens
DROPPED_SECONDS = 1.0  # for a worker that the others dropped to end by itself
FILL_SECONDS = 1.0  # after taking over: for the server to tell who ended meanwhile
FROM_TORCH = re.compile(  # stays in the log
    r"(\[rank\d+\]:)?\[[WE]\d{4} \S+ \w+\.cpp:\d+\]|Exception raised from \S+ at|frame #\d+: |"
    + (OMITTED := "<omitting ")
)
LOG_BYTES = 1 << 14  # of the end of a log in which they are looked for
LOG_LINES = 5  # of a lost worker that its story shows


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for beside the job. Flags of `shoal train` and arguments of `shoal.train` alike."""

    workers: int | None = None
    layout: Layout | None = None  # None: every worker has all of the model
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
    foresee: bool = False  # the run is predicted, for its report
    elastic: bool = True  # workers may come and go; else the first loss ends the run, and no store is kept
    outlives: bool = False  # the run goes on when this process is gone
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be run: a job's loop or a script, by how many workers."""

    work: Callable[[Seat], None]  # in each worker
    size: int
    plan: Plan | None
    threads: int
    target: str | None
    started: RunStarted
    files: dict[Path, Any]  # what the run's folder should say about it
    parts: int = 1  # that the model is cut into
    fixed: bool = False  # no two workers hold the same
    # What is foreseen of the run, as prediction.json has it; None: not known yet. `True`: it is needed now.
    foreseen: Callable[[bool], Mapping[str, Any] | None] | None = None
    servers: int = 0  # parameter servers
    serve: Callable[[Seat, int], None] | None = None  # in each of them, with its number
    another: Callable[[int], Plan] | None = None  # a plan for so many workers that are left; raises if there is none


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be known of a run to watch over it, beside its events."""

    size: int
    lanes: int
    threads: int
    target: str | None
    settings: Settings
    command: str
    pin: bool = False
    parts: int = 1
    fixed: bool = False


class Driver:
    def __init__(
        self,
        launch: Launch,
        folder: RunFolder,
        settings: Settings,
        options: Options,
        before: "Driver | None" = None,
    ) -> None:
        """`before`: of the same run, which goes on with another layout."""
        self.launch, self.folder, self.settings, self.options = launch, folder, settings, options
        self.tally: Tally = Tally() if before is None else before.tally
        self.prediction: Mapping[str, Any] | None = None
        self.next: tuple[Plan, str] | None = None  # that the run goes on with when this sitting is over, and why
        self.board = TensorBoard(folder) if options.tensorboard else None
        self.progress: Progress = choose(Console(stderr=True), quiet=options.quiet, plain=options.plain)
        self.tails: dict[int, _Tail] = {}
        self.slots = () if options.lab is None else options.lab.slots(launch.size)
        self.interrupts = 0
        self.said_stopping = False
        self.failed_at: float | None = None
        self.ending = False  # because of a loss: nobody is started any more
        self.fatal = False  # an error that whoever took over would meet, too
        self.fill_at: float | None = None  # after taking over: when all ends that nobody heard of have been told
        self.roster: Roster = Roster(
            rules=rules_of(settings),
            wanted=launch.size,
            lanes=launch.started.lanes,
            parts=launch.parts,
            fixed=launch.fixed,
            failures=0 if before is None else before.roster.failures,
        )
        self.overseer: Overseer | None = None
        self.undecided: list[tuple[Who, int | None, str]] = []  # ended: with which code, and what was lost with them
        self.took_part: set[Who] = set()
        self.left: dict[Who, str] = {}  # why
        self.before: set[bytes] = set()  # what another driver has written: workers may tell some of it again
        self.noticed: dict[Who, str] = {}  # how it is known that a worker is lost whose process still exists
        self.elastic = options.elastic and launch.started.command == "train"  # a script says so when it joins
        self.ooms = OomWatch()
        self.port = 0
        self.listener: socket.socket | None = None

    def run(self) -> dict[str, Any]:
        if not self.settings.resume:  # else they are an older run's until its checkpoint has been accepted
            self._write_files()
        # Every torch optimizer imports this when it is made, which takes a second: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        first = self.roster.start()
        if self.options.elastic:
            place, outlives = self._host(0), self.options.outlives
            store = self.settings.store
            self.overseer = Overseer(self.folder.path, self.folder.id, store, place, outlives=outlives)
            first = self.overseer.begin(first, resumed=self.settings.resume)
            self.roster.serving, self.roster.lives = set(first), {who.worker: who.life for who in first}
        address = self.folder.path / ENGINE_SOCKET if self.options.outlives else None
        engine = LocalEngine(self._worker, fresh_thread=self.launch.threads > 1, address=address)
        if self.options.elastic:
            standing = Standing(
                size=self.launch.size,
                lanes=self.launch.started.lanes,
                threads=self.launch.threads,
                target=self.launch.target,
                settings=self.settings,
                command=self.launch.started.command,
                pin=self.options.pin,
                parts=self.launch.parts,
                fixed=self.launch.fixed,
            )
            self.folder.write_json(self.folder.path / STANDING, standing)
        return self._drive(engine, lambda: self._begin(engine, first))

    def _begin(self, engine: LocalEngine, first: list[Who]) -> None:
        self._tell(self.launch.started)
        for who in first:
            self._start(engine, who)

    @classmethod
    def attach(cls, folder: RunFolder, options: Options) -> dict[str, Any]:
        """Takes over a run whose driver is gone."""
        standing = msgspec.json.decode((folder.path / STANDING).read_bytes(), type=Standing)
        events = folder.read_events()
        started = next(event for event in reversed(events) if isinstance(event, RunStarted))
        launch = Launch(
            work=_nobody, size=standing.size, plan=None, threads=standing.threads, target=standing.target,
            started=started, files={}, parts=standing.parts, fixed=standing.fixed,
        )  # fmt: skip
        driver = cls(launch, folder, standing.settings, options)
        for event in events:
            driver._learn(event)
        driver.before = {encode(event) for event in events}
        with suppress(OSError, msgspec.MsgspecError):
            driver.prediction = msgspec.json.decode(folder.prediction.read_bytes(), type=dict[str, Any])
        driver.overseer = Overseer(folder.path, folder.id, standing.settings.store, host=None)
        driver.overseer.check_free()
        engine = None
        with suppress(OSError):
            engine = LocalEngine.attach(folder.path / ENGINE_SOCKET)
        driver.overseer.take_over(workers_run=engine is not None)
        return driver._drive(engine, lambda: driver._take_over(engine))

    def _take_over(self, engine: LocalEngine | None) -> None:
        self.listener = listen(self.folder.path / DRIVER_SOCKET, socket.SOCK_STREAM)
        self.listener.setblocking(False)
        self._hear_unheard()
        if engine is not None:
            present = {Who(rank, life) for rank, life in engine.pids}
            self.roster.serving = present
            # Whoever was lost while there was no driver is told of by the server, and replaced then.
            wanted = self.tally.membership.wanted if self.settings.on_failure == "replace" else None
            self.roster.wanted = wanted or len(present)
            for who in present:
                self.roster.lives[who.worker] = max(who.life, self.roster.lives.get(who.worker, 0))
            self.fill_at = time.monotonic() + FILL_SECONDS
        self._tell(DriverChanged(time=time.time(), pid=os.getpid(), host=os.uname().nodename))
        if engine is not None:
            self._tell_members()

    def _tell_members(self) -> None:
        """Who takes part: what the workers said of it to the driver before, and it did not write down, is lost."""
        assert self.overseer is not None
        view, committed = self.overseer.found
        self.took_part.update(view.members)
        if view.epoch > (self.tally.membership.epoch or 1):
            event = Changed(
                time=time.time(),
                epoch=view.epoch,
                members=[who.worker for who in view.members],
                lives=[who.life for who in view.members],
                step=max(committed, self.tally.step),
                reason=view.reason,
                term=view.term,
            )
            self._tell(event)

    def _drive(self, engine: LocalEngine | None, begin: Callable[[], None]) -> dict[str, Any]:
        try:
            # After the fork: the store has a thread, and the server must have none.
            with self._store() as self.port, self._interrupts(engine):
                begin()
                if engine is not None:
                    self.watch(engine)
        finally:
            if engine is not None:
                engine.close()
            self._hear_unheard()
            self._hear_prints()
            ended = outcome.outcome(self.tally, size=self.launch.size, interrupted=self.interrupts > 0)
            self._close_store(for_good=ended == "done")
            self.next = self.next if ended == "failed" else None
            value = self._report(ended) if self.next is None else {}
            self.progress.close()
            if self.board is not None:
                self.board.close()
        if self.next is not None:  # there is no end yet to report of
            return value
        error = outcome.error(self.tally, ended, value)
        if error is not None:
            raise error
        return value

    def watch(self, engine: LocalEngine) -> None:
        while engine.running:
            for heard in engine.wait(TICK_SECONDS):
                if isinstance(heard, Exit):
                    self._exited(engine, heard)
                else:
                    self._tell(decode(heard.text))
            if self.options.outlives:
                engine.acknowledge(HEARD_WORD)
            self._accept(engine)
            self._hear_prints()
            self._oversee(engine)
            self._foresee()
            self.progress.tick(self.tally)
            self._say_stopping()
            self._tick(engine)
            if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE_SECONDS:
                return  # the rest wait for someone who will not come; closing the engine ends them

    def _tick(self, engine: LocalEngine) -> None:
        """For drivers of other kinds of runs: what else is to be seen to."""

    # -- workers that come and go -----------------------------------------------------------------------------------

    def _start(self, engine: LocalEngine, who: Who) -> None:
        log = self.folder.log(who.worker)
        self.tails.setdefault(who.worker, _Tail(log)).more()
        environment, host = self._environment(who.worker, self.port), self._host(who.worker)
        engine.start(who.worker, environment, log, self._cores(who.worker), host, who.life)

    def _exited(self, engine: LocalEngine, heard: Exit) -> None:
        who = Who(heard.rank, heard.life)
        self._tell(WorkerExited(time=time.time(), rank=who.worker, code=heard.code, life=who.life))
        if heard.code == 0 and (who.worker in self.tally.finished or not self.elastic):
            self.roster.serving.discard(who)
        elif who in self.left and self.left[who] != PART_LOST:
            self.roster.left(who, too_slow=self.left[who] == TOO_SLOW)
            if engine.can_start and not self.interrupts and not self.tally.finished:
                self._start_missing(engine, "replacement")
        elif not self.elastic or self.fatal or self.overseer is None:
            self.roster.serving.discard(who)
            if heard.code != 0 and self.failed_at is None:
                self.failed_at = time.monotonic()
        elif self.interrupts or self.tally.finished or (who in self.left and self.ending):
            self.roster.serving.discard(who)  # the run is ending: nobody is needed in its place
            self.overseer.remove(who, self._ending(heard.code))
        else:
            self.roster.serving.discard(who)
            state = PART_LOST if who in self.left else self._state_gone()
            self.undecided.append((who, heard.code, state))
            self.noticed[who] = self.overseer.reason(who) or self.noticed.get(who) or "its process ended"
            self._decide(engine)

    def _decide(self, engine: LocalEngine) -> None:
        """What becomes of the run without those that have ended. When a part of the model is lost before anything was
        saved, whoever is left may be writing the first checkpoint: it ends by itself when that is done."""
        assert self.overseer is not None
        saving = self.roster.serving & self.took_part
        if self._state_gone() and not self._saved and saving and self.settings.on_failure == "replace":
            for who, code, _ in self.undecided:
                self.overseer.remove(who, self._ending(code))
            return
        undecided, self.undecided = self.undecided, []
        for who, code, state in undecided:
            if who not in self.left:
                self._lost(engine, who, code, state)
            elif not self.ending and engine.can_start and self._saved:  # from a checkpoint, with other processes
                self.roster.left(who, replaced=True)
                self.overseer.remove(who, f"left: {PART_LOST}")
                self._start_missing(engine, "replacement")
            elif not self.ending:
                self._lost(engine, who, code, state)

    @property
    def _saved(self) -> bool:
        """Whether there is a checkpoint. Whoever wrote it may have died before it could tell."""
        standing = (self.folder.path / "checkpoints").glob("step-" + "[0-9]" * 8)
        return bool(self.tally.saved) or self.tally.resumed is not None or any(standing)

    def _lost(self, engine: LocalEngine, who: Who, code: int | None, state: str) -> None:
        """`state`: whether the run's state, or a part of it, was lost with it."""
        assert self.overseer is not None
        step = max(self.tally.step, self.overseer.committed)
        decision = self.roster.lost(who, took_part=who in self.took_part, step=step)
        decision = self._with_another_layout(decision)
        if not decision.ends and state and not self._saved:
            decision = Verdict("the run ends", f"{state}, and no checkpoint was written")
        if not decision.ends and self.next is None and not engine.can_start:
            decision = Verdict("the others go on, since the process that starts workers is gone")
            if self.launch.parts > 1 and state:
                decision = Verdict("the run ends", f"{state}, and the process that starts workers is gone")
        self._tell(self._loss(engine, who, code, decision))
        if decision.ends or self.next is not None:
            self.ending = True
            self.overseer.wish(stop=True)  # those who are left save what there is, and nobody begins anew
            self.overseer.remove(who, self._ending(code))
            self._ask_to_stop(engine)
            if self.settings.on_failure == "stop" or not self.roster.serving:
                self.failed_at = time.monotonic()
            return
        self.overseer.remove(who, self._ending(code))
        if engine.can_start:
            self._start_missing(engine, "replacement")

    def _loss(self, engine: LocalEngine, who: Who, code: int | None, decision: Verdict) -> WorkerLost:
        pid = engine.pids.get((who.worker, who.life))
        known = self.tally.workers.get(who.worker)
        return WorkerLost(
            time=time.time(),
            rank=who.worker,
            life=who.life,
            host=known.host if known is not None and known.host else os.uname().nodename,
            pid=pid,
            noticed=self.noticed.get(who, "its process ended"),
            code=code,
            out_of_memory=code == -signal.SIGKILL and pid is not None and self.ooms.killed(pid),
            log=self._last_lines(who.worker),
            action=f"{decision.action}: {decision.ends}" if decision.ends else decision.action,
        )

    def _with_another_layout(self, decision: Verdict) -> Verdict:
        """When a part of the model is lost with all who had it and nobody comes in their place, those who are left may
        be enough for another layout: this sitting ends, and the run goes on from its newest checkpoint."""
        self.next = None
        if not decision.uncovered or not self._saved or self.launch.another is None:
            return decision
        left = len(self.roster.serving)
        try:
            self.next = self.launch.another(left), f"{plural(left, 'worker')} left"
        except ShoalError as error:
            return Verdict(decision.action, f"{decision.ends}; no other layout for those who are left: {error.message}")
        return Verdict(f"the run goes on with layout {self.next[0].layout}")

    def _state_gone(self) -> str:
        """Whether the state, or a part of it, was there once and nobody is left for it; empty while it is whole."""
        parts, having = self.launch.parts, self.roster.serving & self.took_part
        had = {part_of(who.worker, parts) for who in self.took_part}
        if not had.intersection(without_worker(having, parts)):
            return ""
        return nobody_has(having, parts) if having else "nobody is left who has its state"

    def _start_missing(self, engine: LocalEngine, reason: str) -> None:
        for fresh in self.roster.start():
            self._tell(Replaced(time=time.time(), rank=fresh.worker, life=fresh.life, reason=reason))
            self._start(engine, fresh)

    def _oversee(self, engine: LocalEngine) -> None:
        """What the store says: who was dropped by the others, and what the user asked for."""
        if self.overseer is None:
            return
        for event in self.overseer.look():
            self._tell(event)
        for who, (reason, since) in self.overseer.dropped.items():
            if not engine.runs(who.worker, who.life) or who in self.left:
                continue
            self.noticed.setdefault(who, reason)
            if time.monotonic() - since > DROPPED_SECONDS:
                engine.signal(who.worker, signal.SIGKILL, who.life)
        wanted = self.overseer.wanted
        if wanted is not None and engine.can_start and self.roster.scale(wanted):
            self._start_missing(engine, f"scaled to {wanted} workers")
        if self.fill_at is not None and time.monotonic() > self.fill_at:
            # The driver before this one may have heard of an end and died before it did anything about it.
            self.fill_at = None
            ending = self.interrupts or self.tally.finished or self.failed_at is not None
            if self.settings.on_failure == "replace" and engine.can_start and not ending:
                self._start_missing(engine, "replacement")

    def _ending(self, code: int | None) -> str:
        if code is None:
            return "died"
        return f"died: {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def _last_lines(self, worker: int) -> list[str]:
        with suppress(OSError), open(self.folder.log(worker), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
        return []

    # -- wires of workers that another driver started -----------------------------------------------------------------

    def _accept(self, engine: LocalEngine) -> None:
        while self.listener is not None:
            try:
                wire, _ = self.listener.accept()
            except BlockingIOError:
                return
            wire.settimeout(1.0)
            with suppress(OSError, ValueError):
                worker, _, life = _first_line(wire).partition(".")
                wire.setblocking(True)
                engine.adopt(int(worker), int(life), wire)
                self._hear_unheard()

    def _hear_unheard(self) -> None:
        """What workers said while there was no driver."""
        if not self.options.outlives:
            return
        found: list[AnyEvent] = []
        for path in self.folder.path.glob(f"{UNHEARD}*.jsonl"):
            taken = path.with_suffix(".taken")
            with suppress(OSError):
                path.rename(taken)
                for line in taken.read_bytes().splitlines():
                    with suppress(msgspec.MsgspecError):
                        found.append(decode(line))
                taken.unlink()
        for event in sorted(found, key=lambda event: event.time):
            if encode(event) not in self.before:
                self._tell(event)

    def _close_store(self, for_good: bool) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.overseer is not None:
            self.overseer.close(for_good=for_good)
        for name in (DRIVER_SOCKET, ENGINE_SOCKET, STANDING):
            (self.folder.path / name).unlink(missing_ok=True)

    def _say_stopping(self) -> None:
        if self.interrupts and not self.said_stopping:
            self.said_stopping = True
            if self.overseer is not None:  # a worker whose wire is not here yet hears of it, too
                self.overseer.wish(stop=True)
            if not self.options.quiet:
                print("stopping: the step at work is finished and saved; Ctrl-C again ends at once", file=sys.stderr)

    def _learn(self, event: AnyEvent) -> None:
        self.tally.add(event)
        if isinstance(event, RunStarted):  # another sitting: nobody of the one before is there
            self.took_part.clear()
            self.left.clear()
        if isinstance(event, WorkerStarted):
            self.took_part.add(Who(event.rank, event.life))
            self.elastic = self.elastic or (event.elastic and self.options.elastic)
            self.roster.took_part()
            self.roster.lives[event.rank] = max(event.life, self.roster.lives.get(event.rank, 0))
        if isinstance(event, Failed) and event.kind != "PeerLost":
            # One that came later and failed before it took part, as its state arrived changed, is none of the others'.
            self.fatal = self.fatal or not self._is_newcomer(event.rank) or not self.took_part
        if isinstance(event, WorkerLeft):
            self.left[Who(event.rank, event.life)] = event.reason

    def _is_newcomer(self, worker: int) -> bool:
        return Who(worker, self.roster.lives.get(worker, 0)) not in self.took_part

    def _tell(self, event: AnyEvent) -> None:
        if isinstance(event, Failed) and self.ending and self._is_newcomer(event.rank):
            return  # why the run ends has been said; what befalls one that never took part stays in its log
        self._learn(event)
        self.folder.append_event(event)
        if self.board is not None:
            self.board.add(event)
        self.progress.show(event, self.tally)
        if isinstance(event, Resumed):
            self._write_files()

    def _write_files(self) -> None:
        for path, value in self.launch.files.items():
            self.folder.write_json(path, value)
        if self.prediction is not None:
            self.folder.write_json(self.folder.prediction, self.prediction)

    def _foresee(self, now: bool = False) -> None:
        """Takes down what was foreseen of the run as soon as it is known. It is never worth an error."""
        if self.launch.foreseen is None or self.prediction is not None:
            return
        found = self.launch.foreseen(now)
        if found is None:
            return
        self.prediction = found
        if not self.settings.resume or self.tally.resumed is not None:
            with suppress(OSError, ShoalError):
                self.folder.write_json(self.folder.prediction, found)
        event = Predicted(
            time=time.time(),
            cluster=found["cluster"],
            step_seconds=found["seconds"],
            samples_per_second=found["samples_per_second"],
            reason=found["reason"] or "",
        )
        self._tell(event)

    def _hear_prints(self) -> None:
        for rank, tail in self.tails.items():
            for text in tail.lines():
                self._tell(Printed(time=time.time(), rank=rank, text=text))

    # -- in the worker ----------------------------------------------------------------------------------------------

    def _worker(self, post: Post) -> int:
        """Runs in the forked process; everything the driver had loaded is there."""
        seat = self._seat(post)
        with told(seat, str(self.folder.log(post.rank))) as code:
            self.launch.work(seat)
        return code[0]

    def _seat(self, post: Post) -> Seat:
        name = f"{post.rank}.{post.life}"
        return Seat(
            rank=post.rank,
            life=post.life,
            size=self.launch.size,
            folder=self.folder.path,
            settings=self.settings,
            plan=self.launch.plan,
            wire=Wire(post.wire, name, self.folder.path if self.options.outlives else None),
            store=environment_store,
            records=self._records if self.options.elastic else None,
            asked_to_leave=post.notice.claim,
            revive_store=self._revive_store,
        )

    def _revive_store(self) -> None:
        """In a worker. The store of a lab is on a host of its own, and etcd is not ours to start."""
        if self.settings.store is None and self.options.lab is None:
            sqlite_client.start(self.folder.path)

    def _records(self) -> Records:
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
        found |= self.settings.wish.variables  # also for groups that a script makes itself
        lab = self.options.lab
        return found if lab is None else found | lab.variables(self._slot(rank), self.slots[0])

    def _host(self, rank: int) -> LabHost | None:
        return None if self.options.lab is None else self.options.lab.at(self._slot(rank))

    def _slot(self, rank: int) -> Slot:
        return self.slots[rank % len(self.slots)]

    @contextmanager
    def _store(self) -> Iterator[int]:
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
    def _interrupts(self, engine: LocalEngine | None) -> Iterator[None]:
        """Once: finish the step, save, stop. Twice: stop at once."""

        def handle(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            if engine is not None:
                self._ask_to_stop(engine)

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

    def _ask_to_stop(self, engine: LocalEngine) -> None:
        for rank in engine.running:
            engine.tell(rank, STOP_WORD + b"\n")

    def _report(self, ended: str) -> dict[str, Any]:
        self._foresee(now=True)
        value = report(
            self.tally,
            outcome=ended,
            target=self.launch.target,
            failure=outcome.cause(self.tally) if ended == "failed" else None,
            folder=str(self.folder.path),
            files=self.folder.files(),
            prediction=self.prediction,
        )
        # A joined script's lanes are known from what its workers hold.
        value["lanes"] = value["lanes"] or max((stop for _, stop in value["deal"]), default=0)
        self._tell(RunFinished(time=time.time(), outcome=ended))
        if ended == "failed" and self.settings.resume and self.tally.resumed is None:
            return value  # nothing was trained: the report of what was trained before stays
        try:
            self.folder.write_json(self.folder.report, value)
        except (OSError, ShoalError) as error:
            self._tell(SaveFailed(time=time.time(), step=self.tally.step, reason=f"report.json: {error}"))
        return value


class _Tail:
    """Lines that a worker has added to its log since the last look, up to a traceback: that stays in the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial = ""
        self.ended = False
        self.omitted = False  # the last line ended a stack of torch's

    def more(self) -> None:
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
        return not (line.startswith(LOG_ONLY) or FROM_TORCH.match(line) or (after and not line))


def rules_of(settings: Settings) -> Rules:
    return Rules(
        on_failure=settings.on_failure,
        min_workers=settings.min_workers,
        max_workers=settings.max_workers,
        max_failures=settings.max_failures,
    )


def _first_line(wire: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < 64:
        more = wire.recv(1)
        if not more:
            break
        found += more
    return found.decode().strip()


def _nobody(seat: Seat) -> None:
    raise RunError("workers are started by the server of the first driver")
