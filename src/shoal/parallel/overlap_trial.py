"""Whether it pays to reduce during the backward pass: tried in the first steps, since links, cores and model decide it
together. On fast links the reduction is mostly work of the cores that the backward pass needs, too.

    step   0  1 │ 2  3  4  5 │ 6 │ 7  8  9  10 │ 11 …
           on   │ on         │ off   off       │ as was faster
           warm │ timed      │   │ timed       │

Both ways give the same bits. All workers begin a trial in the same step, and the first worker's times decide for all.
"""

import statistics

WARM_UP, TIMED = 2, 4  # steps
GAIN = 0.02  # of a step's time, from which on the reduction waits for the end of the backward pass
_SWITCH = WARM_UP + TIMED
_END = _SWITCH + 1 + TIMED


class OverlapTrial:
    def __init__(self) -> None:
        self.overlapping = True
        self._step = -1  # the one under way
        self._began = 0.0
        self._seconds: list[float] = []  # by step

    def begin_step(self, now: float) -> None:
        if self._step >= 0:
            self._seconds.append(now - self._began)
        self._step, self._began = self._step + 1, now
        if self._step == _SWITCH:
            self.overlapping = False

    @property
    def due(self) -> bool:
        """Whether it is decided in this step, with `decide`."""
        return self._step == _END

    def times(self) -> tuple[float, float]:
        """Seconds of a step with overlap and without."""
        with_overlap, without = self._seconds[WARM_UP:_SWITCH], self._seconds[_SWITCH + 1 : _END]
        return statistics.median(with_overlap), statistics.median(without)

    def decide(self, times: tuple[float, float]) -> None:
        """With the first worker's times."""
        with_overlap, without = times
        self.overlapping = without > (1 - GAIN) * with_overlap
