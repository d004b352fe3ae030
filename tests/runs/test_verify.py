"""`shoal verify`: equal placements are shown to be equal, and a difference is found, named and measured."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.command import HASH, Caller, write_job
from helpers.job_files import LOOP
from shoal.driver.verify_plain import PLAIN_TOLERANCE, against_plain
from shoal.parallel import local_step
from shoal.transport.owned_folder import KEEP


def test_equal_placements_have_one_hash(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    result = call.good("verify", "job.py", "--workers", "1,2,3", "--shares", "3,1", "--shares", "1,2,1", "--resume")
    rows = [line for line in result.out.splitlines() if re.search(HASH, line)]
    labels = [re.split(r"\s{2,}", row)[0] for row in rows]
    assert labels == [
        "reference",
        "1 worker",
        "2 workers",
        "3 workers",
        "2 workers, shares 3,1",
        "3 workers, shares 1,2,1",
        "3 workers, stopped at step 4, resumed on 2",
    ]
    assert {re.findall(HASH, row)[0] for row in rows} == {call.train("job.py").sha256}
    assert [row.split()[-1] for row in rows[1:]] == ["equal"] * 6
    assert "job.py: 8 steps" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.py", "runs"], "only train made a folder"


def test_the_result_as_json(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    value = call.good("verify", "job.py", "--steps", "3", "--set", "seed=5", "--overlap", "on", "--json").value
    expected = call.train("job.py", "--set", "seed=5", "--set", "steps=3").sha256
    assert value["equal"] is True
    assert value["plain"] is None
    assert [(row["label"], row["weights_sha256"], row["steps"], row["difference"]) for row in value["rows"]] == [
        (label, expected, 3, None) for label in ("reference", "1 worker, overlap on", "2 workers, overlap on")
    ]


DEPENDS_ON_WORKER = "if step >= 4 and rank == '1':\n    value = value + output.sum() / 1000"


def test_a_job_that_depends_on_the_worker_is_found_out(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=DEPENDS_ON_WORKER)
    result = call("verify", "job.py", "--workers", "1,2,3")
    assert result.code == 1
    assert "Traceback" not in result.err
    found = re.search(
        r"error: 2 workers: first difference: step 5, 0.weight \(12×8\): (\d+) of 96 elements differ,"
        r" largest absolute (\S+), relative (\S+?), and 3 more tensors",
        result.err,
    )
    assert found, result.err
    assert 0 < int(found[1]) <= 96
    # A term of output.sum() / 1000 for half the samples, at learning rate 0.1.
    assert 0 < float(found[2]) < 0.01
    assert float(found[3]) > float(found[2]), "weights are below 1"
    rows = [line for line in result.out.splitlines() if re.search(HASH, line)]
    assert [row.split()[-1] for row in rows[1:]] == ["equal", "differs"], "what follows the first difference is not run"


def test_a_difference_as_json(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=DEPENDS_ON_WORKER.replace("4", "0"))
    result = call("verify", "job.py", "--workers", "2", "--json")
    assert result.code == 1
    assert result.value["equal"] is False
    reference, row = result.value["rows"]
    assert reference["weights_sha256"] != row["weights_sha256"]
    difference = row["difference"]
    assert difference["step"] == 1
    assert (difference["tensor"], difference["shape"], difference["elements"]) == ("0.weight", [12, 8], 96)
    assert (difference["others"], difference["largest_absolute"] > 0) == (3, True)


def test_a_job_that_fails_is_not_called_equal(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_job(tmp_path, loss="if step == 2:\n    raise ValueError('broken')")
    result = call("verify", "job.py")
    assert result.code == 1
    assert "worker 0, step 2, lane 0: ValueError: broken" in result.err
    assert "equal" not in result.out
    (log,) = re.findall(r"log: (.*)", result.err)
    assert "ValueError: broken" in Path(log).read_text(), "the log that the error names is there"
    assert f"kept: {Path(log).parent}" in result.err
    (kept,) = tmp_path.glob("shoal-verify.*")
    assert Path(log).is_relative_to(kept)
    assert {path.name for path in kept.iterdir()} == {"reference", KEEP}
    assert not (kept / "reference" / "checkpoints").exists()


# -- scripts ----------------------------------------------------------------------------------------------------------

SCRIPT = """\
import sys

{loop}
if "--worker" in sys.argv and run.step > 5:
    raise SystemExit("the loop is over after the steps that are compared")
