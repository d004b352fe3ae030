"""Writes a cluster as the file that `read_cluster` reads: reading it gives the same value. Pure."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import groupby
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack
from shoal.planner.cluster.units import exact_text

Table = dict[str, Any]  # of TOML values: text, numbers, booleans, lists, tables
USUAL_UPLINK: Table = {"oversubscription": 1}
REACHED = (
    *(("efficiency", None), ("half_flops", "flops"), ("stream", None), ("overhead", "latency")),
    *(("reserved", "size"), ("crowded", None)),
)


def cluster_text(cluster: Cluster) -> str:
    """Writes each property once, where it holds: for all hosts, for a rack, or for a host."""
    hosts = cluster.hosts
    common = _shared(hosts)
    hosts_table = {key: value for key, value in common.items() if key in ("device", "devices", "workers")}
    lines = [line for device in _devices(hosts) for line in _section(f"devices.{_key(device.name)}", _device(device))]
    lines += _section("hosts", hosts_table)
    for name, key in (("inside", "inside"), ("socket", "socket"), ("host", "link")):
        lines += _section(f"links.{name}", common.get(key, {}))
    uplink = _uplink(cluster.racks[0])
    lines += _section("links.rack", {} if uplink == USUAL_UPLINK else uplink)
    for _, alike in groupby(enumerate(cluster.racks), key=lambda each: _rack_kind(*each)):
        lines += _racks(list(alike), common, uplink)
    return "\n".join(lines).strip() + "\n"


def _devices(hosts: Iterable[ClusterHost]) -> list[Device]:
    found: dict[str, Device] = {}
    for host in hosts:
        if host.device is not None and found.setdefault(host.device.name, host.device) != host.device:
            raise InputError(f"two devices are named {host.device.name}", fix="a different name for each")
    return list(found.values())


def _rack_kind(number: int, rack: Rack) -> Any:
    """Equal for racks that one table with a count describes; a rack with names of its own equals only itself."""
    usual = rack.name == f"r{number}" and all(host.name == f"{rack.name}h{n}" for n, host in enumerate(rack.hosts))
    if not usual:
        return rack.name
    return (rack.uplink, tuple(json.dumps(_host(host), sort_keys=True) for host in rack.hosts))


def _racks(alike: Sequence[tuple[int, Rack]], common: Table, uplink: Table) -> list[str]:
    number, rack = alike[0]
    table: Table = {"count": len(alike)} if len(alike) > 1 else {}
    table |= {"name": rack.name} if rack.name != f"r{number}" else {}
    here = {key: value for key, value in _shared(rack.hosts).items() if key not in common}
    table |= here
    if _uplink(rack) != uplink:
        table["uplink"] = _uplink(rack)
    usual = all(host.name == f"{rack.name}h{number}" for number, host in enumerate(rack.hosts))
    left = [{key: value for key, value in _host(host).items() if key not in common and key not in here}
            for host in rack.hosts]  # fmt: skip
    if not any(left):
        table["hosts"] = len(rack.hosts) if usual else [host.name for host in rack.hosts]
        return _section("[racks]", table)
    lines = _section("[racks]", table)
    for host, own in zip(rack.hosts, left, strict=True):
        lines += _section("[racks.hosts]", {"name": host.name, **own})
    return lines


def _shared(hosts: Sequence[ClusterHost]) -> Table:
    """The properties that all hosts share."""
    tables = [_host(host) for host in hosts]
    found = {key: value for key, value in tables[0].items() if all(table.get(key) == value for table in tables)}
    if any(table.get(key) != found.get(key) for table in tables for key in ("inside", "socket")):
        found = {key: value for key, value in found.items() if key not in ("inside", "socket")}  # both or neither
    return found


def _host(host: ClusterHost) -> Table:
    table: Table = {} if host.device is None else {"device": host.device.name}
    table |= {"devices": host.devices, "workers": host.workers, "link": _link(host.link, host.cards, "network")}
    return table | (_inside(host.interconnect) if host.interconnect and host.devices > 1 else {})


def _inside(inside: HostInterconnect) -> Table:
    table: Table = {"inside": {"kind": inside.kind, **_link(inside.link)}}
    table["inside"] |= {"shared": True} if inside.shared else {}
    if inside.between is not None:
        table["socket"] = {"sockets": inside.sockets, **_link(inside.between)}
    return table


def _link(link: ClusterLink, cards: int = 1, kind: str = "bandwidth") -> Table:
    one = link.bytes_per_second / cards
    near = (one, math.nextafter(one, 0), math.nextafter(one, math.inf))
    one = next((speed for speed in near if speed * cards == link.bytes_per_second), one)
    table: Table = {"bandwidth": exact_text(one, kind)} | ({"cards": cards} if cards > 1 else {})
    if link.latency_seconds is not None:
        table["latency"] = exact_text(link.latency_seconds, "latency")
    return table | ({"efficiency": link.efficiency} if link.efficiency != 1 else {})


def _uplink(rack: Rack) -> Table:
    """Uses the ratio to the links of the hosts, if that is exact to the last bit, else the bandwidth."""
    table = _link(rack.uplink, kind="network")
    below, ratio = sum(host.link.bytes_per_second for host in rack.hosts), round(rack.oversubscription, 6)
    if ratio and below / ratio == rack.uplink.bytes_per_second:
        table = {"oversubscription": int(ratio) if ratio == int(ratio) else ratio, **table}
        del table["bandwidth"]
    if rack.uplink.efficiency == min(host.link.efficiency for host in rack.hosts):
        table.pop("efficiency", None)
    else:
        table["efficiency"] = rack.uplink.efficiency
    return table


def _device(device: Device) -> Table:
    table: Table = {
        "peak": {dtype: exact_text(peak, "rate") for dtype, peak in device.peak.items()},
        "memory": exact_text(device.memory, "size"),
        "memory_bandwidth": exact_text(device.memory_bandwidth, "bandwidth"),
    }
    if device.price is not None:
        table["price"] = f"{Decimal(repr(float(device.price))):f} {device.currency}/h".replace(".0 ", " ")
    for name, kind in REACHED:
        value = getattr(device, name)
        if (name, value) != ("crowded", 1.0):
            table[name] = value if kind is None else exact_text(value, kind)
    if device.rates:
        table["rates"] = {name: exact_text(rate, "operators") for name, rate in device.rates.items()}
    return table


def _section(name: str, table: Mapping[str, Any]) -> list[str]:
    if not table and name != "[racks]":
        return []
    deep = name.startswith("devices") and "rates" in table
    flat = {key: value for key, value in table.items() if not (deep and key == "rates")}
    lines = ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in flat.items())]
    return lines + (_section(f"{name}.rates", table["rates"]) if deep else [])


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # text, numbers and booleans are the same in TOML
