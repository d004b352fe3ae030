"""Structure-aware fuzzing: valid encodings, changed at random, and what a parser may answer to them.

    FuzzTarget    a parser, valid inputs for it, and the errors that it documents
    run_cases     corpus first, then so many changed inputs, each a function of (target, seed, number)

A case fails if the parser raises anything but the documented errors, takes longer than CASE_SECONDS of this process's
time, or takes memory out of proportion to its input: the loop may map only ADDRESS_BYTES more than it began with, and
of one case in MEASURE_EVERY the peak of Python's memory is measured.
"""

import math
import random
import re
import resource
import signal
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
CASE_SECONDS = 5.0
ADDRESS_BYTES = 1 << 30
MEASURE_EVERY = 97
PEAK_BYTES, PEAK_FACTOR = 4 << 20, 400  # of Python's memory, for a case: a constant, and by byte of its input

INTEGERS = (0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 1 << 20, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 32,
            1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 10**9)  # fmt: skip
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e-320, 1e308, -1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "\0", "a\0b", "x" * 300, "é", "\U0001f40b", "../..", "/", "nan", "-1", "1e999", "9" * 5000, "$tensor")
NUMBERS = (*map(str, INTEGERS), "1.5", "1e308", "1e-400", "inf", "-inf", "nan", "²", "٣", "1_000", "0x10", "07", "1.",
           "999999", "1000000000000", "true", "[]", "{}", '""', "1979-05-27", "100%")  # fmt: skip
BLOBS = (b"", b"\0", b"\xff", b"\xed\xa0\x80", bytes(300))


@dataclass(frozen=True)
class FuzzTarget:
    """`make`: a valid or nearly valid input. `call`: raises nothing but `allowed`. `form`: how a tree is encoded
    ("json", "msgpack"), or "text" for words and numbers; empty: only bytes are changed."""

    name: str
    call: Callable[[bytes], object]
    make: Callable[[random.Random], Any]
    allowed: tuple[type[BaseException], ...]
    form: str = ""
    cost: int = 1  # a case takes so many times what a cheap one does: fewer cases in `make test`
    seal: Callable[[bytes], bytes] = bytes  # puts a checksum right that would hide the rest
    measured: bool = True


class FuzzFailure(AssertionError):
    pass


def corpus_of(target: FuzzTarget) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]


def run_cases(target: FuzzTarget, cases: int, seed: int = 0) -> int:
    """The number of cases that ran. Raises FuzzFailure with the input of the first that fails, made small."""
    known = corpus_of(target)
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        return _run_cases(target, cases, seed, known)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def _run_cases(target: FuzzTarget, cases: int, seed: int, known: Sequence[bytes]) -> int:
    with mapped_at_most(ADDRESS_BYTES):
        for number, data in enumerate(known):
            check(target, data, f"corpus {number}", measure=target.measured)
        for number in range(cases):
            data = case(target, seed, number, known)
            check(target, data, f"seed {seed}, case {number}", target.measured and number % MEASURE_EVERY == 0)
    return len(known) + cases


def case(target: FuzzTarget, seed: int, number: int, known: Sequence[bytes] = ()) -> bytes:
    chance = random.Random(f"{target.name} {seed} {number}")
    if known and chance.random() < 0.1:
        data = chance.choice(known)
    else:
        value = target.make(chance)
        change = changed_words if target.form == "text" else changed_tree
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3)) if target.form else 0):
            value = change(chance, value)
        data = value if isinstance(value, bytes) else encoded(value, target.form)
    for _ in range(chance.choice((0, 0, 1, 2, 4)) if target.form else chance.choice((0, 1, 1, 2, 5))):
        data = changed_bytes(chance, data)
    return target.seal(data) if chance.random() < 0.9 else data


def check(target: FuzzTarget, data: bytes, where: str, measure: bool = False) -> None:
    if measure:
        tracemalloc.start()
    try:
        failure = outcome(target, data)
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
    finally:
        if measure:
            tracemalloc.stop()
    if failure is not None:
        small = data if isinstance(failure, TooSlow) else shrunk(target, data, type(failure))
        text = f"{target.name} ({where}): {type(failure).__name__}: {failure}\n  bytes.fromhex({small.hex()!r})"
        raise FuzzFailure(f"{text}\n  {small!r}\n  into tests/fuzz/corpus/{target.name}/ with it") from failure
    if peak > PEAK_BYTES + PEAK_FACTOR * len(data):
        raise FuzzFailure(f"{target.name} ({where}): {peak:,} bytes of memory for {len(data)}: {data[:2000].hex()}")


