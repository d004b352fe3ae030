"""The tables of `presets.toml`: devices and clusters by name."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PRESETS_FILE = Path(__file__).with_name("presets.toml")


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(PRESETS_FILE.read_text(encoding="utf-8"))


def device_tables() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = _file()["devices"]
    return found


def cluster_tables() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = _file()["clusters"]
    return found


def aliases() -> Mapping[str, str]:
    found: Mapping[str, str] = _file()["aliases"]
    return found
