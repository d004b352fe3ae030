"""RunConfig: how to run a job or a script. Flags, `shoal.train`, config.json and `shoal attach` all use this value.

A field is declared once, with its sentence, its flag and its bounds: `cli/options.py` makes the flags from it. Only
fields that give up exactness by name (`inexact`, `compress`, `algorithm="ring"`, tensor layouts, most `sync` modes)
change a bit of the result.
"""

import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shoal.collectives.options import CommConfig, CommOptions
from shoal.errors import InputError, PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import check_schedule_name
from shoal.parallel.plan import Plan, read_plan
from shoal.paramserver.sync_mode import EXAMPLES, SyncMode
from shoal.recovery.checkpoint.arithmetic import ACCEPTABLE
from shoal.recovery.checkpoint.signature import ACCEPT_UNSIGNED
from shoal.report.human import parse_size
from shoal.report.loggers.logger import read_names

AUTO = "auto"  # of `plan`: the planner chooses; of `checkpoint`: the measured cost decides
MAY_CHANGE = (*ACCEPTABLE, ACCEPT_UNSIGNED)  # of `accept`
MOST_SERVERS = 256  # more are a typing mistake: every worker connects to every server


def option(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """A field of a group. `text`: its sentence, also in `--help-all`. In `more`:

    flag    the flag's name without dashes, also in `shoal.train(…)`; None: the field has no flag
    least   the smallest number allowed; above: the number must exceed this
    The rest goes to `add_argument`.
    """
    return field(default=default, metadata={"text": text, "metavar": metavar, **more})


def common(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """A field whose flag `--help` shows, too."""
    return option(default, text, metavar, common=True, **more)


class ConfigGroup:
    """Fields of one subject. Every group checks its values when it is made."""

    def __post_init__(self) -> None:
        for each in config_fields(type(self).__name__.lower()):
            if isinstance(getattr(self, each.name), os.PathLike | ParallelLayout):
                self._set(each.name, str(getattr(self, each.name)))
            if getattr(self, each.name) is not None:
                each.check(getattr(self, each.name))
        self.check()

    def check(self) -> None:
        """Raises InputError where two fields contradict each other."""

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Parallel(ConfigGroup):
    """How the job is spread over workers."""

    workers: int | None = common(None, "worker processes in all (1)", "N")
    layout: str | None = common(
        None, "data=2,pipeline=2,tensor=2,zero=1: copies, stages, slices, sharded state", "LIST"
    )
    schedule: str = option("1f1b", "of a pipeline: gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe (1f1b)", "NAME")
    chunks: int | None = option(None, "stages on each worker of a pipeline (the schedule's own number)", "N")
    recompute: bool = option(False, "keep only the inputs of blocks, and compute the blocks again in the backward")
    shares: str | None = common(None, "uneven shares of the lanes: 3,1; or auto: by measured speed", "LIST")
    plan: Plan | str | None = common(  # noqa: RUF009
        None, "the planner chooses the layout (the default); or replay a plan.json", "auto|FILE"
    )
    memory: str | int | None = option(None, "the most that a worker may use: 250MB; enforced (no limit)", "SIZE")
    cluster: str | None = option(None, "the cluster that the run is predicted and planned for (laptop)", "NAME|FILE")
    calibrate: tuple[str, ...] = option((), "earlier runs, whose measurements correct the prediction", "RUN", nargs="+")
    pin: bool = option(False, "give each worker cores of its own")
    inexact: bool = option(False, "without deterministic kernels: not the same bits, as the report notes")

    def check(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise PlanError(f"{self.workers} workers: at least 1 is needed", fix="--workers 1")
        check_schedule_name(self.schedule)
        self._set("calibrate", tuple(map(str, self.calibrate)))
        if self.layout is not None and self.plan is not None:
            has = "the planner chooses one" if self.plan == AUTO else "the plan has one"
            named = self.plan if isinstance(self.plan, str) else "FILE"
            raise InputError(f"--plan {named} and a layout: {has}", fix="one of them")
        if self.plan == AUTO and self.shares is not None:
            raise InputError(f"--plan auto and --shares {self.shares}: both assign the lanes", fix="one of them")
        if isinstance(self.plan, str) and self.plan != AUTO:
            self._set("plan", read_plan(Path(self.plan)))
        _ = self.parallel_layout, self.memory_bytes

    @property
    def parallel_layout(self) -> ParallelLayout | None:
        """The layout as a value. Workers beyond those that it names are further copies of the model."""
        if self.layout is None:
            return None
        layout = ParallelLayout.parse(self.layout)
        if self.workers is not None and "data" not in self.layout:
            copies, rest = divmod(self.workers, layout.replica_size)
            layout = replace(layout, data=copies) if copies and not rest else layout
        return layout

    @property
    def fixed_plan(self) -> Plan | None:
        """The plan to replay."""
        return self.plan if isinstance(self.plan, Plan) else None

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.memory) if isinstance(self.memory, str) else self.memory


@dataclass(frozen=True, kw_only=True)
class Communication(ConfigGroup):
    """How gradients travel between hosts."""

    compress: str = option("", "fewer bytes between hosts or racks, not exact: int8@host,powersgd:4@rack", "LIST")
    algorithm: str = option(
        "", "direct, tree, halving, hierarchical, or ring, which is not exact (the cost model chooses)", "NAME"
    )
    links: dict[str, tuple[float, float]] | None = option(  # noqa: RUF009
        None, "by level (memory, host, rack): seconds of a message, and bytes per second (SHOAL_LINKS)", flag=None
    )
    overlap: Literal["auto", "on", "off"] = option(
        "auto", "send gradients during the backward pass: auto (between hosts, where it pays), on or off; the same bits"
    )
    timeout: float = option(1800.0, "seconds to wait for other workers (1800)", "S", above=0)

    def check(self) -> None:
        CommConfig.from_options(CommOptions(algorithm=self.algorithm, compress=self.compress))


@dataclass(frozen=True, kw_only=True)
class Failure(ConfigGroup):
    """What becomes of a run whose workers die, stall, leave and join."""

    on_failure: Literal["replace", "shrink", "stop"] = common(
        "replace", "a worker is lost: replace it (default), go on with the others, or stop"
    )
    min_workers: int = option(1, "with fewer workers the run saves and stops (1)", "N")
    max_workers: int | None = option(None, "the most workers that shoal scale may ask for (the lanes)", "N")
    max_failures: int = option(100, "after more lost workers than this the run stops (100)", "N")
    slow: Literal["rebalance", "evict", "ignore"] = option(
        "rebalance", "a worker that falls behind: fewer lanes (default), replaced, or waited for"
    )
    lease: float = option(5.0, "seconds of silence after which a worker is lost (5)", "S", above=0)
    store: str | None = option(None, "etcd://host:port[/prefix], for several machines (one process of the run)", "URL")
    nonfinite: Literal["stop", "skip"] = option("stop", "a loss that is not finite: stop (default) or skip the step")
    elastic: bool = option(True, "workers come and go; False: the first loss ends the run, without a store", flag=None)
    detached: bool = option(False, "the run goes on when its driver dies, for shoal attach", flag=None)

    def check(self) -> None:
        least, most = self.min_workers, self.max_workers
        if least < 1:
            raise InputError(f"--min-workers {least}: at least 1 is needed")
        if most is not None and least > most:
            raise InputError(
                f"--min-workers {least} is above --max-workers {most}", fix="the least first: --min-workers 1"
            )
        if self.max_failures < 0:
            raise InputError(f"--max-failures {self.max_failures}: a number of lost workers, 0 or more")

    def check_workers(self, workers: int) -> None:
        """Raises InputError where a run of so many workers cannot start."""
        most = self.max_workers
        if workers < self.min_workers or (most is not None and workers > most):
            bounds = f"--min-workers {self.min_workers}" + ("" if most is None else f" and --max-workers {most}")
            raise InputError(f"--workers {workers} does not lie within {bounds}")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(ConfigGroup):
    """When a run is saved, and from where it goes on."""

    every: int | None = option(
        None, "steps between checkpoints (one pass over the data)", "N", flag="checkpoint-every", least=1
    )
    auto: bool = option(False, "checkpoints as often as their measured cost is worth", flag=None)
    resume: str | bool = common(
        False, "go on with a run (folder, id, or nothing: the newest), on any workers", "RUN", nargs="?", const=True
    )
    accept: str = option(
        "", f"with --resume: go on although these have changed ({','.join(MAY_CHANGE)}); the report notes it", "LIST"
    )
    stop_after: int | None = option(None, "stop after this step, resumable", "N", least=1)
    save_on_error: bool = option(True, "an error ends the run: save the last whole step first (on)")

    def check(self) -> None:
        unknown = [name for name in self.accepted if name not in MAY_CHANGE]
        if unknown:
            near = get_close_matches(unknown[0], MAY_CHANGE, n=1)
            fix = f"did you mean {near[0]}?" if near else f"what may: {', '.join(MAY_CHANGE)}"
            raise InputError(f"--accept {unknown[0]}: it may not change on the way", fix=fix)
        if self.accepted and self.resume is False:
            raise InputError(f"--accept {self.accept} is for a run that goes on", fix="--resume RUN")

    @property
    def accepted(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.accept.split(",") if name.strip())


@dataclass(frozen=True, kw_only=True)
class Servers(ConfigGroup):
    """Processes that hold the weights, and how they keep workers in step."""

    count: int | None = common(None, "parameter servers, which hold the weights (none)", "N", flag="servers")
    sync: str = common("", f"how servers keep workers in step: {EXAMPLES} (sync)", "MODE")

    def check(self) -> None:
        _ = self.mode
        if self.count is not None and not 0 <= self.count <= MOST_SERVERS:
            raise PlanError(f"--servers {self.count}: a number from 0 to {MOST_SERVERS}", fix="--servers 2, or 0: none")

    @property
    def mode(self) -> SyncMode | None:
        return SyncMode.parse(self.sync) if self.sync else None


@dataclass(frozen=True, kw_only=True)
class Output(ConfigGroup):
    """What the run shows and leaves behind."""

    run_dir: str | None = common(None, "the run's folder (a fresh one under runs/)", "DIR")
    log: str = common("", "also log to: csv, tensorboard, wandb, mlflow, with commas between", "LIST")
    tensorboard: bool = common(False, "write TensorBoard files into the run's folder: --log tensorboard")
    samples: bool = option(False, "record which samples each step saw, not only a digest")
    digests: bool = option(False, "record one sha256 per tensor and step, for shoal verify", flag=None)
    predict: bool | None = option(None, "predict the run for its report; None: as SHOAL_PREDICT has it (on)", flag=None)
    plain: bool = option(False, "lines instead of the live view")
    quiet: bool = option(False, "only the closing report", short="-q")

    def check(self) -> None:
        _ = self.loggers

    @property
    def loggers(self) -> tuple[str, ...]:
        return read_names(f"{self.log},tensorboard" if self.tensorboard else self.log)

    verbose: bool = option(False, "all that was measured in the closing report, also of a short run", short="-v")
    listed: bool = option(False, "shoal runs lists it, wherever its folder is", flag=None)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How to run: six groups. `RunConfig().changed(workers=4, lease=2.0)` finds the groups of single fields."""

    parallel: Parallel = field(default_factory=Parallel)
    communication: Communication = field(default_factory=Communication)
    failure: Failure = field(default_factory=Failure)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    servers: Servers = field(default_factory=Servers)
    output: Output = field(default_factory=Output)

    def changed(self, **given: Any) -> "RunConfig":
        """With other groups (`failure=Failure(lease=2.0)`), or other fields by their flags' names (`lease=2.0`)."""
        groups: dict[str, Any] = {name: each for name, each in given.items() if isinstance(each, GROUPS.get(name, ()))}
        known, changes = {each.flat_name: each for each in config_fields()}, dict[str, dict[str, Any]]()
        for name, value in _checkpoint_given(given).items():
            if name in groups:
                continue
            if name not in known:
                raise _unknown_field(name, [*known, *GROUPS])
            changes.setdefault(known[name].group, {})[known[name].name] = value
        made = replace(self, **groups)
        changed: dict[str, Any] = {group: replace(getattr(made, group), **more) for group, more in changes.items()}
        return replace(made, **changed)

    @property
    def exact(self) -> bool:
        return not self.parallel.inexact

    @property
    def comm_options(self) -> CommOptions:
        """What a group of workers is to do with tensors that travel between hosts."""
        asked, inexact = self.communication, self.parallel.inexact
        return CommOptions(algorithm=asked.algorithm, compress=asked.compress, inexact=inexact, links=asked.links or {})

    def with_comm_options(self, options: CommOptions) -> "RunConfig":
        return self.changed(algorithm=options.algorithm, compress=options.compress, links=options.links or None)


GROUPS: dict[str, type[Any]] = {each.name: typing.cast(Any, each.type) for each in fields(RunConfig)}


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One field of a group, as flags and `RunConfig.changed` need it."""

    group: str
    name: str
    flag: str | None  # without dashes
    text: str
    default: Any
    choices: tuple[str, ...]  # the known words; empty: any
    more: dict[str, Any]  # see `option`

    @property
    def flat_name(self) -> str:
        """The field's name where no group is named."""
        return self.name if self.flag is None else self.flag.replace("-", "_")

    @property
    def number(self) -> type[int | float] | None:
        return {"N": int, "S": float}.get(str(self.more["metavar"]))

    def check(self, value: Any) -> None:
        if self.number is not None and not isinstance(value, int | float):
            raise InputError(f"{self.flat_name}={value!r} is no number", fix=f"{self.flat_name}=1")
        if self.choices and value not in self.choices:
            raise InputError(f"{self.flat_name}={value!r} is not known", fix=", ".join(map(repr, self.choices)))
        least, above = self.more.get("least"), self.more.get("above")
        if least is not None and value < least:
            raise InputError(f"--{self.flag} {value}: a number from {least} up")
        if above is not None and not value > above:
            raise InputError(f"--{self.flag} {value}: seconds above {above}")


@cache
def config_fields(group: str = "") -> Sequence[ConfigField]:
    """The fields of a group, or of all groups."""
    if not group:
        return [each for name in GROUPS for each in config_fields(name)]
    hints, found = typing.get_type_hints(GROUPS[group]), []
    for each in fields(GROUPS[group]):
        more, hint = dict(each.metadata), hints[each.name]
        text, flag = more.pop("text"), more.pop("flag", each.name.replace("_", "-"))
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        known = {"group": group, "name": each.name, "text": text, "default": each.default}
        found.append(ConfigField(**known, flag=flag, choices=choices, more=more))
    return found


def _checkpoint_given(given: dict[str, Any]) -> dict[str, Any]:
    """`checkpoint="auto"` or `checkpoint=50` in the fields that it stands for."""
    asked = given.get("checkpoint")
    if asked is None or isinstance(asked, Checkpoint):
        return {name: value for name, value in given.items() if name != "checkpoint" or value is not None}
    rest = {name: value for name, value in given.items() if name != "checkpoint"}
    if asked == AUTO:
        return rest | {"auto": True}
    if rest.get("checkpoint_every") is not None:
        raise InputError(f"--checkpoint {asked} and --checkpoint-every {rest['checkpoint_every']}: one of them")
    if not str(asked).isdigit() or int(asked) < 1:
        raise InputError(f"--checkpoint {asked}: auto, or a number of steps from 1 up")
    return rest | {"checkpoint_every": int(asked)}


def _unknown_field(name: str, known: Sequence[str]) -> InputError:
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
    return InputError(f"{name} is not a field of RunConfig", fix=fix)
