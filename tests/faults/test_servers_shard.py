"""A parameter server's shard: its folder, when its process is killed."""

import os
import signal
import threading
from pathlib import Path

import pytest

from helpers.shards import captured_at
from shoal.errors import InputError
from shoal.paramserver.snapshot import SnapshotFolder

# -- files ------------------------------------------------------------------------------------------------------------


def test_a_killed_servers_folder_is_free_when_its_last_snapshot_is_written(tmp_path: Path) -> None:
    """Its child may still be writing: that holds the folder until it is done."""
    said, says = os.pipe()
    goes, go = os.pipe()
    server = os.fork()
    if server == 0:
        with SnapshotFolder(tmp_path / "shard-0") as snapshots:
            snapshots.next_incarnation()
            if os.fork() == 0:  # the child that writes
                os.close(go)
                os.write(says, b"w")
                os.read(goes, 1)  # until the server is dead and somebody waits
                snapshots.write(captured_at(3))
                os._exit(0)
            signal.pause()
    try:
        os.close(says)
        assert os.read(said, 1) == b"w"
        with pytest.raises(InputError, match=f"shard 0 is already served by process {server}"):
            SnapshotFolder(tmp_path / "shard-0")
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # dead, and still to be waited for
        waiter = threading.Timer(0.05, os.write, (go, b"g"))
        waiter.start()
        with SnapshotFolder(tmp_path / "shard-0") as snapshots:  # waits
            assert snapshots.next_incarnation() == 2 and snapshots.steps() == [3]
        waiter.join()
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        assert os.read(said, 1) == b"", "the child has ended, too"
        for descriptor in (said, goes, go):
            os.close(descriptor)
