"""`--cluster`, `--hosts` and `--racks`, which every command before a run has."""

import argparse

from shoal.cli.parser import CommandParser, rare_option
from shoal.errors import InputError
from shoal.planner.cluster import Cluster, find_cluster, resize_cluster
from shoal.planner.cluster.local_machine import this_machine


def cluster_options(parser: CommandParser) -> None:
    """The flags that `cluster_of`, `clusters_of` and `cluster_label` read."""
    parser.add_argument("--cluster", metavar="NAME|FILE",
                        help="a preset (shoal cluster show lists them) or a TOML file (this machine)")  # fmt: skip
    parser.add_argument("--hosts", type=_numbers, metavar="N", help="so many hosts of that kind (as it has)")
    rare_option(parser, "--racks", type=int, metavar="N", help="spread over so many racks (as it has)")


def cluster_of(given: argparse.Namespace) -> Cluster:
    """The cluster of `--cluster` and `--hosts`; without `--cluster`, this machine with guessed speeds."""
    sizes = given.hosts or [None]
    if len(sizes) > 1:
        given_sizes = ",".join(map(str, sizes))
        raise InputError(
            f"--hosts {given_sizes}: one number is wanted here, a list is for shoal plan", fix=f"--hosts {sizes[0]}"
        )
    return _sized(given, sizes[0])


def clusters_of(given: argparse.Namespace) -> list[Cluster]:
    """One cluster for each number of `--hosts`."""
    return [_sized(given, hosts) for hosts in given.hosts or [None]]


def cluster_label(given: argparse.Namespace) -> str:
    """For a heading: the cluster, its size, and whether its speeds are measured."""
    cluster = _sized(given, (given.hosts or [None])[0])
    count, hosts = cluster.devices, len(cluster.hosts)
    size = f"{hosts} host{'s' * (hosts > 1)}, {count} device{'s' * (count > 1)}"
    if given.cluster is not None:
        return f"cluster {given.cluster}: {size}"
    cores = f"{count} core{'s' * (count > 1)}"
    return f"cluster: this machine, {cores}, speeds guessed (no --cluster; shoal cluster probe measures them)"


def _sized(given: argparse.Namespace, hosts: int | None) -> Cluster:
    racks = getattr(given, "racks", None)
    if given.cluster is not None:
        return find_cluster(given.cluster, hosts=hosts, racks=racks)
    found = this_machine()
    return (
        found if hosts is None and racks is None else resize_cluster(found, 1 if hosts is None else hosts, racks=racks)
    )


def _numbers(text: str) -> list[int]:
    """4, or 1,2,4."""
    numbers = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")]
    if min(numbers) < 1:
        raise InputError(f"--hosts {text}: whole numbers from 1 up", fix="--hosts 4, or --hosts 1,2,4")
    return numbers
