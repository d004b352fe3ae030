"""Compressors keep their word: with real processes."""

from pathlib import Path

import msgspec

from helpers.command import program
from helpers.places import BENCHMARKS
from shoal.collectives.compression import COMPRESSORS

BENCHMARK = BENCHMARKS / "compressors.py"


# -- the setting ----------------------------------------------------------------------------------------------------


def test_the_benchmark_measures_every_compressor(tmp_path: Path) -> None:
    done = program(BENCHMARK, "--quick", "--json", tmp_path / "numbers.json")
    assert done.code == 0, done.err
    rows = msgspec.json.decode((tmp_path / "numbers.json").read_bytes())["compressors"]
    assert set(rows) >= set(COMPRESSORS) - {"topk", "powersgd"} | {"topk:0.01", "powersgd:4"}
    assert all(f"{word:22}{row['bytes_per_element']:10.3f}" in done.out for word, row in rows.items())
