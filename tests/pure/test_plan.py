"""Candidates, their ranking, what is said of it, and scaling curves: properties, and small cases by brute force."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from helpers.places import GOLDEN
from helpers.plans import best_exact_plan
from shoal.cli.main import main
from shoal.driver.make_plan import open_job, plan_for
from shoal.driver.predict_run import setup_of
from shoal.errors import InputError, PlanError
from shoal.job.load import load_job
from shoal.parallel.balance import cut_stages
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, make_schedule, schedule_fits
from shoal.parallel.plan import make_plan
from shoal.planner.calibration_runs import write_calibration
from shoal.planner.cluster import Cluster, find_cluster, find_device
from shoal.planner.cost.calibrate import Calibration
from shoal.planner.cost.predict import predict, predict_many
from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS
from shoal.planner.cost.setup import SYNC_MODES, Setup
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.transformer_shape import TransformerShape, workload_of_shape
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import INEXACT, SearchSpace, candidates, marks, runnable, space_of, without_inexact
from shoal.planner.search.cheapest import cheapest_plans, duration_text, first_hosts, host_counts
from shoal.planner.search.explain import explain, larger_batch, more_hosts, scale_devices, widen_links
from shoal.planner.search.heterogeneous import assigned_counts
from shoal.planner.search.scaling_curve import fit_laws, scaling_curve
from shoal.planner.search.search import candidate_to_plan, search
from shoal.report import chart
from shoal.report.scaling_laws import usl_peak, usl_speedup
from shoal.worker.model_partition import make_outline
from shoal.worker.run_config import RunConfig

SHAPE = TransformerShape(layers=24, hidden=2048, heads=16, seq=2048, vocab=51200)  # 1.3 billion
LARGE = TransformerShape(layers=48, hidden=8192, heads=64, seq=2048, vocab=51200)  # 39 billion


def a100(hosts: int = 2) -> Cluster:
    return find_cluster("dgx-a100", hosts=hosts)


def space(cluster: Cluster, shape: TransformerShape = SHAPE, batch: int = 64, **more: object) -> SearchSpace:
    found = space_of(workload_of_shape(shape), cluster, batch=batch, heads=shape.heads)
    return replace(found, **more)  # type: ignore[arg-type]


def as_job(shape: TransformerShape = SHAPE, *, lanes: int = 8, microbatches: int = 2, batch: int = 64) -> Workload:
    """A shape whose arithmetic is fixed."""
    return replace(workload_of_shape(shape), lanes=lanes, microbatches=microbatches, batch=batch, samples=1)


# -- candidates -------------------------------------------------------------------------------------------------------


def test_every_candidate_of_a_shape_divides_it() -> None:
    found = candidates(space(a100(), sync_modes=SYNC_MODES, microbatch=(1, 2)))
    assert len(found) > 1000
    for setup in list(found)[::29]:
        assert setup.devices == 16 and SHAPE.heads % setup.tensor == 0
        assert SHAPE.layers % (setup.pipeline * setup.chunks) == 0
        assert setup.batch % (setup.data * setup.microbatch) == 0
        assert setup.zero == 0 or setup.data > 1
        assert setup.microbatches >= setup.pipeline or setup.schedule == "gpipe"
        make_schedule(setup.schedule, ranks=setup.pipeline, microbatches=setup.microbatches, chunks=setup.chunks)


def test_no_candidate_comes_twice_and_the_order_is_the_same_again() -> None:
    first, second = candidates(space(a100())), candidates(space(a100()))
    assert len(set(first)) == len(first)
    assert list(first) == list(second)


def test_a_job_keeps_its_arithmetic() -> None:
    work = as_job()
    found = candidates(space_of(work, a100()))
    assert {(each.batch, each.lanes, each.microbatch) for each in found} == {(64, 8, 4)}
    assert max(each.data for each in found) == 8
    assert {each.devices for each in found} == {1, 2, 4, 8, 16}  # fewer than all may be faster
    assert not [each for each in found if each.zero >= 2 and each.pipeline > 1]
    assert {each.recompute for each in found} == {"none", "full"}


def test_what_is_exact_and_what_can_be_run_is_marked() -> None:
    setups = SetupTable.of(
        [
            Setup(data=2),
            Setup(tensor=2),
            Setup(data=2, exchange="servers", servers=1),
            Setup(data=2, exchange="servers", servers=1, mode="async"),
            Setup(data=2, pipeline=2, zero=3),
            Setup(recompute="selective"),
        ]
    )
    assert marks(setups).tolist() == [0, 1, 0, 2, 0, 0]
    assert runnable(setups).tolist() == [True, True, True, True, False, False]


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_the_rules_of_schedules_are_those_that_make_them(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    try:
        make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        made = True
    except PlanError:
        made = False
    assert schedule_fits(name, ranks=ranks, microbatches=microbatches, chunks=chunks) == made


def test_columns_are_the_setups() -> None:
    setups = [Setup(data=2, lanes=4, batch=8), Setup(pipeline=4, schedule="zbv", chunks=2, recompute="full", batch=6)]
    columns = SetupTable.of(setups)
    assert list(columns) == setups and list(columns[1:]) == setups[1:]
    assert columns.microbatches.tolist() == [each.microbatches for each in setups]
    assert columns.devices.tolist() == [2, 4]


# -- ranking ----------------------------------------------------------------------------------------------------------


def test_the_best_fits_and_nothing_that_fits_is_faster() -> None:
    cluster, work = a100(), workload_of_shape(LARGE)
    ranking = search(work, cluster, space=space(cluster, LARGE))
    best = ranking.best
    assert best.fits and best.peak <= 80e9
    fitting = ranking.predictions.peak <= ranking.memory
    assert best.seconds == pytest.approx(ranking.predictions.seconds[fitting].min())
    assert 0 < len(ranking.order) == fitting.sum() and len(ranking.rejected) == (~fitting).sum() > 0
    assert sum(best.terms[name] for name in TERMS) == pytest.approx(best.seconds)
    # One at a time it is the same prediction.
    alone = predict(work, best.setup, cluster)
    assert (alone.seconds, alone.peak) == (pytest.approx(best.seconds), pytest.approx(best.peak))


def test_the_ranking_is_the_same_again_and_equal_ones_are_ranked_by_simplicity() -> None:
    cluster, work = find_cluster("dgx-a100"), workload_of_shape(SHAPE)
    narrow = space(cluster, devices=(1,), microbatch=(4,))
    first, second = (search(work, cluster, space=narrow) for _ in range(2))
    assert first.order.tolist() == second.order.tolist()
    same = [each for each in first.top(99) if each.seconds == pytest.approx(first.best.seconds, rel=1e-12)]
    assert first.best.setup.recompute == "none" and len(same) >= 1


MORE: dict[str, Callable[[Cluster], Cluster]] = {
    "memory": lambda cluster: scale_devices(cluster, memory=2),
    "peak": lambda cluster: scale_devices(cluster, peak=2),
    "inside": lambda cluster: widen_links(cluster, "inside"),
    "host": lambda cluster: widen_links(cluster, "host"),
    "rack": lambda cluster: widen_links(cluster, "rack"),
}


@pytest.mark.parametrize("what", MORE)
@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["1B", "39B"])
def test_more_of_anything_never_makes_the_best_slower(what: str, shape: TransformerShape) -> None:
    work = workload_of_shape(shape)
    cluster = find_cluster("dgx-a100", hosts=4, racks=2)
    small = space(cluster, shape, tensors=(1, 2, 8), schedules=("1f1b", "interleaved"), sequence=(False,))
    before = search(work, cluster, space=small).best.seconds
    assert search(work, MORE[what](cluster), space=small).best.seconds <= before * (1 + 1e-9)


def test_servers_that_do_not_wait_are_set_aside_unless_asked_for() -> None:
    cluster, work = a100(), workload_of_shape(SHAPE)
    asked = space(cluster, sync_modes=SYNC_MODES)
    ranking = search(work, cluster, space=asked)
    assert len(ranking.inexact) and {ranking.candidate(int(row)).mark for row in ranking.inexact} == {INEXACT}
    assert INEXACT not in {each.mark for each in ranking.top(10**6)}
    whole = search(work, cluster, space=asked, inexact=True)
    assert len(whole.inexact) == 0 and len(whole.order) == len(ranking.order) + len(ranking.inexact)


def test_what_does_not_fit_is_grouped_by_the_part_that_binds() -> None:
    cluster, work = a100(), workload_of_shape(LARGE)
    ranking = search(work, cluster, space=space(cluster, LARGE))
    found = ranking.rejections()
    assert sum(count for count, _ in found.values()) == len(ranking.rejected)
    for part, (_, fastest) in found.items():
        assert part in MEMORY_PARTS and not fastest.fits
        stages = predict(work, fastest.setup, cluster).stages
        worst = max(stages, key=lambda stage: stage.peak).memory
        assert max(worst, key=lambda name: worst[name]) == part
        assert fastest.binds_bytes == pytest.approx(worst[part])


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_no_plan_fits_tells_the_least_that_would_and_what_binds() -> None:
    cluster, work = find_cluster("dgx-a100"), workload_of_shape(LARGE)
    asked = space(cluster, LARGE)
    with pytest.raises(PlanError) as caught:
        search(work, cluster, space=asked, memory=20e9)
    found = predict_many(work, candidates(asked), cluster)
    least = found.peak.min()
    assert f"the least needs {least / 1e9:.3g} GB" in caught.value.message
    assert "--layout" in caught.value.message and "of 20 GB" in caught.value.where[0]
    assert search(work, cluster, space=asked, memory=least * 1.001).best.peak == pytest.approx(least)


def test_a_shape_that_nothing_divides_is_told_with_its_numbers() -> None:
    cluster = find_cluster("dgx-a100")
    odd = TransformerShape(layers=7, hidden=15, heads=5, seq=8, vocab=11)
    with pytest.raises(PlanError, match=r"no layout has 8 devices: .*batch of 3, .*1, 5, .*7 layers"):
        search(workload_of_shape(odd), cluster, space=space(cluster, odd, batch=3))


def test_more_workers_than_lanes_and_blocks_allow_is_told() -> None:
    whole = replace(as_job().blocks[0], sliced=0.0, reductions=0.0)  # nothing that could be split
    work = replace(as_job(lanes=2), blocks=(whole,))
    cluster = a100()
    with pytest.raises(PlanError, match=r"16 workers: 2 lanes are at most 2 replicas"):
        search(work, cluster, space=space_of(work, cluster, workers=16))
    with pytest.raises(InputError, match="99 workers, but the cluster has 16 devices"):
        space_of(work, cluster, workers=99)


# -- unequal devices --------------------------------------------------------------------------------------------------


def mixed(new: str = "h100-sxm-80", old: str = "a100-sxm-80") -> Cluster:
    """A host of four fast devices, and a host of four slow ones."""
    cluster = find_cluster("dgx-a100", hosts=2)
    (rack,) = cluster.racks
    hosts = tuple(
        replace(host, device=find_device(name), devices=4, workers=4)
        for host, name in zip(rack.hosts, (new, old), strict=True)
    )
    return replace(cluster, racks=(replace(rack, hosts=hosts),))


def test_unequal_devices_get_unequal_shares_and_gain_by_it() -> None:
    cluster, work = mixed(), as_job(lanes=16, microbatches=1, batch=64)
    copies = replace(space_of(work, cluster, workers=8), pipelines=(1,), tensors=(1,), zeros=(0, 2), servers=())
    ranking = search(work, cluster, space=copies)
    plain = next(each for each in ranking.top(99) if each.setup.zero == 0)
    assert plain.shares is not None
    shares = [int(each) for each in plain.shares.split(",")]
    assert sum(shares) == 16 and min(shares[:4]) > max(shares[4:]) >= 1
    slow = predict(work, plain.setup, mixed(new="a100-sxm-80")).seconds
    fast = predict(work, plain.setup, mixed(old="h100-sxm-80")).seconds
    assert fast < plain.seconds < slow
    cut = next(each for each in ranking.top(99) if each.setup.zero == 2)  # whose lanes are even
    assert cut.shares is None and cut.seconds > plain.seconds
    plan = candidate_to_plan(plain)
    assert [stop - start for start, stop in plan.assignment] == shares


def test_a_pipeline_over_unequal_devices_has_unequal_stages() -> None:
    cluster, work = mixed(), as_job(lanes=4, microbatches=4)
    long = replace(space_of(work, cluster, workers=8), pipelines=(8,), schedules=("1f1b",), servers=())
    best = search(work, cluster, space=long).best
    assert len(best.stages) == 8 and best.stages[0] == 1.0 > best.stages[7]
    assert best.seconds < predict(work, best.setup, mixed(new="a100-sxm-80")).seconds
    assert candidate_to_plan(best).stages == best.stages


def test_equal_devices_have_even_shares() -> None:
    best = search(as_job(), a100()).best
    assert best.shares is None and best.stages == ()


def test_the_runtime_cuts_stages_as_the_plan_has_them(tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text(TINY)
    job = load_job(str(file))
    plan = make_plan(lanes=4, workers=2, layout=ParallelLayout(pipeline=2), stages=(3.0, 1.0))
    stages = make_outline(job, open_job(job).source, plan).stages
    assert stages is not None and stages.spans == ((0, 6), (6, 8))


@pytest.mark.parametrize("pieces", [12, 40])
@given(speeds=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4))
def test_shares_of_unequal_devices_make_the_slowest_as_fast_as_can_be(pieces: int, speeds: list[float]) -> None:
    counts = assigned_counts(pieces, speeds)
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    assert sum(counts) == pieces and min(counts) >= 1
    times = sorted(count / speed for speed in speeds for count in range(1, pieces + 1))
    enough = (time for time in times if sum(int(time * speed + 1e-9) for speed in speeds) >= pieces)
    assert slowest == pytest.approx(next(time for time in enough if time >= 1 / min(speeds) - 1e-9))


@pytest.mark.parametrize("stages", [(1.0,), (1.0, 0.0), (1.0, 1.0, 1.0)])
def test_a_plan_has_one_weight_for_each_stage(stages: tuple[float, ...]) -> None:
    with pytest.raises(PlanError, match="2 stages, of the weights"):
        make_plan(lanes=4, workers=2, layout=ParallelLayout(pipeline=2), stages=stages)


# -- money and time ---------------------------------------------------------------------------------------------------


def test_the_cheapest_that_is_done_in_time() -> None:
    cluster, work = a100(8), workload_of_shape(SHAPE)

    def rank(part: Cluster) -> object:
        return search(work, part, space=space(part, batch=256, schedules=("1f1b",), sequence=(False,), servers=()))

    free = cheapest_plans(rank, cluster, steps=1000)  # type: ignore[arg-type]
    hurried = cheapest_plans(rank, cluster, steps=1000, deadline=free.chosen[0][0].seconds * 1000 * 0.5)  # type: ignore[arg-type]
    slow, fast = free.chosen[0][0], hurried.chosen[0][0]
    assert slow.cost is not None and fast.cost is not None
    assert slow.cost < fast.cost and slow.hosts < fast.hosts
    assert fast.seconds <= slow.seconds * 0.5
    assert slow.hourly == pytest.approx(slow.hosts * 8 * find_device("a100-sxm-80").price)  # type: ignore[operator]
    with pytest.raises(PlanError, match=r"no plan does 1,000 steps in 1 s: the fastest takes .* on 8 of 8 hosts"):
        cheapest_plans(rank, cluster, steps=1000, deadline=1.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="without a number of steps"):
        cheapest_plans(rank, cluster, deadline=1.0)  # type: ignore[arg-type]


def test_what_has_no_price_cannot_be_cheap() -> None:
    cluster = a100()
    host = cluster.hosts[0]
    assert host.device is not None
    free = replace(host, device=replace(host.device, price=None))
    unpriced = replace(cluster, racks=(replace(cluster.racks[0], hosts=(free,)),))
    with pytest.raises(PlanError, match="no price for a100-sxm-80"):
        cheapest_plans(lambda part: search(as_job(), part), unpriced)


def test_parts_of_a_cluster_are_its_first_hosts() -> None:
    cluster = find_cluster("dgx-a100", hosts=6, racks=2)
    part = first_hosts(cluster, 4)
    assert [host.name for host in part.hosts] == [host.name for host in cluster.hosts[:4]]
    assert len(part.racks) == 2
    assert host_counts(6) == (1, 2, 4, 6)
    with pytest.raises(PlanError, match="7 hosts of a cluster that has 6"):
        first_hosts(cluster, 7)


# -- as a plan --------------------------------------------------------------------------------------------------------


def test_an_exact_space_has_no_slices_and_no_servers() -> None:
    found = candidates(without_inexact(space_of(as_job(), a100())))
    assert len(found) and {each.tensor for each in found} == {1}
    assert {each.exchange for each in found} == {"collectives"}


def test_the_best_exact_plan_is_the_fastest_that_is_not_refused() -> None:
    work, cluster = as_job(), a100()
    plan, best, ranking = best_exact_plan(work, cluster, workers=8)
    assert plan.workers == 8 and plan.exact and plan.tensor == 1
    assert best.setup == ranking.best.setup
    other, second, _ = best_exact_plan(work, cluster, workers=8, refuses=lambda each: each == plan)
    assert other != plan and second.seconds >= best.seconds
    with pytest.raises(PlanError, match="can be run"):
        best_exact_plan(work, cluster, workers=8, refuses=lambda each: True)


def test_a_shape_and_what_cannot_be_run_are_no_plans() -> None:
    cluster, work = a100(), as_job()
    with pytest.raises(PlanError, match="a plan assigns lanes, but a shape has none"):
        candidate_to_plan(search(workload_of_shape(SHAPE), cluster, space=space(cluster)).best)
    served = search(work, cluster, space=replace(space_of(work, cluster, workers=8), pipelines=(1,), tensors=(1,)))
    with pytest.raises(PlanError, match="cannot run"):
        candidate_to_plan(replace(served.best, runnable=False))


@pytest.mark.parametrize(("mode", "sync"), [("sync", "sync"), ("quorum", "quorum:0.9"), ("stale", "stale:2")])
def test_servers_are_a_plan_with_their_mode(mode: str, sync: str) -> None:
    cluster, work = a100(), as_job()
    asked = replace(space_of(work, cluster, workers=8), pipelines=(1,), tensors=(1,), sync_modes=(mode,), servers=(2,))
    ranking = search(work, cluster, space=asked, inexact=True)
    found = next(each for each in ranking.top(999) if each.setup.exchange == "servers")
    plan = candidate_to_plan(found)
    assert (plan.servers, plan.sync, plan.workers, plan.exact) == (2, sync, 8, mode == "sync")
    assert plan.layout == ParallelLayout(data=8)
    setup = setup_of(work, plan)
    assert (setup.exchange, setup.servers, setup.mode, setup.data) == ("servers", 2, mode, 8)
    assert setup.sync == ("quorum:8" if mode == "quorum" else sync)
    assert setup_of(work, structs.replace(plan, servers=0, sync="")).exchange == "collectives"
    seconds = {
        each: predict(work, replace(setup, mode=each, number=-1), cluster).terms["data"]
        for each in ("sync", "async", "local", "groups")
    }
    assert seconds["local"] == pytest.approx(seconds["sync"] / 16)
    assert seconds["async"] < seconds["sync"]


# -- why --------------------------------------------------------------------------------------------------------------


def test_the_explanation_says_what_was_predicted() -> None:
    cluster, work = a100(), workload_of_shape(LARGE)
    asked = space(cluster, LARGE, tensors=(1, 8), schedules=("1f1b",), sequence=(False,), servers=())
    ranking = search(work, cluster, space=asked)
    told = explain(ranking, lambda work, cluster, space: search(work, cluster, space=space))
    gains = [change.gain for change in told.changes]
    assert gains == sorted(gains, reverse=True)
    by_name = {change.name: change for change in told.changes}
    faster = search(work, scale_devices(cluster, peak=2), space=asked).best
    assert by_name["devices that compute twice as fast"].best == faster
    more = search(work, more_hosts(cluster), space=replace(asked, devices=(32,))).best
    assert by_name["twice the devices"].gain == pytest.approx(more.rate / ranking.best.rate)
    _, larger = larger_batch(work, asked)
    grown = search(work, cluster, space=larger).best
    assert by_name["twice the batch"].gain == pytest.approx(grown.rate / ranking.best.rate)
    text = "\n".join(told.sentences)
    assert f"--layout {ranking.best.setup}" in text and "Amdahl" in text and "Gustafson" in text
    assert "Plain data parallel (data=16) does not fit" in text
    first = next(change for change in told.changes if "devices" not in change.name.split()[:3] or "that" in change.name)
    assert f"The one change that helps most is {first.name}" in text


def test_a_larger_batch_of_a_job_has_more_microbatches() -> None:
    work = as_job()
    larger, asked = larger_batch(work, space_of(work, a100()))
    assert (larger.batch, larger.microbatches, larger.lanes) == (128, 4, 8)
    assert {each.microbatch for each in candidates(asked)} == {4}


# -- curves -----------------------------------------------------------------------------------------------------------

TIMES = [1.0, 2.0, 4.0, 8.0, 16.0]


@pytest.mark.parametrize("parallel", [0.0, 0.5, 0.97, 1.0])
def test_fits_recover_amdahl_and_gustafson(parallel: float) -> None:
    amdahl = fit_laws([(n, 1 / ((1 - parallel) + parallel / n)) for n in TIMES])
    assert amdahl.amdahl == pytest.approx(parallel)
    assert amdahl.contention == pytest.approx(1 - parallel, abs=1e-9) and amdahl.coherence == pytest.approx(0, abs=1e-9)
    assert fit_laws([(n, (1 - parallel) + parallel * n) for n in TIMES]).gustafson == pytest.approx(parallel)


@pytest.mark.parametrize(("contention", "coherence"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.002), (0.0, 0.01)])
def test_a_fit_recovers_usl(contention: float, coherence: float) -> None:
    found = fit_laws([(n, usl_speedup(contention, coherence, n)) for n in TIMES])
    assert (found.contention, found.coherence) == pytest.approx((contention, coherence), abs=1e-9)
    assert found.speedups(4)["USL"] == pytest.approx(usl_speedup(contention, coherence, 4))


def test_usl_is_fastest_where_it_says() -> None:
    peak = usl_peak(0.05, 0.002)
    assert usl_speedup(0.05, 0.002, peak) > max(usl_speedup(0.05, 0.002, peak * x) for x in (0.9, 1.1))


def test_no_fit_is_below_zero_even_of_noise() -> None:
    found = fit_laws([(1, 1.0), (2, 2.3), (4, 3.1), (8, 9.0)])
    assert 0 <= found.amdahl <= 1 and 0 <= found.gustafson <= 1 and found.contention >= 0 and found.coherence >= 0


def test_a_curve_has_what_the_search_found_and_tells_where_nothing_fits() -> None:
    work = workload_of_shape(LARGE)

    def rank(cluster: Cluster, times: int) -> object:
        asked = space(cluster, LARGE, batch=64 * times, tensors=(8,), schedules=("1f1b",), servers=())
        return search(work, cluster, space=asked, memory=60e9)

    hosts = [(n, a100(n)) for n in (1, 2, 4, 8)]
    curve = scaling_curve(rank, hosts)  # type: ignore[arg-type]
    assert [n for n, _ in curve.missing] == [1] and "no plan fits" in curve.missing[0][1]
    assert [point.hosts for point in curve.points] == [2, 4, 8]
    first = curve.points[0]
    assert (first.speedup, first.efficiency) == (1.0, 1.0)
    for point in curve.points:
        assert point.efficiency == pytest.approx(point.speedup * 16 / point.devices)
    weak = scaling_curve(rank, hosts[1:], weak=True)  # type: ignore[arg-type]
    assert [point.candidate.setup.batch for point in weak.points] == [64, 128, 256]
    assert weak.points[-1].efficiency >= curve.points[-1].efficiency - 1e-9


def test_a_chart_has_its_markers_where_the_values_are() -> None:
    drawn = chart.text(
        chart.Chart(title="T", x_label="x", y_label="y", x=[1, 2, 3], lines={"a": [0, 1, 2], "b": [2, None, 0]}),
        width=20,
        height=5,
    )
    assert drawn.splitlines() == [
        "T",
        "y",
        " 2 ┤○             ·●",
        "   │          ····",
        " 1 ┤      ··●·",
        "   │   ···",
        " 0 ┤●··            ○",
        "   └┴───────┴──────┴",
        "    1       2      3   x",
        "    ● a   ○ b",
    ]


def test_a_picture_is_written_and_the_same_again(tmp_path: Path) -> None:
    lines = chart.Chart(title="T", x_label="x", y_label="y", x=[1, 2, 4], lines={"a": [1, 2, 3]}, log_x=True)
    for name in ("one.svg", "two.svg", "three.png"):
        chart.save_charts([lines, lines], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "three.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match=r"curve\.txt"):
        chart.check_picture(tmp_path / "curve.txt")
    with pytest.raises(InputError, match="no folder"):
        chart.check_picture(tmp_path / "none" / "curve.svg")


def test_a_missing_matplotlib_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="matplotlib") as caught:
        chart.new_figure()
    assert caught.value.fix == "pip install 'shoal[plots]'"


# -- stages of published profiles -------------------------------------------------------------------------------------


def profile(name: str) -> list[float]:
    """Milliseconds of the layers of a PipeDream profile, in an order in which each comes after what it needs."""
    with (GOLDEN / f"pipedream_profile_{name}.csv").open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    nodes = {row["node"]: row for row in rows}
    order: list[str] = []
    while len(order) < len(nodes):
        ready = [
            node
            for node, row in nodes.items()
            if node not in order and all(pred in order for pred in row["preds"].split(";") if pred in nodes)
        ]
        order += sorted(ready, key=lambda node: int(node.removeprefix("node")))
    return [float(nodes[node]["fwd_ms"]) + float(nodes[node]["bwd_ms"]) for node in order]


@pytest.mark.parametrize("name", ["vgg16", "resnet50"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_cut_of_a_published_profile_is_the_best_there_is(name: str, stages: int) -> None:
    costs = profile(name)
    if len(costs) > 60:  # neighbours together: few enough to try all cuts
        costs = [sum(costs[at : at + 6]) for at in range(0, len(costs), 6)]

    def dearest(bounds: tuple[int, ...]) -> float:
        ends = (0, *bounds, len(costs))
        return max(sum(costs[start:stop]) for start, stop in pairwise(ends))

    best = min(map(dearest, combinations(range(1, len(costs)), stages - 1)))
    spans = cut_stages(costs, stages)
    assert max(sum(costs[start:stop]) for start, stop in spans) == pytest.approx(best)
    assert best < sum(costs) / stages * 1.6


def test_stages_of_unequal_devices_are_as_large_as_these_are_fast() -> None:
    costs = profile("vgg16")
    (_, first), _ = cut_stages(costs, 2, [3.0, 1.0])
    assert sum(costs[:first]) / sum(costs) == pytest.approx(0.75, abs=0.1)


# -- the command ------------------------------------------------------------------------------------------------------

TINY = """
import shoal, torch
from torch import nn
job = shoal.Job(
    model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), data=(torch.zeros(64, 8), torch.zeros(64)),
    loss=lambda output, target: output.sum(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1), batch=16, steps=3)
