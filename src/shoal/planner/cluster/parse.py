"""A cluster file becomes a checked value. Pure.

    [devices.a100]                  # or a device that has a name already: shoal cluster show lists them
    peak = { bf16 = "312 TFLOP/s", fp32 = "19.5 TFLOP/s" }
    memory = "80 GB"
    memory_bandwidth = "2039 GB/s"
    price = "2.5 USD/h"             # optional, as are efficiency, half_flops, stream, overhead, reserved

    [hosts]                         # holds for every host
    device = "a100"
    devices = 8
    workers = 8                     # worker processes (as many as devices)

    [links.inside]                  # between the devices of a host
    kind = "nvlink"                 # or pcie, memory, xgmi
    bandwidth = "300 GB/s"          # of one device, one direction
    shared = false                  # true: all devices (of a socket) share one such link

    [links.socket]                  # optional: the devices are spread over sockets with a link between them
    sockets = 2
    bandwidth = "40 GB/s"

    [links.host]                    # between a host and its rack's switch
    bandwidth = "200 Gbit/s"        # of one network card
    cards = 8                       # (1)
    latency = "15 us"               # optional, for every link
    efficiency = 0.9                # optional, for every link: what large messages reach (1)

    [links.rack]                    # a rack's uplink to the spine
    oversubscription = 4            # its hosts' links together over the uplink; or bandwidth = "500 Mbit/s"

    [[racks]]                       # one table per rack, or per `count` equal racks
    hosts = 2                       # a number, or names: ["a", "b"], or tables: [[racks.hosts]]

Levels of links have the same names everywhere (`--compress int8@rack`): host means between hosts, rack between racks. A
rack, and a host with a table of its own, may override `device`, `devices`, `workers`, `inside`, `socket` and `link`, a
rack also `uplink`. An unknown key is refused by name.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.cluster import (
    MAX_DEVICES,
    MAX_HOSTS,
    Cluster,
    ClusterHost,
    ClusterLink,
    Device,
    HostInterconnect,
    Rack,
)
from shoal.planner.cluster.parse_devices import DeviceReader
from shoal.planner.cluster.table_reader import TomlTable
from shoal.planner.cluster.units import BANDWIDTHS, LATENCIES
from shoal.transport.decoding import reason

KINDS = ("nvlink", "pcie", "memory", "xgmi")
LINK_KEYS = ("bandwidth", "latency", "efficiency")
HOST_LINK_KEYS = (*LINK_KEYS, "cards")
UPLINK_KEYS = (*LINK_KEYS, "oversubscription")
INSIDE_KEYS = (*LINK_KEYS, "kind", "shared")
SOCKET_KEYS = (*LINK_KEYS, "sockets")
HOST_KEYS = ("device", "devices", "workers")
HOST_OVERRIDES = (*HOST_KEYS, "inside", "socket", "link")


def even_cluster(
    *,
    racks: int = 2,
    hosts: int = 2,
    workers: int = 1,
    link: str = "1 Gbit/s",
    uplink: str | None = None,
    oversubscription: float | None = None,
) -> Cluster:
    """A cluster of equal racks. The arguments are those of `shoal lab`."""
    table: dict[str, Any] = {} if oversubscription is None else {"oversubscription": oversubscription}
    table |= {} if uplink is None else {"bandwidth": uplink}
    links = {"host": {"bandwidth": link}, "rack": table}
    value = {"links": links, "hosts": {"workers": workers}, "racks": [{"count": racks, "hosts": hosts}]}
    return cluster_from(value, spelt=FLAGS)


FLAGS = {
    "links.host.bandwidth": "--link",
    "links.rack.bandwidth": "--uplink",
    "links.rack.oversubscription": "--oversubscription",
    "hosts.workers": "--workers-per-host",
    "racks[0].count": "--racks",
    "racks[0].hosts": "--hosts",
}


def read_cluster(path: Path) -> Cluster:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"cluster file {path} cannot be read: {reason}") from None
    return parse_cluster(text, source=str(path))


def parse_cluster(text: str, *, source: str = "cluster") -> Cluster:
    try:
        value = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
        raise InputError(f"{source} is not TOML: {reason(error)}", fix='lines such as bandwidth = "1 Gbit/s"') from None
    return _ClusterReader(source=source, text=text).cluster(value)


def cluster_from(value: TomlTable, *, source: str = "", spelt: Mapping[str, str] | None = None) -> Cluster:
    """Builds a cluster from the tables that a file would hold."""
    return _ClusterReader(source=source, spelt=spelt or {}).cluster(value)


@dataclass(frozen=True, kw_only=True)
class _HostTable:
    """Properties of a host with the key of each: its own table overrides its rack's, which overrides the common one."""

    table: TomlTable
    key: Mapping[str, str]
    devices: Mapping[str, Device]  # that the file describes

    def under(self, table: TomlTable, key: str, names: Sequence[str]) -> "_HostTable":
        new = {name: table[name] for name in names if name in table}
        return replace(self, table={**self.table, **new}, key={**self.key, **{name: f"{key}.{name}" for name in new}})


