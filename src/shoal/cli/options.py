"""Flags that several commands share. Those of a run are made from the fields of `RunConfig`, and are read back here."""

import argparse
from typing import Any

from shoal.cli.parser import CommandParser, HelpAll, rare_option
from shoal.errors import InputError
from shoal.worker.run_config import AUTO, GROUPS, ConfigField, RunConfig, config_fields

AXES = {"data": "copies of the model", "pipeline": "stages of the model", "tensor": "slices of the model"}
RUN_FILE, JOB_FILE = "a folder or the beginning of an id (the newest)", "a Python file that holds a shoal.Job"


def job_argument(parser: CommandParser, **more: Any) -> None:
    """FILE[:job], and `--set` to change the job."""
    parser.add_argument("file", metavar="FILE[:job]", **{"help": JOB_FILE} | more)
    job_options(parser)


def job_options(parser: CommandParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="change the job: --set steps=50 (repeats)")  # fmt: skip


def config_options(parser: CommandParser, *names: str, leave_out: tuple[str, ...] = (), **texts: str) -> None:
    """The flags of a run, or of these fields alone. A flag that is not given is not in the namespace.

    `texts`: by field, another help than the field's own."""
    for group, made in GROUPS.items():
        doc = str(made.__doc__)
        title = f"{group}: {doc[0].lower()}{doc[1:].rstrip('.')}"
        section = parser if names else parser.add_argument_group(title)
        for each in config_fields(group):
            if each.flag is not None and (each.flat_name in names or not names) and each.flat_name not in leave_out:
                _add_flag(section, each, texts.get(each.flat_name, each.text), common=bool(names))
        if group == "parallel" and not names and "layout" not in leave_out:
            _layout_axes(section)
        if group == "checkpoint" and not names:
            rare_option(section, "--checkpoint", default=argparse.SUPPRESS, metavar="auto|N",
                        help="steps between checkpoints, or auto: by their measured cost")  # fmt: skip
    if not names:
        parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")


def _add_flag(parser: Any, each: ConfigField, text: str, *, common: bool) -> None:
    more: dict[str, Any] = {key: each.more[key] for key in ("metavar", "nargs", "const") if key in each.more}
    if bool in each.kinds and "nargs" not in more:
        more["action"] = "store_true"
    elif each.choices:
        more["choices"] = each.choices
    elif str not in each.kinds:
        more["type"] = float if float in each.kinds else int if int in each.kinds else str
    names = [*([each.more["short"]] if "short" in each.more else []), f"--{each.flag}"]
    add = parser.add_argument if common or each.more.get("common") else lambda *a, **m: rare_option(parser, *a, **m)
    add(*names, default=argparse.SUPPRESS, help=text, **more)


def _layout_axes(parser: Any) -> None:
    for axis, what in AXES.items():
        rare_option(parser, f"--{axis}", type=int, metavar="N", help=f"{what}; the same as --layout {axis}=N")
    rare_option(parser, "--zero", type=int, metavar="1|2|3",
                help="cut optimizer state, gradients, weights among copies")  # fmt: skip


def config_of(given: argparse.Namespace, **more: Any) -> RunConfig:
    """The configuration that the flags ask for. `more`: fields that the command itself decides."""
    known = [*(each.flat_name for each in config_fields() if each.flag is not None), "checkpoint"]
    asked = {name: getattr(given, name) for name in known if hasattr(given, name)}
    axes = {axis: number for axis in (*AXES, "zero") if (number := getattr(given, axis, None)) is not None}
    if axes:
        if "layout" in asked:
            raise InputError(
                f"--layout {asked['layout']} and --{next(iter(axes))}: both describe the layout", fix="one of them"
            )
        asked["layout"] = ",".join(f"{axis}={number}" for axis, number in axes.items())
    lab = getattr(given, "lab", None)
    if lab is not None and asked.get("plan", AUTO) == AUTO:
        asked.setdefault("workers", lab.cluster.workers)
    if getattr(given, "json", False):
        asked["quiet"] = True
    return RunConfig().changed(**asked | more)
