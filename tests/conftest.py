"""What holds for every test: a folder of its own to work in, and nothing left behind when it ends."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from helpers.command import Caller
from helpers.etcd import etcd_server, free_ports
from shoal.numerics import seeds
from shoal.testing import leftovers

torch.set_num_threads(1)  # before anything forks: the threads of a larger pool would not survive it
os.environ["SHOAL_PREDICT"] = "off"  # a quarter of a second for each of hundreds of runs; what is about it says on

# No time limits, the same examples in every run, and no folder of examples in the repository.
hypothesis.settings.register_profile("shoal", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shoal")

# What torch's compiler sets once in a process and keeps.
KEPT_BY_TORCH = ("TORCH", "TRITON", "KINETO")


def pytest_configure(config: pytest.Config) -> None:
    # A caller such as `nohup`, or a shell that starts a job in the background, ignores signals; children inherit that.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    config.addinivalue_line("markers", "slow: takes more than 20 seconds on two cores")
    config.addinivalue_line("markers", "clean_heap: measures memory of forks, so it comes first")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a fork takes is measured before other tests have left holes in the heap that it inherits."""
    items.sort(key=lambda item: item.get_closest_marker("clean_heap") is None)


def pytest_collection_finish() -> None:
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_after() -> Iterator[None]:
    yield
    _freeze()


def _freeze() -> None:
    """Takes what is there, all modules above all, out of the sight of the collector. It walked through it again and
    again, here and in each of thousands of forks, where each page that it wrote to was copied."""
    gc.collect()
    gc.freeze()


# Not `monkeypatch`: this fixture must be the first that is made, so that it looks when all others have been undone.
@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fails a test that leaves a process, thread, port, shared memory or environment variable; works in `tmp_path`."""
    folder, environment = Path.cwd(), dict(os.environ)
    kernels = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    os.chdir(tmp_path)
    try:
        with leftovers() as left:
            yield
    finally:
        os.chdir(folder)
        torch.set_num_threads(kernels[0])
        if torch.are_deterministic_algorithms_enabled() != kernels[1]:
            torch.use_deterministic_algorithms(kernels[1])
    changed = [
        f"environment variable {name} was changed"
        for name in sorted(environment.keys() ^ os.environ.keys())
        if not name.startswith(KEPT_BY_TORCH)
    ]
    assert not left + changed, "the test left something behind"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """The command in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # a job file may import its neighbours
    return Caller(capsys)


@pytest.fixture
def generators_stay() -> Iterator[None]:
    """Random numbers begin with the same seed, and go on afterwards as if there had been no test."""
    with seeds.preserve_generators():
        torch.manual_seed(0)
        yield


@pytest.fixture
def etcd_port(tmp_path: Path) -> Iterator[int]:
    port, peers = free_ports(2)
    with etcd_server(tmp_path / "etcd", port, peers):
        yield port
