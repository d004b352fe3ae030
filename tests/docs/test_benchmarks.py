"""The benchmark runs, compares like with like, and writes what it printed. No test here looks at a speed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import Result, program
from helpers.places import BENCHMARKS


def bench(*arguments: str | Path, script: str = "train.py") -> Result:
    return program(BENCHMARKS / script, *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    path = tmp_path_factory.mktemp("bench") / "results" / "train.json"
    done = bench("--quick", "--json", path)
    assert done.code == 0, done.err
    return msgspec.json.decode(path.read_bytes()), done.out


def test_every_case_has_every_ratio(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    assert list(result["cases"]) == ["conv", "transformer", "mlp"]
    for case in result["cases"].values():
        for label, (over, under) in {
            "shoal / ddp": ("shoal", "ddp"),
            "shoal / plain": ("shoal", "plain"),
            "ddp / plain": ("ddp", "plain"),
            "2 workers / 1 worker": ("shoal", "shoal 1 worker"),
            "exact / inexact": ("shoal", "shoal inexact"),
            "4 lanes / 2 lanes": ("shoal 4 lanes", "shoal"),
        }.items():
            speeds = [case["contenders"][name]["median"] for name in (over, under)]
            assert case["ratios"][label]["median"] == pytest.approx(speeds[0] / speeds[1])


def test_everyone_trains_the_same_thing(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    for case in result["cases"].values():
        losses = {name: row["final_loss"] for name, row in case["contenders"].items()}
        assert losses["shoal"] == pytest.approx(losses["ddp"], rel=1e-5)  # the same halves of the same batches
        assert losses["shoal"] == losses["shoal 1 worker"]
        assert losses["shoal"] == pytest.approx(losses["plain"], rel=0.2)  # batch norm sees other groups


def test_a_step_is_split_by_cause(quick: tuple[dict[str, Any], str]) -> None:
    result, _ = quick
    for case in result["cases"].values():
        split = dict(case["contenders"]["shoal"]["step_ms"])
        total = split.pop("total")
        assert set(split) == {"data", "compute", "wait", "merge", "apply", "other"}
        assert sum(split.values()) == pytest.approx(total, abs=1e-3)
        assert case["contenders"]["ddp"]["step_ms"] is None  # it keeps no account


def test_the_driver_is_measured_with_and_without_its_live_view(quick: tuple[dict[str, Any], str]) -> None:
    driver = quick[0]["driver"]
    assert set(driver["step_ms"]) == set(driver["driver_share_of_a_core"]) == {"quiet", "live"}
    assert all(share > 0 for share in driver["driver_share_of_a_core"].values())
    assert driver["ratios"]["live / quiet"]["median"] > 0


def test_the_table_shows_the_numbers_of_the_file(quick: tuple[dict[str, Any], str]) -> None:
    result, printed = quick
    for name, case in result["cases"].items():
        assert f"{name}: {case['parameters']:,} parameters" in printed
        for label, row in case["ratios"].items():
            assert f"{label:24}{row['best']:8.2f}{row['median']:8.2f}" in printed


def test_an_unknown_case_is_refused_with_the_names_of_the_known() -> None:
    done = bench("--only", "conv,resnet")
    assert done.code == 2
    assert "there is no case resnet; there are conv, transformer, mlp" in done.err


# -- recovery.py ----------------------------------------------------------------------------------------------------


def test_kills_are_felt_and_over_and_who_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    absent = tmp_path / "python"
    arguments = ["--quick", "--only", "kill", "--contenders", "shoal,torchft", "--torchft", absent, "--json", path]
    done = bench(*arguments, script="recovery.py")
    assert done.code == 0, done.err
    result = msgspec.json.decode(path.read_bytes())
    assert result["skipped"] == {"torchft": f"{absent}: No such file or directory"}
    for case in result["kill"].values():
        assert list(case["contenders"]) == ["shoal"]
        for fault in case["contenders"]["shoal"]["faults"]:
            assert 0 < fault["next_commit"] <= fault["all_back"]
            assert fault["repeated"] == 1 and fault["dropped"] == 0
    handed = result["hand_over"]
    assert len(handed["seconds"]) == result["kill"]["large"]["contenders"]["shoal"]["kills"]
    assert handed["num_bytes"] >= 12 * result["kill"]["large"]["parameters"]  # weights and two moments
    assert f"{handed['bytes_per_second']['median'] / 1e9:.2f} GB/s" in done.out
