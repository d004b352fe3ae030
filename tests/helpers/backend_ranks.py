"""Many checks in one set of real processes: starting them is what costs.

Each check gets a default process group of its own, so that one that fails does not spoil the next; all ranks meet
between two checks. The backend is "shoal"; whoever wants to test these tests runs them on gloo:

    SHOAL_TEST_BACKEND=gloo pytest tests/ranks/test_backend*.py
"""

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

BACKEND = os.environ.get("SHOAL_TEST_BACKEND", "shoal")
PATIENCE = timedelta(seconds=15)  # of a group: a check that fails on one rank costs that long, once
LONGEST_SECONDS = 30.0  # of a check: one that hangs in spite of its group's deadline ends its processes
RANKS_PER_HOST = int(os.environ.get("SHOAL_TEST_RANKS_PER_HOST", 0))  # 0: all ranks on one host
ON_GLOO = BACKEND == "gloo"

Check = Callable[[int, int], None]  # rank, size
Verdicts = dict[str, list[str]]  # name of a check -> what each rank said: "", or a traceback
Played = Callable[[int], Verdicts]  # by number of ranks


class Checks:
    """The checks of a module, by name, each for some numbers of ranks."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}
        self.cases: list[tuple[int, str]] = []

    def __call__(self, *sizes: int, beyond_gloo: bool = False) -> Callable[[Check], Check]:
        """`beyond_gloo`: what the issue asks for and gloo cannot do."""

        def add(check: Check) -> Check:
            name = check.__name__
            assert name not in self.checks, name
            self.checks[name] = check
            if not (ON_GLOO and beyond_gloo):
                self.cases = sorted([*self.cases, *((size, name) for size in sizes)], key=lambda case: case[0])
            return check

        return add


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A set of processes starts when the first of its checks is asked for; it runs what `-k` left over of the rest."""
    checks: Checks = request.module.check
    found: dict[int, Verdicts] = {}

    def verdicts(size: int) -> Verdicts:
        if size not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SHOAL_TEST_FOLDER", str(tmp_path_factory.mktemp("shared")))
                found[size] = play(size, {name: checks.checks[name] for name in _selected(request, size)})
        return found[size]

    return verdicts


def _selected(request: pytest.FixtureRequest, size: int) -> list[str]:
    found = []
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.node.path and parameters.get("size") == size:
            found.append(parameters["name"])
    return found


def play(size: int, checks: dict[str, Check], *, backend: str = BACKEND, deadline: float = 110.0) -> Verdicts:
    """Runs the checks one after another in `size` forked processes; what each rank said of each.

    A check that ends a process, or that hangs, costs the whole set: the rest goes on in new processes.
    """
    if backend == "shoal":
        importlib.import_module("shoal")  # registers it
    until = time.monotonic() + deadline
    verdicts: Verdicts = {}
    rest = dict(checks)
    while rest:
        found, last_words = _play_once(size, rest, backend, until)
        for name in list(rest):
            said = [rank.get(name) for rank in found]
            verdicts[name] = [last if one is None else one for one, last in zip(said, last_words, strict=True)]
            del rest[name]
            if None in said:
                break  # its processes are gone
    return verdicts


