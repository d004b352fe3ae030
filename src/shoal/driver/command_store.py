"""The store of a run, for a command from any process: also of a run in a lab, whose network the command is not in."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from socket import socket

from shoal.driver.launch_spec import read_driver_state
from shoal.driver.launchers.namespaces import HERE, inside
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.sqlite_messages import StoreServerInfo, process_start_ticks, read_server_info
from shoal.recovery.membership.store import RunStore
from shoal.recovery.membership.store_access import Dial, command_access, dial
from shoal.report.run_folder import RunFolder


@contextmanager
def command_store(folder: RunFolder) -> Iterator[RunStore]:
    access = replace(command_access(folder.path, folder.id), dial=_dial_from_within(folder.path))
    store = open_store(read_driver_state(folder).config.failure.store, folder.path, folder.id, access)
    try:
        yield store
    finally:
        store.close()


def _dial_from_within(folder: Path) -> Dial:
    def reach(address: str, port: int, seconds: float) -> socket:
        with _network_of(read_server_info(folder)):
            return dial(address, port, seconds)

    return reach


def _network_of(serving: StoreServerInfo | None) -> AbstractContextManager[None]:
    """The network of the store's process, where that is one of this machine in another network than this thread."""
    if serving is None or process_start_ticks(serving.pid) != serving.started:
        return nullcontext()
    network = f"/proc/{serving.pid}/ns/net"
    return nullcontext() if os.readlink(network) == os.readlink(HERE) else inside(network)
