"""Declared faults: what happens to which worker, and where in its work. Nothing here is slept for.

    faults.at(MET, kill, step=5, worker=1)      worker 1 dies in step 5, right after it heard that all have it
    faults.at(ASKS, until(Who(1, 1)), step=6)   step 6 waits for the process that replaces it, and is its last without
    report = faults.train(job, workers=3)

Workers are forked from a server that is forked from the test, so they inherit what the test patched. Each fault happens
once in the run, to whoever is first in its place.
"""

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers.command import Forked, events
from shoal.collectives.shared_buffers import SharedBuffers
from shoal.driver.launch import train_with
from shoal.driver.make_plan import open_job
from shoal.driver.result import Report
from shoal.errors import PeerLost
from shoal.job.job import Job
from shoal.parallel.lane_strategy import LaneStrategy
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.local_step import LocalStep
from shoal.parallel.optimizer_view import OptimizerView
from shoal.parallel.overlapped_reduce import OverlappedExchange
from shoal.parallel.pipeline import PipelineLocalStep
from shoal.parallel.synced_step import SyncedLocalStep
from shoal.recovery.membership.process import process_state
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.recovery.sample_audit import SampleAudit
from shoal.report.event_queries import audit_samples
from shoal.report.run_folder import RunFolder
from shoal.worker import form_groups, recover, run_state, training_state
from shoal.worker.checkpointer import Checkpointer
from shoal.worker.elastic_membership import ElasticMembership
from shoal.worker.recover import RunRecovery
from shoal.worker.rendezvous import GroupRendezvous
from shoal.worker.run import Run
from shoal.worker.run_config import RunConfig

PATIENCE_SECONDS = 45.0  # for what a fault waits for; then the run fails, and the test with it


@dataclass(frozen=True)
class Place:
    """A moment in a worker's life: before or after a call."""

    owner: Any
    name: str
    after: bool = False


ASKS = Place(Run, "_requests")  # a step begins: what it asks of all is about to be read
LANE = Place(LocalStep, "run_lane")
LEFT = Place(OverlappedExchange, "leave", after=True)  # a bucket is on the way, and the backward pass goes on
MEETS = Place(LaneStrategy, "commit")  # it has what all have computed, and has told nobody
ADDED_UP = Place(
    SharedBuffers, "reduce_own_share", after=True
)  # its share of the sums is written to all; it has not said so
MET = Place(LaneStrategy, "commit", after=True)  # it knows that all have the gradient: the step is committed
MERGED = Place(Run, "backward", after=True)  # the gradient is in .grad, and the optimizer has yet to step
EVALUATES = Place(training_state, "evaluate")
EVALUATED = Place(training_state, "evaluate", after=True)
AGREES = Place(run_state, "agree_on_weights")
SAVED = Place(Checkpointer, "save", after=True)
RECOVERS = Place(ElasticMembership, "recover")
CHANGES = Place(ElasticMembership, "change_members")
CHANGED = Place(ElasticMembership, "change_members", after=True)
FORMS = Place(GroupRendezvous, "_make_group")
FORMED = Place(GroupRendezvous, "_make_group", after=True)
GIVES = Place(recover, "send_state")
GAVE = Place(recover, "send_state", after=True)
ACCEPTS = Place(recover, "receive_state")
ACCEPTED = Place(recover, "receive_state", after=True)
FINISHES = Place(Run, "finish")
STANDS_DOWN = Place(ElasticMembership, "stop_watching")  # everybody has heard that the result is written
NORM = Place(SyncedLocalStep, "_exchange")  # all its lanes have come to a batch norm over the whole batch
NORMED = Place(SyncedLocalStep, "_exchange", after=True)

# Where the model is cut.
FORWARD = Place(PipelineLocalStep, "_forward")
BACKWARD = Place(PipelineLocalStep, "_backward")
FORMS_TEAMS = Place(form_groups, "make_groups")
FORMED_TEAMS = Place(form_groups, "make_groups", after=True)
SHARES = Place(RunRecovery, "_share_evaluation")
SPREADS = Place(OptimizerView, "after_step")  # with zero: rows of weights to those who do not update them


# -- what can happen. All of it in the worker itself ------------------------------------------------------------------


class Here:
    """What this process is, if it is a worker."""

    crew: ElasticMembership | None = None
    step = -1  # the last one that it began
    backward_pass = 0  # of that step


def crew() -> ElasticMembership:
    assert Here.crew is not None
    return Here.crew


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def unheard() -> None:
    """What the others said does not arrive."""
    raise PeerLost("the word did not arrive")


