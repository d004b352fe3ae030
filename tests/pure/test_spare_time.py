"""Whether other threads of the process leave a core, by clocks that a test sets."""

import threading

import pytest

from shoal.collectives import spare_time
from shoal.collectives.spare_time import WINDOW_SECONDS, SpareTime


class Clocks:
    """Seconds that have passed, and processor seconds of this thread and of the others."""

    def __init__(self) -> None:
        self.passed = self.own = self.others = 0.0

    def spend(self, passed: float, *, own: float = 0.0, others: float = 0.0) -> None:
        self.passed, self.own, self.others = self.passed + passed, self.own + own, self.others + others


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(spare_time.time, "monotonic", lambda: found.passed)
    monkeypatch.setattr(spare_time.time, "process_time", lambda: found.own + found.others)
    monkeypatch.setattr(spare_time.time, "thread_time", lambda: found.own)
    return found


def test_others_that_share_a_core_leave_no_time_and_others_that_wait_or_have_their_own_do(clocks: Clocks) -> None:
    spare = SpareTime()
    clocks.spend(0.010, own=0.001, others=0.005)
    assert not spare.look()  # half of a core: it shares one with another process
    clocks.spend(0.010, own=0.010)
    assert spare.look()  # what this thread does itself does not count
    clocks.spend(0.010, own=0.004, others=0.006)
    assert not spare.look()  # this thread takes what the others need
    clocks.spend(0.010, others=0.009)
    assert spare.look()
    clocks.spend(0.010, others=0.040)
    assert spare.look()  # four threads that compute


def test_a_look_right_after_another_finds_the_same(clocks: Clocks) -> None:
    spare = SpareTime()
    clocks.spend(0.010)
    assert spare.look()
    clocks.spend(WINDOW_SECONDS / 2, others=WINDOW_SECONDS / 4)
    assert spare.look()
    clocks.spend(WINDOW_SECONDS, others=WINDOW_SECONDS / 2)
    assert not spare.look()


def test_before_it_knows_anything_there_is_no_time(clocks: Clocks) -> None:
    assert not SpareTime().look()


def test_each_thread_asks_about_its_own_others(clocks: Clocks) -> None:
    spare = SpareTime()
    clocks.spend(0.010)
    assert spare.look()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(spare.look()))
    thread.start()
    thread.join(10)
    assert found == [False]  # it has not looked before


def test_real_clocks() -> None:
    """The clocks are there and agree: a thread cannot use more than the process."""
    assert SpareTime._used_by_others() >= 0
