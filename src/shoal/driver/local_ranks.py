"""Runs a function in real processes, one for each rank, with a group; returns the results in one list."""

import ctypes
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor

from shoal.collectives.group import DistributedGroup, WorkerGroup
from shoal.collectives.rendezvous_store import RendezvousStore
from shoal.driver.launchers.fork_server import PR_SET_PDEATHSIG
from shoal.driver.launchers.namespaces import LabHost, call_on, enter
from shoal.errors import InputError, PeerLost, WorkerError
from shoal.numerics.digest import tensor_bytes
from shoal.transport import unix_sockets
from shoal.transport.credentials import Credentials, credentials_from_environment, self_issued
from shoal.transport.identity import Role
from shoal.transport.key_value_server import KeyValueServer, own_user, with_role
from shoal.transport.secret_files import read_shared_secret

GRACE_SECONDS = 10.0  # after a first failure: how long the other ranks may still answer
_TENSOR = 1  # code of a tensor in a message
RankCall = Callable[[WorkerGroup], Any]


class RanksFailed(WorkerError):
    """At least one rank raised, died or did not answer. Carries the results of the others."""

    def __init__(self, message: str, *, results: dict[int, Any], failures: dict[int, str]) -> None:
        super().__init__(message)
        self.results = results
        self.failures = failures


class _RankReply(msgspec.Struct, frozen=True, kw_only=True):
    value: Any = None
    error: str | None = None  # the traceback
    lost_peer: bool = False  # probably a consequence of another rank's failure


def ranks(
    size: int, function: RankCall, *, timeout: float = 60.0, places: Sequence[LabHost] | None = None
) -> list[Any]:
    """Calls `function(group)` in `size` forked processes that connect on loopback; returns their results by rank.

    A result may be None, a number, a string, a tensor, or lists and dicts of these; tuples come back as lists. The
    processes are gone when this returns or raises. With `places` (`lab.places(size)`) each rank runs on that host of a
    lab, and they connect on the first host.
    """
    if size < 1:
        raise InputError(f"{size} ranks: at least 1 is needed")
    if places is not None and len(places) != size:
        raise InputError(f"{size} ranks, but {len(places)} places")
    first = None if places is None else places[0]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else a child writes the buffered text a second time
    folder = Path(tempfile.mkdtemp(prefix="shoal-ranks-"))
    listener, address = _listen(first, folder)
    children: dict[int, int] = {}  # rank -> process id
    pipes: dict[int, int] = {}  # rank -> the read end of its answer
    try:
        for rank in range(size):
            pipes[rank], theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in pipes.values():
                    os.close(pipe)
                listener.close()
                place = None if places is None else places[rank]
                _run_rank(rank, size, address, theirs, function, timeout, place)
            os.close(theirs)
            children[rank] = pid
        # Only now: the server has a thread, which a fork would not copy. Earlier ranks wait in the backlog.
        server = KeyValueServer(listener, own_user if first is None else with_role(_credentials(first), (Role.WORKER,)))
        try:
            found = _collect(pipes, timeout)
        finally:
            server.close()
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        for pipe in pipes.values():
            os.close(pipe)
        codes = {rank: _end(pid) for rank, pid in children.items()}
    return _results(size, found, codes, timeout)


def _listen(first: LabHost | None, folder: Path) -> tuple[socket.socket, str]:
    """Where the ranks meet: a Unix socket, or a port of the first host, where they prove themselves."""
    if first is None:
        path = folder / "ranks.sock"
        return unix_sockets.listen(path, socket.SOCK_STREAM), f"unix:{path}"
    listener = call_on(first, lambda: socket.create_server((first.address, 0), backlog=128))
    return listener, f"tcp://{first.address}:{listener.getsockname()[1]}"


def _credentials(host: LabHost) -> Credentials:
    return self_issued(read_shared_secret(Path(host.secret)), Role.WORKER, f"ranks.{os.getpid()}")


def _run_rank(
    rank: int, size: int, address: str, answer: int, work: RankCall, timeout: float, place: LabHost | None
) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)  # the parent's OpenMP threads do not survive the fork
        try:
            if place is not None:
                enter(place)
                os.environ.update(place.variables)
            credentials = None if place is None else credentials_from_environment()
            store = RendezvousStore(address, timedelta(seconds=timeout), credentials)
            group = DistributedGroup(store, rank=rank, size=size, timeout=timedelta(seconds=timeout))
            value = work(group)
            message = _encode(_RankReply(value=value))
            group.close()
        except BaseException as error:
            message = _encode(_RankReply(error=traceback.format_exc(), lost_peer=isinstance(error, PeerLost)))
        sys.stdout.flush()
        sys.stderr.flush()
        with open(answer, "wb") as pipe:
            pipe.write(message)  # last: the parent may end this process as soon as it has the answer
        code = 0
    finally:
        os._exit(code)


def _collect(pipes: dict[int, int], timeout: float) -> dict[int, _RankReply | None]:
    """The answers until the deadline; None from a rank that ended without one."""
    deadline = time.monotonic() + timeout
    found: dict[int, _RankReply | None] = {}
    chunks: dict[int, list[bytes]] = {rank: [] for rank in pipes}
    with selectors.DefaultSelector() as selector:
        for rank, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, rank)
        while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 20)
                if chunk:
                    chunks[key.data].append(chunk)
                    continue
                selector.unregister(key.fd)
                message = b"".join(chunks[key.data])
                answer = found[key.data] = _decode(message) if message else None
                if answer is None or answer.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return found


def _results(size: int, found: dict[int, _RankReply | None], codes: dict[int, int], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    for rank in range(size):
        answer = found.get(rank)
        if rank not in found:
            failures[rank] = f"rank {rank} did not answer within {timeout:g} s and was killed"
        elif answer is None:
            failures[rank] = f"rank {rank} ended with code {codes[rank]} before it answered"
        elif answer.error is not None:
            failures[rank] = f"rank {rank} raised\n{answer.error}"
        else:
            results[rank] = answer.value
    if failures:
        # A rank that lost a peer, or was still waiting for one, is seldom the cause.
        def blame(rank: int) -> tuple[bool, bool, int]:
            answer = found.get(rank)
            return answer is not None and answer.lost_peer, rank not in found, rank

        raise RanksFailed(failures[min(failures, key=blame)], results=results, failures=failures)
    return [results[rank] for rank in range(size)]


def _end(pid: int) -> int:
    with suppress(ProcessLookupError):
        # A rank that has answered is about to end; others had their time. Unreaped, the id is still its own.
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _encode(answer: _RankReply) -> bytes:
    def tensor(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Tensor):
            raise TypeError(f"a rank returned {type(value).__qualname__}; it can return numbers, strings and tensors")
        kind = str(value.dtype).removeprefix("torch.")
        raw = bytes(tensor_bytes(value))
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((kind, list(value.shape), raw)))

    return msgspec.msgpack.encode(answer, enc_hook=tensor)


def _decode(message: bytes) -> _RankReply:
    def tensor(code: int, data: memoryview) -> Tensor:
        kind, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
        dtype = getattr(torch, kind)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype).reshape(shape)

    return msgspec.msgpack.decode(message, type=_RankReply, ext_hook=tensor)
