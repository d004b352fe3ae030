"""What `shoal cluster show` prints: a cluster as a tree, its tiers, and where it is narrow; or all presets."""

import textwrap
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from shoal.planner.cluster import (
    Cluster,
    ClusterHost,
    ClusterLink,
    Device,
    LinkTier,
    Rack,
    bandwidth_text,
    bytes_text,
    find_cluster,
    flops_text,
    latency_text,
    presets,
    tiers,
)
from shoal.planner.cluster.library import device_tables
from shoal.planner.cluster.presets import is_preset, preset_note
from shoal.report.human import columns, plural

BETWEEN = {"inside": "devices of a host", "socket": "sockets of a host", "host": "hosts of a rack", "rack": "racks"}
HALF = "bf16"
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class BandwidthBottleneck:
    """The link where a device has the least bandwidth while all send."""

    tier: str
    bytes_per_second: float
    ratio: float | None  # the bandwidth of the tier below over this one's; None: the lowest tier
    sentence: str


# -- decisions --------------------------------------------------------------------------------------------------------


def narrowest(cluster: Cluster) -> BandwidthBottleneck | None:
    """The tier with the least bandwidth per device, of equal ones the nearest; None for a single device."""
    found = tiers(cluster)
    if not found:
        return None
    tier = min(found, key=lambda each: each.shared_bandwidth)
    place = found.index(tier)
    ratio = found[place - 1].shared_bandwidth / tier.shared_bandwidth if place else None
    less = "" if ratio is None else f", {_times(ratio)} less than between {_near(cluster, found[place - 1])}"
    sentence = f"{_cause(cluster, tier)}: {_speed(tier.shared_bandwidth)} a device while all send{less}"
    return BandwidthBottleneck(tier=tier.name, bytes_per_second=tier.shared_bandwidth, ratio=ratio, sentence=sentence)


def _cause(cluster: Cluster, tier: LinkTier) -> str:
    if tier.name == "rack":
        rack = min(cluster.racks, key=_uplink_each)
        over = rack.oversubscription
        more = f", {over:.3g}:1 oversubscribed" if over > 1 else ""
        return f"the uplink of rack {rack.name}, {bandwidth_text(rack.uplink.bytes_per_second)}{more}"
    hosts = [host for host in cluster.hosts if host.devices > 1] if tier.name != "host" else cluster.hosts
    if tier.name == "host":
        host = min(hosts, key=lambda each: each.link.bytes_per_second / each.devices)
        shared = f", which {plural(host.devices, 'device')} share" if host.cards < host.devices else ""
        return f"the link of host {host.name}, {_cards(host)}{shared}"
    host = hosts[0]
    if host.interconnect is None:
        return f"the memory of host {host.name}, which the file does not describe (a guess)"
    if tier.name == "socket" and host.interconnect.between is not None:
        return f"the link between the sockets of host {host.name}, {_speed(host.interconnect.between.bytes_per_second)}"
    near = host.devices // host.interconnect.sockets
    shared = f", which {plural(near, 'device')} share" if host.interconnect.shared else ""
    speed = _speed(host.interconnect.link.bytes_per_second)
    return f"{host.interconnect.kind} inside host {host.name}, {speed}{shared}"


def _uplink_each(rack: Rack) -> float:
    return rack.uplink.bytes_per_second / sum(host.devices for host in rack.hosts)


def _near(cluster: Cluster, tier: LinkTier) -> str:
    sockets = tier.name == "inside" and any(host.interconnect and host.interconnect.between for host in cluster.hosts)
    return "devices of a socket" if sockets else BETWEEN[tier.name]


# -- text -------------------------------------------------------------------------------------------------------------


def text(cluster: Cluster, name: str) -> str:
    return "\n".join([*_heading(cluster, name), "", *_tree(cluster), "", *_table(cluster), "", *_ending(cluster, name)])


def _heading(cluster: Cluster, name: str) -> list[str]:
    hosts = cluster.hosts
    words = [plural(len(cluster.racks), "rack")] if len(cluster.racks) > 1 else []
    words += [plural(len(hosts), "host"), plural(cluster.devices, "device")]
    lines = [f"{name}   {', '.join(words)}"]
    if all(host.device is not None for host in hosts):
        flops = sum(host.devices * host.device.peak_of(_dtype(host.device)) for host in hosts if host.device)
        memory = sum(host.devices * host.device.memory for host in hosts if host.device)
        dtypes = {_dtype(host.device) for host in hosts if host.device}
        lines[0] += f": {flops_text(flops)} {' and '.join(sorted(dtypes))}, {bytes_text(memory)}"
        prices = [None if host.device is None or host.device.price is None else host.devices * host.device.price
                  for host in hosts]  # fmt: skip
        money = {host.device.currency for host in hosts if host.device}
        if None not in prices and len(money) == 1:
            lines[0] += f", {sum(price or 0 for price in prices):,.6g} {money.pop()} an hour"
    if is_preset(name) and preset_note(name):
        lines.append(preset_note(name))
    return lines


