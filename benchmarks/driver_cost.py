"""What watching a run costs: the driver's own CPU time, and the speed with the live view on a terminal and without."""

import os
import threading
import time
from pathlib import Path

import msgspec

from cases import Case
from contenders import Measured, forked, scratch_folder, shoal_with


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    samples_per_second: float
    step_ms: float
    driver_share_of_a_core: float  # the driver's CPU seconds over the seconds of the whole run, start and end included


def watched(case: Case, *, live: bool) -> Watched:
    """A run in a process of its own: with `live` its stderr is a terminal, so it draws as it would for a person."""
    with scratch_folder() as folder:
        ours, theirs = os.openpty()
        reader = threading.Thread(target=_drain, args=(ours,))
        reader.start()  # a terminal that nobody reads would stop the driver
        try:
            forked(1, lambda rank: _drive(case, live, theirs, folder / "watched"))
        finally:
            os.close(theirs)
            reader.join()
            os.close(ours)
        return msgspec.json.decode((folder / "watched").read_bytes(), type=Watched)


def _drive(case: Case, live: bool, terminal: int, note: Path) -> None:
    os.dup2(terminal, 2)
    os.environ["TERM"] = "xterm"
    began, busy = time.perf_counter(), time.process_time()  # of this process alone, to the microsecond
    measured: Measured = shoal_with(case, workers=2, lanes=2, quiet=not live)
    share = (time.process_time() - busy) / (time.perf_counter() - began)
    found = Watched(
        samples_per_second=measured.samples_per_second,
        step_ms=1000 * case.batch / measured.samples_per_second,
        driver_share_of_a_core=share,
    )
    note.write_bytes(msgspec.json.encode(found))


def _drain(terminal: int) -> None:
    while True:
        try:
            if not os.read(terminal, 1 << 16):
                return
        except OSError:  # the last writer has closed it
            return
