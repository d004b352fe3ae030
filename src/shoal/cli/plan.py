"""`shoal plan`: the fastest ways to spread a job over a cluster that fit, and why."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec

from shoal.cli import options
from shoal.cli import plan_text as show
from shoal.cli.parser import CommandParser, HelpAll, print_json, rare_option
from shoal.errors import InputError
from shoal.planner.cluster import Cluster
from shoal.planner.cost.runtime import MEGATRON, SHOAL, SHOAL_CAPPED, Runtime
from shoal.planner.cost.setup import SEARCHED_MODES
from shoal.planner.cost.transformer_shape import EXAMPLE as SHAPE
from shoal.planner.cost.transformer_shape import TransformerShape, workload_of_shape
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import SearchSpace, space_of
from shoal.planner.search.cheapest import CheapestPlans, cheapest_plans
from shoal.planner.search.explain import explain, larger_batch, seconds_text
from shoal.planner.search.scaling_curve import scaling_curve
from shoal.planner.search.search import OBJECTIVES, Candidate, PlanRanking, candidate_to_plan, search
from shoal.report import chart
from shoal.report.human import parse_size

EXAMPLE = "shoal plan examples/gpt.py --cluster dgx-a100 --hosts 2"
CURVE = "shoal plan examples/gpt.py --cluster dgx-a100 --hosts 1,2,4,8 --plot curve.svg"
WIDTH = 120
WRAPPED: Any = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
DEEP = 1000  # of the ranked that are looked through for different layouts


def arguments(parser: CommandParser) -> None:
    parser.epilog = f"examples: {EXAMPLE}\n          {CURVE}"
    parser.add_argument("file", nargs="?", metavar="FILE[:job]", help="a Python file that holds a shoal.Job")
    parser.add_argument("--gpt", metavar="SHAPE", help=f"or a shape: {SHAPE}")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of a step, of a shape; a job has its own")
    options.cluster_options(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="exactly so many (all devices; of a job what helps)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many ways to show (5)")
    parser.add_argument("--explain", action="store_true", help="why this one, and which one change would help most")
    parser.add_argument("--objective", choices=OBJECTIVES, default="time", help="time (default) or cost")
    parser.add_argument("--deadline", metavar="TIME", help="48h: the cheapest plan that is done by then")
    parser.add_argument("--steps", type=int, metavar="N", help="steps in all (the job's)")
    parser.add_argument("--memory", metavar="SIZE", help="that a worker may use: 40GB (what its device has)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the best for shoal train --plan FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --hosts 1,2,4: the curve as .svg or .png")
    parser.add_argument("--calibrate", nargs="+", default=[], metavar="RUN", help="corrected by what runs measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")
    options.job_options(parser)
    rare_option(parser, "--dtype", default="bf16", metavar="NAME", help="of a shape: bf16 (default), fp16, fp32, fp8")
    rare_option(parser, "--every", action="store_true", help="every way by itself, not the best of each layout")
    rare_option(parser, "--inexact", action="store_true", help="rank servers that do not wait, too: another training")
    rare_option(parser, "--weak", action="store_true", help="a curve along which the batch grows with the hosts")


def call(given: argparse.Namespace) -> int:
    _check(given)
    question, clusters = _question(given), options.clusters_of(given)
    tuned = [options.calibrated(given, cluster, question.runtime) for cluster in clusters]
    question, clusters = replace(question, runtime=tuned[0][1]), [cluster for cluster, _ in tuned]
    if len(clusters) > 1:
        return _curve(given, question, clusters)
    deadline = None if given.deadline is None else options.read_time("--deadline", given.deadline)
    if given.objective == "cost" or deadline is not None:
        bill = cheapest_plans(question.rank, clusters[0], steps=question.steps, deadline=deadline, each=DEEP // 5)
        return _best(given, question, [each for each, _ in bill.chosen], bill.chosen[0][1], bill)
    ranking = question.rank(clusters[0])
    return _best(given, question, ranking.top(max(DEEP, given.top)), ranking)


# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanQuery:
    """A job or a shape, and how its layouts are searched on a cluster."""

    command_words: Sequence[str]  # of the command line, to repeat the query
    work: Workload
    space: Callable[[Workload, Cluster], SearchSpace]
    runtime: Runtime
    memory: float | None
    inexact: bool
    steps: int | None
    threads: int = 1
    refusal: Callable[[Candidate], str | None] = lambda candidate: None

    def rank(self, cluster: Cluster) -> PlanRanking:
        return self.rank_again(self.work, cluster, self.space(self.work, cluster))

    def rank_again(self, work: Workload, cluster: Cluster, space: SearchSpace) -> PlanRanking:
        return search(work, cluster, space=space, memory=self.memory, runtime=self.runtime, inexact=self.inexact)

    def can_run(self, candidate: Candidate) -> bool:
        """False where this runtime cannot run a job's candidate; a shape is not run, so all candidates count."""
        return candidate.runnable or candidate.setup.lanes is None

    def rank_larger_batch(self, cluster: Cluster, times: int) -> PlanRanking:
        """The ranking with a batch `times` as large."""
        work, space = larger_batch(self.work, self.space(self.work, cluster), times)
        return self.rank_again(work, cluster, space)


