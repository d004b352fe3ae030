"""A client of a key-value server (transport/key_value_server.py) with the face of a store of torch.distributed.

One connection, one request at a time, from any thread: a thread that waits keeps the others waiting, as in torch's
own TCPStore. Torch calls these methods from C++ too, through the base class, which knows some by their names there.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from shoal.transport.addresses import connect_socket, read_address
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.key_value_wire import (
    MAGIC,
    NOT_READY,
    SILENT,
    STOP_WAITING,
    KeyValueQuery,
    KeyValueRequest,
    encode_request,
)
from shoal.transport.secure_socket import Connection, TlsSocket, handshake, secure

ANSWER_SECONDS = 30.0  # for a reply that needs no other process
DEFAULT_SECONDS = 300.0
CHUNK_BYTES = 1 << 20


_open: set["RendezvousStore"] = (
    set()
)  # torch keeps only its half of a store alive: this is the other half, until `close`


class RendezvousStore(Store):
    """`address`: `unix:PATH`, or `tcp://HOST:PORT` with credentials of this run."""

    timeout: timedelta  # of the base class, for `get` and `wait`

    def __init__(
        self,
        address: str,
        timeout: timedelta = timedelta(seconds=DEFAULT_SECONDS),
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self.address, self._credentials = address, credentials
        self._lock = threading.Lock()
        self._clones: list[RendezvousStore] = []
        self._stream = self._connect(timeout.total_seconds())
        _open.add(self)

    @property
    def host(self) -> str:
        """Where the server is, as `TCPStore.host`; empty on this machine."""
        kind, place = read_address(self.address)
        return str(place[0]) if kind == "tcp" else ""

    def _connect(self, seconds: float) -> Connection:
        opened: list[Connection] = []
        try:
            connection = connect_socket(self.address, seconds)
            opened.append(connection)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = secure(connection, self._credentials, server_side=False, roles=(Role.WORKER, Role.DRIVER))
            opened.append(stream)
            handshake(stream, seconds)
            _send(stream, encode_request(KeyValueRequest(KeyValueQuery.VALIDATE, number=MAGIC)))
        except OSError as error:
            for each in opened:
                each.close()
            raise DistNetworkError(f"no connection to the store at {self.address}: {error}") from None
        return stream

    # -- torch's contract ---------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._request(KeyValueQuery.SET, [key], [value])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._lock:
            self._wait(keys, self.timeout)
            self._post(KeyValueQuery.MULTI_GET, keys)
            return [self._take_string() for _ in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._request(KeyValueQuery.MULTI_SET, keys, values)

    def append(self, key: str, value: str | bytes) -> None:
        self._request(KeyValueQuery.APPEND, [key], [value])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        with self._lock:
            self._post(KeyValueQuery.COMPARE_SET, [key], [expected_value, desired_value])
            return self._take_string()

    def add(self, key: str, value: int) -> int:
        return self._number(KeyValueQuery.ADD, [key], number=value)

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            self._post(KeyValueQuery.CHECK, keys)
            return self._take(1) != NOT_READY

    def delete_key(self, key: str) -> bool:
        return self._number(KeyValueQuery.DELETE_KEY, [key]) > 0

    def num_keys(self) -> int:
        return self._number(KeyValueQuery.GETNUMKEYS)

    def list_keys(self) -> list[str]:
        with self._lock:
            self._post(KeyValueQuery.LIST_KEYS)
            return [self._take_string().decode() for _ in range(self._take_number())]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._request(KeyValueQuery.QUEUE_PUSH, [key], [value])

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        with self._lock:
            if block:
                self._wait([key], self.timeout)
            self._post(KeyValueQuery.QUEUE_POP, [key])
            found = [self._take_string() for _ in range(self._take_number())]
        if not found:
            raise QueueEmptyError(f"the queue {key} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        return self._number(KeyValueQuery.QUEUE_LEN, [key])

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._lock:
            self._wait(keys, self.timeout if timeout is None else timeout)

    def clone(self) -> "RendezvousStore":
        self._clones.append(RendezvousStore(self.address, self.timeout, self._credentials))
        return self._clones[-1]

    getNumKeys, deleteKey = num_keys, delete_key

    def close(self) -> None:
        """Ends the connection, and those of its clones."""
        _open.discard(self)
        for clone in self._clones:
            clone.close()
        with suppress(OSError):
            self._stream.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _request(self, query: KeyValueQuery, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        assert query in SILENT
        with self._lock:
            self._post(query, keys, values)

    def _number(self, query: KeyValueQuery, keys: Sequence[str] = (), number: int = 0) -> int:
        with self._lock:
            self._post(query, keys, number=number)
            return self._take_number()

    def _post(
        self, query: KeyValueQuery, keys: Sequence[str] = (), values: Sequence[str | bytes] = (), number: int = 0
    ) -> None:
        asked = KeyValueRequest(query, tuple(map(_as_bytes, keys)), tuple(map(_as_bytes, values)), number)
        try:
            if self._stream.fileno() < 0:
                raise ConnectionError("the connection is closed")
            _send(self._stream, encode_request(asked))
        except OSError as error:
            raise self._lost(error) from None

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._post(KeyValueQuery.WAIT, keys)
        seconds = timeout.total_seconds()
        if _ready(self._stream, seconds):
            self._take(1)
            return
        self._post(KeyValueQuery.CANCEL_WAIT)
        if self._take(1) == STOP_WAITING:  # the keys came while this side gave up
            self._take(1)
        raise DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")

    def _take_number(self) -> int:
        (number,) = struct.unpack("<q", self._take(8))
        return int(number)

    def _take_string(self) -> bytes:
        return self._take(self._take_number())

    def _take(self, count: int) -> bytes:
        found = bytearray()
        until = time.monotonic() + ANSWER_SECONDS
        try:
            while len(found) < count:
                if not _ready(self._stream, until - time.monotonic()):
                    raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s")
                with suppress(BlockingIOError):
                    more = self._stream.recv(min(count - len(found), CHUNK_BYTES))
                    if not more:
                        raise ConnectionError("it closed the connection")
                    found += more
        except OSError as error:
            raise self._lost(error) from None
        return bytes(found)

    def _lost(self, error: OSError) -> DistNetworkError:
        with suppress(OSError):
            self._stream.close()  # what the next reply belongs to is not known any more
        return DistNetworkError(f"the store at {self.address} is gone: {error}")


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


def _ready(stream: Connection, seconds: float) -> bool:
    """Waits until there is something to read, or the connection has ended."""
    if isinstance(stream, TlsSocket) and stream.pending():
        return True
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _send(stream: Connection, message: bytes) -> None:
    left = memoryview(message)
    while left:
        try:
            left = left[stream.send(left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(stream.fileno(), select.POLLOUT)
            if not poll.poll(ANSWER_SECONDS * 1000):
                raise TimeoutError(f"it takes no bytes for {ANSWER_SECONDS:g} s") from None
