"""A cluster in a box: `with Lab(cluster) as lab:` has hosts that are network namespaces of this machine.

The machine's own network does not see it. It is taken down at the block's end, also after an exception, Ctrl-C and
SIGTERM, and by the kernel when the owner is killed. The next lab, or `shoal lab clean`, removes the rest (cleanup.py).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from shoal.driver.launchers import cleanup, lab_network
from shoal.driver.launchers.base import Host
from shoal.driver.launchers.lab_network import MOST_HOSTS, MOST_RACKS
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.launchers.namespaces import INTERFACE, LINKS, LabHost, enter, inside, new_namespace, set_kernel
from shoal.errors import InputError, RunError
from shoal.planner.cluster import Cluster, Order, WorkerSlot, assign_workers
from shoal.recovery.membership.process import start_ticks

# One protocol, one congestion control: a lab behaves alike on every machine.
KERNEL = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/tcp_congestion_control": "cubic",
    "bridge/bridge-nf-call-iptables": "0",
}


class Lab:
    """`with Lab(cluster) as lab:` hosts to run processes on, which exist within the block."""

    def __init__(self, cluster: Cluster, *, order: Order = "blocks") -> None:
        check_machine()
        check_size(cluster)
        self.cluster, self.order = cluster, order
        self.id = ""
        self.owner = os.getpid()
        self.hosts: tuple[LabHost, ...] = ()
        self.launcher = LabLauncher(self)
        self._descriptors: list[int] = []
        self._stack = ExitStack()

    def slots(self, workers: int | None = None, order: Order | None = None) -> tuple[WorkerSlot, ...]:
        return assign_workers(self.cluster, self.cluster.workers if workers is None else workers, order or self.order)

    def rank_hosts(self, workers: int | None = None, order: Order | None = None) -> list[LabHost]:
        """The host of each rank, as `shoal.testing.ranks(…, places=…)` takes it."""
        return [self.host_of(slot) for slot in self.slots(workers, order)]

    def host_of(self, slot: WorkerSlot) -> LabHost:
        return next(host for host in self.hosts if host.name == slot.host.name)

    def inside(self, host: LabHost) -> AbstractContextManager[None]:
        """Sockets and processes that are made in this block belong to that host."""
        return inside(host.namespace)

    # -- up and down ------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Lab":
        self.owner = os.getpid()
        with ExitStack() as stack:
            stack.enter_context(_ended_by_signals())
            stack.callback(self._down)
            try:
                cleanup.clean()
                self._name()
            except OSError as error:
                raise InputError(f"a lab keeps its names under /run, and cannot: {error}") from None
            self._connect()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _name(self) -> None:
        """Makes the namespaces, and names them for `ip netns exec shoal-1f2e3d-r0h0 …`."""
        self.id = cleanup.unused_id()
        hosts = self.cluster.hosts
        names = [f"shoal-{self.id}-{host.name}" for host in hosts] + [f"shoal-{self.id}_fabric"]  # _: not a host's name
        started = start_ticks(self.owner) or ""
        cleanup.write_record(cleanup.LabRecord(id=self.id, owner=self.owner, started=started, names=names))
        cleanup.NAMES.mkdir(parents=True, exist_ok=True)
        paths = []
        for name in names:
            self._descriptors.append(_namespace())
            paths.append(f"/proc/{self.owner}/fd/{self._descriptors[-1]}")
            os.symlink(paths[-1], cleanup.NAMES / name)
        known = lab_network.addresses(self.cluster)
        # The user's own description of the links goes first.
        links = os.environ.get(LINKS) or json.dumps(lab_network.links(self.cluster))
        hosts_file, secret = cleanup.write_names(self.id, known), cleanup.write_lab_secret(self.id)
        lab_host = partial(LabHost, lab=self.id, names=hosts_file, secret=secret, links=links)
        self.hosts = tuple(
            lab_host(name=host.name, rack=host.rack, address=known[host.name], namespace=path)
            for host, path in zip(hosts, paths[:-1], strict=True)
        )
        self._fabric = paths[-1]

    def _connect(self) -> None:
        with inside(self._fabric):
            set_kernel(KERNEL)
            _run_tool("ip", lab_network.fabric_links(self.cluster, [host.namespace for host in self.hosts]))
            _run_tool("tc", lab_network.fabric_rates(self.cluster))
        for host, place in zip(self.cluster.hosts, self.hosts, strict=True):
            with self.inside(place):
                set_kernel(KERNEL)
                lines = ["link set lo up", f"addr add {place.address}/16 dev {INTERFACE}", f"link set {INTERFACE} up"]
                _run_tool("ip", lines)
                _run_tool("tc", [lab_network.rate(INTERFACE, host.link.bytes_per_second)])

    def _down(self) -> None:
        if os.getpid() != self.owner:  # a forked process does not own the lab
            return
        with _undisturbed():
            cleanup.end_processes({os.fstat(descriptor).st_ino for descriptor in self._descriptors})
            for descriptor in self._descriptors:
                os.close(descriptor)  # the last descriptor: the kernel takes the namespace down
            self._descriptors.clear()
            self.hosts = ()
            cleanup.remove_record(self.id)


class LabLauncher(LocalLauncher):
    """Workers on the hosts of a lab: the fork server of this machine starts them, and they move to their hosts."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab

    def hosts(self, processes: int) -> Sequence[Host]:
        return self.lab.rank_hosts(processes)

    def services(self) -> Host:
        return self.lab.rank_hosts(1)[0]

    def enter_host(self, name: str) -> None:
        enter(next(host for host in self.lab.hosts if host.name == name))


