"""`--plan auto`: what needs no process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.command import Caller, write_job
from shoal.driver.auto_layout import LayoutChooser
from shoal.driver.predict_run import NoPrediction, PredictionBasis, RunPredictor, predict_plan
from shoal.errors import MemoryNeeded, PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan, make_plan
from shoal.planner.cluster import find_cluster
from shoal.planner.cost.workload import Block, Op, Workload
from shoal.report.human import size

MB = 10**6


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PREDICT", "on")


# -- the choice -------------------------------------------------------------------------------------------------------


def work(parameters: float = 5e6, saved: float = 1e6, flops: float = 1e9) -> Workload:
    """Four blocks: 80 MB of weights, 320 MB with gradients and Adam's state."""
    ops = (Op("mm", flops, 1e6), Op("mm", 2 * flops, 2e6, backward=True))
    block = Block(name="block", ops=ops, parameters=parameters, tensors=2, saved=saved, output=1e3)
    return Workload(name="w", blocks=(block,) * 4, samples=4, lanes=4, microbatches=1, batch=16)


class Told(RunPredictor):
    """What is foreseen, without a job."""

    def __init__(self, work: Workload | None, cluster: str | None = None) -> None:
        self.basis = PredictionBasis(
            cluster=find_cluster(cluster or "laptop"), name=cluster or "", named=cluster is not None
        )
        self.told = work
        self.job = self.source = None  # type: ignore[assignment]

    def work(self) -> Workload:
        if self.told is None:
            raise NoPrediction("it cannot be followed")
        return self.told


def chooser(
    foresight: RunPredictor,
    limit: int | None = None,
    need: Callable[[Plan], float] = lambda plan: 0,
    refuse: Callable[[Plan], bool] = lambda plan: False,
) -> LayoutChooser:
    """`need`: MB that a worker needs at the least."""

    def make(
        layout: ParallelLayout, *, schedule: str = "1f1b", chunks: int | None = None, recompute: bool = False
    ) -> Plan:
        return make_plan(
            lanes=4, workers=layout.workers, layout=layout, schedule=schedule, chunks=chunks, recompute=recompute
        )

    def check(plan: Plan) -> None:
        if limit is not None and need(plan) * MB > limit:
            error = MemoryNeeded(f"one worker needs {need(plan)} MB")
            error.needed = round(need(plan) * MB)
            raise error
        if refuse(plan):
            raise PlanError("it cannot be cut there")

    return LayoutChooser(predictor=foresight, make_plan=make, check=check, memory_limit=limit)