def _tree(cluster: Cluster) -> list[str]:
    """One branch for equal racks, and one for equal hosts."""
    groups = list(_alike(cluster.racks, _rack_kind))
    lines = ["spine"] if len(cluster.racks) > 1 else []
    for number, racks in enumerate(groups):
        branch, beside = ("└─ ", "   ") if number == len(groups) - 1 else ("├─ ", "│  ")
        if len(cluster.racks) == 1:
            branch = beside = ""
        lines += _rack_lines(racks, branch, beside, alone=len(cluster.racks) == 1)
    return lines


def _rack_lines(racks: Sequence[Rack], branch: str, beside: str, *, alone: bool) -> list[str]:
    rack = racks[0]
    over = rack.oversubscription
    mark = f", {over:.3g}:1 oversubscribed  ◄ narrow" if over > 1 else ", as much as its hosts have"
    uplink = "the only one: its uplink is not in use" if alone else f"uplink {rack.uplink}{mark}"
    lines = [f"{branch}{_named('rack', [each.name for each in racks])}   {uplink}"]
    groups = list(_alike(rack.hosts, _kind))
    for number, hosts in enumerate(groups):
        last = number == len(groups) - 1
        lines.append(f"{beside}{'└─ ' if last else '├─ '}{_host_line(hosts, alone and len(rack.hosts) == 1)}")
        lines += [f"{beside}{'   ' if last else '│  '}{line}" for line in _host_lines(hosts[0])]
    return lines


def _host_line(hosts: Sequence[ClusterHost], alone: bool) -> str:
    host = hosts[0]
    latency = "" if host.link.latency_seconds is None else f", {latency_text(host.link.latency_seconds)}"
    shared = host.cards < host.devices
    mark = f", shared by {host.devices} devices  ◄ narrow" if shared and not alone else ""
    link = "the only one: its link is not in use" if alone else f"link {_cards(host)}{latency}{mark}"
    return f"{_named('host', [each.name for each in hosts])}   {link}"


def _host_lines(host: ClusterHost) -> Iterator[str]:
    inside = host.interconnect
    if inside is not None and host.devices > 1:
        near = host.devices // inside.sockets
        where = plural(near, "device") + (f" on each of {inside.sockets} sockets" if inside.between else "")
        each = f", shared by {where}  ◄ narrow" if inside.shared and near > 1 else f", for each of {where}"
        yield f"├─ {inside.kind} {_fast(inside.link)}{each}"
        if inside.between is not None:
            shared = f", shared by {near} devices on each side  ◄ narrow" if near > 1 else ""
            yield f"├─ between sockets {_fast(inside.between)}{shared}"
    workers = "" if host.workers == host.devices else f", {plural(host.workers, 'worker')}"
    what = plural(host.devices, "device") if host.device is None else _device(host.device, host.devices)
    yield f"└─ {what}{workers}"


def _device(device: Device, count: int) -> str:
    dtype = _dtype(device)
    price = "" if device.price is None else f", {device.price:g} {device.currency}/h"
    memory = f"{bytes_text(device.memory)} at {_speed(device.memory_bandwidth)}"
    return f"{count} × {device.name}   {flops_text(device.peak_of(dtype))} {dtype}, {memory}{price}"


def _table(cluster: Cluster) -> list[str]:
    found = tiers(cluster)
    if not found:
        return ["one device: no links"]
    worst = min(found, key=lambda tier: tier.shared_bandwidth)
    rows = [("between", "devices", "latency", "one alone", "all at once", "large messages", "")]
    last: LinkTier | None = None
    for tier in found:
        ratio = "" if last is None else "no less"
        if last is not None and tier.shared_bandwidth < last.shared_bandwidth:
            ratio = f"{_times(last.shared_bandwidth / tier.shared_bandwidth)} less"
        mark = "  ◄ narrowest" if tier is worst and len(found) > 1 else ""
        rows.append((
            _near(cluster, tier), f"{tier.size:,}", latency_text(tier.latency), _speed(tier.single_bandwidth),
            _speed(tier.shared_bandwidth),
            f"reach {tier.efficiency:.0%}".replace("%", " %"), f"{ratio}{mark}",
        ))  # fmt: skip
        last = tier
    return columns(rows, right=range(1, len(rows[0]) - 1), gap="   ")


