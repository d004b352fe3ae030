"""`shoal simulate`: a plan played on a cluster with a virtual clock: stragglers, failures, shared links."""

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.cli import options
from shoal.cli import simulate_text as show
from shoal.cli.parser import CommandParser, HelpAll, rare_option
from shoal.errors import InputError, PlanError
from shoal.numerics.lanes import Span
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import check_schedule_name, default_chunks
from shoal.parallel.plan import Plan, make_plan, read_plan
from shoal.paramserver.sync_mode import SyncMode
from shoal.planner.cluster import Cluster
from shoal.planner.cost.setup import RECOMPUTE, Setup
from shoal.planner.cost.transformer_shape import TransformerShape, workload_of_shape
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import EXACT, space_of
from shoal.planner.search.search import candidate_to_plan, search
from shoal.planner.simulate.chrome_trace import chrome_trace, timeline
from shoal.planner.simulate.failures import POLICIES, FailureScenario, simulate_failures
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.servers import SimulatedServers, compare_modes
from shoal.planner.simulate.step import SimulatedStep, simulate_step, simulate_stragglers
from shoal.planner.simulate.stragglers import StragglerModel
from shoal.planner.simulate.time_to_accuracy import ConvergenceLaw, time_to_accuracy_table
from shoal.recovery.checkpoint.policy import DAY
from shoal.report import chart
from shoal.transport.decoding import decode_json

SHAPE = "layers=24,hidden=2048,heads=16,seq=2048,vocab=51200"
EXAMPLE = f"shoal simulate --gpt {SHAPE} --batch 512 --layout data=8,pipeline=4 --cluster dgx-a100 --hosts 4"
DEEP = 1000  # of the ranked ways of a job: looked through for one that can be run
COPY = 10e9  # bytes a second: a device's state into its host's memory, which steps wait for
DISK = 5e9  # bytes a second of a host: from there to where it outlives the host, beside the steps


def arguments(parser: CommandParser) -> None:
    parser.add_argument("files", nargs="*", metavar="PLAN.json|FILE[:job]",
                        help="a plan (shoal plan -o, or its --json), a job, or both")  # fmt: skip
    parser.add_argument("--gpt", metavar="SHAPE", help=f"or a shape: {SHAPE}")
    parser.add_argument("--layout", metavar="LIST", help="data=8,pipeline=4,tensor=2,zero=1 (the fastest that fits)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of a step, of a shape; a job has its own")
    options.cluster_options(parser)
    parser.add_argument("--schedule", metavar="NAME", help="of a pipeline (1f1b)")
    parser.add_argument("--stragglers", metavar="KIND", help="lognormal:0.1, normal:0.1, exponential:0.1, slow:3")
    parser.add_argument("--steps", type=int, metavar="N", help="steps with stragglers, or rounds of servers (100)")
    parser.add_argument("--days", type=float, metavar="N", help="so long, with failures and checkpoints")
    parser.add_argument("--mtbf", metavar="TIME", help="of one device, between failures: 50000h")
    parser.add_argument("--failures", type=int, metavar="N", help="or: so many in all")
    parser.add_argument("--checkpoint", metavar="TIME", default="auto", help="how often: 30min (auto: as it pays)")
    parser.add_argument("--servers", type=int, metavar="N", help="parameter servers instead of collectives")
    parser.add_argument("--sync", "--mode", metavar="MODE", dest="mode",
                        help="of servers: quorum:0.9, stale:3, async, local:16, groups:2 (sync)")  # fmt: skip
    parser.add_argument("--compare-modes", action="store_true", help="all modes of servers in one table")
    parser.add_argument("--accuracy", metavar="LIST", help="steps=5000,noise=512: time to a target, by a law")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one, other bad luck (0)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a timeline for ui.perfetto.dev or Chrome (JSON)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the timeline as .svg or .png")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")
    options.job_options(parser)
    rare_option(parser, "--microbatch", type=int, metavar="N", help="samples, of a shape (1)")
    rare_option(parser, "--chunks", type=int, metavar="N", help="stages on each worker of a pipeline (the schedule's)")
    rare_option(parser, "--recompute", choices=RECOMPUTE, help="what backward computes again (none)")
    rare_option(parser, "--sequence-parallel", action="store_true", help="with tensor: cut the rest along the sequence")
    rare_option(parser, "--dtype", default="bf16", metavar="NAME", help="of a shape: bf16 (default), fp16, fp32, fp8")
    rare_option(parser, "--shares", metavar="LIST", help="of a job's lanes, for each replica of --layout: 3,1 (even)")
    rare_option(parser, "--slow", metavar="LIST", help="5=3,9=1.5: device 5 takes 3 times as long, device 9 1.5 times")
    rare_option(parser, "--save", metavar="TIME", help="steps wait so long for a checkpoint (state at 10 GB/s)")


