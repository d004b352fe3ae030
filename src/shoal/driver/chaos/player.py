"""Injects a schedule of faults into a real run, and records them. scorecard.py evaluates the result.

The run's driver is a process of its own, since drivers are killed, too. The player follows the run by its events, and
its processes by the kernel.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.driver.chaos.schedule import ON_WORKERS, ChaosFault, FaultSchedule, victim
from shoal.driver.chaos.scorecard import InjectedFault, Scorecard, make_scorecard
from shoal.driver.control import why
from shoal.driver.launch_spec import DRIVER_STATE
from shoal.driver.launchers.cleanup import NAMES, RECORDS, LabRecord
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.launchers.namespaces import inside
from shoal.errors import RunError, ShoalError
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.heartbeat import MembershipState
from shoal.recovery.membership.process import kill_process, process_state, start_ticks
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.recovery.membership.store import StoreUnavailable
from shoal.report import events
from shoal.report.run_folder import RunFolder
from shoal.report.stacks import render
from shoal.transport.decoding import decode_json

TICK_SECONDS = 0.02
ATTACH_SECONDS = 1.0  # between the end of a driver and the start of the next
STALL_SECONDS = 60.0  # without a commit: the run hangs
END_SECONDS = 60.0  # for a run that was asked to stop
SCHEDULE_FILE, INJECTED_FILE, SCORECARD_FILE = "faults.json", "faults.jsonl", "scorecard.json"  # in the run's folder
TWIN_FOLDER = "twin"
STEPS = 1_000_000_000  # never reached: the run ends when the schedule does
LOG_LINES = 5

Emit = Callable[[str], None]
WorkerIncarnation = tuple[int, int]  # a worker's number, and which of its processes


@dataclass(frozen=True, kw_only=True)
class ChaosTarget:
    """The job, and how it is run."""

    job: str
    workers: int
    settings: Sequence[str] = ()  # of --set
    lease_seconds: float = 5.0
    lab: bool = False  # on hosts of a lab, one for each worker

    def command(self, folder: Path, stop_after: int | None = None) -> list[str]:
        found = [sys.executable, "-m", "shoal"]
        if self.lab:
            found += ["lab", "--racks", "1", "--hosts", f"{self.workers}", "--"]
        found += ["train", self.job, "--workers", f"{self.workers}", "--run-dir", str(folder), "--json"]
        found += ["--max-failures", "1000000", "--lease", f"{self.lease_seconds}"]
        for setting in (*self.settings, f"steps={STEPS}", "target=none"):
            found += ["--set", setting]
        return found if stop_after is None else [*found, "--stop-after", f"{stop_after}"]


def run_chaos(target: ChaosTarget, schedule: FaultSchedule, folder: RunFolder, emit: Emit) -> Scorecard:
    """Plays the run with its faults, then its twin without any to the same step."""
    folder.write_json(folder.path / SCHEDULE_FILE, schedule)
    with _ended_by_signals():
        emit(f"run {folder.path}: {len(schedule.faults)} faults in {schedule.duration:g} s")
        player = ChaosPlayer(target, folder.path, schedule, emit)
        report = player.play()
        emit(f"twin {folder.path / TWIN_FOLDER}: {report['steps']:,} steps without faults")
        twin = ChaosPlayer(target, folder.path / TWIN_FOLDER, None, emit, stop_at=report["steps"])
        twin_report = twin.play()
    card = make_scorecard(
        job=target.job,
        schedule=schedule,
        injected=player.injected,
        events=folder.read_events(),
        report=report,
        twin_events=RunFolder(folder.path / TWIN_FOLDER).read_events(),
        twin_report=twin_report,
    )
    folder.write_json(folder.path / SCORECARD_FILE, card)
    return card


@dataclass
class RunWatcher:
    """The state of a run, from its events as they are written."""

    path: Path
    workers: dict[WorkerIncarnation, tuple[int, str]] = field(default_factory=dict)  # members: process id and start
    hosts: dict[int, str] = field(default_factory=dict)
    drivers: set[int] = field(default_factory=set)  # processes that took over
    driver_changed: bool = False  # a driver took over: starts in between may be missing from the events
    step: int = 0
    began_at: float | None = None  # when the first steps were reported; monotonic, as the next
    advanced_at: float = field(default_factory=time.monotonic)  # when the step last rose
    _offset: int = 0

    def poll(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                found = file.read()
        except OSError:
            return
        whole = found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                self._apply(events.decode(line))

    def _apply(self, event: events.AnyEvent) -> None:
        match event:
            case events.WorkerStarted():
                when = start_ticks(event.pid)
                self.hosts[event.rank] = event.host
                if when is not None:
                    self.workers[event.rank, event.incarnation] = (event.pid, when)
            case events.WorkerExited() | events.WorkerLost() | events.WorkerLeft():
                self.workers.pop((event.rank, event.incarnation), None)
            case events.DriverChanged():
                self.drivers.add(event.pid)
                self.driver_changed = True
            case events.StepsCommitted() if event.step > self.step:
                self.step, self.advanced_at = event.step, time.monotonic()
                self.began_at = self.began_at or self.advanced_at


class ChaosPlayer:
    def __init__(
        self, target: ChaosTarget, folder: Path, schedule: FaultSchedule | None, emit: Emit, stop_at: int | None = None
    ) -> None:
        """Without a schedule: the run ends without faults."""
        self.target, self.folder, self.schedule, self.emit, self.stop_at = target, folder, schedule, emit, stop_at
        self.watch = RunWatcher(folder / "events.jsonl")
        self.pending_faults = [] if schedule is None else list(schedule.faults)
        self.injected: list[InjectedFault] = []
        self.hit: set[WorkerIncarnation] = set()
        self.partitions: dict[WorkerIncarnation, float] = {}  # cut off now, and until when
        self.drivers = 0
        self.driver_killed_at: float | None = None  # when the driver was, until there is another
        self.stop_asked_at: float | None = None  # when the run was asked to stop
        self.process: subprocess.Popen[bytes] | None = None

    def play(self) -> dict[str, Any]:
        """Returns the run's report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(self.target.command(self.folder, self.stop_at))
            while not self._over():
                self.watch.poll()
                self._find_missed_workers()
                self._heal()
                self._play_due()
                self._stop_at_the_end()
                self._check_it_moves()
                time.sleep(TICK_SECONDS)
            return self._report()
        finally:
            self._sweep()

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _start(self, command: list[str]) -> None:
        with open(self.folder / f"driver-{self.drivers}.log", "wb") as log:
            # A session of its own: Ctrl-C is for this process, which then ends that one.
            null = subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=null, stdout=null, stderr=log, start_new_session=True)
        self.drivers += 1
        self.driver_killed_at = None
        self.watch.advanced_at = time.monotonic()

    def _over(self) -> bool:
        """Whether the run is over. Attaches another driver where one was killed."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        if self.driver_killed_at is None:
            return True
        if time.monotonic() - self.driver_killed_at >= ATTACH_SECONDS:
            self._start([sys.executable, "-m", "shoal", "attach", str(self.folder), "--json"])
        return False

    @property
    def in_charge(self) -> bool:
        """Whether the newest driver watches the run."""
        assert self.process is not None
        first = self.drivers == 1 and self.watch.began_at is not None
        return self.driver_killed_at is None and (first or self.process.pid in self.watch.drivers)

    def _stop_at_the_end(self) -> None:
        if self.schedule is None or self.watch.began_at is None or self.process is None:
            return
        over = time.monotonic() - self.watch.began_at >= self.schedule.duration
        if over and self.stop_asked_at is None and self.in_charge and not self.partitions:
            self.stop_asked_at = time.monotonic()
            self.process.send_signal(signal.SIGTERM)

    def _check_it_moves(self) -> None:
        now = time.monotonic()
        if self.stop_asked_at is not None and now - self.stop_asked_at > END_SECONDS:
            raise self._hangs(f"the run did not stop within {END_SECONDS:g} s")
        if self.stop_asked_at is None and now - self.watch.advanced_at > STALL_SECONDS:
            raise self._hangs(f"no step was committed for {STALL_SECONDS:g} s, the last was {self.watch.step}")

    def _hangs(self, message: str) -> RunError:
        """The error of a run that hangs, with what every worker was doing."""
        found = self.folder / "why.txt"
        with suppress(ShoalError, OSError):
            found.write_text(render(why(RunFolder(self.folder)), run=self.folder.name) + "\n")
        return RunError(message, where=[*self._log(), str(found)], fix=f"shoal report {shlex.quote(str(self.folder))}")

    def _report(self) -> dict[str, Any]:
        try:
            value = decode_json((self.folder / "report.json").read_bytes(), dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            value = {"outcome": "failed"}
        if value.get("outcome") not in ("done", "stopped") or not value.get("weights_sha256"):
            name = "twin" if self.schedule is None else "run"
            raise RunError(f"the {name} failed", where=self._log(), fix=f"its logs are in {self.folder}")
        return value

    def _log(self) -> list[str]:
        """The last lines of the driver's log."""
        path = self.folder / f"driver-{self.drivers - 1}.log"
        with suppress(OSError):
            return [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-LOG_LINES:]]
        return []

    # -- faults -------------------------------------------------------------------------------------------------------

    def _play_due(self) -> None:
        if self.watch.began_at is None or self.stop_asked_at is not None:
            return
        while self.pending_faults and time.monotonic() - self.watch.began_at >= self.pending_faults[0].at:
            done = self._play(self.pending_faults[0])
            if done is None:
                return  # tried again at the next tick
            self.pending_faults.pop(0)
            self.injected.append(done)
            with open(self.folder / INJECTED_FILE, "ab") as file:
                file.write(msgspec.json.encode(done) + b"\n")
            who = "" if done.worker is None else f"worker {done.worker}.{done.incarnation}, "
            self.emit(f"{done.at:7.1f} s  {done.kind:9} {who}pid {done.pid}   after step {self.watch.step:,}")

    def _play(self, fault: ChaosFault) -> InjectedFault | None:
        """None: no process can be the victim now."""
        if fault.kind in ON_WORKERS:
            return self._on_worker(fault)
        assert self.process is not None
        if fault.kind == "driver":
            if not self.in_charge:
                return None
            done = self._record_injected(fault, self.process.pid)
            self.process.kill()
            self.process.wait()
            self.driver_killed_at = time.monotonic()
            return done
        serving = read_server_info(self.folder)
        if serving is None or not sqlite_client.server_running(self.folder):
            return None
        done = self._record_injected(fault, serving.pid)
        return done if kill_process(serving.pid, f"{serving.started}") else None

    def _on_worker(self, fault: ChaosFault) -> InjectedFault | None:
        """Only while another worker holds the state: the loss of all workers is not tested here."""
        candidates = self._candidates()
        if len(candidates) < 2:
            return None
        worker = candidates[victim(fault, range(len(candidates)))]
        pid, when = self.watch.workers[worker]
        done = self._record_injected(fault, pid, worker)
        if fault.kind == "partition":
            self._link(worker[0], up=False)
            self.partitions[worker] = time.monotonic() + fault.seconds
        elif not _send(pid, when, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP):
            return None
        self.hit.add(worker)
        return done

    def _find_missed_workers(self) -> None:
        """Events that a killed driver had not written are lost. The store has the members."""
        if not self.watch.driver_changed:
            return
        store = sqlite_client.connect(self.folder)
        try:
            state = MembershipState(store.read(""))
        except StoreUnavailable:
            return  # the next time
        finally:
            store.close()
        self.watch.driver_changed = False
        for who, alive in state.alive.items():
            if who in state.view.members:
                self.watch.workers.setdefault((who.worker, who.incarnation), (alive.pid, alive.started))

    def _candidates(self) -> list[WorkerIncarnation]:
        workers = self.watch.workers.items()
        return sorted({who for who, process in workers if process_state(*process) not in (None, "T")} - self.hit)

    def _record_injected(self, fault: ChaosFault, pid: int, who: WorkerIncarnation | None = None) -> InjectedFault:
        assert self.watch.began_at is not None
        return InjectedFault(
            time=time.time(),
            at=round(time.monotonic() - self.watch.began_at, 3),
            planned=fault.at,
            kind=fault.kind,
            pid=pid,
            worker=None if who is None else who[0],
            incarnation=None if who is None else who[1],
            seconds=fault.seconds,
        )

    def _heal(self) -> None:
        for worker, until in list(self.partitions.items()):
            if time.monotonic() >= until:
                self._link(worker[0], up=True)
                del self.partitions[worker]
                self.hit.discard(worker)  # the worker may be alive

    def _link(self, worker: int, up: bool) -> None:
        """Sets the link of a worker's host up or down, at the switch."""
        assert self.process is not None
        with inside(str(NAMES / _fabric(self.process.pid))):
            command = ["ip", "link", "set", self.watch.hosts[worker], "up" if up else "down"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunError(f"{' '.join(command)}: {done.stderr.strip()}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Ends all processes of the run."""
        if self.process is not None and self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # stop; at once; now
                with suppress(subprocess.TimeoutExpired):
                    self.process.send_signal(number)
                    self.process.wait(5.0)
                    break
        with suppress(OSError, RunError):
            LocalLauncher.attach(self.folder).close()
        sqlite_client.stop_server(self.folder)
        (self.folder / DRIVER_STATE).unlink(missing_ok=True)


def _send(pid: int, when: str, number: int) -> bool:
    """False: that process is gone."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)  # from here on the number means one process
        try:
            if process_state(pid, when) is not None:
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def _fabric(owner: int) -> str:
    """The namespace of the switches of the lab that a process made."""
    for path in RECORDS.glob("lab-*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            record = decode_json(path.read_bytes(), LabRecord)
            if record.owner == owner:
                return record.names[-1]
    raise RunError(f"process {owner} has no lab")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM becomes an exception, so that the run is ended with this process."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread, which decides about signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
