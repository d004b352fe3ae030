"""What to train on: hosts in racks, and the links between them. Pure: reads and checks a cluster file, deals workers.

    [links.host]                    # between a host and its rack's switch
    bandwidth = "1 Gbit/s"
    latency = "50 us"               # optional

    [links.rack]                    # a rack's uplink to the spine
    oversubscription = 4            # its hosts' links together over the uplink; or bandwidth = "500 Mbit/s"

    [hosts]                         # holds for every host
    workers = 2                     # worker processes (1)

    [[racks]]                       # one table per rack, or per `count` equal racks
    hosts = 2                       # a number, or names: ["a", "b"]

A level of links has the name that it has everywhere (`--compress int8@rack`): host means between hosts, rack between
racks. A rack may say `workers`, `link` and `uplink` of its own. What a later version adds finds its place beside what
is here: devices under `hosts`, the links inside a host under `links`; a key that is not known is refused by name.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.cluster.parts import Cluster, Host, Link, Rack
from shoal.errors import InputError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([^\s\d.]\S*)\s*")
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BANDWIDTHS = {f"{prefix}{unit}/s": factor / bits for prefix, factor in PREFIXES.items()
              for unit, bits in (("bit", 8), ("b", 8), ("B", 1))}  # fmt: skip
LATENCIES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


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
    reader = _Reader(source="", spelt=FLAGS)
    value = {
        "links": {"host": {"bandwidth": link}, "rack": table},
        "hosts": {"workers": workers},
        "racks": [{"count": racks, "hosts": hosts}],
    }
    return reader.cluster(value)


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
    return _Reader(source=source, spelt={}).cluster(value)


# -- from a table to the checked value --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Knows how a key is called to the user: in a file by its path, from the command line by its flag."""

    source: str
    spelt: Mapping[str, str]

    def cluster(self, value: Mapping[str, Any]) -> Cluster:
        self._known(value, "", ("links", "hosts", "racks"))
        links = self._table(value, "links", ("host", "rack"))
        link = self._table(links, "links.host", ("bandwidth", "latency"))
        uplink = self._table(links, "links.rack", ("bandwidth", "oversubscription", "latency"))
        workers = self._count(self._table(value, "hosts", ("workers",)).get("workers", 1), "hosts.workers")
        racks: list[Rack] = []
        if "racks" not in value:
            raise self._missing("racks", "[[racks]] with hosts = 2")
        tables = value["racks"]
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
            raise self._wrong("racks", tables, "tables: [[racks]], each with hosts = 2")
        for number, table in enumerate(tables):
            racks += self._racks(table, f"racks[{number}]", len(racks), link, uplink, workers)
        try:
            return Cluster(racks=tuple(racks))
        except InputError as error:
            raise InputError(self._at(error.message), fix=error.fix) from None

    def _racks(
        self, table: Any, key: str, first: int, link: Mapping[str, Any], uplink: Mapping[str, Any], workers: int
    ) -> list[Rack]:
        self._known(table, key, ("name", "count", "hosts", "workers", "link", "uplink"))
        count = self._count(table.get("count", 1), f"{key}.count")
        if "name" in table and count > 1:
            raise InputError(self._at(f"{key}: one name, {table['name']!r}, for {count} racks"), fix="leave one out")
        if "hosts" not in table:
            raise self._missing(f"{key}.hosts", "hosts = 2")
        workers = self._count(table.get("workers", workers), f"{key}.workers")
        link_key, uplink_key = ("links.host", "links.rack")
        if "link" in table:
            link, link_key = self._table(table, f"{key}.link", ("bandwidth", "latency")), f"{key}.link"
        if "uplink" in table:
            keys = ("bandwidth", "oversubscription", "latency")
            uplink, uplink_key = self._table(table, f"{key}.uplink", keys), f"{key}.uplink"
        found = self._link(link, link_key)
        racks = []
        for number in range(first, first + count):
            rack = self._name(table.get("name", f"r{number}"), f"{key}.name")
            names = self._host_names(table["hosts"], f"{key}.hosts", rack)
            hosts = tuple(Host(name=name, rack=rack, workers=workers, link=found) for name in names)
            racks.append(Rack(name=rack, hosts=hosts, uplink=self._uplink(uplink, uplink_key, hosts)))
        return racks

    def _host_names(self, value: Any, key: str, rack: str) -> list[str]:
        if isinstance(value, list) and value:
            return [self._name(name, key) for name in value]
        return [f"{rack}h{number}" for number in range(self._count(value, key))]

    def _link(self, table: Mapping[str, Any], key: str) -> Link:
        if "bandwidth" not in table:
            raise self._missing(f"{key}.bandwidth", 'bandwidth = "1 Gbit/s"')
        return Link(bytes_per_second=self._bandwidth(table, key), latency_seconds=self._latency(table, key))

    def _uplink(self, table: Mapping[str, Any], key: str, hosts: Sequence[Host]) -> Link:
        both = [name for name in ("bandwidth", "oversubscription") if name in table]
        if len(both) == 2:
            told = " and ".join(f"{self._spelt(f'{key}.{name}')} {table[name]}" for name in both)
            raise InputError(self._at(f"{told}: either says how fast the uplink is"), fix="leave one out")
        below = sum(host.link.bytes_per_second for host in hosts)
        ratio = table.get("oversubscription", 1)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < float("inf"):
            raise self._wrong(f"{key}.oversubscription", ratio, "a number above 0: 4 is four times what the uplink has")
        speed = self._bandwidth(table, key) if "bandwidth" in table else below / ratio
        return Link(bytes_per_second=speed, latency_seconds=self._latency(table, key))

    def _bandwidth(self, table: Mapping[str, Any], key: str) -> float:
        return self._quantity(table["bandwidth"], f"{key}.bandwidth", BANDWIDTHS, '"1 Gbit/s" or "100 MB/s"')

    def _latency(self, table: Mapping[str, Any], key: str) -> float | None:
        if "latency" not in table:
            return None
        return self._quantity(table["latency"], f"{key}.latency", LATENCIES, '"50 us" or "1.5 ms"')

    def _quantity(self, value: Any, key: str, units: Mapping[str, float], example: str) -> float:
        match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise self._wrong(key, value, f"a number with its unit, such as {example}")
        if match[2] not in units:
            near = get_close_matches(match[2], units, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(units)}"
            raise InputError(self._at(f"{self._spelt(key)} {value!r}: unknown unit {match[2]!r}"), fix=fix)
        if float(match[1]) == 0 and units is BANDWIDTHS:
            raise self._wrong(key, value, f"above 0, such as {example}")
        return float(match[1]) * units[match[2]]

    def _count(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number from 1 up")
        return value

    def _name(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise self._wrong(key, value, "a name of at most 32 small letters, digits and hyphens")
        return value

    def _table(self, above: Mapping[str, Any], key: str, known: Sequence[str]) -> Mapping[str, Any]:
        value = above.get(key.rpartition(".")[2], {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, f"a table with {', '.join(known)}")
        self._known(value, key, known)
        return value

    def _known(self, table: Mapping[str, Any], key: str, known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known there: {', '.join(known)}"
                raise InputError(self._at(f"unknown key {f'{key}.{name}' if key else name}"), fix=fix)

    def _missing(self, key: str, example: str) -> InputError:
        return InputError(self._at(f"{self._spelt(key)} is missing"), fix=example)

    def _wrong(self, key: str, value: Any, wanted: str) -> InputError:
        return InputError(self._at(f"{self._spelt(key)} is {value!r}, and should be {wanted}"))

    def _spelt(self, key: str) -> str:
        return self.spelt.get(key, key)

    def _at(self, message: str) -> str:
        return f"{self.source}: {message}" if self.source else message