@pytest.fixture(autouse=True)
def any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space is that of the work: there is no job whose optimizer or slices could be looked at."""
    import shoal.driver.job_space
    from shoal.planner.search.candidates import space_of, without_inexact

    monkeypatch.setattr(
        shoal.driver.job_space,
        "job_space",
        lambda job, source, work, cluster, exact: without_inexact(space_of(work, cluster)),
    )


def test_plain_copies_where_nothing_is_known() -> None:
    plan, why = chooser(Told(None)).choose(4)
    assert (str(plan.layout), why) == ("data=4", "")


def test_plain_copies_where_they_fit() -> None:
    plan, why = chooser(Told(work()), limit=2000 * MB).choose(4)
    assert (str(plan.layout), why) == ("data=4", "")


def peak(layout: str, recompute: bool = False) -> int:
    """Bytes, predicted."""
    found = ParallelLayout.parse(layout)
    plan = make_plan(lanes=4, workers=found.workers, layout=found, recompute=recompute)
    return max(predict_plan(work(), plan, Told(None).basis).peak_bytes)


def test_another_layout_where_they_do_not() -> None:
    limit = round(0.8 * peak("data=4"))
    plan, why = chooser(Told(work()), limit=limit).choose(4)
    assert plan.layout.sharded and plan.layout.exact and plan.workers == 4
    assert peak(str(plan.layout), plan.recompute) <= limit
    assert why.startswith("plain copies need ") and why.endswith(f" and a worker has {size(limit)} (--memory)")


def test_a_peak_that_is_predicted_a_little_too_high_may_fit() -> None:
    assert str(chooser(Told(work()), limit=round(peak("data=4") / 1.05)).choose(4)[0].layout) == "data=4"


def test_what_a_worker_needs_at_the_least_counts_whatever_was_predicted() -> None:
    small = chooser(Told(work(1e3)), limit=100 * MB, need=lambda plan: 120 / plan.pipeline)
    plan, why = small.choose(2)
    assert (str(plan.layout), why) == ("pipeline=2", "plain copies need 120 MB and a worker has 100 MB (--memory)")


def test_what_cannot_be_cut_is_not_chosen() -> None:
    limit = round(1.02 * peak("data=2,zero=3"))
    stuck = chooser(Told(work()), limit=limit, refuse=lambda plan: plan.pipeline > 1)
    plan, _ = stuck.choose(2)
    assert plan.pipeline == 1 and plan.zero


def test_nothing_fits() -> None:
    with pytest.raises(
        MemoryNeeded, match=r"no exact layout of 4 workers fits in 10 MB \(--memory\): the least needs .* MB, with --l"
    ) as caught:
        chooser(Told(work()), limit=10 * MB).choose(4)
    assert caught.value.needed > 10 * MB
    assert "--memory " in str(caught.value.fix)
    with pytest.raises(MemoryNeeded, match="the least needs 30 MB"):
        chooser(Told(work(1e3)), limit=20 * MB, need=lambda plan: 60 / plan.pipeline).choose(2)


def test_where_nothing_can_be_predicted_the_least_need_decides() -> None:
    unknown = chooser(Told(None), limit=100 * MB, need=lambda plan: 150 / plan.pipeline)
    plan, why = unknown.choose(2)
    assert (str(plan.layout), why) == ("pipeline=2", "plain copies need 150 MB and a worker has 100 MB (--memory)")
    with pytest.raises(MemoryNeeded, match="one worker needs 150"):
        chooser(Told(None), limit=10 * MB, need=lambda plan: 150).choose(2)
    assert str(chooser(Told(None), limit=200 * MB, need=lambda plan: 150).choose(2)[0].layout) == "data=2"


def test_a_known_cluster_may_make_another_one_faster_by_much() -> None:
    """Little compute and many parameters: copies would spend their time on sums and updates."""
    heavy, light = work(5e6, flops=1e6), work(1e3, flops=1e10)
    plan, why = chooser(Told(heavy, "laptop")).choose(4)
    assert plan.layout.sharded and "faster than plain copies (" in why
    assert str(chooser(Told(heavy)).choose(4)[0].layout) == "data=4", "nobody said what it is on"
    assert str(chooser(Told(light, "laptop")).choose(4)[0].layout) == "data=4"


def test_fewer_workers_are_fewer_of_the_same_replicas() -> None:
    old = make_plan(
        lanes=4, workers=8, layout=ParallelLayout.parse("data=4,pipeline=2"), schedule="gpipe", recompute=True
    )
    plan = chooser(Told(None)).choose_again(old, left=5, least=1)
    assert (str(plan.layout), plan.schedule, plan.recompute) == ("data=2,pipeline=2", "gpipe", True)
    again = chooser(Told(None)).choose_again
    assert str(again(old, left=1, least=1).layout) == "data=1", "not even one replica"
    with pytest.raises(PlanError, match="5 workers but 4 lanes"):
        again(old, left=5, least=5)
    shared = make_plan(lanes=4, workers=4, layout=ParallelLayout.parse("data=4,zero=1"))
    assert str(again(shared, left=3, least=1).layout) == "data=3", "what is shared by fewer may be too much"
    assert str(again(shared, left=4, least=4).layout) == "data=4,zero=1", "nobody is missing"


def test_the_replicas_may_be_impossible_with_more_to_do() -> None:
    old = make_plan(lanes=4, workers=4, layout=ParallelLayout.parse("data=2,pipeline=2"))
    stuck = chooser(Told(None), refuse=lambda plan: plan.pipeline > 1)
    assert str(stuck.choose_again(old, left=2, least=1).layout) == "data=2"
    with pytest.raises(PlanError, match="it cannot be cut there"):
        chooser(Told(None), refuse=lambda plan: True).choose_again(old, left=2, least=1)


# -- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "5"], "5 workers but 4 lanes: each worker needs a lane"),
        (["--plan", "auto", "--layout", "data=2"], "--plan auto and a layout: the planner chooses one"),
        (["--plan", "auto", "--workers", "2", "--shares", "3,1"], "--plan auto and --shares 3,1: both assign"),
        (["--workers", "2", "--cluster", "laptob"], "there is no cluster laptob"),
        (["--workers", "2", "--calibrate", "nothing"], "no run 'nothing'"),
    ],
)
def test_what_is_refused(call: Caller, tmp_path: Path, given: list[str], words: str) -> None:
    write_job(tmp_path)
    result = call("train", "job.py", *given)
    assert result.code == 2 and words in result.err
    assert not (tmp_path / "runs").exists()
