"""Estimates which rows of a table are requested most: accesses by range of rows, and the hottest rows.

A request names a row once, so a hot row is in most requests. The tracker samples requests, counts their keys in a small
hash table and remembers the keys with the highest counts. It halves counts regularly, so that old heat fades. The
estimate is not part of the shard's state.
"""

import numpy as np
import numpy.typing as npt

from shoal.paramserver.row_index import hash_places

RANGES = 64
COUNTERS_LOG2 = 16
REMEMBERED = 64
SETTLED = 1024  # requests that are all counted by range; afterwards sampling is sparser
COUNT_EVERY = 8  # after that, one request in this many is counted by range
SAMPLE_EVERY, SAMPLE_EVERY_LATER = 8, 64  # one request in this many is counted by key
HALVE_EVERY = 256  # samples


class HotRowTracker:
    def __init__(self, keys: int, ranges: int = RANGES) -> None:
        self._width = max(1, -(-keys // ranges))
        self._touches = np.zeros(-(-max(1, keys) // self._width), dtype=np.int64)
        self._counts = np.zeros(1 << COUNTERS_LOG2, dtype=np.float32)
        self._hottest = np.empty(0, dtype=np.int64)
        self._requests = self._samples = 0
        self._weight = 0.0  # samples, halved with the counts

    def record(self, keys: npt.NDArray[np.int64]) -> None:
        """Counts one request."""
        settled = self._requests >= SETTLED
        if not settled or self._requests % COUNT_EVERY == 0:
            touches = np.bincount(keys // self._width, minlength=len(self._touches))
            self._touches += touches * COUNT_EVERY if settled else touches
        if self._requests % (SAMPLE_EVERY_LATER if settled else SAMPLE_EVERY) == 0 and len(keys):
            self._sample(keys)
        self._requests += 1

    @property
    def loads(self) -> list[float]:
        """Accesses by range of rows."""
        return [float(each) for each in self._touches]

    def hottest(self, most: int) -> list[tuple[int, float]]:
        """The hottest keys with their share of requests, falling."""
        others = float(self._counts.mean())  # expected count of other keys in the same counter
        shares = (self._counts[hash_places(self._hottest, COUNTERS_LOG2)] - others) / max(self._weight - others, 1.0)
        order = np.lexsort((self._hottest, -shares))[:most]
        return [(int(self._hottest[each]), round(float(shares[each]), 4)) for each in order if shares[each] > 0]

    def _sample(self, keys: npt.NDArray[np.int64]) -> None:
        if self._samples and self._samples % HALVE_EVERY == 0:
            self._counts *= 0.5
            self._weight *= 0.5
        self._samples += 1
        self._weight += 1
        places = hash_places(keys, COUNTERS_LOG2)
        self._counts[places] += 1
        if len(keys) > REMEMBERED:
            counts = self._counts[places]
            keys = keys[np.argpartition(counts, -REMEMBERED)[-REMEMBERED:]]
        known = np.union1d(keys, self._hottest)
        order = np.argsort(-self._counts[hash_places(known, COUNTERS_LOG2)], kind="stable")
        self._hottest = known[order[:REMEMBERED]]
