"""One run of the kill campaign: commands as a user types them, one fault, and a look at what it left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from campaign_job import CHECKPOINT_EVERY, PULSES
from campaign_plan import (
    DRIVER,
    FORK_SERVER,
    KILL,
    LONGEST_SILENCE,
    MODES,
    PAUSE,
    SERVER,
    STORE,
    TWO_WORKERS,
    Command,
    PlannedFault,
    Verdict,
    longest_gap,
)  # fmt: skip
from shoal.driver.chaos.player import RunWatcher
from shoal.recovery.membership.process import process_state, start_ticks
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.report import events
from shoal.testing import leftovers

HERE = Path(__file__).parent
JOB, LOOP = HERE / "campaign_job.py", HERE / "campaign_loop.py"
SHOAL = [sys.executable, "-m", "shoal"]
TICK_SECONDS = 0.01
DEADLINE_SECONDS = 60.0  # for a command
ATTACH_SECONDS = 0.5  # between the death of a driver and the next command
LOG_LINES = 3
ROUTINE = (events.ServerReported, events.ProcessesObserved)  # said now and then, whether the run moves or not

Process = tuple[int, str]  # its id, and when it began: the id alone may be another's later


@dataclass
class CampaignWatcher(RunWatcher):
    servers: dict[int, Process] = field(default_factory=dict)
    said: dict[float, str] = field(default_factory=dict)  # events by their times, without those of routine

    def _apply(self, event: events.AnyEvent) -> None:
        super()._apply(event)
        if not isinstance(event, ROUTINE):
            self.said[event.time] = type(event).__name__
        if isinstance(event, events.ServerStarted):
            self.servers |= _processes([event.pid], event.shard)


class CampaignRun:
    """`place`: a folder of its own. `planned` None: nothing happens to the run."""

    def __init__(self, place: Path, mode: str, planned: PlannedFault | None) -> None:
        self.place, self.name, self.mode, self.planned = place, mode, MODES[mode], planned
        self.folder, self.pulses, self.temporary = place / "run", place / "pulses", place / "tmp"
        for folder in (self.pulses, self.temporary):
            folder.mkdir(parents=True)
        self.watch = CampaignWatcher(self.folder / "events.jsonl")
        self.commands: list[Command] = []
        self.problems: list[str] = []
        self.hit: list[Process] = []
        self.hit_at: float | None = None  # since 1970
        self.continued_at: float | None = None  # when a paused driver went on
        self._due: float | None = None  # when the fault comes, once its step has

    # -- commands -----------------------------------------------------------------------------------------------------

    def start_command(self, *, resume: bool = False) -> list[str]:
        lab = ["lab", "--racks", "1", "--hosts", "2", "--"] if self.mode.lab else []
        what = ["run", str(LOOP)] if self.mode.script else ["train", str(JOB)]
        every = ["--checkpoint-every", str(CHECKPOINT_EVERY)] if self.mode.script else []
        where = ["--resume" if resume else "--run-dir", str(self.folder)]
        return [*SHOAL, *lab, *what, *self.mode.arguments.split(), *every, *where, "--json"]

    def play(self) -> None:
        code = self._command(self.start_command())
        killed = self.planned.victim if self.planned is not None and self.planned.fault == KILL and self.hit else ""
        if killed == DRIVER or (killed == FORK_SERVER and self.mode.lab and code != 0):
            time.sleep(ATTACH_SECONDS)
            if not self.mode.lab:  # a lab's processes end with its driver, and with its fork server
                code = self._command([*SHOAL, "attach", str(self.folder), "--json"])
            if code != 0:
                code = self._command(self.start_command(resume=True))
        if code not in (0, None):
            self.problems.append(f"the last command ended with exit code {code}: {self._last_words()}")

    def _command(self, call: list[str]) -> int | None:
        """The exit code; None, and a problem, if it had to be ended."""
        variables = {PULSES: str(self.pulses), "TMPDIR": str(self.temporary), "SHOAL_PREDICT": "off"}
        began = time.time()
        with open(self.place / f"command-{len(self.commands)}.log", "wb") as log:
            process = subprocess.Popen(
                call, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | variables,
                start_new_session=True, cwd=self.place,
            )  # fmt: skip
        deadline = time.monotonic() + DEADLINE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            self.watch.poll()
            self._inject(process)
            self._continue()
            time.sleep(TICK_SECONDS)
        code = process.poll()
        if code is None:
            self.problems.append(f"{call[3]} did not end within {DEADLINE_SECONDS:.0f} s: {self._why()}")
            process.kill()
            process.wait()
        self.watch.poll()
        shown = " ".join(["shoal", *call[3:]])
        self.commands.append(Command(call=shown, code=code, began=began, ended=time.time()))
        return code

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            call = [*SHOAL, "why", str(self.folder)]
            done = subprocess.run(call, capture_output=True, text=True, timeout=20, check=False)
            (self.place / "why.txt").write_text(done.stdout + done.stderr)
            return " | ".join((done.stdout + done.stderr).split("\n")[:LOG_LINES])
        return "shoal why did not end, either"

    def _last_words(self) -> str:
        lines = (self.place / f"command-{len(self.commands) - 1}.log").read_text(errors="replace").strip().splitlines()
        return " | ".join(line for line in lines[-LOG_LINES:])[:400]

    # -- the fault ----------------------------------------------------------------------------------------------------

    def _inject(self, driver: subprocess.Popen[bytes]) -> None:
        planned = self.planned
        if planned is None or self.hit_at is not None:
            return
        if self._due is None:
            if not self.watch.workers or (planned.step and self._updates() < planned.step):
                return
            self._due = time.monotonic() + planned.delay
        if time.monotonic() < self._due or not (victims := self._victims(driver.pid)):
            return
        self.hit_at, self.hit = time.time(), victims
        for process in victims:
            _send(process, signal.SIGKILL if planned.fault == KILL else signal.SIGSTOP)

    def _victims(self, driver: int) -> list[Process]:
        """None of them: they are not there now."""
        assert self.planned is not None
        workers = [each for _, each in sorted(self.watch.workers.items()) if process_state(*each)]
        if self.planned.victim == DRIVER:
            return list(_processes([driver], 0).values())
        if self.planned.victim == STORE:
            serving = read_server_info(self.folder)
            return [] if serving is None else list(_processes([serving.pid], 0).values())
        if self.planned.victim == FORK_SERVER:
            parents = {parent for pid, _ in workers if (parent := _parent(pid)) not in (None, 1)}
            return list(_processes(sorted(parents)[:1], 0).values())
        able = sorted(self.watch.servers.values()) if self.planned.victim == SERVER else workers
        count = 2 if self.planned.victim == TWO_WORKERS else 1
        first = int(self.planned.draw * len(able))
        return (able[first:] + able[:first])[:count] if len(able) >= count else []

    def _continue(self) -> None:
        planned = self.planned
        if planned is None or planned.fault != PAUSE or self.hit_at is None or self.continued_at is not None:
            return
        if time.time() >= self.hit_at + planned.seconds:
            self.continued_at = time.time()
            for process in self.hit:
                _send(process, signal.SIGCONT)

    def end_all(self) -> None:
        """Ends what should have ended by itself."""
        mark = f"{PULSES}={self.pulses}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has just ended
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)

    # -- what was seen ------------------------------------------------------------------------------------------------

    def _updates(self) -> int:
        """The most updates of weights that one process has made."""
        return max((len(times) for times in self._pulses()), default=0)

    def _pulses(self) -> Iterator[list[float]]:
        for path in self.pulses.iterdir():
            lines = path.read_text().split("\n")[:-1]  # whole ones
            yield [float(line) for line in lines]

    def verdict(self, expected: str | None, left: list[str]) -> Verdict:
        silence, after, standstill = self._gaps()
        report = self._report()
        sha256 = report.get("weights_sha256")
        if not self.problems:  # else what follows is a consequence
            if report.get("outcome") != "done":
                self.problems.append(f"the outcome is {report.get('outcome')}")
            elif self.mode.exact and expected not in (None, sha256):
                self.problems.append(f"sha256 {sha256}, and {expected} without the fault")
            self.problems += left + self._temporary_left()
        if silence > LONGEST_SILENCE:
            self.problems.append(f"{silence:.1f} s of silence after {after}")
        return Verdict(
            planned=self.planned,
            mode=self.name,
            injected=self.hit_at is not None,
            commands=self.commands,
            weights_sha256=sha256,
            silence=round(silence, 3),
            silence_after=after,
            standstill=round(standstill, 3),
            problems=self.problems,
        )

    def _gaps(self) -> tuple[float, str, float]:
        """The longest silence since the fault, what came before it, and the longest standstill."""
        updates = sorted(time for times in self._pulses() for time in times)
        spans = [(each.began, self._run_ended(each)) for each in self.commands]
        known = {start: "the start of a command" for start, _ in spans} | dict.fromkeys(updates, "an update")
        known |= self.watch.said
        since = self.hit_at if self.hit_at is not None else min(updates, default=0.0)
        last = max(updates, default=since)
        driver = self.planned is not None and self.planned.victim == DRIVER
        if driver and self.continued_at is not None and last < self.continued_at:
            known[self.continued_at] = "the driver's pause"  # all was done while it stood still
        silence = longest_gap(sorted(known), spans, since)
        moving = [(start, min(end, last)) for start, end in spans if start < last]
        return silence.seconds, known.get(silence.began, "nothing"), longest_gap(updates, moving, since).seconds

    def _run_ended(self, command: Command) -> float:
        """When the run was over, or the command if that came first."""
        over = [at for at, said in self.watch.said.items() if said == "RunFinished" and at >= command.began]
        return min([command.ended, *over])

    def _temporary_left(self) -> list[str]:
        """What a killed driver leaves is for the next run to remove, so only a resumed run has no excuse."""
        followed = self.commands[-1].call if len(self.commands) > 1 else ""
        if followed and "--resume" not in followed:
            return []
        return [f"{path.name} is left in the folder of temporary files" for path in self.temporary.glob("shoal-*")]

    def _report(self) -> dict[str, Any]:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.folder / "report.json").read_bytes(), type=dict[str, Any])
        return {}


def play_run(place: Path, mode: str, planned: PlannedFault | None, expected: str | None) -> Verdict:
    """`expected`: the hash of an undisturbed run."""
    run = CampaignRun(place, mode, planned)
    try:
        with leftovers() as left:
            run.play()
    finally:
        run.end_all()
    return run.verdict(expected, left)


def _send(process: Process, number: int) -> None:
    with suppress(OSError):
        if process_state(*process) is not None:
            os.kill(process[0], number)


def _processes(pids: list[int], first: int) -> dict[int, Process]:
    """Of those that live, by a number each."""
    found = ((number, pid, start_ticks(pid)) for number, pid in enumerate(pids, first))
    return {number: (pid, when) for number, pid, when in found if when is not None}


def _parent(pid: int) -> int | None:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None
