"""Logs for TensorBoard, into the run's folder."""

from collections.abc import Mapping
from typing import Any

from shoal.report.loggers.logger import LoggedRun, missing_package


class TensorBoardLogger:
    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", error, "pip install 'shoal[tensorboard]'") from error
        self._kind = SummaryWriter
        self._writer: SummaryWriter | None = None

    def begin(self, run: LoggedRun) -> None:
        """Hides values after the checkpoint from which the run resumed: they come again."""
        purge = None if run.resumed_from is None else run.resumed_from + 1
        self._writer = self._kind(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, report: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.close()
