"""Links between hosts that are lost in the middle of a run, in a lab: the others go on, and the bits stay."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import Forked, Result, events, write_job
from shoal.driver.launchers import cleanup

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)

STEPS = 60
FIELDS = f"steps={STEPS}, model=lambda: nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 3))"
LATE = 40.0  # seconds in which anything comes that should


class LabRun:
    """`shoal lab … -- train …` in a process of its own, and its links."""

    def __init__(self, *arguments: str, hosts: int = 2, resume: bool = False) -> None:
        self.folder = Path("run")
        pad = "import time; time.sleep(0.02)"
        job = write_job(Path.cwd(), loss=pad, fields=FIELDS)
        shape = ["lab", "--racks", "1", "--hosts", str(hosts), "--"]
        self.command = Forked(
            *shape, "train", job, "--resume" if resume else "--run-dir", self.folder, "--plain", *arguments
        )

    def __enter__(self) -> "LabRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.command.__exit__(*error)
        cleanup.clean()

    def until(self, fact: Callable[[], object]) -> None:
        deadline = time.monotonic() + LATE
        while not fact():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.folder, kind) if (self.folder / "events.jsonl").exists() else []

    def train_to(self, step: int) -> None:
        self.until(lambda: any(each["step"] >= step for each in self.events("steps-committed")))

    @property
    def lab(self) -> str:
        records = [msgspec.json.decode(path.read_bytes()) for path in cleanup.RECORDS.glob("lab-*.json")]
        return str(next(each["id"] for each in records if each["owner"] == self.command.pid))

    def link(self, host: str, state: str) -> None:
        subprocess.run(["ip", "-n", f"shoal-{self.lab}-{host}", "link", "set", "eth0", state], check=True)

    def lose_large_packets(self, host: str) -> None:
        """As behind a tunnel with a small MTU that says nothing."""
        small = ["rate", "1gbit", "burst", "700", "limit", "100000"]
        device = ["tc", "-n", f"shoal-{self.lab}-{host}", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        subprocess.run([*device, *small], check=True)

    def end(self) -> Result:
        return self.command.end()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    with Forked("train", write_job(folder, fields=FIELDS), "--run-dir", folder / "run", "--json") as command:
        return command.end().sha256


def sha256_of(run: Path) -> str:
    return str(msgspec.json.decode((run / "report.json").read_bytes())["weights_sha256"])


def test_a_link_that_is_lost_for_good_is_named_and_the_others_go_on(alone: str) -> None:
    with LabRun("--lease", "2", hosts=3) as run:
        run.train_to(5)
        run.link("r0h1", "down")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    (lost,) = run.events("worker-lost")
    assert (lost["rank"], lost["host"], lost["action"]) == (1, "r0h1", "replaced"), "one replacement, which waits"
    assert len(run.events("worker-added")) == 1
    assert "worker 1 was silent: its lease has run out; 0 2 redo step" in found.err
    assert "worker 1 on r0h1 cannot reach the store at 10.77.0.1:" in found.err and "look at the link" in found.err
    assert not run.events("run-stalled") or run.events("run-stalled")[0]["awaited"] == [1]


def test_a_link_that_comes_back_in_time_costs_nothing(alone: str) -> None:
    with LabRun("--lease", "20") as run:
        run.train_to(5)
        run.link("r0h0", "down")  # the host of the store
        time.sleep(2)
        run.link("r0h0", "up")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    assert not run.events("worker-lost") and not run.events("membership-changed")


def test_a_replacement_waits_for_the_link_and_joins() -> None:
    with LabRun("--lease", "1", "--set", f"steps={3 * STEPS}") as run:
        run.train_to(5)
        run.link("r0h1", "down")
        run.until(lambda: run.events("worker-added"))
        run.link("r0h1", "up")
        found = run.end()
    assert found.code == 0
    assert [each["members"] for each in run.events("membership-changed")][-1] == [0, 1]
    assert len(run.events("worker-lost")) == 1 and "incarnation 1 joins at step" in found.err
    assert {each["rank"] for each in run.events("worker-finished")} == {0, 1}
    assert len({each["weights_sha256"] for each in run.events("worker-finished")}) == 1


def test_a_link_that_loses_large_packets_alone(alone: str) -> None:
    with LabRun("--lease", "2") as run:
        run.train_to(5)
        run.lose_large_packets("r0h1")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    assert [each["rank"] for each in run.events("worker-lost")] == [1]
    assert "worker 1 was silent" in found.err


def test_a_lab_whose_owner_is_killed_ends_and_its_run_is_resumed_in_the_next(alone: str) -> None:
    with LabRun() as run:
        run.train_to(5)
        run.command.kill()
        started = run.events("worker-started")
        assert len(started) == 2
        run.until(lambda: not any(Path(f"/proc/{each['pid']}").exists() for each in started))
    with LabRun(resume=True) as again:
        found = again.end()
    assert found.code == 0, found.err
    assert "no checkpoint was written: the run begins again from the fresh model" in found.err
    assert sha256_of(again.folder) == alone
