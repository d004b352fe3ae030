"""Predicts setups of one pipeline (ranks, chunks, schedule) together. Arrays are by setup, or (setups, ranks)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.parallel.pipeline_schedule import V_SHAPED
from shoal.planner.cluster import Cluster, Device, LinkTier, tiers
from shoal.planner.cost.blocks import BlockCosts, CutVariants, block_costs
from shoal.planner.cost.comm import message_seconds
from shoal.planner.cost.compute import slowest_device
from shoal.planner.cost.exposed_comm import PipelineTraffic, data_seconds, hop_seconds, strides_of
from shoal.planner.cost.memory import in_flight, model_state_bytes
from shoal.planner.cost.pipeline import StageRanks, bubble_seconds, stage_bounds
from shoal.planner.cost.prediction import MEMORY_PARTS, StagePrediction
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
from shoal.planner.cost.setup import DEFAULT_NUMBERS, EXCHANGES, SYNC_MODES
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.shoal_memory import memory_bytes
from shoal.planner.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PreparedSetups:
    """What all setups of one prediction share."""

    work: Workload
    setups: SetupTable
    runtime: Runtime
    device: Device
    devices: int  # of the cluster
    tiers: tuple[LinkTier, ...]
    costs: BlockCosts  # by variant
    variant: np.ndarray  # of each setup
    uncut: list[float]  # seconds of each uncut block, which balance the stages
    hosts: int

    @classmethod
    def of(cls, work: Workload, setups: SetupTable, cluster: Cluster, runtime: Runtime | None) -> "PreparedSetups":
        if runtime is None:
            runtime = MEGATRON if work.lanes is None else SHOAL
        device = slowest_device(cluster, work.dtype)
        variants, variant = distinct_rows(setups, ("tensor", "microbatch", "recompute", "sequence_parallel"))
        tensor, microbatch, recompute, sequence = variants
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
            variant=variant,
            uncut=(alone.forward + alone.backward + alone.host)[0].tolist(),
            hosts=len(cluster.hosts),
        )

    def slower(self, workers: np.ndarray) -> np.ndarray:
        """How much longer an operator takes than alone: workers that share a device take turns, and the cores of a CPU
        share its memory."""
        devices = self.devices / self.hosts  # of a host
        busy = np.minimum(devices, np.ceil(workers / self.hosts))
        crowd = (busy - 1) / max(devices - 1, 1.0)
        slower: np.ndarray = 1 + (self.device.crowded - 1) * crowd
        if self.runtime.overheads is not None:  # workers share all cores of a CPU: core_sharing_factor
            return slower
        return slower * np.maximum(1.0, np.ceil(workers / self.devices))


def distinct_rows(setups: SetupTable, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of these columns, as columns, and the index of each setup's row."""
    code = np.zeros(len(setups), dtype=np.int64)
    for name in names:
        column = setups.columns[name]
        code = code * (int(column.max()) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return np.stack([setups.columns[name][first] for name in names]), which.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class SetupGroup:
    """Predictions of a group."""

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


@dataclass(frozen=True, kw_only=True)
class _GroupInputs:
    prepared: PreparedSetups
    schedule: str
    ranked: StageRanks
    column: Mapping[str, np.ndarray]  # of the setups of the group
    m: np.ndarray  # microbatches
    variant: np.ndarray
    workers: np.ndarray
    sharing: np.ndarray  # how much longer operators take than alone
    strides: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, prepared: PreparedSetups, rows: np.ndarray, ranks: int, chunks: int, schedule: str) -> "_GroupInputs":
        column = {name: values[rows].astype(float) for name, values in prepared.setups.columns.items()}
        bounds = stage_bounds(prepared.work, ranks * chunks, prepared.uncut)
        workers = column["data"] * column["tensor"] * ranks
        return cls(
            prepared=prepared,
            schedule=schedule,
            ranked=StageRanks(bounds=bounds, ranks=ranks, chunks=chunks, folded=schedule in V_SHAPED),
            column=column,
            m=prepared.setups.microbatches[rows].astype(float),
            variant=prepared.variant[rows],
            workers=workers,
            sharing=prepared.slower(workers),
            strides=strides_of(prepared.runtime.order, column["tensor"], column["data"], float(ranks)),
        )

    def by_rank(self, name: str) -> np.ndarray:
        return np.asarray(self.ranked.sums(getattr(self.prepared.costs, name))[self.variant])

    @property
    def block_counts(self) -> np.ndarray:
        return np.array([float(sum(blocks)) for blocks in self.ranked.blocks])


