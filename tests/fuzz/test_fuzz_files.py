"""Every parser of files and flags: no error but the documented one, bounded time and memory."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fuzz_files import FLAGS, FileParsers, targets
from helpers.fuzzing import FuzzTarget, run_cases

CASES = int(os.environ.get("FUZZ_CASES", "2000"))  # of a cheap parser; `make fuzz` sets more, for all
SEED = int(os.environ.get("FUZZ_SEED", "0"))
FILES = ("store_json", "plan", "stored_setup", "schedule", "calibration", "config", "driver_state", "report",
         "events_file", "manifest", "safetensors",
         "snapshot", "cluster", "csv")  # fmt: skip


@pytest.fixture(scope="module")
def parsers() -> Iterator[dict[str, FuzzTarget]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        found, files = targets(Path(folder))
        yield {target.name: target for target in found}
        FileParsers.close(files)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*FILES, *(f"flag_{name}" for name in FLAGS)])
def test_no_bytes_do_harm(parsers: dict[str, FuzzTarget], name: str) -> None:
    target = parsers[name]
    cases = CASES if "FUZZ_CASES" in os.environ else CASES // target.cost
    assert run_cases(target, cases, SEED) >= cases


def test_every_parser_is_named(parsers: dict[str, FuzzTarget]) -> None:
    assert set(parsers) == {*FILES, *(f"flag_{name}" for name in FLAGS)}
