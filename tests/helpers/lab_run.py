"""A run across the hosts of a lab, in a process of its own, and the links between them. Used by the tests."""

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

needs_lab = pytest.mark.skipif(
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


def undisturbed(folder: Path) -> str:
    """The hash of the run that nothing happens to."""
    with Forked("train", write_job(folder, fields=FIELDS), "--run-dir", folder / "run", "--json") as command:
        return command.end().sha256


def sha256_of(run: Path) -> str:
    return str(msgspec.json.decode((run / "report.json").read_bytes())["weights_sha256"])
