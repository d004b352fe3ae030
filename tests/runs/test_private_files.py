"""What a run leaves on disk: for its owner alone, without secrets outside `keys`; and the user's umask stays."""

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from helpers.command import Caller, write_job
from shoal.recovery.checkpoint.manifest import read_manifest, write_manifest
from shoal.transport.key_folder import KeyFolder

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    found = {str(path.relative_to(folder)): path for path in [folder, *folder.rglob("*")]}
    return {name: stat.S_IMODE(path.lstat().st_mode) for name, path in found.items() if not path.is_symlink()}


def readable_by_others(folder: Path) -> dict[str, str]:
    return {name: f"{mode:04o}" for name, mode in modes(folder).items() if mode not in (0o600, 0o700)}


@pytest.mark.usefixtures("open_umask")
def test_every_file_of_a_run_is_its_owners_alone(call: Caller) -> None:
    """Also those that a logger or a replacement writes; files of the job's own code have the user's modes."""
    own = "open(f'own-{rank}.txt', 'w').write('x') if step == 1 else None"
    job = write_job(Path.cwd(), loss=own)
    options = ("--workers", "2", "--checkpoint-every", "3", "--log", "csv,tensorboard", "--run-dir", "run")
    call.train(job, *options)
    found = modes(Path("run"))
    assert {"worker-0.log", "events.jsonl", "report.json", "metrics.csv", "model.safetensors"} <= set(found)
    assert any(name.startswith("checkpoints/step-") and name.endswith("manifest.json") for name in found)
    assert readable_by_others(Path("run")) == {}
    assert found["."] == 0o700
    assert stat.S_IMODE(Path("own-0.txt").stat().st_mode) == 0o664


@root
def test_a_run_on_two_hosts_leaves_its_secrets_in_keys_alone(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for each process; no text of a key, and no token, in logs, events, reports or the rest."""
    seen = "open(f'environment-{rank}.txt', 'w').write(repr(dict(os.environ))) if step == 1 else None"
    job = write_job(Path.cwd(), loss=seen)
    lab = ("lab", "--racks", "1", "--hosts", "2", "--", "train", job, "--workers", "2", "--servers", "1")
    call.good(*lab, "--checkpoint-every", "4", "--run-dir", "run", "--json")
    keys = KeyFolder(Path("run/keys"), "run")
    processes = [each.process for each in keys.issued()]
    assert {"driver", "store", "worker-0.0", "worker-1.0", "server-0.0"} <= set(processes)
    assert "server-0.0" in call.good("keys", "show", "run").out
    environment = Path("environment-0.txt").read_text()
    assert "run/keys/worker-0.0.json" in environment
    assert "'SHOAL_SERVERS_TOKEN': 'worker/0.0:" in environment, "the servers' own token is the servers'"
    assert readable_by_others(Path("run")) == {}
    assert "'SHOAL_SERVERS_TOKEN': 'worker/1.0:" in Path("environment-1.txt").read_text(), "each worker has its own"
    secrets = {re.search(r"'SHOAL_SERVERS_TOKEN': '([\w:/.]+)'", environment)[1]}  # type: ignore[index]
    for file in Path("run/keys").iterdir():
        text = file.read_text()
        if file.suffix == ".json":
            bundle = msgspec.json.decode(text)
            secrets |= {*bundle["key"].splitlines()[1:-1], *bundle["certificate"].splitlines()[1:-1]}
        elif file.suffix in (".pem", ".key"):
            secrets |= {line for line in text.splitlines() if len(line) > 20 and not line.startswith(("#", "-"))}
    assert len(secrets) > 10
    others = [path for path in Path("run").rglob("*") if path.is_file() and path.parent.name != "keys"]
    assert others
    for path in others:
        content = path.read_bytes()
        assert b"PRIVATE KEY" not in content, path
        assert [secret for secret in secrets if secret.encode() in content] == [], path


def test_a_changed_checkpoint_is_refused_on_resume(call: Caller) -> None:
    """By somebody who can write checkpoints, seals them properly, and does not have the run's key."""
    job = write_job(Path.cwd())
    whole = call.train(job).sha256
    call("train", job, "--stop-after", "4", "--run-dir", "run")
    checkpoint = Path("run/checkpoints/step-00000004")
    signed = (checkpoint / "manifest.json").read_bytes()
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    write_manifest(checkpoint, step=4, names=tuple(read_manifest(checkpoint).files))
    refused = call("train", job, "--resume", "run")
    assert refused.code == 2
    assert "step-00000004: manifest.json is not the one that was signed" in refused.err
    assert "--accept unsigned" in refused.err and "run/keys/manifest.key" in refused.err
    (checkpoint / "model.safetensors").write_bytes(weights)
    (checkpoint / "manifest.json").write_bytes(signed)
    assert call.train(job, "--resume", "run").sha256 == whole
