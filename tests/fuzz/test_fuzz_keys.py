"""Every parser of keys, names of certificates and signatures: no error but the documented one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fuzz_keys import key_targets
from helpers.fuzzing import FuzzTarget, run_cases

CASES = int(os.environ.get("FUZZ_CASES", "2000"))  # as in test_fuzz_files.py
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NAMES = ("credentials", "authority", "revoked", "issued", "shared_secret", "signature", "certificate_name")


@pytest.fixture(scope="module")
def parsers() -> Iterator[dict[str, FuzzTarget]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield {target.name: target for target in key_targets(Path(folder))}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_no_bytes_do_harm(parsers: dict[str, FuzzTarget], name: str) -> None:
    target = parsers[name]
    cases = CASES if "FUZZ_CASES" in os.environ else CASES // target.cost
    assert run_cases(target, cases, SEED) >= cases


def test_every_parser_is_named(parsers: dict[str, FuzzTarget]) -> None:
    assert set(parsers) == set(NAMES)
