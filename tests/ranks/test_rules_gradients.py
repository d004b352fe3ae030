"""Rules of arithmetic, one by one: lanes and their tree, weights, what is empty, what is tied, by real processes.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

from collections.abc import Sequence

import pytest
from torch import Tensor

from helpers.steps import Sometimes, gradients, plain_loss, same, sometimes_data, strategy_for, take_step
from shoal.collectives.group import WorkerGroup
from shoal.testing import ranks

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 3: empty is absent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asking", [(), (0,), (1, 3), (2,)])
def test_3_absent_in_some_workers_is_absent_in_the_sum(asking: Sequence[int]) -> None:
    model = Sometimes()
    data = sometimes_data(asking)
    data[0][:, 1] = 0.0  # gradients of exactly zero, whose sign a filler could change

    def work(group: WorkerGroup) -> list[Tensor | None]:
        deal = [(0, 1), (1, 3), (3, 4)]
        take_step(strategy_for(model, 4, group=group, deal=deal), data, lambda batch: plain_loss(model, batch))
        return list(gradients(model).values())

    found = ranks(3, work)
    take_step(strategy_for(model, 4), data, lambda batch: plain_loss(model, batch))
    assert (model.sometimes.weight.grad is None) == (not asking)
    for values in found:
        assert same(dict(zip(gradients(model), values, strict=True)), gradients(model))
