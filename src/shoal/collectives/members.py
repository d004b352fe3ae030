"""Who belongs to a group and where: each member leaves a note at the store, and reads the others'."""

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import Store

from shoal.collectives.traffic import Wish
from shoal.errors import PeerLost


class Member(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str  # where memory can be shared: machine, network and name together
    name: str  # of the host, for people
    rack: str
    address: str
    process: int
    descriptor: int  # of this member's shared memory, -1 where it has none
    token: str  # a secret at the start of that memory: shows that it is the right one
    num_bytes: int = 0
    why_none: str = ""  # why there is no shared memory
    wish: Wish = Wish()

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name}"


def host_identity() -> str:
    """Equal for processes that can share memory. A lab's hosts differ by their network, containers by their boot."""
    named = os.environ.get("SHOAL_HOST", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = network = ""
    return f"{boot}/{network}/{socket.gethostname()}/{named}"


def own_address(store: Any = None) -> str:
    """The address under which other hosts reach this one: SHOAL_ADDRESS, or the one that leads to the store."""
    named = os.environ.get("SHOAL_ADDRESS")
    if named:
        return named
    while hasattr(store, "underlying_store"):  # under its prefixes
        store = store.underlying_store
    target = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # nothing is sent: the kernel only chooses an interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def new_token() -> str:
    return secrets.token_hex(16)


def share(store: Store, rank: int, size: int, key: str, note: str, timeout: timedelta) -> list[str]:
    """Every rank's note, by rank. Blocks until all have left theirs; says who did not come."""
    store.set(f"{key}/{rank}", note)
    keys = [f"{key}/{each}" for each in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [str(each) for each, name in enumerate(keys) if not store.check([name])]
        if not missing:
            raise PeerLost(f"rank {rank} lost the store that the ranks meet at: {str(error).splitlines()[0]}") from None
        who = "rank" if len(missing) == 1 else "ranks"
        raise PeerLost(
            f"rank {rank} of {size} waited {timeout.total_seconds():g} s"
            f" for {who} {', '.join(missing)} to join the group"
        ) from None
    return [bytes(found).decode() for found in store.multi_get(keys)]


def introduce(store: Store, own: Member, size: int, timeout: timedelta) -> list[Member]:
    notes = share(store, own.rank, size, "member", msgspec.json.encode(own).decode(), timeout)
    return [msgspec.json.decode(note, type=Member) for note in notes]


def mates(members: Sequence[Member], rank: int) -> list[Member]:
    """The members on this rank's host, in rank order."""
    return [member for member in members if member.host == members[rank].host]
