"""What the driver writes down and shows: every event, the prediction, and the report at the end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shoal.driver import outcome
from shoal.driver.launch_spec import LaunchSpec
from shoal.errors import ShoalError
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.aggregate import RunTally
from shoal.report.events import (
    AnyEvent,
    LoggerFailed,
    RunFinished,
    RunPredicted,
    RunResumed,
    SaveFailed,
    decode,
    encode,
)
from shoal.report.loggers.log_stream import LogStream
from shoal.report.loggers.logger import LoggedRun, open_loggers
from shoal.report.progress import Progress, choose_progress
from shoal.report.run_folder import RunFolder
from shoal.report.summarize import summarize_run
from shoal.transport.decoding import decode_json
from shoal.worker.event_channel import UNDELIVERED
from shoal.worker.run_config import RunConfig


class RunRecorder:
    """Adds each event to the tally, the run's folder, the loggers and the screen; then calls the observers with it."""

    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig, tally: RunTally | None = None) -> None:
        """`tally`: of the same run, which goes on with another layout."""
        self.launch, self.folder, self.config = launch, folder, config
        self.tally = RunTally() if tally is None else tally
        self.observers: list[Callable[[AnyEvent], None]] = []
        self.restoring = False  # observers get events that another driver has acted on
        self.prediction: Mapping[str, Any] | None = None
        output = config.output
        loggers = [*open_loggers(output.loggers), *launch.loggers]
        self._log = LogStream(loggers, self._logged_run(), resumed=launch.resumed, failed=self._logger_failed)
        self.progress: Progress = choose_progress(Console(stderr=True), quiet=output.quiet, plain=output.plain)
        self._written_before: set[bytes] = set()  # by another driver: workers may send some of these events again

    def emit(self, event: AnyEvent) -> None:
        self.tally.add(event)
        self.folder.append_event(event)
        self._log.add(event)
        self.progress.show(event, self.tally)
        if isinstance(event, RunResumed):
            self.write_files()
        for observe in self.observers:
            observe(event)

    def restore(self) -> None:
        """Reads the events and the prediction that another driver wrote."""
        self.restoring = True
        for event in self.folder.read_events():
            self.tally.add(event)
            self._written_before.add(encode(event))
            for observe in self.observers:
                observe(event)
        self.restoring = False
        with suppress(OSError, msgspec.MsgspecError):
            self.prediction = decode_json(self.folder.prediction.read_bytes(), dict[str, Any])

    def undelivered(self, process: WorkerId | None = None, number: int | None = None) -> Iterator[AnyEvent]:
        """Takes the events that workers wrote down while no driver read them: all of them, those of one process, or
        those in one of its files."""
        name = "*" if process is None else f"{process.worker}.{process.incarnation}.*"
        if process is not None and number is not None:
            name = f"{process.worker}.{process.incarnation}.{number}"
        found: list[AnyEvent] = []
        for path in self.folder.path.glob(f"{UNDELIVERED}{name}.taken"):  # of a driver that was killed while it read
            found += _take(path)
        for path in self.folder.path.glob(f"{UNDELIVERED}{name}.jsonl"):
            with suppress(OSError):
                found += _take(path.rename(path.with_suffix(".taken")))
        for event in sorted(found, key=lambda event: event.time):
            if encode(event) not in self._written_before:
                yield event

    def write_files(self) -> None:
        for path, value in self.launch.files.items():
            self.folder.write_json(path, value)
        if self.prediction is not None:
            self.folder.write_json(self.folder.prediction, self.prediction)

    def record_prediction(self, now: bool = False) -> None:
        """Writes the prediction of the run as soon as it is known. `now`: waits for it. A failed write is no error."""
        if self.launch.prediction is None or self.prediction is not None:
            return
        found = self.launch.prediction(now)
        if found is None:
            return
        self.prediction = found
        if not self.launch.resumed or self.tally.resumed is not None:
            with suppress(OSError, ShoalError):
                self.folder.write_json(self.folder.prediction, found)
        seconds, rate = found["seconds"], found["samples_per_second"]
        reason = found["reason"] or ""
        self.emit(RunPredicted(cluster=found["cluster"], step_seconds=seconds, samples_per_second=rate, reason=reason))

    def report(self, ended: str) -> dict[str, Any]:
        """Writes the report and returns it."""
        self.record_prediction(now=True)
        value = summarize_run(
            self.tally,
            outcome=ended,
            target=self.launch.target,
            failure=outcome.first_cause(self.tally) if ended == "failed" else None,
            folder=str(self.folder.path),
            files=self.folder.files(),
            prediction=self.prediction,
        )
        # The lanes of a script that joined are known from its workers' ranges.
        value["lanes"] = value["lanes"] or max((stop for _, stop in value["assignment"]), default=0)
        self.emit(RunFinished(outcome=ended))
        if ended == "failed" and self.launch.resumed and self.tally.resumed is None:
            return value  # nothing was trained: the former report stays
        try:
            self.folder.write_json(self.folder.report, value)
        except (OSError, ShoalError) as error:
            self.emit(SaveFailed(step=self.tally.step, reason=f"report.json: {error}"))
        self._log.finish(value)
        return value

    def _logged_run(self) -> LoggedRun:
        record = self.launch.files.get(self.folder.config, {})
        fields = {**record.get("job", {}), **{name: record[name] for name in ("script", "arguments") if name in record}}
        started = self.launch.started
        config = {**fields, "workers": started.workers, "layout": started.layout}
        return LoggedRun(id=self.folder.id, job=started.job, folder=self.folder.path, config=config)

    def _logger_failed(self, name: str, reason: str) -> None:
        self.emit(LoggerFailed(logger=name, reason=reason))

    def close(self) -> None:
        self.progress.close()
        self._log.finish({})  # of a run that goes on with another layout


def _take(path: Path) -> list[AnyEvent]:
    """The events of a file, which is removed."""
    found: list[AnyEvent] = []
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found.append(decode(line))
        path.unlink()
    return found
