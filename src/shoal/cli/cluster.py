"""`shoal cluster`: devices, hosts and links: presets and files shown, this machine measured."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from shoal.cli import cluster_text
from shoal.cli.cluster_options import cluster_of
from shoal.cli.parser import CommandParser, command, print_json, rare_option
from shoal.cli.probe_text import text as probe_text
from shoal.driver.probe_machine import cluster_of as measured_cluster
from shoal.driver.probe_machine import print_progress, probe, probe_launched, workers_of
from shoal.errors import InputError
from shoal.planner.cluster import cluster_text as toml_text

TEXT = "devices, hosts and links: presets and files shown, this machine measured"

EXAMPLE = "shoal cluster show dgx-a100 --hosts 4"


def arguments(parser: CommandParser) -> None:
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", dest="part", parser_class=CommandParser)

    show = command(
        parts,
        "show",
        "a cluster as a tree, with its narrow places; without a name, the presets",
        call_show,
        "shoal cluster show dgx-a100 --hosts 4",
    )
    show.add_argument("cluster", nargs="?", metavar="NAME|FILE", help="a preset, or a TOML file (lists the presets)")
    show.add_argument("--hosts", type=int, metavar="N", help="so many hosts of that kind (as it has)")
    rare_option(show, "--racks", type=int, metavar="N", help="spread over so many racks (as it has)")
    show.add_argument("--json", action="store_true", help="print it as JSON")

    probe = command(
        parts,
        "probe",
        "measures this machine, or the workers of a run, and writes a cluster file",
        call_probe,
        "shoal cluster probe -o cluster.toml",
    )
    probe.add_argument("-o", "--output", type=Path, default=Path("cluster.toml"), metavar="FILE",
                       help="where to write it (cluster.toml)")  # fmt: skip
    probe.add_argument("--force", action="store_true", help="write over a file that is there")
    probe.add_argument("--quick", action="store_true", help="in seconds; rough")
    probe.add_argument("--run", metavar="RUN", help="as many workers as this run has")
    probe.add_argument("--json", action="store_true", help="print what was measured as JSON")


def call(given: argparse.Namespace) -> int:
    raise InputError("shoal cluster: show or probe?", fix="shoal cluster show, or shoal cluster probe")


def call_show(given: argparse.Namespace) -> int:
    if given.cluster is None:
        if given.hosts is not None:
            raise InputError(f"--hosts {given.hosts}: of which cluster?", fix="shoal cluster show dgx-a100 --hosts 4")
        print(_json(cluster_text.presets_value()) if given.json else cluster_text.presets_text())
        return 0
    given.hosts = None if given.hosts is None else [given.hosts]
    cluster = cluster_of(given)
    if given.json:
        print(_json(cluster_text.value(cluster, given.cluster)))
    else:
        print(cluster_text.text(cluster, given.cluster))
    return 0


def call_probe(given: argparse.Namespace) -> int:
    path: Path = given.output
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = not launched or os.environ["RANK"] == "0"
    if first and path.exists() and not given.force:
        raise InputError(f"{path} is there already", fix="--force to write over it, or -o with another name")
    if first and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}", fix="-o cluster.toml")
    began = time.monotonic()
    if launched:
        found = probe_launched(quick=given.quick)
        if found is None:
            return 0
    else:
        workers = None if given.run is None else workers_of(given.run)
        found = probe(quick=given.quick, lab=given.lab, workers=workers, progress=print_progress)
    cluster = measured_cluster(found, given.lab.cluster if given.lab is not None else None)
    path.write_text(toml_text(cluster), encoding="utf-8")
    if given.json:
        print_json({"file": str(path), **msgspec.to_builtins(found, str_keys=True)})
    else:
        print(probe_text(found, cluster))
        print(f"\nwritten to {path} after {time.monotonic() - began:.0f} s        next: shoal cluster show {path}")
    return 0


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