def call(given: argparse.Namespace) -> int:
    _check(given)
    cluster = options.cluster_of(given)
    asked = _request(given, cluster)
    step = simulate_step(asked.work, asked.setup, cluster, assignment=asked.assignment, slower=_slow(given.slow))
    rows = timeline(step)
    heading = f"{asked.name}; {options.cluster_label(given)}"
    lines = [heading, *_memory(asked, cluster, step), *show.step_lines(step, rows=rows)]
    value: dict[str, Any] = {"name": asked.name, "step": show.step_value(step)}
    seconds = step.seconds
    if given.stragglers is not None and given.servers is None:
        stragglers = StragglerModel.parse(given.stragglers)
        times = simulate_stragglers(step, stragglers, steps=given.steps or 100, seed=given.seed)
        lines += ["", *show.straggler_lines(step, times, stragglers, given.seed)]
        value["stragglers"] = show.straggler_value(times, stragglers)
        seconds = float(times.mean())
    servers = given.servers or (asked.setup.servers if asked.setup.exchange == "servers" else None)
    if servers is None and (given.mode is not None or given.compare_modes or given.accuracy is not None):
        raise InputError("--sync, --compare-modes and --accuracy need parameter servers", fix="--servers 4")
    if servers is not None:
        more, value["servers"] = _servers(given, servers, asked, cluster, step)
        lines += ["", *more]
    if given.days is not None:
        more, value["days"], value["assumed"] = _days(given, asked.setup, cluster, step, seconds)
        lines += ["", *more]
    title = f"{asked.name}, {asked.setup}, {show.seconds(step.seconds)} a step"
    if given.trace is not None:
        options.write_file(given.trace, msgspec.json.encode(chrome_trace(rows, title, seconds=step.seconds)))
        lines += ["", f"trace in {given.trace}: open it at ui.perfetto.dev"]
    if given.plot is not None:
        show.save_picture(rows, title, given.plot)
        lines += [*([] if given.trace else [""]), f"picture in {given.plot}"]
    value["next"] = asked.following
    print(msgspec.json.encode(value).decode() if given.json else "\n".join([*lines, "", f"next: {asked.following}"]))
    return 0


# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SimulateRequest:
    name: str
    work: Workload
    setup: Setup
    following: str  # the command worth typing next
    assignment: tuple[Span, ...] | None = None  # lanes of each replica, of a job


