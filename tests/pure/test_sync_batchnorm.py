"""Batch norm over the whole batch: lanes that meet on the way compute what one batch norm over all samples does."""

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.steps import strategy_for, take_step
from shoal.driver.check_plan import check_sync_batchnorm
from shoal.errors import JobError, PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import make_plan
from shoal.parallel.sync_batchnorm import SyncedBatchNorm, combine_moments, convert_sync_batchnorm, moments
from shoal.testing import batch_norm_net, job_for
from shoal.worker.training_notes import batch_norm_note


def picture_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3),
        nn.BatchNorm1d(3, track_running_stats=False),
    )  # fmt: skip


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def samples(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(count, 1, 8, 8, generator=draw, dtype=torch.float64)
    return (x * torch.arange(1, count + 1).view(-1, 1, 1, 1) + 3).to(dtype), torch.randn(count, 3, generator=draw).to(
        dtype
    )


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).norm() <= 1e-11 * right.norm())


def test_moments_of_parts_combine_to_those_of_the_whole() -> None:
    x = torch.randn(9, 4, 5, dtype=torch.float64) + 1000
    found = combine_moments(moments(x[:2]), combine_moments(moments(x[2:3]), moments(x[3:])))
    variance, mean = torch.var_mean(x, dim=(0, 2), correction=0)
    assert found[0] == 45
    assert torch.allclose(found[1:5], mean, rtol=1e-14)
    assert torch.allclose(found[5:] / 45, variance, rtol=1e-11)


@pytest.mark.parametrize("count", [16, 13, 5, 3])  # of 16: lanes that are short, or empty
def test_a_step_by_lanes_is_that_of_one_batch(count: int) -> None:
    torch.manual_seed(1)
    plain = picture_net().double()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    data = samples(count)
    squares(plain(data[0]), data[1]).backward()
    take_step(strategy_for(model, 4), data, lambda batch: squares(model(batch[0]), batch[1]), batch=16)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        scale = max(float(each.grad.norm()) for each in plain.parameters() if each.grad is not None)
        assert (ours.grad - theirs.grad).norm() <= 1e-11 * scale, name
    for (name, ours), (_, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert close(ours.double(), theirs.double()), name


def test_a_lane_by_itself_would_not_be() -> None:
    torch.manual_seed(1)
    plain = picture_net().double()
    by_lane = copy.deepcopy(plain)
    data = samples(16)
    squares(plain(data[0]), data[1]).backward()
    take_step(strategy_for(by_lane, 4), data, lambda batch: squares(by_lane(batch[0]), batch[1]))
    weights = plain.get_parameter("0.weight").grad, by_lane.get_parameter("0.weight").grad
    assert weights[0] is not None and weights[1] is not None
    assert (weights[0] - weights[1]).norm() > 1e-3 * weights[0].norm()


def test_each_lane_draws_from_its_own_stream() -> None:
    def masks(convert: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(1)
        first = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)]
        model = convert(nn.Sequential(*first, nn.BatchNorm1d(8), nn.Dropout(0.5)))
        seen: list[Tensor] = []

        def closure(batch: Any) -> Tensor:
            hidden = model(batch[0])
            seen.append(hidden == 0)
            return squares(hidden, batch[1])

        take_step(strategy_for(model, 4), (torch.randn(16, 4), torch.randn(16, 8)), closure)
        return seen

    together, apart = masks(convert_sync_batchnorm), masks(lambda model: model)
    assert len(together) == len(apart) == 4
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, apart, strict=True))


def test_lanes_that_do_not_meet_are_an_error_and_leave_no_thread() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x) if x.sum() > 0 else x)  # type: ignore[no-any-return]

    model = convert_sync_batchnorm(Sometimes())
    x = torch.ones(8, 4)
    x[2:4] = -1
    before = threading.active_count()
    expected = "lane 0 is at forward of norm and lane 1 is at its end"
    with pytest.raises(JobError, match=expected):
        take_step(strategy_for(model, 4), (x, torch.ones(8, 3)), lambda batch: squares(model(batch[0]), batch[1]))
    assert threading.active_count() == before


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_in_one_lane_ends_all(backward: bool) -> None:
    model = convert_sync_batchnorm(batch_norm_net())
    calls: list[int] = []

    def fail(*given: Any) -> None:
        raise KeyError("mine")

    def closure(batch: Any) -> Tensor:
        calls.append(len(calls))
        number, output = calls[-1], model(batch[0])
        if backward and number == 2:
            output.register_hook(fail)
        elif number == 2:
            fail()
        return output.square().mean()

    before = threading.active_count()
    with pytest.raises(KeyError, match="mine"):
        take_step(strategy_for(model, 4), samples(16, torch.float32), closure)
    assert threading.active_count() == before


