"""Parsers of what ranks on different hosts send each other, for tests/fuzz: sealed records, and tensors behind them."""

import random
import socket
import struct

import torch

from shoal.collectives.float_packing import LEAST_BYTES, FloatPacker
from shoal.collectives.tcp_stream import PACKED, TcpMessage, TcpStream
from shoal.errors import CollectiveError
from shoal.transport.sealed_records import OVERHEAD_BYTES, RecordCipher
from shoal.transport.sealed_socket import SealedSocket

SEAL_KEYS = bytes(range(32)), bytes(range(1, 33))


def sealed_stream(chance: random.Random) -> bytes:
    """Records as the other end seals them: what is changed in them does not open, wherever it is."""
    cipher, found = RecordCipher(SEAL_KEYS[1]), b""
    for _ in range(chance.choice((1, 2, 4))):
        plain = bytes(chance.choice((1, 16, 500)))
        record = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
        cipher.seal(plain, record)
        found += bytes(record)
    return found


def open_sealed(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[: 1 << 16])
        ours.shutdown(socket.SHUT_WR)
        connection = SealedSocket(theirs, *SEAL_KEYS)
        buffer = bytearray(100)
        while connection.recv_into(buffer):
            assert not any(buffer), "bytes that the other end has not sent"


def tensor_messages(chance: random.Random) -> bytes:
    tags, sizes = (chance.choice((0, 1, 2, 1 << 40)) for _ in range(4)), (0, 1, 8, 8, 300)
    return b"".join(
        struct.pack("<qQ", tag, size + chance.choice((0, 0, PACKED))) + bytes(size)
        for tag, size in ((tag, chance.choice(sizes)) for tag in tags)
    )


def packed_floats(chance: random.Random) -> bytes:
    count = LEAST_BYTES // 4
    values = torch.full((count,), chance.choice((0.0, 1.0, -3e38))) + torch.arange(count) % chance.choice((1, 7, 300))
    payload = FloatPacker().pack(values)
    assert payload is not None
    return bytes(payload.numpy())


def unpack_floats(data: bytes) -> None:
    FloatPacker().unpack(memoryview(data), memoryview(bytearray(LEAST_BYTES)))


class _NoOwner:
    """Of messages that nobody waits for."""

    finished = 0

    def wait(self, message: TcpMessage, seconds: float | None = None) -> None: ...

    def explain_loss(self, peer: int, fact: str) -> CollectiveError:
        return CollectiveError(fact)


def receive_tensors(data: bytes) -> None:
    """A stream of messages into a rank that wants two of them; what is wrong loses the peer, in one sentence."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[: 1 << 16])
        ours.close()
        theirs.setblocking(False)
        stream = TcpStream(0, theirs, {}, lambda peer, receive, length: CollectiveError(f"{length} bytes"))
        receives = [TcpMessage(_NoOwner(), torch.zeros(8, dtype=torch.uint8), 0, tag, "fuzz") for tag in (1, 2)]
        for receive in receives:
            stream.post(receive)
        while not stream.closed:  # what there was to read has been read
            stream.readable = True
            stream.pull(lambda: False)
            if all(receive.done for receive in receives):
                return
        assert all(receive.done for receive in receives), "a receive that waits for a peer that is lost"
