"""Frames, transports and the server's loop: with real processes."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command import forked
from helpers.server_guests import Echo, Guest, turns
from shoal.paramserver.server import ParameterServer
from shoal.transport.frame_format import FrameLimits


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ParameterServer]:
    made = ParameterServer(Echo(), [f"unix:{tmp_path}/shard"], limits=FrameLimits(body_bytes=1 << 24))
    yield made
    made.close()


# -- many at once ------------------------------------------------------------------------------------------------------


def test_a_fork_does_not_keep_connections_alive(server: ParameterServer) -> None:
    """A worker's death is noticed though a child of it (a data loader, say) lives on."""
    guest = Guest(server)
    heard, told = os.pipe()

    def play() -> None:
        os.close(told)
        os.read(heard, 1)  # lives until this test ends it

    child = forked(play)
    guest.close()
    turns(server, lambda: server.close_counts)
    assert server.close_counts == {"left": 1}
    os.close(told)
    os.close(heard)
    os.waitpid(child, 0)
