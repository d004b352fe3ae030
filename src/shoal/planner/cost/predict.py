"""Seconds, memory and traffic of one setup, or of many at once. Deterministic; no process is started.

Setups are grouped by pipeline (ranks, chunks, schedule); inside a group everything is an array (setups, ranks). What
depends on (tensor, microbatch, recompute) alone is computed once for all that share it (blocks.py). One setup goes the
same way as many.

    step = m · t_max + bubble + exposed data traffic + optimizer + what every step costs

t_i are the seconds of one microbatch on rank i: forward, backward, recomputation, all-reduces of tensor parallelism,
the host, messages to the next stage. The bubble is Σt_i − t_max (1F1B, GPipe), a v-th of it interleaved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import InputError, PlanError
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, V_SHAPED, check_schedule_name
from shoal.planner.cluster import Cluster, Device, LinkTier, tiers
from shoal.planner.cost.blocks import BlockCosts, CutVariants, block_costs
from shoal.planner.cost.comm import message_seconds
from shoal.planner.cost.exposed_comm import PipelineTraffic, data_seconds, hop_seconds, strides_of
from shoal.planner.cost.memory import in_flight, model_state_bytes
from shoal.planner.cost.pipeline import StageRanks, bubble_seconds, stage_bounds
from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS, Prediction, StagePrediction
from shoal.planner.cost.runtime import MEGATRON, SHOAL, Runtime
from shoal.planner.cost.runtime_overhead import (
    StepLoad,
    core_sharing_factor,
    exchange_seconds,
    queueing_seconds,
    step_seconds,
    sum_seconds,
    update_seconds,
)
from shoal.planner.cost.setup import DEFAULT_NUMBERS, EXCHANGES, SYNC_MODES, Setup
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.shoal_memory import memory_bytes
from shoal.planner.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PredictionTable:
    """Many at once: arrays in the order of the setups."""

    seconds: np.ndarray  # infinite where a setup cannot be: more stages than blocks
    terms: Mapping[str, np.ndarray]
    peak: np.ndarray  # bytes of the worker that needs most
    binds: np.ndarray  # index into HOLDS: the largest part of that worker's memory
    binds_bytes: np.ndarray


def predict(work: Workload, setup: Setup, cluster: Cluster, runtime: Runtime | None = None) -> Prediction:
    """`runtime`: SHOAL for a job (work.lanes is known), MEGATRON for a shape, unless given."""
    check_schedule_name(setup.schedule)
    if setup.pipeline * setup.chunks > len(work.blocks):
        raise PlanError(
            f"{setup.pipeline * setup.chunks} stages but {len(work.blocks)} blocks",
            fix=f"at most {len(work.blocks)} stages",
        )
    whole = _PreparedSetups.of(work, SetupTable.of([setup]), cluster, runtime)
    group = _group(whole, np.zeros(1, dtype=int), setup.pipeline, setup.chunks, setup.schedule)
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
    """The same formulas on arrays: 100,000 setups in 2 seconds."""
    columns = SetupTable.of(setups)
    count = len(columns)
    seconds, peak = np.full(count, np.inf), np.full(count, np.inf)
    terms = {name: np.zeros(count) for name in TERMS}
    binds, binds_bytes = np.zeros(count, dtype=int), np.zeros(count)
    found = PredictionTable(seconds=seconds, terms=terms, peak=peak, binds=binds, binds_bytes=binds_bytes)
    if not count:
        return found
    whole = _PreparedSetups.of(work, columns, cluster, runtime)
    kinds, which = _distinct(columns, ("pipeline", "chunks", "schedule"))
    for number, (ranks, chunks, schedule) in enumerate(kinds.T.tolist()):
        if ranks * chunks > len(work.blocks):
            continue
        rows = np.flatnonzero(which == number)
        group = _group(whole, rows, ranks, chunks, SCHEDULE_NAMES[schedule])
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
    """Of matrix products for one sample, recomputation included: what published FLOP/s count (SC21)."""
    per = 1 / work.samples
    model = work.model_flops
    if model is None:
        model = per * sum(block.flops(backward=False) + block.flops(backward=True) for block in work.blocks)
    if recompute == "full":
        return model + per * sum(block.flops(backward=False) for block in work.blocks if block.recomputed)
    if recompute == "selective":
        cores = (op for block in work.blocks for op in block.ops if op.core and not op.backward)
        published = 1 if work.model_flops is None else 3  # of a shape: as its formula counts
        return model + published * per * sum(op.flops * op.times for op in cores)
    return model


# -- what all setups share --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _PreparedSetups:
    work: Workload
    setups: SetupTable
    runtime: Runtime
    device: Device
    devices: int  # of the cluster
    tiers: tuple[LinkTier, ...]
    costs: BlockCosts  # by way
    way: np.ndarray  # of each setup
    plain: list[float]  # seconds of each block, cut in no way: what stages are balanced by
    hosts: int

    @classmethod
    def of(cls, work: Workload, setups: SetupTable, cluster: Cluster, runtime: Runtime | None) -> "_PreparedSetups":
        if runtime is None:
            runtime = MEGATRON if work.lanes is None else SHOAL
        device = slowest_device(cluster, work.dtype)
        ways, way = _distinct(setups, ("tensor", "microbatch", "recompute", "sequence_parallel"))
        tensor, microbatch, recompute, sequence = ways
        levels = tiers(cluster)
        columns = CutVariants(tensor=tensor, microbatch=microbatch, recompute=recompute, sequence=sequence)
        one = np.ones(1, dtype=int)
        uncut = CutVariants(tensor=one, microbatch=one * work.samples, recompute=0 * one, sequence=0 * one)
        alone = block_costs(work, uncut, device, (), runtime)
        return cls(
            work=work,
            setups=setups,
            runtime=runtime,
            device=device,
            devices=cluster.devices,
            tiers=levels,
            costs=block_costs(work, columns, device, levels, runtime),
            way=way,
            plain=(alone.forward + alone.backward + alone.host)[0].tolist(),
            hosts=len(cluster.hosts),
        )

    def slower(self, workers: np.ndarray) -> np.ndarray:
        """How much longer an operator takes than alone on its device: workers that share one take turns, and the cores
        of a processor share its memory."""
        devices = self.devices / self.hosts  # of a host
        busy = np.minimum(devices, np.ceil(workers / self.hosts))
        crowd = (busy - 1) / max(devices - 1, 1.0)
        slower: np.ndarray = 1 + (self.device.crowded - 1) * crowd
        if self.runtime.overheads is not None:  # workers of a processor share its cores, all of them: `turns`
            return slower
        return slower * np.maximum(1.0, np.ceil(workers / self.devices))


def _distinct(setups: SetupTable, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The different rows of these columns, as columns, and which of them each setup has."""
    code = np.zeros(len(setups), dtype=np.int64)
    for name in names:
        column = setups.columns[name]
        code = code * (int(column.max()) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return np.stack([setups.columns[name][first] for name in names]), which.reshape(-1)


def slowest_device(cluster: Cluster, dtype: str) -> Device:
    """Of unequal devices the slowest counts."""
    found = [host.device for host in cluster.hosts if host.device is not None]
    if not found:
        raise InputError(
            "the cluster does not say what its devices are",
            fix="a [devices.NAME] table in its file, a preset by name, or shoal cluster probe",
        )
    return min(found, key=lambda each: each.peak_of(dtype) * each.efficiency)


# -- setups with one pipeline -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SetupGroup:
    """Arrays by setup, or by (setup, rank)."""

    seconds: np.ndarray
    terms: Mapping[str, np.ndarray]
    hidden: np.ndarray
    memory: Mapping[str, np.ndarray]
    forward: np.ndarray
    backward: np.ndarray
    tensor: np.ndarray
    parameters: np.ndarray
    output: np.ndarray
    blocks: tuple[tuple[int, ...], ...]  # by rank

    def stage(self, rank: int) -> StagePrediction:
        return StagePrediction(
            blocks=self.blocks[rank],
            forward=float(self.forward[0, rank]),
            backward=float(self.backward[0, rank]),
            tensor=float(self.tensor[0, rank]),
            parameters=float(self.parameters[0, rank]),
            output=float(self.output[0, rank]),
            memory={name: float(self.memory[name][0, rank]) for name in MEMORY_PARTS},
        )


def _group(prepared: _PreparedSetups, rows: np.ndarray, ranks: int, chunks: int, schedule: str) -> _SetupGroup:
    work, runtime, device, costs = prepared.work, prepared.runtime, prepared.device, prepared.costs
    column = {name: values[rows].astype(float) for name, values in prepared.setups.columns.items()}
    m = prepared.setups.microbatches[rows].astype(float)
    data, tensor, zero = column["data"], column["tensor"], column["zero"]
    workers = data * tensor * ranks
    sharing = prepared.slower(workers)
    bounds = stage_bounds(work, ranks * chunks, prepared.plain)
    ranked = StageRanks(bounds=bounds, ranks=ranks, chunks=chunks, folded=schedule in V_SHAPED)
    way = prepared.way[rows]

    def by_rank(name: str) -> np.ndarray:
        found: np.ndarray = ranked.sums(getattr(costs, name))[way]
        return found

    # One microbatch on each rank.
    busy = {name: by_rank(name) * sharing[:, None] for name in ("forward", "backward", "again", "host", "host_forward")}
    reduced, reduced_forward = by_rank("tensor"), by_rank("tensor_forward")
    host = busy["host"] + runtime.microbatch_seconds
    counts = np.array([float(sum(blocks)) for blocks in ranked.blocks])
    if runtime.overheads is not None:
        starts = by_rank("host") / (device.overhead * runtime.dispatch)
        host = host + runtime.overheads.microbatch(tensor, counts, starts, ranks) * device.overhead * sharing[:, None]
    strides = strides_of(runtime.order, tensor, data, float(ranks))
    output = ranked.last(costs.output)[way]
    output[:, -1] = output[:, -1] if chunks > 1 and not ranked.folded else 0.0
    parts = tensor if runtime.scatter else np.ones(len(rows))
    hop = hop_seconds(prepared.tiers, output.max(axis=1), parts, ranks, strides["pipeline"])
    hops = (2 * chunks * hop * (1 - runtime.overlap_pipeline))[:, None] * np.ones(ranks)
    computing = busy["forward"] + busy["backward"]
    each = computing + busy["again"] + host + reduced + hops
    most, every = each.argmax(axis=1), np.arange(len(rows))
    forward = busy["forward"] + busy["host_forward"] + reduced_forward
    backward = each - hops - forward
    halves = forward, (backward - busy["again"]) / 2, busy["again"]
    bubble = bubble_seconds(schedule, ranks, chunks, m, each, most, halves) + m * hops[every, most]
    # The end of the step.
    parameters = by_rank("parameters")
    if ranks * chunks == 1 or ranked.folded:
        parameters[:, 0] -= work.tied / tensor
    flow = PipelineTraffic(
        ranks=ranks, chunks=chunks, microbatches=m, forward=forward, backward=backward, parameters=parameters
    )
    exposed, hidden = data_seconds(work, runtime, prepared.tiers, column, strides, flow)
    updated = runtime.update_bytes * parameters / np.where(zero >= 1, data, 1.0)[:, None]
    updated = updated / (device.memory_bandwidth * device.stream) * sharing[:, None]
    updated += by_rank("tensors") * runtime.update_operators * device.overhead
    terms = {
        "compute": m * computing[every, most],
        "recompute": m * busy["again"][every, most],
        "tensor": m * reduced[every, most],
        "bubble": bubble,
        "data": exposed,
        "optimizer": updated.max(axis=1),
        "host": m * host[every, most] + runtime.step_seconds,
    }
    if runtime.overheads is not None:
        load = StepLoad(
            data=data,
            zero=zero,
            workers=workers,
            m=m,
            lanes=np.where(column["lanes"] > 0, column["lanes"], m * data),
            parameters=parameters,
            tensors=by_rank("tensors"),
            blocks=counts,
            weight_bytes=work.weight_bytes,
            gradient_bytes=work.gradient_bytes,
            state_bytes=work.state_bytes,
            clips=work.clips,
            tied=message_seconds(
                prepared.tiers,
                np.full(len(rows), float(ranks)),
                strides["pipeline"],
                work.tied * work.gradient_bytes / tensor,
            ),
        )
        served = column["exchange"] == EXCHANGES.index("servers")
        terms = _with_overheads(
            prepared, load, terms, m[:, None] * each, strides["data"], sharing, served, _exchange_share(column)
        )
    return _SetupGroup(
        seconds=np.sum(list(terms.values()), axis=0),
        terms=terms,
        hidden=hidden,
        memory=_memory(prepared, column, m, schedule, ranked, way, parameters),
        forward=forward,
        backward=backward,
        tensor=reduced,
        parameters=parameters,
        output=output,
        blocks=ranked.blocks,
    )


def _with_overheads(
    prepared: _PreparedSetups,
    load: StepLoad,
    terms: Mapping[str, np.ndarray],
    busy: np.ndarray,
    stride: np.ndarray,
    slower: np.ndarray,
    served: np.ndarray,
    exchange_share: np.ndarray,
) -> dict[str, np.ndarray]:
    """The terms as this runtime has them on the cores of a processor. `busy`: seconds of each rank's microbatches;
    `served`: where gradients go to servers, whose links are a term already; `often`: with what share of the steps."""
    runtime, device, slow = prepared.runtime, prepared.device, slower[:, None]
    assert runtime.overheads is not None
    added = sum_seconds(runtime.overheads, load, device) * slow
    applied = update_seconds(runtime.overheads, load, device, runtime.update_bytes, runtime.update_operators) * slow
    travels = exchange_seconds(runtime.overheads, load, device, prepared.tiers, stride) * slow * exchange_share[:, None]
    told = step_seconds(runtime.overheads, load, device) * slower
    found = {
        **terms,
        "compute": terms["compute"] + added.max(axis=1),
        # To servers a gradient goes through the same memory as to other workers, and over their links besides.
        "data": travels.max(axis=1) + np.where(served, terms["data"], 0.0),
        "optimizer": applied.max(axis=1),
        "host": terms["host"] + told,
    }
    path = np.sum(list(found.values()), axis=0)
    times = core_sharing_factor(load, path, busy + added + applied + travels + told[:, None], prepared.devices)
    found = {name: seconds * times for name, seconds in found.items()}
    return {**found, "data": found["data"] + queueing_seconds(runtime.overheads, load, prepared.devices)}


def _exchange_share(column: Mapping[str, np.ndarray]) -> np.ndarray:
    """The share of steps whose gradients travel: all, but for workers that go on by themselves for a while."""
    local = (column["exchange"] == EXCHANGES.index("servers")) & (column["mode"] == SYNC_MODES.index("local"))
    steps = np.where(column["number"] > 0, column["number"], int(DEFAULT_NUMBERS["local"]))
    found: np.ndarray = np.where(local, 1.0 / steps, 1.0)
    return found


def _memory(
    prepared: _PreparedSetups,
    column: Mapping[str, np.ndarray],
    m: np.ndarray,
    schedule: str,
    ranked: StageRanks,
    way: np.ndarray,
    parameters: np.ndarray,
) -> dict[str, np.ndarray]:
    work, runtime, costs = prepared.work, prepared.runtime, prepared.costs
    data, zero = column["data"][:, None], column["zero"][:, None]
    weights, gradients, optimizer = model_state_bytes(
        parameters, zero, data, work.weight_bytes, work.gradient_bytes * runtime.gradient_copies, work.state_bytes
    )
    here = (column["exchange"] != EXCHANGES.index("servers"))[:, None]  # else the servers have the optimizer's state
    flying = in_flight(schedule, ranked.ranks, m, ranked.chunks)
    activations = (ranked.by_chunk(costs.saved)[way] * flying).sum(axis=1)
    if runtime.adds_lanes:
        parts = memory_bytes(
            parameters=parameters,
            largest=ranked.largest(costs.parameters)[way],
            activations=activations,
            working=ranked.peak_beyond_saved(costs.saved, costs.working)[way],
            data=data,
            zero=zero,
            cut=(column["tensor"][:, None] * ranked.ranks > 1) | (zero > 0),
            lanes=np.ceil(np.maximum(column["lanes"][:, None], data) / data),
            microbatches=m[:, None] / np.ceil(np.maximum(column["lanes"][:, None], data) / data),
            weight=work.weight_bytes,
            gradient=work.gradient_bytes,
            state=work.state_bytes,
            buffers=work.buffers,
            fragmentation=runtime.fragmentation,
        )
        parts = {**parts, "optimizer": parts["optimizer"] * here}
        return {name: size * runtime.allocator for name, size in parts.items()}
    working = ranked.largest(costs.working)[way]
    whole_blocks = 2 * ranked.largest(costs.parameters)[way] * work.weight_bytes
    working = working + np.where((zero == 3) & (data > 1), whole_blocks, 0.0)
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer * here, "activations": activations,
             "working": working}  # fmt: skip
    alive = np.sum(list(parts.values()), axis=0)
    return {**parts, "other": work.buffers + (runtime.allocator - 1) * alive}