@dataclass(frozen=True, kw_only=True)
class _MicrobatchSeconds:
    """Seconds of one microbatch by (setup, rank)."""

    computing: np.ndarray
    again: np.ndarray  # recomputation
    host: np.ndarray
    reduced: np.ndarray  # all-reduces of tensor parallelism
    hops: np.ndarray  # messages between stages
    forward: np.ndarray
    backward: np.ndarray  # recomputation included
    output: np.ndarray  # bytes to the next stage

    @property
    def total(self) -> np.ndarray:
        return np.asarray(self.computing + self.again + self.host + self.reduced + self.hops)


def _microbatch(group: _GroupInputs) -> _MicrobatchSeconds:
    prepared, ranked, sharing, tensor = group.prepared, group.ranked, group.sharing[:, None], group.column["tensor"]
    runtime, device, ranks, chunks = prepared.runtime, prepared.device, ranked.ranks, ranked.chunks
    names = ("forward", "backward", "again", "host", "host_forward")
    busy = {name: group.by_rank(name) * sharing for name in names}
    host = busy["host"] + runtime.microbatch_seconds
    if runtime.overheads is not None:
        starts = group.by_rank("host") / (device.overhead * runtime.dispatch)
        extra = runtime.overheads.microbatch(tensor, group.block_counts, starts, ranks)
        host = host + extra * device.overhead * sharing
    output = ranked.last(prepared.costs.output)[group.variant]
    output[:, -1] = output[:, -1] if chunks > 1 and not ranked.folded else 0.0
    slices = tensor if runtime.scatter else np.ones(len(tensor))
    hop = hop_seconds(prepared.tiers, output.max(axis=1), slices, ranks, group.strides["pipeline"])
    hops = (2 * chunks * hop * (1 - runtime.overlap_pipeline))[:, None] * np.ones(ranks)
    computing, reduced = busy["forward"] + busy["backward"], group.by_rank("tensor")
    forward = busy["forward"] + busy["host_forward"] + group.by_rank("tensor_forward")
    return _MicrobatchSeconds(
        computing=computing,
        again=busy["again"],
        host=host,
        reduced=reduced,
        hops=hops,
        forward=forward,
        backward=computing + busy["again"] + host + reduced + hops - hops - forward,
        output=output,
    )


def predict_group(prepared: PreparedSetups, rows: np.ndarray, ranks: int, chunks: int, schedule: str) -> SetupGroup:
    group = _GroupInputs.of(prepared, rows, ranks, chunks, schedule)
    work, runtime, device, column, m = prepared.work, prepared.runtime, prepared.device, group.column, group.m
    micro = _microbatch(group)
    each = micro.total
    most, every = each.argmax(axis=1), np.arange(len(rows))
    halves = micro.forward, (micro.backward - micro.again) / 2, micro.again
    bubble = bubble_seconds(schedule, ranks, chunks, m, each, most, halves) + m * micro.hops[every, most]
    parameters = group.by_rank("parameters")
    if ranks * chunks == 1 or group.ranked.folded:
        parameters[:, 0] -= work.tied / column["tensor"]
    flow = PipelineTraffic(
        ranks=ranks,
        chunks=chunks,
        microbatches=m,
        forward=micro.forward,
        backward=micro.backward,
        parameters=parameters,
    )
    exposed, hidden = data_seconds(work, runtime, prepared.tiers, column, group.strides, flow)
    updated = runtime.update_bytes * parameters / np.where(column["zero"] >= 1, column["data"], 1.0)[:, None]
    updated = updated / (device.memory_bandwidth * device.stream) * group.sharing[:, None]
    updated += group.by_rank("tensors") * runtime.update_operators * device.overhead
    terms = {
        "compute": m * micro.computing[every, most],
        "recompute": m * micro.again[every, most],
        "tensor": m * micro.reduced[every, most],
        "bubble": bubble,
        "data": exposed,
        "optimizer": updated.max(axis=1),
        "host": m * micro.host[every, most] + runtime.step_seconds,
    }
    if runtime.overheads is not None:
        terms = _with_overheads(group, parameters, terms, m[:, None] * each)
    return SetupGroup(
        seconds=np.sum(list(terms.values()), axis=0),
        terms=terms,
        hidden=hidden,
        memory=_memory(group, parameters),
        forward=micro.forward,
        backward=micro.backward,
        tensor=micro.reduced,
        parameters=parameters,
        output=micro.output,
        blocks=group.ranked.blocks,
    )


