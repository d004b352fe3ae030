"""Data as a run needs it: how many samples there are, in which order a pass sees them, and a batch of any of them.

Reads what users already have: tensors, a map-style data set, or a DataLoader (which is read, not iterated).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from shoal.job.prefetch import Prefetcher
from shoal.numerics.sampling import SampleOrder, SampleSchedule, sequential_order, shuffled_order
from shoal.numerics.seeds import ORDER, preserve_generators, seed_everything

Fetch = Callable[[Sequence[int], int], Any]  # (sample numbers, pass over the data) -> a batch, aligned


@dataclass(frozen=True, kw_only=True)
class DataSource:
    samples: int
    order: SampleOrder
    ordering: str  # what that order is, for a resumed run to compare
    fetch: Fetch
    batch: int | None = None  # what a DataLoader says; None elsewhere
    last: str | None = None
    prefetcher: Prefetcher | None = None  # where samples are loaded by processes of their own

    def arithmetic(self, schedule: SampleSchedule) -> dict[str, Any]:
        """What of the data decides the bits, as it turned out; a DataLoader's word counts over the job's."""
        return {"samples": self.samples, "shuffle": self.ordering, "last": schedule.last}


def open_data(data: Any, *, seed: int, shuffle: bool = True) -> DataSource:
    if callable(data) and not isinstance(data, Dataset | DataLoader | Tensor) and not hasattr(data, "__getitem__"):
        data = data()
    if isinstance(data, DataLoader):
        return _from_loader(data, seed)
    if isinstance(data, Tensor):
        return _from_tensors((data,), data, seed, shuffle)
    if isinstance(data, tuple | list) and data and all(isinstance(part, Tensor) for part in data):
        return _from_tensors(tuple(data), data, seed, shuffle)
    if isinstance(data, IterableDataset):
        raise _refused("an IterableDataset has no sample numbers, so no exact order")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        order, ordering = _order(len(data), seed, shuffle)
        fetch = Prefetcher(data, default_collate, seed).load
        return DataSource(samples=len(data), order=order, ordering=ordering, fetch=fetch)
    raise _refused(f"{type(data).__name__} is none of the forms that data can have")


def _refused(why: str) -> JobError:
    return JobError(
        f"data: {why}",
        fix="give tensors, a map-style data set (len and [i]), a DataLoader over one, or a function returning one",
    )


def _order(samples: int, seed: int, shuffle: bool) -> tuple[SampleOrder, str]:
    return (shuffled_order(samples, seed), "shuffled") if shuffle else (sequential_order(samples), "in order")


def _from_tensors(tensors: tuple[Tensor, ...], shape: Any, seed: int, shuffle: bool) -> DataSource:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) != 1:
        raise JobError(f"data: tensors of different lengths: {', '.join(map(str, lengths))}")

    def fetch(indices: Sequence[int], epoch: int) -> Any:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        # A fresh copy, so aligned and contiguous: a lane as a view would change the bits.
        parts = tuple(tensor.index_select(0, chosen) for tensor in tensors)
        return parts if not isinstance(shape, Tensor) else parts[0]

    order, ordering = _order(lengths[0], seed, shuffle)
    return DataSource(samples=lengths[0], order=order, ordering=ordering, fetch=fetch)


def _from_loader(loader: DataLoader[Any], seed: int) -> DataSource:
    if isinstance(loader.dataset, IterableDataset):
        raise _refused("a DataLoader over an IterableDataset has no sample numbers, so no exact order")
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise _refused("a DataLoader with a batch sampler of its own decides the batches; Shoal has to")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        raise _refused("a DataLoader with a DistributedSampler is already cut; give it without (Shoal cuts exactly)")
    samples = len(loader.dataset)  # type: ignore[arg-type]
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == samples
    if whole or isinstance(sampler, SequentialSampler):
        order, ordering = _order(samples, seed, shuffle=whole)
    else:
        order, ordering = _sampler_order(sampler, seed), type(sampler).__qualname__
        samples = len(sampler)  # type: ignore[arg-type]
    last = "drop" if loader.drop_last else "short"
    if type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate:
        # Nothing draws random numbers here, so samples need not be taken one by one.
        plain = _from_tensors(loader.dataset.tensors, None, seed, shuffle=False)
        fetch = plain.fetch
        return DataSource(
            samples=samples,
            order=order,
            ordering=ordering,
            fetch=lambda *request: list(fetch(*request)),
            batch=loader.batch_size,
            last=last,
        )
    loading = Prefetcher(loader.dataset, loader.collate_fn, seed, loader)
    return DataSource(
        samples=samples,
        order=order,
        ordering=ordering,
        fetch=loading.fetch,
        batch=loader.batch_size,
        last=last,
        prefetcher=loading if loader.num_workers else None,
    )


def _sampler_order(sampler: Any, seed: int) -> SampleOrder:
    """The order that a sampler of the user's own gives, under a seed of its own for each pass."""

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
