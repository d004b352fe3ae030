"""The workers of a script that have not joined, as the driver follows them: what they use, and how they are ended.

Such a worker cannot finish a step and save. A signal to the driver is one to them; what is left after a grace is
killed.
"""

import signal
import time

from shoal.driver.process_use import ProcessUsage, are_connected, read_usage
from shoal.driver.run_processes import RunProcesses
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.supervisor import WorkerSupervisor
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.events import ProcessesObserved, ProcessUse, ScriptAdvised
from shoal.report.human import plural

GRACE_SECONDS = 5.0  # between the signal and SIGKILL
ALONE_SECONDS = 10.0  # after which workers that have no group are worth a sentence
FIRST_MINUTE = 60.0


def observation_interval(age: float) -> float:
    """Seconds between two looks at the processes of a script that has run for so long."""
    return 2.0 if age < FIRST_MINUTE else 10.0


def stopping_text(number: int, workers: int) -> str:
    """What is printed at the first signal."""
    name = signal.Signals(number).name
    return (
        f"stopping: {name} sent to {plural(workers, 'worker')} of a script that has not joined, so Shoal saves nothing;"
        f" what runs on after {GRACE_SECONDS:g} s is killed, Ctrl-C again ends at once"
    )


def alone_text(workers: int) -> str:
    return (
        f"{workers} workers run, and none has joined a group yet: unless the script still does, each trains a full copy"
        " of its own; call shoal.join or torch.distributed.init_process_group in the script, or use --workers 1"
    )


class ScriptWatch:
    def __init__(self, recorder: RunRecorder, processes: RunProcesses, supervisor: WorkerSupervisor) -> None:
        self._recorder, self._processes, self._supervisor = recorder, processes, supervisor
        self._is_script = recorder.launch.started.command == "run"
        self._began = time.monotonic()
        self._looked_at = self._began
        self._before: dict[int, tuple[float, ProcessUsage]] = {}  # by process id: when, and what it used then
        self._has_group = False  # workers were seen to find each other
        self._advised = False
        self._kill_at: float | None = None

    @property
    def never_joined(self) -> bool:
        """Whether the run is a script's, and no worker of it has joined."""
        return self._is_script and not self._recorder.tally.scripts.joined and not self._supervisor.participants

    @property
    def stopping(self) -> bool:
        return self._kill_at is not None

    def plain_workers(self) -> list[WorkerId]:
        """Running workers that have not joined."""
        size, joined = self._recorder.launch.size, self._supervisor.participants
        running = self._processes.running if self._is_script else ()
        return sorted(who for who in running if who.worker < size and who not in joined)

    def stop(self, number: int) -> None:
        """Passes a signal on."""
        found = self.plain_workers()
        for who in found:
            self._processes.launcher.signal(who, number)
        if found:
            self._kill_at = time.monotonic() + GRACE_SECONDS

    def tick(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now > self._kill_at:
            for who in self.plain_workers():
                self._processes.launcher.signal(who, signal.SIGKILL)
        if self._is_script and now - self._looked_at >= observation_interval(now - self._began):
            self._looked_at = now
            self._look(now)

    def _look(self, now: float) -> None:
        pids = {who.worker: self._processes.pids[who] for who in self.plain_workers() if who in self._processes.pids}
        found = {rank: (pid, usage) for rank, pid in pids.items() if (usage := read_usage(pid)) is not None}
        if not found:
            return
        uses = [
            ProcessUse(rank=rank, cpu=round(self._cpu(pid, usage, now), 3), memory_bytes=usage.memory_bytes)
            for rank, (pid, usage) in found.items()
        ]
        self._before = {pid: (now, usage) for pid, usage in found.values()}
        self._recorder.emit(ProcessesObserved(workers=uses))
        self._advise(now, list(pids.values()))

    def _cpu(self, pid: int, usage: ProcessUsage, now: float) -> float:
        since, before = self._before.get(pid, (self._began, ProcessUsage(0.0, 0)))
        return max(0.0, usage.cpu_seconds - before.cpu_seconds) / max(now - since, 1e-3)

    def _advise(self, now: float, pids: list[int]) -> None:
        if self._advised or len(pids) < 2 or not self.never_joined or self._recorder.launch.servers:
            return
        self._has_group = self._has_group or self._processes.rendezvous_used() or are_connected(pids)
        if not self._has_group and now - self._began >= ALONE_SECONDS:
            self._advised = True
            self._recorder.emit(ScriptAdvised(rank=None, text=alone_text(len(pids))))
