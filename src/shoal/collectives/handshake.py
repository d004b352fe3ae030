"""Who belongs to a group and where: each member leaves a note at the store, and reads the others'."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.collectives.options import CommOptions
from shoal.errors import InputError, PeerLost

POLL_SECONDS = 0.005  # between two looks whether the others have come, where there may be a reason not to wait on
_abort_reason: ContextVar[Callable[[], str] | None] = ContextVar("in_vain", default=None)


@contextmanager
def abort_wait_if(abort_reason: Callable[[], str]) -> Iterator[None]:
    """A group that is made in this block waits for its members only as long as there is no reason (empty) not to."""
    token = _abort_reason.set(abort_reason)
    try:
        yield
    finally:
        _abort_reason.reset(token)


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str  # where memory can be shared: machine, network and name together
    name: str  # of the host, for people
    rack: str
    address: str
    pid: int
    descriptor: int  # of this member's shared memory, -1 where it has none
    token: str  # a secret at the start of that memory: shows that it is the right one
    num_bytes: int = 0
    no_memory_reason: str = ""  # why there is no shared memory
    options: CommOptions = CommOptions()
    error: str = ""  # why this rank cannot take part

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


def store_host(store: Any) -> str | None:
    """The host of the store, where it has one."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None)


def fresh_store(store: Store, rank: int) -> Store:
    """A store may outlive a group, and serve the same ranks again: they count how often, each for itself."""
    try:
        return PrefixStore(f"round {store.add(f'rounds/{rank}', 1)}/", store)
    except RuntimeError as error:
        raise _store_unreachable(rank, error) from None


def _store_unreachable(rank: int, error: Exception) -> PeerLost:
    return PeerLost(f"rank {rank} lost the store that the ranks meet at: {str(error).splitlines()[0]}")


def exchange_notes(store: Store, rank: int, size: int, key: str, note: str, timeout: timedelta) -> list[str]:
    """Every rank's note, by rank. Blocks until all have left theirs; says who did not come."""
    keys = [f"{key}/{each}" for each in range(size)]
    try:
        store.set(keys[rank], note)
        try:
            _wait(store, keys, timeout)
        except PeerLost:
            raise
        except (RuntimeError, TimeoutError):
            missing = [str(each) for each, name in enumerate(keys) if not store.check([name])]
            if not missing:
                raise
            who = "rank" if len(missing) == 1 else "ranks"
            raise PeerLost(
                f"rank {rank} of {size} waited {timeout.total_seconds():g} s"
                f" for {who} {', '.join(missing)} to join the group"
            ) from None
        return [bytes(found).decode() for found in store.multi_get(keys)]
    except PeerLost:
        raise
    except RuntimeError as error:
        raise _store_unreachable(rank, error) from None


def _wait(store: Store, keys: list[str], timeout: timedelta) -> None:
    in_vain = _abort_reason.get()
    if in_vain is None:
        store.wait(keys, timeout)
        return
    until = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        reason = in_vain()
        if reason:
            raise PeerLost(reason)
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(POLL_SECONDS)


def exchange_members(store: Store, own: GroupMember, size: int, timeout: timedelta) -> list[GroupMember]:
    """All members. One that cannot take part is not waited for: all others hear why."""
    notes = exchange_notes(store, own.rank, size, "member", msgspec.json.encode(own).decode(), timeout)
    members = [msgspec.json.decode(note, type=GroupMember) for note in notes]
    for member in members:
        if member.error and not own.error:
            raise InputError(f"{member} cannot join the group: {member.error}")
    return members


def relayed_error(member: GroupMember, text: str) -> str:
    """What a rank said when it gave up, in the words of one who heard it."""
    return text if " gave up: " in text or text.startswith(str(member)) else f"{member} gave up: {text}"


def left_midway_error(member: GroupMember, doing: str, error: BaseException) -> PeerLost:
    """For the others: a rank left a collective in the middle, for a reason of its own."""
    told = f": {error}" if str(error) else ""
    return PeerLost(f"{member} broke off {doing}: {type(error).__name__}{told}")


def host_members(members: Sequence[GroupMember], rank: int) -> list[GroupMember]:
    """The members on this rank's host, in rank order."""
    return [member for member in members if member.host == members[rank].host]
