"""Maps the rows of a sparse table to slots in memory, a batch at a time.

    DirectRowIndex    an array over all possible keys: one access, 4 bytes each. For tables of some million rows.
    HashRowIndex      open addressing: a few accesses, 16 to 24 bytes for each key held. For any range of keys.

A key is a row's number among the rows of its shard. The slot of a key that is not held is -1. The keys of a call are
unique: `insert` takes new ones, `remove` takes held ones. `entries` returns all keys, rising, and their slots.
"""

import numpy as np
import numpy.typing as npt
import torch

from shoal.paramserver.growable_memory import GrowableRows, Slots, anonymous_mmap

Keys = npt.NDArray[np.int64]
DIRECT_KEYS = 1 << 23  # up to 32 MB
MAX_LOAD = 0.6  # share of a hash table's places in use
MIN_PLACES = 1024
CHUNK = 1 << 16  # keys that a rebuild moves at once
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def make_index(keys: int) -> "DirectRowIndex | HashRowIndex":
    """An index for the keys 0 to `keys` - 1."""
    return DirectRowIndex(keys) if keys <= DIRECT_KEYS else HashRowIndex()


def hash_places(keys: Keys, bits: int) -> npt.NDArray[np.int64]:
    """Hashes each key to a number of so many bits."""
    return ((keys.view(np.uint64) * HASH_FACTOR) >> np.uint64(64 - bits)).astype(np.int64)


class DirectRowIndex:
    def __init__(self, keys: int) -> None:
        # Holds slot + 1: pages that were never written read as zero and take no memory.
        self._slots = np.frombuffer(anonymous_mmap(max(1, keys) * 4), dtype=np.int32)

    def find(self, keys: Keys) -> Slots:
        return np.take(self._slots, keys, mode="clip").astype(np.int64) - 1

    def insert(self, keys: Keys, slots: Slots) -> None:
        self._slots[keys] = slots + 1

    def remove(self, keys: Keys) -> None:
        self._slots[keys] = 0

    def entries(self) -> tuple[Keys, Slots]:
        keys = np.flatnonzero(self._slots)
        return keys, self._slots[keys].astype(np.int64) - 1

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes


class HashRowIndex:
    def __init__(self) -> None:
        self._places = np.zeros(MIN_PLACES, dtype=np.int32)  # slot + 1; 0: free
        self._key_of = GrowableRows(1, torch.int64)  # by slot
        self._count = 0

    def find(self, keys: Keys) -> Slots:
        found = np.full(len(keys), -1, dtype=np.int64)
        place, left = self._first_place(keys), np.arange(len(keys))
        while len(left):
            slot = self._places[place].astype(np.int64) - 1
            taken = slot >= 0
            left, place, slot = left[taken], place[taken], slot[taken]
            hit = self._keys(slot) == keys[left]
            found[left[hit]] = slot[hit]
            left, place = left[~hit], self._next_place(place[~hit])
        return found

    def insert(self, keys: Keys, slots: Slots) -> None:
        if self._count + len(keys) > MAX_LOAD * len(self._places):
            self._rebuild(self._taken(), room=self._count + len(keys))
        self._place(keys, slots)

    def remove(self, keys: Keys) -> None:
        slots = self._taken()
        self._rebuild(slots[~np.isin(slots, self.find(keys))], room=self._count - len(keys))

    def entries(self) -> tuple[Keys, Slots]:
        slots = self._taken().astype(np.int64)
        keys = self._keys(slots)
        order = np.argsort(keys)
        return keys[order], slots[order]

    @property
    def nbytes(self) -> int:
        return self._places.nbytes + len(self._key_of) * self._key_of.row_bytes

    def _first_place(self, keys: Keys) -> npt.NDArray[np.int64]:
        return hash_places(keys, len(self._places).bit_length() - 1)

    def _next_place(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (places + 1) & (len(self._places) - 1)

    def _taken(self) -> npt.NDArray[np.int32]:
        slots: npt.NDArray[np.int32] = self._places[self._places != 0] - np.int32(1)
        return slots

    def _keys(self, slots: Slots) -> Keys:
        keys: Keys = self._key_of.read(slots).view(-1).numpy()
        return keys

    def _rebuild(self, slots: npt.NDArray[np.int32], *, room: int) -> None:
        size = MIN_PLACES
        while room > MAX_LOAD * size:
            size *= 2
        self._places, self._count = np.zeros(size, dtype=np.int32), 0
        for start in range(0, len(slots), CHUNK):  # bounds the temporary memory
            some = slots[start : start + CHUNK].astype(np.int64)
            self._place(self._keys(some), some)

    def _place(self, keys: Keys, slots: Slots) -> None:
        """All keys try their place at once; of several that try the same free place, one gets it."""
        self._key_of.grow(int(slots.max(initial=-1)) + 1)
        self._key_of.write(slots, torch.from_numpy(keys).view(-1, 1))
        place, left = self._first_place(keys), slots + 1
        while len(left):
            free = self._places[place] == 0
            self._places[place[free]] = left[free]
            there = self._places[place] == left
            left, place = left[~there], self._next_place(place[~there])
        self._count += len(keys)
