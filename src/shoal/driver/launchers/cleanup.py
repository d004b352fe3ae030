"""Removes what labs leave under /run and in the process table.

The kernel takes a lab's network down with its owner. After kill -9 of the owner, names for `ip netns` are left, and
processes that a program had started in the background. A small record of each lab names its owner.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.driver.launchers.namespaces import MARK, processes_in
from shoal.recovery.membership.process import process_state
from shoal.transport.decoding import decode_json
from shoal.transport.secret_files import write_secret

RECORDS = Path("/run/shoal")  # one small file per lab: its owner and its names
NAMES = Path("/run/netns")  # where `ip netns` looks
GONE_SECONDS = 5.0  # in which a killed process ends


class LabRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: int
    started: str  # when the owner began: a process id may be used again
    names: list[str]


def clean() -> list[str]:
    """Removes what is left of labs whose owner was killed, and returns their ids."""
    found = []
    for path in sorted(RECORDS.glob("lab-*.json")):
        record = _read_record(path)
        if record is None:
            path.unlink(missing_ok=True)
        elif process_state(record.owner, record.started) is None:
            _end_marked(record.id)
            remove_record(record.id)
            found.append(record.id)
    return found


def remove_record(lab: str) -> None:
    """Removes the names, then the record: a process that is killed in between leaves the record for the next one."""
    path = RECORDS / f"lab-{lab}.json"
    record = _read_record(path)
    for name in record.names if record is not None else ():
        if (NAMES / name).is_symlink():
            (NAMES / name).unlink(missing_ok=True)
    _names_file(lab).unlink(missing_ok=True)
    _secret_file(lab).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def end_processes(namespaces: set[int]) -> None:
    """Ends all processes on the lab's hosts, such as those that a program had started in the background."""
    _kill_while(lambda: processes_in(namespaces))


def _end_marked(lab: str) -> None:
    """Ends all processes that have the mark of a lab, where its namespaces are gone."""
    _kill_while(lambda: _marked(lab))


def _kill_while(find: Callable[[], set[int]]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _marked(lab: str) -> set[int]:
    mark = f"{MARK}={lab}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def unused_id() -> str:
    RECORDS.mkdir(parents=True, exist_ok=True)
    while True:
        found = secrets.token_hex(3)
        if not (RECORDS / f"lab-{found}.json").exists():
            return found


def write_record(record: LabRecord) -> None:
    whole = RECORDS / f"lab-{record.id}.json"
    part = whole.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(record))
    part.rename(whole)


def write_names(lab: str, addresses: dict[str, str]) -> str:
    """A file such as /etc/hosts, for the hosts of a lab."""
    known = {"localhost": "127.0.0.1"} | addresses
    # torch asks for the name of an IPv4 address also in its IPv6 form, and warns where there is none.
    lines = [f"{form}{address} {name}" for form in ("", "::ffff:") for name, address in known.items()]
    _names_file(lab).write_text("\n".join(lines) + "\n")
    return str(_names_file(lab))


def write_lab_secret(lab: str) -> str:
    """A file with a secret that all hosts of a lab have: their processes know each other by it."""
    write_secret(_secret_file(lab), secrets.token_hex(32))
    return str(_secret_file(lab))


def _names_file(lab: str) -> Path:
    return RECORDS / f"lab-{lab}.hosts"


def _secret_file(lab: str) -> Path:
    return RECORDS / f"lab-{lab}.secret"


def _read_record(path: Path) -> LabRecord | None:
    try:
        return decode_json(path.read_bytes(), LabRecord)
    except (OSError, msgspec.DecodeError):
        return None
