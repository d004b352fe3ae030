"""Traffic that a step waits for: messages between stages, gradients between replicas. Pure; on arrays (setups, ranks).

Where the runtime overlaps, gradients hide behind the backward pass of the last microbatch; the rest is exposed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.planner.cluster import LinkTier
from shoal.planner.cost.comm import ALL_REDUCE, HALF, collective_seconds, message_seconds, server_seconds
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.setup import DEFAULT_NUMBERS, EXCHANGES, SYNC_MODES
from shoal.planner.cost.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PipelineTraffic:
    """A pipeline's seconds of one microbatch, and parameters, by (setup, rank)."""

    ranks: int
    chunks: int
    microbatches: np.ndarray  # by setup
    forward: np.ndarray
    backward: np.ndarray
    parameters: np.ndarray


def strides_of(order: Sequence[str], tensor: np.ndarray, data: np.ndarray, ranks: float) -> dict[str, np.ndarray]:
    """The distance between neighbours along each axis, in devices."""
    sizes = {"tensor": tensor, "data": data, "pipeline": np.full(len(tensor), ranks)}
    strides, reached = {}, np.ones(len(tensor))
    for axis in order:
        strides[axis] = reached
        reached = reached * sizes[axis]
    return strides


def hop_seconds(
    tiers: Sequence[LinkTier], size: np.ndarray, slices: np.ndarray, ranks: int, stride: np.ndarray
) -> np.ndarray:
    """Seconds until a stage has what the stage before sends. `slices`: each sends its slice, and the receivers gather
    the rest from each other (scatter-gather, SC21 section 4.1); 1: each sends everything."""
    if ranks == 1:
        return np.zeros(len(size))
    gathered = collective_seconds(tiers, slices, np.ones(1), size, HALF)
    return np.asarray(message_seconds(tiers, np.full(len(size), float(ranks)), stride, size / slices) + gathered)


