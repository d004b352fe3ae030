"""Runs side by side, from their folders: speed, loss over time, time to the target, and which one did best."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.errors import InputError
from shoal.report import human
from shoal.report.events import AnyEvent, RunStarted, StepsCommitted
from shoal.report.run_folder import RunFolder
from shoal.report.servers import GRADIENT_REFUSALS

NEAR_RATIO = 1.05  # times the best: an exact run that comes so near is the better choice
LAST_SHARE = 0.1  # of a curve's points, whose mean is its loss at a moment: single losses are noise


class LossPoint(NamedTuple):
    seconds: float  # since training began
    step: int
    loss: float


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. What is not known is None."""

    run: str
    folder: str
    job: str
    command: str = "train"
    workers: int
    servers: int = 0
    sync_mode: str = ""  # as --sync has it; empty: no servers
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
        report = msgspec.json.decode(folder.report.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise InputError(
            f"{folder.path} has no report yet: the run goes on, or was killed",
            fix=f"--resume {folder.path} goes on with it",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{folder.report} cannot be read: {error}") from None
    return compare_run(report, folder.read_events(), run=folder.id, path=str(folder.path))


def compare_run(report: dict[str, Any], events: Sequence[AnyEvent], *, run: str, path: str) -> ComparedRun:
    """Of a report; what older ones lack is left out."""
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
    """Every loss that was told in the last sitting of a run, by time."""
    sitting = max(
        (n for n, event in enumerate(events) if isinstance(event, RunStarted) and not event.previous_layout), default=0
    )
    told = [event for event in events[sitting:] if isinstance(event, StepsCommitted) and event.leader]
    first = min((event.time - event.spent.total - event.lost_seconds for event in told), default=0.0)
    first = first if began is None else began
    found = [LossPoint(max(0.0, e.time - first), e.step, e.loss) for e in told if e.loss is not None]
    return sorted(found)


def loss_at(curve: Sequence[LossPoint], seconds: float) -> float | None:
    """The mean of the last losses up to a moment."""
    until = [point.loss for point in curve if point.seconds <= seconds]
    last = until[-max(1, round(LAST_SHARE * len(until))) :]
    return sum(last) / len(last) if last else None


def common_seconds(runs: Sequence[ComparedRun]) -> float | None:
    """As long as all of them trained."""
    ends = [run.loss_curve[-1].seconds for run in runs if run.loss_curve]
    return min(ends) if len(ends) == len(runs) and ends else None


def best(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, str] | None:
    """Which one did best, and by what: the first to reach the target, else the lowest loss after the same time."""
    good = [run for run in runs if run.outcome == "done"]
    names = dict(zip((run.folder for run in runs), labels(runs), strict=True))
    reached = {run.folder: run.target_seconds for run in good if run.target_seconds is not None}
    if reached:
        winner = _winner(good, reached)
        others = [run for run in good if run is not winner]
        rest = [f"{names[run.folder]} {_after(reached.get(run.folder))}" for run in others]
        told = f"reached {winner.target or 'the target'} {_after(reached[winner.folder])}"
        return winner, f"{names[winner.folder]} {told}{_listed(rest)}{_but(winner, reached)}"
    moment = common_seconds(good)
    if moment is None or len(good) < 2:
        return None
    losses = {run.folder: loss for run in good if (loss := loss_at(run.loss_curve, moment)) is not None}
    winner = _winner(good, losses)
    others = [run for run in good if run is not winner]
    rest = [f"{names[run.folder]} {_loss(losses.get(run.folder))}" for run in others]
    told = f"after {human.duration(moment)} has a loss of {human.value(losses[winner.folder])}"
    return winner, f"{names[winner.folder]} {told}{_listed(rest)}{_but(winner, losses)}"


def labels(runs: Sequence[ComparedRun]) -> list[str]:
    """Each another."""
    plain = [run.label for run in runs]
    return [f"{run.label} ({run.run})" if plain.count(run.label) > 1 else run.label for run in runs]


def _winner(runs: Sequence[ComparedRun], figure: dict[str, float]) -> ComparedRun:
    """The least; an exact run where it comes near."""
    there = [run for run in runs if run.folder in figure]
    least = min(there, key=lambda run: figure[run.folder])
    near = [run for run in there if run.exact and figure[run.folder] <= NEAR_RATIO * figure[least.folder]]
    return near[0] if near and not least.exact else least


def _after(seconds: float | None) -> str:
    return "not at all" if seconds is None else f"after {human.duration(seconds)}"


def _loss(loss: float | None) -> str:
    return "none yet" if loss is None else human.value(loss)


def _listed(rest: Sequence[str]) -> str:
    return f" ({', '.join(rest)})" if rest else ""


def _but(winner: ComparedRun, figure: dict[str, float]) -> str:
    return "; the best is hardly better, and this one is exact" if figure[winner.folder] > min(figure.values()) else ""
