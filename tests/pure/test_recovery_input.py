"""Wrong words for a run that survives: what needs no process."""

import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.command import Caller, refused, write_job
from helpers.etcd import free_ports
from shoal.errors import InputError
from shoal.testing import dropout_net, job_for

# -- before it begins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--min-workers 3 --max-workers 2", "--min-workers 3 is above --max-workers 2"),
        ("--workers 1 --min-workers 2", "--workers 1 does not lie within --min-workers 2"),
        ("--workers 4 --max-workers 3", "--workers 4 does not lie within --min-workers 1 and --max-workers 3"),
        ("--min-workers 0", "--min-workers 0: at least 1 is needed"),
        ("--max-failures -1", "--max-failures -1: a number of lost workers, 0 or more"),
        ("--lease 0", "--lease 0.0: seconds above 0"),
        ("--store redis://here", "'redis://here' is no address of a store: a store is on this machine, or an etcd"),
        ("--checkpoint often", "--checkpoint often: auto, or a number of steps from 1 up"),
    ],
)
def test_flags_that_do_not_fit(call: Caller, tmp_path: Path, flags: str, said: str) -> None:
    write_job(tmp_path)
    assert refused(call, "train", "job.py", "--run-dir", "run", *flags.split()).startswith(said)
    assert list(Path("run").glob("*.log")) == [], "no worker has started"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ({"on_failure": "retry"}, "on_failure='retry' is not known"),
        ({"slow": "kill"}, "slow='kill' is not known"),
        ({"min_workers": 3, "max_workers": 2}, "--min-workers 3 is above --max-workers 2"),
    ],
)
def test_words_that_do_not_fit(word: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        shoal.train(job_for(dropout_net), workers=2, **word)


def test_a_store_that_cannot_be_reached(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    (port,) = free_ports(1)
    said = refused(call, "train", "job.py", "--run-dir", "run", "--store", f"etcd://127.0.0.1:{port}", code=1)
    assert re.match(rf"the store at .*127\.0\.0\.1:{port}.* has been away since \d\d:\d\d:\d\d", said), said
    assert "one that has begun goes on, and only changes of membership wait" in said
    assert "fix: " in said
