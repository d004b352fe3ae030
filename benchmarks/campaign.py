"""Kills and pauses, and what becomes of runs:   python benchmarks/campaign.py --jobs 2   (200 runs, fifteen minutes)

Every mode of training × every kind of process × SIGKILL, SIGSTOP for good, SIGSTOP and SIGCONT, at moments that a seed
decides. Each run is judged by itself: it has to end with exit code 0 (after the death of a driver by `shoal attach` or
`--resume`, after that of a lab's fork server by `--resume`), with the hash of an undisturbed run where that is
promised, without an orphan or a temporary folder, and without a silence of more than five seconds. Prints tables and
writes results/campaign.json; what failed, with the command that repeats it. Run again with the same seed it does the
same, at moments that differ by milliseconds.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from campaign_job import STEPS
from campaign_plan import LONGEST_SILENCE, MODES, PlannedFault, Verdict, combinations, plan_run
from campaign_run import play_run
from contenders import scratch_folder
from topology import why_not
from train import machine, publish, some_of

RESULTS = Path(__file__).parent / "results" / "campaign.json"
RUNS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    modes = [mode for mode in options.modes if not (MODES[mode].lab and why_not())]
    numbers = options.only or range(options.first, options.first + options.runs)
    planned = [plan_run(options.seed, number, modes, STEPS) for number in numbers]
    if options.dry:
        print("\n".join(f"{each.number:4}  {each}" for each in planned))
        return 0
    began, before = time.monotonic(), machine()
    with scratch_folder() as folder:
        place = options.keep or folder
        undisturbed = _undisturbed(place, sorted({each.mode for each in planned}), options.jobs)
        verdicts = _play(place, planned, undisturbed, options.jobs)
    result = {
        "machine": before,
        "seed": options.seed,
        "modes": options.modes,
        "skipped": {mode: why_not() for mode in options.modes if mode not in modes},
        "combinations": len(combinations(modes)),
        "seconds": round(time.monotonic() - began, 1),
        "load_after": os.getloadavg()[0],
        "undisturbed": undisturbed,
        "runs": verdicts,
        "by mode": summary(verdicts, lambda each: each.mode),
        "by victim": summary(verdicts, lambda each: f"{each.fault} {each.victim}"),
        "failed": [verdict.planned.number for verdict in verdicts if verdict.planned and not verdict.good],
    }
    publish(result, text(result, verdicts, options), options.json)
    return 1 if result["failed"] or not all(each.good for each in undisturbed.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Kills and pauses of every process of every kind of run")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how many ({RUNS})")
    parser.add_argument("--first", type=int, default=0, help="the first one's number (0)")
    parser.add_argument("--only", type=_numbers, default=[], metavar="N,N", help="these instead")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    known = list(MODES)
    parser.add_argument("--modes", type=some_of(known, "mode "), default=known, help=f"of {','.join(known)}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (1)")
    parser.add_argument("--keep", type=Path, help="a folder for the folders of runs that fail (nowhere)")
    parser.add_argument("--dry", action="store_true", help="print the faults, and start nothing")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the numbers go")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


# -- runs -------------------------------------------------------------------------------------------------------------


def _undisturbed(place: Path, modes: Sequence[str], jobs: int) -> dict[str, Verdict]:
    """A run of each mode that nothing happens to: its hash is what the others should have."""
    calls = {mode: (place / f"undisturbed {mode}", mode, None, None) for mode in modes}
    return _at_once(
        calls, jobs, lambda mode, verdict: print(f"{mode:16} {_line(verdict)}", file=sys.stderr, flush=True)
    )


def _play(place: Path, planned: Sequence[PlannedFault], undisturbed: dict[str, Verdict], jobs: int) -> list[Verdict]:
    calls = {
        each.number: (place / f"run {each.number}", each.mode, each, undisturbed[each.mode].weights_sha256)
        for each in planned
    }
    about = {each.number: each for each in planned}

    def say(number: int, verdict: Verdict) -> None:
        print(f"{number:4}  {about[number]!s:66} {_line(verdict)}", file=sys.stderr, flush=True)

    found = _at_once(calls, jobs, say)
    return [found[each.number] for each in planned]


def _at_once(calls: dict[Any, Any], jobs: int, say: Callable[[Any, Verdict], None]) -> dict[Any, Verdict]:
    """In processes: what a run leaves behind is seen from the process that started it."""
    found: dict[Any, Verdict] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork"), initializer=os.setsid) as pool:
        futures = {pool.submit(play_run, *call): key for key, call in calls.items()}
        for future in as_completed(futures):
            key = futures[future]
            found[key] = future.result()
            say(key, found[key])
            if found[key].good:
                shutil.rmtree(calls[key][0], ignore_errors=True)
    return found


def _line(verdict: Verdict) -> str:
    unhurt = "" if verdict.injected or verdict.planned is None else "  (no victim)"
    silence = f"silence {verdict.silence:4.1f} s after {verdict.silence_after}"
    return f"{verdict.seconds:5.1f} s  {silence}{unhurt}  {'; '.join(verdict.problems) or 'good'}"


# -- tables -----------------------------------------------------------------------------------------------------------


def summary(verdicts: Iterable[Verdict], group: Callable[[PlannedFault], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.planned is not None:
            groups.setdefault(group(verdict.planned), []).append(verdict)
    return {
        name: {
            "runs": len(those),
            "good": sum(each.good for each in those),
            "injected": sum(each.injected for each in those),
            "silence": _spread([each.silence for each in those if each.injected]),
            "standstill": _spread([each.standstill for each in those if each.injected]),
        }
        for name, those in sorted(groups.items())
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)} if values else None


def text(result: dict[str, Any], verdicts: Sequence[Verdict], options: argparse.Namespace) -> str:
    lines = [f"{len(verdicts)} runs of {result['combinations']} combinations, seed {options.seed}"]
    for heading in ("by mode", "by victim"):
        lines += [
            "",
            f"{heading:22}{'runs':>6}{'good':>6}{'hit':>6}{'silence, s':>24}{'standstill, s':>24}",
            f"{'':22}{'':18}{'min':>8}{'median':>8}{'max':>8}{'min':>8}{'median':>8}{'max':>8}",
        ]
        for name, row in result[heading].items():
            cells = "".join(_cells(row[what]) for what in ("silence", "standstill"))
            lines.append(f"{name:22}{row['runs']:6}{row['good']:6}{row['injected']:6}{cells}")
    lines += ["", f"silence: no event, no update of weights; at most {LONGEST_SILENCE:g} s. standstill: no update."]
    lines += [f"{mode} is left out: {reason}" for mode, reason in result["skipped"].items()]
    failed = [(mode, verdict) for mode, verdict in result["undisturbed"].items() if not verdict.good]
    lines += [f"undisturbed {mode}: {'; '.join(verdict.problems)}" for mode, verdict in failed]
    chosen = "" if options.modes == list(MODES) else f" --modes '{','.join(options.modes)}'"
    for verdict in verdicts:
        if verdict.planned is not None and not verdict.good:
            again = f"python benchmarks/campaign.py --seed {options.seed} --only {verdict.planned.number}{chosen}"
            lines += ["", f"failed: {verdict.planned}: {'; '.join(verdict.problems)}", f"  again: {again}"]
    lines += ["", f"good: {sum(each.good for each in verdicts)} of {len(verdicts)}"]
    return "\n".join(lines)


def _cells(found: dict[str, float] | None) -> str:
    return f"{'':24}" if found is None else "".join(f"{found[each]:8.2f}" for each in ("min", "median", "max"))


if __name__ == "__main__":
    sys.exit(main())