def _check(given: argparse.Namespace) -> None:
    if (given.file is None) == (given.gpt is None):
        what = "neither" if given.file is None else "both"
        raise InputError(f"a job FILE or --gpt SHAPE: {what} is given", fix=EXAMPLE)
    if given.file is not None:
        options.refuse_shape_flags(given)
    options.check_counts(given, "top", "batch", "steps", "workers")
    if given.output is not None and given.gpt is not None:
        raise InputError("-o writes a plan to train by, and a shape is not trained", fix="a job, or --json")
    curve = given.hosts is not None and len(given.hosts) > 1
    for name in ("plot", "weak"):
        if getattr(given, name) and not curve:
            raise InputError(f"--{name} is for a curve, and there is one number of hosts", fix="--hosts 1,2,4,8")
    for name in ("output", "explain", "deadline"):
        if getattr(given, name) and curve:
            raise InputError(f"--{name} is for one number of hosts, not for {len(given.hosts)}", fix="--hosts 4")
    if curve and given.objective == "cost":
        raise InputError("a curve is of time, not of cost", fix="--hosts with one number: fewer are looked at, too")
    if given.plot is not None:
        chart.check_picture(given.plot)


def _question(given: argparse.Namespace) -> PlanQuery:
    memory = None if given.memory is None else float(parse_size(given.memory))
    return _shape_question(given, memory) if given.file is None else _job_question(given, memory)


def _shape_question(given: argparse.Namespace, memory: float | None) -> PlanQuery:
    shape = TransformerShape.parse(given.gpt)
    if given.batch is None:
        raise InputError("--gpt needs --batch: samples per step", fix="--batch 1536")

    def space(work: Workload, cluster: Cluster) -> SearchSpace:
        found = space_of(work, cluster, batch=given.batch, heads=shape.kv_heads, workers=given.workers)
        return replace(found, sync_modes=SEARCHED_MODES)

    return PlanQuery(
        command_words=["--gpt", given.gpt, "--batch", str(given.batch)],
        work=workload_of_shape(shape, given.dtype),
        space=space,
        runtime=MEGATRON,
        memory=memory,
        inexact=given.inexact,
        steps=given.steps,
    )


def _job_question(given: argparse.Namespace, memory: float | None) -> PlanQuery:
    from shoal.driver.job_space import job_space, plan_refusal
    from shoal.driver.make_plan import open_job
    from shoal.job.load import load_job
    from shoal.planner.trace_job import workload_of

    job = load_job(given.file, given.settings)
    opened = open_job(job)

    def space(work: Workload, cluster: Cluster) -> SearchSpace:
        return replace(job_space(job, opened.source, work, cluster, workers=given.workers), sync_modes=SEARCHED_MODES)

    def refused(candidate: Candidate) -> str | None:
        return plan_refusal(job, opened.source, candidate_to_plan(candidate, threads=job.threads))

    return PlanQuery(
        command_words=[given.file, *(word for text in given.settings for word in ("--set", text))],
        work=workload_of(job, opened.source),
        space=space,
        runtime=SHOAL if memory is None else SHOAL_CAPPED,
        memory=memory,
        inexact=given.inexact,
        steps=given.steps or opened.steps,
        threads=job.threads,
        refusal=refused,
    )


# -- what is answered -------------------------------------------------------------------------------------------------


