"""Totals of parameter servers in a run, from their events and the workers'. Pure; part of the tally."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.report.events import AnyEvent, PushesLost, ServerReported, ServersRolledBack, ServerStarted
from shoal.report.human import rounded

# Reasons to refuse a gradient. Requests refused for other reasons are repeated.
GRADIENT_REFUSALS = ("late", "lease", "nonfinite", "shape", "dtype", "key", "row", "codec")
_BYTES = ("bytes_in", "bytes_out", "held_bytes", "peak_bytes")


class ServerTally:
    def __init__(self) -> None:
        self.count = 0  # how many the run should have
        self.started: dict[int, ServerStarted] = {}  # shard -> its newest process
        self.reports: dict[int, ServerReported] = {}  # shard -> its last report
        self.restarts: Counter[int] = Counter()  # shard -> processes after its first
        self.pushes_lost: Counter[int] = Counter()  # shard -> acknowledged updates that it lost, as workers report
        self.repeated = 0  # steps after rollbacks of all servers
        self._since: dict[int, float] = {}  # shard -> start of its first process
        self._versions: Counter[int] = Counter()  # shard -> the version that it last reported
        self._updates_lost: Counter[int] = Counter()  # shard -> reported updates that its next process lacked
        self._generation = 0
        self._repeated = 0  # in this generation

    def add(self, event: AnyEvent) -> None:
        match event:
            case ServerStarted():
                self.count = max(self.count, event.shards)
                known = self.started.get(event.shard)
                if known is not None and known.pid != event.pid:
                    self.restarts[event.shard] += 1
                    if event.step < 0:  # in lockstep workers repeat them
                        self._updates_lost[event.shard] += max(0, self._versions[event.shard] - event.version)
                self._versions[event.shard] = event.version
                self._since.setdefault(event.shard, event.time)
                self.started[event.shard] = event
            case ServerReported():
                self.reports[event.shard] = event
                self._versions[event.shard] = event.version
            case PushesLost():
                self.pushes_lost[event.shard] += event.number
            case ServersRolledBack() if event.generation >= self._generation:
                # Every worker reports the rollback; the one that was furthest is right.
                before = self._repeated if event.generation == self._generation else 0
                self._generation, self._repeated = event.generation, max(before, event.repeated)
                self.repeated += self._repeated - before

    def lost(self, shard: int) -> int:
        """Acknowledged updates that the server lost; at least so many, since lost workers do not report theirs."""
        return max(self.pushes_lost[shard], self._updates_lost[shard])

    @property
    def updates(self) -> int:
        return max((each.updates for each in self.reports.values()), default=0)

    @property
    def staleness(self) -> dict[int, int]:
        """Versions between a gradient's pull and its push -> pushes, of all servers."""
        found: Counter[int] = Counter()
        for each in self.reports.values():
            found.update(each.staleness)
        return dict(sorted(found.items()))

    @property
    def refused(self) -> dict[str, int]:
        """Reason -> gradients. Every server gets a slice of each gradient, so the largest count is taken."""
        found: dict[str, int] = {}
        for each in self.reports.values():
            for why, number in each.refused.items():
                found[why] = max(found.get(why, 0), number)
        return dict(sorted(found.items()))

    def busy(self, shard: int) -> float | None:
        """The share of its time in which a server worked."""
        report, since = self.reports.get(shard), self._since.get(shard)
        if report is None or since is None or report.time <= since:
            return None
        return min(1.0, report.busy_seconds / (report.time - since))

    @property
    def seconds(self) -> float:
        """From the first start of a server to the last report of one."""
        times = [each.time for each in self.reports.values()]
        return max(0.0, max(times) - min(self._since.values())) if times and self._since else 0.0

    def summarize(self, *, sync_mode: str, steps: int, seconds: float, contributed: int) -> dict[str, Any] | None:
        """For report.json; None without servers. `contributed`: gradients of workers that were applied."""
        if not self.count and not self.reports:
            return None
        if not steps:  # workers of a script report no steps
            steps, seconds = self.updates, self.seconds
            contributed = steps
        number = self._steps_per_update(sync_mode)
        refused = self.refused
        per_server = [self._server(shard) for shard in sorted(self.started.keys() | self.reports.keys())]
        lost = sum(number for why, number in refused.items() if why in GRADIENT_REFUSALS)
        return {
            "sync_mode": sync_mode or None,
            "servers": self.count or len(self.reports),
            "updates": self.updates,
            "updates_per_second": rounded(math.ceil(steps / number) / seconds) if seconds else None,
            "staleness": summarize_histogram(self.staleness),
            "refused": refused,
            "refused_share": rounded(lost / (lost + contributed)) if lost + contributed else None,
            "duplicates": sum(each.duplicates for each in self.reports.values()),
            "pushes_lost": sum(each["pushes_lost"] for each in per_server),
            "steps_repeated": self.repeated,
            "restarts": sum(self.restarts.values()),
            **{name: sum(getattr(each, name) for each in self.reports.values()) for name in _BYTES},
            "tables": self._tables(),
            "per_server": per_server,
        }

    @staticmethod
    def _steps_per_update(sync_mode: str) -> float:
        """In local:16 workers push every 16 steps."""
        name, _, number = sync_mode.partition(",")[0].partition(":")
        return float(number) if name == "local" and number else 1.0

    def _server(self, shard: int) -> dict[str, Any]:
        started, report = self.started.get(shard), self.reports.get(shard)
        loads: dict[int, float] = {number: each.bytes_in + each.bytes_out for number, each in self.reports.items()}
        if not any(loads.values()):
            loads = {number: each.busy_seconds for number, each in self.reports.items()}
        total = sum(loads.values())
        return {
            "shard": shard,
            "host": started.host if started else "",
            "pid": started.pid if started else None,
            "addresses": list(started.addresses) if started else [],
            "load": rounded(loads.get(shard, 0) / total) if total else None,  # of bytes moved, else of time busy
            "busy": rounded(self.busy(shard)),
            **{name: getattr(report, name) if report else 0 for name in ("updates", *_BYTES)},
            "restarts": self.restarts[shard],
            "pushes_lost": self.lost(shard),
        }

    def _tables(self) -> dict[str, dict[str, Any]]:
        """Sparse tables: rows held, and the share of accesses to the hottest range of rows."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted({name for each in self.reports.values() for name in each.rows}):
            touches = [touch for each in self.reports.values() for touch in each.row_loads.get(name, ())]
            total = sum(touches)
            found[name] = {
                "rows": sum(each.rows.get(name, 0) for each in self.reports.values()),
                "touches": rounded(total),
                "hottest": rounded(max(touches) / total) if total else None,
                "ranges": len(touches),
            }
        return found


def summarize_histogram(histogram: Mapping[int, int]) -> dict[str, Any] | None:
    """Mean, median and maximum of a histogram (value -> how often), and the histogram; None if it is empty."""
    number = sum(histogram.values())
    if not number:
        return None
    reached, median = 0, 0
    for value, times in sorted(histogram.items()):
        reached += times
        if 2 * reached >= number:
            median = value
            break
    return {
        "mean": rounded(sum(value * times for value, times in histogram.items()) / number),
        "median": median,
        "max": max(value for value, times in histogram.items() if times),
        "histogram": {str(value): times for value, times in sorted(histogram.items())},
    }
