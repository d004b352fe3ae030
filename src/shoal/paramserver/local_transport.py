"""A connection within one process: the client's end and the server's end."""

from collections import deque
from collections.abc import Callable

from shoal.transport.frame_format import Frame
from shoal.transport.frame_socket import ConnectionLost


class LocalTransport:
    """The client's end of a connection within one process. `deliver` handles a sent frame at once."""

    def __init__(self, deliver: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        self._deliver, self._on_close = deliver, on_close
        self.inbox: deque[Frame] = deque()
        self.close_reason = ""  # empty: open

    def send(self, frame: Frame) -> None:
        if self.close_reason:
            raise ConnectionLost(self.close_reason)
        self._deliver(frame)

    def receive(self) -> Frame | None:
        if self.inbox:
            return self.inbox.popleft()
        if self.close_reason:
            raise ConnectionLost(self.close_reason)
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if not self.close_reason:
            self.close_reason = "it was closed"
            self._on_close()


class LocalReplyTransport:
    """The server's end of a `LocalTransport`: puts replies, with copies of their tensors, into the client's inbox."""

    def __init__(self) -> None:
        self.peer: LocalTransport | None = None

    def send(self, frame: Frame) -> None:
        if self.peer is not None:
            frame.tensors = [tensor.detach().clone() for tensor in frame.tensors]
            self.peer.inbox.append(frame)

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close_reason = "it was closed"
            self.peer = None
