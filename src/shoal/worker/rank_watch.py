"""Who watches ranks that torchrun has started: they watch each other, since no driver does.

Each rank tells the store which process it is. A thread of each looks at the others on its host; when one is stopped,
the first rank that is not says so on its stderr, which torchrun passes on, and in the run's events.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from torch._C._distributed_c10d import Store

from shoal.collectives.handshake import host_identity
from shoal.recovery.membership.process import STOPPED_STATES, process_state, start_ticks
from shoal.report.events import ProcessPaused
from shoal.report.pause_watch import PauseWatch
from shoal.report.wording import paused_text
from shoal.transport.decoding import decode_json

TICK_SECONDS = 0.5


class RankProcess(msgspec.Struct, frozen=True):
    pid: int
    started: str
    host: str


class RankWatch:
    def __init__(self, rank: int, size: int, store: Store, prefix: str, emit: Callable[[ProcessPaused], None]) -> None:
        """`store`: a connection of the thread's own."""
        self._rank, self._size, self._store, self._prefix, self._emit = rank, size, store, prefix, emit
        self._known: dict[int, RankProcess] = {}
        self._said: set[int] = set()  # processes of which this rank has said that they are stopped
        self._closed = threading.Event()
        self._watch = PauseWatch(self._state)
        self._thread = threading.Thread(target=self._run, name="shoal ranks", daemon=True)

    def start(self) -> None:
        own = RankProcess(os.getpid(), start_ticks(os.getpid()) or "", host_identity())
        self._store.set(self._key(self._rank), msgspec.json.encode(own).decode())
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            with suppress(RuntimeError, msgspec.MsgspecError):  # without its store the run ends anyhow
                self.look()

    def look(self) -> None:
        self._learn()
        here = {rank: each for rank, each in self._known.items() if each.host == host_identity()}
        others: dict[int | None, int] = {rank: each.pid for rank, each in here.items() if rank != self._rank}
        stopped = {rank for rank, pid in others.items() if rank is not None and self._state(pid) in STOPPED_STATES}
        first = all(rank in stopped for rank in here if rank < self._rank)
        for event in self._watch.tick(others):
            if event.seconds is None and first:
                self._said.add(event.pid)
                self._say(event)
            elif event.seconds is not None and event.pid in self._said:  # who said the one says the other
                self._said.discard(event.pid)
                self._say(event)

    def _say(self, event: ProcessPaused) -> None:
        """The first rank records it first, for `shoal why`. Another's event may have to wait for the first rank."""
        if self._rank == 0:
            self._emit(event)
        print(f"{time.strftime('%H:%M:%S')}  {paused_text(event)}", file=sys.stderr, flush=True)
        if self._rank != 0:
            self._emit(event)

    def _learn(self) -> None:
        for rank in range(self._size):
            if rank not in self._known and self._store.check([self._key(rank)]):
                self._known[rank] = decode_json(self._store.get(self._key(rank)), RankProcess)

    def _state(self, pid: int) -> str | None:
        found = next((each for each in self._known.values() if each.pid == pid), None)
        return None if found is None else process_state(pid, found.started)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/process/{rank}"