"""
GPT = "layers=24,hidden=2048,heads=16,seq=2048,vocab=51200"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_shows_the_best_few_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--gpt", GPT, "--batch", "64", "--cluster", "dgx-a100", "--top", "3", "--explain")
    assert code == 0
    lines = out.splitlines()
    assert "dgx-a100" in lines[0] and lines[2].split()[0] == "--layout"
    assert [line[0] for line in lines[3:6]] == ["1", "2", "3"]
    for words in ("where the time goes", "memory of 1", "looked at", "do not fit in 79 GB", "The one change"):
        assert words in out
    assert lines[-1].startswith(f"next: shoal simulate --gpt {GPT} --batch 64 --layout ")


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--gpt", GPT, "--batch", "64", "--cluster", "dgx-a100", "--json")
    value = json.loads(out)
    assert code == 0 and value["looked_at"] == value["fit"] + value["set_aside"] + sum(
        each["count"] for each in value["rejected"].values()
    )
    assert [each["seconds"] for each in value["best"]] == sorted(each["seconds"] for each in value["best"])
    for each in value["best"]:
        assert sum(each["terms"].values()) == pytest.approx(each["seconds"]) and list(each["terms"]) == list(TERMS)
        assert each["samples_per_second"] == pytest.approx(64 / each["seconds"])
        assert each["peak"] <= each["memory"] == value["memory"]
        assert each["cost"] == pytest.approx(each["hourly"] * each["seconds"] / 3600)
    assert max(sum(stage["memory"].values()) for stage in value["stages"]) == pytest.approx(value["best"][0]["peak"])
    assert value["explanation"] is None and value["bill"] is None


def test_a_plan_that_is_written_can_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, file = tmp_path / "plan.json", tmp_path / "tiny.py"
    file.write_text(TINY)
    code, out, _ = run(capsys, str(file), "--cluster", "dgx-a100", "--workers", "2", "-o", str(path))
    assert code == 0 and out.splitlines()[-1] == f"next: shoal train {file} --plan {path}"
    assert "exact" in out.splitlines()[3]
    job = load_job(str(file))
    assert plan_for(job, RunConfig().changed(plan=path)).workers == 2
    code, out, _ = run(capsys, str(file), "--cluster", "dgx-a100", "--json")
    assert {each["setup"]["lanes"] for each in json.loads(out)["best"]} == {4}


def test_runs_correct_the_predictions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ("--gpt", GPT, "--batch", "64", "--cluster", "dgx-a100", "--json")
    _, out, _ = run(capsys, *asked)
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration(compute=2.0, runs=1, cluster="dgx-a100"))
    code, corrected, _ = run(capsys, *asked, "--calibrate", str(path))
    before, after = (json.loads(each)["best"][0]["terms"]["compute"] for each in (out, corrected))
    assert code == 0 and 1.5 * before < after


def test_a_curve_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    asked = ("--gpt", GPT, "--batch", "64", "--cluster", "dgx-a100", "--hosts", "1,2")
    code, out, _ = run(capsys, *asked, "--plot", str(path))
    assert code == 0 and path.read_text().startswith("<?xml")
    for words in ("speed-up", "100 %", "Amdahl", "Gustafson", "USL", "● predicted"):
        assert words in out
    code, out, _ = run(capsys, *asked, "--json")
    assert [point["devices"] for point in json.loads(out)["points"]] == [8, 16]


def test_the_bill_of_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--gpt", GPT, "--batch", "64", "--cluster", "dgx-a100", "--hosts", "2", "--steps", "1000")
    code, out, _ = run(capsys, *asked, "--deadline", "2d", "--json")
    bill = json.loads(out)["bill"]
    assert code == 0 and bill["seconds"] <= bill["deadline_seconds"] == 172800 and bill["cost"] > 0


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        ((), "a job FILE or --gpt SHAPE: neither", "shoal plan examples"),
        (("x.py", "--gpt", GPT), "both", "shoal plan examples"),
        (("--gpt", GPT), "--gpt needs --batch", "--batch"),
        (("x.py", "--batch", "8"), "a job has its own", "--set batch=8"),
        (("--gpt", GPT, "--batch", "8", "--cluster", "dgx-a10"), "there is no cluster dgx-a10", "dgx-a100"),
        (("--gpt", GPT, "--batch", "0"), "--batch 0", "--batch 1"),
        (("--gpt", GPT, "--batch", "8", "-o", "p.json"), "a shape is not trained", "--json"),
        (("--gpt", GPT, "--batch", "8", "--plot", "c.svg"), "one number of hosts", "--hosts 1,2,4,8"),
        (("--gpt", GPT, "--batch", "8", "--hosts", "1,2", "--explain"), "one number of hosts", "--hosts 4"),
        (("--gpt", GPT, "--batch", "8", "--hosts", "1,2", "--plot", "c.txt"), "not c.txt", "c.svg"),
        (("--gpt", GPT, "--batch", "8", "--cluster", "dgx-a100", "--deadline", "48"), "with its unit", "48h"),
        (("--gpt", GPT, "--batch", "8", "--cluster", "dgx-a100", "--deadline", "2h"), "number of steps", "--steps"),
        (("--gpt", GPT, "--batch", "8", "--cluster", "dgx-a100", "--memory", "1GB"), "no plan fits in 1 GB", "devices"),
        (("--gpt", "layers=24,hidden=2048,heads=15,seq=8,vocab=8", "--batch", "8"), "not divisible", "hidden"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_with_a_fix(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str, fix: str
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and out == ""
    assert told in err and "fix: " in err and fix in err.partition("fix: ")[2]


def test_spans_of_time() -> None:
    assert [duration_text(each) for each in (40, 90, 3600, 86400 * 2)] == ["40 s", "1.5 min", "1 h", "2 d"]
