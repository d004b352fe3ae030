"""What a job may say of precision, accumulation, frozen parameters and its optimizer: decisions, without a process."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.driver.check_plan import check_server_job, goes_with_servers
from shoal.driver.job_space import job_space
from shoal.errors import JobError, PlanError
from shoal.job.accumulate import parse_accumulation
from shoal.job.freeze import active_patterns, check_names, is_frozen, matches
from shoal.job.loss_scale import LossScale, LossScaler
from shoal.job.optimizer_call import takes_model
from shoal.numerics.grad_norm import all_finite
from shoal.numerics.sampling import SampleSchedule
from shoal.parallel.blocks import find_blocks
from shoal.parallel.replica import ModelReplica
from shoal.planner.cluster import even_cluster
from shoal.planner.trace_job import workload_of
from shoal.testing import dropout_net, job_for, tied_language_model
from shoal.worker.frozen_parameters import FrozenParameters
from shoal.worker.job_optimizer import build_optimizer

# -- the loss scale ---------------------------------------------------------------------------------------------------


def torchs_scale_after(overflows: list[bool], settings: LossScale) -> float:
    """What torch's own scaler has after gradients that were finite, or were not."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=settings.init_scale,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
    )
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflowed in overflows:
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([float("inf") if overflowed else 1.0])
        scaler.step(optimizer)
        scaler.update()
    return float(scaler.get_scale())


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_is_the_one_of_torchs_scaler(seed: int) -> None:
    chance = random.Random(seed)
    overflows = [chance.random() < 0.2 for _ in range(60)]
    settings = LossScale(init_scale=2.0**10, growth_interval=3)
    scaler = LossScaler(settings)
    for overflowed in overflows:
        scaler.update(overflowed)
    assert scaler.scale == torchs_scale_after(overflows, settings)
    assert scaler.skipped == sum(overflows)


def test_a_scaler_goes_on_from_its_state() -> None:
    first = LossScaler(LossScale(growth_interval=3))
    for overflowed in (True, False, False):
        first.update(overflowed)
    second = LossScaler(LossScale(growth_interval=3))
    second.load_state_dict(first.state_dict())
    assert second.update(False) and first.update(False)  # the third good one in a row
    assert (second.scale, second.skipped) == (first.scale, first.skipped) == (2.0**16, 1)


def test_a_number_is_a_scale_that_stays() -> None:
    scaler = LossScaler(LossScale.parse(1024) or LossScale())
    assert not scaler.update(True) and not scaler.update(False)
    assert (scaler.scale, scaler.skipped, scaler.exhausted) == (1024.0, 1, False)


def test_a_scale_that_fell_below_every_use_is_exhausted() -> None:
    scaler = LossScaler(LossScale(init_scale=1.0))
    while not scaler.exhausted:
        scaler.update(True)
    assert scaler.skipped == 15


def test_fp16_has_a_loss_scale_by_itself_and_other_jobs_have_the_arithmetic_they_had() -> None:
    plain = job_for(dropout_net)
    assert {"loss_scale", "freeze", "accumulate"} & plain.arithmetic().keys() == set()
    assert plain.changed(accumulate=1).arithmetic() == plain.arithmetic()
    half = plain.changed(precision="fp16")
    assert half.precision == "fp16-autocast" and half.loss_scaling == LossScale()
    assert half.arithmetic() == half.changed(loss_scale=LossScale()).arithmetic()
    assert half.arithmetic() != half.changed(loss_scale=1024).arithmetic()
    assert half.changed(precision="fp32").loss_scaling is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_scale": "large"}, "loss_scale='large' must be a number, which stays, or a shoal.LossScale"),
        ({"loss_scale": 0}, "init_scale=0.0 must be a number above 0"),
        ({"accumulate": 0}, "accumulate=0: 0 is not a number of batches from 1 up"),
        ({"accumulate": {-1: 2}}, "-1 is not a pass over the data from 0 up"),
        ({"freeze": ["encoder"]}, "must map names of parameters or modules to steps"),
        ({"freeze": {"encoder": 0}}, "'encoder' has 0, not a step from 1 up or None"),
    ],
)
def test_what_makes_no_sense_is_refused_with_both_sides(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        job_for(dropout_net, **fields)
    assert message in str(caught.value)


def test_servers_refuse_what_they_cannot_do_in_one_sentence() -> None:
    for fields, message in (
        ({"precision": "fp16"}, "a step whose scaled gradients overflow must be left out"),
        ({"accumulate": {0: 1, 1: 2}}, "servers count steps, as many in each pass"),
        ({"optimizer": lambda model, named: torch.optim.SGD(named)}, "a server has rows of parameters, and no modules"),
    ):
        with pytest.raises(PlanError, match=message):
            check_server_job(job_for(dropout_net, **fields), 1)  # type: ignore[arg-type]
        assert not goes_with_servers(job_for(dropout_net, **fields))  # type: ignore[arg-type]
    check_server_job(job_for(dropout_net, accumulate=2, freeze={"0": 3}), 1)


def test_a_plan_offers_no_servers_to_a_job_that_they_refuse() -> None:
    job, cluster = job_for(dropout_net), even_cluster(hosts=2)

    def servers(job: shoal.Job) -> tuple[int, ...]:
        source = job.open_data()
        return job_space(job, source, workload_of(job, source), cluster).servers

    assert servers(job)
    assert not servers(job.changed(precision="fp16")) and not servers(job.changed(ema=0.9))


def test_numbers_that_are_not_finite_are_found() -> None:
    good = [torch.ones(3), None, torch.zeros(0)]
    assert all_finite(good)
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite([*good, torch.tensor([0.0, bad])])


# -- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["short", "drop"])
@pytest.mark.parametrize("given", [None, 3, {0: 1, 1: 2, 3: 5}, {2: 4}, {0: 2, 1: 2}])
def test_a_schedule_says_of_each_step_what_counting_says(given: Any, last: str) -> None:
    """Walks through some passes batch by batch, and compares every answer."""
    schedule = SampleSchedule(samples=29, batch=4, last=last, accumulate=parse_accumulation(given))
    table = given if isinstance(given, dict) else {0: given or 1}
    factor, steps, samples = 1, 0, 0
    for epoch in range(6):
        factor = table.get(epoch, factor)
        batches = [range(at, min(at + 4, 29)) for at in range(0, 29 if last == "short" else 28, 4)]
        updates = [batches[at : at + factor] for at in range(0, len(batches), factor)]
        assert (schedule.first_step(epoch), schedule.steps_in(epoch)) == (steps, len(updates))
        assert schedule.ends_epoch(steps) and schedule.epochs_of(steps) == epoch
        for within, update in enumerate(updates):
            numbers = [number for batch in update for number in batch]
            assert schedule.position(steps) == (epoch, within)
            assert list(range(29))[schedule.slice_of(epoch, within)] == numbers
            assert schedule.samples_in_step(steps) == len(numbers)
            assert schedule.samples_before(steps) == samples
            steps, samples = steps + 1, samples + len(numbers)
            assert schedule.epochs_of(steps) == epoch + 1


# -- frozen parameters ------------------------------------------------------------------------------------------------


def test_a_pattern_names_parameters_or_modules() -> None:
    assert matches("encoder", "encoder.0.weight") and matches("encoder.*", "encoder.0.weight")
    assert matches("*.bias", "encoder.0.bias") and not matches("encoder", "encoder2.weight")
    freeze = {"encoder": 3, "embed": None}
    assert [active_patterns(freeze, step) for step in (0, 2, 3)] == [("encoder", "embed")] * 2 + [("embed",)]
    assert is_frozen(("embed",), ["head.weight", "embed.weight"])  # a tied one


def test_a_name_that_no_parameter_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError, match="no parameter of the model is called 'encodr'") as caught:
        check_names({"encodr": 3}, ["encoder.0.weight", "head.weight"])
    assert "encoder" in str(caught.value)


