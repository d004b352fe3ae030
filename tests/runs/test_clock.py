"""The wall clock may jump by an hour, forward and back: nothing happens, because nothing that decides looks at it."""

import itertools
import time
from pathlib import Path

import pytest

import shoal
from helpers.command import events
from shoal.testing import dropout_net, job_for

HOUR = 3600.0


def test_nothing_happens_when_the_wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(dropout_net).changed(steps=30)
    calm = shoal.train(job, workers=2, run_dir="calm", quiet=True)
    real, jumps = time.time, itertools.cycle([0.0] * 5 + [HOUR] * 5 + [-HOUR] * 5)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))  # workers are forked: they have it too
    jumped = shoal.train(job, workers=2, run_dir="jumped", quiet=True)
    assert jumped.weights_sha256 == calm.weights_sha256
    kinds = ("run-started", "steps-committed", "worker-finished")
    told = [event["time"] for kind in kinds for event in events(Path("jumped"), kind)]
    assert max(told) - min(told) > HOUR, "the clock did jump"
    for kind in ("membership-changed", "worker-lost", "worker-added", "store-outage", "run-recovered"):
        assert events(Path("jumped"), kind) == []
