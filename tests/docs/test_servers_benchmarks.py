"""The benchmarks of parameter servers run, count what they say, and leave out who is not there. Nothing here looks at a
speed."""

from pathlib import Path

import msgspec
import pytest
import torch._dynamo  # noqa: F401  optimizers load it at their first step: here once, not in every process

from helpers.command import Result, program
from helpers.places import BENCHMARKS


def bench(script: str, *arguments: str | Path) -> Result:
    return program(BENCHMARKS / script, *arguments)


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
