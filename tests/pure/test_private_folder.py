"""Folders of runs, where the kernel keeps modes of new files and where it cannot."""

import errno
import os
import stat
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.report import private_folder
from shoal.report.run_folder import RunFolder
from shoal.transport.secret_files import kept_secret


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def fill(folder: Path) -> None:
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "model.safetensors").write_bytes(b"x")
    (folder / "events.jsonl").write_bytes(b"x")


def check_private(folder: Path) -> None:
    assert {path.name: mode(path) for path in [folder, *folder.rglob("*")]} == {
        folder.name: 0o700,
        "checkpoints": 0o700,
        "step-1": 0o700,
        "model.safetensors": 0o600,
        "events.jsonl": 0o600,
        "keys": 0o700,
        "manifest.key": 0o600,
    }


@pytest.mark.parametrize("given", [True, False])
def test_a_new_run_is_private_at_once(given: bool, tmp_path: Path) -> None:
    made = RunFolder.create(tmp_path / "run" if given else None, root=tmp_path)
    fill(made.path)
    check_private(made.path)


def test_without_access_lists_the_end_of_the_run_sets_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(private_folder.os, "setxattr", refuse)
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    with RunFolder.create(tmp_path / "run") as made:
        fill(made.path)
        assert mode(made.path) == 0o700, "protects the files meanwhile"
    check_private(made.path)
    (made.path / "link").symlink_to(outside)
    made.close()
    assert mode(outside) == 0o644, "a link's target is not the run's"


def test_a_folder_that_had_files_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "train.py").write_text("x")
    (folder / "train.py").chmod(0o644)
    RunFolder.create(folder).close()
    assert (mode(folder), mode(folder / "train.py")) == (0o755, 0o644)
    (folder / "notes.txt").write_text("x")
    assert mode(folder / "notes.txt") == 0o666 & ~umask()


def umask() -> int:
    before = os.umask(0o022)
    os.umask(before)
    return before


def test_secrets_do_not_follow_a_link_that_lay_in_the_folder(tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    for folder in (elsewhere, run):
        folder.mkdir(mode=0o755)
    (run / "keys").symlink_to(elsewhere)
    with pytest.raises(InputError, match="keys is a link, and secrets of user"):
        kept_secret(run / "keys" / "manifest.key", make=True)
    assert not list(elsewhere.iterdir()) and mode(elsewhere) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_secrets_are_not_kept_in_a_folder_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    os.chown(tmp_path / "keys", 65534, 65534)
    with pytest.raises(InputError, match="keys is user 65534's"):
        kept_secret(tmp_path / "keys" / "manifest.key", make=True)
