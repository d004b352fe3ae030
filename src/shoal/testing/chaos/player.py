"""Plays a schedule of faults against a real run, and writes down what was done. See scorecard.py for what it came to.

The run has a process of its own as its driver, since that is among what gets killed. What goes on in it is read from
the events that it writes; who lives, from the kernel.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.driver.control import why
from shoal.driver.driver import ENGINE_SOCKET, STANDING
from shoal.driver.launchers.cleanup import NAMES, RECORDS, Record
from shoal.driver.launchers.fork_server import LocalEngine
from shoal.driver.launchers.namespaces import inside
from shoal.errors import RunError, ShoalError
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.heartbeat import News
from shoal.recovery.membership.process import began, condition, end
from shoal.recovery.membership.sqlite_server import read_serving
from shoal.recovery.membership.store import StoreAway
from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    Steps,
    WorkerExited,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
    decode,
)
from shoal.report.run_folder import RunFolder
from shoal.report.stacks import render
from shoal.testing.chaos.schedule import ON_WORKERS, Fault, Schedule, victim
from shoal.testing.chaos.scorecard import Done, Scorecard, make_scorecard

TICK_SECONDS = 0.02
ATTACH_SECONDS = 1.0  # between the end of a driver and the start of the next
STALL_SECONDS = 60.0  # without a commit: the run hangs
END_SECONDS = 60.0  # for a run that was asked to stop
PLAN, TRUTH, CARD = "faults.json", "faults.jsonl", "scorecard.json"  # in the run's folder
TWIN = "twin"
STEPS = 1_000_000_000  # more than there is time for: the run ends when the schedule does
LOG_LINES = 5

Life = tuple[int, int]  # a worker's number, and which of its processes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is run: a job, on so many workers."""

    job: str
    workers: int
    settings: Sequence[str] = ()  # as of --set
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


def run_chaos(subject: Subject, schedule: Schedule, folder: RunFolder, say: Callable[[str], None]) -> Scorecard:
    """The run with its faults, then its twin without any, to the same step."""
    folder.write_json(folder.path / PLAN, schedule)
    with _ended_by_signals():
        say(f"run {folder.path}: {len(schedule.faults)} faults in {schedule.duration:g} s")
        player = Player(subject, folder.path, schedule, say)
        report = player.play()
        say(f"twin {folder.path / TWIN}: {report['steps']:,} steps without faults")
        twin = Player(subject, folder.path / TWIN, None, say, stop_after=report["steps"])
        twin_report = twin.play()
    card = make_scorecard(
        job=subject.job,
        workers=subject.workers,
        seed=schedule.seed,
        every=schedule.every,
        planned=dict(Counter(fault.kind for fault in schedule.faults)),
        done=player.done,
        events=folder.read_events(),
        report=report,
        twin_events=RunFolder(folder.path / TWIN).read_events(),
        twin_report=twin_report,
    )
    folder.write_json(folder.path / CARD, card)
    return card


@dataclass
class Watch:
    """A run as its events tell of it, read as they are written."""

    path: Path
    workers: dict[Life, tuple[int, str]] = field(
        default_factory=dict
    )  # those who take part: process, and its beginning
    hosts: dict[int, str] = field(default_factory=dict)
    drivers: set[int] = field(default_factory=set)  # processes that took over
    news: bool = False  # a driver took over: who started meanwhile may not have been told
    step: int = 0
    began: float | None = None  # when the first steps were told of; monotonic, as the next
    moved: float = field(default_factory=time.monotonic)  # when the step last rose
    _offset: int = 0

    def look(self) -> None:
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
                self._learn(decode(line))

    def _learn(self, event: AnyEvent) -> None:
        match event:
            case WorkerStarted():
                when = began(event.pid)
                self.hosts[event.rank] = event.host
                if when is not None:
                    self.workers[event.rank, event.life] = (event.pid, when)
            case WorkerExited() | WorkerLost() | WorkerLeft():
                self.workers.pop((event.rank, event.life), None)
            case DriverChanged():
                self.drivers.add(event.pid)
                self.news = True
            case Steps() if event.step > self.step:
                self.step, self.moved = event.step, time.monotonic()
                self.began = self.began or self.moved


