"""The tables of `presets.toml`: devices and clusters by name."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PRESETS_FILE = Path(__file__).with_name("presets.toml")


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(PRESETS_FILE.read_text(encoding="utf-8"))


def device_tables() -> Mapping[str, Mapping[str, Any]]:
    return _file()["devices"]


def cluster_tables() -> Mapping[str, Mapping[str, Any]]:
    return _file()["clusters"]


def aliases() -> Mapping[str, str]:
    return _file()["aliases"]
