"""python -m shoal.testing.simulation: many seeds on all cores, or one with its story. `make simulate` calls this."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from shoal.testing.simulation import InvariantViolated, SimWorld, invariants, run

CHUNK = 250


def run_seeds(seeds: range, servers: bool) -> tuple[int, Counter[str], list[str]]:
    """How many were run, how many met each case, and the stories of those that broke a law."""
    met: Counter[str] = Counter()
    stories = []
    plays: Any = _servers().run if servers else run
    for seed in seeds:
        try:
            met.update(plays(seed))
        except InvariantViolated as broken:
            stories.append(str(broken))
    return len(seeds), met, stories


def _servers() -> Any:
    """Needs torch, which the other one does not."""
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
    done, met, stories = 0, Counter[str](), list[str]()
    all_cases: tuple[str, ...] = _servers().CASES if servers else invariants.CASES
    for count, cases, broken in on_all_cores(first, seeds, servers):
        done += count
        met += cases
        stories += broken
        rate = done / (time.monotonic() - began)
        line = f"{done:,} of {seeds:,} seeds, {rate:,.0f} a second, {len(stories)} broken"
        if sys.stdout.isatty():
            print(f"\r{line}", end="", flush=True)
        elif done * 10 // seeds > (done - count) * 10 // seeds:
            print(line, flush=True)
        if len(stories) >= 5:
            break
    print("\n\nseeds that met" if sys.stdout.isatty() else "\nseeds that met")
    for case in sorted(all_cases, key=lambda case: -met[case]):
        print(f"{met[case]:9,}  {case}")
    for story in stories[:1]:
        seed = story.removeprefix("seed ").partition(":")[0]
        words = "--servers " if servers else ""
        print(f"\n{story}\n\nreplay: python -m shoal.testing.simulation {words}--seed {seed} --trace")
    never = [case for case in all_cases if not met[case]]
    if not stories and done == seeds >= (10_000 if servers else 100_000) and never:
        print(f"\nnever met, so nothing is proved about it: {'; '.join(never)}")
        return 1
    print(f"\n{len(stories)} of {done:,} seeds broke a law" if stories else f"\nevery law held in {done:,} seeds")
    return 1 if stories else 0


def replay_seed(seed: int, trace: bool, servers: bool) -> int:
    world: Any = _servers().SimServersWorld(seed, trace=True) if servers else SimWorld(seed, trace=True)
    try:
        met, verdict = world.run(), "every law held"
    except InvariantViolated as broken:
        met, verdict = world.cases if servers else world.invariants.cases, f"broken: {broken}"
    print(f"seed {seed}: {world.plan}")
    if trace:
        print("\n".join(world.trace or []))
    print(f"met: {', '.join(sorted(met)) or 'nothing of note'}\n{verdict}")
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
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="tell its story")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100_000, help="how many, from the first")
    parser.add_argument("--servers", action="store_true", help="parameter servers, not the membership")
    parser.add_argument("--pushes", type=int, metavar="N", help="so many over a bad line: the sum is exact")
    asked = parser.parse_args()
    if asked.pushes is not None:
        return pushes(asked.pushes, asked.seed or 0)
    if asked.seed is None:
        return simulate_seeds(asked.first, asked.seeds, asked.servers)
    return replay_seed(asked.seed, asked.trace, asked.servers)


if __name__ == "__main__":
    sys.exit(main())
