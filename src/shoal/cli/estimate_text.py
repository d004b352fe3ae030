"""What `shoal estimate` prints: blocks and what each costs, what one device would need, and what lanes cost."""

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster import Cluster, Device
from shoal.planner.cost.compute import slowest_device
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import Prediction
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Block, Workload
from shoal.report.human import columns, plural, size

LANES = (1, 2, 4, 8)
COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, kw_only=True)
class EstimateLine:
    """One block, or `times` equal ones after each other; figures are of one of them. FLOPs and what is kept are of one
    microbatch."""

    block: str
    times: int
    parameters: float
    forward: float  # FLOPs
    backward: float
    kept: float  # bytes for backward
    gradients: float  # bytes
    optimizer: float
    # What travels because of this block:
    data: float  # gradient bytes that replicas add up, once a step
    tensor: float  # bytes that slices add up, for one microbatch
    pipeline: float  # bytes that go on if the next block is on another worker, for one microbatch; as many come back
    zero3: float  # weight bytes that replicas gather, each time that the block computes: forward and backward


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    work: Workload
    microbatch: int
    batch: int
    lines: tuple[EstimateLine, ...]
    device: Device
    single_device: Prediction  # on one such device
    lanes: dict[int, float]  # by number of lanes: seconds of a step

    @property
    def memory(self) -> float:
        return float(self.device.memory - self.device.reserved)

    @property
    def fits(self) -> bool:
        return self.single_device.peak <= self.memory


def estimate(
    work: Workload, cluster: Cluster, *, microbatch: int | None = None, batch: int | None = None
) -> JobEstimate:
    """`microbatch` and `batch`: of a shape; a job has its own."""
    for name, given in (("microbatch", microbatch), ("batch", batch)):
        if given is not None and given < 1:
            raise InputError(f"--{name} {given}: at least 1", fix=f"--{name} 1")
    microbatch = microbatch or (work.samples if work.lanes is not None else 1)
    batch = batch or work.batch or microbatch
    if batch % microbatch:
        raise InputError(f"a batch of {batch} is not divisible by microbatches of {microbatch}",
                         fix=f"--batch {max(1, batch // microbatch) * microbatch}")  # fmt: skip
    setup = Setup(batch=batch, microbatch=microbatch, lanes=work.lanes)
    return JobEstimate(
        work=work,
        microbatch=microbatch,
        batch=batch,
        lines=tuple(_lines(work, microbatch / work.samples)),
        device=slowest_device(cluster, work.dtype),
        single_device=predict(work, setup, cluster),
        lanes={} if work.lanes is None else lane_seconds(work, cluster),
    )


