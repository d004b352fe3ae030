"""What goes with parameter servers, told before anything starts. Pure; used by launch and commands.

`--servers 2 --sync stale:3`: how many processes hold the weights, and how they keep workers in step.
"""

from shoal.errors import PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.paramserver.sync_mode import SyncMode

MOST_SERVERS = 256  # a typing mistake above that: every worker speaks with every server


def check_servers(
    servers: int | None, sync_mode: str, *, workers: int, layout: ParallelLayout | None = None
) -> SyncMode | None:
    """The mode that was asked for ("sync" if nobody says one), or None where there are no servers."""
    mode = SyncMode.parse(sync_mode) if sync_mode else None
    if servers is not None and not 0 <= servers <= MOST_SERVERS:
        raise PlanError(f"--servers {servers}: a number from 0 to {MOST_SERVERS:,}", fix="--servers 2, or 0 for none")
    if not servers:
        if mode is not None:
            raise PlanError(
                f"--sync {mode}: it is servers that keep workers in step so, and there are none",
                fix=f"--servers 1 --sync {mode}, or leave --sync out",
            )
        return None
    if layout is not None and layout.sharded:
        raise PlanError(
            f"--servers {servers} and layout {layout}: with servers every worker computes the whole model",
            fix=f"--workers {workers} without a layout, or without --servers",
        )
    mode = mode or SyncMode()
    mode.check_workers(workers)
    return mode


def read_sync_modes(text: str) -> list[SyncMode]:
    """`sync,stale:3,local:16,outer=nesterov`: an option belongs to the mode before it. Each once."""
    parts: list[str] = []
    for part in text.split(","):
        if "=" in part and parts:
            parts[-1] += f",{part.strip()}"
        else:
            parts.append(part.strip())
    modes = [SyncMode.parse(part) for part in parts]
    return list(dict.fromkeys(modes))
