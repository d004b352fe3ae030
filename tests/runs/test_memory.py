"""Memory of a worker: what is measured, what the kernel allows, what training needs."""

import mmap
import os
import threading
from collections.abc import Callable

import pytest
import torch

from helpers.command import in_child
from shoal.numerics import kernels
from shoal.worker.memory import MemoryMeter, cap_memory, is_out_of_memory, return_freed_memory

pytestmark = pytest.mark.clean_heap
MB = 10**6


def hold(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4)


def about(num_bytes: int) -> object:
    return pytest.approx(num_bytes, rel=0.1)


@pytest.mark.parametrize("allocator", [kernels.keep_large_allocations, return_freed_memory])
def test_a_peak_is_seen_when_it_is_over(allocator: Callable[[], None]) -> None:
    inherited = hold(100 * MB)

    def play() -> None:
        allocator()
        meter = MemoryMeter()
        assert meter.peak_bytes() < 2 * MB
        hold(50 * MB)
        assert meter.peak_bytes() == about(50 * MB)
        hold(20 * MB)
        inherited.sum()
        assert meter.peak_bytes() == about(50 * MB)

    in_child(play)


def test_what_is_freed_makes_room_for_what_comes() -> None:
    """Sizes that do not fit into each other's holes."""

    def play() -> None:
        kernels.keep_large_allocations()
        return_freed_memory()
        meter = MemoryMeter()
        for size in range(10, 30):
            pair = [hold(size * MB), hold((40 - size) * MB)]
            meter.sample()
            del pair
        assert meter.peak_bytes() == about(40 * MB)

    in_child(play)


def test_pages_of_files_are_not_the_workers_own(tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "data")
    with open(path, "wb") as file:
        file.write(bytes(40 * MB))

    def play() -> None:
        meter = MemoryMeter()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            assert meter.peak_bytes() < 5 * MB

    in_child(play)


def test_shared_memory_is_counted_and_can_be_told_apart() -> None:
    def play() -> None:
        meter = MemoryMeter()
        with mmap.mmap(-1, 30 * MB) as shared:
            shared[:] = bytes(30 * MB)
            assert meter.shared_bytes() == about(30 * MB)
        assert meter.peak_bytes() == about(30 * MB)
        assert meter.shared_bytes() == 0

    in_child(play)


def test_a_cap_is_kept_by_the_kernel() -> None:
    def play() -> None:
        kernels.keep_large_allocations()
        cap_memory(60 * MB)
        for _ in range(20):
            first, second = hold(25 * MB), hold(25 * MB)
            del first, second
        held = [hold(50 * MB)]
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            held.append(hold(50 * MB))
        assert is_out_of_memory(caught.value)
        with pytest.raises(MemoryError) as python:
            bytearray(50 * MB)
        assert is_out_of_memory(python.value)
        held.clear()
        hold(50 * MB)

    in_child(play)


def test_threads_that_start_under_a_cap_have_room_for_their_stacks() -> None:
    def play() -> None:
        cap_memory(20 * MB)
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

        cap_memory(30 * MB)
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
        cap_memory(300 * MB)
        with pytest.raises(RuntimeError):
            hold(100 * MB)

    in_child(play)