def lane_seconds(work: Workload, cluster: Cluster) -> dict[int, float]:
    """Seconds of a step on one worker by number of lanes: the same samples in smaller or larger kernels."""
    assert work.lanes is not None and work.batch is not None
    microbatches = work.microbatches or 1
    found = {}
    for lanes in sorted({*LANES, work.lanes}):
        if work.batch % (lanes * microbatches) == 0:
            setup = Setup(batch=work.batch, microbatch=work.batch // (lanes * microbatches), lanes=lanes)
            found[lanes] = predict(replace(work, lanes=lanes), setup, cluster).seconds
    return found


def _lines(work: Workload, scale: float) -> list[EstimateLine]:
    return [_line(work, block, len(list(equal)), scale) for block, equal in groupby(work.blocks)]


def _line(work: Workload, block: Block, times: int, scale: float) -> EstimateLine:
    gradients = block.parameters * work.gradient_bytes
    return EstimateLine(
        block=block.name,
        times=times,
        parameters=block.parameters,
        forward=scale * block.flops(backward=False),
        backward=scale * block.flops(backward=True),
        kept=scale * (block.saved - block.saved_fixed) + block.saved_fixed,
        gradients=gradients,
        optimizer=block.parameters * work.state_bytes,
        data=gradients,
        tensor=scale * 2 * block.reductions * block.reduced,
        pipeline=scale * block.output,
        zero3=block.parameters * work.weight_bytes,
    )


# -- as text ----------------------------------------------------------------------------------------------------------


def text(found: JobEstimate, where: str, following: str) -> str:
    """`where`: names the cluster; `following`: the next command to type."""
    lines = [_heading(found), where, "", *_table(found), "", *_notes(found), "", *_alone(found), *_lanes(found)]
    return "\n".join([*lines, "", f"next: {following}"])


def _heading(found: JobEstimate) -> str:
    work = found.work
    if work.lanes is None:
        cut = f"batch {found.batch}, microbatches of {found.microbatch}"
    else:
        parts = f"{plural(work.lanes, 'lane')} × {plural(work.microbatches or 1, 'microbatch')} of {found.microbatch}"
        cut = f"a step is {plural(found.batch, 'sample')}: {parts}"
    return f"{work.name}: {count(work.parameters)} parameters, {work.dtype}; {cut}"


def _table(found: JobEstimate) -> list[str]:
    above = ["", "", "", "FLOPs", "", "bytes", "", "", "to all-reduce", "", "to send on", "to gather"]
    head = ["block", "×", "parameters", "forward", "backward", "kept", "gradients", "optimizer"]
    head += ["data", "tensor", "pipeline", "zero=3"]
    rows = [above, head]
    for line in (*found.lines, _all(found)):
        sizes = (line.kept, line.gradients, line.optimizer, line.data, line.tensor, line.pipeline, line.zero3)
        row = [line.block, str(line.times), count(line.parameters), count(line.forward), count(line.backward)]
        rows.append([*row, *map(amount, sizes)])
    return columns(rows, right=range(1, len(head)))


def _all(found: JobEstimate) -> EstimateLine:
    """The sum of all blocks. Tied weights are held, updated and sent once; values between blocks do not add up."""

    def total(name: str) -> float:
        return float(sum(line.times * getattr(line, name) for line in found.lines))

    names = ("parameters", "forward", "backward", "kept", "gradients", "optimizer", "data", "tensor", "zero3")
    share = found.work.parameters / (total("parameters") or 1.0)
    once = ("parameters", "gradients", "optimizer", "data")
    sums = {name: total(name) * (share if name in once else 1.0) for name in names}
    return EstimateLine(block="all", times=len(found.work.blocks), pipeline=0.0, **sums)


def _notes(found: JobEstimate) -> list[str]:
    notes = ["of one microbatch: FLOPs, kept, tensor, pipeline; of a step: data; of each time a block computes: zero=3"]
    if found.work.tied:
        notes.append(f"{count(found.work.tied)} parameters are tied: they are in two blocks, and once in all")
    if not any(line.tensor for line in found.lines) and not found.work.notes:
        notes.append("nothing to slice was found: tensor=… would only copy")
    return [*notes, *(f"note: {note}" for note in found.work.notes)]


def _alone(found: JobEstimate) -> list[str]:
    held = {name: each for name, each in found.single_device.stages[0].memory.items() if each >= 0.5}
    parts = " + ".join(f"{name} {size(each)}" for name, each in held.items())
    lines = [f"one device needs {size(found.single_device.peak)}: {parts}"]
    if "activations" not in held:  # of a job
        kept = size(sum(line.times * line.kept for line in found.lines))
        lines.append(f"most while it saves: other is the copy that a checkpoint is written from; a step keeps {kept}")
    return [*lines, f"{found.device.name} has {size(found.memory)}: {verdict(found)}"]


def verdict(found: JobEstimate) -> str:
    if found.fits:
        return "fits"
    _, part = found.single_device.binds
    return f"does not fit: {part} {size(found.single_device.stages[0].memory[part])} of {size(found.memory)}"


def _lanes(found: JobEstimate) -> list[str]:
    if 1 not in found.lanes:
        return []
    alone = found.lanes[1]
    others = ", ".join(
        f"{lanes}{' (as it has)' if lanes == found.work.lanes else ''} {more(seconds / alone)}"
        for lanes, seconds in found.lanes.items()
        if lanes > 1
    )
    step = f"a step on it: about {_seconds(found.single_device.seconds)}"
    return [step, f"lanes, against 1: {others}" if others else "lanes: 1, nothing to compare with"]


def more(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def count(number: float) -> str:
    """A count: 830 k, 98.5 G."""
    factor, unit = next(((factor, f" {unit}") for factor, unit in COUNTS if number >= factor), (1.0, ""))
    return f"{number / factor:.4g}{unit}" if number else "–"


def amount(num_bytes: float) -> str:
    return size(num_bytes) if num_bytes else "–"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# -- as JSON ----------------------------------------------------------------------------------------------------------


def value(found: JobEstimate) -> dict[str, Any]:
    work = found.work
    stage, part = found.single_device.binds
    return {
        "name": work.name,
        "parameters": work.parameters,
        "dtype": work.dtype,
        "batch": found.batch,
        "microbatch": found.microbatch,
        "lanes": work.lanes,
        "blocks": [asdict(line) for line in found.lines],
        "tied": work.tied,
        "flops_per_sample": sum(block.flops(backward=way) for block in work.blocks for way in (False, True))
        / work.samples,
        "one_device": {
            "device": found.device.name,
            "has_bytes": found.memory,
            "needs_bytes": found.single_device.peak,
            "parts": dict(found.single_device.stages[stage].memory),
            "fits": found.fits,
            "binds": part,
            "step_seconds": found.single_device.seconds,
        },
        "lane_seconds": found.lanes,
        "notes": work.notes,
    }
