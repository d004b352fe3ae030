"""Memory of a worker: what needs no process."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from shoal.errors import InputError, MemoryNeeded
from shoal.report.human import parse_size
from shoal.worker.memory import MemoryEstimate, estimate_memory, is_out_of_memory, return_freed_memory, state_factor

pytestmark = pytest.mark.clean_heap
MB = 10**6


def test_without_glibc_nothing_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    return_freed_memory()


def test_other_errors_are_not_about_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shape"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("250MB", 250 * MB), ("250 mb", 250 * MB), ("1.5GB", 1500 * MB), ("512MiB", 512 << 20), ("64k", 64_000),
        (".5G", 500 * MB), ("123", 123), ("2TB", 2 * 10**12), ("4096 bytes", 4096),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "0", "0.1", "much", "3 MBs", "1e9", "inf", "nan", "1,5GB", "5PB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no amount of memory") as caught:
        parse_size(text)
    assert "250MB" in str(caught.value)


def test_what_training_needs() -> None:
    alone = estimate_memory(28 * MB, state=2, reduced=False)
    assert (alone.weights, alone.gradients, alone.optimizer, alone.total) == (28 * MB, 28 * MB, 56 * MB, 112 * MB)
    several = estimate_memory(28 * MB, state=0.5, lanes=4, trained=20 * MB, stored=10 * MB, buffers=3)
    assert several == MemoryEstimate(weights=28 * MB, gradients=80 * MB, optimizer=5 * MB, buffers=3)
    assert [line.split()[0] for line in several.lines()] == ["weights", "gradients", "optimizer", "buffers", "together"]


@pytest.mark.parametrize("lanes", range(1, 40))
def test_gradients_at_once_are_those_of_adding_up_a_tree(lanes: int) -> None:
    from shoal.numerics.lanes import split_point

    def at_once(span: tuple[int, int]) -> int:
        if span[1] - span[0] == 1:
            return 1
        middle = split_point(span)
        return max(at_once((span[0], middle)), 1 + at_once((middle, span[1])))

    assert estimate_memory(1, state=0, lanes=lanes, reduced=False).gradients == at_once((0, lanes))


def test_too_little_is_refused_with_both_sides_and_a_way_out() -> None:
    found = estimate_memory(28 * MB, state=2, reduced=False)
    found.check(112 * MB, by="--memory 112MB", fix="")
    with pytest.raises(MemoryNeeded) as caught:
        found.check(80 * MB, by="--memory 80MB", fix="--layout pipeline=2")
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "one worker needs 112 MB (weights 28 MB, gradients 28 MB, optimizer 56 MB) and has 80 MB (--memory 80MB)\n"
        "  fix: --layout pipeline=2"
    )


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (lambda weights: torch.optim.SGD(weights, lr=0.1), 0.0),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 1.0),
        (lambda weights: torch.optim.AdamW(weights, lr=0.1), 2.0),
        (lambda weights: torch.optim.Adam(weights, lr=0.1, amsgrad=True), 3.0),
        (lambda weights: torch.optim.LBFGS([weight for _, weight in weights]), 0.0),
    ],
)
def test_optimizer_state_is_found_by_a_step(optimizer: Callable[..., torch.optim.Optimizer], factor: float) -> None:
    assert state_factor(optimizer) == factor


def test_weights_can_have_the_names_that_a_job_sorts_by() -> None:
    def optimizer(weights: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        groups = {flag: [weight for name, weight in weights if name.endswith("bias") == flag] for flag in (False, True)}
        return torch.optim.SGD([{"params": groups[False], "momentum": 0.9}, {"params": groups[True]}], lr=0.1)

    assert state_factor(optimizer, {"a.weight": 2, "a.bias": 2}) == 0.5
