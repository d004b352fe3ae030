"""python -m shoal.testing.simulation: many seeds on all cores, or one with its story. `make simulate` calls this."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from shoal.testing.simulation import Broken, World, run
from shoal.testing.simulation.laws import CASES

CHUNK = 250


def several(seeds: range) -> tuple[int, Counter[str], list[str]]:
    """How many were run, how many met each case, and the stories of those that broke a law."""
    met: Counter[str] = Counter()
    stories = []
    for seed in seeds:
        try:
            met.update(run(seed))
        except Broken as broken:
            stories.append(str(broken))
    return len(seeds), met, stories


def on_all_cores(first: int, seeds: int) -> Iterator[tuple[int, Counter[str], list[str]]]:
    chunks = [range(at, min(at + CHUNK, first + seeds)) for at in range(first, first + seeds, CHUNK)]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap_unordered(several, chunks)


def many(first: int, seeds: int) -> int:
    began = time.monotonic()
    done, met, stories = 0, Counter[str](), list[str]()
    for count, cases, broken in on_all_cores(first, seeds):
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
    for case in sorted(CASES, key=lambda case: -met[case]):
        print(f"{met[case]:9,}  {case}")
    for story in stories[:1]:
        seed = story.removeprefix("seed ").partition(":")[0]
        print(f"\n{story}\n\nreplay: python -m shoal.testing.simulation --seed {seed} --trace")
    never = [case for case in CASES if not met[case]]
    if not stories and done == seeds >= 100_000 and never:
        print(f"\nnever met, so nothing is proved about it: {'; '.join(never)}")
        return 1
    print(f"\n{len(stories)} of {done:,} seeds broke a law" if stories else f"\nevery law held in {done:,} seeds")
    return 1 if stories else 0


def one(seed: int, trace: bool) -> int:
    world = World(seed, trace=True)
    try:
        met, verdict = world.run(), "every law held"
    except Broken as broken:
        met, verdict = world.laws.met, f"broken: {broken}"
    print(f"seed {seed}: {world.plan}")
    if trace:
        print("\n".join(world.trace or []))
    print(f"met: {', '.join(sorted(met)) or 'nothing of note'}\n{verdict}")
    return 1 if verdict.startswith("broken") else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="tell its story")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100_000, help="how many, from the first")
    asked = parser.parse_args()
    return many(asked.first, asked.seeds) if asked.seed is None else one(asked.seed, asked.trace)


if __name__ == "__main__":
    sys.exit(main())