def _play_once(
    size: int, checks: dict[str, Check], backend: str, until: float
) -> tuple[list[dict[str, str]], list[str]]:
    """By rank: what was said of each check, and how the process ended."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    children: list[int] = []
    pipes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        stacks = [Path(folder) / str(rank) for rank in range(size)]
        for rank in range(size):
            ours, theirs = os.pipe()
            child = os.fork()
            if child == 0:
                listener.close()
                for pipe in [*pipes, ours]:
                    os.close(pipe)
                _be_rank(rank, size, port, checks, backend, theirs, stacks[rank])
            os.close(theirs)
            pipes.append(ours)
            children.append(child)
        # After the forks: the store has a thread.
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        try:
            said = _listen(pipes, until)
        finally:
            ends = [_end(child) for child in children]
            for pipe in pipes:
                os.close(pipe)
            del store
        words = [path.read_text() if path.exists() else "" for path in stacks]
    return said, [
        f"rank {rank} said nothing and ended with code {code}\n{text}"
        for rank, (code, text) in enumerate(zip(ends, words, strict=True))
    ]


def _be_rank(
    rank: int, size: int, port: int, checks: dict[str, Check], backend: str, answer: int, stacks: Path
) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if RANKS_PER_HOST:
            os.environ["SHOAL_HOST"] = f"host{rank // RANKS_PER_HOST}"
        torch.set_num_threads(1)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")  # torch 2.13 deprecates names that scripts still use
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=2 * PATIENCE)
        with stacks.open("w") as file:
            faulthandler.enable(file)
            for name, check in checks.items():
                faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True, file=file)
                verdict = _one(rank, size, store, name, check, backend)
                os.write(answer, msgspec.json.encode([name, verdict]) + b"\n")
                store.add(f"after {name}", 1)
                while int(store.add(f"after {name}", 0)) < size:  # together again, whatever happened
                    time.sleep(0.002)
            faulthandler.cancel_dump_traceback_later()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _one(rank: int, size: int, store: Store, name: str, check: Check, backend: str) -> str:
    try:
        torch.manual_seed(0)
        own = PrefixStore(name, store)
        if not name.startswith("init_"):  # those make their own groups
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=PATIENCE)
        else:
            globals()["own_store"] = own
        check(rank, size)
        if dist.is_initialized():
            dist.destroy_process_group()
        return ""
    except BaseException:
        said = traceback.format_exc()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:
            said += "\nand then, in destroy_process_group:\n" + traceback.format_exc()
        return said


def _listen(pipes: list[int], deadline: float) -> list[dict[str, str]]:
    """Lines of all ranks until they end or time is up."""
    texts = [b"" for _ in pipes]
    open_ones = set(range(len(pipes)))
    for pipe in pipes:
        os.set_blocking(pipe, False)
    while open_ones and time.monotonic() < deadline:
        for rank in sorted(open_ones):
            try:
                part = os.read(pipes[rank], 1 << 16)
            except BlockingIOError:
                continue
            texts[rank] += part
            if not part:
                open_ones.discard(rank)
        time.sleep(0.002)
    return [dict(msgspec.json.decode(line) for line in text.split(b"\n")[:-1]) for text in texts]


def _end(child: int) -> int:
    try:
        os.kill(child, signal.SIGKILL)  # unreaped, the id is its own
    except ProcessLookupError:
        pass
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def report(verdicts: Verdicts, name: str) -> None:
    """Fails with what each rank said."""
    said = {rank: text for rank, text in enumerate(verdicts[name]) if text}
    if said:
        texts = "\n".join(f"-- rank {rank}\n{text}" for rank, text in said.items())
        pytest.fail(f"{name}: {len(said)} of {len(verdicts[name])} ranks failed\n{texts}", pytrace=False)


# -- for the checks themselves --------------------------------------------------------------------------------------


def same(found: Tensor, expected: Tensor, about: str = "") -> None:
    """Equal in shape, dtype and every value."""
    assert found.dtype == expected.dtype, f"{about}: {found.dtype}, not {expected.dtype}"
    assert found.shape == expected.shape, f"{about}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    if found.dtype == torch.bool:  # gloo's sum of two trues is the byte 2
        found, expected = (each.view(torch.uint8) != 0 for each in (found, expected))
    one, other = (each.detach().resolve_conj().contiguous().reshape(-1) for each in (found, expected))
    if one.numel() and not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        raise AssertionError(f"{about}: {found} is not {expected}")


def close(found: Tensor, expected: Tensor, about: str = "", tolerance: float = 1e-5) -> None:
    assert found.dtype == expected.dtype, f"{about}: {found.dtype}, not {expected.dtype}"
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{about}: {text}"
    )


def own_folder(name: str) -> Path:
    """A folder that all ranks share, under the parent's: made by whoever comes first."""
    folder = Path(os.environ["SHOAL_TEST_FOLDER"]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
