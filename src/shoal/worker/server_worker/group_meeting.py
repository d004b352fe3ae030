"""Where the members of a worker group (`--sync groups:2`) find each other: on one machine at a socket that the first
of them opens in the run's folder, so that they need no driver; between hosts at the driver's key-value server."""

import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from shoal.collectives.rendezvous_store import RendezvousStore
from shoal.errors import PeerLost
from shoal.transport.key_value_server import KeyValueServer, serve_key_values
from shoal.worker.context import WorkerContext
from shoal.worker.rendezvous import RENDEZVOUS_VARIABLE

RETRY_SECONDS = 0.02  # until the first member listens


class GroupMeeting:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._socket_file: Path | None = None  # while this worker is the first member
        self._server: KeyValueServer | None = None
        self._client: RendezvousStore | None = None

    def open(self, name: str, limit: timedelta, *, leads: bool) -> Store:
        """A store for one generation of one group; it lasts until the next call, or `close`. Raises PeerLost where the
        first member does not listen in time."""
        self.close()
        folder = self._context.folder
        if folder is None or not os.environ.get(RENDEZVOUS_VARIABLE, "").startswith("unix:"):
            assert self._context.open_torch_store is not None
            return PrefixStore(f"group/{name}", self._context.open_torch_store())
        file = folder.absolute() / f"rendezvous-group-{name}.sock"
        address = f"unix:{file}"
        if leads:
            self._server, _ = serve_key_values(address, None, ())
            self._socket_file = file
        until = time.monotonic() + limit.total_seconds()
        while self._client is None:
            try:
                self._client = RendezvousStore(address, limit)
            except RuntimeError as error:
                if time.monotonic() > until:
                    raise PeerLost(
                        f"the first worker of the group is not there: {str(error).splitlines()[0]}"
                    ) from None
                time.sleep(RETRY_SECONDS)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None and self._socket_file is not None:
            self._server.close()
            self._server = None
            with suppress(OSError):
                self._socket_file.unlink(missing_ok=True)
