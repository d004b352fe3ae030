"""Flags that several commands share. Those of a run are made from the fields of `RunConfig`, and are read back here."""

import argparse
import re
from pathlib import Path
from typing import Any

from shoal.cli.parser import CommandParser, HelpAll, rare_option
from shoal.errors import InputError
from shoal.worker.run_config import AUTO, GROUPS, ConfigField, RunConfig, config_fields

TIMES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0}
AXES = {"data": "copies of the model", "pipeline": "stages of the model", "tensor": "slices of the model"}


def job_argument(parser: CommandParser, **more: Any) -> None:
    """FILE[:job], and `--set` to change the job."""
    parser.add_argument("file", metavar="FILE[:job]", **{"help": "a Python file that holds a shoal.Job"} | more)
    job_options(parser)


def job_options(parser: CommandParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="change the job: --set steps=50 (repeats)")  # fmt: skip


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
    fields = [
        each
        for each in config_fields()
        if each.flag is not None and (each.flat_name in names if names else each.flat_name not in leave_out)
    ]
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
    elif bool in each.kinds and "nargs" not in more:
        more["action"] = "store_true"
    elif str not in each.kinds and "nargs" not in more:
        more["type"] = float if float in each.kinds else int
    flags = [*([each.more["short"]] if "short" in each.more else []), f"--{each.flag}"]
    if common:
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=text, **more)
    else:
        rare_option(parser, *flags, default=argparse.SUPPRESS, help=text, **more)


def config_of(given: argparse.Namespace, **more: Any) -> RunConfig:
    """The configuration that the flags ask for. `more`: fields that the command itself decides."""
    asked = {name: getattr(given, name) for name in given.config_names if hasattr(given, name)}
    if getattr(given, "checkpoint", None) is not None:
        asked["checkpoint"] = given.checkpoint
    axes = {axis: number for axis in (*AXES, "zero") if (number := getattr(given, axis, None)) is not None}
    if axes and "layout" in asked:
        raise InputError(
            f"--layout {asked['layout']} and --{next(iter(axes))}: both describe the layout", fix="one of them"
        )
    if axes:
        asked["layout"] = ",".join(f"{axis}={number}" for axis, number in axes.items())
    if given.lab is not None and "workers" in given.config_names and asked.get("plan", AUTO) == AUTO:
        asked.setdefault("workers", given.lab.cluster.workers)
    if getattr(given, "json", False) and "quiet" in given.config_names:
        asked["quiet"] = True
    return RunConfig().changed(**asked | more)


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