def replica_of(build: Callable[[], nn.Module]) -> ModelReplica:
    model = build()
    return ModelReplica(model, find_blocks(model, None), 0)


def test_a_job_that_freezes_everything_is_refused() -> None:
    with pytest.raises(JobError, match="freeze leaves no parameter to train at step 0"):
        FrozenParameters({"*": 3}, replica_of(dropout_net))


def test_parameters_are_freed_at_their_step_and_a_tied_one_by_any_name() -> None:
    replica = replica_of(tied_language_model)
    (tied,) = replica.tied_leaves
    alias = next(known for _, known in replica.leaves_by_name(tied, dict(replica.parameters)[tied]) if known != tied)
    frozen = FrozenParameters({alias: 2}, replica)
    changes = [frozen.apply(step) for step in (0, 1, 2, 3)]
    assert changes == [True, False, True, False]
    frozen.apply(1)
    assert not any(leaf.requires_grad for leaf in replica.tied_leaves[tied])
    assert replica.frozen_names == [tied]
    frozen.apply(2)
    assert all(leaf.requires_grad for leaf in replica.tied_leaves[tied]) and replica.frozen_names == []


def test_a_loop_freezes_and_frees_a_tied_weight_by_any_of_its_leaves() -> None:
    replica = replica_of(tied_language_model)
    (leaves,) = replica.tied_leaves.values()
    for changed, trained in ((0, False), (1, True), (-1, False)):
        leaves[changed].requires_grad_(trained)
        replica.follow_tied()
        assert {leaf.requires_grad for leaf in leaves} == {trained}


# -- the optimizer ----------------------------------------------------------------------------------------------------


def test_an_optimizer_says_by_its_parameters_what_it_takes() -> None:
    def with_default(named: Any, rate: float = 0.1) -> Any: ...

    assert takes_model(lambda model, named: None)
    assert not takes_model(lambda named: None) and not takes_model(with_default)
    assert not takes_model(torch.optim.AdamW) and not takes_model(partial(torch.optim.SGD, lr=0.1))


def test_the_model_that_an_optimizer_sees_has_the_parameters_that_it_gets() -> None:
    """Also where those are masters, or rows: then the model that computes has other tensors."""
    seen: list[nn.Module] = []

    def build(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.append(model)
        norms = {
            id(each) for module in model.modules() if isinstance(module, nn.LayerNorm) for each in module.parameters()
        }
        return torch.optim.SGD([parameter for _, parameter in named if id(parameter) in norms], lr=0.1)

    job = shoal.Job(
        model=dropout_net, data=torch.zeros(8, 4), loss=build, optimizer=build, batch=8, steps=1,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    build_optimizer(job, model, list(model.named_parameters()))
    assert seen[0] is model
    rows = [(name, nn.Parameter(each.detach()[:2].clone())) for name, each in model.named_parameters()]
    optimizer = build_optimizer(job, model, rows)
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for _, each in rows[2:]]
    assert model[1].weight.shape == (4,)
