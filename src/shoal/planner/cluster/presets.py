"""Clusters by name, and clusters of another size."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.cluster import Cluster, ClusterHost, Device, Rack
from shoal.planner.cluster.library import aliases, cluster_tables, device_tables
from shoal.planner.cluster.parse import cluster_from, device_from, read_cluster


def presets() -> tuple[str, ...]:
    return tuple(cluster_tables())


def is_preset(name: str) -> bool:
    return _preset_name(name) in cluster_tables()


def preset_note(name: str) -> str:
    """What there is to say of a preset."""
    return str(cluster_tables()[_preset_name(name)].get("note", ""))


def _preset_name(name: str) -> str:
    """Published tables write `DGX-A100 (Selene)`: capitals and a remark do not matter."""
    plain = name.partition("(")[0].strip().lower()
    return aliases().get(plain, plain)


def find_device(name: str) -> Device:
    tables = device_tables()
    if name not in tables:
        near = get_close_matches(name.lower(), tables, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(tables)}"
        raise InputError(f"no device is called {name}", fix=fix)
    return device_from(name, tables[name])


def find_cluster(
    text: str, *, hosts: int | None = None, racks: int | None = None, workers: int | None = None
) -> Cluster:
    """A preset by its name, or the cluster of a TOML file by its path.

    `hosts` is their number in all, `racks` over how many racks they are spread, `workers` how many are on each host.
    """
    name = _preset_name(text)
    if name in cluster_tables():
        cluster = _preset(name, _count(hosts, "--hosts", 1))
        if racks is not None:
            cluster = resize_cluster(cluster, len(cluster.hosts), racks=racks)
    elif text.endswith(".toml") or "/" in text or Path(text).is_file():
        cluster = read_cluster(Path(text))
        if hosts is not None or racks is not None:
            cluster = resize_cluster(cluster, _count(hosts, "--hosts", len(cluster.hosts)), racks=racks, source=text)
    else:
        known = [*cluster_tables(), *aliases()]
        near = get_close_matches(text.lower(), known, n=3, cutoff=0.5)
        if text.lower() in device_tables():
            fix = f'a file with device = "{text.lower()}" in [hosts]: shoal cluster show lists clusters'
            raise InputError(f"{text} is a device, and --cluster wants a cluster: a preset or a TOML file", fix=fix)
        fix = f"did you mean {' or '.join(near)}?" if near else "shoal cluster show lists them, or the path of a file"
        raise InputError(f"no cluster is called {text}", fix=fix)
    return cluster if workers is None else cluster.with_workers(_count(workers, "--workers-per-host", 1))


def laptop(cores: int, memory: int) -> Cluster:
    """One host of so many cores that share its bytes of memory."""
    cluster = _preset("laptop", 1)
    (rack,) = cluster.racks
    (host,) = rack.hosts
    assert host.device is not None
    device = replace(host.device, memory=memory // cores)
    host = replace(
        host, device=device, devices=cores, workers=cores, interconnect=host.interconnect if cores > 1 else None
    )
    return Cluster(racks=(replace(rack, hosts=(host,)),))


def resize_cluster(cluster: Cluster, hosts: int, *, racks: int | None = None, source: str = "the cluster") -> Cluster:
    """The same kind of host so often; a rack keeps its size and what its uplink is of its hosts, unless told."""
    kinds = {_kind(host) for host in cluster.hosts}
    ratios = {round(rack.oversubscription, 9) for rack in cluster.racks}
    if len(kinds) > 1 or len(ratios) > 1:
        what = f"{len(kinds)} kinds of hosts" if len(kinds) > 1 else f"{len(ratios)} kinds of uplinks"
        raise InputError(f"--hosts {hosts}: {source} has {what}, and which to have more of is not said",
                         fix="change the file: count = … in [[racks]]")  # fmt: skip
    first = cluster.racks[0]
    if racks is None:
        per_rack = len(first.hosts) if len(cluster.racks) > 1 else hosts
    else:
        per_rack = -(-hosts // _count(racks, "--racks", 1))
        if racks > hosts:
            raise InputError(f"{hosts} hosts in {racks} racks: each needs one", fix=f"--racks {hosts}")
    speed = per_rack * first.hosts[0].link.bytes_per_second / first.oversubscription
    if per_rack == len(first.hosts):
        speed = first.uplink.bytes_per_second  # to the last bit
    uplink = replace(first.uplink, bytes_per_second=speed)
    made: list[Rack] = []
    left = hosts
    while left:
        name, size = f"r{len(made)}", min(per_rack, left)
        inside = tuple(replace(first.hosts[0], name=f"{name}h{number}", rack=name) for number in range(size))
        made.append(Rack(name=name, hosts=inside, uplink=uplink))
        left -= size
    return Cluster(racks=tuple(made))


def _kind(host: ClusterHost) -> ClusterHost:
    return replace(host, name="", rack="")


def _preset(name: str, hosts: int) -> Cluster:
    table: Mapping[str, Any] = cluster_tables()[name]
    links = {"host": table["link"]}
    links |= {level: table[key] for level, key in (("inside", "inside"), ("rack", "uplink")) if key in table}
    per_rack = min(hosts, table.get("hosts_per_rack", hosts))
    racks = [{"count": hosts // per_rack, "hosts": per_rack}]
    if hosts % per_rack:
        racks.append({"hosts": hosts % per_rack})
    value = {"hosts": table["hosts"], "links": links, "racks": racks}
    return cluster_from(value, source=f"preset {name}")


def _count(value: int | None, flag: str, usual: int) -> int:
    if value is None:
        return usual
    if value < 1:
        raise InputError(f"{flag} {value}: at least 1 is needed", fix=f"{flag} 1")
    return value
