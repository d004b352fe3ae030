"""Which rows of a table are asked for: touches by range of rows, and the rows that are hot.

Each request names a row once, so a hot row is one that is in most requests. Some requests are looked at: counted in a
small table by hashed key, and the keys with the highest counts are remembered. Counts are halved now and then: what was
hot long ago cools down. All of it is an estimate, and no state of the shard.
"""

import numpy as np
import numpy.typing as npt

RANGES = 64
COUNTERS_LOG2 = 16
REMEMBERED = 64
COUNT_EVERY = 8  # requests: one is counted by range, for all of them
LOOK_EVERY, LATER_EVERY = 8, 64  # requests: one is looked at by key
SETTLED = 1024  # requests after which looks are rarer, and up to which all are counted
HALVE_EVERY = 256  # looks
FACTOR = np.uint64(0x9E3779B97F4A7C15)


class HotRowTracker:
    def __init__(self, keys: int, ranges: int = RANGES) -> None:
        self._width = max(1, -(-keys // ranges))
        self._touches = np.zeros(-(-max(1, keys) // self._width), dtype=np.int64)
        self._counts = np.zeros(1 << COUNTERS_LOG2, dtype=np.float32)
        self._hottest = np.empty(0, dtype=np.int64)
        self._requests = self._looks = 0
        self._seen = 0.0  # looks, halved as the counts are

    def record(self, keys: npt.NDArray[np.int64]) -> None:
        """One request."""
        settled = self._requests >= SETTLED
        if not settled or self._requests % COUNT_EVERY == 0:
            touches = np.bincount(keys // self._width, minlength=len(self._touches))
            self._touches += touches * COUNT_EVERY if settled else touches
        if self._requests % (LATER_EVERY if settled else LOOK_EVERY) == 0 and len(keys):
            self._look(keys)
        self._requests += 1

    @property
    def loads(self) -> list[float]:
        """Touches by range, rows rising."""
        return [float(each) for each in self._touches]

    def hottest(self, most: int) -> list[tuple[int, float]]:
        """Keys, and the share of requests that each is in, falling."""
        others = float(self._counts.mean())  # keys that share a counter
        shares = (self._counts[self._place(self._hottest)] - others) / max(self._seen - others, 1.0)
        order = np.lexsort((self._hottest, -shares))[:most]
        return [(int(self._hottest[each]), round(float(shares[each]), 4)) for each in order if shares[each] > 0]

    def _look(self, keys: npt.NDArray[np.int64]) -> None:
        if self._looks and self._looks % HALVE_EVERY == 0:
            self._counts *= 0.5
            self._seen *= 0.5
        self._looks += 1
        self._seen += 1
        places = self._place(keys)
        self._counts[places] += 1
        if len(keys) > REMEMBERED:
            counts = self._counts[places]
            keys = keys[np.argpartition(counts, -REMEMBERED)[-REMEMBERED:]]
        known = np.union1d(keys, self._hottest)
        order = np.argsort(-self._counts[self._place(known)], kind="stable")
        self._hottest = known[order[:REMEMBERED]]

    def _place(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return ((keys.view(np.uint64) * FACTOR) >> np.uint64(64 - COUNTERS_LOG2)).astype(np.int64)
