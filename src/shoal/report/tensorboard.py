"""Writes the numbers of `metrics.jsonl` for TensorBoard. Optional."""

from typing import TYPE_CHECKING

from shoal.errors import InputError
from shoal.report.events import TIME_PARTS, AnyEvent, ModelEvaluated, RunResumed, StepsCommitted
from shoal.report.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    def __init__(self, folder: RunFolder) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                f"--tensorboard needs the package tensorboard, which is missing ({error})",
                fix="pip install 'shoal[tensorboard]'",
            ) from error
        self.path = folder.path / "tensorboard"
        self.error: str | None = None  # a full disk ends this writing, not the run
        self._kind = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._closed = False

    def add(self, event: AnyEvent) -> None:
        if self.error is not None or self._closed:
            return
        try:
            match event:
                case RunResumed(step=step) if self._writer is None:
                    self._open(purge_step=step + 1)
                case StepsCommitted(leader=True):
                    self._add_steps(event)
                case ModelEvaluated():
                    for name, number in event.metrics.items():
                        self._scalar(f"evaluation/{name}", number, event.step, event.time)
        except OSError as error:
            self.error = str(error)

    def close(self) -> None:
        writer, self._writer, self._closed = self._writer, None, True
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self.error = str(error)

    def _add_steps(self, event: StepsCommitted) -> None:
        self._scalar("training/loss", event.loss, event.step, event.time)
        if event.learning_rate is not None:
            self._scalar("training/learning rate", event.learning_rate, event.step, event.time)
        if event.spent.total:
            self._scalar("speed/samples per second", event.samples / event.spent.total, event.step, event.time)
        for part in TIME_PARTS:
            ms = 1000 * getattr(event.spent, part) / event.count
            self._scalar(f"step ms/{part}", ms, event.step, event.time)

    def _scalar(self, name: str, number: float | None, step: int, when: float) -> None:
        writer = self._writer or self._open(purge_step=None)
        writer.add_scalar(name, float("nan") if number is None else number, step, walltime=when)

    def _open(self, *, purge_step: int | None) -> "SummaryWriter":
        """`purge_step` hides values after the checkpoint from which the run resumed."""
        self._writer = self._kind(str(self.path), purge_step=purge_step)
        return self._writer
