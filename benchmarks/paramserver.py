"""Shoal's parameter servers beside TensorFlow's, a Ray actor and torch's RPC:   python benchmarks/paramserver.py

One server, two workers, one thread each, loopback; the same work for all, in rotating order. `make bench-peers` gets
TensorFlow and Ray. Prints tables and writes benchmarks/results/paramserver.json. How to read it: README.md here.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import own_paramserver
import pushes
from train import machine, ratio

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "paramserver.json"
PEERS_PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"
CONTENDERS = ("shoal", "tensorflow", "ray", "rpc")
PARTS = ("rates", "bandwidth", "round trip", "memory")
MODULES = {"tensorflow": "tensorflow", "ray": "ray"}  # what the peers' environment needs
PEER_TIMEOUT = 180.0

# The targets
RATIOS = {
    "mlp": {"tensorflow": 5.0, "ray": 2.0, "rpc": 2.0},
    "fixed": {"tensorflow": 5.0, "ray": 2.0, "rpc": 2.0},
    "sparse": {"tensorflow": 5.0, "ray": 5.0, "rpc": 5.0},
}
LEAST_BANDWIDTH = 0.5  # of the memory bound
MOST_ROUND_TRIP = 100e-6
MOST_MEMORY = 1.1  # of values and optimizer state

BANDWIDTH_BYTES, BANDWIDTH_REPEATS = 64 << 20, 10
ROUND_TRIPS = 5000
LAYERS, WIDTH = 8, 2048  # 128 MB of values


class Told(msgspec.Struct, frozen=True):
    """The line of a contender: see pushes.say."""

    contender: str
    version: str
    rates: dict[str, float]
    applied: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    own_paramserver.quiet()
    began, before = time.monotonic(), machine()
    rounds = options.rounds or (1 if options.quick else 3)
    result: dict[str, Any] = {"machine": before, "quick": options.quick, "rounds": rounds, "skipped": {}}
    if "rates" in options.parts:
        result |= _rates(options, rounds)
    if "bandwidth" in options.parts:
        result["bandwidth"] = _bandwidth(options.quick, rounds)
    if "round trip" in options.parts:
        result["round_trip"] = _round_trip(options.quick, rounds)
    if "memory" in options.parts:
        result["memory"] = _memory(options.quick, rounds)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["load_after"] = os.getloadavg()[0]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print(text(result))
    print(f"numbers: {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Shoal's parameter servers beside those of peers")
    parser.add_argument("--parts", type=_some_of(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--only", type=_some_of(pushes.CASES), default=list(pushes.CASES), help=f"of {','.join(pushes.CASES)}"
    )
    parser.add_argument(
        "--contenders", type=_some_of(CONTENDERS), default=list(CONTENDERS), help=f"of {','.join(CONTENDERS)}"
    )
    parser.add_argument("--rounds", type=int, default=None, help="3; with --quick 1")
    parser.add_argument("--seconds", type=float, default=None, help="of each case in a round: 3")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast it is")
    parser.add_argument(
        "--peers", type=Path, default=PEERS_PYTHON, metavar="PYTHON", help="of TensorFlow and Ray (make bench-peers)"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def _some_of(known: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return found

    return names


# -- updates and rows a second, beside peers --------------------------------------------------------------------------


def _rates(options: argparse.Namespace, rounds: int) -> dict[str, Any]:
    warm_up = pushes.QUICK_WARM_UP if options.quick else pushes.WARM_UP
    seconds = options.seconds or (pushes.QUICK_SECONDS if options.quick else pushes.SECONDS)
    names, skipped = _present(options.contenders, options.peers)
    found: dict[str, list[Told]] = {name: [] for name in names}
    for number in range(rounds):
        order = list(names)
        for name in order[number % len(order) :] + order[: number % len(order)]:  # nobody is always first
            if name in skipped:
                continue
            told = _run(name, options.peers, options.only, warm_up, seconds)
            if isinstance(told, str):
                skipped[name] = told
                print(f"{name} is left out: {told}", file=sys.stderr)
                continue
            found[name].append(told)
            rates = "  ".join(f"{case} {rate:,.0f}" for case, rate in told.rates.items())
            print(f"round {number + 1} of {rounds}  {name:12} {rates}", file=sys.stderr)
    complete = {name: each for name, each in found.items() if name not in skipped}
    return {
        "skipped": skipped,
        "cases": {case: summary(case, complete) for case in options.only},
        "versions": {name: each[0].version for name, each in complete.items()},
    }


def summary(case: str, found: dict[str, list[Told]]) -> dict[str, Any]:
    speeds = {name: [told.rates[case] for told in each] for name, each in found.items()}
    return {
        "contenders": {
            name: {
                "per_second": each,
                "best": max(each),
                "median": statistics.median(each),
                "applied": [told.applied[case] for told in found[name] if case in told.applied],
            }
            for name, each in speeds.items()
        },
        "ratios": {
            f"shoal / {name}": ratio(speeds["shoal"], each) | {"target": RATIOS[case][name]}
            for name, each in speeds.items()
            if name != "shoal" and "shoal" in speeds
        },
    }


def _present(names: Sequence[str], python: Path) -> tuple[list[str], dict[str, str]]:
    """Those that can run here, and why the others cannot."""
    skipped = {}
    for name in names:
        if name in MODULES and not _has(python, MODULES[name]):
            skipped[name] = f"{python} has no {MODULES[name]}; `make bench-peers` installs it"
            print(f"{name} is left out: {skipped[name]}", file=sys.stderr)
    return [name for name in names if name not in skipped], skipped


def _has(python: Path, module: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return python.exists() and subprocess.run([python, "-c", look], check=False).returncode == 0


def _run(name: str, python: Path, cases: Sequence[str], warm_up: float, seconds: float) -> Told | str:
    """One contender's line; or what went wrong with it."""
    if name == "shoal":
        rates, applied = own_paramserver.rates(cases, warm_up, seconds)
        return Told("shoal", str(machine()["shoal"]), rates, applied)
    call = [sys.executable if name == "rpc" else python, HERE / f"peer_{name}.py", "--only", ",".join(cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("MKL_CBWR", None)  # Shoal's setting; a plain program does not have it
    try:
        done = subprocess.run(
            [*map(str, call), "--warm-up", str(warm_up), "--seconds", str(seconds)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=PEER_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"it did not end in {PEER_TIMEOUT:.0f} s"
    if done.returncode or not done.stdout.strip():
        return (done.stderr.strip() or f"it ended with code {done.returncode}").splitlines()[-1]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Told)


# -- one server -------------------------------------------------------------------------------------------------------


def _bandwidth(quick: bool, rounds: int) -> dict[str, Any]:
    num_bytes, repeats = (1 << 20, 2) if quick else (BANDWIDTH_BYTES, BANDWIDTH_REPEATS)
    each = [own_paramserver.bandwidth(num_bytes, repeats) for _ in range(rounds)]
    best = {name: max(found[name] for found in each) for name in each[0]}
    shares = [found["push+pull"] / found["copy"] for found in each]
    return {
        "bytes": num_bytes,
        "bytes_per_second": best,
        "push+pull / copy": {
            "best": best["push+pull"] / best["copy"],
            "median": statistics.median(shares),
            "lowest": min(shares),
            "highest": max(shares),
        },
        "target": LEAST_BANDWIDTH,
    }


def _round_trip(quick: bool, rounds: int) -> dict[str, Any]:
    each = [own_paramserver.round_trips(200 if quick else ROUND_TRIPS) for _ in range(rounds)]
    best = min(each, key=lambda found: found["median"])
    return {"seconds": best, "medians": [found["median"] for found in each], "target": MOST_ROUND_TRIP}


def _memory(quick: bool, rounds: int) -> dict[str, Any]:
    layers, width = (4, 1024) if quick else (LAYERS, WIDTH)
    each = [own_paramserver.memory(layers, width) for _ in range(rounds)]
    found = sorted(each, key=lambda numbers: numbers["held"])[len(each) // 2]
    shares = [numbers["held"] / numbers["needed"] for numbers in each]
    return {
        "layers": layers,
        "width": width,
        "num_bytes": found,
        "held / needed": {"median": statistics.median(shares), "lowest": min(shares), "highest": max(shares)},
        "shared / needed": found["shared"] / found["needed"],
        "peak / needed": max(numbers["peak"] / numbers["needed"] for numbers in each),
        "target": MOST_MEMORY,
    }


# -- on the screen ----------------------------------------------------------------------------------------------------

UNITS = {"mlp": "updates/s", "fixed": "updates/s", "sparse": "rows/s"}
TITLES = {
    "mlp": f"MLP {pushes.IN}-{pushes.HIDDEN}-{pushes.OUT}, batch {pushes.BATCH}, forward and backward",
    "fixed": f"fixed gradients, {pushes.count(pushes.SHAPES):,} parameters",
    "sparse": f"rows of a table {pushes.ROWS:,} × {pushes.DIM}, {pushes.LOOKUPS:,} in a batch",
}


def text(result: dict[str, Any]) -> str:
    lines = [f"1 server, {pushes.WORKERS} workers, one thread each, asynchronous; {result['rounds']} rounds"]
    for case, found in result.get("cases", {}).items():
        lines += ["", *_case_text(case, found, result["versions"])]
    lines += [f"{name} was left out: {reason}" for name, reason in result["skipped"].items()]
    lines.append("")
    if "bandwidth" in result:
        lines += _bandwidth_text(result["bandwidth"])
    if "round_trip" in result:
        found = result["round_trip"]
        times = {name: 1e6 * seconds for name, seconds in found["seconds"].items()}
        lines.append(
            f"64 bytes there and back: pulled, median {times['pull']:.0f} µs; pushed, applied and answered with values,"
            f" median {times['median']:.0f} µs, p99 {times['p99']:.0f} µs (at most {1e6 * found['target']:.0f} µs)"
        )
    if "memory" in result:
        lines += _memory_text(result["memory"])
    cores, before, after = result["machine"]["cores"], result["machine"]["load_before"], result["load_after"]
    lines.append(f"{cores} cores; load {before:.1f} before, {after:.1f} after (this benchmark's own included)")
    return "\n".join(lines)


def _case_text(case: str, found: dict[str, Any], versions: dict[str, str]) -> list[str]:
    lines = [
        f"{TITLES[case]}: {UNITS[case]}",
        f"{'':24}{'best':>12}{'median':>12}{'shoal / it:':>14}{'best':>7}{'median':>8}{'target':>8}   in one round",
    ]
    for name, row in found["contenders"].items():
        line = f"{name + ' ' + versions[name]:24}{row['best']:12,.0f}{row['median']:12,.0f}"
        against = found["ratios"].get(f"shoal / {name}")
        if against:
            within = f"{against['lowest']:.1f} to {against['highest']:.1f}"
            line += f"{'':14}{against['best']:7.2f}{against['median']:8.2f}{against['target']:8g}   {within}"
        lines.append(line)
    return lines


def _bandwidth_text(found: dict[str, Any]) -> list[str]:
    speeds = {name: each / 1e9 for name, each in found["bytes_per_second"].items()}
    share = found["push+pull / copy"]
    return [
        f"{found['bytes'] >> 20} MB to a server and back: push {speeds['push']:.2f} GB/s, pull {speeds['pull']:.2f}"
        f" GB/s, both {speeds['push+pull']:.2f} GB/s; copy_ {speeds['copy']:.2f} GB/s",
        f"  push+pull over copy_: {share['best']:.2f}, median {share['median']:.2f},"
        f" {share['lowest']:.2f} to {share['highest']:.2f} (at least {found['target']:g})",
    ]


def _memory_text(found: dict[str, Any]) -> list[str]:
    share, needed = found["held / needed"], found["num_bytes"]["needed"]
    return [
        f"server memory over values and optimizer state, AdamW, {found['layers']} layers, {needed / 1e6:,.0f} MB:"
        f" {share['median']:.3f}, {share['lowest']:.3f} to {share['highest']:.3f} (at most {found['target']:g})",
        f"  of it {found['shared / needed']:.3f} shared with the worker; at the peak {found['peak / needed']:.3f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
