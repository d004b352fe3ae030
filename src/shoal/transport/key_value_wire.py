"""The messages of torch's TCPStore, as torch 2.13 speaks them: little endian, each a byte for its kind and fields.

    VALIDATE u32 magic              first on a connection, no reply       SET, APPEND, QUEUE_PUSH   key, value; no reply
    PING u32 ► u32                                                       MULTI_SET  n, (key, value) …; no reply
    GET key ► value                 MULTI_GET n, keys ► values            COMPARE_SET key, expected, desired ► value
    ADD key, i64 ► i64              DELETE_KEY key ► i64                  GETNUMKEYS ► i64       LIST_KEYS ► n, keys
    CHECK n, keys ► byte            WAIT n, keys ► byte, once all are there           CANCEL_WAIT ► byte
    QUEUE_POP key ► n, values       QUEUE_LEN key ► i64                   BARRIER key, i64 size ► byte, once all came

A string is its length (u64) and its bytes. `KeyValueParser` takes bytes as they come, holds no more memory than it was
given, and raises ValueError for what is no message.
"""

import struct
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import IntEnum

MAGIC = 0x3C85F7CE
KEY_BYTES = 8 << 10  # torch's own limits of a key and a value
VALUE_BYTES = 8 << 20
MESSAGE_BYTES = 16 << 20
MAX_KEYS = 128 << 10  # in one message

READY, NOT_READY = b"\0", b"\1"  # replies to CHECK
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"

_U32, _U64, _I64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<q")


class KeyValueQuery(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


_Q = KeyValueQuery
_LISTED = {_Q.CHECK, _Q.WAIT, _Q.MULTI_GET, _Q.MULTI_SET}  # begin with a number of keys
_KEYLESS = {_Q.VALIDATE, _Q.GETNUMKEYS, _Q.CANCEL_WAIT, _Q.PING, _Q.LIST_KEYS}
_VALUES = {_Q.SET: 1, _Q.APPEND: 1, _Q.QUEUE_PUSH: 1, _Q.COMPARE_SET: 2, _Q.MULTI_SET: 1}  # after each key
_NUMBER = {_Q.VALIDATE: _U32, _Q.PING: _U32, _Q.ADD: _I64, _Q.BARRIER: _I64}  # at the end
SILENT = {_Q.VALIDATE, _Q.SET, _Q.APPEND, _Q.MULTI_SET, _Q.QUEUE_PUSH}  # have no reply


@dataclass(frozen=True)
class KeyValueRequest:
    query: KeyValueQuery
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


def encode_request(request: KeyValueRequest) -> bytes:
    query, values = request.query, iter(request.values)
    parts = [bytes([query])]
    if query in _LISTED:
        parts.append(_U64.pack(len(request.keys)))
    for key in request.keys:
        parts.append(encode_string(key))
        parts.extend(encode_string(next(values)) for _ in range(_VALUES.get(query, 0)))
    if query in _NUMBER:
        parts.append(_NUMBER[query].pack(request.number))
    return b"".join(parts)


def encode_string(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


def as_signed(number: int) -> int:
    """A number beyond 64 bits wraps around."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def encode_count(number: int) -> bytes:
    return _I64.pack(number)


def encode_nonce(number: int) -> bytes:
    return _U32.pack(number)


def encode_strings(values: Iterable[bytes]) -> bytes:
    """A number of strings, and the strings."""
    encoded = [encode_string(value) for value in values]
    return _U64.pack(len(encoded)) + b"".join(encoded)


class KeyValueParser:
    """`feed` bytes in any portions, and get the whole requests among them."""

    def __init__(self, message_bytes: int = MESSAGE_BYTES) -> None:
        self._limit = message_bytes
        self._buffer = bytearray()
        self._begin()

    def _begin(self) -> None:
        self._taken = 0
        self._reader = self._request()
        self._wanted = next(self._reader)

    def feed(self, data: bytes) -> list[KeyValueRequest]:
        self._buffer += data
        found = []
        while len(self._buffer) >= self._wanted:
            piece = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            try:
                self._wanted = self._reader.send(piece)
            except StopIteration as done:
                found.append(done.value)
                self._begin()
        return found

    # Generators that yield how many bytes they need, are sent these, and return what they have read.

    def _request(self) -> Generator[int, bytes, KeyValueRequest]:
        query = _Q((yield from self._take(1))[0])
        count = 0 if query in _KEYLESS else 1
        if query in _LISTED:
            (count,) = _U64.unpack((yield from self._take(8)))
            if count > MAX_KEYS:
                raise ValueError(f"{count} keys in one message; at most {MAX_KEYS}")
        keys, values = [], []
        for _ in range(count):
            keys.append((yield from self._string(KEY_BYTES)))
            for _ in range(_VALUES.get(query, 0)):
                values.append((yield from self._string(VALUE_BYTES)))
        number = 0
        if query in _NUMBER:
            (number,) = _NUMBER[query].unpack((yield from self._take(_NUMBER[query].size)))
        return KeyValueRequest(query, tuple(keys), tuple(values), number)

    def _string(self, limit: int) -> Generator[int, bytes, bytes]:
        (length,) = _U64.unpack((yield from self._take(8)))
        if length > limit:
            raise ValueError(f"a string of {length} bytes; at most {limit}")
        return (yield from self._take(length))

    def _take(self, count: int) -> Generator[int, bytes, bytes]:
        self._taken += count
        if self._taken > self._limit:
            raise ValueError(f"a message of more than {self._limit} bytes")
        return b"" if count == 0 else (yield count)
