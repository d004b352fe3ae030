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

A level of links has the name that it has everywhere (`--compress int8@rack`): host means between hosts, rack between
racks. A rack, and a host that has a table of its own, may say `device`, `devices`, `workers`, `inside`, `socket` and
`link` of its own, a rack also `uplink`. A key that is not known is refused by name.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack
from shoal.planner.cluster.library import device_tables
from shoal.planner.cluster.toml_lines import key_lines, line_of
from shoal.planner.cluster.units import (
    BANDWIDTHS,
    FLOPS,
    LATENCIES,
    OPERATORS,
    RATES,
    SIZES,
    UnitError,
    read_price,
    read_quantity,
)

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
DEVICE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,38}[A-Za-z0-9])?")
KINDS = ("nvlink", "pcie", "memory", "xgmi")
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
LINK_KEYS = ("bandwidth", "latency", "efficiency")
HOST_LINK_KEYS = (*LINK_KEYS, "cards")
UPLINK_KEYS = (*LINK_KEYS, "oversubscription")
INSIDE_KEYS = (*LINK_KEYS, "kind", "shared")
SOCKET_KEYS = (*LINK_KEYS, "sockets")
DEVICE_KEYS = ("peak", "memory", "memory_bandwidth", "price", "efficiency", "half_flops", "stream", "overhead",
               "reserved", "crowded", "rates")  # fmt: skip
NEEDED = {
    "peak": 'peak = { bf16 = "312 TFLOP/s", fp32 = "19.5 TFLOP/s" }',
    "memory": 'memory = "80 GB"',
    "memory_bandwidth": 'memory_bandwidth = "2039 GB/s"',
}
HOST_KEYS = ("device", "devices", "workers")


def even_cluster(
    *,
    racks: int = 2,
    hosts: int = 2,
    workers: int = 1,
    link: str = "1 Gbit/s",
    uplink: str | None = None,
    oversubscription: float | None = None,
) -> Cluster:
    """Racks that are all alike. The arguments are those of `shoal lab`."""
    table: dict[str, Any] = {} if oversubscription is None else {"oversubscription": oversubscription}
    table |= {} if uplink is None else {"bandwidth": uplink}
    value = {
        "links": {"host": {"bandwidth": link}, "rack": table},
        "hosts": {"workers": workers},
        "racks": [{"count": racks, "hosts": hosts}],
    }
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
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source} is not TOML: {error}", fix='lines such as bandwidth = "1 Gbit/s"') from None
    return _ClusterReader(source=source, text=text).cluster(value)


def cluster_from(value: Mapping[str, Any], *, source: str = "", spelt: Mapping[str, str] | None = None) -> Cluster:
    """Of what a file would hold."""
    return _ClusterReader(source=source, spelt=spelt or {}).cluster(value)


def device_from(name: str, table: Mapping[str, Any]) -> Device:
    return _ClusterReader(source=f"device {name}").device(name, table)


# -- from a table to the checked value --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _HostTable:
    """What is said of a host, and under which keys: its own over its rack's over everyone's."""

    table: Mapping[str, Any]
    key: Mapping[str, str]

    def under(self, table: Mapping[str, Any], key: str, names: Sequence[str]) -> "_HostTable":
        new = {name: table[name] for name in names if name in table}
        return _HostTable(table={**self.table, **new}, key={**self.key, **{name: f"{key}.{name}" for name in new}})


