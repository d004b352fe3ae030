"""Random slowness of workers: factors on a worker's time, 1 for normal speed. Seeded.

    constant        every worker always has normal speed
    normal:0.1      1 + 0.1 z, at least 0.1                 lognormal:0.1   e^(0.1 z − 0.1²/2), of mean 1
    exponential:0.1 1 + a tail of mean 0.1                  slow:3          worker 0 always takes 3 times as long

Every worker draws anew for every step.
"""

from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from shoal.errors import InputError

DISTRIBUTIONS = ("constant", "normal", "lognormal", "exponential", "slow")
MIN_FACTOR = 0.1  # of a normal draw


@dataclass(frozen=True, kw_only=True)
class StragglerModel:
    name: str = "constant"
    size: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "StragglerModel":
        """Parses `lognormal:0.1`."""
        name, colon, size = text.strip().partition(":")
        if name not in DISTRIBUTIONS:
            near = get_close_matches(name, DISTRIBUTIONS, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {_forms()}"
            raise InputError(f"there is no distribution {name!r}", fix=fix)
        if name == "constant":
            if colon:
                raise InputError(f"{text!r}: constant takes no number", fix=f"one of {_forms()}")
            return cls()
        try:
            value = float(size)
        except ValueError:
            raise InputError(f"{text!r}: {name} needs a number, not {size!r}", fix=f"one of {_forms()}") from None
        if not 0 <= value < float("inf") or (name == "slow" and value < 1):
            raise InputError(f"{text!r}: {value:g} is below {1 if name == 'slow' else 0}", fix=f"one of {_forms()}")
        return cls(name=name, size=value)

    def __str__(self) -> str:
        return self.name if self.name == "constant" else f"{self.name}:{self.size:g}"

    @property
    def even(self) -> bool:
        """Whether all workers always have the same speed."""
        return self.name == "constant" or self.size == (1.0 if self.name == "slow" else 0.0)

    def draw(self, workers: int, times: int, random: np.random.Generator) -> np.ndarray:
        """Factors, `[worker, time]`."""
        shape = (workers, times)
        if self.name == "normal":
            return np.asarray(np.maximum(MIN_FACTOR, 1 + self.size * random.standard_normal(shape)))
        if self.name == "lognormal":
            return np.asarray(np.exp(self.size * random.standard_normal(shape) - self.size**2 / 2))
        if self.name == "exponential":
            return np.asarray(1 + self.size * random.standard_exponential(shape))
        found = np.ones(shape)
        if self.name == "slow":
            found[0] = self.size
        return found


def _forms() -> str:
    return "constant, normal:0.1, lognormal:0.1, exponential:0.1, slow:3"