def _check(given: argparse.Namespace) -> None:
    options.check_counts(given, "batch", "steps", "servers", "microbatch", "chunks")
    if given.days is not None and not 0 < given.days < 36500:
        raise InputError(f"--days {given.days:g}: above 0, and less than a century", fix="--days 54")
    if given.failures is not None and given.failures < 0:
        raise InputError(f"--failures {given.failures}: not below 0", fix="--failures 466")
    if given.failures is not None and given.mtbf is not None:
        raise InputError(f"--failures {given.failures} and --mtbf {given.mtbf}: one of them", fix="leave one out")
    if given.days is None and (given.failures is not None or given.mtbf is not None):
        raise InputError("failures need --days: how long the run lasts", fix="--days 54")
    if given.days is not None and given.failures is None and given.mtbf is None:
        raise InputError(f"--days {given.days:g}: how often does a device fail?", fix="--mtbf 50000h or --failures 466")
    if given.shares is not None and (given.layout is None or given.gpt is not None):
        fix = "--layout data=2 --shares 3,1"
        raise InputError(f"--shares {given.shares} are of a job's lanes, with --layout", fix=fix)
    if given.plot is not None:
        chart.check_picture(given.plot)
    if given.trace is not None and not given.trace.parent.is_dir():
        raise InputError(f"there is no folder {given.trace.parent}", fix=f"mkdir -p {given.trace.parent}")


def _request(given: argparse.Namespace, cluster: Cluster) -> SimulateRequest:
    plans = [Path(each) for each in given.files if each.endswith(".json")]
    jobs = [each for each in given.files if not each.endswith(".json")]
    if len(plans) > 1 or len(jobs) > 1:
        raise InputError(f"{' '.join(given.files)}: one plan and one job at the most", fix=EXAMPLE)
    if bool(jobs) == (given.gpt is not None):
        what = "both are given" if jobs else "neither is given" if not plans else "a plan alone names no job"
        raise InputError(f"a job or a shape is simulated; {what}", fix=f"a FILE.py beside it, or --gpt {SHAPE}")
    if plans and given.layout is not None:
        raise InputError(f"{plans[0]} has a layout, and --layout {given.layout} another", fix="leave one out")
    plan = plans[0] if plans else None
    return _of_job(given, jobs[0], plan, cluster) if jobs else _of_shape(given, plan, cluster)


def _of_job(given: argparse.Namespace, file: str, plan: Path | None, cluster: Cluster) -> SimulateRequest:
    from shoal.driver.job_space import plan_refusal
    from shoal.driver.make_plan import open_job
    from shoal.driver.predict_run import setup_of
    from shoal.job.load import load_job
    from shoal.planner.trace_job import workload_of

    options.refuse_shape_flags(given)
    job = load_job(file, given.settings)
    opened = open_job(job)
    work = workload_of(job, opened.source)
    setup = None if plan is None else _stored_setup(plan)
    assignment: tuple[Span, ...] | None = None
    if setup is None and (plan is not None or given.layout is not None):
        made = _layout_plan(given, work) if plan is None else read_plan(plan)
        setup, assignment = setup_of(work, made), made.assignment
    elif setup is None:
        exact = (each for each in search(work, cluster).top(DEEP) if each.mark == EXACT and each.runnable)
        fitting = (each for each in exact if plan_refusal(job, opened.source, candidate_to_plan(each)) is None)
        setup = next((each.setup for each in fitting), None)
        if setup is None:
            raise PlanError(f"no exact layout of {file} was found that can be run", fix="--layout data=1")
    if setup.lanes != work.lanes:
        raise PlanError(f"{plan} assigns {setup.lanes} lanes, and {file} has {work.lanes}", fix="the plan of this job")
    words = ["shoal", "train", file, *(word for text in given.settings for word in ("--set", text))]
    following = shlex.join([*words, "--layout", str(setup)])
    return SimulateRequest(name=file, work=work, setup=setup, assignment=assignment, following=following)


def _layout_plan(given: argparse.Namespace, work: Workload) -> Plan:
    layout = ParallelLayout.parse(given.layout)
    return make_plan(
        lanes=work.lanes or 1,
        workers=layout.workers,
        shares=given.shares,
        layout=layout,
        schedule=given.schedule or "1f1b",
        chunks=given.chunks,
        recompute=given.recompute == "full",
    )


