"""Servers for scripts, tests and benchmarks: a process on this host for each shard.

with LocalServers(2) as servers, ParameterClient(servers.addresses) as client: ...
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.paramserver.child_process import fork_child, read_to_end
from shoal.paramserver.client import ParameterClient
from shoal.paramserver.permissions import TOKEN_VARIABLE
from shoal.transport.owned_folder import OwnedFolder


class LocalServers:
    """`count` servers, forked from this process, which die with it. With a `folder`, they write snapshots every
    `snapshot_seconds` and on request, and a restarted server continues from its newest one."""

    def __init__(
        self,
        count: int,
        *,
        folder: Path | str | None = None,
        token: str | None = None,
        snapshot_seconds: float | None = None,
        addresses: Sequence[str] | None = None,
        make_shard: Callable[[int, int, int], Any] | None = None,
        **settings: Any,
    ) -> None:
        """`addresses`: by default sockets in a temporary folder. `make_shard(shard, shards, server_incarnation)` makes
        the shards; the default is a plain `ParameterShard`. `settings`: of `ParameterServer`."""
        if count < 1:
            raise InputError(f"{count} servers: at least 1 is needed")
        if addresses is not None and len(addresses) != count:
            raise InputError(f"{count} servers, but {len(addresses)} addresses")
        self._owned = OwnedFolder("servers")
        self._temporary = self._owned.path
        self._folder = Path(folder) if folder is not None else None
        self._make_shard = make_shard
        self._settings = {"token": token, "snapshot_seconds": snapshot_seconds, **settings}
        self._requested = list(addresses or (f"unix:{self._temporary}/shard-{shard}" for shard in range(count)))
        self.addresses: list[str] = list(self._requested)
        self.pids: list[int] = [0] * count
        try:
            if make_shard is None:
                import torch._dynamo  # noqa: F401  torch's optimizers import it at their first step: here, once for all
            for shard in range(count):
                self._start(shard)
        except BaseException:
            self.close()
            raise

    def kill(self, shard: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a server and waits for its exit."""
        pid, self.pids[shard] = self.pids[shard], 0
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def restart(self, shard: int) -> None:
        """Kills a server and starts a new process, which restores the newest snapshot."""
        self.kill(shard)
        self._start(shard)

    def close(self) -> None:
        for shard in range(len(self.pids)):
            self.kill(shard)
        self._owned.remove()

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, shard: int) -> None:
        """Forks, and waits until the server listens."""

        def work(pipe: int) -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                self._run(shard, pipe)
            except InputError as error:
                os.write(pipe, f"!{error}".encode())

        sys.stdout.flush()
        sys.stderr.flush()
        self.pids[shard], pipe = fork_child(work)
        text = read_to_end(pipe).decode()
        if not text or text.startswith("!"):
            self.kill(shard)
            raise InputError(text[1:] or f"the server of shard {shard} did not start: see its traceback")
        self.addresses[shard] = self._requested[shard] = text  # a restarted server has the same address

    def _run(self, shard: int, ready_pipe: int) -> None:
        import torch

        from shoal.paramserver.server import ParameterServer
        from shoal.paramserver.shard import ParameterShard
        from shoal.paramserver.snapshot import SnapshotFolder

        torch.set_num_threads(1)
        count = len(self.pids)
        snapshots, incarnation, newest = None, 1, None
        if self._folder is not None:
            snapshots = SnapshotFolder(self._folder / f"shard-{shard}")
            incarnation = snapshots.next_incarnation()
            newest = snapshots.newest()
        if self._make_shard is not None:
            served = self._make_shard(shard, count, incarnation)
        else:
            load = snapshots.rewind if snapshots is not None else None
            served = ParameterShard(shard=shard, shards=count, server_incarnation=incarnation, load_snapshot=load)
        if newest is not None:
            served.restore(newest)
        server = ParameterServer(served, [self._requested[shard]], snapshots=snapshots, **self._settings)
        os.write(ready_pipe, server.addresses[0].encode())
        os.close(ready_pipe)
        server.serve(lambda: False)


def connect(
    addresses: Sequence[str] | str | None = None, worker: int | None = None, **settings: Any
) -> ParameterClient:
    """Connects to servers. Defaults come from the environment: SHOAL_SERVERS (addresses, separated by commas),
    SHOAL_SERVERS_TOKEN or SHOAL_TOKEN, and RANK for the worker's number."""
    if addresses is None:
        addresses = os.environ.get("SHOAL_SERVERS", "")
    if isinstance(addresses, str):
        addresses = [each.strip() for each in addresses.split(",") if each.strip()]
    if not addresses:
        raise InputError("no servers: SHOAL_SERVERS is not set", fix="shoal run SCRIPT --servers 1; or addresses=[…]")
    if worker is None:
        rank = os.environ.get("RANK", "0")
        if not (rank.isascii() and rank.isdigit()):
            raise InputError(f"RANK is {rank!r}, which is not a worker's number", fix="RANK=0, or worker=0")
        worker = int(rank)
    given = os.environ.get(TOKEN_VARIABLE) or os.environ.get("SHOAL_TOKEN")
    settings.setdefault("token", given or None)
    return ParameterClient(addresses, worker=worker, **settings)
