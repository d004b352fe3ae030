"""Flags that several commands share. Those of a run are made from the fields of `RunConfig`, and are read back here."""

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.parser import CommandParser, HelpAll, rare_option
from shoal.errors import InputError
from shoal.report.human import plural
from shoal.worker.run_config import AUTO, GROUPS, ConfigField, RunConfig, config_fields

if TYPE_CHECKING:  # a command imports what it needs when it is carried out, so that `--help` is there at once
    from shoal.job.job import Job
    from shoal.planner.cluster import Cluster
    from shoal.planner.cost.runtime import Runtime

TIMES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0}
AXES = {"data": "copies of the model", "pipeline": "stages of the model", "tensor": "slices of the model"}


def job_argument(parser: CommandParser, **more: Any) -> None:
    """FILE[:job], and `--set` to change the job."""
    parser.add_argument("file", metavar="FILE[:job]", **{"help": "a Python file that holds a shoal.Job"} | more)
    job_options(parser)


def job_options(parser: CommandParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="change the job: --set steps=50 (repeats)")  # fmt: skip


def job_of(given: argparse.Namespace) -> "Job":
    """The job to train. Executes the same command again where the job asks for an instruction set that is not in
    force: a process chooses it before its first kernel."""
    from shoal.job.load import load_job
    from shoal.numerics.kernels import ISA_IN_FORCE, isa_environment

    job = load_job(given.file, given.settings)
    if job.isa is not None and os.environ.get(ISA_IN_FORCE) != job.isa:
        if given.lab is not None:
            given.lab.close()  # the new process makes it again
        os.execve(sys.executable, [sys.executable, "-m", "shoal", *given.given], os.environ | isa_environment(job.isa))
    return job


def run_argument(parser: CommandParser, *, json: str = "print the result as JSON") -> None:
    """RUN, and `--json`."""
    parser.add_argument("run", nargs="?", help="a folder or the beginning of an id (the newest)")
    parser.add_argument("--json", action="store_true", help=json)


def config_options(
    parser: CommandParser, *names: str, common: bool = True, leave_out: tuple[str, ...] = (), **texts: str
) -> None:
    """The flags of all fields of `RunConfig`, in their groups; or with `names`, the flags of these fields alone.

    A flag that is not given is not in the namespace. `common`: `--help` shows the named flags, too. `texts`: by field,
    another help than the field's own."""
    flags = [each for each in config_fields() if each.flag is not None]
    fields = [each for each in flags if (each.flat_name in names if names else each.flat_name not in leave_out)]
    parser.set_defaults(config_names=[each.flat_name for each in fields])
    if names:
        for each in fields:
            _add_flag(parser, each, texts.get(each.flat_name, each.text), common=common)
        return
    for group, made in GROUPS.items():
        doc = str(made.__doc__)
        section = parser.add_argument_group(f"{group}: {doc[0].lower()}{doc[1:].rstrip('.')}")
        for each in fields:
            if each.group == group:
                _add_flag(section, each, texts.get(each.flat_name, each.text), common=each.more.get("common", False))
        if group == "parallel" and "layout" not in leave_out:
            for axis, what in AXES.items():
                rare_option(section, f"--{axis}", type=int, metavar="N", help=f"{what}; as in --layout {axis}=N")
            rare_option(section, "--zero", type=int, metavar="1|2|3",
                        help="cut optimizer state, gradients, weights among copies")  # fmt: skip
        if group == "checkpoint":
            rare_option(section, "--checkpoint", metavar="auto|N",
                        help="steps between checkpoints, or auto: by their measured cost")  # fmt: skip
    parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")


def _add_flag(parser: Any, each: ConfigField, text: str, *, common: bool) -> None:
    more: dict[str, Any] = {key: each.more[key] for key in ("metavar", "nargs", "const") if each.more.get(key)}
    if each.choices:
        more["choices"] = each.choices
    elif each.number is not None:
        more["type"] = each.number
    elif "metavar" not in more:
        more["action"] = argparse.BooleanOptionalAction if each.default is True else "store_true"
    flags = [*([each.more["short"]] if "short" in each.more else []), f"--{each.flag}"]
    if common:
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=text, **more)
    else:
        rare_option(parser, *flags, default=argparse.SUPPRESS, help=text, **more)


def config_of(given: argparse.Namespace, **more: Any) -> RunConfig:
    """The configuration that the flags ask for. `more`: fields that the command itself decides."""
    asked = {name: getattr(given, name) for name in given.config_names if hasattr(given, name)}
    return RunConfig().changed(**asked | more)


def run_config_of(given: argparse.Namespace) -> RunConfig:
    """The configuration of `shoal train` and `shoal run`."""
    more: dict[str, Any] = {"listed": True, "detached": given.lab is None}  # a lab ends with the process that made it
    axes = {axis: number for axis in (*AXES, "zero") if (number := getattr(given, axis, None)) is not None}
    if axes and hasattr(given, "layout"):
        raise InputError(f"--layout {given.layout} and --{next(iter(axes))}: both name a layout", fix="one of them")
    if axes:
        more["layout"] = ",".join(f"{axis}={number}" for axis, number in axes.items())
    if given.checkpoint is not None:
        more["checkpoint"] = given.checkpoint
    if given.lab is not None and not hasattr(given, "workers") and getattr(given, "plan", AUTO) == AUTO:
        more["workers"] = given.lab.cluster.workers
    if given.json:
        more["quiet"] = True
    return config_of(given, **more)


