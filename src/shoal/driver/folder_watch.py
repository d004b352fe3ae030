"""Notices that a run's folder was deleted or moved while the run goes on: nothing of its result could be kept."""

import os
import time
from pathlib import Path

from shoal.errors import RunFolderError

LOOK_SECONDS = 0.2


class FolderWatch:
    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the user's code may change the working folder
        self._identity = _identity(self.path)
        self._looked_at = 0.0
        self._gone = False

    def gone(self, *, now: bool = True) -> bool:
        """`now`: looks at once, else a few times a second. A disk that does not answer for a while has not gone."""
        if not self._gone and (now or time.monotonic() - self._looked_at >= LOOK_SECONDS):
            self._looked_at = time.monotonic()
            try:
                self._gone = _identity(self.path) != self._identity
            except (FileNotFoundError, NotADirectoryError):
                self._gone = True
            except OSError:
                return False
        return self._gone

    def error(self) -> RunFolderError:
        return RunFolderError(
            f"the run ends: its folder {self.path} was deleted or moved while it ran",
            where="what was trained since its last copy is lost: workers have nowhere to write",
            fix="train again, or --resume a copy of the folder",
        )


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