@dataclass(frozen=True, kw_only=True)
class _ClusterReader:
    """Knows how a key is called to the user: in a file by its path and line, from the command line by its flag."""

    source: str = ""
    text: str = ""
    spelt: Mapping[str, str] = field(default_factory=dict)

    def cluster(self, value: Mapping[str, Any]) -> Cluster:
        self._known(value, "", ("devices", "links", "hosts", "racks"))
        links = self._table(value, "links", ("inside", "socket", "host", "rack"))
        inside = self._table(links, "links.inside", INSIDE_KEYS)
        socket = self._table(links, "links.socket", SOCKET_KEYS)
        link = self._table(links, "links.host", HOST_LINK_KEYS)
        uplink = self._table(links, "links.rack", UPLINK_KEYS)
        devices = self._devices(value)
        said = _HostTable(
            table={"link": link, **({"inside": inside} if inside else {}), **({"socket": socket} if socket else {})},
            key={"link": "links.host", "inside": "links.inside", "socket": "links.socket"},
        ).under(self._table(value, "hosts", HOST_KEYS), "hosts", HOST_KEYS)
        if "racks" not in value:
            raise self._missing("racks", "[[racks]] with hosts = 2")
        tables = value["racks"]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
            raise self._wrong("racks", tables, "tables: [[racks]], each with hosts = 2")
        racks: list[Rack] = []
        for number, table in enumerate(tables):
            racks += self._racks(table, f"racks[{number}]", len(racks), said, uplink, devices)
        self._used(devices, racks)
        try:
            return Cluster(racks=tuple(racks))
        except InputError as error:
            raise self._error("racks", error.message, error.fix) from None

    def _racks(
        self,
        table: Mapping[str, Any],
        key: str,
        first: int,
        said: _HostTable,
        uplink: Mapping[str, Any],
        devices: Mapping[str, Device],
    ) -> list[Rack]:
        own = (*HOST_KEYS, "inside", "socket", "link")
        self._known(table, key, ("name", "count", "hosts", *own, "uplink"))
        count = self._count(table.get("count", 1), f"{key}.count")
        if "name" in table and count > 1:
            raise self._error(f"{key}.name", f"{key}: one name, {table['name']!r}, for {count} racks", "leave one out")
        if "hosts" not in table:
            raise self._missing(f"{key}.hosts", "hosts = 2")
        said = said.under(table, key, own)
        uplink_key = "links.rack"
        if "uplink" in table:
            uplink, uplink_key = self._table(table, f"{key}.uplink", UPLINK_KEYS), f"{key}.uplink"
        racks = []
        for number in range(first, first + count):
            rack = self._name(table.get("name", f"r{number}"), f"{key}.name")
            hosts = tuple(self._hosts(table["hosts"], f"{key}.hosts", rack, said, devices))
            racks.append(Rack(name=rack, hosts=hosts, uplink=self._uplink(uplink, uplink_key, hosts)))
        return racks

    def _hosts(
        self, value: Any, key: str, rack: str, said: _HostTable, devices: Mapping[str, Device]
    ) -> list[ClusterHost]:
        if not isinstance(value, list) or not value:
            made = self._host(rack, said, devices)
            return [made(f"{rack}h{number}") for number in range(self._count(value, key))]
        if not all(isinstance(table, dict) for table in value):
            made = self._host(rack, said, devices)
            return [made(self._name(name, key)) for name in value]
        hosts: list[ClusterHost] = []
        own = (*HOST_KEYS, "inside", "socket", "link")
        for number, table in enumerate(value):
            here = f"{key}[{number}]"
            self._known(table, here, ("name", "count", *own))
            count = self._count(table.get("count", 1), f"{here}.count")
            if "name" in table and count > 1:
                raise self._error(
                    f"{here}.name", f"{here}: one name, {table['name']!r}, for {count} hosts", "leave one out"
                )
            made = self._host(rack, said.under(table, here, own), devices)
            names = [table["name"]] if "name" in table else [f"{rack}h{len(hosts) + more}" for more in range(count)]
            hosts += [made(self._name(name, f"{here}.name")) for name in names]
        return hosts

    def _host(self, rack: str, said: _HostTable, devices: Mapping[str, Device]) -> Callable[[str], ClusterHost]:
        """A maker of hosts: what is said of them is read once."""
        table, key = said.table, said.key
        device = self._device_named(table["device"], key["device"], devices) if "device" in table else None
        first = "devices" if "devices" in table else "workers"
        count = self._count(table.get(first, 1), key.get(first, first))
        workers = self._count(table.get("workers", count), key.get("workers", "workers"))
        link = self._table(table, key["link"], HOST_LINK_KEYS, name="link")
        cards = self._count(link.get("cards", 1), f"{key['link']}.cards")
        found = self._link(link, key["link"])
        whole = ClusterLink(
            bytes_per_second=found.bytes_per_second * cards,
            latency_seconds=found.latency_seconds,
            efficiency=found.efficiency,
        )
        inside = self._inside(said, count) if count > 1 else None
        if inside is None and count > 1 and device is not None:
            what = f"{count} devices {device.name} in a host, and nothing is said of the link between them"
            example = '[links.inside] with kind = "pcie", bandwidth = "31 GB/s"'
            raise self._error(key.get("devices", "links"), what, example)

        def made(name: str) -> ClusterHost:
            return ClusterHost(name=name, rack=rack, workers=workers, link=whole, device=device, devices=count,
                        interconnect=inside, cards=cards)  # fmt: skip

        return made

    # -- devices

    def _devices(self, value: Mapping[str, Any]) -> dict[str, Device]:
        tables = value.get("devices", {})
        if not isinstance(tables, dict):
            raise self._wrong("devices", tables, "tables: [devices.NAME]")
        found = {}
        for name, table in tables.items():
            if not DEVICE_NAME.fullmatch(name):
                raise self._wrong("devices", name, "a name of letters, digits, dots and hyphens")
            if not isinstance(table, dict):
                raise self._wrong(f"devices.{name}", table, f"a table with {', '.join(DEVICE_KEYS)}")
            whole = all(key in table for key in NEEDED)  # then nothing of another device of that name is meant
            found[name] = self.device(name, table if whole else {**device_tables().get(name, {}), **table})
        return found

    def device(self, name: str, table: Mapping[str, Any]) -> Device:
        key = f"devices.{name}"
        self._known(table, key, DEVICE_KEYS)
        for needed, example in NEEDED.items():
            if needed not in table:
                raise self._missing(f"{key}.{needed}", example)
        memory = round(self._quantity(table["memory"], f"{key}.memory", SIZES, '"80 GB"'))
        more: dict[str, Any] = {}
        for share in ("efficiency", "stream"):
            if share in table:
                more[share] = self._share(table[share], f"{key}.{share}")
        if "half_flops" in table:
            more["half_flops"] = self._quantity(table["half_flops"], f"{key}.half_flops", FLOPS, '"5 GFLOP"')
        if "overhead" in table:
            more["overhead"] = self._quantity(table["overhead"], f"{key}.overhead", LATENCIES, '"5 us"')
        if "reserved" in table:
            more["reserved"] = round(self._quantity(table["reserved"], f"{key}.reserved", SIZES, '"1 GB"'))
            if more["reserved"] >= memory:
                told = f"{key}.reserved {table['reserved']} of {key}.memory {table['memory']}: nothing is left"
                raise self._error(f"{key}.reserved", told, "less than the memory")
        if "crowded" in table:
            more["crowded"] = table["crowded"]
            if (
                isinstance(more["crowded"], bool)
                or not isinstance(more["crowded"], int | float)
                or table["crowded"] < 1
            ):
                raise self._wrong(f"{key}.crowded", table["crowded"], "a number from 1 up")
        if "rates" in table:
            rates = table["rates"]
            if not isinstance(rates, dict):
                raise self._wrong(f"{key}.rates", rates, 'a table by operator, such as { conv2d = "2 G/s" }')
            more["rates"] = {
                name: self._quantity(rate, f"{key}.rates.{name}", OPERATORS, '"2 G/s"') for name, rate in rates.items()
            }
        if "price" in table:
            try:
                more["price"], more["currency"] = read_price(table["price"])
            except UnitError as error:
                raise self._wrong(f"{key}.price", table["price"], error.problem) from None
        speed = self._quantity(table["memory_bandwidth"], f"{key}.memory_bandwidth", BANDWIDTHS, '"2039 GB/s"')
        return Device(
            name=name, peak=self._peak(table["peak"], f"{key}.peak"), memory=memory, memory_bandwidth=speed, **more
        )

    def _peak(self, value: Any, key: str) -> dict[str, float]:
        if not isinstance(value, dict) or not value:
            raise self._wrong(key, value, 'a table by dtype, such as { bf16 = "312 TFLOP/s" }')
        self._known(value, key, DTYPES)
        found = {
            dtype: self._quantity(value[dtype], f"{key}.{dtype}", RATES, '"312 TFLOP/s"')
            for dtype in DTYPES
            if dtype in value
        }
        if "fp16" in found:  # one figure for both
            half = found.pop("fp16")
            if found.get("bf16", half) != half:
                told = f"{key}: bf16 {value['bf16']} and fp16 {value['fp16']}, which count as one"
                raise self._error(f"{key}.fp16", told, "leave one out")
            found["bf16"] = half
        return found

    def _device_named(self, name: Any, key: str, devices: Mapping[str, Device]) -> Device:
        if isinstance(name, str) and name in devices:
            return devices[name]
        if isinstance(name, str) and name in device_tables():
            return device_from(name, device_tables()[name])
        known = [*devices, *device_tables()]
        near = get_close_matches(str(name).lower(), known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"[devices.{name}] with peak, memory, memory_bandwidth"
        raise self._error(key, f"{key} is {name!r}: no such device is in the file or has that name already", fix)

    def _used(self, devices: Mapping[str, Device], racks: Sequence[Rack]) -> None:
        used = {host.device.name: host.device for rack in racks for host in rack.hosts if host.device}
        for name in devices:
            if name not in used:
                told = f"device {name} is described, and no host has it"
                raise self._error(f"devices.{name}", told, f'[hosts] with device = "{name}"')
        money = {device.currency: name for name, device in used.items() if device.price is not None}
        if len(money) > 1:
            (one, first), (other, second) = list(money.items())[:2]
            told = f"device {first} is paid in {one}, device {second} in {other}: costs could not be added"
            key = next((f"devices.{name}.price" for name in (second, first) if name in devices), "devices")
            raise self._error(key, told, f'one currency, such as [devices.{second}] price = "2.5 {one}/h"')

    # -- links

    def _inside(self, said: _HostTable, devices: int) -> HostInterconnect | None:
        table, key = said.table, said.key
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
                told = f"{devices} devices in a host, and {key['socket']}.sockets {sockets}"
                fix = "a number above 1 that divides them" if sockets > 1 else f"leave {key['socket']} out"
                raise self._error(f"{key['socket']}.sockets", told, fix)
            between = self._link(socket, key["socket"])
        return HostInterconnect(link=self._link(inside, key["inside"]), kind=inside["kind"], shared=shared,
                      sockets=sockets, between=between)  # fmt: skip

    def _link(self, table: Mapping[str, Any], key: str) -> ClusterLink:
        if "bandwidth" not in table:
            raise self._missing(f"{key}.bandwidth", 'bandwidth = "1 Gbit/s"')
        return ClusterLink(
            bytes_per_second=self._bandwidth(table, key),
            latency_seconds=self._latency(table, key),
            efficiency=self._share(table.get("efficiency", 1.0), f"{key}.efficiency"),
        )

    def _uplink(self, table: Mapping[str, Any], key: str, hosts: Sequence[ClusterHost]) -> ClusterLink:
        both = [name for name in ("bandwidth", "oversubscription") if name in table]
        if len(both) == 2:
            told = " and ".join(f"{self._spelt(f'{key}.{name}')} {table[name]}" for name in both)
            raise self._error(f"{key}.{both[1]}", f"{told}: either says how fast the uplink is", "leave one out")
        below = sum(host.link.bytes_per_second for host in hosts)
        ratio = table.get("oversubscription", 1)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < float("inf"):
            raise self._wrong(f"{key}.oversubscription", ratio, "a number above 0: 4 is four times what the uplink has")
        speed = self._bandwidth(table, key) if "bandwidth" in table else below / ratio
        usual = min(host.link.efficiency for host in hosts)
        share = self._share(table.get("efficiency", usual), f"{key}.efficiency")
        return ClusterLink(bytes_per_second=speed, latency_seconds=self._latency(table, key), efficiency=share)

    # -- single values

    def _bandwidth(self, table: Mapping[str, Any], key: str) -> float:
        return self._quantity(table["bandwidth"], f"{key}.bandwidth", BANDWIDTHS, '"1 Gbit/s" or "100 MB/s"')

    def _latency(self, table: Mapping[str, Any], key: str) -> float | None:
        if "latency" not in table:
            return None
        return self._quantity(table["latency"], f"{key}.latency", LATENCIES, '"50 us" or "1.5 ms"')

    def _quantity(self, value: Any, key: str, units: Mapping[str, float], example: str) -> float:
        try:
            found = read_quantity(value, units, example)
        except UnitError as error:
            if error.sentence:
                raise self._error(key, f"{self._spelt(key)} {value!r}: {error.problem}", error.fix) from None
            raise self._wrong(key, value, error.problem) from None
        may_be_zero = units is LATENCIES or key.endswith(("half_flops", "reserved"))
        if found == 0 and not may_be_zero:
            raise self._wrong(key, value, f"above 0, such as {example}")
        return found

    def _share(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._wrong(key, value, "a number above 0 and at most 1")
        return float(value)

    def _count(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number from 1 up")
        return value

    def _name(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise self._wrong(key, value, "a name of at most 32 small letters, digits and hyphens")
        return value

    def _table(
        self, above: Mapping[str, Any], key: str, known: Sequence[str], *, name: str | None = None
    ) -> Mapping[str, Any]:
        value = above.get(name or key.rpartition(".")[2], {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, f"a table with {', '.join(known)}")
        self._known(value, key, known)
        return value

    def _known(self, table: Mapping[str, Any], key: str, known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known there: {', '.join(known)}"
                path = f"{key}.{name}" if key else name
                raise self._error(path, f"unknown key {path}", fix)

    # -- what is told

    def _missing(self, key: str, example: str) -> InputError:
        return self._error(key, f"{self._spelt(key)} is missing", example)

    def _wrong(self, key: str, value: Any, wanted: str) -> InputError:
        return self._error(key, f"{self._spelt(key)} is {value!r}, and should be {wanted}")

    def _spelt(self, key: str) -> str:
        return self.spelt.get(key, key)

    def _error(self, key: str, message: str, fix: str | None = None) -> InputError:
        """With the line of the key, or of the table that it should be in."""
        line = line_of(key_lines(self.text), key) if self.text else None
        source = f"{self.source}:{line}" if line else self.source
        return InputError(f"{source}: {message}" if source else message, fix=fix)
