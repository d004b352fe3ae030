"""Several backward passes for one batch: whose gradients they are, what they draw, and when they count."""

import pytest
import torch
from torch import Tensor, nn

from helpers.steps import strategy_for
from shoal.errors import JobError
from shoal.job.dataset import open_data
from shoal.numerics.seeds import pass_seed
from shoal.parallel.data_parallel import DataParallel
from shoal.parallel.step import BackwardPass, Closure, StepInput
from shoal.recovery.membership.protocol import MemberPosition, MembershipView, MemberState, WorkerId, plan_recovery
from shoal.worker.join import as_named, as_one_model
from shoal.worker.loop_optimizers import LoopOptimizers, SchedulerGroup

A, B, C = WorkerId(0), WorkerId(1), WorkerId(2)


def two_models() -> nn.ModuleDict:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return nn.ModuleDict({"maker": maker, "judge": nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))})


def passes_of(models: nn.ModuleDict) -> tuple[BackwardPass, BackwardPass]:
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
    named = LoopOptimizers(optimizers, dict(models.named_parameters()))
    return named.backward_pass(0, optimizers["judge"], False), named.backward_pass(1, "maker", False)


def take_pass(strategy: DataParallel, which: BackwardPass, closure: Closure) -> None:
    source = open_data((torch.randn(8, 3, generator=torch.Generator().manual_seed(1)),), seed=0, shuffle=False)
    work = StepInput(
        step=3, indices=range(8), batch_size=8, fetch=lambda some: source.fetch(some, 0), backward_pass=which
    )
    reduced = strategy.reduce(strategy.compute(work, closure))
    strategy.commit(reduced)
    strategy.write_gradients(reduced)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def test_a_pass_leaves_the_gradients_of_other_optimizers_alone() -> None:
    models = two_models()
    maker, judge = models["maker"], models["judge"].eval()  # without dropout: to be compared with plain torch
    first, second = passes_of(models)
    noise = torch.randn(2, 2)

    def closure(batch: tuple[Tensor]) -> Tensor:
        return judge(maker(noise)).mean() + judge(batch[0]).square().mean()

    strategy = strategy_for(models, 4)
    take_pass(strategy, first, closure)
    assert all(each is None for each in grads(maker)), "the first pass is the judge's alone"
    of_judge = grads(judge)
    assert all(each is not None for each in of_judge)
    statistics = maker[1].running_mean.clone()
    take_pass(strategy, second, lambda batch: -judge(maker(noise)).mean())
    assert all(torch.equal(a, b) for a, b in zip(of_judge, grads(judge), strict=True))  # type: ignore[arg-type]
    assert all(each is not None for each in grads(maker))
    assert not torch.equal(statistics, maker[1].running_mean), "buffers change with each pass"
    assert all(each.requires_grad for each in models.parameters()), "what was frozen meanwhile is free again"

    plain = two_models()
    plain["judge"].eval()
    for _ in range(4):
        (-plain["judge"](plain["maker"](noise)).mean() / 4).backward()
    for found, expected in zip(grads(maker), grads(plain["maker"]), strict=True):
        assert found is not None and expected is not None
        torch.testing.assert_close(found, expected)


def test_a_pass_that_is_dropped_leaves_the_one_before() -> None:
    models = two_models()
    first, second = passes_of(models)
    strategy = strategy_for(models, 2)
    take_pass(strategy, first, lambda batch: models["judge"](batch[0]).mean())
    kept, statistics = grads(models["judge"]), models["maker"][1].running_mean.clone()  # type: ignore[index]
    strategy.compute(
        StepInput(step=3, indices=range(8), batch_size=8, fetch=lambda some: (), backward_pass=second),
        lambda batch: models["judge"](models["maker"](torch.randn(4, 2))).mean(),
    )
    strategy.drop()
    assert all(torch.equal(a, b) for a, b in zip(kept, grads(models["judge"]), strict=True))  # type: ignore[arg-type]
    assert torch.equal(statistics, models["maker"][1].running_mean)  # type: ignore[index]


