"""Loads samples ahead of time, in the processes that a user's DataLoader asks for (`num_workers=4`).

A request is one microbatch. The worker announces its requests in order, and torch's own DataLoader loads them. Each
sample is seeded by (seed, pass, sample), so any process may load it.
"""

import ctypes
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.numerics.kernels import aligned, map_tensors
from shoal.numerics.seeds import SAMPLE, seed_everything

FetchRequest = tuple[tuple[int, ...], int]  # sample numbers, pass over the data
PR_SET_PDEATHSIG = 1


class _SeededDataset(Dataset[Any]):
    """A data set in which each sample draws from a random stream of its own."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, epoch = key
        seed_everything(self.seed, SAMPLE, epoch, index)
        return self.data[index]


class Prefetcher:
    """`load` reads samples in this process; `fetch` returns what other processes have loaded since `announce`."""

    def __init__(
        self, data: Any, collate: Callable[[list[Any]], Any], seed: int, loader: DataLoader[Any] | None = None
    ) -> None:
        self.data = _SeededDataset(data, seed)
        self.collate, self.loader = collate, loader
        self._expected: deque[FetchRequest] = deque()
        self._batches: Iterator[Any] = iter(())

    def announce(self, requests: Sequence[FetchRequest]) -> None:
        """Starts to load these requests, to be fetched in this order. Replaces earlier announcements."""
        assert self.loader is not None
        self._expected = deque(requests)
        keys = [[(index, epoch) for index in indices] for indices, epoch in requests]
        loader: DataLoader[Any] = DataLoader(
            self.data,
            batch_sampler=keys,  # any iterable of lists of keys
            collate_fn=self.collate,
            num_workers=self.loader.num_workers,
            prefetch_factor=self.loader.prefetch_factor,
            multiprocessing_context=self.loader.multiprocessing_context,
            worker_init_fn=_end_with_parent,
            generator=torch.Generator(),  # the default one belongs to the job
        )
        self._batches = iter(loader)

    def fetch(self, indices: Sequence[int], epoch: int) -> Any:
        wanted = (tuple(indices), epoch)
        if self._expected and self._expected[0] == wanted:
            self._expected.popleft()
            return map_tensors(next(self._batches), aligned)
        return self.load(indices, epoch)

    def load(self, indices: Sequence[int], epoch: int) -> Any:
        return map_tensors(self.collate([self.data[index, epoch] for index in indices]), aligned)


def _end_with_parent(worker: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