# -- clusters ---------------------------------------------------------------------------------------------------------


def cluster_options(parser: CommandParser) -> None:
    """The flags that `cluster_of`, `clusters_of` and `cluster_label` read."""
    parser.add_argument("--cluster", metavar="NAME|FILE",
                        help="a preset (shoal cluster show lists them) or a TOML file (this machine)")  # fmt: skip
    counts = partial(read_counts, "--hosts")
    parser.add_argument("--hosts", type=counts, metavar="N", help="so many hosts of that kind (as it has)")
    rare_option(parser, "--racks", type=int, metavar="N", help="spread over so many racks (as it has)")


def cluster_of(given: argparse.Namespace) -> "Cluster":
    """The cluster of `--cluster` and `--hosts`; without `--cluster`, this machine with guessed speeds."""
    sizes = given.hosts or [None]
    if len(sizes) > 1:
        given_sizes = ",".join(map(str, sizes))
        fix = f"--hosts {sizes[0]}"
        raise InputError(f"--hosts {given_sizes}: one number is wanted here, a list is for shoal plan", fix=fix)
    return _sized(given, sizes[0])


def clusters_of(given: argparse.Namespace) -> "list[Cluster]":
    """One cluster for each number of `--hosts`."""
    return [_sized(given, hosts) for hosts in given.hosts or [None]]


def cluster_label(given: argparse.Namespace) -> str:
    """For a heading: the cluster, its size, and whether its speeds are measured."""
    cluster = _sized(given, (given.hosts or [None])[0])
    count = cluster.devices
    if given.cluster is not None:
        return f"cluster {given.cluster}: {plural(len(cluster.hosts), 'host')}, {plural(count, 'device')}"
    cores = plural(count, "core")
    return f"cluster: this machine, {cores}, speeds guessed (no --cluster; shoal cluster probe measures them)"


def _sized(given: argparse.Namespace, hosts: int | None) -> "Cluster":
    from shoal.planner.cluster import find_cluster, resize_cluster
    from shoal.planner.cluster.local_machine import this_machine

    racks = getattr(given, "racks", None)
    if given.cluster is not None:
        return find_cluster(given.cluster, hosts=hosts, racks=racks)
    found = this_machine()
    as_it_is = hosts is None and racks is None
    return found if as_it_is else resize_cluster(found, 1 if hosts is None else hosts, racks=racks)


def calibrated(given: argparse.Namespace, cluster: "Cluster", runtime: "Runtime") -> "tuple[Cluster, Runtime]":
    """Both as the runs of `--calibrate` correct them."""
    if not given.calibrate:
        return cluster, runtime
    from shoal.driver.predict_run import PRESET
    from shoal.planner.calibration_runs import load_calibration
    from shoal.planner.cost.calibrate import apply_calibration

    return apply_calibration(cluster, runtime, load_calibration(given.calibrate, given.cluster or PRESET))


# -- values -----------------------------------------------------------------------------------------------------------


def check_counts(given: argparse.Namespace, *names: str) -> None:
    """Raises InputError where one of these flags is below 1."""
    for name in names:
        number = getattr(given, name)
        if number is not None and number < 1:
            raise InputError(f"--{name} {number}: at least 1", fix=f"--{name} 1")


def refuse_shape_flags(given: argparse.Namespace) -> None:
    """Raises InputError for flags that describe a shape beside a job, which has its own batch."""
    for name, fix in (("microbatch", "--set microbatches=…, parts of a lane"), ("batch", f"--set batch={given.batch}")):
        if getattr(given, name, None) is not None:
            raise InputError(f"--{name} is a shape's, and a job has its own", fix=fix)


def read_counts(flag: str, text: str) -> list[int]:
    """`4`, or `1,2,4`."""
    numbers = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")]
    if min(numbers) < 1:
        raise InputError(f"{flag} {text}: whole numbers from 1 up", fix=f"{flag} 4, or {flag} 1,2,4")
    return numbers


def read_time(flag: str, text: str, *, bare: bool = False) -> float:
    """48h, 30min, 15s, 2d in seconds. `bare`: a number without a unit is seconds; else it is refused."""
    number, unit = re.fullmatch(r"(-?\d+(?:\.\d+)?)?\s*(.*)", text.strip()).groups()  # type: ignore[union-attr]
    unit = unit or ("s" if bare else "")
    if number is None or unit not in TIMES:
        example = f"{text.strip()}h" if number is not None and not unit else "30min"
        raise InputError(f"{flag} {text}: a time with its unit is wanted", fix=f"{flag} {example}, or s, min, d")
    if float(number) <= 0:
        raise InputError(f"{flag} {text}: above 0", fix=f"{flag} 1h")
    return float(number) * TIMES[unit]


def write_file(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}", fix="another path") from None