def test_several_uses_and_inputs_without_gradient() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    model = convert_sync_batchnorm(copy.deepcopy(plain))
    data = (torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64))

    def twice(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            net(batch[1])
        return squares(net(net(batch[0])), batch[1])

    twice(plain, data).backward()
    take_step(strategy_for(model, 4), data, lambda batch: twice(model, batch))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert close(ours.grad, theirs.grad)
    assert int(model.get_buffer("0.num_batches_tracked")) == 3
    assert close(model.get_buffer("0.running_var"), plain.get_buffer("0.running_var"))


def test_it_computes_under_autocast() -> None:
    model = convert_sync_batchnorm(batch_norm_net())

    def closure(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return model(batch[0]).float().square().mean()  # type: ignore[no-any-return]

    result = take_step(strategy_for(model, 4), samples(16, torch.float32), closure)
    assert result.loss > 0 and all(each.grad is not None for each in model.parameters())


def test_conversion_keeps_parameters_buffers_and_names() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.SyncBatchNorm(4)))
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    assert all(each is parameters[name] for name, each in model.named_parameters())
    assert list(model.state_dict()) == keys
    names = [name for name, each in model.named_modules() if isinstance(each, SyncedBatchNorm)]
    assert names == ["1.0", "1.1"]
    assert isinstance(shoal.convert_sync_batchnorm(nn.BatchNorm1d(3)), SyncedBatchNorm)
    norm = nn.BatchNorm1d(3)
    first, second = shoal.convert_sync_batchnorm(nn.Sequential(norm, norm))  # type: ignore[arg-type]
    assert first is second


def test_outside_of_a_step_it_is_an_ordinary_batch_norm() -> None:
    plain, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    ours = convert_sync_batchnorm(copy.deepcopy(plain))
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert torch.equal(ours.get_buffer("running_mean"), plain.get_buffer("running_mean"))


@pytest.mark.parametrize("fields", [{"microbatches": 2}, {"compile": True}, {"accumulate": 2}])
def test_what_does_not_go_with_it_in_a_job(fields: dict[str, Any]) -> None:
    text = "=".join(map(str, next(iter(fields.items()))))
    with pytest.raises(JobError, match=re.escape(f"sync_batchnorm=True and {text} do not go together")):
        job_for(batch_norm_net, sync_batchnorm=True, **fields)


@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2", "data=2,zero=1", "data=2,zero=3"])
def test_layouts_in_which_lanes_cannot_meet(layout: str) -> None:
    job, parsed = job_for(batch_norm_net, sync_batchnorm=True), ParallelLayout.parse(layout)
    plan = make_plan(lanes=4, workers=2, layout=parsed)
    with pytest.raises(PlanError, match="batch norm over the whole batch"):
        check_sync_batchnorm(job, plan)
    check_sync_batchnorm(job.changed(sync_batchnorm=False), plan)
    with pytest.raises(PlanError):
        check_sync_batchnorm(job, make_plan(lanes=4, workers=2), servers=True)
    check_sync_batchnorm(job, make_plan(lanes=4, workers=2))


def test_it_is_part_of_the_arithmetic_only_where_it_is_asked_for() -> None:
    assert "sync_batchnorm" not in job_for(batch_norm_net).arithmetic()
    assert job_for(batch_norm_net, sync_batchnorm=True).arithmetic()["sync_batchnorm"] is True


def test_the_note_on_batch_norm() -> None:
    model = batch_norm_net()
    assert str(batch_norm_note(model, 64, 4, 1)).startswith("batch norm sees 16 of 64 samples: a lane")
    assert str(batch_norm_note(model, 64, 4, 2)).startswith("batch norm sees 8 of 64 samples: a microbatch of a lane")
    assert batch_norm_note(model, 64, 1, 1) is None
    assert batch_norm_note(nn.Linear(2, 2), 64, 4, 1) is None
    assert batch_norm_note(convert_sync_batchnorm(model), 64, 4, 1) is None
    assert batch_norm_note(batch_norm_net().eval(), 64, 4, 1) is None
