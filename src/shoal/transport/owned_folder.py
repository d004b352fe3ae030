"""Temporary folders that do not outlive their owners: /tmp/shoal-<what>.<random>.

The owner, and every process that it forks, holds a lock on the folder, which the kernel releases with the last of them,
also after kill -9. The next folder's maker removes those that nobody holds.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

KEEP = ".keep"  # in a folder that stays when its owner ends: an error named it
TRIES = 100


class OwnedFolder:
    def __init__(self, what: str) -> None:
        """`what`: a word in the folder's name."""
        remove_orphans()
        self._descriptor = -1
        for _ in range(TRIES):
            self.path = Path(tempfile.mkdtemp(prefix=f"shoal-{what}."))
            self._descriptor = _lock(self.path)
            if self._descriptor >= 0 and self.path.exists():  # else another process took it for one that nobody holds
                return
            self._release()
        raise OSError(f"no temporary folder could be held in {tempfile.gettempdir()}")

    def keep(self) -> None:
        """The folder stays, for the user to look into."""
        (self.path / KEEP).touch()
        self._release()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_orphans() -> list[Path]:
    """Removes this user's folders that no living process holds, and returns them."""
    removed = []
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob("shoal-*.*"):
            with suppress(OSError):
                if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
                    continue
                if (path / KEEP).exists() or (descriptor := _lock(path)) < 0:
                    continue
                try:
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
                finally:
                    os.close(descriptor)
    return removed


def _lock(path: Path) -> int:
    """A descriptor that holds the folder's lock; -1: another process has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
