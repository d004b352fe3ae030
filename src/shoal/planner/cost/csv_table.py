"""Predicts every row of a table of configurations, for `shoal predict --table` and published tables in the tests.

    layers, hidden, heads, seq, vocab, tp, pp, vp, dp, gpus, global_batch, micro_batch, recompute, dtype

and optionally ffn, kv_heads, gated, zero, schedule, sequence_parallel, cluster. Other columns are kept and ignored.
Lines that begin with # are comments. Layers that do not divide evenly into stages are cut to balance the stages.

A row does not name its training system; `training_system` infers it.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from shoal.errors import InputError
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, V_SHAPED
from shoal.planner.cluster import Cluster, Device, find_cluster
from shoal.planner.cost.compute import slowest_device
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import Prediction
from shoal.planner.cost.runtime import FSDP, MEGATRON, MEGATRON_2021, MEGATRON_2022, Runtime
from shoal.planner.cost.setup import RECOMPUTE, Setup
from shoal.planner.cost.transformer_shape import (
    GPT,
    GPT_2021,
    PLAIN,
    TransformerShape,
    TransformerStyle,
    workload_of_shape,
)
from shoal.planner.cost.workload import Workload

SIZES = ("layers", "hidden", "heads", "seq", "vocab")
COLUMN_DEFAULTS = {"tp": 1, "pp": 1, "vp": 1, "ffn": 0, "kv_heads": 0, "zero": 0, "micro_batch": 1}
DTYPES = ("fp16", "bf16", "fp8", "fp32", "tf32")
FALSE, TRUE = ("", "0", "false", "no", "none"), ("1", "true", "yes")
# Alternative spellings of values.
COLUMN_SPELLINGS = {
    "recompute": {"false": "none", "no": "none", "0": "none", "true": "full", "yes": "full", "1": "full"},
    "dtype": {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "amp-bf16": "bf16", "float32": "fp32"},
    "schedule": {"interleaved-1f1b": "interleaved", "zb": "zero-bubble", "zb-h1": "zero-bubble", "zb-v": "zbv"},
}
ADDED_COLUMNS = ("predicted_step_seconds", "predicted_tflops_per_gpu", "predicted_peak_bytes")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One configuration, read and checked."""

    shape: TransformerShape
    setup: Setup
    dtype: str
    cluster: str
    tied: bool | None = None  # the output shares the embedding's matrix; None: as the shape specifies


@dataclass(frozen=True, kw_only=True)
class TrainingSystem:
    """The training system that a row is assumed to come from."""

    runtime: Runtime
    style: TransformerStyle


def training_system(row: TableRow, device: Device) -> TrainingSystem:
    """Infers the system by one rule for all rows:

    zero=3          FSDP: weights are gathered block by block; flash attention, no dropout
    fp16, or selective recompute, on devices without fp8
                    Megatron of 2021: attention keeps its s² tensors, dropout, nothing overlaps; with selective
                    recompute or sequence parallelism Megatron of 2022. (With flash attention, which came next,
                    selective recompute has no effect.)
    all others      Megatron today: flash attention, rotary positions, gradients overlap; in a table (`tied`) the
                    output has a matrix of its own, as in today's runs
    """
    if row.setup.zero == 3:
        return TrainingSystem(runtime=FSDP, style=PLAIN)
    if (row.dtype == "fp16" or row.setup.recompute == "selective") and "fp8" not in device.peak:
        later = row.setup.recompute == "selective" or row.setup.sequence_parallel
        return TrainingSystem(runtime=MEGATRON_2022 if later else MEGATRON_2021, style=GPT_2021)
    return TrainingSystem(runtime=MEGATRON, style=replace(GPT, tied=row.tied))


def predict_row(row: TableRow, cluster: Cluster | None = None) -> Prediction:
    """Predicts on `cluster`, or on the cluster that the row names, with as many hosts as it needs."""
    cluster = cluster_for(row.cluster, row.setup.devices) if cluster is None else cluster
    runtime = training_system(row, slowest_device(cluster, row.dtype)).runtime
    return predict(workload_of_row(row, cluster), row.setup, cluster, runtime)


def workload_of_row(row: TableRow, cluster: Cluster) -> Workload:
    return _workload(row.shape, row.dtype, training_system(row, slowest_device(cluster, row.dtype)).style)


_workload = cache(workload_of_shape)