def _ending(cluster: Cluster, name: str) -> list[str]:
    found = narrowest(cluster)
    lines = [] if found is None else [f"narrowest: {found.sentence}"]
    size = f" --hosts {len(cluster.hosts)}" if is_preset(name) and len(cluster.hosts) > 1 else ""
    return [*lines, f"next: shoal plan FILE --cluster {name}{size}"]


def presets_text() -> str:
    """One line each."""
    rows = []
    for name in presets():
        host = find_cluster(name).hosts[0]
        device = "" if host.device is None else host.device.name
        between = host.interconnect
        inside = f"{between.kind} {_speed(between.link.bytes_per_second)}" if between else ""
        rows.append((name, f"{host.devices} × {device}", inside, _cards(host), preset_note(name)))
    rows.insert(0, ("preset", "a host has", "inside", "network", ""))
    known = textwrap.wrap("devices for a file: " + ", ".join(device_tables()), 118, break_on_hyphens=False)
    return "\n".join([*columns(rows, gap="   "), "", *known, "", "next: shoal cluster show dgx-a100 --hosts 4"])


# -- JSON -------------------------------------------------------------------------------------------------------------


def value(cluster: Cluster, name: str) -> dict[str, Any]:
    devices = {host.device.name: host.device for host in cluster.hosts if host.device}
    found = narrowest(cluster)
    return {
        "cluster": name,
        "hosts": len(cluster.hosts),
        "devices": cluster.devices,
        "workers": cluster.workers,
        "kinds": {name: asdict(device) for name, device in devices.items()},
        "racks": [_rack_value(racks) for racks in _alike(cluster.racks, _rack_kind)],
        "tiers": [asdict(tier) for tier in tiers(cluster)],
        "narrowest": None if found is None else asdict(found),
    }


def _rack_value(racks: Sequence[Rack]) -> dict[str, Any]:
    hosts = [
        {
            "names": [host.name for host in same],
            "device": same[0].device.name if same[0].device else None,
            "devices": same[0].devices,
            "workers": same[0].workers,
            "cards": same[0].cards,
            "link": asdict(same[0].link),
            "inside": asdict(same[0].interconnect) if same[0].interconnect else None,
        }
        for same in _alike(racks[0].hosts, _kind)
    ]
    return {
        "names": [rack.name for rack in racks],
        "uplink": asdict(racks[0].uplink),
        "oversubscription": racks[0].oversubscription,
        "hosts": hosts,  # of the first one; the others have as many
    }


def presets_value() -> list[dict[str, Any]]:
    found = []
    for name in presets():
        host = find_cluster(name).hosts[0]
        device = host.device.name if host.device else None
        inside = asdict(host.interconnect) if host.interconnect else None
        links = {"link": asdict(host.link), "cards": host.cards, "inside": inside}
        found.append({"name": name, "device": device, "devices": host.devices, **links, "note": preset_note(name)})
    return found


# -- words ------------------------------------------------------------------------------------------------------------


def _alike(items: Sequence[Item], kind: Callable[[Item], Hashable]) -> Iterator[list[Item]]:
    """Runs of neighbouring items of one kind."""
    for _, run in groupby(items, key=kind):
        yield list(run)


def _kind(host: ClusterHost) -> ClusterHost:
    return replace(host, name="", rack="")


def _rack_kind(rack: Rack) -> Hashable:
    return rack.uplink, tuple(map(_kind, rack.hosts))


def _named(word: str, names: Sequence[str]) -> str:
    return f"{word} {names[0]}" if len(names) == 1 else f"{len(names)} {word}s {names[0]} … {names[-1]}"


def _cards(host: ClusterHost) -> str:
    one = bandwidth_text(host.link.bytes_per_second / host.cards)
    return one if host.cards == 1 else f"{host.cards} × {one}"


def _fast(link: ClusterLink) -> str:
    latency = "" if link.latency_seconds is None else f", {latency_text(link.latency_seconds)}"
    return f"{_speed(link.bytes_per_second)}{latency}"


def _speed(bytes_per_second: float) -> str:
    """Three figures, in bytes."""
    return bytes_text(float(f"{bytes_per_second:.3g}"), "/s")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} ×" if ratio >= 10 else f"{ratio:.2g} ×"


def _dtype(device: Device) -> str:
    return HALF if HALF in device.peak else next(iter(device.peak))
