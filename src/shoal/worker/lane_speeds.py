"""How fast the workers compute their lanes: watched for some steps, then lanes may be assigned anew."""

REASSIGN_STEPS = 10  # steps that are watched before lanes are assigned anew
MIN_SPEEDUP = 0.3  # lanes move away from a slow worker if that makes steps this much shorter


class LaneSpeeds:
    """Compute seconds of every worker, by step. All workers have the same numbers, so all decide alike."""

    def __init__(self) -> None:
        self._seconds: list[list[float]] = []

    def clear(self) -> None:
        self._seconds.clear()

    def add(self, seconds: list[float]) -> list[float] | None:
        """Adds a step. Returns each worker's median after every `REASSIGN_STEPS` steps, else None."""
        self._seconds.append(seconds)
        if len(self._seconds) < REASSIGN_STEPS:
            return None
        medians = [sorted(times)[len(times) // 2] for times in zip(*self._seconds, strict=True)]
        self._seconds.clear()
        return medians
