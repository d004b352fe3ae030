"""The run folder: everything that a run writes, for its owner alone. Used by the driver, reports and resumed runs.

config.json  plan.json  prediction.json  events.jsonl  metrics.jsonl  report.json  checkpoints/  keys/  worker-0.log …
model.safetensors  best.safetensors (keep_best)  ema.safetensors (ema)
"""

import contextlib
import difflib
import os
import secrets
import shlex
import shutil
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec

from shoal.errors import InputError, RunFolderError
from shoal.report import atomic_write, private_folder, run_index
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    MetricsLogged,
    ModelEvaluated,
    RunFinished,
    RunResumed,
    RunStarted,
    StepsCommitted,
    WorkerFinished,
    decode,
    encode,
)
from shoal.transport.decoding import decode_json
from shoal.transport.secret_files import KEYS, MANIFEST_KEY, kept_secret

DEFAULT_ROOT = Path("runs")
LAST_TIME = 253402214400.0  # of a run, in seconds since 1970: the end of year 9999, beyond which no calendar goes
FORMAT = 2  # of a run folder, in config.json; 1 was Shoal 0.1, which wrote no number


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = os.path.basename(os.path.abspath(path))  # also of ".", and of a link its own name
        self.write_errors = 0
        self.last_write_error: str | None = None
        self.config, self.plan, self.prediction = path / "config.json", path / "plan.json", path / "prediction.json"
        self.events, self.report, self.model = path / "events.jsonl", path / "report.json", path / "model.safetensors"
        self.metrics = path / "metrics.jsonl"  # StepsCommitted of the leader, ModelEvaluated, LoggedValues: a line each
        self.checkpoints = path / "checkpoints"
        self._events = atomic_write.LineFile(self.events)
        self._metrics = atomic_write.LineFile(self.metrics)

    @classmethod
    def create(cls, run_dir: Path | None, *, root: Path = DEFAULT_ROOT) -> "RunFolder":
        """Creates the given folder, or a fresh `runs/<4 hex>`, and checks that it can be written to.

        A folder that had other files before keeps its mode."""
        if run_dir is not None:
            held = [name for name in ("report.json", "events.jsonl") if atomic_write.exists(run_dir / name)]
            if held:
                raise RunFolderError(
                    f"{run_dir} already holds a run ({', '.join(held)}), and a new run needs a folder of its own",
                    fix=f"--resume {shlex.quote(str(run_dir))} to go on with it, or another folder",
                )
        made = run_dir is None or not atomic_write.exists(run_dir)
        try:
            if run_dir is None:
                path = _fresh(root)
            else:
                path = run_dir
                path.mkdir(parents=True, exist_ok=True)
                if made or not any(path.iterdir()):
                    private_folder.make_private(path)
        except OSError as error:
            raise _unwritable(run_dir or root, error) from error
        try:
            atomic_write.try_to_write(path)
            kept_secret(path / KEYS / MANIFEST_KEY, make=True)  # signs its checkpoints
        except OSError as error:
            if made:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path / KEYS, ignore_errors=True)
                    path.rmdir()
            raise _unwritable(path, error) from error
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Opens a folder that holds a run. Writes nothing."""
        if not _is_run(path):
            why = (
                "holds no run: no events.jsonl, report.json, config.json"
                if atomic_write.exists(path)
                else "does not exist"
            )
            raise RunFolderError(f"{path} {why}", fix="shoal runs shows the runs that there are")
        folder = cls(path)
        folder.check_format()
        return folder

    def check_format(self) -> None:
        """Raises RunFolderError where another version of Shoal wrote the folder."""
        try:
            found = decode_json(self.config.read_bytes(), dict[str, Any]).get("format", 1)
        except (OSError, msgspec.MsgspecError):
            return  # a script that joined without a driver has no config.json; a torn one is reported by its reader
        if found == 1:
            raise RunFolderError(
                f"{self.path} was written by Shoal 0.1, which named its events differently",
                fix=f"read it with shoal==0.1.0, or train again; its weights are in {self.model}",
            )
        if found != FORMAT:
            raise RunFolderError(
                f"{self.path} has format {found}, and this Shoal reads format {FORMAT}", fix="a newer version of Shoal"
            )

    def log(self, rank: int) -> Path:
        return self.path / f"worker-{rank}.log"

    def server_log(self, shard: int) -> Path:
        return self.path / f"server-{shard}.log"

    def files(self) -> list[str]:
        """The names of the run's main files that exist."""
        weights = (self.model, self.path / "best.safetensors", self.path / "ema.safetensors")
        logs = (self.path / "metrics.csv", self.path / "tensorboard")
        known = (self.report, self.plan, self.prediction, self.config, self.events, self.metrics, *weights, *logs)
        return [file.name for file in known if atomic_write.exists(file)]

    def write_json(self, path: Path, value: Any) -> None:
        try:
            atomic_write.write_json(path, value)
        except OSError as error:
            raise _unwritable(path, error) from error

    def append_event(self, event: AnyEvent) -> None:
        """Counts an error of the disk in `write_errors` instead of raising: it must not end the run."""
        self._append(self._events, encode(event))
        for line in _metrics_lines(event):
            self._append(self._metrics, msgspec.json.encode(line))

    def read_events(self) -> list[AnyEvent]:
        """All events so far, without torn lines."""
        found: list[AnyEvent] = []
        with contextlib.suppress(OSError):
            for line in self.events.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(decode(line))
        return found

    def saved_steps(self) -> list[int]:
        """Of the checkpoints in the folder, intact or not."""
        return [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-" + "[0-9]" * 8)]

    @property
    def never_saved(self) -> bool:
        """Whether the run has written no checkpoint yet: one that is missing now is another matter."""
        if self.saved_steps():
            return False
        return not any(event.path for event in self.read_events() if isinstance(event, CheckpointSaved | RunResumed))

    def close(self) -> None:
        self._events.close()
        self._metrics.close()
        private_folder.set_modes(self.path)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, lines: atomic_write.LineFile, line: bytes) -> None:
        try:
            lines.append(line)
        except OSError as error:
            self.write_errors += 1
            self.last_write_error = f"{lines.path}: {error.strerror or error}"


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a list of runs."""

    id: str
    path: str
    when: float  # of its last event or file; seconds since 1970
    outcome: str  # done, stopped, failed; unfinished: still running, or the driver was killed
    job: str = "?"
    workers: int | None = None
    steps: int = 0
    loss: float | None = None
    metrics: dict[str, float | None] = {}
    elsewhere: bool = False  # its folder is not under the others': its path names it


class _ReportLine(msgspec.Struct, frozen=True):
    """What a list of runs reads in report.json."""

    outcome: str
    job: str
    workers: int | None
    steps: int
    final_loss: float | None
    metrics: dict[str, float | None]
    ended: Annotated[float, msgspec.Meta(ge=0, le=LAST_TIME)] | None = None


def find_run(name: str | None, root: Path = DEFAULT_ROOT) -> RunFolder:
    """The run of this folder, id or beginning of an id; without a name the newest."""
    found = _newest_first(root)
    if name is None:
        if not found:
            raise InputError(f"no runs in {root}", fix="shoal train FILE starts one")
        return RunFolder.open(found[0])
    exact = [path for path in (root / name, Path(name)) if name and _is_run(path)]
    matches = exact[:1] or [path for path in found if name and path.name.startswith(name)]
    if len(matches) == 1:
        return RunFolder.open(matches[0])
    ids = [path.name for path in found]
    if matches:
        raise InputError(f"'{name}' is the beginning of {len(matches)} runs: {_names([p.name for p in matches])}")
    nearest = difflib.get_close_matches(name, ids, n=1)
    there = f"{root} has {_names(ids)}" if ids else f"there are no runs in {root}"
    raise InputError(f"no run '{name}': {there}", fix=f"did you mean {nearest[0]}?" if nearest else None)


def list_runs(root: Path = DEFAULT_ROOT) -> list[RunLine]:
    """All runs, newest first. A run whose files cannot be read is listed without details."""
    lines = [(path, _run_line(RunFolder(path))) for path in _newest_first(root)]
    return [msgspec.structs.replace(line, elsewhere=path.parent != root) for path, line in lines]


def _run_line(folder: RunFolder) -> RunLine:
    line = RunLine(id=folder.id, path=str(folder.path), when=_last_written(folder.path), outcome="unfinished")
    ended = 0.0
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        report = decode_json(folder.report.read_bytes(), _ReportLine)
        ended = report.ended or line.when
        line = msgspec.structs.replace(
            line,
            when=ended,
            outcome=report.outcome,
            job=report.job,
            workers=report.workers,
            steps=report.steps,
            loss=report.final_loss,
            metrics=report.metrics,
        )
    with contextlib.suppress(OSError):
        for text in atomic_write.head_and_tail(folder.events, 64 * 1024):
            with contextlib.suppress(msgspec.MsgspecError):  # a torn line
                event = decode(text)
                if event.time > ended:  # the run was resumed after its report
                    line = _with_event(line, event)
    return line


def _with_event(line: RunLine, event: AnyEvent) -> RunLine:
    change = msgspec.structs.replace
    match event:
        case RunStarted():
            return change(line, outcome="unfinished", when=event.time, job=event.job, workers=event.workers)
        case StepsCommitted():
            loss = event.loss if event.leader else line.loss
            return change(line, outcome="unfinished", when=event.time, steps=max(line.steps, event.step), loss=loss)
        case ModelEvaluated():
            return change(line, when=event.time, metrics=dict(event.metrics))
        case WorkerFinished():
            return change(line, when=event.time, steps=event.step, loss=event.final_loss)
        case RunFinished():
            return change(line, when=event.time, outcome=event.outcome)
    return line


def _metrics_lines(event: AnyEvent) -> list[dict[str, Any]]:
    if isinstance(event, StepsCommitted) and event.leader:
        seconds = event.spent.total
        line = {
            "step": event.step,
            "epoch": event.epoch,
            "time": event.time,
            "loss": event.loss,
            "learning_rate": event.learning_rate,
            **({"losses": event.losses} if event.losses else {}),
            "samples_per_second": event.samples / seconds if seconds else None,
        }
        return [line]
    if isinstance(event, ModelEvaluated):
        return [{"step": event.step, "epoch": event.epoch, "time": event.time, "metrics": event.metrics}]
    if isinstance(event, MetricsLogged):
        rows = event.rows
        return [{"step": row.step, "epoch": row.epoch, "time": row.time, "logged": row.values} for row in rows]
    return []


def _fresh(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for attempt in range(1000):
        path = root / secrets.token_hex(2 if attempt < 100 else 4)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            private_folder.make_private(path)
            return path
    raise FileExistsError(f"no free name among the runs in {root}")


def _is_run(path: Path) -> bool:
    return any(atomic_write.exists(path / name) for name in ("events.jsonl", "report.json", "config.json", "plan.json"))


def _newest_first(root: Path) -> list[Path]:
    """The runs under `root`, and those that were noted there because their folders lie elsewhere."""
    paths = run_index.runs_elsewhere(root)
    with contextlib.suppress(OSError):
        paths += root.iterdir()
    paths = [path for path in paths if _is_run(path)]
    return sorted(paths, key=lambda path: (-_last_written(path), path.name))


def _last_written(path: Path) -> float:
    times = [0.0]
    for name in ("events.jsonl", "report.json", "config.json", "plan.json"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def _names(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    why = error.strerror or str(error)
    return RunFolderError(f"cannot write to {path}: {why}", fix="--run-dir DIR with a folder that can be written to")