class TooSlow(Exception):
    """A case that was interrupted after its time."""


def outcome(target: FuzzTarget, data: bytes) -> Exception | None:
    signal.setitimer(signal.ITIMER_VIRTUAL, CASE_SECONDS)
    try:
        target.call(data)
    except target.allowed:
        return None
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return None


def _interrupt(number: int, frame: object) -> None:
    raise TooSlow(f"it took more than {CASE_SECONDS:g} s of this process's time")


def shrunk(target: FuzzTarget, data: bytes, kind: type[Exception]) -> bytes:
    """A shorter input with the same kind of failure."""
    size, deadline = max(1, len(data) // 2), time.monotonic() + 5.0
    while size and time.monotonic() < deadline:
        place = 0
        while place < len(data) and time.monotonic() < deadline:
            shorter = data[:place] + data[place + size :]
            if type(outcome(target, shorter)) is kind:
                data = shorter
            else:
                place += size
        size //= 2
    return data


@contextmanager
def mapped_at_most(num_bytes: int) -> Iterator[None]:
    """Lets this process map only so much more memory: a length that is believed raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = mapped + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if before[1] < 0 else min(most, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -- changes ----------------------------------------------------------------------------------------------------------


def encoded(value: Any, form: str) -> bytes:
    if form == "msgpack":
        return msgpack_bytes(value)
    if form == "text":
        return str(value).encode()
    return json_bytes(value)


def json_bytes(value: Any) -> bytes:
    """As JSON, with bytes and keys as they come: a parser has to take text that is no UTF-8, and NaN."""
    if isinstance(value, dict):
        return b"{" + b",".join(json_key(key) + b":" + json_bytes(each) for key, each in value.items()) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(json_bytes, value)) + b"]"
    if isinstance(value, bytes):
        return b'"' + value.replace(b"\\", b"").replace(b'"', b"") + b'"'
    if isinstance(value, float) and not math.isfinite(value):
        return b"NaN" if math.isnan(value) else b"1e999" if value > 0 else b"-1e999"
    if isinstance(value, Raw):
        return value.data
    return msgspec.json.encode(value)


def json_key(key: Any) -> bytes:
    return json_bytes(key if isinstance(key, str | bytes) else str(key))


def msgpack_bytes(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, dict) and len(value) < 65536:
        inside = b"".join(msgpack_bytes(key) + msgpack_bytes(each) for key, each in value.items())
        return b"\xde" + len(value).to_bytes(2, "big") + inside
    if isinstance(value, list | tuple) and len(value) < 65536:
        return b"\xdc" + len(value).to_bytes(2, "big") + b"".join(map(msgpack_bytes, value))
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        value = float(value)
    return msgspec.msgpack.encode(value)


@dataclass(frozen=True)
class Raw:
    """Bytes in the place of a value."""

    data: bytes


def changed_tree(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy with one change somewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        way = chance.random()
        if way < 0.1:
            return {other: each for other, each in value.items() if other != key}
        if way < 0.2:
            return {**value, chance.choice(TEXTS): chance.choice(list(value.values()))}
        if way < 0.25:
            return {**value, key: chance.choice(list(value.values()))}
        return {**value, key: changed_tree(chance, value[key], depth + 1)}
    if isinstance(value, list | tuple) and value and chance.random() < 0.8:
        items, place = list(value), chance.randrange(len(value))
        way = chance.random()
        if way < 0.1:
            del items[place]
        elif way < 0.2:
            items.insert(place, chance.choice(items))
        elif way < 0.25:
            items *= chance.choice((2, 17, 300))
        elif way < 0.3:
            chance.shuffle(items)
        else:
            items[place] = changed_tree(chance, items[place], depth + 1)
        return items
    return other_leaf(chance, value)


def other_leaf(chance: random.Random, value: Any) -> Any:
    way = chance.random()
    if isinstance(value, bool) and way < 0.5:
        return not value
    if isinstance(value, int) and way < 0.6:
        return chance.choice(INTEGERS) if way < 0.4 else value + chance.choice((-1, 1, 1000))
    if isinstance(value, float) and way < 0.6:
        return chance.choice(FLOATS)
    if isinstance(value, str) and way < 0.6:
        return changed_text(chance, value)
    if isinstance(value, bytes) and way < 0.6:
        return changed_bytes(chance, value)
    if way < 0.63:
        return nested(chance.choice((3, 30, 60)), chance.random() < 0.5)  # deeper ones as bytes: encoders recurse
    kinds: tuple[Sequence[Any], ...] = (
        INTEGERS, FLOATS, TEXTS, BLOBS, (None, True, False), ([], {}, [[]], {"": None}),
        ([value], [value, value], {"a": value}),
    )  # fmt: skip
    return chance.choice(chance.choice(kinds))


def nested(depth: int, in_maps: bool) -> Any:
    value: Any = []
    for _ in range(depth):
        value = {"a": value} if in_maps else [value]
    return value


def changed_words(chance: random.Random, text: str) -> str:
    """A text with one number, word or line changed."""
    way = chance.random()
    if way < 0.15:
        lines = text.split("\n")
        place, other = chance.randrange(len(lines)), chance.choice(lines)
        lines[place : place + chance.randrange(2)] = [other] * chance.randrange(3)
        return "\n".join(lines)
    words = list(re.finditer(r"\d+(?:\.\d+)?|[A-Za-z_]+|[^\w\s]", text))
    if not words:
        return chance.choice(TEXTS)
    numbers = [word for word in words if word[0][0].isdigit()]
    word = chance.choice(numbers if numbers and way < 0.7 else words)
    other = chance.choice((*NUMBERS, *TEXTS)) if way < 0.8 else chance.choice(words)[0]
    return text[: word.start()] + other + text[word.end() :]


def changed_text(chance: random.Random, text: str) -> Any:
    way = chance.random()
    if way < 0.3:
        return chance.choice(TEXTS)
    if way < 0.4:
        return text.encode() + chance.choice(BLOBS)  # JSON: in quotes, whether it is UTF-8 or not
    place = chance.randrange(len(text) + 1)
    return text[:place] + chance.choice(("0", "-", ",", ":", "=", "/", "é", "²", "\0", " ", "\n")) + text[place + 1 :]


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    if not data:
        return chance.choice((b"", *BLOBS, chance.randbytes(8)))
    place, way = chance.randrange(len(data)), chance.randrange(9)
    end = min(len(data), place + chance.choice((1, 2, 4, 8, 64)))
    if way == 0:
        return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
    if way == 1:
        return data[:place]
    if way == 2:
        return data[:place] + data[place:end] * 2 + data[end:]
    if way == 3:
        return data[:place] + data[end:]
    if way == 4:
        return data[:place] + chance.randbytes(chance.choice((1, 2, 8))) + data[place:]
    if way == 5:  # a length or a number
        kind = chance.choice(("<I", ">I", "<Q", ">Q", ">H", "B"))
        number = chance.choice(INTEGERS) % (1 << 8 * struct.calcsize(kind))
        return data[:place] + struct.pack(kind, number) + data[place + struct.calcsize(kind) :]
    if way == 6:
        return data[:place] + chance.choice(BLOBS) + data[end:]
    if way == 7:
        opening = chance.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a", b"("))
        return data[:place] + opening * chance.choice((3, 1200, 5000)) + data[place:]
    return data[:place] + bytes([chance.choice((0, 0x7F, 0x80, 0xC1, 0xFF))]) + data[place + 1 :]


def plain(value: Any) -> Any:
    """A message as a tree of plain values; bytes stay bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def resealed_frame(data: bytes) -> bytes:
    """A frame with its checksum put right."""
    if len(data) < 80:
        return data
    table, meta = struct.unpack_from("<I", data, 12)[0], struct.unpack_from("<I", data, 56)[0]
    end = 80 + table + meta
    return data[:4] + struct.pack("<I", crc32(data[8:end])) + data[8:] if end <= len(data) else data
