"""benchmarks/campaign.py hits a process of a real run, and judges what becomes of it."""

from pathlib import Path

import msgspec

from helpers.command import program
from helpers.places import BENCHMARKS


def test_a_worker_is_killed_and_the_run_judged_by_the_hash_of_an_undisturbed_one(tmp_path: Path) -> None:
    path = tmp_path / "campaign.json"
    done = program(BENCHMARKS / "campaign.py", "--modes", "zero=1", "--only", "12", "--jobs", "2", "--json", path)
    result = msgspec.json.decode(path.read_bytes())
    (run,), calm = result["runs"], result["undisturbed"]["zero=1"]
    planned = run["planned"]
    assert (planned["mode"], planned["victim"], planned["fault"]) == ("zero=1", "worker", "kill")
    assert run["injected"] and not calm["injected"]
    assert run["weights_sha256"] == calm["weights_sha256"] is not None
    assert [command["code"] for command in run["commands"]] == [0]
    assert run["standstill"] > 0 and result["by victim"]["kill worker"]["silence"]["max"] == run["silence"]
    # How long a silence is depends on what else the machine does; nothing else may have gone wrong.
    problems = [each for each in run["problems"] + calm["problems"] if "of silence" not in each]
    assert problems == [], done.err
    assert done.code == (1 if run["problems"] or calm["problems"] else 0)
    assert f"good: {0 if run['problems'] else 1} of 1" in done.out
