"""The command line: what it says, what it writes, and where."""

import json
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shoal as library
from helpers.command import HASH, Caller, Forked, command, events, log_lines, shoal, write_job
from shoal.cli.main import main
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.testing import batch_norm_net, job_for, tied_language_model

# -- before a run -----------------------------------------------------------------------------------------------------


def test_dry_run_prints_job_and_plan_and_begins_nothing(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss="raise RuntimeError('this runs nothing')")
    result = call.good("train", "job.py", "--workers", "3", "--set", "seed=9", "--dry-run")
    fields = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert fields["batch"] == "16"
    assert fields["seed"] == "9"
    assert fields["loss"].startswith("loss (") and fields["loss"].endswith(f"{_line(tmp_path, 'def loss')})")
    assert "160, 8 steps in all" in result.out
    assert result.out.endswith(
        "layout data=3, 4 lanes, shares even\n"
        "worker 0: lanes 0\nworker 1: lanes 1\nworker 2: lanes 2 to 3\n3 partial sums a step for 3 workers\n"
        f"predicted: nothing: {fields['predicted:'].removeprefix('nothing: ')}\n"
    )
    assert "this runs nothing" in fields["predicted:"], "the loss cannot be followed"
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["job.py"]


def _line(folder: Path, text: str) -> int:
    lines = (folder / "job.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(text))


def test_dry_run_as_json(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    value = call.good("train", "job.py", "--shares", "3,1", "--workers", "2", "--dry-run", "--json").value
    assert value["plan"]["assignment"] == [[0, 3], [3, 4]]
    assert (value["job"]["batch"], value["samples"], value["steps"]) == (16, 160, 8)
    assert not Path("runs").exists()


def test_set_changes_the_job(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    usual = call.train("job.py")
    changed = call.train("job.py", "--set", "steps=3", "--set", "seed=1", "--set", "shuffle=true")
    assert (usual.value["steps"], changed.value["steps"]) == (8, 3)
    config = json.loads(Path(changed.value["folder"], "config.json").read_text())
    assert (config["job"]["seed"], config["job"]["shuffle"], config["job"]["steps"]) == (1, True, 3)
    passes = call.train("job.py", "--set", "epochs=1")
    assert passes.value["steps"] == 10, "a length given anew replaces the old one"


# -- what a run leaves ------------------------------------------------------------------------------------------------


def test_the_report_as_json(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields="evaluate=(x[:30], torch.stack([labels, torch.arange(160)], 1)[:30])")
    result = call.train("job.py", "--workers", "2")
    value = result.value
    wanted = {"weights_sha256", "steps", "samples", "seconds", "final_loss", "metrics", "exact"}
    assert wanted <= set(value)
    assert re.fullmatch(HASH, value["weights_sha256"])
    assert (value["steps"], value["samples"], value["exact"], value["workers"]) == (8, 128, True, 2)
    assert value["seconds"] > 0
    assert 0 < value["final_loss"] < 3
    assert 0 < value["metrics"]["loss"] < 3
    assert result.err == "", "nothing beside the JSON"


def test_a_run_folder_holds_everything(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path)
    monkeypatch.setenv("SHOAL_PREDICT", "on")
    result = call.train("job.py", "--workers", "2", "--run-dir", "deep/run")
    folder = Path("deep/run")
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "plan.json", "events.jsonl", "metrics.jsonl", "report.json", "model.safetensors"),
        *("checkpoints", "keys", "worker-0.log", "worker-1.log", "prediction.json"),
    }
    assert json.loads((folder / "report.json").read_text()) == result.value
    assert json.loads((folder / "plan.json").read_text())["assignment"] == [[0, 2], [2, 4]]
    config = json.loads((folder / "config.json").read_text())
    assert (config["name"], config["job"]["batch"], config["arithmetic"]["lanes"]) == ("job.py", 16, 4)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 8
    assert events(folder, "run-finished")[0]["outcome"] == "done"
    assert [event["weights_sha256"] for event in events(folder, "worker-finished")] == [result.sha256] * 2


def test_a_plan_is_replayed(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    first = call.train("job.py", "--workers", "3", "--shares", "1,2,1", "--run-dir", "first")
    again = call.train("job.py", "--plan", "first/plan.json")
    assert first.value["assignment"] == again.value["assignment"] == [[0, 1], [1, 3], [3, 4]]
    assert Path(again.value["folder"], "plan.json").read_bytes() == Path("first/plan.json").read_bytes()
    assert first.sha256 == again.sha256 == call.train("job.py").sha256


def test_reports_and_lists_of_runs(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    assert call.good("runs").out.strip() != ""
    ids = []
    for steps in (2, 3):
        result = call.train("job.py", "--set", f"steps={steps}")
        ids.append(Path(result.value["folder"]).name)
    assert "3 steps" in call.good("report").out, "the newest"
    assert "2 steps" in call.good("report", ids[0]).out
    assert "2 steps" in call.good("report", f"runs/{ids[0]}").out
    assert call.good("report", ids[1], "--json").sha256 == result.sha256
    table = call.good("runs").out
    assert all(name in table for name in ids)
    assert [line["id"] for line in call.good("runs", "--json").value] == ids[::-1]
    assert [line["steps"] for line in call.good("runs", "--root", "runs", "--json").value] == [3, 2]

    Path("runs", ids[1], "report.json").unlink()
    missing = call("report", ids[1])
    assert missing.code == 2
    assert "has no report yet" in missing.err


def test_tensorboard_files(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    result = call.train("job.py", "--tensorboard")
    files = list(Path(result.value["folder"], "tensorboard").glob("events.out.tfevents.*"))
    assert len(files) == 1
    assert b"training/loss" in files[0].read_bytes()


@pytest.mark.parametrize("build", [batch_norm_net, tied_language_model])
def test_the_trained_model_comes_back(build: object) -> None:
    report = library.train(job_for(build), workers=2, quiet=True)  # type: ignore[arg-type]
    model = report.model()
    named = [*model.named_parameters(), *model.named_buffers()]
    assert model_digest(tensor_digests(named)) == report.weights_sha256
    assert isinstance(model, torch.nn.Module)
    assert repr(report).startswith("Report(runs/")


# -- the screen -------------------------------------------------------------------------------------------------------


PRINTS = """\
if lane in (0, 2) and step in (0, 4):
    print("everyone at step", step)
if lane == 2 and step == 2:
    print("\\x1b[31monly one\\x1b[0m")"""


def test_prints_are_shown_once_above_the_end(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=PRINTS)
    result = call.good("train", "job.py", "--workers", "2")
    lines = result.err.splitlines()
    assert lines[0].startswith("shoal train job.py   run ")
    for step in (0, 4):
        assert lines.count(f"everyone at step {step}") == 1
    assert lines.count("[worker 1] only one") == 1
    assert "✔ job.py  8 steps" in result.out
    assert "everyone" not in result.out
    assert "\x1b" not in result.err + result.out
    assert "\r" not in result.err + result.out


def test_measuring_lanes_prints_nothing_and_harms_nothing(call: Caller, tmp_path: Path) -> None:
    """After the last step the loss is called a few times more, also with all of a worker's lanes at once."""
    write_job(tmp_path, loss="print('called')\nassert len(output) == 4")
    result = call.train("job.py")
    assert log_lines(result.value["folder"]) == ["called"] * 8 * 4
    assert result.value["outcome"] == "done"


def test_quiet_shows_the_report_alone(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=PRINTS)
    result = call.good("train", "job.py", "-q")
    assert result.err == ""
    assert result.out.startswith("✔ job.py  8 steps")


def test_the_command_as_a_process(tmp_path: Path) -> None:
    write_job(tmp_path, loss=PRINTS)
    with ThreadPoolExecutor(2) as pool:  # at once: mostly they import
        good, bad = pool.map(lambda workers: shoal("train", "job.py", "--workers", workers), ("2", "9"))
    assert good.code == 0
    assert good.out.startswith("✔ job.py  8 steps")
    assert good.err.startswith("shoal train job.py   run ")
    assert not set("\r\x1b") & set(good.out + good.err)
    assert (bad.code, bad.out) == (2, "")
    assert bad.err.startswith("error: 9 workers but 4 lanes: each worker needs a lane\n  fix: --workers 4")


def test_a_terminal_shows_a_live_bar(tmp_path: Path) -> None:
    write_job(tmp_path, loss=PRINTS, fields="steps=400, shuffle=True")
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}

    def call() -> int:
        for number in (0, 1, 2):
            os.dup2(theirs, number)
        os.close(theirs)
        os.close(ours)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2))
        return main(["train", "job.py", "--workers", "2"])

    with Forked(call=call, environment=environment) as child:
        os.close(theirs)
        shown = b""
        try:
            while True:
                shown += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(ours)
        code = child.end().code
    text = shown.decode()
    assert code == 0, text
    assert "\x1b[" in text, "drawn over itself"
    assert "━" in text, "the bar"
    assert "/ 400" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert plain.index("everyone at step 0") < plain.index("✔ job.py  400 steps")
    assert plain.rindex("━") < plain.index("✔ job.py  400 steps")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    write_job(tmp_path)
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(command("runs", "--json"), stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")
