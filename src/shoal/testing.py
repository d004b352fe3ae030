"""For tests, ours and yours: real processes as ranks, tiny models with their data, and a watch for what is left behind.

ranks(2, lambda group: group.gather(torch.tensor([group.rank])))    one result per rank
report = shoal.train(job_for(everything), workers=2, quiet=True)
with leftovers() as left: ...                                      left: what was not there before
"""

import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from shoal.collectives.group import GlooGroup, Group, PeerLost
from shoal.engines.local import PR_SET_PDEATHSIG
from shoal.errors import InputError, WorkerError
from shoal.exact.digest import tensor_bytes
from shoal.job import Job

# -- ranks as processes ---------------------------------------------------------------------------------------------

GRACE_SECONDS = 10.0  # after a first failure: how long the other ranks may still answer
_TENSOR = 1  # code of a tensor in a message


class RanksFailed(WorkerError):
    """At least one rank raised, died or did not answer. Carries what the others returned."""

    def __init__(self, message: str, *, results: dict[int, Any], failures: dict[int, str]) -> None:
        super().__init__(message)
        self.results = results
        self.failures = failures


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    value: Any = None
    error: str | None = None  # the traceback
    lost_peer: bool = False  # a consequence of somebody else's failure, most likely


def ranks(size: int, function: Callable[[Group], Any], *, timeout: float = 60.0) -> list[Any]:
    """Calls `function(group)` in that many forked processes that meet on loopback; returns their results by rank.

    A result may be None, a number, a string, a tensor, or lists and dicts of these; tuples come back as lists. The
    processes are gone when this returns, however it returns.
    """
    if size < 1:
        raise InputError(f"{size} ranks: at least 1 is needed")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else a child would write what is still in the buffer a second time
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, size))
    port = listener.getsockname()[1]
    children: dict[int, int] = {}  # rank -> process id
    pipes: dict[int, int] = {}  # rank -> where its answer comes out
    try:
        for rank in range(size):
            pipes[rank], theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in pipes.values():
                    os.close(pipe)
                listener.close()
                _be_rank(rank, size, port, theirs, function, timeout)
            os.close(theirs)
            children[rank] = pid
        # Only now: the store has a thread, which a fork would not copy. Ranks that came first wait in the backlog.
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        try:
            found = _collect(pipes, timeout)
        finally:
            del store
    finally:
        listener.close()
        for pipe in pipes.values():
            os.close(pipe)
        codes = {rank: _end(pid) for rank, pid in children.items()}
    return _results(size, found, codes, timeout)


def _be_rank(
    rank: int, size: int, port: int, answer: int, function: Callable[[Group], Any], timeout: float
) -> NoReturn:
    """The whole life of a forked rank."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)  # the parent's OpenMP threads did not survive the fork; with one, none is asked for
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
            group = GlooGroup(store, rank=rank, size=size, timeout=timedelta(seconds=timeout))
            value = function(group)
            message = _encode(_Answer(value=value))
            group.close()
        except BaseException as error:
            message = _encode(_Answer(error=traceback.format_exc(), lost_peer=isinstance(error, PeerLost)))
        sys.stdout.flush()
        sys.stderr.flush()
        with open(answer, "wb") as pipe:
            pipe.write(message)  # the last word: the parent may end this process as soon as it has it
        code = 0
    finally:
        os._exit(code)


def _collect(pipes: dict[int, int], timeout: float) -> dict[int, _Answer | None]:
    """What each rank answered until the deadline; None from one that ended without a word."""
    deadline = time.monotonic() + timeout
    found: dict[int, _Answer | None] = {}
    parts: dict[int, list[bytes]] = {rank: [] for rank in pipes}
    with selectors.DefaultSelector() as selector:
        for rank, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, rank)
        while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                part = os.read(key.fd, 1 << 20)
                if part:
                    parts[key.data].append(part)
                    continue
                selector.unregister(key.fd)
                message = b"".join(parts[key.data])
                answer = found[key.data] = _decode(message) if message else None
                if answer is None or answer.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return found


def _results(size: int, found: dict[int, _Answer | None], codes: dict[int, int], timeout: float) -> list[Any]:
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
        # Who lost a peer, or was still waiting for one, is seldom the cause.
        def blame(rank: int) -> tuple[bool, bool, int]:
            answer = found.get(rank)
            return answer is not None and answer.lost_peer, rank not in found, rank

        raise RanksFailed(failures[min(failures, key=blame)], results=results, failures=failures)
    return [results[rank] for rank in range(size)]


def _end(pid: int) -> int:
    with suppress(ProcessLookupError):
        # Whoever has answered was about to leave, whoever has not has had its time. Unreaped, the id is its own.
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _encode(answer: _Answer) -> bytes:
    def tensor(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Tensor):
            raise TypeError(f"a rank returned {type(value).__qualname__}; it can return numbers, strings and tensors")
        kind = str(value.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(
            _TENSOR, msgspec.msgpack.encode((kind, list(value.shape), bytes(tensor_bytes(value))))
        )

    return msgspec.msgpack.encode(answer, enc_hook=tensor)


def _decode(message: bytes) -> _Answer:
    def tensor(code: int, data: memoryview) -> Tensor:
        kind, shape, raw = msgspec.msgpack.decode(data, type=tuple[str, list[int], bytes])
        dtype = getattr(torch, kind)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(dtype).reshape(shape)

    return msgspec.msgpack.decode(message, type=_Answer, ext_hook=tensor)


# -- what is left behind --------------------------------------------------------------------------------------------

SETTLE_SECONDS = 2.0  # how long something that is already ending may take
MEMORY_NAMES = ("shoal", "torch_", "psm_", "sem.")  # ours, torch's, Python's; others on this machine use /dev/shm too


@contextmanager
def leftovers() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, a line for each thing that the block began and did not end:
    processes (also orphans), threads that keep the interpreter from ending, listening ports, shared memory."""
    left: list[str] = []
    before = _held()
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    yield left
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left[:] = [text for key, text in _held(began).items() if key not in before]
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _held(orphans_since: float | None = None) -> dict[tuple[str, Any], str]:
    held: dict[tuple[str, Any], str] = {}
    table = _processes()
    mine = _descendants(table, os.getpid())
    if orphans_since is not None:
        mine |= _orphans(table, orphans_since)
    for pid in mine:
        one = table[pid]
        state = "ended, but nobody waited for it" if one.state == "Z" else "still runs"
        held["process", (pid, one.started)] = f"process {pid} ({one.name}) {state}"
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            held["thread", thread.ident] = f"thread {thread.name} still runs"
    for inode, address in _listening().items():
        held["port", inode] = f"{address} is still listened on"
    for name in _shared_memory(table, mine):
        held["memory", name] = f"/dev/shm/{name} is still there"
    return held


