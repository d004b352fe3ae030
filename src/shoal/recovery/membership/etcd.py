"""The store for several machines: etcd, through the JSON gateway of every etcd since 3.4.

    etcd://host:port[,host:port…][/prefix]      etcds:// with TLS; user:password@ before the first host

The records of a run are under prefix/run/. etcd rounds leases up to whole seconds, has a minimum (2 s by default), and
looks for ended leases twice a second: a silent worker is noticed later than with the embedded store. Not supported:
client certificates, and authorities that this machine does not trust.
"""

import http.client
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from shoal.errors import InputError
from shoal.recovery.membership.store import LeaseEnded, StoreEntry, StoreSnapshot
from shoal.recovery.membership.store_errors import StoreOutageTimer
from shoal.transport.decoding import guarded

ADDRESS_FORM = "etcd://host:port[,host:port…][/prefix]"
DEFAULT_PORT, DEFAULT_PREFIX = 2379, "shoal"
REPLY_BYTES = 1 << 26  # of a reply; what is longer is cut off, and is then no JSON
RESPONSE_SECONDS = 2.0  # that a connection or a reply may take, beyond the time of a wait

# Codes of gRPC.
INVALID, NOT_FOUND, NOT_ALLOWED, NOT_ENABLED, UNKNOWN_CALLER = 3, 5, 7, 9, 16

T = TypeVar("T")


class EtcdAddress(msgspec.Struct, frozen=True, kw_only=True):
    hosts: tuple[tuple[str, int], ...]
    prefix: str = DEFAULT_PREFIX
    secure: bool = False
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        user = f"{self.user}@" if self.user else ""  # without the password
        return f"etcd{'s' if self.secure else ''}://{user}{hosts}/{self.prefix}"


def parse_address(address: str) -> EtcdAddress:
    scheme, _, rest = address.partition("://")
    authority, _, prefix = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    try:
        found = tuple(_parse_host(each) for each in hosts.split(","))
    except ValueError as error:
        raise InputError(f"{address} is not an address of an etcd: {error}", fix=f"--store {ADDRESS_FORM}") from None
    return EtcdAddress(
        hosts=found,
        prefix=prefix.strip("/") or DEFAULT_PREFIX,
        secure=scheme == "etcds",
        user=unquote(user),
        password=unquote(password),
    )


def _parse_host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} names no host")
    return parts.hostname, parts.port or DEFAULT_PORT


# -- replies of etcd: numbers as strings, bytes in base 64 -------------------------------------------------------------


class _EtcdHeader(msgspec.Struct):
    revision: int = 0


class _EtcdKeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0


class _EtcdResponse(msgspec.Struct):
    header: _EtcdHeader = msgspec.field(default_factory=_EtcdHeader)
    kvs: list[_EtcdKeyValue] = []
    succeeded: bool = False
    ID: int = 0
    TTL: int = 0
    token: str = ""
    events: list[Any] = []
    canceled: bool = False


class _EtcdChunk(msgspec.Struct):
    """One line of a streamed reply."""

    result: _EtcdResponse | None = None
    error: Any = None


class _EtcdFailure(msgspec.Struct):
    error: str = "no reason given"
    code: int = -1


decode_response = guarded(msgspec.json.Decoder(_EtcdResponse, strict=False).decode)
_decode_line = guarded(msgspec.json.Decoder(_EtcdChunk, strict=False).decode)
_decode_failure = guarded(msgspec.json.Decoder(_EtcdFailure, strict=False).decode)


class _EtcdRefused(Exception):
    """etcd refused a request."""

    def __init__(self, failure: _EtcdFailure) -> None:
        super().__init__(failure.error)
        self.code = failure.code


