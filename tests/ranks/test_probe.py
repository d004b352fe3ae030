"""`shoal cluster probe`: with real processes."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.cluster import call_probe
from shoal.errors import InputError
from shoal.planner.cluster import read_cluster

# -- the command ------------------------------------------------------------------------------------------------------


def given(path: Path, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"output": path, "force": False, "quick": True, "run": None, "json": True, "lab": None, **changes}
    )


def test_a_quick_probe_writes_a_file_that_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    assert call_probe(given(path)) == 0
    said = capfd.readouterr()
    told = msgspec.json.decode(said.out)
    (host,) = read_cluster(path).hosts
    assert host.device is not None and host.interconnect is not None and host.devices == told["cores"]
    assert host.device.overhead == pytest.approx(told["speed"]["overhead"], rel=0.01)
    assert set(told["contention"]) == {"1", "2"} and told["links"]["memory"][1] > 0 and told["reduce_speed"] > 0
    assert {"gelu", "convolution", "bernoulli_"} <= set(host.device.rates)
    assert "products" in said.err and "links" in said.err, "a long probe tells what it does"

    with pytest.raises(InputError, match="no folder"):
        call_probe(given(tmp_path / "nowhere" / "cluster.toml"))
    with pytest.raises(InputError, match="there already") as refused:
        call_probe(given(path))
    assert "--force" in str(refused.value.fix)
