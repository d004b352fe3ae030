"""The watch that every test stands under: what needs no process."""

import os
import socket
import threading
from importlib import import_module
from pathlib import Path

import pytest

from shoal.testing.leftovers import leftovers

watch = import_module("shoal.testing.leftovers")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is told without waiting for its end."""
    monkeypatch.setattr(watch, "SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_that_is_listened_on(family: socket.AddressFamily, address: str) -> None:
    try:
        before = socket.create_server((address, 0), family=family)  # not of the block
    except OSError:
        pytest.skip(f"there is no {address} here")
    with before:
        with leftovers() as left:
            server = socket.create_server((address, 0), family=family)
            client = socket.create_connection(server.getsockname()[:2])  # which nobody listens on
            datagrams = socket.socket(family, socket.SOCK_DGRAM)
            datagrams.bind((address, 0))
        port = server.getsockname()[1]
        for each in (server, client, datagrams):
            each.close()  # the watch has not closed them
    assert left == [f"port {port} is still listened on"]


@pytest.mark.usefixtures("at_once")
def test_a_thread_and_shared_memory() -> None:
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait, name="waiting")
    memory = Path(f"/dev/shm/shoal-leftovers-{os.getpid()}")
    with leftovers() as left:
        thread.start()
        memory.touch()
    goes_on.set()
    thread.join()
    memory.unlink()
    assert left == ["thread waiting still runs", f"{memory} is still there"]
