"""The processes of a run, as the driver sees them: how they are started, which of them run, what they print."""

import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shoal.driver.launch_spec import LaunchSpec
from shoal.driver.launchers import base
from shoal.driver.launchers.base import Host, ProcessEvent, ProcessExit, ProcessSpec, ProcessStarted
from shoal.driver.log_tail import LogTail
from shoal.driver.run_rendezvous import RunRendezvous
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.run_folder import RunFolder
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.secret_files import KEYS
from shoal.worker.event_channel import STOP_WORD
from shoal.worker.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.transport.key_folder import KeyFolder


class RunProcesses:
    """Starts processes through the run's launcher, with their environment, log and cores, and follows its events."""

    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig) -> None:
        self.launcher, self.launch, self.folder, self.config = launch.launcher, launch, folder, config
        self.hosts: Sequence[Host] = self.launcher.hosts(launch.size)
        self.keys = _keys_of(launch, folder)
        self.running: set[WorkerId] = set()
        self.pids: dict[WorkerId, int] = {}  # also of processes that have ended
        self.can_start = True
        self.starter_pid: int | None = None  # of the process that starts the others, where it is one of its own
        self.variables: dict[str, str] = {}  # further ones, for the environment of every process
        self.worker_variables: Callable[[WorkerId], Mapping[str, str]] = lambda who: {}  # and of one worker
        script = launch.started.command == "run"
        self._rendezvous = RunRendezvous(
            folder.path, self.launcher.services(), for_script=script, alone=script and launch.size == 1
        )
        self._log_tails: dict[int, LogTail] = {}

    @contextmanager
    def rendezvous(self) -> Iterator[None]:
        """Holds the key-value store where workers of this run find each other."""
        with self._rendezvous.opened(self._own_credentials(), self._known_pids):
            yield

    def rendezvous_used(self) -> bool:
        """Whether workers have begun to find each other there."""
        return self._rendezvous.used()

    def refusals(self) -> list[str]:
        """Sentences about strangers at that store."""
        return self._rendezvous.refusals()

    def _own_credentials(self) -> Credentials | None:
        if self.keys is None:
            return None
        path = self.keys.bundle(Role.DRIVER)
        return Credentials.load(path) if path.exists() else self.keys.credentials(Role.DRIVER)

    def _known_pids(self) -> set[int]:
        """From which all processes of the run descend."""
        return {*self.pids.copy().values(), *self.launcher.starters()}

    def start_worker(self, worker: WorkerId) -> None:
        log = self.folder.log(worker.worker)
        self._log_tails.setdefault(worker.worker, LogTail(log)).reopen()
        host, cores = self.hosts[worker.worker % len(self.hosts)], self._cores(worker.worker)
        self.start(host, worker, log, cores, self.worker_variables(worker))

    def start(
        self,
        host: Host,
        process: WorkerId,
        log: Path,
        cores: Sequence[int] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {**self._environment(process.worker), **host.variables, **self.variables, **variables}
        if self.keys is not None:
            environment |= self.keys.variables(*self._role_and_name(process))
        self.launcher.start(host, ProcessSpec(process=process, environment=environment, log=log, cores=cores))
        self.running.add(process)

    def issue_own_keys(self) -> None:
        """At the beginning of a sitting: credentials of the driver and of the run's store."""
        if self.keys is not None:
            self.keys.begin()
            self.keys.credentials(Role.DRIVER)
            self.keys.credentials(Role.STORE)

    def _role_and_name(self, process: WorkerId) -> tuple[Role, str]:
        if process.worker < self.launch.size or not self.launch.servers:  # workers that came later have further ranks
            return Role.WORKER, f"{process.worker}.{process.incarnation}"
        return Role.SERVER, f"{process.worker - self.launch.size}.{process.incarnation}"

    def poll(self, seconds: float) -> Sequence[ProcessEvent]:
        """Events of the launcher, waiting at most so long. `running` and `can_start` are those after all of them."""
        events = self.launcher.events(seconds)
        for event in events:
            if isinstance(event, ProcessStarted):
                self.running.add(event.process)
                self.pids[event.process] = event.pid
            elif isinstance(event, ProcessExit):
                self.running.discard(event.process)
            elif isinstance(event, base.StartsEnded):
                self.can_start, self.starter_pid = False, None
            elif isinstance(event, base.StarterFound):
                self.starter_pid = event.pid
        return events

    def watched_pids(self) -> dict[int | None, int]:
        """Process ids of the workers that run, by number, and of the process that starts them, under None."""
        workers = [who for who in self.running if who in self.pids and who.worker < self.launch.size]
        found: dict[int | None, int] = {who.worker: self.pids[who] for who in workers}
        return found if self.starter_pid is None else found | {None: self.starter_pid}

    def continue_starter(self) -> None:
        """The process that starts workers also reports their ends: it may be stopped."""
        if self.starter_pid is not None:
            with suppress(OSError):
                os.kill(self.starter_pid, signal.SIGCONT)

    def ask_to_stop(self, processes: Collection[WorkerId]) -> None:
        for process in processes:
            self.launcher.send(process, STOP_WORD + b"\n")

    def printed(self) -> Iterator[tuple[int, str]]:
        """Lines that workers have printed since the last call, each with the worker's number."""
        for worker, tail in self._log_tails.items():
            for text in tail.lines():
                yield worker, text

    def _environment(self, rank: int) -> dict[str, str]:
        threads = self.launch.threads
        return {
            **base.torchrun_environment(self.hosts, rank),
            **self._rendezvous.variables,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.folder.id,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **self.config.comm_options.environment,  # also for groups that a script makes itself
        }

    def _cores(self, rank: int) -> Sequence[int]:
        cores, threads = sorted(os.sched_getaffinity(0)), self.launch.threads
        if not self.config.parallel.pin or self.launch.size * threads > len(cores):
            return ()
        return cores[rank * threads : (rank + 1) * threads]


def _keys_of(launch: LaunchSpec, folder: RunFolder) -> "KeyFolder | None":
    """None: all processes are on this machine, where sockets of this user need no certificates."""
    launcher = launch.launcher
    hosts = [launcher.services(), *launcher.hosts(launch.size)]
    if launch.servers:
        hosts += launcher.hosts(launch.servers)
    if all(is_loopback(host.address) for host in hosts):
        return None
    from shoal.transport.key_folder import KeyFolder  # only here: `cryptography` takes a while

    return KeyFolder(folder.path / KEYS, folder.id)