@dataclass(frozen=True, kw_only=True)
class _ClusterReader(DeviceReader):
    def cluster(self, value: TomlTable) -> Cluster:
        self._known(value, "", ("devices", "links", "hosts", "racks"))
        links = self._table(value, "links", ("inside", "socket", "host", "rack"))
        inside = self._table(links, "links.inside", INSIDE_KEYS)
        socket = self._table(links, "links.socket", SOCKET_KEYS)
        link = self._table(links, "links.host", HOST_LINK_KEYS)
        uplink = self._table(links, "links.rack", UPLINK_KEYS)
        devices = self._devices(value)
        common = _HostTable(
            table={"link": link, **({"inside": inside} if inside else {}), **({"socket": socket} if socket else {})},
            key={"link": "links.host", "inside": "links.inside", "socket": "links.socket"},
            devices=devices,
        ).under(self._table(value, "hosts", HOST_KEYS), "hosts", HOST_KEYS)
        if "racks" not in value:
            raise self._missing("racks", "[[racks]] with hosts = 2")
        tables = value["racks"]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
            raise self._wrong("racks", tables, "tables: [[racks]], each with hosts = 2")
        racks: list[Rack] = []
        hosts = 0
        for number, table in enumerate(tables):
            key = f"racks[{number}]"
            hosts += self._host_count(table, key)
            if hosts > MAX_HOSTS:
                raise self._error(f"{key}.hosts", f"{hosts:,} hosts", f"at most {MAX_HOSTS:,} in all racks together")
            racks += self._racks(table, key, len(racks), common, uplink)
        found = sum(max(host.devices, host.workers) for rack in racks for host in rack.hosts)
        if found > MAX_DEVICES:
            raise self._error("racks", f"{found:,} devices", f"at most {MAX_DEVICES:,} in all hosts together")
        self._used(devices, racks)
        try:
            return Cluster(racks=tuple(racks))
        except InputError as error:
            raise self._error("racks", error.message, error.fix) from None

    def _host_count(self, table: TomlTable, key: str) -> int:
        """Of all racks of this table, before any is made."""
        value, racks = table.get("hosts", 1), self._copies(table, key, "racks")
        if not isinstance(value, list) or not value:
            return racks * self._count(value, f"{key}.hosts")
        tables = [each for each in value if isinstance(each, dict)]
        copies = [self._copies(each, f"{key}.hosts[{number}]", "hosts") for number, each in enumerate(tables)]
        return racks * (len(value) - len(tables) + sum(copies))

    def _racks(self, table: TomlTable, key: str, first: int, common: _HostTable, uplink: TomlTable) -> list[Rack]:
        self._known(table, key, ("name", "count", "hosts", *HOST_OVERRIDES, "uplink"))
        count = self._copies(table, key, "racks")
        if "hosts" not in table:
            raise self._missing(f"{key}.hosts", "hosts = 2")
        common = common.under(table, key, HOST_OVERRIDES)
        uplink_key = "links.rack"
        if "uplink" in table:
            uplink, uplink_key = self._table(table, f"{key}.uplink", UPLINK_KEYS), f"{key}.uplink"
        racks = []
        for number in range(first, first + count):
            rack = self._name(table.get("name", f"r{number}"), f"{key}.name")
            hosts = tuple(self._hosts(table["hosts"], f"{key}.hosts", rack, common))
            racks.append(Rack(name=rack, hosts=hosts, uplink=self._uplink(uplink, uplink_key, hosts)))
        return racks

    def _hosts(self, value: Any, key: str, rack: str, common: _HostTable) -> list[ClusterHost]:
        if not isinstance(value, list) or not value:
            made = self._host(rack, common)
            return [made(f"{rack}h{number}") for number in range(self._count(value, key))]
        if not all(isinstance(table, dict) for table in value):
            made = self._host(rack, common)
            return [made(self._name(name, key)) for name in value]
        hosts: list[ClusterHost] = []
        for number, table in enumerate(value):
            here = f"{key}[{number}]"
            self._known(table, here, ("name", "count", *HOST_OVERRIDES))
            count = self._copies(table, here, "hosts")
            made = self._host(rack, common.under(table, here, HOST_OVERRIDES))
            names = [table["name"]] if "name" in table else [f"{rack}h{len(hosts) + more}" for more in range(count)]
            hosts += [made(self._name(name, f"{here}.name")) for name in names]
        return hosts

    def _copies(self, table: TomlTable, key: str, what: str) -> int:
        count = self._count(table.get("count", 1), f"{key}.count")
        if "name" in table and count > 1:
            raise self._error(f"{key}.name", f"{key}: one name, {table['name']!r}, for {count} {what}", "leave one out")
        return count

    def _host(self, rack: str, common: _HostTable) -> Callable[[str], ClusterHost]:
        """Reads the properties once, and returns a function that makes hosts by name."""
        table, key = common.table, common.key
        device = self._device_named(table["device"], key["device"], common.devices) if "device" in table else None
        first = "devices" if "devices" in table else "workers"
        count = self._count(table.get(first, 1), key.get(first, first))
        workers = self._count(table.get("workers", count), key.get("workers", "workers"))
        link = self._table(table, key["link"], HOST_LINK_KEYS, name="link")
        cards = self._count(link.get("cards", 1), f"{key['link']}.cards")
        found = self._link(link, key["link"])
        total = replace(found, bytes_per_second=found.bytes_per_second * cards)
        inside = self._inside(common, count) if count > 1 else None
        if inside is None and count > 1 and device is not None:
            what = f"{count} devices {device.name} in a host, but no link between them"
            example = '[links.inside] with kind = "pcie", bandwidth = "31 GB/s"'
            raise self._error(key.get("devices", "links"), what, example)

        def made(name: str) -> ClusterHost:
            return ClusterHost(name=name, rack=rack, workers=workers, link=total, device=device, devices=count,
                        interconnect=inside, cards=cards)  # fmt: skip

        return made

    def _inside(self, common: _HostTable, devices: int) -> HostInterconnect | None:
        table, key = common.table, common.key
        if "inside" not in table:
            if "socket" in table:
                raise self._missing("links.inside", 'kind = "pcie", bandwidth = "31 GB/s", beside the sockets')
            return None
        inside = self._table(table, key["inside"], INSIDE_KEYS, name="inside")
        if "kind" not in inside:
            raise self._missing(f"{key['inside']}.kind", f'kind = "{KINDS[0]}", or {", ".join(KINDS[1:])}')
        if inside["kind"] not in KINDS:
            near = get_close_matches(str(inside["kind"]), KINDS, n=1)
            wanted = f"one of {', '.join(KINDS)}" + (f" ({near[0]}?)" if near else "")
            raise self._wrong(f"{key['inside']}.kind", inside["kind"], wanted)
        shared = inside.get("shared", False)
        if not isinstance(shared, bool):
            raise self._wrong(f"{key['inside']}.shared", shared, "true or false")
        sockets, between = 1, None
        if "socket" in table:
            socket = self._table(table, key["socket"], SOCKET_KEYS, name="socket")
            if "sockets" not in socket:
                raise self._missing(f"{key['socket']}.sockets", "sockets = 2")
            sockets = self._count(socket["sockets"], f"{key['socket']}.sockets")
            if sockets == 1 or devices % sockets:
                problem = f"{devices} devices in a host, but {key['socket']}.sockets {sockets}"
                fix = "a number above 1 that divides them" if sockets > 1 else f"leave {key['socket']} out"
                raise self._error(f"{key['socket']}.sockets", problem, fix)
            between = self._link(socket, key["socket"])
        return HostInterconnect(link=self._link(inside, key["inside"]), kind=inside["kind"], shared=shared,
                      sockets=sockets, between=between)  # fmt: skip

    def _link(self, table: TomlTable, key: str) -> ClusterLink:
        if "bandwidth" not in table:
            raise self._missing(f"{key}.bandwidth", 'bandwidth = "1 Gbit/s"')
        speed, latency = self._bandwidth(table, key), self._latency(table, key)
        share = self._share(table.get("efficiency", 1.0), f"{key}.efficiency")
        return ClusterLink(bytes_per_second=speed, latency_seconds=latency, efficiency=share)

    def _uplink(self, table: TomlTable, key: str, hosts: Sequence[ClusterHost]) -> ClusterLink:
        both = [name for name in ("bandwidth", "oversubscription") if name in table]
        if len(both) == 2:
            problem = " and ".join(f"{self._spelt(f'{key}.{name}')} {table[name]}" for name in both)
            raise self._error(f"{key}.{both[1]}", f"{problem}: both give the speed of the uplink", "leave one out")
        below = sum(host.link.bytes_per_second for host in hosts)
        ratio = table.get("oversubscription", 1)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < float("inf"):
            raise self._wrong(f"{key}.oversubscription", ratio, "a number above 0: 4 is four times the uplink")
        speed = self._bandwidth(table, key) if "bandwidth" in table else below / ratio
        usual = min(host.link.efficiency for host in hosts)
        share = self._share(table.get("efficiency", usual), f"{key}.efficiency")
        return ClusterLink(bytes_per_second=speed, latency_seconds=self._latency(table, key), efficiency=share)

    def _bandwidth(self, table: TomlTable, key: str) -> float:
        return self._quantity(table["bandwidth"], f"{key}.bandwidth", BANDWIDTHS, '"1 Gbit/s" or "100 MB/s"')

    def _latency(self, table: TomlTable, key: str) -> float | None:
        if "latency" not in table:
            return None
        return self._quantity(table["latency"], f"{key}.latency", LATENCIES, '"50 us" or "1.5 ms"')
