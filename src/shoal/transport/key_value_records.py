"""What a key-value server holds, and what it answers: a pure state machine of bounded size."""

from collections import deque

from shoal.transport.key_value_wire import (
    NOT_READY,
    READY,
    VALUE_BYTES,
    KeyValueQuery,
    KeyValueRequest,
    as_signed,
    encode_count,
    encode_nonce,
    encode_string,
    encode_strings,
)

STORED_BYTES = 64 << 20  # keys and values together
REPLY_BYTES = 32 << 20
RECORD_BYTES = 128  # that a key costs beside its own bytes


class KeyValueFull(ValueError):
    """What a client wants to store or read is more than the server holds or sends."""


class KeyValueRecords:
    def __init__(self, stored_bytes: int = STORED_BYTES) -> None:
        self._limit = stored_bytes
        self.num_bytes = 0
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}

    def has(self, keys: tuple[bytes, ...]) -> bool:
        return all(key in self.values or key in self.queues for key in keys)

    def came(self, key: bytes, size: int) -> bool:
        """Whether so many have come to a barrier."""
        return _number(self.values.get(key, b"0")) >= size

    def answer(self, request: KeyValueRequest) -> bytes:
        """Does what a request asks, and returns the reply; empty: it has none. Waits are the server's."""
        keys, values = request.keys, request.values
        match request.query:
            case KeyValueQuery.SET | KeyValueQuery.MULTI_SET:
                for key, value in zip(keys, values, strict=True):
                    self._put(key, value)
            case KeyValueQuery.APPEND:
                self._append(keys[0], values[0])
            case KeyValueQuery.COMPARE_SET:
                return encode_string(self._compare_set(keys[0], *values))
            case KeyValueQuery.GET | KeyValueQuery.MULTI_GET:
                return self._read(keys)
            case KeyValueQuery.ADD:
                return encode_count(self._add(keys[0], request.number))
            case KeyValueQuery.BARRIER:
                self._add(keys[0], 1)
            case KeyValueQuery.CHECK:
                return READY if self.has(keys) else NOT_READY
            case KeyValueQuery.GETNUMKEYS:
                return encode_count(len(self.values))
            case KeyValueQuery.LIST_KEYS:
                return encode_strings(self.values)
            case KeyValueQuery.DELETE_KEY:
                return encode_count(self._delete(keys[0]))
            case KeyValueQuery.QUEUE_PUSH:
                self._push(keys[0], values[0])
            case KeyValueQuery.QUEUE_POP:
                return encode_strings(self._pop(keys[0]))
            case KeyValueQuery.QUEUE_LEN:
                return encode_count(len(self.queues.get(keys[0], ())))
            case KeyValueQuery.PING:
                return encode_nonce(request.number)
        return b""

    def _put(self, key: bytes, value: bytes) -> None:
        before = self.values.get(key)
        new = len(key) + RECORD_BYTES if before is None else -len(before)
        self._count(new + len(value))
        self.values[key] = value

    def _append(self, key: bytes, value: bytes) -> None:
        before = self.values.get(key, b"")
        if len(before) + len(value) > VALUE_BYTES:
            raise KeyValueFull(f"a value of more than {VALUE_BYTES} bytes")
        self._put(key, before + value)

    def _read(self, keys: tuple[bytes, ...]) -> bytes:
        found = [self.values.get(key, b"") for key in keys]
        if sum(len(value) + 8 for value in found) > REPLY_BYTES:
            raise KeyValueFull(f"a reply of more than {REPLY_BYTES} bytes")
        return b"".join(map(encode_string, found))

    def _count(self, num_bytes: int) -> None:
        if num_bytes > 0 and self.num_bytes + num_bytes > self._limit:
            raise KeyValueFull(f"{self.num_bytes + num_bytes} bytes; the rendezvous holds at most {self._limit}")
        self.num_bytes += num_bytes

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Without a value the expected one counts as there, unless it is empty: so it is in torch's store."""
        found = self.values.get(key)
        if found == expected or (found is None and not expected):
            self._put(key, desired)
            return desired
        return expected if found is None else found

    def _add(self, key: bytes, amount: int) -> int:
        total = as_signed(_number(self.values.get(key, b"0")) + amount)
        self._put(key, b"%d" % total)
        return total

    def _delete(self, key: bytes) -> int:
        found = self.values.pop(key, None)
        if found is None:
            return 0
        self._count(-len(key) - len(found) - RECORD_BYTES)
        return 1

    def _push(self, key: bytes, value: bytes) -> None:
        self._count(len(key) + len(value) + RECORD_BYTES)
        self.queues.setdefault(key, deque()).append(value)

    def _pop(self, key: bytes) -> list[bytes]:
        queue = self.queues.get(key)
        if queue is None:
            return []
        value = queue.popleft()
        self._count(-len(key) - len(value) - RECORD_BYTES)
        if not queue:
            del self.queues[key]
        return [value]


def _number(value: bytes) -> int:
    if len(value) > 20:  # 64 bits have no more digits
        raise ValueError("a value that is no number")
    return int(value)
