"""Who is at the other end: certificates of a run, and what is said of those that do not fit."""

import os
import ssl
import stat
import time
from pathlib import Path

import pytest

from helpers.tls_pairs import meet, raw_pair, shake, tls_pair
from shoal.errors import InputError
from shoal.transport import credentials as credentials_module
from shoal.transport.authority import AUTHORITY, REVOKED, RunAuthority
from shoal.transport.credentials import Credentials, credentials_from_environment, tls_error_text
from shoal.transport.identity import PeerIdentity, PeerRefused, Role

SECRET = "a secret of thirty-two characters or more"


@pytest.fixture
def authority() -> RunAuthority:
    return RunAuthority.new("7f3a")


def test_both_ends_name_each_other(authority: RunAuthority) -> None:
    worker, server = authority.issue(Role.WORKER, "0.1"), authority.issue(Role.SERVER, "shard 0/ü")
    met = meet(worker, server)
    assert met.client == PeerIdentity("7f3a", Role.SERVER, "shard 0/ü", server.serial) == server.identity
    assert met.server == worker.identity


def test_the_connection_is_tls_1_3_without_tickets(authority: RunAuthority) -> None:
    with tls_pair(authority.issue(Role.WORKER, "0"), authority.issue(Role.WORKER, "1")) as (near, far):
        assert shake(near, far) == [None, None]
        assert near.version() == far.version() == "TLSv1.3"
        assert near.session is None or not near.session.has_ticket
        near.send(b"hello")
        assert far.recv(100) == b"hello"


def test_a_foreign_certificate_is_refused_at_both_ends(authority: RunAuthority) -> None:
    """Another run of the same name: the authority counts, not what a certificate calls itself."""
    own, foreign = authority.issue(Role.WORKER, "0"), RunAuthority.new("7f3a").issue(Role.WORKER, "1")
    for client, server in ((own, foreign), (foreign, own)):
        met = meet(client, server)
        assert isinstance(met.client, ssl.SSLError) and isinstance(met.server, ssl.SSLError)
        text = tls_error_text(met.client, client, "10.0.0.2:4000")
        assert text.startswith("10.0.0.2:4000 and worker ") and "of run 7f3a" in text
        assert "another run, or another secret" in text and "SHOAL_SECRET_FILE" in text and "\n" not in text


def test_a_certificate_of_another_run_by_the_same_authority_is_refused() -> None:
    one, other = (RunAuthority.from_secret(SECRET, run).issue(Role.WORKER, "0") for run in ("one", "other"))
    met = meet(one, other)
    assert isinstance(met.server, PeerRefused)
    assert "worker 0 of run one" in str(met.server) and "worker 0 of run other" in str(met.server)


def test_an_expired_certificate_is_refused_with_both_times(authority: RunAuthority) -> None:
    expired = authority.issue(Role.WORKER, "3", now=time.time() - 400 * 86400)
    met = meet(expired, authority.issue(Role.DRIVER, "d"))
    assert isinstance(met.server, PeerRefused)
    text = tls_error_text(met.server, authority.issue(Role.DRIVER, "d"))
    assert "worker 3 of run 7f3a expired at 20" in text and "UTC" in text and "shoal keys rotate" in text


