"""Servers for scripts, tests and benchmarks: processes of their own on this host, one for each shard.

with Servers(2) as servers, Client(servers.addresses) as client: ...
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.paramserver.client import ParameterClient

PR_SET_PDEATHSIG = 1


class LocalServers:
    """So many servers, forked from this process, that end with it. They keep snapshots in `folder` if there is one,
    every `keep_seconds` and when asked to; a server that is started again goes on from its newest."""

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
        """`addresses`: where each listens, else on sockets in a folder that is removed at the end. `make(shard, shards,
        boot)` gives the shard, else a plain one. `settings`: of `Server`."""
        if count < 1:
            raise InputError(f"{count} servers: at least 1 is needed")
        if addresses is not None and len(addresses) != count:
            raise InputError(f"{count} servers, but {len(addresses)} addresses")
        self._temporary = Path(tempfile.mkdtemp(prefix="shoal-"))
        self._folder = Path(folder) if folder is not None else None
        self._token, self._snapshot_seconds, self._make_shard, self._settings = (
            token,
            snapshot_seconds,
            make_shard,
            settings,
        )
        self._requested = list(addresses or (f"unix:{self._temporary}/shard-{shard}" for shard in range(count)))
        self.addresses: list[str] = list(self._requested)
        self.pids: list[int] = [0] * count
        try:
            if make_shard is None:
                import torch._dynamo  # noqa: F401  what torch's optimizers import at their first step: once for all
            for shard in range(count):
                self._start(shard)
        except BaseException:
            self.close()
            raise

    def kill(self, shard: int, number: int = signal.SIGKILL) -> None:
        """A signal to one of them, and waits for its end."""
        pid, self.pids[shard] = self.pids[shard], 0
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def restart(self, shard: int) -> None:
        """Kill -9, and a new process in its place, which takes up the newest snapshot."""
        self.kill(shard)
        self._start(shard)

    def close(self) -> None:
        for shard in range(len(self.pids)):
            self.kill(shard)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, shard: int) -> None:
        """Forks, and waits until the server listens."""
        heard, told = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(heard)
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear, and to end this process
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                if os.getppid() == parent:
                    self._run(shard, told)
                    code = 0
            except InputError as error:
                os.write(told, f"!{error}".encode())
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(told)
        self.pids[shard] = pid
        text = b""
        while part := os.read(heard, 4096):
            text += part
        os.close(heard)
        if not text or text.startswith(b"!"):
            self.kill(shard)
            raise InputError(text[1:].decode() or f"the server of shard {shard} did not start: see its traceback")
        self.addresses[shard] = text.decode()
        self._requested[shard] = text.decode()  # the same again after a restart

    def _run(self, shard: int, ready_pipe: int) -> None:
        import torch

        from shoal.paramserver.server import ParameterServer
        from shoal.paramserver.shard import ParameterShard
        from shoal.paramserver.snapshot import SnapshotFolder

        torch.set_num_threads(1)
        count = len(self.pids)
        snapshots = None
        boot = 1
        newest = None
        if self._folder is not None:
            snapshots = SnapshotFolder(self._folder / f"shard-{shard}", shard=shard)
            boot = snapshots.next_incarnation()
            newest = snapshots.newest()
        if self._make_shard is not None:
            held = self._make_shard(shard, count, boot)
        else:
            kept = snapshots.rewind if snapshots is not None else None
            held = ParameterShard(shard=shard, shards=count, server_incarnation=boot, load_snapshot=kept)
        if newest is not None:
            held.restore(newest)
        server = ParameterServer(
            held,
            [self._requested[shard]],
            token=self._token,
            snapshots=snapshots,
            snapshot_seconds=self._snapshot_seconds,
            **self._settings,
        )
        os.write(ready_pipe, server.addresses[0].encode())
        os.close(ready_pipe)
        server.serve(lambda: False)


def connect(
    addresses: Sequence[str] | str | None = None, worker: int | None = None, **settings: Any
) -> ParameterClient:
    """A client of servers that are named here or in the environment: SHOAL_SERVERS (their addresses, with commas),
    SHOAL_TOKEN, and RANK for the number of the worker."""
    if addresses is None:
        addresses = os.environ.get("SHOAL_SERVERS", "")
    if isinstance(addresses, str):
        addresses = [each.strip() for each in addresses.split(",") if each.strip()]
    if not addresses:
        raise InputError("no servers: SHOAL_SERVERS is not set", fix="shoal run SCRIPT --servers 1; or addresses=[…]")
    if worker is None:
        rank = os.environ.get("RANK", "0")
        if not (rank.isascii() and rank.isdigit()):
            raise InputError(f"RANK is {rank!r}, which is no number of a worker", fix="RANK=0, or worker=0")
        worker = int(rank)
    settings.setdefault("token", os.environ.get("SHOAL_TOKEN") or None)
    return ParameterClient(addresses, worker=worker, **settings)
