"""What the user should know of the arithmetic of this job, said once: it is in the closing report as a note."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.job.mean_counts import UNEVEN_MEANS, LaneCounts, MeanWatch, batch_length
from shoal.parallel.sync_batchnorm import SyncedBatchNorm

Closure = Callable[[Any], Any]


def batch_norm_note(model: nn.Module, batch: int, lanes: int, microbatches: int) -> str | None:
    """How many samples the statistics of batch norm are of, where those are not the whole batch."""
    size = batch // (lanes * microbatches)
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and not isinstance(each, SyncedBatchNorm)]
    if size == batch or not any(each.training for each in norms):
        return None
    what = "lane" if microbatches == 1 else "microbatch of a lane"
    return f"batch norm sees {size} of {batch} samples: a {what}; sync_batchnorm=True for all of them"


class UnchangedWeights:
    """Notices a loop of the user's own that forgets its optimizer's step."""

    STEPS = (1, 8)  # between which some weight changes

    def __init__(self) -> None:
        self._first: int | None = None

    def look(self, step: int, digest: Callable[[], int]) -> str | None:
        """After each step; `digest`: of all weights that are trained."""
        if step == self.STEPS[0]:
            self._first = digest()
        if step != self.STEPS[1] or self._first is None or digest() != self._first:
            return None
        return (
            f"no weight has changed from step {self.STEPS[0]} to {self.STEPS[1]}: does the loop call optimizer.step()?"
        )


class TrainingNotes:
    """`lane_counts`: of the job's own loss; a loop's closure is watched here."""

    def __init__(self, lane_counts: LaneCounts | None) -> None:
        self.lane_counts = lane_counts or LaneCounts()
        self._watches = lane_counts is None
        self.unchanged = UnchangedWeights()
        self._said: set[str] = set()

    def watch(self, closure: Closure, model: nn.Module) -> Closure:
        """The closure of a loop, watched for what its loss is a mean over. One that runs compiled code is left alone:
        it would be compiled again for that."""
        if not self._watches or not self.lane_counts.looking or _is_compiled(model):
            return closure
        self.lane_counts.begin()

        def watched(batch: Any) -> Any:
            if not self.lane_counts.looking:
                return closure(batch)
            with MeanWatch() as watch:
                found = closure(batch)
            self.lane_counts.add(watch.count_of(found), batch_length(batch))
            return found

        return watched

    def new(self, batch_norm: Callable[[], str | None]) -> list[str]:
        """What has not been said yet. `batch_norm`: asked once."""
        found = []
        if not self._said:
            self._said.add("batch norm")
            found = [batch_norm()]
        if self.lane_counts.uneven and UNEVEN_MEANS not in self._said:
            self._said.add(UNEVEN_MEANS)
            found.append(UNEVEN_MEANS)
        return [text for text in found if text is not None]


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None for each in model.modules()
    )
