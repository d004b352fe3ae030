"""An etcd of our own for a test, if there is one to start."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def etcd_server(place: Path, port: int, peers: int) -> Iterator[subprocess.Popen[bytes]]:
    found = shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.prefix) / "etcd"))
    if found is None:
        pytest.skip("there is no etcd on the path, and `make test` could not fetch Debian's etcd-server with apt-get")
    ours, theirs = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    command = [found, "--data-dir", str(place), "--listen-client-urls", ours, "--advertise-client-urls", ours]
    command += ["--listen-peer-urls", theirs, "--initial-advertise-peer-urls", theirs]
    command += ["--initial-cluster", f"default={theirs}"]
    # It is alone, so it need not wait long for others before it leads; and it grants leases of a second.
    command += ["--heartbeat-interval", "20", "--election-timeout", "100"]
    with open(place.with_suffix(".log"), "ab") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: server.poll() is not None or healthy(port), seconds=60)
        assert server.poll() is None, place.with_suffix(".log").read_text()[-2000:]
        yield server
    finally:
        server.kill()
        server.wait()


def healthy(port: int) -> bool:
    with suppress(OSError, http.client.HTTPException, ValueError):
        return bool(json.loads(post(port, "/health", method="GET"))["health"] == "true")
    return False


def post(port: int, path: str, body: object = None, token: str = "", method: str = "POST") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, json.dumps(body), {"Authorization": token} if token else {})
        return connection.getresponse().read()
    finally:
        connection.close()


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(true: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