@cache
def cluster_for(name: str, devices: int) -> Cluster:
    """The cluster of that name, with more hosts if this number of devices needs them."""
    found = find_cluster(name)
    if devices <= found.devices:
        return found
    return find_cluster(name, hosts=-(-devices // found.hosts[0].devices))


# -- reading ----------------------------------------------------------------------------------------------------------


def predict_table(path: Path | str, cluster: str | None = None) -> list[dict[str, str]]:
    """Returns the rows of a CSV file with predictions added to each: step seconds, TFLOP/s of a device as SC21 counts
    them (recomputation included), and peak bytes of the device that needs most."""
    found = []
    for line, values in read_lines(path):
        try:
            prediction = predict_row(read_row(values, cluster))
        except InputError as error:
            raise InputError(f"{path}, line {line}: {error.message}", where=error.where, fix=error.fix) from None
        texts = (f"{prediction.seconds:.6g}", f"{prediction.flops / 1e12:.5g}", f"{prediction.peak:.0f}")
        found.append({**values, **dict(zip(ADDED_COLUMNS, texts, strict=True))})
    return found


def read_lines(path: Path | str) -> list[tuple[int, dict[str, str]]]:
    """Returns rows with their line numbers; leaves out comments and empty lines."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"table {path} cannot be read: {reason}") from None
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    if not lines:
        columns = ",".join((*SIZES, "tp", "pp", "dp"))
        raise InputError(f"table {path} is empty", fix=f"a line of column names: {columns},…")
    reader = csv.reader(line for _, line in lines)
    try:
        rows = [(lines[reader.line_num - 1][0], values) for values in reader]
    except csv.Error as error:  # a field that is longer than a file's
        raise InputError(f"{path}, line {lines[reader.line_num - 1][0]}: {error}") from None
    names = [name.strip() for name in rows[0][1]]
    found = []
    for number, values in rows[1:]:
        if len(values) != len(names):
            raise InputError(f"{path}, line {number}: {len(values)} values for {len(names)} columns")
        found.append((number, dict(zip(names, values, strict=True))))
    return found


def read_row(values: Mapping[str, str], cluster: str | None = None) -> TableRow:
    """Checks every value of a row; an error names the column."""

    def number(name: str, least: int = 1) -> int:
        text = values.get(name, "").strip()
        if not text and name in COLUMN_DEFAULTS:
            return COLUMN_DEFAULTS[name]
        if not text:
            near = get_close_matches(name, values, n=1)
            raise InputError(f"column {name} is missing", fix=f"it is called {name}, not {near[0]}" if near else None)
        digits = text.removesuffix(".0").replace("_", "")
        if not digits.isdecimal() or len(digits) > 9 or int(digits) < least:
            raise InputError(f"column {name} is {text[:40]!r}, not a whole number from {least} to 999,999,999")
        return int(digits)

    def word(name: str, known: Sequence[str], usual: str) -> str:
        text = values.get(name, "").strip().lower().replace("_", "-") or usual
        text = COLUMN_SPELLINGS.get(name, {}).get(text, text)
        if text not in known:
            near = get_close_matches(text, known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
            raise InputError(f"column {name} is {text!r}", fix=fix)
        return text

    def flag(name: str) -> bool:
        return word(name, (*FALSE, *TRUE), "0") in TRUE

    sizes = {name: number(name) for name in SIZES} | {name: number(name, 0) for name in ("ffn", "kv_heads")}
    shape = TransformerShape(**sizes, gated=flag("gated"))
    tensor, ranks, chunks, batch = number("tp"), number("pp"), number("vp"), number("global_batch")
    gpus = number("gpus") if values.get("gpus", "").strip() else None
    data = number("dp") if values.get("dp", "").strip() or gpus is None else max(1, gpus // (tensor * ranks))
    if gpus is not None and gpus != tensor * ranks * data:
        raise InputError(f"tp {tensor} × pp {ranks} × dp {data} = {tensor * ranks * data}, but gpus is {gpus}",
                         fix=f"gpus = {tensor * ranks * data}")  # fmt: skip
    micro = number("micro_batch")
    setup = Setup(data=data, pipeline=ranks, tensor=tensor, batch=batch, microbatch=micro, chunks=chunks)
    check_divisible(shape, setup, even=False)
    schedule = word("schedule", SCHEDULE_NAMES, "interleaved" if chunks > 1 else "1f1b")
    if schedule == "1f1b" and chunks > 1:
        schedule = "interleaved"
    chunks = 2 if schedule in V_SHAPED else chunks
    if ranks == 1:
        schedule, chunks = "1f1b", 1
    name = cluster or values.get("cluster", "").strip()
    if not name:
        raise InputError("the table names no cluster", fix="--cluster NAME for all rows, or a column cluster")
    setup = replace(
        setup,
        zero=number("zero", 0),
        chunks=chunks,
        schedule=schedule,
        recompute=word("recompute", RECOMPUTE, "none"),
        sequence_parallel=flag("sequence_parallel") and tensor > 1,
    )
    if setup.zero > 3:
        raise InputError(f"column zero is {setup.zero}, not 0, 1, 2 or 3")
    return TableRow(shape=shape, setup=setup, dtype=word("dtype", DTYPES, "bf16"), cluster=name, tied=False)


def check_divisible(shape: TransformerShape, setup: Setup, *, even: bool = True) -> None:
    """Checks Megatron's rules of divisibility. Published tables also have runs whose stages are not `even`."""
    layers, stages = shape.layers, setup.pipeline * setup.chunks
    if layers < stages:
        raise InputError(f"layers {layers} are fewer than the stages: pp × vp = {stages}", fix=f"pp × vp ≤ {layers}")
    for what, total, named, divisor in (
        ("layers", layers, "pp × vp", stages if even else 1),
        ("heads", shape.heads, "tp", setup.tensor),
        ("hidden", shape.hidden, "tp", setup.tensor),
        ("global_batch", setup.batch, "dp × micro_batch", setup.data * setup.microbatch),
    ):
        if total % divisor:
            nearest = max(1, round(total / divisor)) * divisor
            raise InputError(f"{what} {total} is not divisible by {named} = {divisor}", fix=f"{what} = {nearest}")


# -- against what was measured ----------------------------------------------------------------------------------------


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Absolute errors relative to the measured values."""
    return [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two orders agree: pairs in the same order less pairs in the opposite, over all pairs. 1: fully."""
    pairs = [(a, b) for b in range(len(one)) for a in range(b)]
    agree = sum(_sign(one[a] - one[b]) * _sign(other[a] - other[b]) for a, b in pairs)
    return agree / max(1, len(pairs))


def _sign(value: float) -> int:
    return int(value > 0) - int(value < 0)
