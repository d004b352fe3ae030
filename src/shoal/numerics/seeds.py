"""Random streams that depend on the position in the job, never on the worker (docs/exact.md, rules 5 and 14).

`torch.default_generator.manual_seed` costs a microsecond; `torch.manual_seed` and `fork_rng` a hundred times that.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

# The purpose of a stream. Part of the arithmetic: changing a number changes every hash.
ORDER, INITIAL, DROPOUT, SAMPLE, MODULE_LOAD, LOOP, PASS, EVALUATION = range(8)


def derive(*path: int) -> int:
    """A 63-bit seed from a path of integers; different paths give different streams."""
    packed = struct.pack(f"<{len(path)}q", *path)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def pass_seed(seed: int, number: int) -> int:
    """The seed of one backward pass of a batch: the first has the run's, each further one streams of its own."""
    return derive(seed, PASS, number) if number else seed


def seed_torch(*path: int) -> None:
    torch.default_generator.manual_seed(derive(*path))


def seed_everything(*path: int) -> None:
    """Seeds torch's, Python's and NumPy's generators, for code that may draw from any of them (data augmentation)."""
    seed = derive(*path)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores torch's, Python's and NumPy's generators at the end."""
    states = torch.default_generator.get_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


class _SeededOperations(TorchDispatchMode):
    """Gives each random operation a stream of its own: the k-th draws from (seed, INITIAL, k). A process that builds
    some blocks of a model can skip the other operations and still draw the same numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.operation = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed_torch(self.seed, INITIAL, self.operation)
            self.operation += 1
        return func(*args, **(kwargs or {}))


def initialise(build: Callable[[], T], seed: int) -> T:
    """Builds a model whose initial weights depend on the seed alone. Restores the generators."""
    with preserve_generators():
        seed_everything(seed, INITIAL)
        with _SeededOperations(seed):
            return build()
