"""The report of a run, as `shoal.train` returns it."""

import copy
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from shoal.errors import InputError
from shoal.job.job import Job
from shoal.numerics.seeds import initialise
from shoal.recovery.checkpoint.export import load_weights
from shoal.recovery.checkpoint.state import restore_weights


class Report:
    """The report of one run. `.value` is the content of report.json; common values are properties."""

    def __init__(self, folder: Path, value: dict[str, Any], *, job: Job | None) -> None:
        self.folder = folder
        self.value = value
        self._job = job

    @property
    def weights_sha256(self) -> str:
        return str(self.value["weights_sha256"])

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.value["metrics"])

    @property
    def steps(self) -> int:
        return int(self.value["steps"])

    @property
    def samples(self) -> int:
        return int(self.value["samples"])

    @property
    def seconds(self) -> float:
        return float(self.value["seconds"])

    @property
    def final_loss(self) -> float | None:
        loss = self.value["final_loss"]
        return None if loss is None else float(loss)

    @property
    def exact(self) -> bool:
        return bool(self.value["exact"])

    def model(self, weights: Literal["model", "best", "ema"] = "model") -> nn.Module:
        """The trained model, on the CPU: as it was at the end, at its best evaluation (`keep_best`), or averaged
        (`ema`). Its tables have the rows that the run's servers held."""
        if self._job is None:
            raise InputError("this run had no job to build its model from", fix="load model.safetensors yourself")
        given = self._job.model
        # A copy of an instance: the job keeps its initial weights.
        model = copy.deepcopy(given) if isinstance(given, nn.Module) else initialise(given, self._job.seed)
        loaded, aliases = load_weights(self.folder / f"{weights}.safetensors")
        restore_weights(model, loaded, aliases)
        if (self.folder / "tables").is_dir():
            from shoal.worker.server_worker.table_rows import attach_rows

            attach_rows(model, self.folder, self._job.seed)
        return model

    def rows(self, table: str) -> tuple[Tensor, Tensor]:
        """The trained rows of a sparse table: their ids, ascending, and the rows."""
        from shoal.worker.server_worker.table_rows import rows_of_run

        return rows_of_run(self.folder, table)

    def __repr__(self) -> str:
        return f"Report({self.folder}, {self.steps} steps, sha256 {self.weights_sha256[:8]}…)"
