"""The benchmarks of parameter servers run, count what they say, and leave out who is not there. Nothing here looks at a
speed."""

import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch._dynamo  # noqa: F401  optimizers load it at their first step: here once, not in every process

from helpers.command import Result, program
from helpers.places import BENCHMARKS


def bench(script: str, *arguments: str | Path) -> Result:
    return program(BENCHMARKS / script, *arguments)


@pytest.fixture
def straggler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("straggler")


# -- paramserver.py ---------------------------------------------------------------------------------------------------


def test_every_push_is_applied_once_and_absent_peers_are_left_out_with_the_way_to_get_them(tmp_path: Path) -> None:
    path, absent = tmp_path / "results" / "paramserver.json", tmp_path / "python"
    arguments = ["--quick", "--contenders", "shoal,tensorflow,ray", "--peers", absent, "--json", path]
    done = bench("paramserver.py", *arguments)
    assert done.code == 0, done.err
    result = msgspec.json.decode(path.read_bytes())
    assert set(result["skipped"]) == {"tensorflow", "ray"}
    assert f"ray was left out: {absent} has no ray; `make bench-peers` installs it" in done.out
    assert list(result["cases"]) == ["mlp", "fixed", "sparse"]
    for case, found in result["cases"].items():
        own = found["contenders"]["shoal"]
        assert own["best"] > 0
        assert own["applied"] == ([] if case == "mlp" else [1.0])
        assert f"{own['best']:12,.0f}{own['median']:12,.0f}" in done.out
    speeds = result["bandwidth"]["bytes_per_second"]
    assert result["bandwidth"]["push+pull / copy"]["best"] == pytest.approx(speeds["push+pull"] / speeds["copy"])
    assert result["round_trip"]["seconds"]["median"] <= result["round_trip"]["seconds"]["p99"]
    held = result["memory"]["num_bytes"]
    assert held["peak"] >= held["held"] >= 0.9 * held["needed"]  # the server does hold it


def test_a_peer_that_fails_is_left_out_with_its_last_word(tmp_path: Path) -> None:
    path, python = tmp_path / "paramserver.json", tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "no port to be had" >&2\nexit 3\n')
    python.chmod(0o755)
    arguments = ["--quick", "--parts", "rates", "--contenders", "ray", "--peers", python, "--json", path]
    done = bench("paramserver.py", *arguments)
    assert done.code == 0, done.err
    assert "ray was left out: no port to be had" in done.out


def test_an_unknown_contender_is_refused_with_the_names_of_the_known() -> None:
    done = bench("paramserver.py", "--contenders", "shoal,horovod")
    assert done.code == 2
    assert "there is no horovod; there are shoal, tensorflow, ray, rpc" in done.err


# -- straggler.py -----------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_measured_until_the_bound_of_staleness_and_at_it(tmp_path: Path) -> None:
    path = tmp_path / "straggler.json"
    done = bench("straggler.py", "--quick", "--modes", "stale:3", "--no-accuracy", "--json", path)
    assert done.code == 0, done.err
    row = msgspec.json.decode(path.read_bytes())["modes"]["stale:3"]
    (found,) = row["rounds"]
    assert row["share"]["median"] == pytest.approx(found["until_bound"] / found["alone_until_bound"])
    assert row["theory"]["share"] == 1.0
    assert f"{row['share']['median']:8.2f}" in done.out


def test_theory_of_a_worker_that_is_five_times_slower(straggler: Any) -> None:
    def share(mode: str) -> float:
        read = straggler.Mode.read(mode)
        return float(straggler.theory(read, 4, slow=True) / straggler.theory(read, 3, slow=False))

    assert share("sync") == pytest.approx(4 / 3 / 5, rel=0.01)
    assert share("local:16") == pytest.approx(4 / 3 / 5, rel=0.01)
    assert share("quorum:0.75") == pytest.approx(1.0, rel=0.01)
    assert share("async") == pytest.approx(3.2 / 3, rel=0.02)
    assert share("groups:2") == pytest.approx(2.4 / 3, rel=0.02)


def test_steady_speed_leaves_out_how_a_run_begins_and_ends(straggler: Any) -> None:
    events = importlib.import_module("shoal.report.events")

    def told(time: float, count: int, seconds: float) -> Any:
        spent = events.Spent(data=0.0, compute=seconds, wait=0.0, merge=0.0, apply=0.0, other=0.0)
        return events.Steps(
            time=time, rank=0, step=0, count=count, samples=0, epoch=0, loss=0.0, lanes=(0, 1), spent=spent, leader=True
        )

    # Ten seconds: none in the first two, then two workers, one and a half steps a second each.
    both = [told(2.0, 0, 2.0), told(6.0, 6, 4.0), told(10.0, 6, 4.0), told(6.0, 6, 4.0), told(10.0, 6, 4.0)]
    assert straggler.steady(both, 60.0) == pytest.approx(180.0)
