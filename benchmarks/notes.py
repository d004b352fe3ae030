"""What a worker of any contender says while it is being killed, and what follows from it. The standard library only:
peers import it in environments of their own."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STARTED, COMMITTED, DROPPED = "started", "committed", "dropped"


@dataclass(frozen=True, kw_only=True)
class Note:
    time: float
    kind: str
    worker: int
    pid: int = 0
    step: int = 0  # number of committed steps
    group: int = 0  # rises whenever the workers come together anew
    members: int = 0  # how many took part in the step
    redone: int = 0  # steps that the group did again before this one


class Notebook:
    """A worker's own file: a line for each note, there at once."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.worker = worker
        self._file = open(folder / f"notes-{worker}.jsonl", "a", buffering=1)

    def write(self, kind: str, **rest: int) -> None:
        note = Note(time=time.time(), kind=kind, worker=self.worker, **rest)
        self._file.write(json.dumps(asdict(note)) + "\n")


class Tail:
    """Whole lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> list[bytes]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                found = file.read()
        except FileNotFoundError:
            return []
        whole = found[: found.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kill, and how long it was felt: seconds since just before the signal was sent."""

    worker: int
    next_commit: float  # a step that nobody had committed before
    all_back: float  # a step in which as many took part as before
    repeated: int  # steps that had been done, or begun, and were done again
    dropped: int  # steps that came to nothing, with the samples they saw


def judge(notes: Sequence[Note], *, worker: int, at: float, group: int, workers: int) -> Fault | None:
    """`group`: the one that was hit. None while not everybody is back."""
    before = max((note.step for note in notes if note.kind == COMMITTED and note.group <= group), default=0)
    after = [note for note in notes if note.kind == COMMITTED and note.group > group and note.time > at]
    new = [note for note in after if note.step > before]
    whole = [note for note in after if note.members == workers]
    if not new or not whole:
        return None
    first = min(after, key=lambda note: note.time)
    next_commit = min(note.time for note in new)
    dropped = sum(note.kind == DROPPED and at < note.time <= next_commit for note in notes)
    return Fault(
        worker=worker,
        next_commit=next_commit - at,
        all_back=min(note.time for note in whole) - at,
        repeated=max(0, before + 1 - first.step) + first.redone,
        dropped=dropped,
    )
