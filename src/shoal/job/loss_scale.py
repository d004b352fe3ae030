"""The loss scale of fp16: settings that belong to the job, and the state that a run carries from step to step.

Gradients below 6e-8 are zero in fp16, so the loss is multiplied before its backward pass and the gradients are divided
after the ordered reduce. Powers of two keep every bit. If the sums are not finite the update is left out and the scale
falls; after many good updates it rises. All workers have the same sums, so all decide alike.
"""

import math
from dataclasses import dataclass
from typing import Any

from shoal.errors import JobError

SMALLEST_SCALE = 2.0**-14  # a gradient that is not finite at this scale is not finite at any


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """In the words, and with the defaults, of `torch.amp.GradScaler`."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for name, low, high in (
            ("init_scale", 0.0, math.inf),
            ("growth_factor", 1.0, math.inf),
            ("backoff_factor", 0.0, 1.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not (low < value <= high or (name == "growth_factor" and value == low)):
                bounds = "a number above 0" if name == "init_scale" else f"a number from {low:g} to {high:g}"
                raise JobError(f"loss_scale: {name}={value!r} must be {bounds}", fix="LossScale(init_scale=2**16)")
        interval = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise JobError(f"loss_scale: growth_interval={interval!r} must be a whole number from 1 up")

    @classmethod
    def parse(cls, given: Any) -> "LossScale | None":
        """A number is a scale that stays."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            return cls(init_scale=float(given), growth_factor=1.0, backoff_factor=1.0)
        raise JobError(
            f"loss_scale={given!r} must be a number, which stays, or a shoal.LossScale",
            fix="loss_scale=1024, or loss_scale=shoal.LossScale(growth_interval=500)",
        )


class LossScaler:
    """The scale of the step to come, and what decides the next one. Saved in checkpoints, sent to replacements."""

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = float(settings.init_scale)
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0  # updates left out so far

    def update(self, overflowed: bool) -> bool:
        """After a step: the scale of the next one. True: the scale has changed."""
        before = self.scale
        if overflowed:
            self.scale *= self.settings.backoff_factor
            self.good_steps = 0
            self.skipped += 1
            return self.scale != before
        self.good_steps += 1
        if self.good_steps >= self.settings.growth_interval:
            self.good_steps = 0
            grown = self.scale * self.settings.growth_factor
            self.scale = grown if grown <= 2.0**127 else self.scale  # beyond that it is infinite in fp32
        return self.scale != before

    @property
    def exhausted(self) -> bool:
        """No smaller scale would help."""
        return self.scale < min(SMALLEST_SCALE, self.settings.init_scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps, self.skipped = state["scale"], state["good_steps"], state["skipped"]
