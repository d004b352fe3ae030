"""The key-value server that the driver holds for a run: where the workers of a group that never changes, and the
processes of any script, find each other.

    shoal train, one machine    a Unix socket in the run's folder, no port at all
    shoal run, one machine      127.0.0.1, for processes of the run alone: MASTER_ADDR and MASTER_PORT, as of torchrun
    shoal run, one worker       none: its group of one has a store inside the process (worker/script_process.py)
    several hosts               TCP and TLS, for workers with a certificate; a script finds it at MASTER_PORT of its own
                                loopback, where a relay of its process listens (worker/script_process.py)
"""

import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.driver.launchers.base import LOOPBACK, Host
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.key_value_server import KeyValueServer, serve_key_values
from shoal.transport.peer_process import refuse_strangers
from shoal.transport.secure_socket import Connection
from shoal.worker.rendezvous import RENDEZVOUS_VARIABLE

SOCKET = "rendezvous.sock"
MOST_NOTES = 5  # on strangers
QUIET_SECONDS = 5.0  # between two of them


class RunRendezvous:
    def __init__(self, folder: Path, services: Host, *, for_script: bool, alone: bool) -> None:
        """`alone`: a script's only worker needs none. Processes that it starts open torch's own at MASTER_PORT, which
        is free for them, as under plain `python`."""
        self._folder, self._services, self._for_script, self._alone = folder, services, for_script, alone
        self._server: KeyValueServer | None = None
        self._noted, self._notes, self._quiet_until = 0, 0, 0.0  # refusals that were reported
        self.address = ""  # of the server, for clients of ours
        self.port = 0  # of torch's variables; 0: there is none

    @contextmanager
    def opened(self, credentials: Credentials | None, pids: Callable[[], Collection[int]]) -> Iterator[None]:
        """`credentials`: of the driver, where the run has several hosts. `pids`: of the run's processes; their
        descendants belong to them."""
        if self._alone:
            self.port = self._services.call(_free_port)
            yield
            return
        self._server = self._services.call(lambda: self._open(credentials, pids))
        try:
            yield
        finally:
            self._server.close()
            (self._folder / SOCKET).unlink(missing_ok=True)

    def _open(self, credentials: Credentials | None, pids: Callable[[], Collection[int]]) -> KeyValueServer:
        if self._for_script and credentials is None:

            def admit(connection: socket.socket) -> Connection:
                refuse_strangers(connection, pids)
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

            listener = socket.create_server((LOOPBACK, 0), backlog=128)
            self.port = listener.getsockname()[1]
            return KeyValueServer(listener, admit)
        place = self._services.address
        where = f"unix:{self._folder.absolute() / SOCKET}" if is_loopback(place) else f"tcp://{place}:0"
        server, self.address = serve_key_values(where, credentials, (Role.WORKER,))
        return server

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a worker."""
        found = {"TORCHELASTIC_USE_AGENT_STORE": str(not self._alone)}
        if self.address:
            found[RENDEZVOUS_VARIABLE] = self.address
        if self.port:
            found |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(self.port)}
        return found

    def used(self) -> bool:
        """Whether workers have begun to find each other there."""
        return self._server is not None and self._server.num_keys() > 0

    def refusals(self) -> list[str]:
        """Sentences about strangers that have come since the last call: a few in a run, and one in a few seconds."""
        server, now = self._server, time.monotonic()
        if server is None or server.refused == self._noted or self._notes >= MOST_NOTES or now < self._quiet_until:
            return []
        count, self._noted = server.refused - self._noted, server.refused
        self._notes, self._quiet_until = self._notes + 1, now + QUIET_SECONDS
        times = "a connection" if count == 1 else f"{count} connections"
        return [f"refused {times} to the store where workers find each other: {server.last_refusal}"]


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