class EtcdStore:
    """One request at a time, as SqliteStore. After a host that fails the client tries the next one of the address.

    A write that may have arrived is never sent twice: a swap that had happened would look like another process's.
    """

    def __init__(self, address: str, run: str) -> None:
        self._etcd_address = parse_address(address)
        self.address = str(self._etcd_address)
        self._base = f"{self._etcd_address.prefix}/{run}/"
        self._host_index = 0  # of the host that is used
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._owner = 0
        self._token = ""
        self._outage = StoreOutageTimer()

    def read(self, prefix: str = "") -> StoreSnapshot:
        return self._snapshot(self._request("kv/range", self._range(prefix), repeat=True))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        if value is None:
            change: dict[str, Any] = {"request_delete_range": {"key": self._key(key)}}
        else:
            change = {"request_put": self._record(key, value, lease)}
        unchanged = {"target": "MOD", "key": self._key(key), "mod_revision": str(expected)}
        answer = self._request("kv/txn", {"compare": [unchanged], "success": [change]})
        return answer.header.revision if answer.succeeded else None

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self._request("kv/put", self._record(key, value, lease)).header.revision

    def grant(self, seconds: float) -> int:
        return self._request("lease/grant", {"TTL": str(math.ceil(seconds))}).ID

    def renew(self, lease: int) -> bool:
        return self._request("lease/keepalive", {"ID": str(lease)}, repeat=True).TTL > 0

    def revoke(self, lease: int) -> None:
        with suppress(LeaseEnded):
            self._request("lease/revoke", {"ID": str(lease)}, repeat=True)

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        deadline = time.monotonic() + seconds
        watched = {"create_request": self._range(prefix) | {"start_revision": str(after + 1)}}
        if not self._with_failover(lambda: self._changed_before(watched, after, deadline), repeat=True):
            return None
        return self.read(prefix)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    # -- keys and records ---------------------------------------------------------------------------------------------

    def _key(self, key: str) -> bytes:
        return (self._base + key).encode()

    def _range(self, prefix: str) -> dict[str, Any]:
        first = self._key(prefix)
        return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}  # UTF-8 never ends with 0xff

    def _record(self, key: str, value: bytes, lease: int | None) -> dict[str, Any]:
        return {"key": self._key(key), "value": value, "lease": str(lease or 0)}

    def _snapshot(self, answer: _EtcdResponse) -> StoreSnapshot:
        start = len(self._base.encode())
        # A key that is no UTF-8 is none of ours: under its replacement characters nobody looks for it.
        entries = {
            pair.key[start:].decode(errors="replace"): StoreEntry(pair.value, pair.mod_revision) for pair in answer.kvs
        }
        return StoreSnapshot(answer.header.revision, entries, self.address)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _request(self, path: str, body: dict[str, Any], *, repeat: bool = False) -> _EtcdResponse:
        return self._with_failover(lambda: self._exchange(path, body), repeat=repeat)

    def _with_failover(self, function: Callable[[], T], *, repeat: bool) -> T:
        """Calls a function with a connection to one host after another, until one answers."""
        with self._lock:
            failure: Exception | None = None
            for _ in range(len(self._etcd_address.hosts) + 1):  # the first twice: its connection may have been old
                connected = False
                try:
                    self._connect()
                    connected = True
                    found = function()
                    self._outage.clear()
                    return found
                except _EtcdRefused as refused:
                    failure = refused
                    if refused.code == NOT_FOUND:
                        raise LeaseEnded("nothing was written to the store: the lease has ended") from refused
                    self._disconnect()
                    if refused.code in (INVALID, NOT_ALLOWED, NOT_ENABLED):
                        raise self._not_allowed(refused) from refused
                    if not repeat and refused.code != UNKNOWN_CALLER:
                        break
                except (OSError, http.client.HTTPException, ValueError) as error:  # unreachable, or no etcd
                    failure = error
                    self._disconnect()
                    if connected and not repeat:
                        break
                except BaseException:  # Ctrl-C between a request and its reply
                    self._disconnect()
                    raise
            assert failure is not None
            raise self._outage.error(self.address, failure) from failure

    def _not_allowed(self, refused: _EtcdRefused) -> InputError:
        who = f"user {self._etcd_address.user}" if self._etcd_address.user else "a client without a user"
        return InputError(
            f"the store at {self.address} refuses {who}: {refused}",
            fix="put user:password@ before the host in --store, of a user that may read and write under the prefix",
        )

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None and self._owner == os.getpid():
            return
        self._disconnect(next_host=False)
        self._connection, self._owner = self._open_connection(), os.getpid()
        if self._etcd_address.user:
            who = {"name": self._etcd_address.user, "password": self._etcd_address.password}
            self._token = self._exchange("auth/authenticate", who).token

    def _open_connection(self) -> http.client.HTTPConnection:
        host, port = self._etcd_address.hosts[self._host_index % len(self._etcd_address.hosts)]
        kind = http.client.HTTPSConnection if self._etcd_address.secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=RESPONSE_SECONDS)
        connection.connect()
        return connection

    def _disconnect(self, next_host: bool = True) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._token = None, ""
        self._host_index += next_host

    def _exchange(self, path: str, body: dict[str, Any]) -> _EtcdResponse:
        assert self._connection is not None
        text = self._post(self._connection, path, body).read(REPLY_BYTES)
        return _decode_chunk(text) if path == "lease/keepalive" else decode_response(text)

    def _changed_before(self, body: dict[str, Any], after: int, deadline: float) -> bool:
        """Whether a record changed after that revision, or does before the deadline. Uses a connection of its own."""
        connection = self._open_connection()
        try:
            stream = connection.sock
            response = self._post(connection, "watch", body)
            began = _decode_chunk(response.readline(REPLY_BYTES))
            if began.canceled or began.header.revision < after:  # a revision of an earlier store
                return True
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                stream.settimeout(left)
                try:
                    line = response.readline(REPLY_BYTES)
                except TimeoutError:
                    return False
                reply = _decode_chunk(line)
                if reply.events or reply.canceled:  # cancelled: etcd no longer has the single changes
                    return True
        finally:
            connection.close()

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": self._token} if self._token else {}
        connection.request("POST", f"/v3/{path}", msgspec.json.encode(body), headers)
        response = connection.getresponse()
        if response.status == http.client.OK:
            return response
        text = response.read(REPLY_BYTES)
        try:
            failure = _decode_failure(text)
        except msgspec.DecodeError:
            raise http.client.HTTPException(f"it answers {response.status} {response.reason}: it is no etcd") from None
        raise _EtcdRefused(failure)


def _decode_chunk(line: bytes) -> _EtcdResponse:
    if not line:
        raise ConnectionError("the store closed the connection")
    chunk = _decode_line(line)
    if chunk.result is None:
        raise ConnectionError(f"the store ended the reply: {chunk.error}")
    return chunk.result
