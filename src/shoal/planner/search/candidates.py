"""Enumerates every way to spread a job over a number of devices, as columns of numbers. Pure.

A *space* lists what may be tried. A shape may be cut in any way that divides it. A job fixes its arithmetic: batch,
lanes and microbatches stay, so replicas are at most the lanes, and only placement is left to choose.

    outer   tensor × pipeline × data × microbatch × schedule × chunks     divisibility is checked one by one
    inner   zero × recompute × sequence × exchange                        the same for all: an outer product
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from shoal.errors import InputError
from shoal.parallel.pipeline_schedule import ONE_STAGE, V_SHAPED, schedule_fits
from shoal.planner.cluster import Cluster
from shoal.planner.cost.setup import EXCHANGES, RECOMPUTE, SYNC_MODES
from shoal.planner.cost.setup_table import WORDS, SetupTable
from shoal.planner.cost.workload import Workload

MAX_SAMPLES = 64  # of a shape's microbatch
MAX_CHUNKS = 8
# From the simplest on: ranks candidates of equal time.
SIMPLEST = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipe")
EXACT, TOLERANCE, INEXACT = MARKS = ("exact", "within tolerance", "not exact")


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be tried."""

    devices: tuple[int, ...]  # numbers of devices in all; each is tried
    batch: int
    layers: int  # of a shape: stages have equally many. Of a job: blocks, at least one for a stage
    tensors: tuple[int, ...] = (1,)
    pipelines: tuple[int, ...] | None = None  # None: all that divide
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    schedules: tuple[str, ...] = SIMPLEST
    sequence: tuple[bool, ...] = (False, True)  # sequence parallelism, with tensor
    servers: tuple[int, ...] = ()  # numbers of parameter servers; empty: collectives alone
    sync_modes: tuple[str, ...] = ("sync",)
    microbatch: tuple[int, ...] | None = None  # samples; None: all that divide
    lanes: int | None = None  # of a job
    microbatches: int | None = None  # of a job's lane

    def __post_init__(self) -> None:
        if self.lanes is not None and self.batch % (self.lanes * (self.microbatches or 1)):
            raise InputError(f"a batch of {self.batch} cannot be cut into {self.lanes} lanes of {self.microbatches}")


def space_of(
    work: Workload, cluster: Cluster, *, batch: int | None = None, heads: int | None = None, workers: int | None = None
) -> SearchSpace:
    """All that may be tried with this work on this cluster. `heads`: those of a shape, which tensor must divide."""
    devices = sum(host.devices for host in cluster.hosts)
    if workers is not None and not 1 <= workers <= devices:
        raise InputError(f"{workers} workers, but the cluster has {devices} devices", fix=f"--workers {devices}")
    widest = max(16, *(host.devices for host in cluster.hosts))
    sliced = any(block.sliced or block.reductions for block in work.blocks)
    slices = [n for n in divisors(heads) if n <= widest] if heads else [n for n in (1, 2, 4, 8, 16) if n <= widest]
    tensors = tuple(slices) if sliced else (1,)
    hosts = len(cluster.hosts)
    servers = tuple(sorted({1, hosts, workers or devices}))
    if work.lanes is None:
        size = work.batch if batch is None else batch
        if size is None:
            raise InputError("a shape needs --batch: samples per step", fix="--batch 1536")
        layers = max(Counter(map(id, work.blocks)).values())  # equal blocks are one object
        return SearchSpace(devices=(workers or devices,), batch=size, layers=layers, tensors=tensors, servers=servers)
    if work.batch is None or work.microbatches is None:
        raise InputError(f"{work.name} has lanes, but no batch or microbatches")
    return SearchSpace(
        devices=(workers,) if workers is not None else worker_counts(devices),
        batch=work.batch,
        layers=len(work.blocks),
        tensors=tensors,
        recompute=("none", "full"),  # the runtime has no selective recomputation
        sequence=(False,),
        servers=servers,
        lanes=work.lanes,
        microbatches=work.microbatches,
    )


def candidates(space: SearchSpace) -> SetupTable:
    """All setups of a space, in a fixed order."""
    outer = np.array([each for devices in space.devices for each in _outer(space, devices)], dtype=np.int64)
    outer = outer.reshape(-1, 6)
    inner = np.array(list(_inner(space)), dtype=np.int64)
    count, width = len(outer), len(inner)
    names = ("data", "pipeline", "tensor", "microbatch", "schedule", "chunks")
    columns = {name: np.repeat(outer[:, at], width) for at, name in enumerate(names)}
    more = ("zero", "recompute", "sequence_parallel", "exchange", "servers", "mode")
    columns |= {name: np.tile(inner[:, at], count) for at, name in enumerate(more)}
    columns["batch"] = np.full(count * width, space.batch)
    columns["lanes"] = np.full(count * width, space.lanes or 0)
    setups = SetupTable.from_columns(columns)
    return setups.take(_sensible(setups))


