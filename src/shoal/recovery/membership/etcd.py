"""The store for several machines: etcd, through the JSON gateway that every etcd since 3.4 has beside its gRPC.

    etcd://host:port[,host:port…][/prefix]      etcds:// with TLS; user:password@ before the first host

Records of a run are under prefix/run/. Leases have whole seconds, rounded up, and etcd has a least (2 s unless its
election timeout was changed) and looks for ended ones twice a second: a silent worker is noticed later than with the
embedded store. Not covered: client certificates, and authorities that this machine does not trust.
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
from shoal.recovery.membership.store import Entry, LeaseEnded, Reading
from shoal.recovery.membership.store_errors import Absence

FORM = "etcd://host:port[,host:port…][/prefix]"
DEFAULT_PORT, DEFAULT_PREFIX = 2379, "shoal"
ANSWER_SECONDS = 2.0  # how long a connection or an answer may take, beyond what a wait asks for

# Codes of gRPC.
INVALID, NOT_FOUND, NOT_ALLOWED, NOT_ENABLED, UNKNOWN_CALLER = 3, 5, 7, 9, 16

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What an address says."""

    hosts: tuple[tuple[str, int], ...]
    prefix: str = DEFAULT_PREFIX
    secure: bool = False
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        user = f"{self.user}@" if self.user else ""  # nobody else's to read: the password
        return f"etcd{'s' if self.secure else ''}://{user}{hosts}/{self.prefix}"


def read_address(address: str) -> Place:
    scheme, _, rest = address.partition("://")
    authority, _, prefix = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    try:
        found = tuple(_host(each) for each in hosts.split(","))
    except ValueError as error:
        raise InputError(f"{address} is not an address of an etcd: {error}", fix=f"--store {FORM}") from None
    return Place(
        hosts=found,
        prefix=prefix.strip("/") or DEFAULT_PREFIX,
        secure=scheme == "etcds",
        user=unquote(user),
        password=unquote(password),
    )


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} names no host")
    return parts.hostname, parts.port or DEFAULT_PORT


# -- what etcd says: numbers as strings, bytes in base 64 --------------------------------------------------------------


class _Header(msgspec.Struct):
    revision: int = 0