def _of_shape(given: argparse.Namespace, plan: Path | None, cluster: Cluster) -> SimulateRequest:
    shape = TransformerShape.parse(given.gpt)
    work = workload_of_shape(shape, given.dtype)
    setup = None if plan is None else _stored_setup(plan)
    if plan is not None and setup is None:
        layout = read_plan(plan)
        fix = "the job's FILE.py, or what shoal plan --gpt … --json prints"
        raise PlanError(f"{plan} assigns {layout.lanes} lanes of a job, and a shape has none", fix=fix)
    if setup is None:
        if given.batch is None:
            raise InputError("--gpt needs --batch: samples per step", fix="--batch 512")
        if given.layout is None:
            space = space_of(work, cluster, batch=given.batch, heads=shape.kv_heads)
            setup = search(work, cluster, space=space).best.setup
        else:
            setup = _shape_setup(given, ParallelLayout.parse(given.layout))
    place = f" --cluster {given.cluster}" if given.cluster else ""
    place += f" --hosts {given.hosts[0]}" if given.hosts else ""
    return SimulateRequest(name=f"gpt {given.gpt}", work=work, setup=setup,
                 following=f"shoal plan --gpt {given.gpt} --batch {setup.batch}{place} --explain")  # fmt: skip


def _shape_setup(given: argparse.Namespace, layout: ParallelLayout) -> Setup:
    microbatch = given.microbatch or 1
    schedule = given.schedule or "1f1b"
    check_schedule_name(schedule)
    each = layout.data * microbatch
    if given.batch % each:
        below, above = given.batch // each * each, -(-given.batch // each) * each
        raise PlanError(
            f"a batch of {given.batch} is not divisible by data {layout.data} × microbatch {microbatch} = {each}",
            fix=f"--batch {above}" if not below else f"--batch {below} or {above}",
        )
    chunks = (given.chunks or default_chunks(schedule)) if layout.pipeline > 1 else 1
    return Setup(
        data=layout.data,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        batch=given.batch,
        microbatch=microbatch,
        schedule=schedule if layout.pipeline > 1 else "1f1b",
        chunks=chunks,
        recompute=given.recompute or "none",
        sequence_parallel=given.sequence_parallel,
    )


def _stored_setup(path: Path) -> Setup | None:
    """The best setup of what `shoal plan --json` printed; None for another file."""
    try:
        value = decode_json(path.read_bytes())
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}", fix="shoal plan … -o plan.json") from None
    if not isinstance(value, dict):
        raise PlanError(f"{path} is not a plan: it holds {type(value).__name__}", fix="shoal plan … -o plan.json")
    if "best" in value:
        try:
            return msgspec.convert(value["best"][0]["setup"], Setup)
        except (msgspec.ValidationError, LookupError, TypeError) as error:
            raise PlanError(f"{path} is not what shoal plan --json prints: {error}") from None
    return None


def _memory(request: SimulateRequest, cluster: Cluster, step: SimulatedStep) -> list[str]:
    """A warning where the layout does not fit."""
    device = min((host.device for host in cluster.hosts if host.device), key=lambda each: each.memory)
    stage, part = step.prediction.binds
    need, there = step.prediction.peak, device.memory - device.reserved
    if need <= there:
        return []
    holds = step.prediction.stages[stage].memory[part]
    return [f"warning: it does not fit: stage {stage} needs {need / 1e9:.4g} of {there / 1e9:.4g} GB,"
            f" {holds / 1e9:.4g} GB of that for {part}"]  # fmt: skip


# -- what is played besides a step ------------------------------------------------------------------------------------


