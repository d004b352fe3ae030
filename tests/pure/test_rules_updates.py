"""Rules of arithmetic, one by one: the optimizer, clipping, evaluation, what is on disk.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.steps import Augmented, Batch, Buffered, Thrice, generator_states, mlp_data, plain_loss
from shoal.errors import JobError
from shoal.numerics import grad_norm
from shoal.numerics.digest import tensor_digests

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 11: clipping -----------------------------------------------------------------------------------------------------

SHAPES = [(7, 5), (3, 1), (1, 1), (64, 300), (5, 70_000), (1, 70_001), (2000, 33), (17, 3, 3, 3), (1000, 1), (40,)]


def spread(*shape: int) -> Tensor:
    """Numbers of very different magnitude."""
    return torch.randn(*shape) * 10.0 ** torch.randint(-4, 4, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_11_a_row_s_sum_of_squares_is_the_same_in_any_piece(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = spread(*shape).to(dtype)
    rows = grad_norm.row_squares(gradient)
    assert rows.shape == shape[:1] and rows.dtype == torch.float64
    for start in range(0, shape[0], max(1, shape[0] // 12)):
        for stop in {start + 1, min(shape[0], start + 3), shape[0]}:
            piece = gradient[start:stop]
            assert torch.equal(grad_norm.row_squares(piece), rows[start:stop])
            assert torch.equal(grad_norm.row_squares(piece.clone()), rows[start:stop])


def test_11_the_norm_is_the_same_whoever_computed_which_rows() -> None:
    parameters = [spread(*shape) for shape in SHAPES]
    whole = grad_norm.global_norm(parameters)
    rows = torch.cat(
        [torch.cat([grad_norm.row_squares(piece) for piece in p.split(max(1, len(p) // 3))]) for p in parameters]
    )
    assert float(rows.sum().sqrt()) == whole
    in_single = sum(float(parameter.square().sum()) for parameter in parameters) ** 0.5
    assert in_single != whole


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_11_clipping_is_torch_s_to_rounding(max_norm: float) -> None:
    mine = [torch.randn(30, 20), torch.randn(20), torch.randn(4, 3, 3, 3)]
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(theirs, mine, strict=True):
        parameter.grad = gradient.clone()
    wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert grad_norm.clip_to_norm(mine, max_norm) == pytest.approx(float(wanted), rel=1e-6)
    for parameter, gradient in zip(theirs, mine, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_11_sums_are_in_fp64() -> None:
    gradient = spread(6, 5000)
    exactly = [math.fsum(float(value) ** 2 for value in row) for row in gradient]
    assert grad_norm.row_squares(gradient).tolist() == pytest.approx(exactly, rel=1e-13)


def test_11_a_tied_weight_counts_once() -> None:
    model = Thrice()
    once = dict(model.named_parameters())
    run = joined(model, (torch.randn(8, 8), torch.randint(8, (8,))))
    for _ in run.epochs(1):
        for batch in run.batches():
            run.backward(batch, lambda part: plain_loss(model, part))
            values = [p.grad.flatten().tolist() for p in once.values() if p.grad is not None]
            squares = math.fsum(value**2 for each in values for value in each)
            assert len(values) == len(once)
            assert run.clip(1e9) == pytest.approx(math.sqrt(squares), rel=1e-13)


def joined(model: nn.Module, data: Batch, batch: int = 8, **more: Any) -> shoal.Run:
    """A loop of its own, alone in this process."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=batch)
    return shoal.join(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **more)


# -- 18: evaluation, and what is decided on merged values -------------------------------------------------------------


def test_18_evaluation_touches_no_generator_buffer_or_mode() -> None:
    model = nn.Sequential(Buffered(), nn.Dropout(0.5))
    model[1].eval()
    run = joined(model, mlp_data(8))
    before = generator_states(), tensor_digests(model.named_buffers()), [module.training for module in model.modules()]

    def closure(batch: Batch) -> Tensor:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3), random.random(), numpy.random.rand()
        return plain_loss(model, batch)

    first = run.evaluate(mlp_data(11), closure)
    assert (generator_states(), tensor_digests(model.named_buffers()), [m.training for m in model.modules()]) == before
    assert run.evaluate(Augmented(mlp_data(11)), closure) != first
    assert generator_states() == before[0]
    assert run.evaluate(mlp_data(11), closure) == first
    assert torch.is_grad_enabled()
    finish(run, model)


def finish(run: shoal.Run, model: nn.Module) -> None:
    for _ in run.epochs(1):
        for batch in run.batches():
            run.backward(batch, lambda part: plain_loss(model, part))


def test_18_a_mode_comes_back_after_an_error_too() -> None:
    model = Buffered()
    run = joined(model, mlp_data(8))
    with pytest.raises(ZeroDivisionError):
        run.evaluate(mlp_data(8), lambda batch: 1 / 0)
    for names, text in ((["top\n5"], r"names a metric 'top\\n5'"), ([f"m {i}" for i in range(900)], "900 metrics are")):
        with pytest.raises(JobError, match=text):  # names that could not travel between workers
            run.evaluate(mlp_data(8), lambda batch, names=names: dict.fromkeys(names, 1.0))
    assert all(module.training for module in model.modules())
    finish(run, model)
