"""The process of the embedded store's server, started by the path of this file (sqlite_client.start_server).

Importing `shoal` imports torch. So this file registers empty packages in the place of `shoal` and its rooms, and then
imports the server's modules alone: the server is ready in a tenth of a second.
"""

import argparse
import fcntl
import os
import secrets
import socket
import sys
import time
import traceback
import types
from contextlib import suppress
from pathlib import Path

import msgspec

if __name__ == "__main__":
    for _name, _path in zip(
        ("shoal.recovery.membership", "shoal.recovery", "shoal"), Path(__file__).resolve().parents, strict=False
    ):
        sys.modules[_name] = types.ModuleType(_name)
        sys.modules[_name].__path__ = [str(_path)]

from shoal.recovery.membership.sqlite_messages import (
    DATABASE,
    LOCK,
    LOG,
    ON_MACHINE,
    SERVER_INFO,
    SOCKET,
    StoreServerInfo,
    process_start_ticks,
    read_server_info,
)
from shoal.recovery.membership.sqlite_records import StoreRecords
from shoal.recovery.membership.sqlite_server import StoreServer
from shoal.recovery.membership.store_door import StoreDoor
from shoal.transport import unix_sockets
from shoal.transport.credentials import Credentials

OTHER_SERVER_SECONDS = 10.0  # that a second server waits until the first is ready or gone
SPARE_DESCRIPTORS = 50  # that connections may not use


def main() -> int:
    """Starts the server in the background. Prints the content of store.json when it is ready, or what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default=ON_MACHINE, help="to listen on; else at the socket in the folder")
    parser.add_argument("--credentials", type=Path, help="a file with the server's credentials, for an address")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds without lease and client until it ends")
    parser.add_argument("--owner", type=int, help="a process to end with")
    options = parser.parse_args()
    folder = options.folder.resolve()
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        os._exit(_become_server(folder, options, theirs))
    os.close(theirs)
    with open(ours, "rb") as answer:
        text = answer.read()
    sys.stdout.buffer.write(text)
    return 0 if text.startswith(b"{") else 1


def _become_server(folder: Path, options: argparse.Namespace, ready_fd: int) -> int:
    os.setsid()
    os.umask(0o077)  # the token is this user's secret
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    try:
        handle = None if options.owner is None else os.pidfd_open(options.owner)
        lock = _lock(folder)
        if isinstance(lock, StoreServerInfo):
            os.write(ready_fd, msgspec.json.encode(lock))
            return 0
        records = StoreRecords(folder / DATABASE, time.monotonic())
        _sync_folder(folder)
        before = read_server_info(folder)
        token = secrets.token_hex(16) if before is None else before.token  # connected clients may continue
        credentials = None if options.credentials is None else Credentials.load(options.credentials)
        address = options.address
        listener = _listen(folder, address, credentials, 0 if before is None else before.port)
        port = 0 if address == ON_MACHINE else listener.getsockname()[1]
        started = process_start_ticks(os.getpid())
        assert started is not None
        serving = StoreServerInfo(address=address, port=port, pid=os.getpid(), started=started, token=token)
        _write_server_info(folder, serving)
    except Exception as error:
        os.write(ready_fd, f"{type(error).__name__}: {error}".encode())
        return 1
    os.write(ready_fd, msgspec.json.encode(serving))
    os.close(ready_fd)
    try:
        door, most = StoreDoor(listener, token, credentials), os.sysconf("SC_OPEN_MAX") - SPARE_DESCRIPTORS
        server = StoreServer(door, records, options.idle, most, handle)
        server.lock = lock
        server.run()
        for name in (SERVER_INFO, SOCKET):  # while this process holds the lock
            (folder / name).unlink(missing_ok=True)
        records.close()
    except Exception:
        with suppress(OSError), open(folder / LOG, "a") as log:
            traceback.print_exc(file=log)
        return 1
    return 0


def _lock(folder: Path) -> int | StoreServerInfo:
    """The lock on this folder, which the process keeps; or the server that holds it, once that is ready."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + OTHER_SERVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            other = read_server_info(folder)
            if other is not None and process_start_ticks(other.pid) == other.started:
                return other
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {folder / LOCK} and does not serve") from None
            time.sleep(0.005)


def _listen(folder: Path, address: str, credentials: Credentials | None, port: int) -> socket.socket:
    """At the socket in the folder, or at an address: on the port of the server before, if it is free."""
    if address == ON_MACHINE:
        return unix_sockets.listen(folder / SOCKET, socket.SOCK_STREAM)
    if credentials is None:
        raise PermissionError(f"{address} can be reached by strangers, and the store has no credentials")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError:
        if port == 0:
            raise
        return socket.create_server((address, 0), family=family, backlog=128)


def _write_server_info(folder: Path, info: StoreServerInfo) -> None:
    beside = folder / f".{SERVER_INFO}.{os.getpid()}.part"
    beside.write_bytes(msgspec.json.encode(info))
    beside.rename(folder / SERVER_INFO)


def _sync_folder(folder: Path) -> None:
    """Makes the name of the database durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
