"""The driver of a run: starts the workers through a launcher, watches them, writes and shows what they report.

Its only loop is `RunDriver.watch`. `supervisor.py` decides which workers are replaced, `outcome.py` how the run ended.
A detached run goes on without its driver: `control.attach` makes another one, which takes over.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec

from shoal.driver import outcome
from shoal.driver.driver_claim import this_driver
from shoal.driver.folder_watch import FolderWatch
from shoal.driver.interrupts import Interrupts
from shoal.driver.launch_spec import DRIVER_STATE, SITTING_FILES, DriverState, LaunchSpec
from shoal.driver.launchers.base import (
    LOOPBACK,
    ProcessEvent,
    ProcessExit,
    ProcessLine,
    ProcessLinesDropped,
    ProcessProgram,
    ProcessWroteAside,
)
from shoal.driver.run_processes import RunProcesses
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.script_watch import ScriptWatch, stopping_text
from shoal.driver.store_monitor import StoreMonitor
from shoal.driver.supervisor import WorkerSupervisor
from shoal.parallel.plan import Plan
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    EventsDropped,
    MembershipChanged,
    RunResumed,
    TrainingNote,
    WorkerPrinted,
    decode,
)
from shoal.report.pause_watch import PauseWatch
from shoal.report.run_folder import RunFolder
from shoal.worker.context import WorkerContext
from shoal.worker.rendezvous import RENDEZVOUS_SOCKETS
from shoal.worker.run_config import RunConfig
from shoal.worker.start import WorkerProgram

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a first failure: in which other workers may still report theirs


class RunDriver:
    supervisor_type: type[WorkerSupervisor] = WorkerSupervisor
    supervisor: WorkerSupervisor

    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig, previous: Self | None = None) -> None:
        """`previous`: the driver of the same run with another layout, which this one goes on with."""
        self.launch, self.folder, self.config = launch, folder, config
        self.interrupts = Interrupts()
        self.processes = RunProcesses(launch, folder, config)
        failures = 0 if previous is None else previous.supervisor.roster.failures
        tally = None if previous is None else previous.recorder.tally
        self.recorder: RunRecorder = RunRecorder(launch, folder, config, tally)
        self.supervisor = self.supervisor_type(self.recorder, self.processes, self.interrupts, failures)
        self.scripts = ScriptWatch(self.recorder, self.processes, self.supervisor)
        self.pauses, self.folder_watch = PauseWatch(), FolderWatch(folder.path)
        self._stop_reported = False

    @property
    def next_plan(self) -> tuple[Plan, str] | None:
        """The plan with which the run goes on after this driver, and why."""
        return self.supervisor.next_plan

    def run(self) -> dict[str, Any]:
        """Starts the run, watches it to its end and returns its report."""
        if not self.launch.resumed:  # else the files describe the former sitting until its checkpoint is accepted
            self.recorder.write_files()
        # Every torch optimizer imports this when it is made, which takes a second: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        self.processes.issue_own_keys()
        roster, failure = self.supervisor.roster, self.config.failure
        first, services = roster.fill(), self.launch.launcher.services()
        if failure.elastic:
            monitor = StoreMonitor(self.folder.path, self.folder.id, failure.store, services, detached=failure.detached)
            first = monitor.begin(first, resumed=self.launch.resumed)
            roster.active, roster.incarnations = set(first), {who.worker: who.incarnation for who in first}
            self.supervisor.store_monitor = monitor
        launch, main = self.launch, self.worker_program().main
        program = ProcessProgram(
            main=main,
            folder=self.folder.path,
            threads=launch.threads,
            detached=failure.detached,
            until_joined=launch.started.command == "run",
        )
        launch.launcher.open(program)
        if failure.elastic:
            state = DriverState(
                config=self.config,
                started=launch.started,
                threads=launch.threads,
                target=launch.target,
                resumed=launch.resumed,
                driver=this_driver(time.time()),
            )
            self.folder.write_json(self.folder.path / DRIVER_STATE, state)

        def begin() -> None:
            self.recorder.emit(self.launch.started)
            if self.launch.begins_again:
                self.recorder.emit(RunResumed(step=0, path="", repeated=self.launch.committed_before))
            self.supervisor.begin(first)

        return self._drive(begin)

    def worker_program(self) -> WorkerProgram:
        launch = self.launch
        on_this_machine = launch.launcher.services().address == LOOPBACK
        return WorkerProgram(
            run=self.folder,
            context=WorkerContext(
                size=launch.size,
                folder=self.folder.path,
                config=self.config,
                resumed=launch.resumed,
                committed_before=launch.committed_before,
                plan=launch.plan,
            ),
            work=launch.work,
            serve_shard=launch.serve_shard,
            restarts_store=self.config.failure.store is None and on_this_machine,
        )

    def take_over(self, monitor: StoreMonitor, launcher_alive: bool) -> dict[str, Any]:
        """Goes on with a run whose driver is gone. `launcher_alive`: else no worker is left, and only the report is."""
        self.supervisor.store_monitor = monitor
        self.recorder.restore()

        def begin() -> None:
            self._receive_undelivered()
            if launcher_alive:
                self.processes.poll(0)  # the processes that the launcher has
                self.supervisor.take_over(self.processes.running)
            self.recorder.emit(DriverChanged(pid=os.getpid(), host=os.uname().nodename))
            if launcher_alive:
                self._emit_members(monitor)

        return self._drive(begin)

    def _emit_members(self, monitor: StoreMonitor) -> None:
        """Records the members that the store has: the former driver may have died before it wrote them down."""
        view, committed = monitor.taken_over
        self.supervisor.participants.update(view.members)
        tally = self.recorder.tally
        if view.generation > (tally.membership.generation or 1):
            event = MembershipChanged(
                generation=view.generation,
                members=[who.worker for who in view.members],
                incarnations=[who.incarnation for who in view.members],
                step=max(committed, tally.step),
                reason=view.reason,
                restart=view.restart,
            )
            self.recorder.emit(event)

    def _drive(self, begin: Callable[[], None]) -> dict[str, Any]:
        recorder, supervisor = self.recorder, self.supervisor
        try:
            # After the launcher is open: the store has a thread, and a server that forks must have none.
            with self.processes.rendezvous(), self.interrupts.handled(self._ask_to_stop):
                begin()
                self.watch()
        finally:
            self.launch.launcher.close()
            self._receive_undelivered()
            self._emit_prints()
            interrupted = self.interrupts.count > 0
            ended = outcome.outcome(recorder.tally, size=self.launch.size, interrupted=interrupted)
            self._close_store(for_good=ended == "done" or self.scripts.never_joined)
            supervisor.next_plan = supervisor.next_plan if ended == "failed" else None
            gone = self.folder_watch.gone()
            value = recorder.report(ended) if supervisor.next_plan is None and not gone else {}
            recorder.close()
        if gone:
            supervisor.next_plan = None
            raise self.folder_watch.error()
        if supervisor.next_plan is not None:  # the run has no end yet to report
            return value
        if ended == "stopped" and self.scripts.never_joined:
            raise outcome.script_stopped(self.interrupts.number, value)
        error = outcome.final_error(recorder.tally, ended, value)
        if error is not None:
            raise error
        return value

    def watch(self) -> None:
        """Returns when no process of the run is left, those that are left wait for one that failed or came too late, or
        the run's folder is gone. The launcher ends the rest when it is closed."""
        recorder, supervisor = self.recorder, self.supervisor
        while self.processes.running:
            for event in self.processes.poll(TICK_SECONDS):
                self._handle(event)
            if self.folder_watch.gone(now=False):
                return
            self._emit_prints()
            supervisor.tick()
            for paused in self.pauses.tick(self.processes.watched_pids()):
                recorder.emit(paused)
            self.scripts.tick()
            for text in self.processes.refusals():
                recorder.emit(TrainingNote(text=text))
            recorder.record_prediction()
            recorder.progress.tick(recorder.tally)
            self._report_stopping()
            if supervisor.all_finished():
                self.processes.continue_starter()  # it reports that they have ended: it may be stopped
            failed_at = None if self.scripts.stopping else supervisor.failed_at
            over = [moment for moment in (failed_at, supervisor.done_at) if moment is not None]
            if over and time.monotonic() - min(over) > GRACE_SECONDS:
                return

    def _handle(self, event: ProcessEvent) -> None:
        match event:
            case ProcessExit():
                self._receive_undelivered(event.process)
                self.supervisor.process_exited(event)
            case ProcessLine():
                try:
                    found = decode(event.text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    found = EventsDropped(rank=event.process.worker, count=1)
                self._receive(found)
            case ProcessWroteAside():
                self._receive_undelivered(event.process, event.number)
            case ProcessLinesDropped():
                self._receive(EventsDropped(rank=event.process.worker, count=event.count))

    def _receive(self, event: AnyEvent) -> None:
        if not self.supervisor.ignores(event):
            self.recorder.emit(event)

    def _receive_undelivered(self, process: WorkerId | None = None, number: int | None = None) -> None:
        for event in self.recorder.undelivered(process, number):
            self._receive(event)

    def _emit_prints(self) -> None:
        for worker, text in self.processes.printed():
            self.recorder.emit(WorkerPrinted(rank=worker, text=text))

    def _ask_to_stop(self) -> None:
        self.processes.continue_starter()
        self.supervisor.ask_to_stop()
        self.scripts.stop(self.interrupts.number)

    def _report_stopping(self) -> None:
        if self.interrupts.count and not self._stop_reported:
            self._stop_reported = True
            if self.supervisor.store_monitor is not None:  # reaches workers that are not connected yet, too
                self.supervisor.store_monitor.request(stop=True)
            if not self.config.output.quiet:
                text = "stopping: the step at work is finished and saved; Ctrl-C again ends at once"
                if self.scripts.never_joined:
                    text = stopping_text(self.interrupts.number, self.launch.size)
                print(text, file=sys.stderr)

    def _close_store(self, for_good: bool) -> None:
        if self.supervisor.store_monitor is not None:
            self.supervisor.store_monitor.close(for_good=for_good)
        for name in SITTING_FILES:
            (self.folder.path / name).unlink(missing_ok=True)
        for path in self.folder.path.glob(RENDEZVOUS_SOCKETS):
            path.unlink(missing_ok=True)