class Player:
    def __init__(
        self,
        subject: Subject,
        folder: Path,
        schedule: Schedule | None,
        say: Callable[[str], None],
        stop_after: int | None = None,
    ) -> None:
        """Without a schedule: the run is let alone until it ends."""
        self.subject, self.folder, self.schedule, self.say, self.stop_after = subject, folder, schedule, say, stop_after
        self.watch = Watch(folder / "events.jsonl")
        self.left = [] if schedule is None else list(schedule.faults)
        self.done: list[Done] = []
        self.hit: set[Life] = set()
        self.cut: dict[Life, float] = {}  # cut off now, and until when
        self.drivers = 0
        self.killed: float | None = None  # when the driver was, until there is another
        self.asked: float | None = None  # when the run was asked to stop
        self.process: subprocess.Popen[bytes] | None = None

    def play(self) -> dict[str, Any]:
        """Returns the run's report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._start(self.subject.command(self.folder, self.stop_after))
            while not self._over():
                self.watch.look()
                self._ask_who_is_there()
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
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        self.drivers += 1
        self.killed = None
        self.watch.moved = time.monotonic()

    def _over(self) -> bool:
        """Sees to it that there is a driver."""
        assert self.process is not None
        if self.process.poll() is None:
            return False
        if self.killed is None:
            return True
        if time.monotonic() - self.killed >= ATTACH_SECONDS:
            self._start([sys.executable, "-m", "shoal", "attach", str(self.folder), "--json"])
        return False

    @property
    def in_charge(self) -> bool:
        """The newest driver watches over the run."""
        assert self.process is not None
        first = self.drivers == 1 and self.watch.began is not None
        return self.killed is None and (first or self.process.pid in self.watch.drivers)

    def _stop_at_the_end(self) -> None:
        if self.schedule is None or self.watch.began is None or self.process is None:
            return
        over = time.monotonic() - self.watch.began >= self.schedule.duration
        if over and self.asked is None and self.in_charge and not self.cut:
            self.asked = time.monotonic()
            self.process.send_signal(signal.SIGTERM)

    def _check_it_moves(self) -> None:
        now = time.monotonic()
        if self.asked is not None and now - self.asked > END_SECONDS:
            raise self._hangs(f"the run did not stop within {END_SECONDS:g} s")
        if self.asked is None and now - self.watch.moved > STALL_SECONDS:
            raise self._hangs(f"no step was committed for {STALL_SECONDS:g} s, the last was {self.watch.step}")

    def _hangs(self, message: str) -> RunError:
        """With what every worker was doing, before all of them are ended."""
        found = self.folder / "why.txt"
        with suppress(ShoalError, OSError):
            found.write_text(render(why(RunFolder(self.folder)), run=self.folder.name) + "\n")
        return RunError(message, where=[*self._log(), str(found)], fix=f"shoal report {self.folder}")

    def _report(self) -> dict[str, Any]:
        try:
            value: dict[str, Any] = msgspec.json.decode((self.folder / "report.json").read_bytes())
        except (OSError, msgspec.MsgspecError):
            value = {"outcome": "failed"}
        if value.get("outcome") not in ("done", "stopped") or not value.get("weights_sha256"):
            name = "twin" if self.schedule is None else "run"
            raise RunError(f"the {name} failed", where=self._log(), fix=f"its logs are in {self.folder}")
        return value

    def _log(self) -> list[str]:
        """The last words of the driver."""
        path = self.folder / f"driver-{self.drivers - 1}.log"
        with suppress(OSError):
            return [f"{path.name}: {line}" for line in path.read_text(errors="replace").splitlines()[-LOG_LINES:]]
        return []

    # -- faults -------------------------------------------------------------------------------------------------------

    def _play_due(self) -> None:
        if self.watch.began is None or self.asked is not None:
            return
        while self.left and time.monotonic() - self.watch.began >= self.left[0].at:
            done = self._play(self.left[0])
            if done is None:
                return  # as soon as it can be
            self.left.pop(0)
            self.done.append(done)
            with open(self.folder / TRUTH, "ab") as file:
                file.write(msgspec.json.encode(done) + b"\n")
            who = "" if done.worker is None else f"worker {done.worker}.{done.life}, "
            self.say(f"{done.at:7.1f} s  {done.kind:9} {who}pid {done.pid}   after step {self.watch.step:,}")

    def _play(self, fault: Fault) -> Done | None:
        """None: there is nobody whom it could meet now."""
        if fault.kind in ON_WORKERS:
            return self._on_worker(fault)
        assert self.process is not None
        if fault.kind == "driver":
            if not self.in_charge:
                return None
            done = self._done(fault, self.process.pid)
            self.process.kill()
            self.process.wait()
            self.killed = time.monotonic()
            return done
        serving = read_serving(self.folder)
        if serving is None or not sqlite_client.running(self.folder):
            return None
        done = self._done(fault, serving.pid)
        return done if end(serving.pid, f"{serving.started}") else None

    def _on_worker(self, fault: Fault) -> Done | None:
        """Only while another is there who has the state: what becomes of a run that lost all is another question."""
        candidates = self._candidates()
        if len(candidates) < 2:
            return None
        life = candidates[victim(fault, range(len(candidates)))]
        pid, when = self.watch.workers[life]
        done = self._done(fault, pid, life)
        if fault.kind == "partition":
            self._link(life[0], up=False)
            self.cut[life] = time.monotonic() + fault.seconds
        elif not _send(pid, when, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP):
            return None
        self.hit.add(life)
        return done

    def _ask_who_is_there(self) -> None:
        """What workers say to a driver that is killed before it writes it down is lost. The store knows."""
        if not self.watch.news:
            return
        store = sqlite_client.connect(self.folder)
        try:
            news = News(store.read(""))
        except StoreAway:
            return  # the next time
        finally:
            store.close()
        self.watch.news = False
        for who, alive in news.alive.items():
            if who in news.view.members:
                self.watch.workers.setdefault((who.worker, who.life), (alive.pid, alive.began))

    def _candidates(self) -> list[Life]:
        workers = self.watch.workers
        return sorted(life for life in workers if life not in self.hit and condition(*workers[life]) not in (None, "T"))

    def _done(self, fault: Fault, pid: int, life: Life | None = None) -> Done:
        assert self.watch.began is not None
        return Done(
            time=time.time(),
            at=round(time.monotonic() - self.watch.began, 3),
            planned=fault.at,
            kind=fault.kind,
            pid=pid,
            worker=None if life is None else life[0],
            life=None if life is None else life[1],
            seconds=fault.seconds,
        )

    def _heal(self) -> None:
        for life, until in list(self.cut.items()):
            if time.monotonic() >= until:
                self._link(life[0], up=True)
                del self.cut[life]
                self.hit.discard(life)  # it may be there still

    def _link(self, worker: int, up: bool) -> None:
        """The cable of a worker's host, at the switch."""
        assert self.process is not None
        state = "up" if up else "down"
        with inside(str(NAMES / _fabric(self.process.pid))):
            command = ["ip", "link", "set", self.watch.hosts[worker], state]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RunError(f"{' '.join(command)}: {done.stderr.strip()}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Whatever happened: nothing of the run goes on."""
        if self.process is not None and self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # stop; at once; now
                with suppress(subprocess.TimeoutExpired):
                    self.process.send_signal(number)
                    self.process.wait(5.0)
                    break
        with suppress(OSError, RunError):
            LocalEngine.attach(self.folder / ENGINE_SOCKET).close()
        sqlite_client.stop(self.folder)
        (self.folder / STANDING).unlink(missing_ok=True)


def _send(pid: int, when: str, number: int) -> bool:
    """False: that process is gone."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)  # from here on the number means one process
        try:
            if condition(pid, when) is not None:
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def _fabric(owner: int) -> str:
    """The namespace of the switches of the lab that a process made."""
    for path in RECORDS.glob("lab-*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(path.read_bytes(), type=Record)
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
    except ValueError:  # not the main thread: whoever has it decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