def test_clocks_that_differ_by_hours_are_named(authority: RunAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate was made three hours ahead of this host's clock."""
    now = 1_700_000_000.0
    made_ahead, own = authority.issue(Role.WORKER, "0", now + 3 * 3600), authority.issue(Role.WORKER, "1", now)
    monkeypatch.setattr(credentials_module.time, "time", lambda: now)
    met = meet(made_ahead, own)
    assert met.client == own.identity
    assert isinstance(met.server, PeerRefused)
    assert "clocks differ" in str(met.server) and "timedatectl" in str(met.server)
    assert "2023-11-14 22:13:20 UTC" in str(met.server) and "2023-11-15 01:13:20 UTC" in str(met.server)


def test_clocks_may_differ_by_less_than_an_hour(authority: RunAuthority) -> None:
    ahead = authority.issue(Role.WORKER, "0", time.time() + 3000)
    assert meet(ahead, authority.issue(Role.WORKER, "1")).server == ahead.identity


def test_a_wrong_role_is_refused(authority: RunAuthority) -> None:
    viewer, store = authority.issue(Role.VIEWER, "eve"), authority.issue(Role.STORE, "0")
    met = meet(viewer, store, (Role.WORKER, Role.DRIVER))
    assert isinstance(met.server, PeerRefused)
    assert "viewer eve of run 7f3a" in str(met.server) and "driver or worker" in str(met.server)


def test_a_revoked_certificate_is_refused_from_the_next_connection_on(authority: RunAuthority, tmp_path: Path) -> None:
    authority.save(tmp_path / "keys")
    worker, server = authority.issue(Role.WORKER, "0"), authority.issue(Role.SERVER, "0")
    assert meet(worker, server).server == worker.identity
    authority.revoke(worker.serial, "worker 0")
    met = meet(worker, server)
    assert isinstance(met.server, PeerRefused) and "revoked" in str(met.server)
    assert authority.issue(Role.STORE, "0").revoked == (worker.serial,)
    assert RunAuthority.load(tmp_path / "keys").revoked == {worker.serial}


def test_a_list_of_revoked_certificates_that_cannot_be_read_accepts_nobody(
    authority: RunAuthority, tmp_path: Path
) -> None:
    authority.save(tmp_path)
    worker, server = authority.issue(Role.WORKER, "0"), authority.issue(Role.SERVER, "0")
    (tmp_path / REVOKED).write_bytes(b"\xff zzz\n")
    met = meet(worker, server)
    assert isinstance(met.server, PeerRefused) and "nobody is accepted" in str(met.server)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x82\xa4type" * 9, b"\x00" * 64])
def test_a_plaintext_client_is_refused_before_any_byte_is_handed_on(authority: RunAuthority, sent: bytes) -> None:
    own = authority.issue(Role.SERVER, "0")
    with raw_pair() as (stranger, listener):
        stranger.send(sent)
        tls = own.context(True).wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        with tls, pytest.raises(ssl.SSLError) as error:
            tls.recv(100)
    text = tls_error_text(error.value, own, "10.0.0.9:51000")
    assert "10.0.0.9:51000 and server 0 of run 7f3a cannot talk" in text
    assert "HTTP, not TLS" in text or "does not speak TLS" in text


def test_a_plaintext_server_is_named_by_the_client(authority: RunAuthority) -> None:
    own = authority.issue(Role.WORKER, "0")
    with raw_pair() as (near, far):
        far.send(b"hello there, who is it?")
        tls = own.context(False).wrap_socket(near, do_handshake_on_connect=False)
        with tls, pytest.raises(ssl.SSLError) as error:
            tls.do_handshake()
    assert "does not speak TLS" in tls_error_text(error.value, own)


def test_a_peer_without_a_certificate_is_refused(authority: RunAuthority) -> None:
    own = authority.issue(Role.SERVER, "0")
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    with (
        raw_pair() as (near, far),
        anonymous.wrap_socket(near, do_handshake_on_connect=False) as client,
        own.context(True).wrap_socket(far, server_side=True, do_handshake_on_connect=False) as server,
    ):
        error = shake(client, server)[1]
    assert isinstance(error, ssl.SSLError)
    assert "has shown no certificate" in tls_error_text(error, own)


def read_whole(tls: ssl.SSLObject) -> None:
    while True:
        assert tls.read(100) == b"weights"


def test_a_changed_record_ends_the_connection(authority: RunAuthority) -> None:
    """One bit of a record is flipped between the ends. A record that is sent twice is found the same way."""
    for tamper in (lambda record: record[:-1] + bytes([record[-1] ^ 1]), lambda record: record + record):
        client, server = authority.issue(Role.WORKER, "0"), authority.issue(Role.WORKER, "1")
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        near = client.context(False).wrap_bio(to_client, to_server)
        far = server.context(True).wrap_bio(to_server, to_client, server_side=True)
        for end in (near, far, near, far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
        near.write(b"weights")
        to_server.write(tamper(to_server.read()))
        with pytest.raises(ssl.SSLError) as error:
            read_whole(far)
        assert "changed on its way" in tls_error_text(error.value, server)


def test_a_secret_makes_one_authority_on_every_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SHOAL_CREDENTIALS", "SHOAL_SECRET_FILE", "SHOAL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    assert credentials_from_environment() is None
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    own = credentials_from_environment()
    assert own is not None and own.role == Role.WORKER and credentials_from_environment() is own
    other = RunAuthority.from_secret(SECRET).issue(Role.WORKER, "elsewhere")
    assert other.authority == own.authority
    assert meet(own, other).server == own.identity
    assert isinstance(meet(own, RunAuthority.from_secret(SECRET + "!").issue(Role.WORKER, "0")).server, ssl.SSLError)
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    monkeypatch.delenv("SHOAL_SECRET")
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(path))
    from_file = credentials_from_environment()
    assert from_file is not None and from_file.authority == own.authority


def test_credentials_of_a_file_come_first(
    authority: RunAuthority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = authority.issue(Role.STORE, "s")
    given.save(tmp_path / "s.json")
    monkeypatch.setenv("SHOAL_SECRET", SECRET)
    monkeypatch.setenv("SHOAL_CREDENTIALS", str(tmp_path / "s.json"))
    assert credentials_from_environment() == given


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        ("x" * 40, 0o644, "mode 0644: others can read or change it"),
        ("short", 0o600, "has 5 characters; it needs 32"),
        (b"\xff" * 40, 0o600, "is no text"),
    ],
)
def test_a_secret_that_is_none_is_refused(
    content: str | bytes, mode: int, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHOAL_CREDENTIALS", raising=False)
    path = tmp_path / "secret"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    monkeypatch.setenv("SHOAL_SECRET_FILE", str(path))
    with pytest.raises(InputError) as error:
        credentials_from_environment()
    assert expected in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("content", [b"{}", b"[" * 100_000, b"\xff", b'{"run": 3}', b""])
def test_a_file_without_credentials_is_an_input_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match=r"c\.json"):
        Credentials.load(path)
    with pytest.raises(InputError, match="no such file"):
        Credentials.load(tmp_path / "none")


def test_files_of_an_authority_are_private_and_come_back(authority: RunAuthority, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        authority.save(tmp_path / "keys")
        issued = authority.issue(Role.WORKER, "0")
        issued.save(tmp_path / "keys" / "worker-0.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").iterdir()} == {0o600}
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {AUTHORITY, REVOKED, "worker-0.json"}
    again = RunAuthority.load(tmp_path / "keys")
    assert again.run == "7f3a" and again.certificate == authority.certificate
    assert Credentials.load(tmp_path / "keys" / "worker-0.json") == issued
    assert meet(again.issue(Role.WORKER, "1"), issued).client == issued.identity
    (tmp_path / "keys" / AUTHORITY).chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        RunAuthority.load(tmp_path / "keys")


def test_no_text_shows_a_key(authority: RunAuthority) -> None:
    issued = authority.issue(Role.WORKER, "0")
    for text in (repr(issued), str(issued), f"{[issued]}", repr(authority)):
        assert "PRIVATE" not in text and issued.key.splitlines()[1] not in text


def test_credentials_need_no_torch() -> None:
    """The store's process imports them alone."""
    source = Path(credentials_module.__file__).read_text()
    assert "import torch" not in source
    assert "shoal.numerics" not in source