def data_seconds(
    work: Workload,
    runtime: Runtime,
    tiers: Sequence[LinkTier],
    column: Mapping[str, np.ndarray],
    strides: Mapping[str, np.ndarray],
    flow: PipelineTraffic,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of data traffic that the step waits for, and seconds that hide behind compute."""
    m, ranks, chunks, forward, backward = flow.microbatches, flow.ranks, flow.chunks, flow.forward, flow.backward
    data, zero = column["data"][:, None], column["zero"][:, None]
    stride = strides["data"][:, None]
    wire_bytes = work.gradient_bytes if runtime.wire_bytes is None else runtime.wire_bytes
    gradients, weights = flow.parameters * wire_bytes, flow.parameters * work.weight_bytes
    if not tiers:
        return np.zeros(len(m)), np.zeros(len(m))
    reduce = collective_seconds(tiers, data, stride, gradients, ALL_REDUCE)
    scatter = collective_seconds(tiers, data, stride, gradients, HALF)
    gather = collective_seconds(tiers, data, stride, weights, HALF)
    # zero=0: all-reduce; 1: reduce-scatter, and all-gather of the updated weights.
    traffic = np.where(zero > 0, scatter + gather, reduce)
    # Behind the last microbatch. Interleaved, a chunk is done while the microbatches of p ranks go through each of the
    # chunks before it.
    rounds = ((chunks - 1) * ranks + 1) / chunks if ranks > 1 else 1.0
    window = runtime.overlap * rounds * (backward + np.where(zero > 0, forward, 0.0))
    buckets = max(runtime.buckets, 1.0)
    exposed = np.maximum(traffic / buckets, traffic - window) if runtime.overlap else traffic
    # zero=2: no worker keeps whole gradients, so every microbatch scatters them.
    late = m[:, None] * np.maximum(scatter / buckets, scatter - runtime.overlap * backward)
    late = late + np.maximum(gather / buckets, gather - runtime.overlap * forward)
    traffic = np.where(zero == 2, m[:, None] * scatter + gather, traffic)
    exposed = np.where(zero == 2, late if runtime.overlap else traffic, exposed)
    # zero=3: every microbatch gathers each block twice, and scatters its gradients.
    blocks = max(1.0, len(work.blocks) / ranks)
    gathers = blocks * collective_seconds(tiers, data, stride, weights / blocks, HALF)
    scatters = blocks * collective_seconds(tiers, data, stride, gradients / blocks, HALF)
    late = np.maximum(gathers - forward, 0.0) + np.maximum(gathers + scatters - backward, 0.0) + gathers / blocks
    traffic = np.where(zero == 3, m[:, None] * (2 * gathers + scatters), traffic)
    exposed = np.where(zero == 3, m[:, None] * late if runtime.overlap else traffic, exposed)
    hidden = traffic - np.minimum(exposed, traffic)
    exposed = exposed + runtime.slowdown * hidden
    # Ranks further down the pipeline finish their backward earlier.
    earlier = (np.cumsum(backward, axis=1) - backward) / chunks
    waits = np.maximum(exposed - earlier, 0.0).max(axis=1)
    # The first and the last stage add up the gradients of tied embeddings.
    tied = work.tied * wire_bytes / column["tensor"]
    if ranks > 1 and work.tied:
        waits = waits + collective_seconds(
            tiers, np.full(len(m), 2.0), strides["pipeline"] * (ranks - 1), tied, ALL_REDUCE
        )
    servers = column["exchange"] == EXCHANGES.index("servers")
    if servers.any():
        waits = np.where(servers, _server_seconds(tiers, column, gradients.sum(axis=1), m, forward + backward), waits)
    return waits, hidden.max(axis=1)


def _server_seconds(
    tiers: Sequence[LinkTier], column: Mapping[str, np.ndarray], size: np.ndarray, m: np.ndarray, each: np.ndarray
) -> np.ndarray:
    """Seconds that workers wait for parameter servers."""
    link = tiers[-1]
    workers, servers = column["data"], np.maximum(column["servers"], 1.0)
    speed = link.shared_bandwidth * link.efficiency
    exchange = server_seconds(size, workers, servers, speed, link.latency)
    step = m * each.max(axis=1)
    behind = np.maximum(step, exchange) - step  # stale: the exchange of one step hides behind the next
    # Asynchronous: min(w/T, kW/2S) updates a second, each from one worker's share of the batch.
    rate = np.minimum(workers / step, servers * speed / (2 * size))
    free = np.maximum(workers / rate - step, 0.0)
    # An update of a job is a whole batch: of one worker, or of a group that first adds up its gradients. The parties
    # take turns with the servers, and one party computes its batch while others exchange theirs.
    number = column["number"]
    grouped = column["mode"] == SYNC_MODES.index("groups")
    parties = np.where(
        grouped, np.minimum(np.where(number > 0, number, int(DEFAULT_NUMBERS["groups"])), workers), workers
    )
    mates = workers / parties
    inside = collective_seconds(tiers, mates, np.ones(len(m)), size, ALL_REDUCE)
    alone = server_seconds(size, np.ones(len(m)), servers, speed, link.latency)
    batches = np.minimum(parties / (parties * step + inside + alone), servers * speed / (2 * size))
    queue = np.maximum(1 / batches - step, 0.0)
    mode = column["mode"]
    of_job = column["lanes"] > 0
    waits = np.where(mode == SYNC_MODES.index("stale"), behind, exchange)
    waits = np.where(mode == SYNC_MODES.index("async"), free, waits)
    waits = np.where(
        of_job & np.isin(mode, [SYNC_MODES.index("stale"), SYNC_MODES.index("async")]) | grouped, queue, waits
    )
    every = np.where(number > 0, number, int(DEFAULT_NUMBERS["local"]))
    return np.asarray(np.where(mode == SYNC_MODES.index("local"), exchange / every, waits))
