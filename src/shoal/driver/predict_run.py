"""What is known of a run before it runs: its prediction, and the layout that the planner would choose for it.

The job's code is followed on shapes by a process of its own, beside the start of the workers: nothing waits for it
unless the layout depends on it, it can take no longer than it may, and whatever goes wrong in it is a reason why there
is no prediction, never an error of the run.
"""

import importlib
import math
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.driver.launchers.fork_server import die_with_parent
from shoal.errors import InputError, ShoalError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.parallel.plan import Plan
from shoal.planner.cluster import Cluster, ClusterHost, find_cluster
from shoal.planner.cluster.local_machine import this_machine

if TYPE_CHECKING:  # imported when they are needed: a start is not to wait for them
    from shoal.planner.cost.calibrate import Calibration
    from shoal.planner.cost.runtime import Runtime
    from shoal.planner.cost.setup import Setup
    from shoal.planner.cost.workload import Workload

BACKGROUND_SECONDS = 5.0  # that the end of a run waits for its prediction at the most
CPU_SECONDS = 10  # of a processor, that following a job's code may take
DECISION_SECONDS = 60.0  # that a layout waits for it
PRESET = "laptop preset"
ENVIRONMENT = "SHOAL_PREDICT"  # off: runs are not predicted, which saves a fraction of a second of one core


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What prediction.json says."""

    layout: str
    workers: int
    cluster: str  # that it was made for, as it was named
    named: bool = False  # False: nobody said what the run is on
    calibration: str | None = None
    constants: dict[str, float] = {}  # of the calibration
    seconds: float | None = None  # of a step
    samples_per_second: float | None = None
    terms: dict[str, float] = {}  # seconds; they add up to the step
    hidden_seconds: float = 0.0  # of traffic behind compute, which are not in the step
    peak_bytes: list[int] = []  # by worker
    holds: list[dict[str, int]] = []  # by worker: what the bytes are for
    setup: dict[str, Any] = {}
    reason: str | None = None  # why nothing could be predicted


@dataclass(frozen=True, kw_only=True)
class PredictionBasis:
    """What a prediction is made for."""

    cluster: Cluster
    name: str
    named: bool
    calibration: "Calibration | None" = None
    memory_capped: bool = False  # workers run under --memory, where what is freed goes back

    def calibrated(self) -> "tuple[Cluster, Runtime]":
        """With the calibration put to use."""
        from shoal.planner.cost.calibrate import NO_CALIBRATION, apply_calibration
        from shoal.planner.cost.runtime import SHOAL, SHOAL_CAPPED

        return apply_calibration(
            self.cluster, SHOAL_CAPPED if self.memory_capped else SHOAL, self.calibration or NO_CALIBRATION
        )


def prediction_basis(
    name: str | None, calibrate: Sequence[str] = (), *, lab: Cluster | None = None, memory_capped: bool = False
) -> PredictionBasis:
    """`name`: of a preset or a file. Without it: a lab's links, if there is one, and the cores of a laptop.
    `calibrate`: runs that say how good predictions for it are."""
    if name is not None:
        cluster, told = find_cluster(name), name
    else:
        here = this_machine()
        cluster = here if lab is None else _with_devices(lab, here.hosts[0])
        told = PRESET if lab is None else f"the lab's links, cores of the {PRESET}"
    found = None
    if calibrate:
        from shoal.planner.calibration_runs import load_calibration

        found = load_calibration(calibrate, told)
    return PredictionBasis(
        cluster=cluster, name=told, named=name is not None, calibration=found, memory_capped=memory_capped
    )


def _with_devices(lab: Cluster, like: ClusterHost) -> Cluster:
    racks = [
        replace(
            rack,
            hosts=tuple(
                replace(host, device=like.device, devices=max(1, host.workers), interconnect=like.interconnect)
                for host in rack.hosts
            ),
        )
        for rack in lab.racks
    ]
    return replace(lab, racks=tuple(racks))


def prediction_enabled() -> bool:
    """Whether runs are to be predicted: yes, unless the environment says no."""
    said = os.environ.get(ENVIRONMENT, "on")
    if said not in ("on", "off"):
        raise InputError(f"{ENVIRONMENT}={said} is not known", fix="on or off")
    return said == "on"


# -- following the job's code -----------------------------------------------------------------------------------------


class NoPrediction(Exception):
    """Why there is no prediction."""


class BackgroundTrace:
    """The job's code is followed by a child. It prints nothing, and can fail, hang or die without harm."""

    def __init__(self, job: Job, source: DataSource) -> None:
        self._received = b""
        self._pid: int | None = None
        self._work: Workload | NoPrediction | None = None
        read, write = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:
            self._work = NoPrediction(f"no process could be started that follows the job's code: {error.strerror}")
        if self._pid == 0:
            _trace_in_child(job, source, parent, write)
        os.close(write)
        os.set_blocking(read, False)
        self._read: int | None = read

    def work(self, seconds: float | None = None) -> "Workload | None":
        """`seconds`: that are waited at the most; None: does not wait, and there may be nothing yet."""
        if self._work is None:
            if self._receive(seconds or 0.0):
                self._work = _decode_reply(self._received)
            elif seconds is not None:
                self._work = NoPrediction(f"following the job's code was not done {seconds:g} s after it was needed")
            if self._work is not None:
                self.close()
        if isinstance(self._work, NoPrediction):
            raise self._work
        return self._work

    def _receive(self, seconds: float) -> bool:
        """True: all has been said."""
        assert self._read is not None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                more = os.read(self._read, 1 << 16)
                if not more:
                    return True
                self._received += more
        return False

    def close(self) -> None:
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None
        if self._read is not None:
            os.close(self._read)
            self._read = None


