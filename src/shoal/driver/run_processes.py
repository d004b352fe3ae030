"""The processes of a run, as the driver sees them: how they are started, which of them run, what they print."""

import os
import signal
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from torch._C._distributed_c10d import TCPStore

from shoal.driver.launch_spec import LaunchSpec
from shoal.driver.launchers import base
from shoal.driver.launchers.base import Host, ProcessEvent, ProcessExit, ProcessSpec, ProcessStarted
from shoal.driver.log_tail import LogTail
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.run_folder import RunFolder
from shoal.transport.addresses import is_loopback
from shoal.transport.identity import Role
from shoal.transport.key_folder import KEYS, KeyFolder
from shoal.worker.event_channel import STOP_WORD
from shoal.worker.run_config import RunConfig


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
        # A script's only worker opens its own store, as under plain `python`: so do processes that it starts itself.
        self._hosts_store = launch.size > 1 or launch.started.command != "run"
        self._rendezvous_port = 0
        self._rendezvous_store: TCPStore | None = None
        self._rendezvous_keys = 0  # at the beginning
        self._log_tails: dict[int, LogTail] = {}

    @contextmanager
    def rendezvous(self) -> Iterator[None]:
        """Holds the key-value store where workers of this run find each other."""
        services = self.launcher.services()

        def open_store() -> TCPStore:
            listener = socket.create_server((services.address, 0), backlog=128)
            port = self._rendezvous_port = listener.getsockname()[1]
            return TCPStore(
                services.address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

        if not self._hosts_store:
            self._rendezvous_port = services.call(lambda: _free_port(services.address))
            yield
            return
        self._rendezvous_store = services.call(open_store)
        self._rendezvous_keys = self._rendezvous_store.num_keys()
        try:
            yield
        finally:
            self._rendezvous_store = None

    def rendezvous_used(self) -> bool:
        """Whether workers have begun to find each other there."""
        return self._rendezvous_store is not None and self._rendezvous_store.num_keys() > self._rendezvous_keys

    def start_worker(self, worker: WorkerId) -> None:
        log = self.folder.log(worker.worker)
        self._log_tails.setdefault(worker.worker, LogTail(log)).reopen()
        self.start(self.hosts[worker.worker % len(self.hosts)], worker, log, self._cores(worker.worker))

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
        if process.worker < self.launch.size:
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
        address, threads = self.launcher.services().address, self.launch.threads
        return {
            **base.torchrun_environment(self.hosts, rank, address, self._rendezvous_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self._hosts_store),
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


def _keys_of(launch: LaunchSpec, folder: RunFolder) -> KeyFolder | None:
    """None: all processes are on this machine, where sockets of this user need no certificates."""
    launcher = launch.launcher
    hosts = [launcher.services(), *launcher.hosts(launch.size)]
    if launch.servers:
        hosts += launcher.hosts(launch.servers)
    if all(is_loopback(host.address) for host in hosts):
        return None
    return KeyFolder(folder.path / KEYS, folder.id)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