class _Pair(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0


class _Answer(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    kvs: list[_Pair] = []
    succeeded: bool = False
    ID: int = 0
    TTL: int = 0
    token: str = ""
    events: list[Any] = []
    canceled: bool = False


class _Piece(msgspec.Struct):
    """Of an answer that comes in pieces."""

    result: _Answer | None = None
    error: Any = None


class _Failure(msgspec.Struct):
    error: str = "no reason given"
    code: int = -1


class _Refused(Exception):
    """etcd answered that it will not, or cannot."""

    def __init__(self, failure: _Failure) -> None:
        super().__init__(failure.error)
        self.code = failure.code


class Etcd:
    """One request at a time; see embedded.Embedded. A host that fails is followed by the next one of the address.

    A write that may have arrived is never said twice: a swap that had happened would look like somebody else's.
    """

    def __init__(self, address: str, run: str) -> None:
        self._place = read_address(address)
        self.address = str(self._place)
        self._base = f"{self._place.prefix}/{run}/"
        self._turn = 0  # which host is asked
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._owner = 0
        self._token = ""
        self._absence = Absence()

    def read(self, prefix: str = "") -> Reading:
        return self._reading(self._ask("kv/range", self._range(prefix), repeat=True))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        if value is None:
            change: dict[str, Any] = {"request_delete_range": {"key": self._key(key)}}
        else:
            change = {"request_put": self._record(key, value, lease)}
        unchanged = {"target": "MOD", "key": self._key(key), "mod_revision": str(expected)}
        answer = self._ask("kv/txn", {"compare": [unchanged], "success": [change]})
        return answer.header.revision if answer.succeeded else None

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self._ask("kv/put", self._record(key, value, lease)).header.revision

    def grant(self, seconds: float) -> int:
        return self._ask("lease/grant", {"TTL": str(math.ceil(seconds))}).ID

    def renew(self, lease: int) -> bool:
        return self._ask("lease/keepalive", {"ID": str(lease)}, repeat=True).TTL > 0

    def revoke(self, lease: int) -> None:
        with suppress(LeaseEnded):
            self._ask("lease/revoke", {"ID": str(lease)}, repeat=True)

    def wait(self, prefix: str, after: int, seconds: float) -> Reading | None:
        deadline = time.monotonic() + seconds
        watched = {"create_request": self._range(prefix) | {"start_revision": str(after + 1)}}
        if not self._tried(lambda: self._watched(watched, after, deadline), repeat=True):
            return None
        return self.read(prefix)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    # -- keys and records ---------------------------------------------------------------------------------------------

    def _key(self, key: str) -> bytes:
        return (self._base + key).encode()

    def _range(self, prefix: str) -> dict[str, Any]:
        first = self._key(prefix)
        return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}  # UTF-8 never ends with 0xff

    def _record(self, key: str, value: bytes, lease: int | None) -> dict[str, Any]:
        return {"key": self._key(key), "value": value, "lease": str(lease or 0)}

    def _reading(self, answer: _Answer) -> Reading:
        start = len(self._base.encode())
        entries = {pair.key[start:].decode(): Entry(pair.value, pair.mod_revision) for pair in answer.kvs}
        return Reading(answer.header.revision, entries)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: dict[str, Any], *, repeat: bool = False) -> _Answer:
        return self._tried(lambda: self._exchange(path, body), repeat=repeat)

    def _tried(self, function: Callable[[], T], *, repeat: bool) -> T:
        """Calls it with a connection to one host after another, until one answers."""
        with self._lock:
            failure: Exception | None = None
            for _ in range(len(self._place.hosts) + 1):  # the first once more: its connection may have been an old one
                connected = False
                try:
                    self._connect()
                    connected = True
                    found = function()
                    self._absence.over()
                    return found
                except _Refused as refused:
                    failure = refused
                    if refused.code == NOT_FOUND:
                        raise LeaseEnded("nothing was written to the store: the lease has ended") from refused
                    self._hang_up()
                    if refused.code in (INVALID, NOT_ALLOWED, NOT_ENABLED):
                        raise self._not_allowed(refused) from refused
                    if not repeat and refused.code != UNKNOWN_CALLER:
                        break
                except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
                    failure = error
                    self._hang_up()
                    if connected and not repeat:
                        break
                except BaseException:  # Ctrl-C between a request and its answer
                    self._hang_up()
                    raise
            assert failure is not None
            raise self._absence.error(self.address, failure) from failure

    def _not_allowed(self, refused: _Refused) -> InputError:
        who = f"user {self._place.user}" if self._place.user else "nobody in particular"
        return InputError(
            f"the store at {self.address}, asked by {who}, refuses: {refused}",
            fix="user:password@ before the host in --store, of a user that may read and write under the prefix",
        )

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._connection is not None and self._owner == os.getpid():
            return
        self._hang_up(turn=False)
        self._connection, self._owner = self._dialled(), os.getpid()
        if self._place.user:
            who = {"name": self._place.user, "password": self._place.password}
            self._token = self._exchange("auth/authenticate", who).token

    def _dialled(self) -> http.client.HTTPConnection:
        host, port = self._place.hosts[self._turn % len(self._place.hosts)]
        kind = http.client.HTTPSConnection if self._place.secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=ANSWER_SECONDS)
        connection.connect()
        return connection

    def _hang_up(self, turn: bool = True) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._token = None, ""
        self._turn += turn

    def _exchange(self, path: str, body: dict[str, Any]) -> _Answer:
        assert self._connection is not None
        text = self._posted(self._connection, path, body).read()
        if path == "lease/keepalive":
            return _piece(text)
        return msgspec.json.decode(text, type=_Answer, strict=False)

    def _watched(self, body: dict[str, Any], after: int, deadline: float) -> bool:
        """Has something happened, or happens until the deadline? On a connection of its own: it ends with it."""
        connection = self._dialled()
        try:
            stream = connection.sock
            response = self._posted(connection, "watch", body)
            began = _piece(response.readline())
            if began.canceled or began.header.revision < after:  # of a store that was here before
                return True
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                stream.settimeout(left)
                try:
                    line = response.readline()
                except TimeoutError:
                    return False
                heard = _piece(line)
                if heard.events or heard.canceled:  # cancelled: what happened since is no longer known one by one
                    return True
        finally:
            connection.close()

    def _posted(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": self._token} if self._token else {}
        connection.request("POST", f"/v3/{path}", msgspec.json.encode(body), headers)
        response = connection.getresponse()
        if response.status == http.client.OK:
            return response
        text = response.read()
        try:
            failure = msgspec.json.decode(text, type=_Failure, strict=False)
        except msgspec.DecodeError:
            raise http.client.HTTPException(f"it answers {response.status} {response.reason}: no etcd") from None
        raise _Refused(failure)


def _piece(line: bytes) -> _Answer:
    if not line:
        raise ConnectionError("it closed the connection")
    piece = msgspec.json.decode(line, type=_Piece, strict=False)
    if piece.result is None:
        raise ConnectionError(f"it ended the answer: {piece.error}")
    return piece.result
