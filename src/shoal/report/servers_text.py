"""Lines of the closing report about parameter servers, from `report.json` alone. Used by `closing_report`."""

from collections.abc import Iterator, Mapping

from shoal.report import human
from shoal.report.human import Report, Row
from shoal.report.live_view import histogram
from shoal.report.servers import GRADIENT_REFUSALS

_MODES = {
    "quorum": "a step is closed without late workers",
    "stale": "gradients are applied as they arrive",
    "async": "gradients are applied as they arrive",
    "local": "workers train alone between two averages",
    "groups": "gradients of groups are applied as they arrive",
}

_CAUSES = {"late": "late", "lease": "of steps already done", "nonfinite": "not finite"}


def why_not_exact(sync_mode: str) -> str:
    reason = _MODES.get(sync_mode.partition(":")[0], "workers are not in step")
    return f"{sync_mode}: {reason}; another run can give other weights"


def servers(report: Report) -> Iterator[Row]:
    found = report.get("servers")
    if not found:
        return
    mode = f", {found['sync_mode']}" if found["sync_mode"] else ""
    parts = [] if found["updates_per_second"] is None else [f"{human.rate(found['updates_per_second'])} updates/s"]
    stale = found["staleness"]
    if stale:
        parts.append(f"staleness {stale['mean']:.2f} on average, at most {stale['max']}")
    if not parts:
        parts = ["they reported nothing"]
    yield "servers", f"{human.plural(found['servers'], 'server')}{mode}: {', '.join(parts)}"
    busy = [human.percent(each["busy"]) for each in found["per_server"] if each["busy"] is not None]
    work = [f"busy {' '.join(busy)} of the time"] if busy else []
    if found["bytes_in"] or found["bytes_out"]:
        work.append(f"{human.size(found['bytes_in'])} in, {human.size(found['bytes_out'])} out")
    if found["held_bytes"]:
        work.append(f"{human.size(found['held_bytes'])} of values and optimizer state")
    if work:
        yield "", ", ".join(work)
    for name, table in found["tables"].items():
        hot = ""
        if table["hottest"] and table["ranges"] > 1:
            hot = f", the hottest of {table['ranges']} ranges got {human.percent(table['hottest'])} of the accesses"
        yield "", f"table {name}: {table['rows']:,} rows{hot}"
    refused = {why: number for why, number in found["refused"].items() if why in GRADIENT_REFUSALS}
    if refused:
        yield "refused", _refused(refused, found["refused_share"])


def _refused(causes: Mapping[str, int], share: float | None) -> str:
    total = sum(causes.values())
    of = "" if share is None else f" ({100 * share:.1f} %)"
    if list(causes) == ["late"]:
        return f"{human.plural(total, 'late gradient')}{of}"
    parts = [f"{number:,} {_CAUSES.get(why, f'with a wrong {why}')}" for why, number in causes.items()]
    return f"{human.plural(total, 'gradient')}{of}: {', '.join(parts)}"


def staleness(report: Report) -> Iterator[Row]:
    """A histogram of the versions between a gradient's pull and its push."""
    stale = (report.get("servers") or {}).get("staleness")
    if not stale:
        return
    for number, line in enumerate(histogram({int(value): times for value, times in stale["histogram"].items()})):
        yield "" if number else "staleness", line


def server_rows(report: Report) -> Iterator[Row]:
    for number, each in enumerate((report.get("servers") or {}).get("per_server") or []):
        parts = [] if each["load"] is None else [f"{human.percent(each['load'])} of the load"]
        parts += [] if each["busy"] is None else [f"busy {human.percent(each['busy'])} of the time"]
        if each["held_bytes"]:
            parts.append(f"holds {human.size(each['held_bytes'])}, peak memory {human.size(each['peak_bytes'])}")
        parts += [f"restarted {human.times_text(each['restarts'])}"] if each["restarts"] else []
        yield "" if number else "a server", f"{each['shard']}: {', '.join(parts) or 'nothing reported'}"
