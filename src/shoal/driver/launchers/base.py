"""Launcher: the contract between the driver and the system that runs processes. The driver knows nothing else of it.

Another launcher is one file with a class that has the nine methods of `Launcher`:

- In each process that it starts, it calls `program.main` with a `WorkerStartup`, and exits with the code it returns.
- Lines of a process come before its exit, which comes once. Where a host is lost, each of its processes exits with code
  None. `channels.ProcessChannels` does this for launchers whose processes hold a socket.
- When `close` returns, no process of the run is left. When the driver dies, processes end with it, unless the program
  is `detached`: then they go on (where `until_joined`, those that called `startup.outlive_driver`), and the file has a
  way to make a launcher of them again (`LocalLauncher.attach`).

`tests/helpers/direct_launcher.py` is a small one.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.start import WorkerStartup

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
LAUNCHER_SOCKET = "launcher.sock"  # in the run's folder: where a launcher that outlives the driver listens


class Host(Protocol):
    """A place for processes."""

    @property
    def name(self) -> str: ...
    @property
    def rack(self) -> str: ...  # hosts of one rack are near each other; empty: one rack, or not known
    @property
    def address(self) -> str: ...  # under which other hosts reach it; loopback: all processes are on this machine
    @property
    def variables(self) -> Mapping[str, str]: ...  # for the environment of every process on the host

    def call(self, function: Callable[[], T]) -> T:
        """Calls the function in the driver's process. Sockets that the function opens are on the host's network."""


@dataclass(frozen=True, kw_only=True)
class LocalHost:
    """This machine."""

    name: str = field(default_factory=lambda: os.uname().nodename)
    rack: str = ""
    address: str = LOOPBACK
    variables: Mapping[str, str] = field(default_factory=lambda: {"GLOO_SOCKET_IFNAME": "lo"})

    def call(self, function: Callable[[], T]) -> T:
        return function()


@dataclass(frozen=True, kw_only=True)
class ProcessProgram:
    """What every process of a run executes."""

    main: Callable[[WorkerStartup], int]  # returns the exit code
    folder: Path  # of the run
    threads: int = 1  # that a process computes with
    detached: bool = False  # processes go on when the driver dies
    until_joined: bool = False  # detached: only those go on that have called `startup.outlive_driver`


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start. The driver chooses its id, so that a later driver knows the process again."""

    process: WorkerId
    environment: Mapping[str, str]
    log: Path  # standard output and error are appended to it
    cores: Sequence[int] = ()  # to which the process is bound; empty: any


@dataclass(frozen=True, kw_only=True)
class ProcessStarted:
    """A process runs. A launcher that was taken over begins with one such event for each process that still runs."""

    process: WorkerId
    pid: int


@dataclass(frozen=True, kw_only=True)
class ProcessLine:
    """A process sent a line, here without its end."""

    process: WorkerId
    text: bytes


@dataclass(frozen=True, kw_only=True)
class ProcessWroteAside:
    """A process wrote lines to its file with this number, which belong between those before and after this event."""

    process: WorkerId
    number: int


@dataclass(frozen=True, kw_only=True)
class ProcessLinesDropped:
    """A process sent lines that are too long to be events."""

    process: WorkerId
    count: int


@dataclass(frozen=True, kw_only=True)
class ProcessReconnected:
    """A process that another driver started sends its lines here now."""

    process: WorkerId


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """A process ended."""

    process: WorkerId
    code: int | None  # negative: the signal that ended it; None: not known


@dataclass(frozen=True, kw_only=True)
class StartsEnded:
    """The launcher can start no process any more. Those that run go on."""


@dataclass(frozen=True, kw_only=True)
class StarterFound:
    """Which process starts the workers, where it is one of its own on this machine: the driver watches it."""

    pid: int


FromProcess = ProcessStarted | ProcessLine | ProcessWroteAside | ProcessLinesDropped | ProcessReconnected | ProcessExit
ProcessEvent = FromProcess | StartsEnded | StarterFound


class Launcher(Protocol):
    """Starts processes on hosts, reports what becomes of them, and ends them. It knows nothing of training."""

    def hosts(self, processes: int) -> Sequence[Host]:
        """The host of each of so many processes, by rank. Works before `open`, and returns the same hosts each time."""

    def services(self) -> Host:
        """The host where services of the driver listen, such as the rendezvous: all hosts reach its address."""

    def open(self, program: ProcessProgram) -> None:
        """Prepares to start processes. Modules that they need are loaded by now; this process has one thread."""

    def start(self, host: Host, spec: ProcessSpec) -> None:
        """Starts a process. Raises RunError where the launcher can start none."""

    def events(self, seconds: float) -> Sequence[ProcessEvent]:
        """Returns what happened since the last call, and waits at most so long for something to happen.

        A call means that all lines returned before are safe on the disk: a detached process may drop its copies.
        """

    def send(self, process: WorkerId, line: bytes) -> None:
        """Sends a line to a process; does nothing where the process is gone or not connected."""

    def starters(self) -> Collection[int]:
        """Processes of this machine from which all that the launcher starts descend."""

    def signal(self, process: WorkerId, number: int) -> None:
        """Sends a signal to a process; does nothing where the process is gone."""

    def close(self) -> None:
        """Ends all processes that still run, and returns when they are gone. The launcher can be opened again."""


def torchrun_environment(hosts: Sequence[Host], rank: int) -> dict[str, str]:
    """The variables that torchrun sets, so that any torch.distributed script finds its place in its group; those of
    the rendezvous store, MASTER_ADDR and MASTER_PORT, come from who has one.

    `hosts`: of each rank; further ranks begin again at the first."""
    names, (turn, place) = [host.name for host in hosts], divmod(rank, len(hosts))
    own, size = names[place], str(len(hosts))
    on_host, used = names.count(own), list(dict.fromkeys(names))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(turn * on_host + names[:place].count(own)),
        "GROUP_RANK": str(used.index(own)),
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(on_host),
        "GROUP_WORLD_SIZE": str(len(used)),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
    }