def check_machine() -> None:
    """Raises InputError where this machine cannot have a lab."""
    if sys.platform != "linux":
        raise InputError(f"a lab needs Linux (network namespaces), and this is {sys.platform}")
    if os.geteuid() != 0:
        fix = "sudo, or a container started with --privileged"
        raise InputError(f"a lab needs root to make network namespaces, and this is user {os.geteuid()}", fix=fix)
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            fix = "apt install iproute2 (Debian's package), or /usr/sbin in PATH"
            raise InputError(f"a lab needs the program {tool}, and it is not in PATH", fix=fix)


def check_size(cluster: Cluster) -> None:
    widest = max(cluster.racks, key=lambda rack: len(rack.hosts))
    if len(cluster.racks) > MOST_RACKS or len(widest.hosts) > MOST_HOSTS:
        shown = f"{len(cluster.racks)} racks, {len(widest.hosts)} hosts in rack {widest.name}"
        raise InputError(f"{shown}: a lab can have {MOST_RACKS} racks of {MOST_HOSTS} hosts", fix="a smaller cluster")


def _namespace() -> int:
    try:
        return new_namespace()
    except OSError as error:
        fix = "a container needs --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN"
        raise InputError(f"the kernel gives no network namespace: {error.strerror}", fix=fix) from None


def _run_tool(tool: str, lines: Sequence[str]) -> None:
    """Runs `ip` or `tc` on a list of commands, in the namespace that this thread is in."""
    text = "\n".join(lines) + "\n"
    done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        _, _, number = shown[-1].rpartition("-:")  # "Command failed -:3"
        which = [f"{tool} {lines[int(number) - 1]}"] if number.isdigit() else []
        lacks = "sch_tbf" if tool == "tc" else "bridge or veth"
        fix = f"a kernel with {lacks}" if "nknown" in shown[0] else None
        raise RunError(f"the lab's network could not be made: {shown[0]}", where=which, fix=fix)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turns a signal that would end this process at once into an exception, so that the lab is taken down."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread, which alone may handle signals
        for number in map(int, (signal.SIGTERM, signal.SIGHUP)):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Delays signals until the end of the block."""
    came: list[int] = []
    before: dict[int, Any] = {}
    with suppress(ValueError):
        for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came:
        signal.raise_signal(number)
