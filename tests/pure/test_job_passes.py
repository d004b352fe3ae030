"""A job with several losses and optimizers: what it may say, whose parameters a pass trains, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.passes_job import build, deceive, drawing, passes_job, spread, tell_apart
from shoal.driver.check_plan import check_passes, check_server_job, goes_with_servers
from shoal.driver.job_space import job_space, plan_refusal
from shoal.driver.make_plan import open_job
from shoal.driver.verify_plain import against_plain
from shoal.errors import InputError, JobError, PlanError
from shoal.job.pass_losses import PassObjective, make_objective
from shoal.job.passes import pass_parameters
from shoal.numerics.describe import describe
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import make_plan
from shoal.planner.cluster import even_cluster
from shoal.planner.trace_job import SEVERAL_PASSES, workload_of
from shoal.recovery.checkpoint.arithmetic import check_arithmetic
from shoal.testing import job_for
from shoal.testing.models import dropout_net
from shoal.worker.job_optimizer import build_optimizers, build_scheduler, optimizer_builder
from shoal.worker.memory import state_factor
from shoal.worker.model_partition import example_microbatch


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def named_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


# -- what a job says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": tell_apart, "scheduler": None}, r"optimizer has several by name \('maker', 'judge'\), and loss is"),
        ({"loss": tell_apart, "optimizer": sgd}, r"scheduler has several by name \('judge'\), and loss is only one"),
        ({"optimizer": sgd}, r"loss has several by name \('judge', 'maker'\), and optimizer is only one"),
        ({"scheduler": lambda optimizer: None}, "and scheduler is only one"),
        ({"optimizer": {"judge": sgd}}, "the losses are 'judge', 'maker', the optimizers 'judge': each pass has one"),
        ({"scheduler": {"jugde": None}}, "scheduler has 'jugde', and the passes are 'judge', 'maker'"),
        ({"loss": {}, "optimizer": {}}, "must have names of submodules"),
        ({"loss": {"": tell_apart}, "optimizer": {"": sgd}}, "must have names of submodules"),
        ({"loss": {"judge": "model", "maker": deceive}}, r"loss\['judge'\] must be a function, not str"),
        (
            {"optimizer": {"judge": sgd, "maker": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}},
            r"optimizer\['maker'\] must be a function, not SGD",
        ),
        ({"compile": True}, "compile=True and several losses by name do not go together"),
        ({"ema": 0.9}, "ema=0.9 and several losses"),
        ({"precision": "fp16"}, "precision='fp16' and several losses"),
        ({"precision": "bf16-weights"}, "precision='bf16-weights' and several losses"),
        ({"loss_scale": 8.0}, "loss_scale=8.0 and several losses"),
        ({"target": "accuracy >= 1"}, "but the job measures loss, loss judge, spread"),
        ({"patience": 2, "monitor": "max x"}, "monitor names the metric 'x', but the job measures loss, loss judge"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    measured = {"evaluate": (torch.zeros(8, 3),) * 2, "metrics": {"spread": spread}}
    with pytest.raises(JobError, match=message):
        passes_job(**measured | changes)


def test_the_order_of_the_passes_is_part_of_the_arithmetic() -> None:
    job = passes_job()
    assert job.passes == ("judge", "maker")
    other = job.changed(loss=dict(reversed(list(job.loss.items()))))  # type: ignore[union-attr]
    assert check_arithmetic(job.arithmetic(), passes_job().arithmetic(), ()) == ()
    with pytest.raises(shoal.ShoalError, match="the job's arithmetic changed: "):
        check_arithmetic(job.arithmetic(), other.arithmetic(), ())
    swapped = job.changed(optimizer=dict(reversed(list(job.optimizer.items()))))  # type: ignore[union-attr]
    assert swapped.arithmetic() == job.arithmetic(), "optimizers are called by the losses' order"
    plain = job_for(dropout_net)
    assert plain.arithmetic()["loss"] == describe(plain.loss) and plain.passes == ()
    assert job.resolved()["loss"]["judge"].startswith("tell_apart")


def test_losses_of_other_passes_can_be_watched() -> None:
    held_out = (torch.zeros(8, 3),) * 2
    job = passes_job(evaluate=held_out, target="loss judge <= 1", patience=2, keep_best="min loss judge")
    assert list(job.measured) == ["loss judge"] and job.monitored == "min loss judge"
    assert job.target.reached({"loss": 2.0, "loss judge": 0.5})


# -- whose parameters -------------------------------------------------------------------------------------------------


def test_a_pass_trains_the_parameters_below_the_submodule_of_its_name() -> None:
    job, model = passes_job(), build()
    optimizers = build_optimizers(job, model, named_of(model))
    assert list(optimizers) == ["judge", "maker"]
    for name, optimizer in optimizers.items():
        held = [id(each) for group in optimizer.param_groups for each in group["params"]]
        assert held == [id(each) for each in model.get_submodule(name).parameters()]
    scheduler = build_scheduler(job, optimizers)
    for optimizer in optimizers.values():
        optimizer.step()
    scheduler.step()
    assert optimizers["judge"].param_groups[0]["lr"] == pytest.approx(0.045)
    # Adam has two numbers for each weight of the maker, SGD with momentum one for each of the judge.
    tiny = state_factor(optimizer_builder(job, model), {name: each.dim() for name, each in named_of(model)})
    assert tiny == (2 * 48 + 40) / 88


def test_a_part_within_and_a_tied_weight() -> None:
    model = build()
    model["maker"][3].weight = model["judge"][0].weight = nn.Parameter(torch.zeros(6, 3).T)  # type: ignore[index]
    found = pass_parameters(model, ["maker.0", "judge"])
    assert found["maker.0"] == ["maker.0.weight", "maker.0.bias"]
    assert "maker.3.weight" in found["judge"], "a tied weight by its first name"


def test_a_parameter_that_no_pass_trains_is_refused_unless_it_is_frozen() -> None:
    model = nn.ModuleDict({**dict(build().items()), "rest": nn.Linear(1, 1)})  # type: ignore[operator]
    with pytest.raises(
        JobError, match=r"no pass trains rest\.weight: the optimizers of 'judge', 'maker' do not have it"
    ):
        build_optimizers(passes_job(), model, named_of(model))
    build_optimizers(passes_job(freeze={"rest": None}), model, named_of(model))
    with pytest.raises(JobError, match=r"no pass trains rest\.weight"):
        build_optimizers(passes_job(freeze={"rest": 5}), model, named_of(model))
    model["rest"].requires_grad_(False)
    build_optimizers(passes_job(), model, named_of(model))
    left_out = passes_job(optimizer={"judge": lambda named: sgd(named[1:]), "maker": sgd})
    with pytest.raises(JobError, match=r"no pass trains judge\.0\.weight"):
        build_optimizers(left_out, model, named_of(model))


def test_a_name_that_is_no_submodule() -> None:
    job = passes_job(loss={"juge": tell_apart}, optimizer={"juge": sgd}, scheduler=None)
    with pytest.raises(JobError, match=r"loss\['juge'\]: the model has no submodule of that name") as refused:
        build_optimizers(job, build(), named_of(build()))
    assert "judge" in str(refused.value.fix)
    with pytest.raises(JobError, match="has no parameters to train"):
        pass_parameters(build(), ["maker.2"])


# -- losses -----------------------------------------------------------------------------------------------------------


def test_each_loss_gets_the_model_and_the_batch() -> None:
    model, batch = build().eval(), [torch.randn(4, 3), torch.randn(4, 3)]
    objective = make_objective(passes_job(metrics={"spread": spread}, evaluate=batch), model)
    assert isinstance(objective, PassObjective)
    judge, maker = objective.closures["judge"](batch), objective.closures["maker"](batch)
    assert torch.equal(judge, tell_apart(model, batch)) and maker[1] == 4
    torch.testing.assert_close(objective(batch), judge + maker[0] / 4)
    measured = objective.evaluation()(batch)
    assert list(measured) == ["loss judge", "loss", "spread"]
    assert torch.equal(measured["loss"][0], maker[0]), "the loss is the last pass's"
    assert list(make_objective(job_for(dropout_net), model).closures) == [""]


def test_a_loss_that_fails_or_trains_nothing_says_which_it_is() -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise ValueError("broken")

    def blind(model: Any, batch: list[Tensor]) -> Tensor:
        return batch[0].mean()

    objective = make_objective(passes_job(loss={"judge": broken, "maker": blind}), build())
    with pytest.raises(ValueError, match="broken") as failed:
        objective.closures["judge"]([])
    assert failed.value.__notes__ == ["loss['judge'] was called with (model, batch)"]
    with pytest.raises(JobError, match=r"loss\['maker'\] does not depend on any parameter that its optimizer trains"):
        objective.closures["maker"]([torch.randn(4, 3)])


def test_lanes_are_compared_within_a_pass() -> None:
    """The judge's loss is a mean over two items a sample, the maker's over one: that is no difference between lanes."""

    def two(model: Any, batch: list[Tensor]) -> Tensor:
        found: Tensor = model["judge"](torch.cat([batch[0], batch[0]])).mean()
        return found

    def cut(model: Any, batch: list[Tensor]) -> Tensor:
        found: Tensor = model["maker"](batch[0])[:3].mean()
        return found

    for loss, uneven in (({"judge": two, "maker": spread}, False), ({"judge": two, "maker": cut}, True)):
        objective = make_objective(passes_job(loss=loss), build())
        for closure in objective.closures.values():
            for size in (4, 5):
                closure([torch.randn(size, 3)])
        assert objective.lane_counts.uneven is uneven


# -- before a run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2", "data=2,zero=1"])
def test_only_copies_of_the_whole_model(layout: str) -> None:
    job, source = passes_job(), open_job(passes_job()).source
    parsed = ParallelLayout.parse(layout)
    plan = make_plan(lanes=4, workers=parsed.workers, layout=parsed)
    with pytest.raises(PlanError, match=r"several losses \(judge, maker\) does not go with layout"):
        check_passes(job, plan)
    assert "does not go with layout" in str(plan_refusal(job, source, plan))
    assert check_passes(job_for(dropout_net), plan) is None


def test_neither_servers_nor_recomputing_nor_a_row_of_blocks() -> None:
    job = passes_job()
    with pytest.raises(PlanError, match="does not go with --recompute"):
        check_passes(job, make_plan(lanes=4, workers=2, recompute=True))
    check_passes(job, make_plan(lanes=4, workers=2))
    with pytest.raises(PlanError, match="does not go with --servers 2: a server takes one gradient for a step"):
        check_server_job(job, 2)
    assert not goes_with_servers(job)
    with pytest.raises(JobError, match="has no row of blocks"):
        example_microbatch(job, build(), open_job(job).source)


def test_an_estimate_is_of_all_passes_and_a_plan_of_copies() -> None:
    job = passes_job()
    source = open_job(job).source
    work = workload_of(job, source)
    assert SEVERAL_PASSES in work.notes
    assert work.state_bytes > 4, "momentum, and Adam's two"

    def flops(job: shoal.Job) -> float:
        return sum(block.flops(backward=False) for block in workload_of(job, source).blocks)

    without_judge = passes_job(loss={"judge": tell_apart, "maker": spread})
    assert flops(job) > flops(without_judge), "every pass counts"
    space = job_space(job, source, work, even_cluster(hosts=2))
    assert (space.pipelines, space.tensors, space.zeros, space.servers) == ((1,), (1,), (0,), ())


def test_a_loss_that_draws_is_not_compared_with_a_plain_loop() -> None:
    job = passes_job(loss={"judge": tell_apart, "maker": drawing})
    with pytest.raises(InputError, match=r"--against plain: loss\['maker'\] draws random numbers"):
        against_plain(job, 1, 2, name="job")
