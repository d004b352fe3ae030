"""Ranks that are started by hand or by torchrun, and MASTER_ADDR and MASTER_PORT that do not fit: one plain line, with
both ends and what to type."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from helpers.etcd import free_ports
from shoal.errors import InputError
from shoal.worker.torchrun_store import read_place

LOOP = """\
import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(32, 6), torch.randint(3, (32,))
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = shoal.join(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=8), run_dir="run")
for epoch in run.epochs(1):
    for batch in run.batches():
        run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
        optimizer.zero_grad()
"""


@contextmanager
def rank(number: int, port: int, address: str = "127.0.0.1") -> Iterator[subprocess.Popen[str]]:
    """One of two."""
    Path("loop.py").write_text(LOOP)
    variables = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "loop.py"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def words_of(process: subprocess.Popen[str]) -> str:
    """What a rank that cannot begin says: nothing is wrong with its script, and nothing was written."""
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait() == 1 and "Traceback" not in said, said
    assert said.startswith("error: ") and said.count("\n") == 2 and "\n  fix: " in said, said
    assert not Path("run").exists()
    return said


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with rank(0, port) as process:
            said = words_of(process)
    assert (
        f"rank 0 on {socket.gethostname()} cannot hold the store of this run at 127.0.0.1:{port} (MASTER_ADDR" in said
    )
    assert "the port is taken" in said and f"ss -ltnp 'sport = :{port}'" in said


def test_another_program_at_the_port_of_the_first_rank() -> None:
    def close_all(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=close_all, args=(other,))
        thread.start()
        port = other.getsockname()[1]
        with rank(1, port) as process:
            said = words_of(process)
        other.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert f"looks for the store of rank 0 at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT), and another program" in said


@pytest.mark.parametrize("number", [0, 1])
def test_a_name_that_no_host_has(number: int) -> None:
    with rank(number, 7777, "no-such-host.invalid") as process:
        said = words_of(process)
    assert (
        f"rank {number} on {socket.gethostname()} does not find the host 'no-such-host.invalid' (MASTER_ADDR)" in said
    )
    assert "torchrun --master-addr" in said


def test_a_rank_that_waits_says_for_whom_and_goes_on_when_it_comes() -> None:
    (port,) = free_ports(1)
    with rank(1, port) as second:
        assert second.stderr is not None
        line = second.stderr.readline()
        assert f"rank 1 on {socket.gethostname()} waits for rank 0 at 127.0.0.1:{port}" in line, line
        assert line.endswith("Connection refused\n")
        with rank(0, port) as first:
            _, shown = first.communicate()
            assert first.returncode == 0, shown
        _, shown = second.communicate()
        assert second.returncode == 0, shown


def test_a_first_rank_that_waits_names_who_is_missing_and_ends_by_sigterm() -> None:
    (port,) = free_ports(1)
    with rank(0, port) as first:
        assert first.stderr is not None
        line = first.stderr.readline()
        assert line.endswith(f"waits at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) for rank 1 of 2\n"), line
        first.send_signal(signal.SIGTERM)
        assert first.wait() == -signal.SIGTERM
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'; it has to be a number from 1 to 65535"),
        ("MASTER_PORT", "70000", "MASTER_PORT is '70000'; it has to be a number from 1 to 65535"),
        ("MASTER_PORT", "", "MASTER_PORT is not set"),
        ("MASTER_ADDR", "", "MASTER_ADDR is not set, and rank 1 of 2 looks there for the others"),
        ("RANK", "2", "RANK is '2'; it has to be a number from 0 to 1"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'; it has to be a number from 1 to"),
    ],
)
def test_variables_that_are_no_numbers(name: str, value: str, said: str) -> None:
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7777"}
    assert read_place(usual).rank == 1
    with pytest.raises(InputError) as caught:
        read_place(usual | {name: value})
    assert caught.value.message.startswith(said)
