"""Logs for TensorBoard, into the run's folder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.report.loggers.logger import LoggedRun, require_package

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    def __init__(self) -> None:
        require_package("tensorboard", "pip install 'shoal[tensorboard]'")
        self._writer: SummaryWriter | None = None

    def begin(self, run: LoggedRun) -> None:
        """Hides values after the checkpoint from which the run resumed: they come again."""
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resumed_from is None else run.resumed_from + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, report: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.close()
