"""Fits a few constants to finished runs, to correct later predictions on the same cluster. Pure.

Each is one number for one cause, so that it holds for other layouts and jobs on the same cluster:

    compute     seconds of operators, whether bound by arithmetic, memory or the host: a factor
    traffic     seconds of messages: a factor
    optimizer   seconds of an update: a factor
    memory      peak bytes: a factor
    step        seconds that every step takes besides, whatever its work

A run gives ln(measured / predicted) for each factor. The factor is their mean, shrunk towards 1 by a prior that
weighs as much as `PRIOR` long runs (ridge regression in logarithms: one unknown per cause, so it has a closed form):

    ln factor = Σ weight · ln(measured / predicted) / (Σ weight + PRIOR)

One long run moves it two thirds of the way, ten nearly all of it. `step` is the same of measured − predicted, shrunk
towards 0. A cause that is nearly zero on one side (such as traffic that is mostly waiting) counts into `step`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.errors import InputError
from shoal.planner.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.runtime_overhead import RuntimeOverheads

PRIOR = 0.5  # runs
STEADY_STEPS = 10  # a run of so many steps weighs half: first steps are slower than the rest
MIN_SHARE = 0.01  # of a step, predicted or measured: a smaller cause does not change its factor
MAX_LOG_FACTOR = math.log(20)  # the most that one run counts: beyond it something else is wrong
FACTORS = ("compute", "traffic", "optimizer", "memory")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured over predicted, by cause."""

    compute: float = 1.0
    traffic: float = 1.0
    optimizer: float = 1.0
    memory: float = 1.0
    step: float = 0.0  # seconds more than predicted
    runs: int = 0
    cluster: str = ""  # the cluster that it holds for

    @property
    def constants(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in (*FACTORS, "step")}

    def __str__(self) -> str:
        changed = [f"{name} × {value:.2f}" for name in FACTORS if round(value := getattr(self, name), 2) != 1]
        changed += [f"{1000 * self.step:+.3g} ms a step"] if abs(self.step) >= 1e-5 else []
        return f"{', '.join(changed) or 'as predicted'} from {self.runs} run{'' if self.runs == 1 else 's'}"


NO_CALIBRATION = Calibration()


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """Predicted and measured seconds of one run's step by cause, and bytes of memory. A missing cause is unknown."""

    run: str
    cluster: str
    steps: int
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    used: Calibration = field(default_factory=Calibration)  # the calibration that the prediction used


def fit_calibration(runs: Sequence[ObservedRun], cluster: str | None = None) -> Calibration:
    """Fits to runs of one cluster: `cluster`, else that of the first run."""
    if not runs:
        raise InputError("no run to calibrate with", fix="--calibrate RUN, of a run with a prediction")
    expected = runs[0].cluster if cluster is None else cluster
    for each in runs:
        if each.cluster != expected:
            raise InputError(
                f"run {each.run} was predicted for cluster {each.cluster}, but the calibration is for {expected}",
                fix=f"--cluster {each.cluster}, or runs that were predicted for {expected}",
            )
    found = {name: math.exp(_shrunk_mean([(run, _log_factor(run, name)) for run in runs])) for name in FACTORS}
    step = _shrunk_mean([(run, _unexplained_seconds(run)) for run in runs])
    return Calibration(**found, step=step, runs=len(runs), cluster=expected)


def _shrunk_mean(values: Sequence[tuple[ObservedRun, float | None]]) -> float:
    """The weighted mean of the values, shrunk towards 0."""
    weighted = [(run.steps / (run.steps + STEADY_STEPS), value) for run, value in values if value is not None]
    return sum(weight * value for weight, value in weighted) / (sum(weight for weight, _ in weighted) + PRIOR)


def _log_factor(run: ObservedRun, name: str) -> float | None:
    predicted, measured = run.predicted.get(name, 0.0), run.measured.get(name, 0.0)
    least = 0.0 if name == "memory" else MIN_SHARE * max(_step(run.predicted), _step(run.measured))
    if min(predicted, measured) <= least:
        return None
    found = math.log(measured / predicted) + math.log(getattr(run.used, name))
    return max(-MAX_LOG_FACTOR, min(MAX_LOG_FACTOR, found))


def _unexplained_seconds(run: ObservedRun) -> float:
    """Seconds of a step that no factor explains, with causes that are too small on one side to have one."""
    causes = ["step", *(name for name in FACTORS if name != "memory" and _log_factor(run, name) is None)]
    return run.used.step + sum(run.measured.get(name, 0.0) - run.predicted.get(name, 0.0) for name in causes)


def _step(causes: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in causes.items() if name != "memory")


def apply_calibration(cluster: Cluster, runtime: Runtime, calibration: Calibration) -> tuple[Cluster, Runtime]:
    """Changes the constants of devices, links and the runtime, so that predictions with them are calibrated."""
    if calibration.constants == NO_CALIBRATION.constants:
        return cluster, runtime
    compute, traffic = calibration.compute, calibration.traffic
    racks = tuple(replace(rack, uplink=_link(rack.uplink, traffic)) for rack in cluster.racks)
    cluster = Cluster(racks=racks).map_hosts(lambda host: _host(host, compute, traffic))
    changed = replace(
        runtime,
        step_seconds=max(0.0, runtime.step_seconds + calibration.step),
        microbatch_seconds=runtime.microbatch_seconds * compute,
        # An update is bound by the device's memory and its host, and both change with its compute factor already.
        update_bytes=runtime.update_bytes * calibration.optimizer / compute,
        update_operators=runtime.update_operators * calibration.optimizer / compute,
        overheads=None if runtime.overheads is None else _overheads(runtime.overheads, calibration),
        allocator=runtime.allocator * calibration.memory,
    )
    return cluster, changed


def _overheads(overheads: RuntimeOverheads, calibration: Calibration) -> RuntimeOverheads:
    """Operators and bytes change with the device already; traffic and updates have factors of their own."""
    traffic, update = calibration.traffic / calibration.compute, calibration.optimizer / calibration.compute
    return replace(
        overheads,
        call=overheads.call * traffic,
        moved=overheads.moved * traffic,
        spread=overheads.spread * traffic,
        copy_bytes=overheads.copy_bytes * traffic,
        kept=overheads.kept * calibration.traffic,
        clip=overheads.clip * update,
        clip_bytes=overheads.clip_bytes * update,
    )


def _host(host: ClusterHost, compute: float, traffic: float) -> ClusterHost:
    device = None if host.device is None else _device(host.device, compute)
    inside = None if host.interconnect is None else _inside(host.interconnect, traffic)
    return replace(host, device=device, link=_link(host.link, traffic), interconnect=inside)


def _device(device: Device, factor: float) -> Device:
    return replace(
        device,
        peak={dtype: peak / factor for dtype, peak in device.peak.items()},
        memory_bandwidth=device.memory_bandwidth / factor,
        overhead=device.overhead * factor,
        rates={name: rate / factor for name, rate in device.rates.items()},
    )


def _inside(inside: HostInterconnect, factor: float) -> HostInterconnect:
    between = None if inside.between is None else _link(inside.between, factor)
    return replace(inside, link=_link(inside.link, factor), between=between)


def _link(link: ClusterLink, factor: float) -> ClusterLink:
    latency = None if link.latency_seconds is None else link.latency_seconds * factor
    return replace(link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=latency)
