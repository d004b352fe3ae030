"""A job's data: the number of samples, their order in each pass, and a function that loads any batch of them.

Accepts tensors, a map-style data set, or a DataLoader, which is read for its settings and not iterated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from shoal.errors import JobError
from shoal.job.collate import collate
from shoal.job.prefetch import Prefetcher
from shoal.numerics.sampling import SampleOrder, SampleSchedule, sequential_order, shuffled_order
from shoal.numerics.seeds import ORDER, preserve_generators, seed_everything

Collate = Callable[[list[Any]], Any]  # samples -> a batch
Fetch = Callable[[Sequence[int], int], Any]  # (sample numbers, pass over the data) -> a batch, aligned


@dataclass(frozen=True, kw_only=True)
class DataSource:
    samples: int
    order: SampleOrder
    ordering: str  # the order's name; a resumed run compares it
    fetch: Fetch
    batch: int | None = None  # of a DataLoader
    last: str | None = None
    prefetcher: Prefetcher | None = None  # with a DataLoader that has worker processes

    def arithmetic(self, schedule: SampleSchedule) -> dict[str, Any]:
        """The properties of the data that decide the bits. A DataLoader's settings override the job's."""
        return {"samples": self.samples, "shuffle": self.ordering, "last": schedule.last}


def open_data(data: Any, *, seed: int, shuffle: bool = True, collate_fn: Collate | None = None) -> DataSource:
    """`collate_fn`: makes a batch of a list of samples; of a DataLoader its own is used where this is None."""
    if callable(data) and not isinstance(data, Dataset | DataLoader | Tensor) and not hasattr(data, "__getitem__"):
        data = data()
    if isinstance(data, DataLoader):
        return _from_loader(data, seed, collate_fn or data.collate_fn)
    tensors = tuple(data) if isinstance(data, tuple | list) else (data,)
    if tensors and all(isinstance(each, Tensor) for each in tensors):
        if collate_fn is None:
            return _from_tensors(tensors, data, seed, shuffle)
        data = data if isinstance(data, Tensor) else TensorDataset(*tensors)
    if isinstance(data, IterableDataset):
        raise _refused("an IterableDataset has no sample numbers, so no exact order")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        order, ordering = _order(len(data), seed, shuffle)
        fetch = Prefetcher(data, collate_fn or collate, seed).load
        return DataSource(samples=len(data), order=order, ordering=ordering, fetch=fetch)
    raise _refused(f"{type(data).__name__} is not a supported type")


def _refused(why: str) -> JobError:
    fix = "give tensors, a map-style data set (len and [i]), a DataLoader over one, or a function returning one"
    return JobError(f"data: {why}", fix=fix)


def _order(samples: int, seed: int, shuffle: bool) -> tuple[SampleOrder, str]:
    return (shuffled_order(samples, seed), "shuffled") if shuffle else (sequential_order(samples), "in order")


def _from_tensors(tensors: tuple[Tensor, ...], shape: Any, seed: int, shuffle: bool) -> DataSource:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) != 1:
        raise JobError(f"data: tensors of different lengths: {', '.join(map(str, lengths))}")

    def fetch(indices: Sequence[int], epoch: int) -> Any:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        # A fresh copy is aligned and contiguous; a view would change the bits (docs/exact.md, rule 6).
        copies = tuple(tensor.index_select(0, chosen) for tensor in tensors)
        return copies if not isinstance(shape, Tensor) else copies[0]

    order, ordering = _order(lengths[0], seed, shuffle)
    return DataSource(samples=lengths[0], order=order, ordering=ordering, fetch=fetch)


def _from_loader(loader: DataLoader[Any], seed: int, collate_fn: Collate) -> DataSource:
    if isinstance(loader.dataset, IterableDataset):
        raise _refused("a DataLoader over an IterableDataset has no sample numbers, so no exact order")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise _refused("a DataLoader with its own batch sampler decides the batches, which Shoal has to do")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise _refused("a DataLoader with a DistributedSampler has one rank's samples; leave the sampler out")
    samples = len(loader.dataset)  # type: ignore[arg-type]
    shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == samples
    if shuffled or isinstance(sampler, SequentialSampler):
        order, ordering = _order(samples, seed, shuffle=shuffled)
    else:
        order, ordering = _sampler_order(sampler, seed), type(sampler).__qualname__
        samples = len(sampler)  # type: ignore[arg-type]
    last = "drop" if loader.drop_last else "short"
    source = partial(DataSource, samples=samples, order=order, ordering=ordering, batch=loader.batch_size, last=last)
    if type(loader.dataset) is TensorDataset and collate_fn is default_collate:
        # No sample draws random numbers, so a batch is indexed at once.
        fetch = _from_tensors(loader.dataset.tensors, None, seed, shuffle=False).fetch
        return source(fetch=lambda *request: list(fetch(*request)))
    prefetcher = Prefetcher(loader.dataset, collate_fn, seed, loader)
    return source(fetch=prefetcher.fetch, prefetcher=prefetcher if loader.num_workers else None)


def _sampler_order(sampler: Any, seed: int) -> SampleOrder:
    """The order of the user's own sampler, with one seed per pass."""

    def order(epoch: int) -> Sequence[int]:
        with preserve_generators():
            seed_everything(seed, ORDER, epoch)
            generator = getattr(sampler, "generator", None)
            if generator is not None:
                generator.manual_seed(torch.default_generator.initial_seed())
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return list(sampler)

    return order