def kills(*workers: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Kills these workers at once, itself last if it is one of them. `number`: of another signal."""

    def act() -> None:
        known = {who.worker: alive.pid for who, alive in sorted(crew()._heartbeat.known().items())}
        known[crew().worker_id.worker] = os.getpid()
        for worker in sorted(workers, key=lambda worker: worker == crew().worker_id.worker):
            os.kill(known[worker], number)

    return act


def until(*present: WorkerId) -> Callable[[], None]:
    """Waits until these have come: they are members, or wait to be let in, or were there and are gone again."""

    def come(who: WorkerId) -> bool:
        known = crew()._heartbeat.known().get(who)
        gone = known is not None and process_state(known.pid, known.started) is None
        return gone or who in crew().view.members or who in crew()._newcomers

    return until_true(lambda: all(map(come, present)))


def until_stored(step: int) -> Callable[[], None]:
    """Waits until the store knows that so many steps are committed."""
    return until_true(lambda: crew().known_committed() >= step)


def until_saved(run: Path, step: int) -> Callable[[], None]:
    """Waits until the checkpoint of a step stands: it is written beside training, and may be given up by a loss."""
    return until_true((run / "checkpoints" / f"step-{step:08}").exists)


def until_true(true: Callable[[], bool]) -> Callable[[], None]:
    def act() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not true():
            assert time.monotonic() < deadline, "what a fault waited for did not come"
            time.sleep(0.002)

    return act


def both(*acts: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        for each in acts:
            each()

    return act


def kill_store(run: Path) -> None:
    serving = read_server_info(run)
    assert serving is not None
    os.kill(serving.pid, signal.SIGKILL)


# -- where and when ---------------------------------------------------------------------------------------------------


class Faults:
    def __init__(self, run: Path, patch: pytest.MonkeyPatch) -> None:
        self.run, self._patch = run, patch
        self._marks = run.with_suffix(".faults")
        self._marks.mkdir()
        self._count = 0
        self._armed = False
        self._all = True
        self._learn()

    def at(
        self,
        place: Place,
        act: Callable[[], None],
        *,
        step: int | None = None,
        worker: int | None = None,
        life: int | None = None,
        lane: int | None = None,
        backward_pass: int | None = None,
        every_time: bool = False,
    ) -> None:
        """`step`: the one at work, counted from 0, or the last one before. `lane`: at LANE; at LEFT, the bucket.
        `backward_pass`: of several for one batch, counted from 0."""
        self._count += not every_time
        mark = self._marks / f"{self._count} {place.name} {step} {worker} {life}"
        original = getattr(place.owner, place.name)

        def due(arguments: tuple[Any, ...]) -> bool:
            if lane is not None and lane != arguments[1]:
                return False
            if not self._armed or Here.crew is None:
                return False
            who = Here.crew.worker_id
            if not all(want in (None, found) for want, found in ((worker, who.worker), (life, who.incarnation))):
                return False
            if backward_pass not in (None, Here.backward_pass):
                return False
            return step in (None, Here.step) and (every_time or self._first(mark))

        @functools.wraps(original)
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if not place.after and due(arguments):
                act()
            result = original(*arguments, **more)
            if place.after and due(arguments):
                act()
            return result

        self._patch.setattr(place.owner, place.name, wrapped)

    def may_not_happen(self) -> None:
        """Some of what was declared may find nobody in its place."""
        self._all = False

    def happened(self) -> int:
        return len(list(self._marks.iterdir()))

    def _first(self, mark: Path) -> bool:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _learn(self) -> None:
        """Lets a worker know what it is and where it stands."""
        backward, made = Run.backward, ElasticMembership.__init__

        def learned(run: Run, batch: Any, closure: Any, **more: Any) -> float:
            Here.backward_pass = Here.backward_pass + 1 if Here.step == batch.step else 0
            Here.step = batch.step
            return backward(run, batch, closure, **more)

        def born(crew: ElasticMembership, *arguments: Any, **more: Any) -> None:
            made(crew, *arguments, **more)
            Here.crew = crew

        self._patch.setattr(Run, "backward", learned)
        self._patch.setattr(ElasticMembership, "__init__", born)

    # -- the run ------------------------------------------------------------------------------------------------------

    def train(self, job: Job, *, workers: int = 3, resume: bool = False, **settings: Any) -> Report:
        with self.armed():
            return self._start(job, workers, resume, settings)

    def drive(self, job: Job, *, workers: int = 3, resume: bool = False, **settings: Any) -> Forked:
        """Likewise by a process of its own, which the run outlives. Faults happen in the test's own time."""
        self._armed = True
        try:
            return Forked(call=lambda: self._start(job, workers, resume, settings | {"detached": True}))
        finally:
            self._armed = False

    def _start(self, job: Job, workers: int, resume: bool, settings: dict[str, Any]) -> Report:
        lab = settings.pop("lab", None)
        if "layout" in settings:
            workers = ParallelLayout.parse(settings["layout"]).workers
        where: dict[str, Any] = {"resume": str(self.run)} if resume else {"run_dir": self.run}
        usual = {"workers": workers, "quiet": True, "predict": False}
        return train_with(job, RunConfig().changed(**usual | where | settings), launcher=lab and lab.launcher)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """For a run that begins in this block. All that was declared has to happen in it."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
        assert not self._all or self.happened() == self._count, "a fault that was declared did not happen"

    def told(self, kind: str) -> list[dict[str, Any]]:
        return events(self.run, kind)

    def audit(self, job: Job) -> SampleAudit:
        """Whether the run saw every sample once."""
        source = open_job(job).source
        record = RunFolder.open(self.run).read_events()
        return audit_samples(record, job.schedule(source.samples, source.last), source.order)
