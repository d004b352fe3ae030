"""What runs have shown of their predictions: read from their folders, for `--calibrate RUN…`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import InputError
from shoal.planner.cost.calibrate import NO_CALIBRATION, Calibration, ObservedRun, fit_calibration
from shoal.report.run_folder import RunFolder, find_run

# A line of the report -> the constant that it tells of. Waiting follows from the others.
FACTOR_OF_TERM = {"compute": "compute", "traffic": "traffic", "optimizer": "optimizer", "rest": "step"}


def load_calibration(names: Sequence[str], cluster: str | None = None) -> Calibration:
    """Of runs, or of one file that holds a calibration. `cluster`: the one that is to be predicted for."""
    if len(names) == 1 and names[0].endswith(".json"):
        return _checked(read_calibration(Path(names[0])), names[0], cluster)
    found = [observe_run(find_run(name)) for name in names]
    return fit_calibration(found, _same_cluster(found, cluster))


def _same_cluster(runs: Sequence[ObservedRun], cluster: str | None) -> str | None:
    """A file is the same by whatever path it is named."""
    known = [each.cluster for each in runs if cluster is not None and _file(each.cluster) == _file(cluster)]
    return known[0] if known else cluster


def _file(name: str) -> str:
    return os.path.abspath(name) if os.path.exists(name) else name


def _checked(found: Calibration, name: str, cluster: str | None) -> Calibration:
    if cluster is not None and _file(found.cluster) != _file(cluster):
        raise InputError(
            f"{name} calibrates cluster {found.cluster}, and {cluster} is to be predicted for",
            fix=f"--cluster {found.cluster}, or runs that were predicted for {cluster}",
        )
    return found


def observe_run(folder: RunFolder) -> ObservedRun:
    """What one run says. One that has nothing to say is an error."""
    prediction, report = _read(folder.prediction, folder), _read(folder.report, folder)
    if prediction.get("reason") or not prediction.get("seconds"):
        raise InputError(
            f"run {folder.id} was not predicted: {prediction.get('reason') or 'its prediction.json has no seconds'}",
            fix="another run",
        )
    told = report.get("prediction") or {}
    if not told.get("lines") or not report.get("steps") or told["step_ms"]["measured"] is None:
        raise InputError(f"run {folder.id} came to no step that its prediction could be compared with",
                         fix="a run that trained for some steps")  # fmt: skip
    lines = {FACTOR_OF_TERM[name]: line for name, line in told["lines"].items() if name in FACTOR_OF_TERM}
    predicted = {name: line["predicted_ms"] / 1000 for name, line in lines.items()}
    measured = {name: line["measured_ms"] / 1000 for name, line in lines.items()}
    memory = told["memory"]
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
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        why = "was not predicted" if path == folder.prediction else "has no report: it goes on, or was killed"
        raise InputError(
            f"run {folder.id} {why} (there is no {path.name})", fix="a run of shoal train that has ended"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


# -- kept in a file ---------------------------------------------------------------------------------------------------


def write_calibration(path: Path, calibration: Calibration) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_calibration(path: Path) -> Calibration:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise InputError(f"calibration {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InputError(f"{path} is no calibration: {error}") from None
