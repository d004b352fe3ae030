"""Finds clusters by name, and resizes them."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.cluster import MAX_HOSTS, Cluster, Device, Rack
from shoal.planner.cluster.library import aliases, cluster_tables, device_tables
from shoal.planner.cluster.parse import cluster_from, read_cluster
from shoal.planner.cluster.parse_devices import device_from


def presets() -> tuple[str, ...]:
    return tuple(cluster_tables())


def is_preset(name: str) -> bool:
    return _preset_name(name) in cluster_tables()


def preset_note(name: str) -> str:
    """The remark that a preset carries, or an empty string."""
    return str(cluster_tables()[_preset_name(name)].get("note", ""))


def _preset_name(name: str) -> str:
    """Normalizes a name as published tables write it, `DGX-A100 (Selene)`: drops capitals and the remark."""
    plain = name.partition("(")[0].strip().lower()
    return aliases().get(plain, plain)


def find_device(name: str) -> Device:
    tables = device_tables()
    if name not in tables:
        near = get_close_matches(name.lower(), tables, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(tables)}"
        raise InputError(f"there is no device {name}", fix=fix)
    return device_from(name, tables[name])


def find_cluster(
    text: str, *, hosts: int | None = None, racks: int | None = None, workers: int | None = None
) -> Cluster:
    """Returns a preset by its name, or reads a TOML file by its path.

    `hosts` is the number of hosts in all, `racks` the number of racks for them, `workers` the workers on each host.
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
            raise InputError(f"{text} is a device, but --cluster needs a cluster: a preset or a TOML file", fix=fix)
        fix = f"did you mean {' or '.join(near)}?" if near else "shoal cluster show lists them, or the path of a file"
        raise InputError(f"there is no cluster {text}", fix=fix)
    return cluster if workers is None else cluster.with_workers(_count(workers, "--workers-per-host", 1))


def laptop(cores: int, memory: int) -> Cluster:
    """One host whose cores share `memory` bytes."""
    cluster = _preset("laptop", 1)
    (rack,) = cluster.racks
    (host,) = rack.hosts
    assert host.device is not None
    device, inside = replace(host.device, memory=memory // cores), host.interconnect if cores > 1 else None
    host = replace(host, device=device, devices=cores, workers=cores, interconnect=inside)
    return Cluster(racks=(replace(rack, hosts=(host,)),))


def resize_cluster(cluster: Cluster, hosts: int, *, racks: int | None = None, source: str = "the cluster") -> Cluster:
    """Repeats the one kind of host `hosts` times. Racks keep their size, unless `racks` is given, and their ratio."""
    kinds = {replace(host, name="", rack="") for host in cluster.hosts}
    ratios = {round(rack.oversubscription, 9) for rack in cluster.racks}
    if len(kinds) > 1 or len(ratios) > 1:
        what = f"{len(kinds)} kinds of hosts" if len(kinds) > 1 else f"{len(ratios)} kinds of uplinks"
        message = f"--hosts {hosts}: {source} has {what}; only a cluster of equal hosts and uplinks can be resized"
        raise InputError(message, fix="change the file: count = … in [[racks]]")
    first = cluster.racks[0]
    if racks is None:
        per_rack = len(first.hosts) if len(cluster.racks) > 1 else hosts
    else:
        per_rack = -(-hosts // _count(racks, "--racks", 1))
        if racks > hosts:
            raise InputError(f"{hosts} hosts in {racks} racks: each rack needs a host", fix=f"--racks {hosts}")
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
    if value > MAX_HOSTS:
        raise InputError(f"{flag} {value:,}: at most {MAX_HOSTS:,} are possible")
    return value
