"""Memory of a worker: what is measured, what the kernel allows, what training needs."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch

from helpers.command import in_child
from shoal.errors import InputError, MemoryNeeded
from shoal.numerics import kernels
from shoal.worker.memory import Meter, Need, cap, need, ran_out, read_size, return_freed, state_factor

pytestmark = pytest.mark.clean_heap
MB = 10**6


def hold(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4)


def about(num_bytes: int) -> object:
    return pytest.approx(num_bytes, rel=0.1)


@pytest.mark.parametrize("allocator", [kernels.keep_large_allocations, return_freed])
def test_a_peak_is_seen_when_it_is_over(allocator: Callable[[], None]) -> None:
    inherited = hold(100 * MB)

    def play() -> None:
        allocator()
        meter = Meter()
        assert meter.peak() < 2 * MB
        hold(50 * MB)
        assert meter.peak() == about(50 * MB)
        hold(20 * MB)
        inherited.sum()
        assert meter.peak() == about(50 * MB)

    in_child(play)


def test_what_is_freed_makes_room_for_what_comes() -> None:
    """Sizes that do not fit into each other's holes."""

    def play() -> None:
        kernels.keep_large_allocations()
        return_freed()
        meter = Meter()
        for size in range(10, 30):
            pair = [hold(size * MB), hold((40 - size) * MB)]
            meter.look()
            del pair
        assert meter.peak() == about(40 * MB)

    in_child(play)


def test_pages_of_files_are_not_the_workers_own(tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "data")
    with open(path, "wb") as file:
        file.write(bytes(40 * MB))

    def play() -> None:
        meter = Meter()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            assert meter.peak() < 5 * MB

    in_child(play)


def test_shared_memory_is_counted_and_can_be_told_apart() -> None:
    def play() -> None:
        meter = Meter()
        with mmap.mmap(-1, 30 * MB) as shared:
            shared[:] = bytes(30 * MB)
            assert meter.shared() == about(30 * MB)
        assert meter.peak() == about(30 * MB)
        assert meter.shared() == 0

    in_child(play)


def test_a_cap_is_kept_by_the_kernel() -> None:
    def play() -> None:
        kernels.keep_large_allocations()
        cap(60 * MB)
        for _ in range(20):
            first, second = hold(25 * MB), hold(25 * MB)
            del first, second
        held = [hold(50 * MB)]
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            held.append(hold(50 * MB))
        assert ran_out(caught.value)
        with pytest.raises(MemoryError) as python:
            bytearray(50 * MB)
        assert ran_out(python.value)
        held.clear()
        hold(50 * MB)

    in_child(play)


def test_threads_that_start_under_a_cap_have_room_for_their_stacks() -> None:
    def play() -> None:
        cap(20 * MB)
        held = [hold(19 * MB)]
        done = threading.Event()
        threads = [threading.Thread(target=done.wait) for _ in range(6)]
        for thread in threads:
            thread.start()
        done.set()
        for thread in threads:
            thread.join()
        assert held

    in_child(play)


def test_a_cap_of_the_user_is_never_raised() -> None:
    def play() -> None:
        import resource

        cap(30 * MB)
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
        cap(300 * MB)
        with pytest.raises(RuntimeError):
            hold(100 * MB)

    in_child(play)


def test_without_glibc_nothing_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    return_freed()


def test_other_errors_are_not_about_memory() -> None:
    assert not ran_out(RuntimeError("shape"))
    assert not ran_out(ValueError("can't allocate memory"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("250MB", 250 * MB), ("250 mb", 250 * MB), ("1.5GB", 1500 * MB), ("512MiB", 512 << 20), ("64k", 64_000),
        (".5G", 500 * MB), ("123", 123), ("2TB", 2 * 10**12), ("4096 bytes", 4096),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "0", "0.1", "much", "3 MBs", "1e9", "inf", "nan", "1,5GB", "5PB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no amount of memory") as caught:
        read_size(text)
    assert "250MB" in str(caught.value)


def test_what_training_needs() -> None:
    alone = need(28 * MB, state=2, merged=False)
    assert (alone.weights, alone.gradients, alone.optimizer, alone.total) == (28 * MB, 28 * MB, 56 * MB, 112 * MB)
    several = need(28 * MB, state=0.5, lanes=4, trained=20 * MB, stored=10 * MB, buffers=3)
    assert several == Need(weights=28 * MB, gradients=80 * MB, optimizer=5 * MB, buffers=3)
    assert [line.split()[0] for line in several.lines()] == ["weights", "gradients", "optimizer", "buffers", "together"]


@pytest.mark.parametrize("lanes", range(1, 40))
def test_gradients_at_once_are_those_of_adding_up_a_tree(lanes: int) -> None:
    from shoal.numerics.lanes import split

    def at_once(span: tuple[int, int]) -> int:
        if span[1] - span[0] == 1:
            return 1
        middle = split(span)
        return max(at_once((span[0], middle)), 1 + at_once((middle, span[1])))

    assert need(1, state=0, lanes=lanes, merged=False).gradients == at_once((0, lanes))


def test_too_little_is_refused_with_both_sides_and_a_way_out() -> None:
    found = need(28 * MB, state=2, merged=False)
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
