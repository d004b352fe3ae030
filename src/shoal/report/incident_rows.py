"""Rows of the closing report about incidents, from `report.json` alone."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from shoal.report import human
from shoal.report.human import Report, Row
from shoal.report.incidents import Incident
from shoal.report.wording import full_text, stamp

INCIDENTS_SHOWN = 8


def incident_rows(report: Report) -> Iterator[Row]:
    """A summary, then a row for each incident."""
    incidents = read_incidents(report)
    summary = _summary(report, incidents) if incidents else []
    skipped = report["skipped_steps"]
    if skipped:
        summary.append(f"{human.plural(len(skipped), 'step')} skipped, loss not finite (first: {skipped[0]['step']:,})")
    failed = report["checkpoints_failed"]
    if failed:
        summary.append(f"{human.plural(len(failed), 'checkpoint')} not written ({failed[-1]['reason']})")
    if summary:
        yield "incidents", "; ".join(summary)
    for incident in incidents[:INCIDENTS_SHOWN]:
        yield "", f"{stamp(incident.time)}  {full_text(incident)}"
        if incident.kind in ("lost", "server-lost") and incident.log:
            yield "", f"          its last line: {incident.log[-1].strip()}"
    if len(incidents) > INCIDENTS_SHOWN:
        yield "", f"and {len(incidents) - INCIDENTS_SHOWN} more in report.json"


def read_incidents(report: Report) -> list[Incident]:
    return msgspec.convert(report.get("incidents") or [], list[Incident])


def _summary(report: Report, incidents: list[Incident]) -> list[str]:
    """How many workers and servers were lost, and what it cost in steps, samples and time."""
    count = Counter(incident.kind for incident in incidents)
    committed = report["committed"]
    parts = [f"{human.plural(count['lost'], 'worker')} lost"] if count["lost"] else []
    parts += [f"{count[kind]} {kind}" for kind in ("left", "joined") if count[kind]]
    if count["server-lost"]:
        parts.append(f"{human.plural(count['server-lost'], 'server')} lost")
    if count["regrouped"]:
        parts.append(f"reconnected {human.times_text(count['regrouped'])}")
    parts.append(f"{human.plural(committed['redone'], 'step')} redone")
    if committed["repeated"]:
        rolled_back = [incident.step for incident in incidents if incident.kind == "rolled-back"]
        checkpoint = "the beginning" if rolled_back and not any(rolled_back) else "a checkpoint"
        source = "snapshots of the servers" if count["server-lost"] else checkpoint
        parts.append(f"{human.plural(committed['repeated'], 'committed step')} repeated from {source}")
    if committed["unreported"]:
        parts.append(f"{human.plural(committed['unreported'], 'step')} unreported")
    parts.append(
        f"{human.plural(committed['samples_lost'], 'sample')} lost, {committed['samples_repeated']:,} repeated"
    )
    pushes = sum(incident.pushes_lost for incident in incidents)
    if pushes:
        parts.append(f"{human.plural(pushes, 'acknowledged update')} lost with a server")
    outage = sum(incident.seconds or 0.0 for incident in incidents if incident.kind == "store-outage")
    if count["store-outage"]:
        lasting = f" ({human.duration(outage)})" if outage else ""  # else those that were cut off have not come back
        parts.append(f"store unreachable {human.times_text(count['store-outage'])}{lasting}")
    if count["paused"]:
        parts.append(f"a process stopped {human.times_text(count['paused'])}")
    if count["driver-changed"]:
        parts.append(f"driver replaced {human.times_text(count['driver-changed'])}")
    shares = {name: report[name] for name in ("goodput", "participation") if report[name] is not None}
    share_text = ", ".join(f"{name} {human.precise_percent(share)}" for name, share in shares.items())
    return [", ".join(parts), *([share_text] if share_text else [])]
