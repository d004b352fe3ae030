"""Every error that Shoal raises on purpose.

    ShoalError                  exit code 1
    ├── InputError              2   the user's mistake; nothing was changed
    │   ├── CallError               arguments of a collective that do not fit; no data has moved
    │   ├── JobError                a job that cannot be trained as written
    │   ├── PlanError               a placement that does not fit the job
    │   ├── MemoryNeeded            a worker that has less memory than its share of the training needs
    │   ├── RunFolderError          a run folder that is missing, unwritable or full
    │   └── CheckpointError         a checkpoint that is corrupt, foreign, or of another arithmetic
    ├── RunError                1   a run that failed after it began
    │   ├── WorkerError             a worker raised or died
    │   ├── CollectiveError         a collective that cannot end: a peer died, left, is late, or calls another one
    │   │   └── PeerLost            another rank is gone or late
    │   ├── NonFiniteError          a loss that is not finite
    │   └── MismatchError           workers that should agree do not
    └── Stopped                 3   ended early on request; can be resumed

An error is one sentence that shows both sides, then where it happened, then what to change.
"""

from collections.abc import Sequence


class ShoalError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, where: str | Sequence[str] = (), fix: str | None = None) -> None:
        self.message = message
        self.where = (where,) if isinstance(where, str) else tuple(where)
        self.fix = fix
        super().__init__(message)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.where)]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class InputError(ShoalError):
    exit_code = 2


class CallError(InputError, ValueError, RuntimeError): ...  # gloo raises sometimes ValueError, sometimes RuntimeError


class JobError(InputError): ...


class PlanError(InputError): ...


class MemoryNeeded(InputError):
    needed: int = 0  # bytes, at the least


class RunFolderError(InputError): ...


class CheckpointError(InputError): ...


class RunError(ShoalError): ...


class WorkerError(RunError): ...


class CollectiveError(RunError, RuntimeError): ...  # torch's own collectives raise RuntimeError


class PeerLost(CollectiveError):
    missing: tuple[int, ...] = ()  # ranks that had not come when a group was given up, as its first rank knows it


class NonFiniteError(RunError): ...


class MismatchError(RunError): ...


class Stopped(ShoalError):
    exit_code = 3
