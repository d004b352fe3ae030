"""`shoal keys`, and the folder `keys` of a run."""

import stat
import time
from pathlib import Path

import pytest

from helpers.command import Caller
from helpers.tls_pairs import meet
from shoal.errors import InputError
from shoal.report.run_folder import RunFolder
from shoal.transport.credentials import Credentials
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.key_folder import KeyFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("run"))
    folder.config.write_text('{"format": 2}')
    return folder


@pytest.fixture
def keys(run: RunFolder) -> KeyFolder:
    made = KeyFolder(run.path / "keys", run.id)
    made.begin()
    return made


def test_a_new_secret_is_this_users_alone_and_never_replaced(call: Caller, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    told = call.good("keys", "new", path).out
    secret = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(secret) >= 32
    assert secret not in told and f"SHOAL_SECRET_FILE={path}" in told
    again = call("keys", "new", path)
    assert again.code == 2 and "is there already" in again.err and path.read_text().strip() == secret
    assert "no such file" in call("keys", "new", tmp_path / "none" / "secret").err


def test_show_lists_who_has_certificates_and_no_key(call: Caller, keys: KeyFolder) -> None:
    keys.credentials(Role.DRIVER)
    worker = keys.credentials(Role.WORKER, "0.1")
    text = call.good("keys", "show", "run").out
    assert "run run   2 certificates" in text and "worker-0.1" in text and f"{worker.serial:x}" in text
    assert time.strftime("%Y", time.gmtime(worker.valid_until)) in text and "revoked" not in text
    value = call.good("keys", "show", "run", "--json").value
    assert [row["process"] for row in value["certificates"]] == ["driver", "worker-0.1"]
    for shown in (text, str(value)):
        assert "PRIVATE" not in shown and worker.key.splitlines()[1] not in shown


def test_a_run_on_one_host_has_none(call: Caller, run: RunFolder) -> None:
    assert "ran on one host" in call.good("keys", "show", "run").out
    for words in (("rotate", "run"), ("revoke", "run", "worker-0")):
        refused = call("keys", *words)
        assert refused.code == 2 and "has no authority" in refused.err
    assert not (run.path / "keys" / "authority.pem").exists()


def test_revoked_certificates_are_refused_by_processes_that_run(call: Caller, keys: KeyFolder) -> None:
    server = keys.credentials(Role.SERVER, "0.0")
    first, second, other = (keys.credentials(Role.WORKER, name) for name in ("0.0", "0.1", "1.0"))
    told = call.good("keys", "revoke", "run", "worker-0").out
    assert f"{first.serial:x}" in told and f"{second.serial:x}" in told and "from the next connection on" in told
    assert isinstance(meet(first, server).server, PeerRefused) and isinstance(meet(second, server).server, PeerRefused)
    assert meet(other, server).server == other.identity
    call.good("keys", "revoke", "run", f"{other.serial:x}")
    assert isinstance(meet(other, server).server, PeerRefused)
    shown = call.good("keys", "show", "run").out
    assert shown.count("revoked") == 3
    unknown = call("keys", "revoke", "run", "worker-7")
    assert unknown.code == 2 and "it has: server-0.0, worker-0.0" in unknown.err


def test_rotating_replaces_the_authority_at_the_next_start(call: Caller, keys: KeyFolder) -> None:
    old = keys.credentials(Role.WORKER, "0.0")
    assert "Processes that run now keep theirs" in call.good("keys", "rotate", "run").out
    assert "the next start has a new authority" in call.good("keys", "show", "run").out
    replacement = KeyFolder(keys.path, "run").credentials(Role.WORKER, "1.0")  # of the sitting that goes on
    assert meet(old, replacement).server == old.identity
    following = KeyFolder(keys.path, "run")
    following.begin()
    fresh = following.credentials(Role.WORKER, "0.0")
    assert not isinstance(meet(old, fresh).server, type(old.identity))
    assert [each.process for each in following.issued()] == ["worker-0.0"]
    assert Credentials.load(following.bundle(Role.WORKER, "0.0")) == fresh
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.path.iterdir()} == {0o600}
    following.begin()
    assert meet(following.credentials(Role.WORKER, "0.1"), fresh).server is not None


def test_what_is_missing_is_named(call: Caller, keys: KeyFolder) -> None:
    assert "new, show, rotate or revoke?" in call("keys").err
    (keys.path / "authority.pem").write_text("nonsense")
    with pytest.raises(InputError, match="has no authority of a run"):
        _ = KeyFolder(keys.path, "run").authority


@pytest.mark.parametrize("part", ["new", "show", "rotate", "revoke"])
def test_help_has_an_example(part: str, call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("keys", part, "--help")
    assert f"example: shoal keys {part}" in capsys.readouterr().out
