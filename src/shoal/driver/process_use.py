"""What the kernel shows of the processes of a run: their processor time and memory, and whether they are connected."""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ESTABLISHED = "01"


@dataclass(frozen=True)
class ProcessUsage:
    cpu_seconds: float  # since it began, its own threads together
    memory_bytes: int  # resident


def read_usage(pid: int) -> ProcessUsage | None:
    """None: the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return ProcessUsage((int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE_BYTES)


def are_connected(pids: Collection[int]) -> bool:
    """Whether any two of these processes have a TCP connection with each other, as those of a gloo group have."""
    ends = {pid: set(_connections(pid)) for pid in pids}
    return any(
        (there, here) in ends[other] for pid in pids for here, there in ends[pid] for other in pids if other != pid
    )


def _connections(pid: int) -> Iterator[tuple[str, str]]:
    """Both ends of each of its TCP connections, the own one first."""
    own = _sockets(pid)
    for family in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED and fields[9] in own:
                    yield _end(fields[1]), _end(fields[2])


def _sockets(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _end(text: str) -> str:
    """An address and port as the kernel writes them; an IPv4 address in its IPv6 form is the same one."""
    address, _, port = text.partition(":")
    return f"{address[-8:]}:{port}"