"""
DEPENDS = "F.cross_entropy(model(b[0]), b[1]) + (model(b[0]).sum() if run.rank and run.step > 2 else 0)"


def test_a_script_that_joins_is_verified_as_the_report_advises(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "my loops"
    folder.mkdir()
    script = folder / "loop.py"
    script.write_text(SCRIPT.format(loop=LOOP))
    trained = call.good("run", "my loops/loop.py", "--workers", "2", "-v", "--", "--lr", "1")
    advice = " ".join(trained.out.split())
    assert "check: shoal verify 'my loops/loop.py' -- --lr 1" in advice and "Gustafson" in advice
    (sha256,) = [json.loads(path.read_text())["weights_sha256"] for path in Path("runs").glob("*/report.json")]
    whole = call.good("verify", "my loops/loop.py", "--json", "--", "--lr", "1").value
    rows = [(row["label"], row["weights_sha256"], row["steps"]) for row in whole["rows"]]
    assert rows == [(label, sha256, 8) for label in ("reference", "1 worker", "2 workers")]
    short = call.good("verify", "my loops/loop.py", "--workers", "2", "--steps", "5", "--resume", "--", "--worker")
    assert "my loops/loop.py: 5 steps" in short.out and short.out.count("equal") == 2
    assert "2 workers, stopped at step 2, resumed on 1" in short.out
    script.write_text(LOOP.replace("F.cross_entropy(model(b[0]), b[1])", DEPENDS))
    differs = call("verify", "my loops/loop.py", "--workers", "2", "--steps", "5")
    assert differs.code == 1
    assert re.search(
        r"error: 2 workers: first difference: step 4, 0.weight \(100×6\): \d+ of 600 elements differ, largest absolute"
        r" \S+, relative \S+, and \d more tensors",
        differs.err,
    ), differs.err
    assert not list(tmp_path.glob("shoal-verify.*")), "nothing is left of runs that ended"


# -- against an ordinary loop -----------------------------------------------------------------------------------------


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the samples that have a label; how many that are differs between lanes."""
    return F.cross_entropy(output, target, ignore_index=3, reduction="sum"), (target != 3).sum()


def plain_job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(72, 8, generator=generator), torch.randint(4, (72,), generator=generator)
    fields: dict[str, Any] = {
        "model": net,
        "data": samples,
        "loss": counted,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
        "clip_norm": 0.05,
        "batch": 16,
        "microbatches": 2,
        "steps": 12,
    }
    return shoal.Job(**fields | changes)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_ordinary_loop_agrees(workers: int) -> None:
    result = against_plain(plain_job(), workers, 12, name="job")
    assert result.good
    assert result.difference < 1e-12
    assert result.steps == 12


def test_an_ordinary_loop_agrees_on_a_plain_mean_too() -> None:
    # 72 samples and a batch of 16: the last batch of each pass is a short one, and some of its lanes are empty.
    assert against_plain(plain_job(loss=F.cross_entropy, clip_norm=None), 2, 12, name="job").difference < 1e-12


def double_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    right = local_step.read_loss

    def wrong(*arguments: Any) -> Any:
        loss, count = right(*arguments)
        return loss * 2, count

    monkeypatch.setattr(local_step, "read_loss", wrong)


def forget_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_step, "add_into", lambda left, right, out: left)


def forget_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.Run, "clip", lambda run, norm: norm)


# The workers are forked from this process, so what is wrong here is wrong in them.
@pytest.mark.parametrize("spoil", [double_the_loss, forget_a_lane, forget_the_clip])
def test_wrong_arithmetic_is_found_by_an_ordinary_loop(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    job = plain_job(optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    if spoil is not forget_the_clip:
        job = job.changed(clip_norm=None)  # clipping hides a wrong scale
    result = against_plain(job, 1, 5, name="job")
    assert not result.good
    assert result.difference > 1e-4
    assert result.worst in dict(net().named_parameters())


@pytest.mark.parametrize(
    ("fields", "code", "verdict"), [("", 0, "agrees"), ("loss=lambda o, t: loss(o, t) * len(o)", 1, "DIFFERS")]
)
def test_the_verdict_is_printed(fields: str, code: int, verdict: str, call: Caller, tmp_path: Path) -> None:
    """A loss that depends on how many samples it sees is the same on all placements, but not what a loop computes."""
    write_job(tmp_path, fields=fields)
    result = call("verify", "job.py", "--against", "plain", "--steps", "4")
    assert result.code == code
    assert f"plain PyTorch loop, fp64, dropout off, batch norm frozen: {verdict} after 4 steps" in result.out
    assert f"(bound {PLAIN_TOLERANCE:g})" in result.out
    as_json = call("verify", "job.py", "--against", "plain", "--steps", "4", "--json")
    assert as_json.code == code
    assert as_json.value["equal"] is (code == 0)
    assert (as_json.value["plain"]["difference"] <= PLAIN_TOLERANCE) is (code == 0)