def _step_load(group: _GroupInputs, parameters: np.ndarray) -> StepLoad:
    work, column = group.prepared.work, group.column
    tied_bytes = work.tied * work.gradient_bytes / column["tensor"]
    ranks = np.full(len(group.m), float(group.ranked.ranks))
    return StepLoad(
        data=column["data"],
        zero=column["zero"],
        workers=group.workers,
        m=group.m,
        lanes=np.where(column["lanes"] > 0, column["lanes"], group.m * column["data"]),
        parameters=parameters,
        tensors=group.by_rank("tensors"),
        blocks=group.block_counts,
        weight_bytes=work.weight_bytes,
        gradient_bytes=work.gradient_bytes,
        state_bytes=work.state_bytes,
        clips=work.clips,
        tied=message_seconds(group.prepared.tiers, ranks, group.strides["pipeline"], tied_bytes),
    )


def _with_overheads(
    group: _GroupInputs, parameters: np.ndarray, terms: Mapping[str, np.ndarray], busy: np.ndarray
) -> dict[str, np.ndarray]:
    """The terms with Shoal's own overheads on the cores of a CPU. `busy`: seconds of each rank's microbatches."""
    prepared, load, slow = group.prepared, _step_load(group, parameters), group.sharing[:, None]
    runtime, device, overheads = prepared.runtime, prepared.device, prepared.runtime.overheads
    assert overheads is not None
    added = sum_seconds(overheads, load, device) * slow
    applied = update_seconds(overheads, load, device, runtime.update_bytes, runtime.update_operators) * slow
    exchanged = exchange_seconds(overheads, load, device, prepared.tiers, group.strides["data"]) * slow
    exchanged = exchanged * _exchange_share(group.column)[:, None]
    fixed = step_seconds(overheads, load, device) * group.sharing
    # To servers a gradient takes the same path through memory as to other workers, and their links besides.
    served = group.column["exchange"] == EXCHANGES.index("servers")
    found = {
        **terms,
        "compute": terms["compute"] + added.max(axis=1),
        "data": exchanged.max(axis=1) + np.where(served, terms["data"], 0.0),
        "optimizer": applied.max(axis=1),
        "host": terms["host"] + fixed,
    }
    path = np.sum(list(found.values()), axis=0)
    times = core_sharing_factor(load, path, busy + added + applied + exchanged + fixed[:, None], prepared.devices)
    found = {name: seconds * times for name, seconds in found.items()}
    return {**found, "data": found["data"] + queueing_seconds(overheads, load, prepared.devices)}


def _exchange_share(column: Mapping[str, np.ndarray]) -> np.ndarray:
    """The share of steps that exchange gradients: all steps, except in local mode."""
    local = (column["exchange"] == EXCHANGES.index("servers")) & (column["mode"] == SYNC_MODES.index("local"))
    steps = np.where(column["number"] > 0, column["number"], int(DEFAULT_NUMBERS["local"]))
    return np.asarray(np.where(local, 1.0 / steps, 1.0))


def _memory(group: _GroupInputs, parameters: np.ndarray) -> dict[str, np.ndarray]:
    work, runtime, costs = group.prepared.work, group.prepared.runtime, group.prepared.costs
    column, ranked, variant = group.column, group.ranked, group.variant
    data, zero = column["data"][:, None], column["zero"][:, None]
    here = (column["exchange"] != EXCHANGES.index("servers"))[:, None]  # else the servers hold the optimizer's state
    flying = in_flight(group.schedule, ranked.ranks, group.m, ranked.chunks)
    activations = (ranked.by_chunk(costs.saved)[variant] * flying).sum(axis=1)
    if runtime.adds_lanes:
        lanes = np.ceil(np.maximum(column["lanes"][:, None], data) / data)
        parts = memory_bytes(
            parameters=parameters,
            largest=ranked.largest(costs.parameters)[variant],
            activations=activations,
            working=ranked.peak_beyond_saved(costs.saved, costs.working)[variant],
            data=data,
            zero=zero,
            cut=(column["tensor"][:, None] * ranked.ranks > 1) | (zero > 0),
            lanes=lanes,
            microbatches=group.m[:, None] / lanes,
            weight=work.weight_bytes,
            gradient=work.gradient_bytes,
            state=work.state_bytes,
            buffers=work.buffers,
            fragmentation=runtime.fragmentation,
        )
        parts = {**parts, "optimizer": parts["optimizer"] * here}
        return {name: size * runtime.allocator for name, size in parts.items()}
    weights, gradients, optimizer = model_state_bytes(
        parameters, zero, data, work.weight_bytes, work.gradient_bytes, work.state_bytes
    )
    gathered = 2 * ranked.largest(costs.parameters)[variant] * work.weight_bytes
    working = ranked.largest(costs.working)[variant] + np.where((zero == 3) & (data > 1), gathered, 0.0)
    parts = {"weights": weights, "gradients": gradients, "optimizer": optimizer * here, "activations": activations,
             "working": working}  # fmt: skip
    alive = np.sum(list(parts.values()), axis=0)
    return {**parts, "other": work.buffers + (runtime.allocator - 1) * alive}
