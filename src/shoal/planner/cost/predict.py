"""Predicts seconds, memory and traffic of one setup, or of many at once. Deterministic; starts no process.

Setups are grouped by pipeline (ranks, chunks, schedule); in a group everything is an array (setup_group.py). What
depends on (tensor, microbatch, recompute) alone is computed once (blocks.py). One setup takes the same path as many.

    step = m · t_max + bubble + exposed data traffic + optimizer + fixed costs of a step

t_i are the seconds of one microbatch on rank i: forward, backward, recomputation, all-reduces of tensor parallelism,
the host, messages to the next stage. The bubble is Σt_i − t_max (1F1B, GPipe), and 1/v of it interleaved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import PlanError
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, check_schedule_name
from shoal.planner.cluster import Cluster
from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS, Prediction
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.setup_group import PreparedSetups, distinct_rows, predict_group
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PredictionTable:
    """Predictions of many setups: arrays in the order of the setups."""

    seconds: np.ndarray  # infinite for an impossible setup: more stages than blocks
    terms: Mapping[str, np.ndarray]
    peak: np.ndarray  # bytes of the worker that needs most
    binds: np.ndarray  # index into MEMORY_PARTS: the largest part of that worker's memory
    binds_bytes: np.ndarray


def predict(work: Workload, setup: Setup, cluster: Cluster, runtime: Runtime | None = None) -> Prediction:
    """Predicts one setup. `runtime` is SHOAL for a job (work.lanes is known) and MEGATRON for a shape, unless given."""
    check_schedule_name(setup.schedule)
    if setup.pipeline * setup.chunks > len(work.blocks):
        stages, blocks = setup.pipeline * setup.chunks, len(work.blocks)
        raise PlanError(f"{stages} stages but {blocks} blocks", fix=f"at most {blocks} stages")
    prepared = PreparedSetups.of(work, SetupTable.of([setup]), cluster, runtime)
    group = predict_group(prepared, np.zeros(1, dtype=int), setup.pipeline, setup.chunks, setup.schedule)
    seconds = float(group.seconds[0])
    return Prediction(
        setup=setup,
        seconds=seconds,
        terms={name: float(group.terms[name][0]) for name in TERMS},
        stages=tuple(group.stage(rank) for rank in range(setup.pipeline)),
        flops=executed_flops(work, setup.recompute) * setup.batch / setup.devices / seconds,
        hidden=float(group.hidden[0]),
    )


def predict_many(
    work: Workload, setups: Sequence[Setup], cluster: Cluster, runtime: Runtime | None = None
) -> PredictionTable:
    """Predicts many setups with the same formulas on arrays: 100,000 in 2 seconds."""
    columns = SetupTable.of(setups)
    count = len(columns)
    seconds, peak = np.full(count, np.inf), np.full(count, np.inf)
    terms = {name: np.zeros(count) for name in TERMS}
    binds, binds_bytes = np.zeros(count, dtype=int), np.zeros(count)
    found = PredictionTable(seconds=seconds, terms=terms, peak=peak, binds=binds, binds_bytes=binds_bytes)
    if not count:
        return found
    prepared = PreparedSetups.of(work, columns, cluster, runtime)
    kinds, which = distinct_rows(columns, ("pipeline", "chunks", "schedule"))
    for number, (ranks, chunks, schedule) in enumerate(kinds.T.tolist()):
        if ranks * chunks > len(work.blocks):
            continue
        rows = np.flatnonzero(which == number)
        group = predict_group(prepared, rows, ranks, chunks, SCHEDULE_NAMES[schedule])
        seconds[rows] = group.seconds
        for name in TERMS:
            terms[name][rows] = group.terms[name]
        total = sum(group.memory.values())
        most = np.asarray(total).argmax(axis=1)
        every = np.arange(len(rows))
        parts = np.stack([group.memory[name][every, most] for name in MEMORY_PARTS], axis=1)
        peak[rows] = parts.sum(axis=1)
        binds[rows], binds_bytes[rows] = parts.argmax(axis=1), parts.max(axis=1)
    return found


def executed_flops(work: Workload, recompute: str = "none") -> float:
    """FLOPs of matrix products for one sample, recomputation included, as published FLOP/s count them (SC21)."""
    per = 1 / work.samples
    model = work.model_flops
    if model is None:
        model = per * sum(block.flops(backward=False) + block.flops(backward=True) for block in work.blocks)
    if recompute == "full":
        return model + per * sum(block.flops(backward=False) for block in work.blocks if block.recomputed)
    if recompute == "selective":
        cores = (op for block in work.blocks for op in block.ops if op.core and not op.backward)
        published = 1 if work.model_flops is None else 3  # a shape counts as its formula does
        return model + published * per * sum(op.flops * op.times for op in cores)
    return model