def _servers(
    given: argparse.Namespace, servers: int, request: SimulateRequest, cluster: Cluster, step: SimulatedStep
) -> tuple[list[str], Any]:
    setup, tiers = step.prediction.setup, list(LinkTopology(cluster).tiers.values())
    if not tiers:
        raise InputError("one device has no links to a server", fix="--hosts 4, or a cluster with more devices")
    span = setup.pipeline * setup.tensor
    far = tiers[-1]
    parameters = sum(stage.parameters for stage in step.prediction.stages)
    base = SimulatedServers(
        workers=setup.data,
        servers=servers,
        compute=step.pipeline + step.terms["optimizer"],
        num_bytes=parameters * setup.tensor * request.work.gradient_bytes,
        bandwidth=far.shared_bandwidth * far.efficiency * span,
        server_bandwidth=min(host.link.bytes_per_second * host.link.efficiency for host in cluster.hosts),
        latency=far.latency,
        stragglers=StragglerModel.parse(given.stragglers or "constant"),
    )
    quorum = max(2, base.workers - max(1, base.workers // 10))  # the slowest tenth is not waited for
    usual = [SyncMode.parse(text) for text in ("sync", f"quorum:{quorum}", "stale:2", "async", "local:16")]
    usual = usual if base.workers > 2 else [each for each in usual if each.name != "quorum"]
    usual += [SyncMode.parse("groups:2")] if base.workers > 2 else []
    mode = SyncMode.parse(given.mode or setup.sync or "sync")
    replace(base, sync_mode=mode)  # raises if the mode does not fit
    modes = [mode]
    if given.compare_modes:
        modes = list({str(each): each for each in (*usual, mode)}.values())
    served = compare_modes(base, modes, rounds=given.steps or 100, seed=given.seed)
    law = ConvergenceLaw(noise_batch=setup.batch) if given.accuracy is None else _law(given.accuracy)
    reached = time_to_accuracy_table(law, base, served, setup.batch)
    lines = show.server_lines(base, served, reached, law, relative=given.accuracy is None)
    return lines, show.server_value(served, reached)


def _days(
    given: argparse.Namespace, setup: Setup, cluster: Cluster, step: SimulatedStep, seconds: float
) -> tuple[list[str], Any, list[str]]:
    state = max(stage.memory["weights"] + stage.memory["optimizer"] for stage in step.prediction.stages)
    save = state / COPY if given.save is None else options.read_time("--save", given.save)
    write = state * min(host.devices for host in cluster.hosts) / DISK
    interval = None if given.checkpoint == "auto" else options.read_time("--checkpoint", given.checkpoint)
    trial = FailureScenario(
        seconds=given.days * DAY,
        devices=setup.devices,
        step=seconds,
        replicas=setup.data,
        copies=1 if setup.zero else setup.data,
        save=save,
        write=write,
        interval=interval,
        mtbf=None if given.mtbf is None else options.read_time("--mtbf", given.mtbf),
        failures=given.failures,
    )
    endured = [simulate_failures(trial, policy, seed=given.seed) for policy in POLICIES]
    one = trial.copies == 1
    copies = "each shard of the state has one holder" if one else f"{trial.copies} replicas hold each shard"
    assumed = [
        *(str(policy) for policy in POLICIES),
        f"a checkpoint keeps steps waiting {show.seconds(save)}, and can be used {show.seconds(write)} later; {copies}",
        f"failures at random (seed {given.seed}), each takes one device",
    ]
    return show.days_lines(endured, assumed), show.days_value(endured), assumed


# -- words of the command line ----------------------------------------------------------------------------------------


def _law(text: str) -> ConvergenceLaw:
    """steps=5000,noise=512,penalty=1."""
    found = _numbers("--accuracy", text, ("steps", "noise", "penalty"), "steps=5000,noise=512")
    for name in ("steps", "noise"):
        if name not in found:
            raise InputError(f"--accuracy {text}: {name} is missing", fix="--accuracy steps=5000,noise=512")
    return ConvergenceLaw(min_updates=found["steps"], noise_batch=found["noise"], penalty=found.get("penalty", 1.0))


def _slow(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    return {int(device): times for device, times in _numbers("--slow", text, None, "5=3,9=1.5").items()}


def _numbers(option: str, text: str, known: Sequence[str] | None, example: str) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        right = name.isdecimal() if known is None else name in known
        if not right or not np.isfinite(number) or number < 0:
            raise InputError(f"{option} {text}: {item.strip()!r} is not known", fix=f"{option} {example}")
        found[name] = number
    return found