@dataclass(frozen=True, kw_only=True)
class _Process:
    name: str
    state: str
    parent: int
    session: int
    started: float  # seconds since boot


def _processes() -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(") ")
                fields = rest.split()
                found[int(entry.name)] = _Process(
                    name=name,
                    state=fields[0],
                    parent=int(fields[1]),
                    session=int(fields[3]),
                    started=int(fields[19]) / ticks,
                )
    return found


def _descendants(table: dict[int, _Process], root: int) -> set[int]:
    found: set[int] = set()
    while more := {pid for pid, one in table.items() if one.parent in found | {root}} - found:
        found |= more
    return found


def _orphans(table: dict[int, _Process], since: float) -> set[int]:
    """Processes of our session whose parent is of another one: their own parent died before them."""
    session = os.getsid(0)
    return {
        pid
        for pid, one in table.items()
        if one.session == session
        and pid != session
        and one.state != "Z"
        and one.started >= since - 0.02  # the kernel counts in hundredths
        and one.parent in table
        and table[one.parent].session != session
    }


def _listening() -> dict[str, str]:
    """The TCP ports that this process listens on, by the socket's inode."""
    own: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                own.add(target[len("socket:[") : -1])
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (Path("/proc/self/net") / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in own:
                    found[fields[9]] = f"port {int(fields[1].rpartition(':')[2], 16)}"
    return found


def _shared_memory(table: dict[int, _Process], mine: set[int]) -> set[str]:
    """Entries of /dev/shm that may be ours, without those that a process which is not ours has mapped."""
    try:
        names = {name for name in os.listdir("/dev/shm") if name.startswith(MEMORY_NAMES)}
    except OSError:
        return set()
    for pid in table if names else ():
        if pid != os.getpid() and pid not in mine:
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                names -= {name for name in names if f"/dev/shm/{name}" in maps}
    return names


# -- tiny models ------------------------------------------------------------------------------------------------------

CLASSES, WORDS, LENGTH, WIDTH = 5, 13, 6, 8


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(6 * 3 * 3, CLASSES),
    )


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 24), nn.Dropout(0.4), nn.Linear(24, CLASSES)
    )


def batch_norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, CLASSES),
    )


class _Attending(nn.Module):
    """One pre-norm layer of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.between = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        widened: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + widened


class _Averaged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def attention() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), _Attending(0.0), _Attending(0.0), _Averaged(), nn.Linear(WIDTH, CLASSES)
    )


class _TiedLanguageModel(nn.Module):
    """Predicts each next word with the same table that it reads words with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([_Attending(0.1), _Attending(0.1)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def tied_language_model() -> nn.Module:
    return _TiedLanguageModel()


class _Everything(nn.Module):
    """Describes a picture: what the picture shows is added to every word, then the next word is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 6 * 6, WIDTH)
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = _Attending(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, pictures: Tensor, words: Tensor) -> Tensor:
        x = self.words(words) + self.picture(pictures).unsqueeze(1)
        out: Tensor = self.head(self.layer(x))
        return out


def everything() -> nn.Module:
    return _Everything()


def samples_for(build: Callable[[], nn.Module], count: int = 56) -> tuple[Tensor, ...]:
    """Random samples that fit a tiny model: its inputs, then the target."""
    generator = torch.Generator().manual_seed(count)
    pictures = torch.randn(count, 1, 8, 8, generator=generator)
    rows = torch.randn(count, WIDTH, generator=generator)
    words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    next_words = torch.randint(WORDS, (count, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    forms = {
        convolution: (pictures, labels),
        attention: (words, labels),
        dropout_net: (rows, labels),
        batch_norm_net: (pictures, labels),
        tied_language_model: (words, next_words),
        everything: (pictures, words, next_words),
    }
    if build not in forms:
        known = ", ".join(form.__name__ for form in forms)
        raise InputError(f"no samples for {getattr(build, '__name__', build)}; there are some for {known}")
    return forms[build]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """A loss for every tiny model: one label a sample, or one a word."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def job_for(build: Callable[[], nn.Module], **changes: Any) -> Job:
    """A job that trains a tiny model for two passes, the last batch of each a short one."""
    fields: dict[str, Any] = {
        "model": build,
        "loss": cross_entropy,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "batch": 16,
        "epochs": 2,
    }
    if "data" not in changes:
        fields["data"] = samples_for(build)
    return Job(**fields | changes)
