"""The fuzzing itself: each kind of harm is found, and the smallest input shown."""

import random
import time

import pytest

from helpers import fuzzing
from helpers.fuzzing import CORPUS, FuzzFailure, FuzzTarget, case, run_cases


def trees(chance: random.Random) -> object:
    return {"name": "a", "count": 3, "items": [1, 2.5, None]}


def believes_a_length(data: bytes) -> None:
    if len(data) > 4:
        bytearray(int.from_bytes(data[:4], "big") << 8)


def waits(data: bytes) -> None:
    end = time.process_time() + (60.0 if b"\xff" in data else 0.0)
    while time.process_time() < end:
        pass


def wastes(data: bytes) -> list[bytes]:
    return [bytes(1000) for _ in range(20_000)] if len(data) != 5 else []


def reads_text(data: bytes) -> None:
    data.decode()


@pytest.mark.parametrize(
    ("parse", "found"),
    [
        (reads_text, "UnicodeDecodeError"),
        (lambda data: [][len(data) > 30], "IndexError"),
        (believes_a_length, "MemoryError"),
        (waits, "TooSlow"),
        (wastes, "bytes of memory for"),
    ],
)
def test_harm_is_found(parse: object, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "CASE_SECONDS", 0.2)
    target = FuzzTarget("planted", parse, trees, (KeyError,), "json")  # type: ignore[arg-type]
    with pytest.raises(FuzzFailure, match=found):
        run_cases(target, 3000)


def test_documented_errors_are_none() -> None:
    def parse(data: bytes) -> None:
        raise KeyError

    assert run_cases(FuzzTarget("planted", parse, trees, (KeyError,), "msgpack"), 200) == 200


def test_a_failure_is_shown_small() -> None:
    def parse(data: bytes) -> None:
        assert b"7" not in data

    with pytest.raises(FuzzFailure, match=r"AssertionError: .*\n  bytes.fromhex\('37'\)"):
        run_cases(FuzzTarget("planted", parse, trees, (), "json"), 3000)


def test_cases_are_the_same_every_time_and_others_by_seed() -> None:
    target = FuzzTarget("planted", bytes, trees, (), "json")
    first = [case(target, 0, number) for number in range(200)]
    assert first == [case(target, 0, number) for number in range(200)]
    assert len(set(first)) > 150 and set(first) != {case(target, 1, number) for number in range(200)}


def test_the_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert len(files) > 100 and max(path.stat().st_size for path in files) < 20_000
