"""What clients and the server of the embedded store share: requests, replies, and the files in the run's folder.

    store.db      the records, in SQLite
    store.lock    held while the server lives: one server per folder
    store.sock    where the server listens, on one machine
    store.json    where the server listens, its process, and the secret from which a client's token is made
    store.log     the last words of a server that failed

A frame is a length (4 bytes, network order) and one msgpack value.

The server imports this module without the package, which would import torch (sqlite_process.py): this module imports
only the standard library, msgspec and light modules of transport.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.transport.decoding import decode_json, guarded
from shoal.transport.identity import Role

DATABASE, LOCK, SERVER_INFO, LOG = "store.db", "store.lock", "store.json", "store.log"
SOCKET = "store.sock"
ON_MACHINE = "unix"  # the address of a server at the socket in its folder

REQUEST_BYTES = 1 << 20  # the largest request
HELLO_BYTES = 1 << 10  # the largest request before the token
REPLY_BYTES = 1 << 26
PF_EXITING = 0x4  # a flag of the kernel: the process may have closed its connections, and still hold the lock

Number = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # SQLite has no larger ones
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class StoreHello(msgspec.Struct, frozen=True, tag=True):
    """The first request of a connection. Between hosts the role is that of the certificate."""

    token: str
    role: Role


class StoreRead(msgspec.Struct, frozen=True, tag=True):
    prefix: str


class StoreSwap(msgspec.Struct, frozen=True, tag=True):
    key: Key
    value: bytes | None
    expected: Number
    lease: Number | None


class StorePut(msgspec.Struct, frozen=True, tag=True):
    key: Key
    value: bytes
    lease: Number | None


class StoreGrant(msgspec.Struct, frozen=True, tag=True):
    seconds: Seconds


class StoreRenew(msgspec.Struct, frozen=True, tag=True):
    lease: Number


class StoreRevoke(msgspec.Struct, frozen=True, tag=True):
    lease: Number


class StoreWait(msgspec.Struct, frozen=True, tag=True):
    prefix: str
    after: Number
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class StoreStop(msgspec.Struct, frozen=True, tag=True):
    """Ends the server. Its records stay on disk."""


StoreRequest = (
    StoreHello | StoreRead | StoreSwap | StorePut | StoreGrant | StoreRenew | StoreRevoke | StoreWait | StoreStop
)


class StoreReply(msgspec.Struct, frozen=True, omit_defaults=True):
    revision: int | None = None  # a revision or a lease; None: not swapped, or the lease has ended
    entries: dict[str, tuple[bytes, int]] | None = None  # value and revision; None: nothing has changed
    lease_ended: bool = False  # and nothing was written
    error: str | None = None  # and nothing was done
    refused: str | None = None  # the client's role does not permit it, and nothing was done
    rejected: int = 0  # connections that were closed for what they sent; in the reply to a hello


class StoreServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of store.json."""

    address: str  # `unix`: the socket in this folder
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 22)]  # the kernel has no larger ones
    started: int  # in the kernel's ticks: another process may get the same id later
    token: str

    @property
    def on_machine(self) -> bool:
        return self.address == ON_MACHINE

    def __str__(self) -> str:
        if self.on_machine:
            return f"unix:{SOCKET}"
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


decode_request = guarded(msgspec.msgpack.Decoder[StoreRequest](StoreRequest).decode)
decode_reply = guarded(msgspec.msgpack.Decoder(StoreReply).decode)


def frame(message: StoreRequest | StoreReply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def read_server_info(folder: Path) -> StoreServerInfo | None:
    try:
        return decode_json((folder / SERVER_INFO).read_bytes(), StoreServerInfo)
    except (OSError, msgspec.DecodeError):
        return None


def is_locked(folder: Path) -> bool:
    """Whether a server of this folder lives. The kernel releases the lock when its process ends."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_server_info(folder: Path) -> None:
    """Removes store.json if no server lives; a server that starts meanwhile waits."""
    with suppress(OSError):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / SERVER_INFO).unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def process_start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if the process is gone or ending."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" or int(rest[5]) & PF_EXITING else int(rest[18])
