"""Certificates and clocks that do not fit in a whole run across hosts, and strangers at its store: one plain line where
a process cannot take part, and nothing at all for the others where a stranger calls."""

import socket
import ssl
import time

import pytest

from helpers.lab_run import LabRun, needs_lab, sha256_of, undisturbed
from shoal.driver.launchers.namespaces import inside
from shoal.recovery.membership.sqlite_messages import StoreServerInfo, read_server_info
from shoal.transport.authority import RunAuthority
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.worker.start import WorkerProgram, WorkerStartup

pytestmark = needs_lab
HOUR = 3600.0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def ends_plainly(*arguments: str) -> str:
    """The line of a run whose worker 1 cannot take part."""
    with LabRun(*arguments) as run:
        found = run.end()
    assert found.code == 2 and "Traceback" not in found.err, found.err
    (said,) = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert [each["rank"] for each in run.events("worker-failed")] == [1]
    return said


@pytest.mark.parametrize("arguments", [(), ("--servers", "1", "--sync", "sync")], ids=["collectives", "servers"])
def test_an_expired_certificate_ends_the_run_with_both_times(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = RunAuthority.issue

    def issue(authority: RunAuthority, role: Role, name: str, now: float | None = None) -> Credentials:
        old = role is Role.WORKER and name.startswith("1.")
        return usual(authority, role, name, time.time() - 500 * 24 * HOUR if old else now)

    monkeypatch.setattr(RunAuthority, "issue", issue)
    said = ends_plainly(*arguments)
    assert "the certificate of worker 1.0 of run run expired at 20" in said
    assert "UTC, and here (host r0h1) it is 20" in said


def test_a_clock_that_is_hours_behind_ends_the_run_with_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, clock = WorkerProgram.main, time.time

    def late(program: WorkerProgram, startup: WorkerStartup) -> int:
        if startup.rank == 1:
            time.time = lambda: clock() - 3 * HOUR  # in the process of that worker alone
        return usual(program, startup)

    monkeypatch.setattr(WorkerProgram, "main", late)
    said = ends_plainly()
    assert "clocks differ: here (host r0h1) it is 20" in said
    assert (
        "the certificate of worker 1.0 of run run was made at 20" in said and "by the clock of the run's driver" in said
    )


def answer_to_stranger(serving: StoreServerInfo, context: ssl.SSLContext | None) -> bytes:
    connection = socket.create_connection((serving.address, serving.port), timeout=10)
    try:
        connection = connection if context is None else context.wrap_socket(connection)
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return connection.recv(100)
    except OSError:  # it is refused in the handshake, or afterwards
        return b""
    finally:
        connection.close()


def test_strangers_at_the_store_of_a_run_change_nothing(alone: str) -> None:
    """Plaintext, TLS without a certificate, a certificate of another run with this one's name."""
    foreign = RunAuthority.new("run").issue(Role.ADMIN, "eve")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with LabRun() as run:
        run.train_to(5)
        serving = read_server_info(run.folder)
        assert serving is not None
        with inside(f"/proc/{serving.pid}/ns/net"):
            for context in (None, bare, foreign.context(False)):
                assert answer_to_stranger(serving, context) == b""
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    assert not run.events("worker-lost") and not run.events("store-outage")
