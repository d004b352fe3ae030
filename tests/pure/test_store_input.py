"""What the embedded store's server makes of anything but requests: that one connection ends, and is counted."""

import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from shoal.recovery.membership import sqlite_messages as messages
from shoal.recovery.membership.sqlite_records import StoreRecords
from shoal.recovery.membership.sqlite_server import HELLO_SECONDS, StoreServer
from shoal.recovery.membership.store_door import StoreDoor
from shoal.recovery.membership.store_rights import hello
from shoal.transport import unix_sockets
from shoal.transport.identity import Role

TOKEN = "0123456789abcdef"
NO_UTF8 = bytes.fromhex("82a474797065a548656c6c6fa5746f6b656ea1ff")
pack = msgspec.msgpack.encode


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BEFORE_THE_TOKEN = {
    "no UTF-8": framed(NO_UTF8),
    "deep": framed(b"\x81\xa5token" + b"\x91" * 900),
    "long": (1 << 31).to_bytes(4, "big"),
    "another request": framed(pack(messages.StoreStop())),
    "another token": framed(pack(messages.StoreHello("x", Role.WORKER))),
    "a key that is a map": framed(b"\x81\x91\x80\x01"),
    "nothing": framed(b""),
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


def wrong(kind: str, **fields: object) -> bytes:
    return framed(pack({"type": kind, **fields}))


AFTER_THE_TOKEN = {
    "NaN seconds": wrong("StoreGrant", seconds=math.nan),
    "endless wait": wrong("StoreWait", prefix="", after=0, seconds=math.inf),
    "NaN wait": wrong("StoreWait", prefix="", after=1 << 62, seconds=math.nan),
    "a lease of 64 bits": wrong("StorePut", key="a", value=b"", lease=(1 << 64) - 1),
    "a revision of 64 bits": wrong("StoreWait", prefix="", after=(1 << 64) - 1, seconds=0.0),
    "a key that is no UTF-8": framed(pack(messages.StorePut("kkkk", b"", None)).replace(b"kkkk", b"k\xed\xa0\x80")),
    "an empty key": wrong("StorePut", key="", value=b"", lease=None),
    "a long key": wrong("StorePut", key="k" * 1001, value=b"", lease=None),
    "long": (messages.REQUEST_BYTES + 1).to_bytes(4, "big"),
}


class Served:
    """A server on a thread, and its records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = unix_sockets.listen(folder / messages.SOCKET, socket.SOCK_STREAM)
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        records = StoreRecords(self.folder / "store.db", time.monotonic())
        self.server = StoreServer(StoreDoor(self.listener, TOKEN), records, 60.0, 280)
        self._ready.set()
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error
        finally:
            records.close()

    def connect(self) -> socket.socket:
        connection = unix_sockets.connect(self.folder / messages.SOCKET, socket.SOCK_STREAM)
        connection.settimeout(10)
        return connection

    def known(self) -> tuple[socket.socket, messages.StoreReply]:
        """A connection that has shown the token."""
        connection = self.connect()
        return connection, self.ask(connection, hello(TOKEN, Role.ADMIN))

    def ask(self, connection: socket.socket, request: messages.StoreRequest) -> messages.StoreReply:
        connection.sendall(messages.frame(request))
        length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        return messages.decode_reply(connection.recv(length, socket.MSG_WAITALL))

    def stop(self) -> None:
        if self.thread.is_alive():
            connection, _ = self.known()
            with connection:
                self.ask(connection, messages.StoreStop())
        self.thread.join(10)
        self.listener.close()
        assert self.failure is None


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.stop()


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("name", BEFORE_THE_TOKEN)
def test_a_stranger_ends_its_own_connection(served: Served, name: str) -> None:
    other, _ = served.known()
    with other, served.connect() as stranger:
        stranger.sendall(BEFORE_THE_TOKEN[name])
        assert closed(stranger)
        assert served.ask(other, messages.StorePut("key", b"value", None)).revision == 2
    later, reply = served.known()
    later.close()
    assert reply.rejected == 1 == served.server.rejected.total()


@pytest.mark.parametrize("name", AFTER_THE_TOKEN)
def test_a_client_ends_its_own_connection(served: Served, name: str) -> None:
    other, _ = served.known()
    client, _ = served.known()
    with other, client:
        client.sendall(AFTER_THE_TOKEN[name])
        assert closed(client)
        assert served.ask(other, messages.StoreRead("")).entries == {}
    assert served.server.rejected.total() == 1


def test_a_key_may_hold_a_zero_byte_and_outlive_the_server(served: Served) -> None:
    client, _ = served.known()
    with client:
        served.ask(client, messages.StorePut("a\0b", b"\0", None))
        assert served.ask(client, messages.StoreRead("a")).entries == {"a\0b": (b"\0", 2)}
    served.stop()
    records = StoreRecords(served.folder / "store.db", 0.0)
    assert records.read("") == {"a\0b": (b"\0", 2)}
    records.close()


def test_garbage_leaves_no_descriptor_open(served: Served) -> None:
    client, _ = served.known()
    before = len(os.listdir("/proc/self/fd"))
    chance = random.Random(17)
    for _ in range(200):
        with served.connect() as stranger, suppress(ConnectionError):
            stranger.sendall(chance.randbytes(chance.randrange(1, 300)))
            if chance.random() < 0.5:
                stranger.shutdown(socket.SHUT_WR)
    with client:
        deadline = time.monotonic() + 2 * HELLO_SECONDS
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) == before
        assert served.ask(client, messages.StoreRead("")).entries == {}


def test_strangers_make_room_for_each_other(served: Served) -> None:
    client, _ = served.known()
    strangers = [served.connect() for _ in range(300)]  # more than the server has places for
    later, _ = served.known()
    with client, later:
        assert closed(strangers[0])
        assert served.ask(later, messages.StorePut("key", b"value", None)).revision == 2
        assert served.ask(client, messages.StoreRead("")).entries == {"key": (b"value", 2)}
    for stranger in strangers:
        stranger.close()
