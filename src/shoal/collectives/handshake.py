"""The members of a group and their hosts: each member writes a note to the store and reads the others'."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.collectives.options import CommOptions
from shoal.errors import InputError, PeerLost
from shoal.transport.decoding import decode_json

POLL_SECONDS = 0.005  # between two checks for the other members and for a reason to stop waiting
_abort_reason: ContextVar[Callable[[], str] | None] = ContextVar("abort_reason", default=None)


@contextmanager
def abort_wait_if(abort_reason: Callable[[], str]) -> Iterator[None]:
    """A group made in this block stops waiting for its members once `abort_reason` returns a reason (not empty)."""
    token = _abort_reason.set(abort_reason)
    try:
        yield
    finally:
        _abort_reason.reset(token)


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str  # identity of the host: members with the same one can share memory
    name: str  # of the host, for messages
    rack: str
    address: str
    pid: int
    descriptor: int  # of this member's shared memory, or -1
    token: str  # a secret at the start of that memory: a reader recognizes the memory by it
    num_bytes: int = 0
    no_memory_reason: str = ""  # why this member has no shared memory
    secured: bool = False  # it has credentials
    options: CommOptions = CommOptions()
    error: str = ""  # why this rank cannot join

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name}"


def host_identity() -> str:
    """Equal for processes that can share memory. Hosts of a lab differ by network namespace, machines by boot id."""
    named = os.environ.get("SHOAL_HOST", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        boot = network = ""
    return f"{boot}/{network}/{socket.gethostname()}/{named}"


def own_address(store: Any) -> str:
    """The address under which other hosts reach this one: SHOAL_ADDRESS, or that of the interface to the store."""
    named = os.environ.get("SHOAL_ADDRESS")
    if named:
        return named
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    target = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing: the kernel only chooses an interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def new_token() -> str:
    return secrets.token_hex(16)


def fresh_store(store: Store, rank: int) -> Store:
    """A part of the store for this group alone: a store may outlive a group, so each rank counts its groups."""
    try:
        return PrefixStore(f"round {store.add(f'rounds/{rank}', 1)}/", store)
    except RuntimeError as error:
        raise _store_unreachable(rank, error) from None


def _store_unreachable(rank: int, error: Exception) -> PeerLost:
    return PeerLost(f"rank {rank} lost the store of the group: {str(error).splitlines()[0]}")


def exchange_notes(store: Store, rank: int, size: int, key: str, note: str, timeout: timedelta) -> list[str]:
    """Returns every rank's note, by rank. Blocks until all ranks have written theirs; the error names the missing."""
    keys = [f"{key}/{each}" for each in range(size)]
    try:
        store.set(keys[rank], note)
        try:
            _wait(store, keys, timeout)
        except PeerLost as error:
            if rank == 0:
                error.missing = _missing(store, keys)
            raise
        except (RuntimeError, TimeoutError):
            missing = _missing(store, keys)
            if not missing:
                raise
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            waited = f"rank {rank} of {size} waited {timeout.total_seconds():g} s"
            lost = PeerLost(f"{waited} for {ranks} to join the group")
            if rank == 0:
                lost.missing = missing
            raise lost from None
        return [bytes(found).decode(errors="replace") for found in store.multi_get(keys)]
    except PeerLost:
        raise
    except RuntimeError as error:
        raise _store_unreachable(rank, error) from None


def _missing(store: Store, keys: list[str]) -> tuple[int, ...]:
    return tuple(rank for rank, name in enumerate(keys) if not store.check([name]))


def _wait(store: Store, keys: list[str], timeout: timedelta) -> None:
    abort_reason = _abort_reason.get()
    if abort_reason is None:
        store.wait(keys, timeout)
        return
    until = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        reason = abort_reason()
        if reason:
            raise PeerLost(reason)
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(POLL_SECONDS)


def exchange_members(store: Store, own: GroupMember, size: int, timeout: timedelta) -> list[GroupMember]:
    """Returns all members. Raises on all ranks if one member cannot join, with its error."""
    notes = exchange_notes(store, own.rank, size, "member", msgspec.json.encode(own).decode(), timeout)
    members = [_read_member(note, rank, own) for rank, note in enumerate(notes)]
    for member in members:
        if member.error and not own.error:
            raise InputError(f"{member} cannot join the group: {member.error}")
    return members


def _read_member(note: str, rank: int, own: GroupMember) -> GroupMember:
    try:
        found = decode_json(note.encode(), GroupMember)
        bytes.fromhex(found.token)
        if found.rank == rank:
            return found
    except (msgspec.DecodeError, ValueError):
        pass
    raise PeerLost(f"{own} found a note of rank {rank} in the group's store that no rank writes: a stranger's, perhaps")


def relayed_error(member: GroupMember, text: str) -> str:
    """The error of a failed rank as another rank reports it."""
    return text if " gave up: " in text or text.startswith(str(member)) else f"{member} gave up: {text}"


def left_midway_error(member: GroupMember, doing: str, error: BaseException) -> PeerLost:
    """The error that the other ranks get when this one leaves a collective midway."""
    return PeerLost(f"{member} broke off {doing}: {type(error).__name__}{f': {error}' if str(error) else ''}")
