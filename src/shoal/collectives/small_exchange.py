"""Few bytes straight from rank to rank: a small collective posts all its messages at once, and passes nothing on.

    all-gather of 4 ranks      rank 0 ─► 1 2 3    rank 1 ─► 2 3 0    rank 2 ─► 3 0 1    rank 3 ─► 0 1 2
    broadcast from rank 0      rank 0 ─► 1 2 3

Trees (run_tree.py) move fewer bytes and take more stages. Where messages cost more than their bytes, this is faster.
"""

from collections.abc import Iterable

from torch import Tensor

from shoal.collectives.run_tree import Messenger

SMALL_BYTES, SMALL_RANKS = 16 << 10, 8  # of one message; of a group


class SmallExchange:
    """Runs like a `TreeExecutor`. `receives` and `sends` have a tensor and the other rank of each message, all with
    one tag."""

    def __init__(
        self,
        messenger: Messenger,
        tag: int,
        receives: Iterable[tuple[Tensor, int]],
        sends: Iterable[tuple[Tensor, int]],
    ) -> None:
        self._messenger = messenger
        self._pending = [messenger.receive(tensor, source, tag) for tensor, source in receives]
        self._pending += [messenger.send(tensor, to, tag) for tensor, to in sends]
        self.advance()  # a rank that only sends may be done

    @property
    def done(self) -> bool:
        return not self._pending

    def advance(self) -> bool:
        """Forgets messages that are done. Returns whether there were any; raises the error of one that failed."""
        before = len(self._pending)
        while self._pending and self._pending[-1].done:
            self._pending.pop().wait()
        return len(self._pending) < before

    def wait(self) -> None:
        while self._pending:
            finished = self._messenger.finished
            if not self.advance():
                self._messenger.wait_news(finished)
