"""The examples as modules, and made small."""

import pytest
import sklearn.datasets  # noqa: F401  (here, because it sets environment variables once, when it is loaded)

import shoal
from helpers.places import EXAMPLES
from shoal.job.load import load_job


def example(name: str) -> shoal.Job:
    return load_job(str(EXAMPLES / name))


def sizes(monkeypatch: pytest.MonkeyPatch, **given: int) -> None:
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"SHOAL_{name}", str(value))
