"""Reads calibrations for `--calibrate RUN…` from the folders of finished runs, or from a saved file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import InputError
from shoal.planner.cost.calibrate import NO_CALIBRATION, Calibration, ObservedRun, fit_calibration
from shoal.report.run_folder import RunFolder, find_run
from shoal.transport.decoding import decode_json

# Term of the report -> the calibration constant that it measures. The term "waiting" follows from the others.
FACTOR_OF_TERM = {"compute": "compute", "traffic": "traffic", "optimizer": "optimizer", "rest": "step"}


def load_calibration(names: Sequence[str], cluster: str | None = None) -> Calibration:
    """Fits a calibration to runs, or reads one saved file. `cluster` names the cluster to predict for."""
    if len(names) == 1 and names[0].endswith(".json"):
        return _checked(read_calibration(Path(names[0])), names[0], cluster)
    found = [observe_run(find_run(name)) for name in names]
    return fit_calibration(found, _same_cluster(found, cluster))


def _same_cluster(runs: Sequence[ObservedRun], cluster: str | None) -> str | None:
    """Returns the name under which the runs know `cluster`: two paths may name one file."""
    known = [each.cluster for each in runs if cluster is not None and _file(each.cluster) == _file(cluster)]
    return known[0] if known else cluster


def _file(name: str) -> str:
    return os.path.abspath(name) if os.path.exists(name) else name


def _checked(found: Calibration, name: str, cluster: str | None) -> Calibration:
    if cluster is not None and _file(found.cluster) != _file(cluster):
        raise InputError(
            f"{name} calibrates cluster {found.cluster}, but the prediction is for {cluster}",
            fix=f"--cluster {found.cluster}, or runs that were predicted for {cluster}",
        )
    return found


def observe_run(folder: RunFolder) -> ObservedRun:
    """Returns one run's predicted and measured terms. Raises InputError for a run that has no prediction or no step."""
    prediction, report = _read(folder.prediction, folder), _read(folder.report, folder)
    if (reason := prediction.get("reason")) or not prediction.get("seconds"):
        why = reason or "its prediction.json has no seconds"
        raise InputError(f"run {folder.id} has no prediction: {why}", fix="another run")
    recorded = report.get("prediction") or {}
    if not recorded.get("lines") or not report.get("steps") or recorded["step_ms"]["measured"] is None:
        raise InputError(f"run {folder.id} has no step to compare with its prediction", fix="a run with some steps")
    lines = {FACTOR_OF_TERM[name]: line for name, line in recorded["lines"].items() if name in FACTOR_OF_TERM}
    predicted = {name: line["predicted_ms"] / 1000 for name, line in lines.items()}
    measured = {name: line["measured_ms"] / 1000 for name, line in lines.items()}
    memory = recorded["memory"]
    if memory and memory["measured_bytes"]:
        predicted["memory"], measured["memory"] = memory["predicted_bytes"], memory["measured_bytes"]
    used = {name: value for name, value in prediction.get("constants", {}).items() if name in NO_CALIBRATION.constants}
    return ObservedRun(
        run=folder.id,
        cluster=prediction["cluster"],
        steps=report["steps"],
        predicted=predicted,
        measured=measured,
        used=Calibration(**used),
    )


def _read(path: Path, folder: RunFolder) -> dict[str, Any]:
    try:
        return decode_json(path.read_bytes(), dict[str, Any])
    except FileNotFoundError:
        why = "no prediction" if path == folder.prediction else "no report: it still runs, or was killed"
        message = f"run {folder.id} has {why} ({path.name} is missing)"
        raise InputError(message, fix="a run of shoal train that has ended") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def write_calibration(path: Path, calibration: Calibration) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_calibration(path: Path) -> Calibration:
    try:
        return decode_json(path.read_bytes(), Calibration)
    except OSError as error:
        raise InputError(f"calibration {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"{path} is no calibration: {error}") from None
