"""What a user sees of the workers' logs: new lines while the run goes on, and the last lines of a lost worker."""

import os
import re
from contextlib import suppress
from pathlib import Path

from shoal.worker.elastic_membership import LOG_ONLY
from shoal.worker.main import TRACEBACK_FOLLOWS
from shoal.worker.start import PROCESS_LINE

TORCH_NOISE = re.compile(  # stays in the log
    r"(\[rank\d+\]:)?\[[WE]\d{4} \S+ \w+\.cpp:\d+\]|Exception raised from \S+ at|frame #\d+: |"
    + (OMITTED := "<omitting ")
)
LAST_BYTES = 1 << 14  # of the end of a log in which its last lines are looked for
LAST_LINES = 5  # of a lost worker that the report shows


class LogTail:
    """Lines that a worker has added to its log since the last look, up to a traceback, which stays in the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial = ""
        self.ended = False
        self.omitted = False  # the last line ended a stack of torch's

    def reopen(self) -> None:
        """Another process writes to the log now."""
        self.ended = False

    def lines(self) -> list[str]:
        try:
            size = self.path.stat().st_size
            if self.ended or size <= self.offset:
                return []
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                found = file.read(1 << 20)
        except OSError:
            return []
        self.offset += len(found)
        *whole, self.partial = (self.partial + found.decode(errors="replace")).split("\n")
        if TRACEBACK_FOLLOWS in whole:
            self.ended = True
            whole = whole[: whole.index(TRACEBACK_FOLLOWS)]
        return [line for line in whole if self._is_for_users(line)]

    def _is_for_users(self, line: str) -> bool:
        after, self.omitted = self.omitted, line.startswith(OMITTED)  # torch leaves a line empty there
        return not (line.startswith(LOG_ONLY) or TORCH_NOISE.match(line) or (after and not line))


def last_lines(log: Path) -> list[str]:
    with suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if not line.startswith(PROCESS_LINE)][-LAST_LINES:]
    return []
