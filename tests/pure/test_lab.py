"""A cluster in a box: what needs no process."""

import os
from pathlib import Path

import pytest

from helpers.command import Caller
from shoal.driver.launchers import cleanup
from shoal.driver.launchers.lab import Lab
from shoal.errors import InputError
from shoal.planner.cluster import even_cluster
from shoal.recovery.membership.process import start_ticks


def listed(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


# -- up and down ------------------------------------------------------------------------------------------------------


def test_a_process_id_that_is_used_again_is_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(cleanup, "NAMES", tmp_path / "names")
    began = start_ticks(os.getpid())
    assert began is not None
    cleanup.NAMES.mkdir()
    for lab, started in (("aaa", began), ("bbb", str(int(began) - 1))):
        assert cleanup.unused_id()
        os.symlink("/proc/1/fd/none", cleanup.NAMES / f"shoal-{lab}-x")
        cleanup.write_record(cleanup.LabRecord(id=lab, owner=os.getpid(), started=started, names=[f"shoal-{lab}-x"]))
    (cleanup.RECORDS / "lab-ccc.json").write_text("half a rec")
    assert cleanup.clean() == ["bbb"]
    assert listed(cleanup.NAMES) == {"shoal-aaa-x"} and listed(cleanup.RECORDS) == {"lab-aaa.json"}


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_lab_without_a_command_is_drawn(call: Caller) -> None:
    drawn = call.good("lab", "--oversubscription", "4").out
    assert "uplink 500 Mbit/s, 4:1 oversubscribed" in drawn and "host r1h1   10.77.1.2" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "job.py"], "the command that runs in the lab comes after --, and train comes before"),
        (["--", "report"], "report cannot be run: no such program"),
        (["--", "shoal", "report"], "shoal report has no workers to run in a lab"),
        (["--", "train", "job.py", "--wrkers", "2"], "unknown option --wrkers\n  fix: did you mean --workers?"),
        (["--", "./script.py"], "./script.py cannot be run: it is not executable\n  fix: python ./script.py"),
        (["--cluster", "none.toml"], "cluster file none.toml cannot be read: No such file or directory"),
        (["--cluster", "bad.toml"], "bad.toml: unknown key rack\n  fix: did you mean racks?"),
        (["--cluster", "bad.toml", "--racks", "2"], "--cluster bad.toml and --racks: both describe the cluster"),
        (["--link", "1 Gb", "--", "true"], "--link '1 Gb': unknown unit 'Gb'\n  fix: did you mean Gb/s?"),
        (["--racks", "0"], "--racks is 0, and should be a whole number from 1 up"),
        (["--orders", "blocks"], "unknown option --orders\n  fix: did you mean --order?"),
    ],
)
def test_what_cannot_be_meant_is_refused(call: Caller, arguments: list[str], message: str) -> None:
    Path("bad.toml").write_text("[[rack]]\nhosts = 2\n")
    Path("script.py").write_text("")
    found = call("lab", *arguments)
    assert found.code == 2
    assert message in found.err


def test_a_missing_tool_is_named_with_its_package(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(Path.cwd()))
    found = call("lab", "--", "train", "job.py")
    assert found.code == 2
    assert "a lab needs the program ip, and it is not in PATH" in found.err and "apt install iproute2" in found.err


def test_a_cluster_that_is_too_large_is_refused() -> None:
    with pytest.raises(InputError, match="2 racks, 300 hosts in rack r0: a lab can have 256 racks of 254 hosts"):
        Lab(even_cluster(hosts=300))