class _TraceReply(msgspec.Struct, kw_only=True):
    work: Any = None
    reason: str = ""


def _trace_in_child(job: Job, source: DataSource, parent: int, write: int) -> None:
    """In the child; does not return."""
    try:
        die_with_parent(parent)
        used = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + used, CPU_SECONDS + used))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(nowhere, "w")  # those of a notebook are no such files
        import torch

        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        from shoal.planner.trace_job import workload_of

        answer = _TraceReply(work=workload_of(job, source))
    except ShoalError as error:
        answer = _TraceReply(reason=error.message)
    except BaseException as error:
        text = str(error).split("\n")[0]
        answer = _TraceReply(reason=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    try:
        with open(write, "wb") as wire:
            wire.write(msgspec.msgpack.encode(answer))
    finally:
        os._exit(0)


def _decode_reply(found: bytes) -> "Workload | NoPrediction":
    from shoal.planner.cost.workload import Workload

    try:
        answer = msgspec.msgpack.decode(found, type=_TraceReply)
        if answer.work is None:
            return NoPrediction(answer.reason)
        return msgspec.convert(answer.work, Workload)
    except msgspec.MsgspecError:
        return NoPrediction(f"following the job's code took more than {CPU_SECONDS} s, or ended its process")


# -- the prediction ---------------------------------------------------------------------------------------------------


class RunPredictor:
    """All that is foreseen of one run of a job: asked for a plan's prediction, and for a plan."""

    def __init__(self, job: Job, source: DataSource, basis: PredictionBasis) -> None:
        self.job, self.source, self.basis = job, source, basis
        self._trace: BackgroundTrace | None = None

    def start_trace(self) -> BackgroundTrace:
        """Follows the job's code, beside whatever comes next."""
        if self._trace is None:
            # The driver of a run needs torch._dynamo anyway (driver.py), as the child does: a second, once for both.
            for name in ("torch._dynamo", "shoal.planner.trace_job"):
                importlib.import_module(name)
            self._trace = BackgroundTrace(self.job, self.source)
        return self._trace

    def predict(self, plan: Plan, *, wait: float | None = BACKGROUND_SECONDS) -> RunPrediction | None:
        """`wait`: see `Following.work`. None: it is not known yet."""
        try:
            work = self.start_trace().work(wait)
        except NoPrediction as error:
            return no_prediction(plan, self.basis, str(error))
        return None if work is None else predict_plan(work, plan, self.basis)

    def work(self) -> "Workload":
        """Waits for as long as a decision may take. Raises `Unpredicted`."""
        found = self.start_trace().work(DECISION_SECONDS)
        assert found is not None
        return found

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()


def no_prediction(plan: Plan, basis: PredictionBasis, reason: str) -> RunPrediction:
    return RunPrediction(
        layout=str(plan.layout), workers=plan.workers, cluster=basis.name, named=basis.named, reason=reason
    )


def predict_plan(work: "Workload", plan: Plan, basis: PredictionBasis) -> RunPrediction:
    from shoal.planner.cost.predict import predict

    cluster, runtime = basis.calibrated()
    setup = setup_of(work, plan)
    try:
        found = predict(work, setup, cluster, runtime)
    except ShoalError as error:
        return no_prediction(plan, basis, error.message)
    except Exception as error:  # whatever it is, a run is worth more than its prediction
        return no_prediction(plan, basis, f"{type(error).__name__}: {error}")
    if not 0 < found.seconds < float("inf"):
        return no_prediction(plan, basis, f"a step of {found.seconds:g} s was predicted")
    tuned = basis.calibration
    # What every step costs is told apart from what the host does for operators.
    terms = dict(found.terms) | {"host": found.terms["host"] - runtime.step_seconds, "step": runtime.step_seconds}
    stages = [found.stages[plan.layout.position(worker).stage] for worker in range(plan.workers)]
    return RunPrediction(
        layout=str(plan.layout),
        workers=plan.workers,
        cluster=basis.name,
        named=basis.named,
        calibration=None if tuned is None else str(tuned),
        constants={} if tuned is None else tuned.constants,
        seconds=found.seconds,
        samples_per_second=setup.batch / found.seconds,
        terms=terms,
        hidden_seconds=found.hidden,
        peak_bytes=[round(stage.peak) for stage in stages],
        holds=[{name: round(size) for name, size in stage.memory.items()} for stage in stages],
        setup=msgspec.to_builtins(setup),
    )


def setup_of(work: "Workload", plan: Plan) -> "Setup":
    """A plan as estimates have it."""
    from shoal.paramserver.sync_mode import SyncMode
    from shoal.planner.cost.setup import Setup

    layout = plan.layout
    mode = SyncMode.parse(plan.sync or "sync")
    number = mode.quorum(plan.workers) if mode.name == "quorum" else int(mode.number)
    return Setup(
        data=layout.data,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        batch=work.batch or 1,
        microbatch=work.samples,
        chunks=plan.chunks if layout.pipeline > 1 else 1,
        schedule=plan.schedule,
        recompute="full" if plan.recompute else "none",
        lanes=plan.lanes,
        exchange="servers" if plan.servers else "collectives",
        servers=plan.servers,
        mode=mode.name,
        number=number if plan.servers else -1,
    )
