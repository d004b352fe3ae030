"""benchmarks/parallel.py runs, compares like with like, and writes what it printed. Nothing here looks at a speed."""

from pathlib import Path

import msgspec
import pytest

from helpers.command import program
from helpers.places import BENCHMARKS

SCRIPT = BENCHMARKS / "parallel.py"


def test_a_layout_does_the_work_of_the_one_by_hand_and_every_formula_has_its_measure(tmp_path: Path) -> None:
    path = tmp_path / "results" / "parallel.json"
    done = program(SCRIPT, "--quick", "--kinds", "pipeline", "--json", path)
    assert done.code == 0, done.err
    result = msgspec.json.decode(path.read_bytes())

    speed = result["speed"]["kinds"]["pipeline"]
    assert result["speed"]["skipped"] == {} and speed["losses_alike"]
    for label, row in speed["ratios"].items():
        over, _, under = label.partition(" / ")
        medians = [speed["contenders"][name]["median"] for name in (over, under)]
        assert row["median"] == pytest.approx(medians[0] / medians[1])
    assert "pipeline=2 / by hand, shoal" in speed["ratios"] and "losses are alike" in done.out

    (bubble,) = result["bubble"]["rows"]
    assert (bubble["schedule"], bubble["theory"]) == ("1f1b", pytest.approx(1 / 5)) and 0 < bubble["best"] < 1

    assert [row["in_flight"] for row in result["memory"]["pipeline"]] == [
        {"gpipe": 4, "1f1b": 2},
        {"gpipe": 4, "1f1b": 1},
    ]
    assert result["memory"]["skipped"] == {} and [row["layout"] for row in result["memory"]["sharding"]] == [
        "data=2,zero=3"
    ]