def _best(
    given: argparse.Namespace,
    question: PlanQuery,
    found: Sequence[Candidate],
    ranking: PlanRanking,
    bill: CheapestPlans | None = None,
) -> int:
    cannot = next((each for each in found if not question.can_run(each)), None)
    found = [each for each in found if question.can_run(each)]
    shown = list(found[: given.top]) if given.every else show.best_per_layout(found, given.top)
    refused = {number: why for number, each in enumerate(shown, 1) if (why := question.refusal(each)) is not None}
    first = next((each for number, each in enumerate(shown, 1) if number not in refused), None)
    explanation = explain(ranking, question.rank_again) if given.explain else None
    if given.output is not None:
        _write(given.output, first, question.threads)
    if given.json:
        value = show.ranking_value(ranking, shown, refused)
        value["explanation"] = None if explanation is None else show.explanation_value(explanation)
        value["bill"] = None if bill is None else show.bill_value(bill)
        print_json(value)
        return 0
    price = ""
    if shown[0].hourly is not None:
        some = f"{shown[0].hosts} of them " if bill is not None else ""
        price = f"; {some}{show.money(shown[0].hourly, shown[0].currency)} an hour"
    work = question.work
    print(f"{work.name}, batch {ranking.space.batch:,}, {work.dtype}; {options.cluster_label(given)}{price}")
    print()
    print("\n".join([*show.layout_lines(shown, refused), *show.heterogeneous_lines(shown[0])]))
    print("\nwhere the time goes")
    print("\n".join(show.time_lines(shown)))
    print(f"\nmemory of 1, {show.layout_text(shown[0])}")
    print("\n".join(show.memory_lines(ranking.full_prediction(shown[0]).stages, ranking.memory)))
    print()
    for line in [*(show.bill_lines(bill) if bill else []), *show.rejected_lines(ranking)]:
        print("\n".join(wrap(line, WIDTH, **WRAPPED)))
    if cannot is not None and cannot.seconds < shown[0].seconds:
        print(f"  faster, and not yet in this runtime: {show.layout_text(cannot)}, {seconds_text(cannot.seconds)}")
    for number, why in refused.items():
        print(f"{number} cannot be run: {why}")
    if explanation is not None:
        print()
        print("\n".join(line for each in explanation.sentences for line in wrap(each, WIDTH, **WRAPPED)))
    only = ranking.cluster.hosts[0]
    here = len(ranking.cluster.hosts) == 1 and (only.interconnect is None or only.interconnect.kind == "memory")
    print(f"\nnext: {_next(given, question, first, here)}")
    return 0


def _write(path: Path, candidate: Candidate | None, threads: int) -> None:
    if candidate is None:
        raise InputError("none of the plans that are shown can be run, so none is written", fix="--top 20")
    plan = candidate_to_plan(candidate, threads=threads)
    options.write_file(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def _next(given: argparse.Namespace, question: PlanQuery, best: Candidate | None, here: bool) -> str:
    """The next command to type. `here`: the cluster is one processor and its cores."""
    if best is None:
        return f"shoal plan {shlex.join(question.command_words)} --top 20"
    if given.output is not None:
        return f"shoal train {shlex.join(question.command_words)} --plan {shlex.quote(str(given.output))}"
    trains = given.file is not None and (given.cluster is None or here)
    words = [*question.command_words, *_options(best, trains)]
    if trains:
        return f"shoal train {shlex.join(words)}"
    where = ["--cluster", given.cluster] if given.cluster is not None else []
    where += ["--hosts", str(best.hosts)] if given.hosts is not None or best.hosts > 1 else []
    return f"shoal simulate {shlex.join([*words, *where])}"


def _options(candidate: Candidate, trains: bool) -> list[str]:
    """The candidate as flags of `train`, or of `predict` and `simulate`."""
    setup = candidate.setup
    served = setup.exchange == "servers"
    found = ["--workers", str(setup.data)] if served and trains else ["--layout", str(setup)]
    found += ["--schedule", setup.schedule] if setup.pipeline > 1 and setup.schedule != "1f1b" else []
    found += ["--chunks", str(setup.chunks)] if setup.chunks > 1 else []
    found += ["--microbatch", str(setup.microbatch)] if setup.lanes is None else []
    if setup.recompute != "none":
        found += ["--recompute"] if trains else ["--recompute", setup.recompute]
    found += ["--sequence-parallel"] if setup.sequence_parallel else []
    if served:
        found += ["--servers", str(setup.servers), "--sync", setup.sync]
    return found + (["--shares", candidate.shares] if candidate.shares and trains else [])


def _curve(given: argparse.Namespace, question: PlanQuery, clusters: Sequence[Cluster]) -> int:
    sized: Mapping[int, Cluster] = {len(cluster.hosts): cluster for cluster in clusters}
    curve = scaling_curve(
        lambda cluster, times: question.rank_larger_batch(cluster, times) if times > 1 else question.rank(cluster),
        list(sized.items()),
        weak=given.weak,
    )
    if given.plot is not None:
        if curve.fits is None:
            raise InputError(f"one of {len(sized)} numbers of hosts has a plan: no curve", fix="more hosts")
        chart.save_charts(show.charts(curve), given.plot)
    if given.json:
        print_json(show.curve_value(curve))
        return 0
    batch = "a batch that grows with the hosts" if given.weak else f"batch {curve.points[0].candidate.setup.batch:,}"
    print(f"{question.work.name}, {batch}, {question.work.dtype}; cluster {given.cluster or 'this machine'}\n")
    print("\n".join(show.curve_lines(curve)))
    if given.plot is not None:
        print(f"\nwritten: {given.plot}")
    most = curve.points[-1].hosts
    cluster = f" --cluster {shlex.quote(given.cluster)}" if given.cluster else ""
    print(f"\nnext: shoal plan {shlex.join(question.command_words)}{cluster} --hosts {most} --explain")
    return 0
