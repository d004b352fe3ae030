"""Compares runs by their folders: speed, loss over time, time to the target, and the best of them."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.errors import InputError
from shoal.report import human
from shoal.report.events import AnyEvent, RunStarted, StepsCommitted
from shoal.report.run_folder import RunFolder
from shoal.report.servers import GRADIENT_REFUSALS
from shoal.transport.decoding import decode_json

NEAR_RATIO = 1.05  # an exact run within this ratio of the best one is preferred
LAST_SHARE = 0.1  # of a curve's points: their mean is its loss, since single losses are noise


class LossPoint(NamedTuple):
    seconds: float  # since training began
    step: int
    loss: float


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    folder: str
    job: str
    command: str = "train"
    workers: int
    servers: int = 0
    sync_mode: str = ""  # empty: no servers
    layout: str = ""
    outcome: str
    steps: int
    seconds: float
    updates_per_second: float | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    metrics: dict[str, float | None] = {}
    target: str | None = None
    target_seconds: float | None = None  # None: not reached
    staleness: float | None = None  # mean
    staleness_max: int | None = None
    refused: int | None = None  # gradients
    refused_share: float | None = None
    exact: bool | None = None
    weights_sha256: str | None = None
    loss_curve: list[LossPoint] = []

    @property
    def label(self) -> str:
        if self.sync_mode:
            return self.sync_mode
        if self.layout and self.layout != f"data={self.workers}":
            return self.layout
        return human.plural(self.workers, "worker")


def read_compared_run(folder: RunFolder) -> ComparedRun:
    try:
        report = decode_json(folder.report.read_bytes(), dict[str, Any])
    except FileNotFoundError:
        raise InputError(
            f"{folder.path} has no report yet: the run goes on, or was killed",
            fix=f"--resume {shlex.quote(str(folder.path))} goes on with it",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{folder.report} cannot be read: {error}") from None
    try:
        return compare_run(report, folder.read_events(), run=folder.id, path=str(folder.path))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{folder.report} is no report of a run, or was edited: {error}") from error


def compare_run(report: dict[str, Any], events: Sequence[AnyEvent], *, run: str, path: str) -> ComparedRun:
    servers, target = report.get("servers") or {}, report.get("target") or {}
    stale, refused = servers.get("staleness") or {}, servers.get("refused")
    steps, seconds = report.get("steps") or 0, report.get("seconds") or 0.0
    done = (report.get("committed") or {}).get("steps", steps)
    updates = servers.get("updates_per_second")
    if updates is None and seconds:
        updates = done / seconds
    return ComparedRun(
        run=run,
        folder=path,
        job=report.get("job") or "run",
        command=report.get("command") or "train",
        workers=report.get("workers") or 1,
        servers=servers.get("servers") or 0,
        sync_mode=servers.get("sync_mode") or "",
        layout=report.get("layout") or "",
        outcome=report.get("outcome") or "unknown",
        steps=steps,
        seconds=seconds,
        updates_per_second=updates,
        samples_per_second=report.get("samples_per_second"),
        loss=report.get("final_loss"),
        metrics=report.get("metrics") or {},
        target=target.get("text"),
        target_seconds=target.get("seconds") if target.get("reached") else None,
        staleness=stale.get("mean"),
        staleness_max=stale.get("max"),
        refused=None if refused is None else sum(n for why, n in refused.items() if why in GRADIENT_REFUSALS),
        refused_share=servers.get("refused_share"),
        exact=report.get("exact"),
        weights_sha256=report.get("weights_sha256"),
        loss_curve=loss_curve(events, report.get("training_began"))
        or [LossPoint(*point) for point in report.get("losses_by_time") or []],
    )


def loss_curve(events: Sequence[AnyEvent], began: float | None) -> list[LossPoint]:
    """Every loss since the run last started or resumed, by time."""
    starts = [n for n, event in enumerate(events) if isinstance(event, RunStarted) and not event.previous_layout]
    steps = [e for e in events[max(starts, default=0) :] if isinstance(e, StepsCommitted) and e.leader]
    first = min((event.began for event in steps), default=0.0) if began is None else began
    return sorted(LossPoint(max(0.0, e.time - first), e.step, e.loss) for e in steps if e.loss is not None)


def loss_at(curve: Sequence[LossPoint], seconds: float) -> float | None:
    """The mean of the last losses before a moment."""
    until = [point.loss for point in curve if point.seconds <= seconds]
    last = until[-max(1, round(LAST_SHARE * len(until))) :]
    return sum(last) / len(last) if last else None


def common_seconds(runs: Sequence[ComparedRun]) -> float | None:
    """The training time that all runs have reached."""
    ends = [run.loss_curve[-1].seconds for run in runs if run.loss_curve]
    return min(ends) if len(ends) == len(runs) and ends else None


def best(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, str] | None:
    """The best run and why: it reached the target first, or else has the lowest loss after the same time."""
    good = [run for run in runs if run.outcome == "done"]
    names = dict(zip((run.folder for run in runs), labels(runs), strict=True))
    figures = {run.folder: run.target_seconds for run in good if run.target_seconds is not None}
    if figures:
        winner, text = _winner(good, figures), _after
        result = f"reached {winner.target or 'the target'} {_after(figures[winner.folder])}"
    else:
        moment = common_seconds(good)
        if moment is None or len(good) < 2:
            return None
        figures = {run.folder: loss for run in good if (loss := loss_at(run.loss_curve, moment)) is not None}
        winner, text = _winner(good, figures), _loss
        result = f"after {human.duration(moment)} has a loss of {human.value(figures[winner.folder])}"
    rest = [f"{names[run.folder]} {text(figures.get(run.folder))}" for run in good if run is not winner]
    listed = f" ({', '.join(rest)})" if rest else ""
    near = (
        "; the best is hardly better, and this one is exact" if figures[winner.folder] > min(figures.values()) else ""
    )
    return winner, f"{names[winner.folder]} {result}{listed}{near}"


def labels(runs: Sequence[ComparedRun]) -> list[str]:
    """A different label for each run."""
    plain = [run.label for run in runs]
    return [f"{run.label} ({run.run})" if plain.count(run.label) > 1 else run.label for run in runs]


def _winner(runs: Sequence[ComparedRun], figure: dict[str, float]) -> ComparedRun:
    """The run with the least figure, or an exact run near it."""
    known = [run for run in runs if run.folder in figure]
    least = min(known, key=lambda run: figure[run.folder])
    near = [run for run in known if run.exact and figure[run.folder] <= NEAR_RATIO * figure[least.folder]]
    return near[0] if near and not least.exact else least


def _after(figure: float | None) -> str:
    return "not at all" if figure is None else f"after {human.duration(figure)}"


def _loss(figure: float | None) -> str:
    return "none yet" if figure is None else human.value(figure)