def _outer(space: SearchSpace, devices: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    for tensor in (n for n in space.tensors if devices % n == 0):
        for pipeline in divisors(devices // tensor):
            data = devices // tensor // pipeline
            if pipeline > space.layers or (space.pipelines is not None and pipeline not in space.pipelines):
                continue
            for size, microbatches in _microbatches(space, data):
                for schedule, chunks in _orders(space, pipeline, microbatches):
                    yield data, pipeline, tensor, size, WORDS["schedule"].index(schedule), chunks


def _microbatches(space: SearchSpace, data: int) -> Iterator[tuple[int, int]]:
    """Yields the samples of a microbatch, and the number of microbatches of the replica with fewest."""
    if space.lanes is not None:
        each = space.microbatches or 1
        if data <= space.lanes:
            yield space.batch // (space.lanes * each), space.lanes // data * each
        return
    if space.batch % data == 0:
        share = space.batch // data
        for size in divisors(share):
            if size <= MAX_SAMPLES and (space.microbatch is None or size in space.microbatch):
                yield size, share // size


def _orders(space: SearchSpace, pipeline: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yields schedules, each with its chunks."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for name in space.schedules:
        many = (1,) if name in ONE_STAGE else (2,) if name in V_SHAPED else range(1, MAX_CHUNKS + 1)
        for chunks in many:
            stages = pipeline * chunks
            cut = space.layers % stages == 0 if space.lanes is None else stages <= space.layers
            if cut and schedule_fits(name, ranks=pipeline, microbatches=microbatches, chunks=chunks):
                yield name, chunks


def _inner(space: SearchSpace) -> Iterator[tuple[int, int, int, int, int, int]]:
    sync = SYNC_MODES.index("sync")
    for zero, recompute, sequence in product(space.zeros, space.recompute, space.sequence):
        yield zero, RECOMPUTE.index(recompute), int(sequence), EXCHANGES.index("collectives"), 0, sync
    for recompute, servers, mode in product(space.recompute, space.servers, space.sync_modes):
        yield 0, RECOMPUTE.index(recompute), 0, EXCHANGES.index("servers"), servers, SYNC_MODES.index(mode)


def _sensible(setups: SetupTable) -> np.ndarray:
    """Drops what has no effect: zero needs replicas, sequence tensor; servers serve replicas of one worker each."""
    data, pipeline, tensor = (setups.columns[name] for name in ("data", "pipeline", "tensor"))
    zero, sequence = setups.columns["zero"], setups.columns["sequence_parallel"]
    served = setups.is_word("exchange", "servers")
    keep = ((zero == 0) | (data > 1)) & ((sequence == 0) | (tensor > 1))
    keep &= ~served | ((data > 1) & (pipeline * tensor == 1) & (setups.columns["servers"] <= data))
    # With a pipeline, sharded gradients would travel with every microbatch, so no system does that. A job's layout
    # also refuses sharded weights (parallel/layout.py).
    keep &= (zero != 2) | (pipeline == 1)
    if setups.columns["lanes"].any():
        keep &= (zero < 2) | (pipeline == 1)
    return np.asarray(keep)


def marks(setups: SetupTable) -> np.ndarray:
    """Indices into MARKS: the same bits on any cluster, equal up to rounding, or a different training."""
    changed = setups.is_word("exchange", "servers") & ~setups.is_word("mode", "sync")
    return np.asarray(np.where(changed, 2, (setups.columns["tensor"] > 1).astype(np.int64)))


def runnable(setups: SetupTable) -> np.ndarray:
    """Whether this runtime supports it: recomputation of whole blocks, and with servers whole models on workers."""
    one_worker = setups.devices == setups.columns["data"]
    found: np.ndarray = (
        (setups.is_word("exchange", "collectives") | (one_worker & (setups.columns["zero"] == 0)))
        & ~setups.is_word("recompute", "selective")
        & (setups.columns["sequence_parallel"] == 0)
        & ((setups.columns["zero"] < 2) | (setups.columns["pipeline"] == 1))
    )
    return found


def simplicity(setups: SetupTable) -> list[np.ndarray]:
    """Keys to sort by, the first decides first: fewer cuts, then simpler choices."""
    columns = setups.columns
    cuts = sum((columns[name] > 1).astype(np.int64) for name in ("pipeline", "tensor")) + (columns["zero"] > 0)
    place = np.array([SIMPLEST.index(name) for name in WORDS["schedule"]])
    return [
        setups.devices,
        cuts,
        columns["exchange"],
        columns["zero"],
        columns["tensor"],
        columns["pipeline"],
        columns["recompute"],
        columns["sequence_parallel"],
        columns["chunks"],
        place[columns["schedule"]],
        columns["microbatch"],
        columns["servers"],
        columns["mode"],
    ]


def without_inexact(space: SearchSpace) -> SearchSpace:
    """The space without setups whose bits depend on the cluster."""
    return replace(space, tensors=(1,), sync_modes=("sync",), servers=())


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(low + [number // n for n in reversed(low) if n * n != number])


def worker_counts(devices: int) -> tuple[int, ...]:
    """Numbers of workers worth a try: up to 8 each number, beyond that powers of two and all of them."""
    if devices <= 8:
        return tuple(range(1, devices + 1))
    return tuple(sorted({devices, *(1 << n for n in range(devices.bit_length()) if 1 << n <= devices)}))
