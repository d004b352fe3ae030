"""Predicts a run before it runs, for its report and for the choice of a layout.

A child process traces the job's code on shapes while the workers start. The run waits for it only where the layout
depends on it; its time is limited, and an error in it costs the prediction, never the run.
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

if TYPE_CHECKING:  # imported when needed, so that a start does not wait
    from shoal.planner.cost.calibrate import Calibration
    from shoal.planner.cost.runtime import Runtime
    from shoal.planner.cost.setup import Setup
    from shoal.planner.cost.workload import Workload

BACKGROUND_SECONDS = 5.0  # the longest that the end of a run waits for its prediction
CPU_SECONDS = 10  # of processor time that tracing a job's code may take
DECISION_SECONDS = 60.0  # the longest that the choice of a layout waits for it
PRESET = "laptop preset"
ENVIRONMENT = "SHOAL_PREDICT"  # off: no predictions, which saves a fraction of a second of one core


class RunPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The content of prediction.json."""

    layout: str
    workers: int
    cluster: str  # the name of the cluster that it is for
    named: bool = False  # False: the user named no cluster
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
    """The cluster and the calibration that a prediction is for."""

    cluster: Cluster
    name: str
    named: bool
    calibration: "Calibration | None" = None
    memory_capped: bool = False  # workers run under --memory, where freed memory goes back

    def calibrated(self) -> "tuple[Cluster, Runtime]":
        """Cluster and runtime as the calibration corrects them."""
        from shoal.planner.cost.calibrate import NO_CALIBRATION, apply_calibration
        from shoal.planner.cost.runtime import SHOAL, SHOAL_CAPPED

        runtime = SHOAL_CAPPED if self.memory_capped else SHOAL
        return apply_calibration(self.cluster, runtime, self.calibration or NO_CALIBRATION)


def prediction_basis(
    name: str | None, calibrate: Sequence[str] = (), *, lab: Cluster | None = None, memory_capped: bool = False
) -> PredictionBasis:
    """`name`: a preset or a file; without it, the lab's links and the cores of a laptop. `calibrate`: runs whose
    measurements correct predictions."""
    if name is not None:
        cluster, label = find_cluster(name), name
    else:
        here = this_machine()
        cluster = here if lab is None else _with_devices(lab, here.hosts[0])
        label = PRESET if lab is None else f"the lab's links, cores of the {PRESET}"
    found = None
    if calibrate:
        from shoal.planner.calibration_runs import load_calibration

        found = load_calibration(calibrate, label)
    named = name is not None
    return PredictionBasis(cluster=cluster, name=label, named=named, calibration=found, memory_capped=memory_capped)


def _with_devices(lab: Cluster, like: ClusterHost) -> Cluster:
    """The lab with devices and interconnect of another host."""

    def host(one: ClusterHost) -> ClusterHost:
        return replace(one, device=like.device, devices=max(1, one.workers), interconnect=like.interconnect)

    return replace(lab, racks=tuple(replace(rack, hosts=tuple(map(host, rack.hosts))) for rack in lab.racks))


def prediction_enabled() -> bool:
    """Whether the environment leaves predictions on, which is the default."""
    found = os.environ.get(ENVIRONMENT, "on")
    if found not in ("on", "off"):
        raise InputError(f"{ENVIRONMENT}={found} is not known", fix="on or off")
    return found == "on"


# -- tracing the job's code -------------------------------------------------------------------------------------------


class NoPrediction(Exception):
    """Why there is no prediction."""


class BackgroundTrace:
    """A child process that traces the job's code. It prints nothing, and can fail, hang or die without harm."""

    def __init__(self, job: Job, source: DataSource) -> None:
        self._received = b""
        self._pid: int | None = None
        self._work: Workload | NoPrediction | None = None
        read, write = os.pipe()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:
            self._work = NoPrediction(f"no process could be started that traces the job's code: {error.strerror}")
        if self._pid == 0:
            _trace_in_child(job, source, parent, write)
        os.close(write)
        os.set_blocking(read, False)
        self._read: int | None = read

    def work(self, seconds: float | None = None) -> "Workload | None":
        """The traced work. Waits for `seconds`; None: does not wait, and returns None while the child is at work."""
        if self._work is None:
            if self._receive(seconds or 0.0):
                self._work = _decode_reply(self._received)
            elif seconds is not None:
                self._work = NoPrediction(f"tracing the job's code was not done {seconds:g} s after it was needed")
            if self._work is not None:
                self.close()
        if isinstance(self._work, NoPrediction):
            raise self._work
        return self._work

    def _receive(self, seconds: float) -> bool:
        """True when the reply is complete."""
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
    """Runs in the child, and does not return."""
    try:
        die_with_parent(parent)
        used = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS + used, CPU_SECONDS + used))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = open(nowhere, "w")  # a notebook's streams are not files
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
        return NoPrediction(f"tracing the job's code took more than {CPU_SECONDS} s, or ended its process")


# -- the prediction ---------------------------------------------------------------------------------------------------


class RunPredictor:
    """Predicts plans of one job."""

    def __init__(self, job: Job, source: DataSource, basis: PredictionBasis) -> None:
        self.job, self.source, self.basis = job, source, basis
        self._trace: BackgroundTrace | None = None

    def start_trace(self) -> BackgroundTrace:
        """Starts to trace the job's code in the background."""
        if self._trace is None:
            # The driver of a run needs torch._dynamo anyway (driver.py), as the child does: a second, once for both.
            for name in ("torch._dynamo", "shoal.planner.trace_job"):
                importlib.import_module(name)
            self._trace = BackgroundTrace(self.job, self.source)
        return self._trace

    def predict(self, plan: Plan, *, wait: float | None = BACKGROUND_SECONDS) -> RunPrediction | None:
        """The prediction of a plan; None while it is not known. `wait`: see `BackgroundTrace.work`."""
        try:
            work = self.start_trace().work(wait)
        except NoPrediction as error:
            return no_prediction(plan, self.basis, str(error))
        return None if work is None else predict_plan(work, plan, self.basis)

    def work(self) -> "Workload":
        """The traced work, for a decision that needs it. Raises NoPrediction."""
        found = self.start_trace().work(DECISION_SECONDS)
        assert found is not None
        return found

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()


def no_prediction(plan: Plan, basis: PredictionBasis, reason: str) -> RunPrediction:
    layout, workers = str(plan.layout), plan.workers
    return RunPrediction(layout=layout, workers=workers, cluster=basis.name, named=basis.named, reason=reason)


def predict_plan(work: "Workload", plan: Plan, basis: PredictionBasis) -> RunPrediction:
    from shoal.planner.cost.predict import predict

    cluster, runtime = basis.calibrated()
    setup = setup_of(work, plan)
    try:
        found = predict(work, setup, cluster, runtime)
    except ShoalError as error:
        return no_prediction(plan, basis, error.message)
    except Exception as error:  # a run is worth more than its prediction
        return no_prediction(plan, basis, f"{type(error).__name__}: {error}")
    if not 0 < found.seconds < float("inf"):
        return no_prediction(plan, basis, f"a step of {found.seconds:g} s was predicted")
    tuned = basis.calibration
    # The fixed cost of a step is a term of its own, apart from the host's time for operators.
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
    """A plan as a setup of the cost model."""
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
