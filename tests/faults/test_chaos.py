"""Faults on purpose: with real processes."""

from collections import Counter
from pathlib import Path

import msgspec

from helpers.command import Caller, events
from helpers.job_files import JOB
from shoal.driver.chaos.schedule import read_schedule
from shoal.driver.chaos.scorecard import InjectedFault

# -- for real -------------------------------------------------------------------------------------------------------


def test_a_run_that_meets_every_kind_of_fault_ends_with_the_hash_of_one_that_met_none(
    tmp_path: Path, call: Caller
) -> None:
    job, run = tmp_path / "job.py", tmp_path / "run"
    job.write_text(JOB)
    asked = ["--every", "1s", "--for", "4.4s", "--kinds", "kill,stop,store,driver", "--fault-seed", "9"]
    result = call("chaos", job, *asked, "--run-dir", run, "--json")
    assert result.code == 0, result.err + result.out
    found = result.value
    planned = read_schedule(run / "faults.json").faults
    truth = [msgspec.json.decode(line, type=InjectedFault) for line in (run / "faults.jsonl").read_bytes().splitlines()]
    assert [fault.kind for fault in planned] == [done.kind for done in truth]
    assert {done.kind for done in truth} == {"kill", "stop", "store", "driver"}
    assert {row["kind"]: row["injected"] for row in found["rows"]} == Counter(done.kind for done in truth)
    assert found["weights_sha256"] == found["twin_sha256"] is not None
    assert found["samples_lost"] == found["samples_repeated"] == found["repeated"] == 0
    assert len(events(run, "driver-changed")) == 1 and not events(run / "twin", "worker-lost")
    for done in truth:
        assert f"{done.kind:9}" in result.err
