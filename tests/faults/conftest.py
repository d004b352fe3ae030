"""What tests of faults share: declared faults, and a command whose workers do not outlive the test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command import Caller
from helpers.faults import Faults
from shoal.testing.leftovers import end_detached


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path / "run", monkeypatch)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Caller(capsys)
    end_detached()  # of a test that failed
