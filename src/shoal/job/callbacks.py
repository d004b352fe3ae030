"""A job's callbacks: what the user's code may look at after each step, and what it may ask for.

    on_step         the step is applied, and its gradients are not cleared yet
    on_evaluate     the job's held-out data was evaluated; the metrics are those of all workers together
    on_checkpoint   a checkpoint is in place, on the worker that wrote it
    on_end          training is over, and the result is on disk

Callbacks change no bits: generators are as before when one returns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.errors import JobError


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """What a callback gets: the values of the last step, and two things to ask for."""

    step: int  # steps applied so far, this one among them
    epoch: int
    loss: float | None  # of the whole batch, the same on all workers; None: not finite
    learning_rate: float | None  # that this step used, of the optimizer's first group
    metrics: Mapping[str, float | None]  # of the last evaluation; empty before the first one
    model: nn.Module  # to look at; where the layout shards the model, what this worker holds of it
    worker: int
    leader: bool  # True on one worker
    checkpoint: Path | None = None  # in `on_checkpoint`
    stopped: str | None = None  # in `on_end`: why training ended before its last step
    read_gradients: Callable[[], Mapping[str, Tensor]] = dict
    read_gradient_norm: Callable[[], float | None] = lambda: None
    log_value: Callable[[str, float], None] = lambda name, value: None
    stop_training: Callable[[str], None] = lambda reason: None

    @cached_property
    def gradients(self) -> Mapping[str, Tensor]:
        """In `on_step`: the gradients that the optimizer used, by name; of what this worker holds."""
        return self.read_gradients()

    @cached_property
    def gradient_norm(self) -> float | None:
        """In `on_step`: the norm of the whole gradient before it was clipped. None where the layout shards the model
        and the job does not clip: no worker knows it then."""
        return self.read_gradient_norm()

    def log(self, name: str, value: Any) -> None:
        """Writes a number of the user's own (a tensor of one element, too) to metrics.jsonl, the report, the live view
        and the loggers; None is left out. What several workers log is written once, as the leader has it."""
        if value is None:
            return
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise JobError(f"info.log({name!r}, …): {type(value).__name__} is no number", fix="a number") from None
        self.log_value(str(name), number)

    def stop(self, reason: str) -> None:
        """Ends training for good, with its result written. On all workers: after this step; they must decide alike,
        from values that all have. On the leader alone: after the next step, which brings the decision to the others."""
        self.stop_training(reason)


class Callback:
    """Override what is needed. The object lives in each worker process: what it keeps does not come back to the
    caller of `shoal.train`.

    A callback that has to remember something through kills and `--resume` returns it from `state_dict`, and runs on
    all workers: any of them may be the one that is left.
    """

    on_all_workers = False  # True: called on every worker; False: on the leader alone

    def on_step(self, info: StepInfo) -> None:
        return

    def on_evaluate(self, info: StepInfo) -> None:
        return

    def on_checkpoint(self, info: StepInfo) -> None:
        return

    def on_end(self, info: StepInfo) -> None:
        return

    def state_dict(self) -> dict[str, Any]:
        """Numbers, text, None, tensors, and lists, tuples and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises JobError for what is no callback."""
    example = "class Watch(shoal.Callback): def on_step(self, info): …"
    if not isinstance(callbacks, list | tuple):
        kind = type(callbacks).__name__
        raise JobError(f"callbacks must be a list of callbacks, not {kind}", fix="callbacks=[Watch()]")
    for place, each in enumerate(callbacks):
        if isinstance(each, type):
            raise JobError(f"callbacks[{place}] is the class {each.__name__}", fix=f"an instance: {each.__name__}()")
        if not isinstance(each, Callback):
            raise JobError(f"callbacks[{place}] is {type(each).__name__}, not a shoal.Callback", fix=example)
        if type(each).state_dict is not Callback.state_dict and not each.on_all_workers:
            raise JobError(
                f"callbacks[{place}], {type(each).__name__}, keeps a state on the leader alone, and is lost with it",
                fix=f"on_all_workers = True in class {type(each).__name__}",
            )
