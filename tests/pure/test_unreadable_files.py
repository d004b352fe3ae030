"""Commands that read files which others may have written or damaged: one plain line, exit code 2, no traceback."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from helpers.fuzzing import CORPUS
from helpers.job_files import JOB
from shoal.cli.main import main
from shoal.driver.launch_spec import DRIVER_PROCESS, DRIVER_STATE

BAD = {
    "no UTF-8": b'{"job": "\xff\xfe", "steps": 7, "workers": 2, "version": "\xff", "seed": "\xff", "config": "\xff"}',
    "deep": b'{"job": ' + b"[" * 100_000,
    "deep and whole": b"[" * 100_000 + b"]" * 100_000,
    "a list": b"[1, 2, 3]",
    "another type": b'{"job": 7, "steps": "many", "workers": [], "metrics": 3, "version": {}, "lanes": "x"}',
    "huge numbers": b'{"steps": 1e999, "seconds": ' + b"9" * 5000 + b"}",
    "cut off": b'{"job": "digits", "outc',
    "nothing": b"",
    "zeros": bytes(100),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with a report and events, in the folder where runs are looked for."""
    folder = tmp_path / "runs" / "a1b2"
    folder.mkdir(parents=True)
    for name, stored in (("report.json", "report/digits.json"), ("events.jsonl", "events_file/digits.jsonl")):
        shutil.copy(CORPUS / stored, folder / name)
    shutil.copytree(folder, tmp_path / "runs" / "c3d4")
    monkeypatch.chdir(tmp_path)
    return folder


def refused(command: Sequence[str | Path], capsys: pytest.CaptureFixture[str], named: str) -> None:
    code = main([str(word) for word in command])
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("error: ") and named in said and "Traceback" not in said, said
    assert len(said) < 2000, "it does not repeat the file"


@pytest.mark.parametrize("bad", BAD)
def test_reports(run: Path, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.json").write_bytes(BAD[bad])
    refused(["report", "a1b2"], capsys, "report.json")
    refused(["report", "a1b2", "--calibration", "out.json"], capsys, ".json")
    if bad != "another type":  # of which compare reads nothing
        refused(["compare", "a1b2", "c3d4"], capsys, "report.json")
    assert main(["runs"]) == 0
    assert "c3d4" in capsys.readouterr().out


@pytest.mark.parametrize("bad", BAD)
def test_events_and_what_drivers_leave(run: Path, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "events.jsonl").write_bytes(BAD[bad] + b"\n" + (run / "events.jsonl").read_bytes() + BAD[bad])
    assert main(["runs"]) == 0 and main(["report", "a1b2"]) == 0 and main(["compare", "a1b2", "c3d4"]) == 0
    capsys.readouterr()
    for name in (DRIVER_STATE, DRIVER_PROCESS, "store.json", "config.json", "plan.json", "metrics.jsonl"):
        (run / name).write_bytes(BAD[bad])
    for command in (["why", "a1b2"], ["stop", "a1b2"], ["scale", "a1b2", "--workers", "2"], ["attach", "a1b2"]):
        refused(command, capsys, "a1b2")


@pytest.mark.parametrize("bad", BAD)
def test_plans_and_calibrations(tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = tmp_path / "plan.json", tmp_path / "job.py"
    path.write_bytes(BAD[bad])
    job.write_text(JOB)
    refused(["train", job, "--plan", path], capsys, "plan.json")
    refused(["simulate", path, job, "--cluster", "dgx-a100"], capsys, "plan.json")
    refused(["predict", job, "--cluster", "laptop", "--calibrate", path], capsys, "plan.json")
    refused(["chaos", job, "--schedule", path], capsys, "plan.json")
    assert main(["predict", "--table", str(path), "--cluster", "dgx-a100"]) in (0, 2), "one line may be columns alone"
    capsys.readouterr()
    refused(["cluster", "show", path], capsys, "plan.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[racks]]\nhosts = 1000000\n", "1,000,000 hosts"),
        ("[[racks]]\nhosts = 1000\ncount = 1000\n", "1,000,000 hosts"),
        ("[[racks]]\n[[racks.hosts]]\ncount = 1000000\n", "1,000,000 hosts"),
        ("[[racks]]\nhosts = 10000000000\n", "a whole number from 1 to 1,048,576"),
        ("[hosts]\ndevices = 1000000\nworkers = 1\n[[racks]]\nhosts = 2\n", "2,000,000 devices"),
        ("[[racks]]\nhosts = " + "9" * 5000 + "\n", "is not TOML"),
        ("a = " + "[" * 5000, "is not TOML: it is nested too deeply"),
    ],
)
def test_a_cluster_has_limits(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[links.host]\nbandwidth = "1 Gbit/s"\n' + text)
    began = time.process_time()
    assert main(["cluster", "show", str(path)]) == 2
    assert said in capsys.readouterr().err
    assert time.process_time() - began < 2.0, "at once: nothing is made before it is counted"


def test_so_many_hosts_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "dgx-a100", "--hosts", "1000000"]) == 2
    assert "at most 65,536" in capsys.readouterr().err


def test_a_report_from_outside_is_whole() -> None:
    assert msgspec.json.decode((CORPUS / "report" / "digits.json").read_bytes())["outcome"] == "done"
