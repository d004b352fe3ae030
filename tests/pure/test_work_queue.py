"""The queue of a group's collectives: what is begun beside what, who runs it, and in which order it ends."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from shoal.collectives import work_queue
from shoal.collectives.work_queue import CollectiveWork, WorkQueue


class Line:
    """A queue, and what happened in it. A started collective goes on when `let_on` names it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.happened: list[str] = []
        self.allowed: set[str] = set()
        self.errors: list[str] = []
        self.queue = WorkQueue("a test's queue", self._limit, lambda error: self.errors.append(str(error)), self._wake)

    def _limit(self, limit: timedelta | None) -> None:
        return

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def note(self, text: str) -> None:
        with self.changed:
            self.happened.append(text)
            self.changed.notify_all()

    def let_on(self, *names: str) -> None:
        with self.changed:
            self.allowed.update(names)
            self.changed.notify_all()

    def seen(self, *texts: str) -> None:
        """Waits until just this has happened."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.happened == list(texts), 10), self.happened

    def issue(
        self, name: str, *, asynchronous: bool = True, attended: bool = False, lazy: bool = False
    ) -> CollectiveWork:
        def begin() -> "Started":
            self.note(f"begin {name}")
            return Started(self, name)

        return self.queue.run(begin, name, asynchronous, leaves=True, attended=attended, lazy=lazy)

    def issue_whole(self, name: str) -> CollectiveWork:
        return self.queue.run(lambda: self.note(f"run {name}"), name, asynchronous=True)


class Started:
    def __init__(self, line: Line, name: str) -> None:
        self.line, self.name = line, name

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        with self.line.changed:
            assert self.line.changed.wait_for(lambda: self.name in self.line.allowed or interrupted(), 10)
            if self.name not in self.line.allowed:
                return False
        if self.name == "bad":
            raise ValueError("a bad one")
        self.line.note(f"end {self.name}")
        return True


@pytest.fixture
def line() -> Iterator[Line]:
    found = Line()
    yield found
    found.let_on("a", "b", "c", "bad")
    found.queue.close()


def test_one_is_begun_while_others_are_under_way_and_they_end_in_their_order(line: Line) -> None:
    works = [line.issue(name) for name in "abc"]
    line.seen("begin a", "begin b", "begin c")
    line.let_on("c", "b")
    line.seen("begin a", "begin b", "begin c")
    assert not any(work.is_completed() for work in works)
    line.let_on("a")
    assert all(work.wait() for work in works)
    line.seen("begin a", "begin b", "begin c", "end a", "end b", "end c")


def test_no_more_are_begun_than_the_limit(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "MOST_BEGUN", 2)
    works = [line.issue(name) for name in "abc"]
    line.seen("begin a", "begin b")
    line.let_on("a")
    line.seen("begin a", "begin b", "end a", "begin c")
    line.let_on("b", "c")
    assert works[2].wait()


def test_a_whole_one_waits_for_those_before_it_and_those_behind_wait_for_it(line: Line) -> None:
    line.issue("a")
    line.issue_whole("w")
    last = line.issue("b")
    line.seen("begin a")
    line.let_on("a", "b")
    assert last.wait()
    line.seen("begin a", "end a", "run w", "begin b", "end b")


def test_a_blocking_call_is_begun_beside_what_is_under_way(line: Line) -> None:
    line.issue("a")
    line.seen("begin a")
    caller = threading.Thread(target=lambda: line.issue("b", asynchronous=False))
    caller.start()
    line.seen("begin a", "begin b")
    line.let_on("a", "b")
    caller.join(10)
    line.seen("begin a", "begin b", "end a", "end b")


def test_an_attended_one_is_begun_by_the_caller_and_needs_no_other_thread(line: Line) -> None:
    before = threading.active_count()
    first, second = line.issue("a", attended=True), line.issue("b", attended=True)
    line.seen("begin a", "begin b")
    assert threading.active_count() == before
    line.let_on("a", "b")
    assert second.wait() and first.is_completed() and threading.active_count() == before


def test_the_error_of_one_is_its_own_and_is_reported(line: Line) -> None:
    line.let_on("a", "bad", "b")
    works = [line.issue(name, attended=True) for name in ("a", "bad", "b")]
    assert works[0].wait() and works[2].wait()
    with pytest.raises(ValueError, match="a bad one"):
        works[1].wait()
    assert line.errors == ["a bad one"] and works[1].is_completed() and not works[1].is_success()


def test_a_lazy_one_is_begun_by_the_caller_and_goes_on_when_somebody_waits(line: Line) -> None:
    before = threading.active_count()
    work = line.issue("a", lazy=True)
    line.seen("begin a")
    line.let_on("a")
    assert work.wait() and work.is_completed() and threading.active_count() == before


@pytest.mark.parametrize("ask", [CollectiveWork.is_completed, CollectiveWork.get_future])
def test_a_lazy_one_that_somebody_asks_for_is_done_without_a_wait(
    line: Line, ask: Callable[[CollectiveWork], object]
) -> None:
    work = line.issue("a", lazy=True)
    ask(work)
    line.let_on("a")
    line.seen("begin a", "end a")


def test_a_lazy_one_that_nobody_asks_for_goes_on_with_the_next_hurry(line: Line) -> None:
    line.issue("a", lazy=True)
    line.seen("begin a")
    line.let_on("a")
    line.queue.hurry()
    line.seen("begin a", "end a")
    before = threading.active_count()
    line.queue.hurry()  # nothing is left
    assert threading.active_count() == before


def test_a_lazy_one_that_is_done_when_it_has_begun_ends_there(line: Line) -> None:
    line.let_on("a")
    work = line.issue("a", lazy=True)
    line.seen("begin a", "end a")
    assert work.done and not line.queue._begun


def test_behind_a_lazy_one_others_go_on(line: Line) -> None:
    line.issue("a", lazy=True)
    line.issue("b")
    line.let_on("a", "b")
    line.seen("begin a", "begin b", "end a", "end b")
