"""Receives from whoever sends first, across hosts.

gloo has such a receive, but nothing can end it before its deadline. So this is an ordinary one, from the rank that is
known to have sent: all ranks count their messages; one that waits for anybody's asks the others for their counts, and
is told of new ones from then on. Ranks that never ask pay nothing for it.

    rank 0   receive from anyone ── how many have you sent me? ──►  rank 2   one
             receive from rank 2 ◄───────────────────────────────
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from shoal.collectives.liveness import Asked, Sent
from shoal.collectives.operation import Operation
from shoal.collectives.peer_monitor import Watch
from shoal.errors import CollectiveError

Kind = tuple[int, int]  # tag and number of bytes
LOOK_SECONDS = 0.05


class Letter(Protocol):
    def wait(self, timeout: float | None = None) -> None: ...


class Receive:
    """A receive that does not know yet from whom."""

    error: CollectiveError | None = None
    done = False
    source = -1

    def __init__(self, anyone: "Anyone", what: Operation, kind: Kind, begin: Callable[[int], Letter]) -> None:
        self.kind = kind
        self._anyone, self._what, self._begin = anyone, what, begin
        self._letter: Letter | None = None

    def found(self, source: int) -> None:
        self.source = source
        try:
            self._letter = self._begin(source)
        except CollectiveError as error:
            self.error = error

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        if self.done:
            return
        try:
            with self._anyone.watch.message(self._what, self.kind[0], timeout):
                self._anyone.wait_until(lambda: self.source >= 0)
                if self._letter is not None:
                    self._letter.wait(timeout)
                else:
                    raise self.error or self._anyone.watch.error or CollectiveError("the group was closed")
        except CollectiveError as error:
            self.error = error
            raise
        finally:
            self.done = True


class Anyone:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._change = threading.Condition()
        self._sent: Counter[tuple[int, Kind]] = Counter()  # by this rank: to whom
        self._wanted: set[tuple[int, Kind]] = set()  # who wants to be told
        self._asked: set[Kind] = set()
        self._told: Counter[tuple[int, Kind]] = Counter()  # to this rank: by whom
        self._taken: Counter[tuple[int, Kind]] = Counter()
        self._pending: list[Receive] = []
        watch.hear = self._hear

    def send(self, to: int, kind: Kind) -> None:
        """This rank sends a message."""
        with self._change:
            self._sent[to, kind] += 1
            if (to, kind) in self._wanted:
                self._tell(to, kind)

    def take(self, source: int, kind: Kind) -> None:
        """This rank receives one from a rank that it knows."""
        with self._change:
            self._taken[source, kind] += 1

    def receive(self, receive: Receive) -> None:
        with self._change:
            self._pending.append(receive)
            self._match()
            ask = receive.kind not in self._asked
            self._asked.add(receive.kind)
        if ask:
            self.watch.say(Asked(tag=receive.kind[0], num_bytes=receive.kind[1]))

    def wait_until(self, come: Callable[[], bool]) -> None:
        """Or until the group has failed."""
        with self._change:
            while not come() and self.watch.error is None:
                self._change.wait(LOOK_SECONDS)

    def _hear(self, peer: int, words: Asked | Sent) -> None:
        kind = (words.tag, words.num_bytes)
        with self._change:
            if isinstance(words, Asked):
                self._wanted.add((peer, kind))
                self._tell(peer, kind)
            else:
                self._told[peer, kind] = words.count
                self._match()

    def _tell(self, to: int, kind: Kind) -> None:
        self.watch.say(Sent(tag=kind[0], num_bytes=kind[1], count=self._sent[to, kind]), to)

    def _match(self) -> None:
        for receive in list(self._pending):
            for (source, kind), count in self._told.items():
                if kind == receive.kind and count > self._taken[source, kind]:
                    self._taken[source, kind] += 1
                    self._pending.remove(receive)
                    receive.found(source)
                    self._change.notify_all()
                    break
