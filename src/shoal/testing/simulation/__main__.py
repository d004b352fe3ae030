"""python -m shoal.testing.simulation: runs many seeds on all cores, or one with its trace. `make simulate` uses it."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from shoal.testing.simulation import InvariantViolated, SimRun, invariants, run

CHUNK = 250


def run_seeds(seeds: range, servers: bool) -> tuple[int, Counter[str], list[str]]:
    """Returns the number of seeds, how many had each case, and the traces of seeds that broke an invariant."""
    seen: Counter[str] = Counter()
    failures = []
    run_seed: Any = _servers().run if servers else run
    for seed in seeds:
        try:
            seen.update(run_seed(seed))
        except InvariantViolated as broken:
            failures.append(str(broken))
    return len(seeds), seen, failures


def _servers() -> Any:
    """Imports torch, which only the servers' simulation needs."""
    import torch

    from shoal.testing.simulation import servers

    torch.set_num_threads(1)
    return servers


def on_all_cores(first: int, seeds: int, servers: bool) -> Iterator[tuple[int, Counter[str], list[str]]]:
    chunks = [range(at, min(at + CHUNK, first + seeds)) for at in range(first, first + seeds, CHUNK)]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap_unordered(partial(run_seeds, servers=servers), chunks)


def simulate_seeds(first: int, seeds: int, servers: bool) -> int:
    began = time.monotonic()
    done, seen, failures = 0, Counter[str](), list[str]()
    all_cases: tuple[str, ...] = _servers().CASES if servers else invariants.CASES
    for count, cases, broken in on_all_cores(first, seeds, servers):
        done += count
        seen += cases
        failures += broken
        rate = done / (time.monotonic() - began)
        line = f"{done:,} of {seeds:,} seeds, {rate:,.0f} a second, {len(failures)} broken"
        if sys.stdout.isatty():
            print(f"\r{line}", end="", flush=True)
        elif done * 10 // seeds > (done - count) * 10 // seeds:
            print(line, flush=True)
        if len(failures) >= 5:
            break
    print("\n\nseeds with" if sys.stdout.isatty() else "\nseeds with")
    for case in sorted(all_cases, key=lambda case: -seen[case]):
        print(f"{seen[case]:9,}  {case}")
    for failure in failures[:1]:
        seed = failure.removeprefix("seed ").partition(":")[0]
        flag = "--servers " if servers else ""
        print(f"\n{failure}\n\nreplay: python -m shoal.testing.simulation {flag}--seed {seed} --trace")
    never = [case for case in all_cases if not seen[case]]
    if not failures and done == seeds >= (10_000 if servers else 100_000) and never:
        print(f"\nno seed had these cases, so nothing is proved about them: {'; '.join(never)}")
        return 1
    summary = f"{len(failures)} of {done:,} seeds broke an invariant"
    print(f"\n{summary}" if failures else f"\nevery invariant held in {done:,} seeds")
    return 1 if failures else 0


def replay_seed(seed: int, trace: bool, servers: bool) -> int:
    world: Any = _servers().SimServersRun(seed, trace=True) if servers else SimRun(seed, trace=True)
    try:
        seen, verdict = world.run(), "every invariant held"
    except InvariantViolated as broken:
        seen, verdict = world.cases if servers else world.invariants.cases, f"broken: {broken}"
    print(f"seed {seed}: {world.plan}")
    if trace:
        print("\n".join(world.trace or []))
    print(f"cases: {', '.join(sorted(seen)) or 'none'}\n{verdict}")
    return 1 if verdict.startswith("broken") else 0


def pushes(number: int, seed: int) -> int:
    _servers()
    from shoal.testing.simulation.pushes import DOUBLES, DROPS, exact_sum

    began = time.monotonic()
    found = exact_sum(number, seed=seed)
    print(
        f"{number:,} pushes, {DROPS:.0%} of answers dropped, {DOUBLES:.0%} of requests doubled:"
        f" {found.sent:,} requests, {found.duplicates:,} known, sum {found.found:,.0f} of {found.wanted:,},"
        f" {number / (time.monotonic() - began):,.0f} a second"
    )
    return 0 if found.exact else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print its events")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100_000, help="number of seeds, from the first")
    parser.add_argument("--servers", action="store_true", help="simulate parameter servers, not membership")
    parser.add_argument(
        "--pushes", type=int, metavar="N", help="send N pushes over a lossy connection: the sum is exact"
    )
    asked = parser.parse_args()
    if asked.pushes is not None:
        return pushes(asked.pushes, asked.seed or 0)
    if asked.seed is None:
        return simulate_seeds(asked.first, asked.seeds, asked.servers)
    return replay_seed(asked.seed, asked.trace, asked.servers)


if __name__ == "__main__":
    sys.exit(main())
