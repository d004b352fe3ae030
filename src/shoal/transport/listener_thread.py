"""A listener and its connections on a thread of their own, until `close`: one selector, woken by a socket.

    listener ── _take: who is it? ──► a client, with its stream ──► _serve, when there is something to do

Nothing of one connection ends the others: a connection that is not taken is closed and counted.
"""

import selectors
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from shoal.transport.secure_socket import Connection


class StreamOwner(Protocol):
    stream: Connection


Client = TypeVar("Client", bound=StreamOwner)


class ListenerThread(ABC, Generic[Client]):
    def __init__(self, listener: socket.socket, name: str) -> None:
        """`name`: of the thread, which `_begin` starts once the subclass is complete."""
        self.refused = 0  # connections that were not taken
        self.last_refusal = ""
        self._clients: set[Client] = set()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        listener.setblocking(False)
        for each in (listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _take(self, connection: socket.socket) -> None:
        """Makes a client of a new connection (`_add`). Whatever it raises refuses the connection."""

    @abstractmethod
    def _serve(self, client: Client, events: int) -> None:
        """Does what a client's events are for."""

    def _seconds_until_due(self) -> float | None:
        """After which `_look` is called, whatever happens. None: nothing is due."""
        return None

    def _look(self) -> None:
        """After each turn."""

    def _begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends all connections, closes the listener and waits for the thread."""
        if not self._closing:
            self._closing = True
            self._wake.send(b"\0")
            self._thread.join()
            for each in (self._wake, self._woken):
                each.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._seconds_until_due()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._clients:  # not dropped since
                        self._serve(key.data, events)
                self._look()
        finally:
            for client in list(self._clients):
                self._drop(client)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        try:
            self._take(connection)
        except Exception as error:
            self._note_refusal(error)
            connection.close()

    def _note_refusal(self, error: Exception) -> None:
        self.refused += 1
        self.last_refusal = str(error)[:500]

    def _add(self, client: Client) -> None:
        self._clients.add(client)
        self._selector.register(client.stream.fileno(), selectors.EVENT_READ, client)

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.stream.fileno())
        with suppress(OSError):
            client.stream.close()
