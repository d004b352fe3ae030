"""Requests to the key-value server of a rendezvous, valid ones of every kind, and what takes any bytes as such."""

import random

from shoal.transport.key_value_records import KeyValueRecords
from shoal.transport.key_value_wire import KeyValueParser, KeyValueQuery, KeyValueRequest, encode_request

STORED_BYTES = 1 << 14
Q = KeyValueQuery
LISTED = (Q.CHECK, Q.WAIT, Q.MULTI_GET, Q.MULTI_SET)
KEYLESS = (Q.VALIDATE, Q.PING, Q.GETNUMKEYS, Q.LIST_KEYS, Q.CANCEL_WAIT)
NUMBERED = (Q.VALIDATE, Q.PING, Q.ADD, Q.BARRIER)


def some_requests(chance: random.Random) -> list[KeyValueRequest]:
    """One of each kind, in any order."""

    def text() -> bytes:
        return chance.randbytes(chance.choice((0, 1, 7, 300)))

    found = []
    for query in Q:
        count = 0 if query in KEYLESS else chance.randrange(5) if query in LISTED else 1
        values = {Q.SET: 1, Q.APPEND: 1, Q.QUEUE_PUSH: 1, Q.MULTI_SET: count, Q.COMPARE_SET: 2}.get(query, 0)
        number = chance.randrange(1 << 32) if query in NUMBERED else 0
        keys = tuple(chance.choice((b"k", b"n", text())) for _ in range(count))
        found.append(KeyValueRequest(query, keys, tuple(text() for _ in range(values)), number))
    chance.shuffle(found)
    return found


def key_value_stream(chance: random.Random) -> bytes:
    return b"".join(map(encode_request, some_requests(chance)[:4]))


def take_key_values(data: bytes) -> None:
    """Raises ValueError for what is no message, or too much; holds no more than came."""
    parser, records = KeyValueParser(), KeyValueRecords(STORED_BYTES)
    half = len(data) // 2
    for portion in (data[:half], data[half:]):
        for request in parser.feed(portion):
            records.answer(request)
    assert len(parser._buffer) <= len(data) and 0 <= records.num_bytes <= STORED_BYTES
