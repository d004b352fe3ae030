"""Signed manifests: who can write a checkpoint's folder, and does not have the key, cannot make a run go on from it."""

import shutil
from pathlib import Path

import msgspec
import pytest

from helpers.snapshots import snapshot
from shoal.errors import InputError
from shoal.recovery.checkpoint import manifest
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.signature import KEY_VARIABLE, SIGNATURE, ManifestSigner, SignatureRefused
from shoal.report.run_folder import RunFolder
from shoal.worker.run_config import RunConfig


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return RunFolder.create(tmp_path / "run").path


def checkpoints(run: Path, **more: bool) -> CheckpointDirectory:
    return CheckpointDirectory(run / "checkpoints", signer=ManifestSigner(run, **more))


def forge(checkpoint: Path) -> None:
    """Changes a file, and seals it anew: every sha256 is right."""
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    found = manifest.read_manifest(checkpoint)
    manifest.write_manifest(checkpoint, step=found.step, names=tuple(found.files))


def test_a_signed_checkpoint_comes_back(run: Path) -> None:
    written = checkpoints(run).write(snapshot(4))
    assert (written.path / SIGNATURE).exists()
    found = checkpoints(run).newest()
    assert found is not None and found.note == "" and found.snapshot.step == 4


def test_a_changed_manifest_is_refused_and_named(run: Path) -> None:
    checkpoints(run).write(snapshot(2))
    newest = checkpoints(run).write(snapshot(4)).path
    forge(newest)
    with pytest.raises(SignatureRefused) as error:
        checkpoints(run).newest()
    text = str(error.value)
    assert "step-00000004: manifest.json is not the one that was signed" in text
    assert str(newest / "manifest.json") in text and "keys/manifest.key" in text
    assert f"rm -r {newest}" in text and "--accept unsigned" in text
    accepted = checkpoints(run, accept_unsigned=True).newest()
    assert accepted is not None and accepted.snapshot.step == 4 and "accepted (--accept unsigned)" in accepted.note
    shutil.rmtree(newest)  # as the error says
    before = checkpoints(run).newest()
    assert before is not None and before.snapshot.step == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no valid manifest.sig"),
        (b"", "no valid manifest.sig"),
        (b"\xff" * 5000, "no valid manifest.sig"),
        (b"[" * 4000, "no valid manifest.sig"),
        (b'{"key": "00000000", "hmac_sha256": "' + b"0" * 64 + b'"}', "was signed with another key (00000000)"),
    ],
)
def test_a_signature_that_is_missing_or_of_another_key_is_refused(
    run: Path, content: bytes | None, expected: str
) -> None:
    path = checkpoints(run).write(snapshot(4)).path / SIGNATURE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SignatureRefused) as error:
        checkpoints(run).newest()
    assert expected in str(error.value)


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other").path
    planted = checkpoints(other).write(snapshot(9)).path
    shutil.copytree(planted, run / "checkpoints" / planted.name)
    with pytest.raises(SignatureRefused, match="was signed with another key"):
        checkpoints(run).newest()


def test_damage_is_no_forgery(run: Path) -> None:
    """A flipped bit is found by the sha256, and the checkpoint before is used, as ever."""
    checkpoints(run).write(snapshot(2))
    newest = checkpoints(run).write(snapshot(4)).path
    (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:-2])
    found = checkpoints(run).newest()
    assert found is not None and found.snapshot.step == 2 and len(found.skipped) == 1


def test_runs_of_before_are_taken_as_they_are(tmp_path: Path) -> None:
    CheckpointDirectory(tmp_path / "checkpoints").write(snapshot(4))
    found = checkpoints(tmp_path).newest()
    assert found is not None and found.note == ""
    checkpoints(tmp_path).write(snapshot(6))
    assert not list((tmp_path / "checkpoints").rglob(SIGNATURE)), "it has no key"


def test_checkpoints_copied_without_the_key_are_taken_with_a_note(run: Path, tmp_path: Path) -> None:
    checkpoints(run).write(snapshot(4))
    copied = tmp_path / "copied"
    shutil.copytree(run / "checkpoints", copied / "checkpoints")
    found = checkpoints(copied).newest()
    assert found is not None and "is signed, and was not compared" in found.note
    shutil.copytree(run, tmp_path / "whole")
    found = checkpoints(tmp_path / "whole").newest()
    assert found is not None and found.note == "", "the key came along"


def test_a_key_away_from_the_run_protects_the_whole_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can write the run's folder has the key in it, too; not this one."""
    key = tmp_path / "signing.key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    path = checkpoints(run).write(snapshot(4)).path
    assert checkpoints(run).newest() is not None
    forge(path)
    monkeypatch.delenv(KEY_VARIABLE)
    checkpoints(run).signer.sign(path)  # type: ignore[union-attr]
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    with pytest.raises(SignatureRefused, match="was signed with another key"):
        checkpoints(run).newest()
    key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        checkpoints(run).newest()


def test_the_flag() -> None:
    assert RunConfig().changed(resume="x", accept="unsigned").checkpoint.accepted == ("unsigned",)
    with pytest.raises(InputError, match="did you mean unsigned"):
        RunConfig().changed(resume="x", accept="unsignd")


def test_a_signature_names_no_key(run: Path) -> None:
    path = checkpoints(run).write(snapshot(4)).path
    found = msgspec.json.decode((path / SIGNATURE).read_bytes())
    secret = (run / "keys" / "manifest.key").read_text().strip()
    assert len(secret) == 64 and secret not in str(found) and found["key"] not in secret
