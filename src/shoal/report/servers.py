"""What parameter servers did in a run, added up from what they and the workers say. Pure; part of the tally."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from shoal.report.events import PushesLost, ServerLost, ServerReported, ServersRolledBack, ServerStarted

# Why gradients are refused; for other causes it is requests, which are made again.
GRADIENT_REFUSALS = ("late", "lease", "nonfinite", "shape", "dtype", "key", "row", "codec")
ServerEvent = ServerStarted | ServerLost | PushesLost | ServersRolledBack | ServerReported


class ServerTally:
    def __init__(self) -> None:
        self.count = 0  # as many as there should be
        self.started: dict[int, ServerStarted] = {}  # shard -> its process that was started last
        self.reports: dict[int, ServerReported] = {}  # shard -> its last word
        self.restarts: Counter[int] = Counter()  # shard -> processes after its first
        self.pushes_lost: Counter[int] = Counter()  # shard -> acknowledged updates that it did not have any more
        self.repeated = 0  # steps that were done again because all went back to one that each still had
        self._since: dict[int, float] = {}  # shard -> when its first process was started
        self._versions: Counter[int] = Counter()  # shard -> updates that it last told of
        self._updates_lost: Counter[int] = Counter()  # shard -> updates that it had told of and came back without
        self._generation = 0
        self._repeated = 0  # of this epoch

    def add(self, event: ServerEvent) -> None:
        match event:
            case ServerStarted():
                self.count = max(self.count, event.shards)
                known = self.started.get(event.shard)
                if known is not None and known.pid != event.pid:
                    self.restarts[event.shard] += 1
                    if event.step < 0:  # in lockstep they are done again
                        self._updates_lost[event.shard] += max(0, self._versions[event.shard] - event.version)
                self._versions[event.shard] = event.version
                self._since.setdefault(event.shard, event.time)
                self.started[event.shard] = event
            case ServerReported():
                self.reports[event.shard] = event
                self._versions[event.shard] = event.version
            case PushesLost():
                self.pushes_lost[event.shard] += event.number
            case ServersRolledBack() if (
                event.generation >= self._generation
            ):  # every worker tells of it; who was furthest is right
                before = self._repeated if event.generation == self._generation else 0
                self._generation, self._repeated = event.generation, max(before, event.repeated)
                self.repeated += self._repeated - before

    def lost(self, shard: int) -> int:
        """Updates that it acknowledged and does not have; at least so many. Workers that are lost themselves do not
        tell of theirs."""
        return max(self.pushes_lost[shard], self._updates_lost[shard])

    @property
    def updates(self) -> int:
        return max((each.updates for each in self.reports.values()), default=0)

    @property
    def staleness(self) -> dict[int, int]:
        """Versions between a gradient's basis and its push -> pushes, of all servers."""
        found: Counter[int] = Counter()
        for each in self.reports.values():
            found.update(each.staleness)
        return dict(sorted(found.items()))

    @property
    def refused(self) -> dict[str, int]:
        """Why -> gradients. A gradient has a part for every server, so the one that refused most says how many."""
        found: dict[str, int] = {}
        for each in self.reports.values():
            for why, number in each.refused.items():
                found[why] = max(found.get(why, 0), number)
        return dict(sorted(found.items()))

    def busy(self, shard: int) -> float | None:
        """The share of its time in which a server had something to do."""
        served, since = self.reports.get(shard), self._since.get(shard)
        if served is None or since is None or served.time <= since:
            return None
        return min(1.0, served.busy_seconds / (served.time - since))

    @property
    def seconds(self) -> float:
        """From the first start of one to the last word of one."""
        times = [each.time for each in self.reports.values()]
        return max(0.0, max(times) - min(self._since.values())) if times and self._since else 0.0

    def summarize(self, *, sync_mode: str, steps: int, seconds: float, contributed: int) -> dict[str, Any] | None:
        """For report.json. `steps`: done in `seconds`; `contributed`: gradients that workers say were taken. None:
        there were no servers."""
        if not self.count and not self.reports:
            return None
        if not steps:  # a script's: only the servers know
            steps, seconds = self.updates, self.seconds
            contributed = steps
        number = self._steps_per_update(sync_mode)
        refused = self.refused
        per_server = [self._server(shard) for shard in sorted(self.started.keys() | self.reports.keys())]
        lost = sum(number for why, number in refused.items() if why in GRADIENT_REFUSALS)
        return {
            "mode": sync_mode or None,
            "servers": self.count or len(self.reports),
            "updates": self.updates,
            "updates_per_second": _rounded(math.ceil(steps / number) / seconds) if seconds else None,
            "staleness": summarize_histogram(self.staleness),
            "refused": refused,
            "refused_share": _rounded(lost / (lost + contributed)) if lost + contributed else None,
            "duplicates": sum(each.duplicates for each in self.reports.values()),
            "pushes_lost": sum(each["pushes_lost"] for each in per_server),
            "steps_repeated": self.repeated,
            "restarts": sum(self.restarts.values()),
            "bytes_in": sum(each.bytes_in for each in self.reports.values()),
            "bytes_out": sum(each.bytes_out for each in self.reports.values()),
            "held_bytes": sum(each.held_bytes for each in self.reports.values()),
            "peak_bytes": sum(each.peak_bytes for each in self.reports.values()),
            "tables": self._tables(),
            "per_server": per_server,
        }

    @staticmethod
    def _steps_per_update(sync_mode: str) -> float:
        """In local:16 servers are asked every 16 steps."""
        name, _, number = sync_mode.partition(",")[0].partition(":")
        return float(number) if name == "local" and number else 1.0

    def _server(self, shard: int) -> dict[str, Any]:
        started, served = self.started.get(shard), self.reports.get(shard)
        loads: dict[int, float] = {number: each.bytes_in + each.bytes_out for number, each in self.reports.items()}
        if not any(loads.values()):
            loads = {number: each.busy_seconds for number, each in self.reports.items()}
        whole = sum(loads.values())
        return {
            "shard": shard,
            "host": started.host if started else "",
            "pid": started.pid if started else None,
            "addresses": list(started.addresses) if started else [],
            "load": _rounded(loads.get(shard, 0) / whole) if whole else None,  # of bytes moved, else of time busy
            "busy": _rounded(self.busy(shard)),
            "updates": served.updates if served else 0,
            "bytes_in": served.bytes_in if served else 0,
            "bytes_out": served.bytes_out if served else 0,
            "held_bytes": served.held_bytes if served else 0,
            "peak_bytes": served.peak_bytes if served else 0,
            "restarts": self.restarts[shard],
            "pushes_lost": self.lost(shard),
        }

    def _tables(self) -> dict[str, dict[str, Any]]:
        """Sparse tables: rows held, and how much of what was asked for went to the hottest range of rows."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted({name for each in self.reports.values() for name in each.rows}):
            touches = [touch for each in self.reports.values() for touch in each.row_loads.get(name, ())]
            whole = sum(touches)
            found[name] = {
                "rows": sum(each.rows.get(name, 0) for each in self.reports.values()),
                "touches": _rounded(whole),
                "hottest": _rounded(max(touches) / whole) if whole else None,
                "ranges": len(touches),
            }
        return found


def summarize_histogram(histogram: Mapping[int, int]) -> dict[str, Any] | None:
    """Mean, median and most of a histogram (value -> how often), with it."""
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
        "mean": _rounded(sum(value * times for value, times in histogram.items()) / number),
        "median": median,
        "max": max(value for value, times in histogram.items() if times),
        "histogram": {str(value): times for value, times in sorted(histogram.items())},
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