def test_further_passes_draw_other_numbers_unless_asked() -> None:
    drawn: dict[int, list[Tensor]] = {}

    def draw(number: int, draws_as: int) -> Tensor:
        models = two_models()
        drawn[number] = []

        def closure(batch: tuple[Tensor]) -> Tensor:
            drawn[number].append(torch.randn(3))
            return models["judge"](batch[0]).sum()

        which = BackwardPass(number=number, optimizer="judge", parameters=None, draws_as=draws_as)
        take_pass(strategy_for(models, 2), which, closure)
        return torch.stack(drawn[number])

    first = draw(0, 0)
    assert not torch.equal(draw(1, 1), first)
    assert not torch.equal(draw(2, 2), draw(1, 1))
    assert torch.equal(draw(1, 0), first)
    assert pass_seed(7, 0) == 7, "the first pass has the streams of a run with one optimizer"


def test_which_optimizer() -> None:
    models = two_models()
    one = torch.optim.SGD(models["judge"].parameters(), lr=0.1)
    other = torch.optim.SGD(models["maker"].parameters(), lr=0.1)
    named = LoopOptimizers({"j": one}, dict(models.named_parameters()))
    assert named.backward_pass(0, one, False).parameters == {
        name for name, _ in models.named_parameters() if name.startswith("judge.")
    }
    assert named.backward_pass(0, None, False).parameters is None
    assert named.backward_pass(2, "j", True).draws_as == 0
    with pytest.raises(JobError, match="the run has no optimizer this SGD; it has 'j'"):
        named.backward_pass(0, other, False)
    with pytest.raises(JobError, match="optimizer 'x' has a parameter of shape \\(4, 2\\) that is in none"):
        LoopOptimizers({"x": other}, dict(models["judge"].named_parameters())).check_parameters()
    with pytest.raises(JobError, match="cannot be named so"):
        as_one_model({"a.b": models["judge"]})
    with pytest.raises(JobError, match="an optimizer, or several by name"):
        as_named({})


def test_a_loss_that_the_optimizer_cannot_change_is_refused() -> None:
    models = two_models()
    first, _ = passes_of(models)
    with pytest.raises(JobError, match="does not depend on any parameter of optimizer 'judge'"):
        take_pass(strategy_for(models, 2), first, lambda batch: models["maker"](torch.randn(4, 2)).mean())


def test_several_schedulers_are_saved_as_one() -> None:
    def made() -> tuple[SchedulerGroup, torch.optim.lr_scheduler.StepLR]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return SchedulerGroup({"b": scheduler}), scheduler

    group, scheduler = made()
    scheduler.optimizer.step()
    scheduler.step()
    restored, other = made()
    restored.load_state_dict(group.state_dict())
    assert other.last_epoch == 1


# -- when a pass counts -----------------------------------------------------------------------------------------------


def plan(*positions: MemberPosition, step: int = 0) -> object:
    view = MembershipView(generation=2, members=tuple(each.worker_id for each in positions), step=step)
    found = plan_recovery(view, {each.worker_id: each for each in positions})
    return (found.step, found.passes), found.donor, found.behind, found.finishing


def test_a_further_pass_in_doubt_is_finished_where_another_has_committed_it() -> None:
    ahead = MemberPosition(worker_id=A, committed=4, passes=1, can_donate=False)
    doubts = MemberPosition(worker_id=B, committed=4, in_doubt=True, further=True, can_donate=False)
    assert plan(ahead, doubts) == ((4, 1), None, (), (B,))
    # Nobody has committed it: all compute it again.
    assert plan(doubts) == ((4, 0), None, (), ())
    # One waits for the first pass of step 4, which another has committed; a third is within its second.
    within = MemberPosition(worker_id=A, committed=4, can_donate=False)
    waits = MemberPosition(worker_id=B, committed=3, passes=2, in_doubt=True)
    assert plan(within, waits, step=3) == ((4, 0), None, (), (B,))
    # Between two steps, after three passes: a newcomer gets the state.
    settled = MemberPosition(worker_id=A, committed=4, passes=2)
    newcomer = MemberPosition(worker_id=C, committed=-1)
    assert plan(settled, newcomer) == ((4, 2), A, (C,), ())


def test_a_member_counts_steps_and_their_further_passes() -> None:
    member = MemberState(worker_id=A, committed=4, group_broken=False)
    member.vote()
    assert member.position().voted_for == (5, 0)
    member.commit()
    member.vote(further=True)
    assert member.position().voted_for == (5, 1)
    member.drop()
    member.vote(further=True)
    member.commit()
    assert member.position().reached == (5, 1)
    member.vote()
    member.commit()
    assert member.position().reached == (6, 0)
