"""A job: what to train, and the whole arithmetic of it. Nothing here depends on the number of workers."""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from shoal.errors import JobError
from shoal.job.accumulate import parse_accumulation
from shoal.job.callbacks import Callback, check_callbacks
from shoal.job.dataset import DataSource, open_data
from shoal.job.early_stopping import EarlyStopping, MonitoredMetric
from shoal.job.freeze import check_freeze
from shoal.job.loss_scale import LossScale
from shoal.job.passes import check_pass_functions, refuse_pass_options
from shoal.job.target import MetricTarget
from shoal.numerics.describe import describe
from shoal.numerics.kernels import ISA_ENVIRONMENT
from shoal.numerics.sampling import ONE_BATCH, Accumulation, SampleSchedule

NamedParameters = list[tuple[str, nn.Parameter]]
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16-autocast",
    "bf16-autocast": "bf16-autocast",
    "fp16": "fp16-autocast",
    "fp16-autocast": "fp16-autocast",  # with a loss scale
    "bf16-weights": "bf16-weights",  # weights and activations in bf16, masters and updates in fp32
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train. Required: model, data, loss, optimizer, batch, and steps or epochs.

    model      a function that builds it (preferred: `seed` then decides the initial weights), or an instance
    data       tensors, a map-style data set (a datasets.Dataset, too), a DataLoader (read for its data set, order and
               batch), or a function that returns one of these. A sample is (input, …, target) or {name: value, …}
    loss       loss(output, target): a scalar mean over samples, or (sum, count) for a mean over something else.
               "model": the model gets the whole batch, model(**batch) or model(*batch), and returns its loss (.loss,
               ["loss"], the first of a tuple, or the loss alone); a mean over labels that are not ignored is weighted
               by their number. Several by name: {"critic": loss(model, batch), "actor": …}, one backward pass each
    optimizer  gets the list of (name, parameter), or the model and that list; returns a torch optimizer; with
               several losses one of each name, which gets the parameters below the submodule of that name
    batch      samples of one optimizer update, whatever the number of workers

    Of samples by name, a loss function's model gets those entries that its `forward` takes by name, except labels; the
    loss and the metrics get (output, batch). A `forward` that takes none of them gets the batch itself.
    """

    model: nn.Module | Callable[[], nn.Module]
    data: Any
    loss: Callable[[Any, Any], Any] | Literal["model"] | Mapping[str, Callable[[nn.Module, Any], Any]]
    optimizer: Callable[..., Optimizer] | Mapping[str, Callable[..., Optimizer]]
    batch: int | None = None
    steps: int | None = None
    epochs: int | None = None

    lanes: int | None = None  # 4, or the largest power of two that divides a smaller batch
    microbatches: int = 1  # of a lane, computed one after the other
    accumulate: int | Mapping[int, int] | None = None  # batches that are one update; by pass: {0: 1, 2: 4}
    seed: int = 0
    shuffle: bool = True
    collate_fn: Callable[[list[Any]], Any] | None = None  # makes a batch of a list of samples (padding)
    last: Literal["short", "drop"] | None = None  # how to treat a last batch that is not full; short
    blocks: Sequence[str] | None = None
    tensor_rules: Mapping[str, str] | None = None  # how modules are split under tensor=…, by patterns of names
    start_from: str | Path | None = None  # a safetensors file with the weights to begin with
    isa: str | None = None
    threads: int = 1
    compile: bool = False
    sync_batchnorm: bool = False  # batch norm sees the whole batch, not a lane
    precision: str = "fp32"
    loss_scale: Any = None  # of fp16: a LossScale, which follows the gradients; or a number, which stays
    scheduler: Callable[[Optimizer], Any] | Mapping[str, Callable[[Optimizer], Any]] | None = None  # once per update
    clip_norm: float | None = None
    freeze: Mapping[str, int | None] | None = None  # names of parameters or modules -> the first step that trains them
    evaluate: Any = None  # held-out data, in any form that `data` can have
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    target: Any = None  # "accuracy >= 0.97": training ends when an evaluation reaches it
    evaluate_every: int | None = None  # steps; once per pass over the data
    checkpoint_every: int | None = None  # steps; once per pass over the data
    callbacks: Sequence[Callback] = ()
    patience: int | None = None  # evaluations without a better `monitor` after which training ends
    monitor: str | None = None  # "loss", "accuracy", "max f1", "min perplexity"; keep_best's metric, or the loss
    keep_best: str | None = None  # a metric: the checkpoint of its best evaluation is kept, and exported
    ema: float | None = None  # 0.999: an exponential moving average of the weights, exported beside them
    evaluate_ema: bool = False  # evaluations measure the average; False: the weights
    tokens: int | None = None  # of a sample: reports then show tokens per second, too
    name: str = "job"
    _lanes_given: bool = field(init=False, repr=False, compare=False)

    def __new__(cls, *positional: Any, **given: Any) -> "Job":
        """Names that are no fields, and fields that are missing, are said in the words of a job; Python's own error
        would name `__init__`."""
        known = {item.name: item for item in dataclasses.fields(cls) if item.init}
        if positional:
            raise JobError("the fields of a job are given by name", fix="Job(model=…, data=…, loss=…, optimizer=…)")
        for name in (name for name in given if name not in known):
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}={_short(given[name])}?" if near else f"one of {', '.join(known)}"
            raise JobError(f"a job has no field {name}", fix=fix)
        missing = [name for name, item in known.items() if name not in given and _is_required(item)]
        if given and missing:  # nothing is given where an instance is copied
            fix = f"Job(…, {', '.join(f'{name}=…' for name in missing)})"
            raise JobError(f"a job without {', '.join(missing)} cannot be trained", fix=fix)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        loader_batch = getattr(self.data, "batch_size", None)
        if self.batch is None and isinstance(loader_batch, int):
            object.__setattr__(self, "batch", loader_batch)
        if self.batch is None:
            raise JobError("batch is missing", fix="batch=64: the samples of one update, for all workers together")
        self._check_calls()
        for name in ("batch", "microbatches", "threads"):
            _check_integer(name, getattr(self, name), minimum=1)
        for name in ("steps", "epochs", "evaluate_every", "checkpoint_every", "lanes", "tokens"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), minimum=1)
        _check_integer("seed", self.seed, minimum=0)
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise JobError(f"a job has steps or epochs; this one has {given}", fix="steps=1000, or epochs=10")
        object.__setattr__(self, "_lanes_given", self.lanes is not None)
        if self.lanes is None:
            object.__setattr__(self, "lanes", _default_lanes(self.batch))
        self._check_batch_split()
        parse_accumulation(self.accumulate)
        self._check_choices()
        object.__setattr__(self, "precision", PRECISIONS[self.precision])
        object.__setattr__(self, "loss_scale", LossScale.parse(self.loss_scale))
        object.__setattr__(self, "target", MetricTarget.parse(self.target, self.measured))
        if self.target is not None and self.evaluate is None:
            raise JobError(
                f"target '{self.target}' without evaluate: nothing measures it", fix="evaluate=held_out_data"
            )
        self._check_monitoring()

    def _check_calls(self) -> None:
        check_pass_functions(self.loss, self.optimizer, self.scheduler)
        several = isinstance(self.loss, Mapping)
        single = ["collate_fn"] if self.collate_fn is not None else []
        for name in ("model", *([] if several else ["loss", "optimizer"]), *single):
            if not callable(getattr(self, name)) and (name, self.loss) != ("loss", "model"):
                kind = type(getattr(self, name)).__name__
                extras = {
                    "optimizer": " (a function of the parameters returns the optimizer)",
                    "loss": ', or "model" for a model that returns its loss',
                }
                extra = extras.get(name, "")
                raise JobError(f"{name} must be callable, not {kind}{extra}")
        if isinstance(self.loss, type) and issubclass(self.loss, nn.Module):
            name = self.loss.__name__
            raise JobError(f"loss={name} is a class, and a loss is called with (output, target)", fix=f"loss={name}()")
        if isinstance(self.optimizer, Optimizer):
            raise JobError("optimizer is an instance; the job builds it", fix="optimizer=lambda named: SGD(named, 0.1)")
        if self.scheduler is not None and not several and not callable(self.scheduler):
            raise JobError("scheduler is an instance", fix="scheduler=lambda optimizer: StepLR(optimizer, 100)")
        if not isinstance(self.metrics, Mapping) or not all(callable(metric) for metric in self.metrics.values()):
            raise JobError("metrics must map names to functions(output, target)", fix='metrics={"accuracy": accuracy}')
        for name in self.metrics:
            if not isinstance(name, str) or not name.isprintable():
                raise JobError(f"metrics: {name!r} is no name, which is text in one line", fix='{"accuracy": accuracy}')
            if name == "loss":
                raise JobError("metrics: 'loss' is the job's own loss", fix="another name; evaluations have it anyway")

    def _check_batch_split(self) -> None:
        assert self.batch is not None and self.lanes is not None
        count = self.lanes * self.microbatches
        if self.batch % count == 0:
            return
        into = f"{self.lanes} lanes"
        if self.microbatches > 1:
            into += f" of {self.microbatches} microbatches ({count} in all)"
        below, above = self.batch // count * count, -(-self.batch // count) * count
        batches = " or ".join(str(number) for number in (below, above) if number)
        fits = [lanes for lanes in range(1, self.batch + 1) if self.batch % (lanes * self.microbatches) == 0]
        near = sorted(sorted(fits, key=lambda lanes: abs(lanes - (self.lanes or 1)))[:4])
        lanes_fix = f", or lanes={' or '.join(map(str, near))}" if near else ", or fewer microbatches"
        raise JobError(f"a batch of {self.batch} cannot be cut into {into}", fix=f"batch={batches}{lanes_fix}")

    def _check_choices(self) -> None:
        for name, value, known in (
            ("precision", self.precision, tuple(PRECISIONS)),
            ("last", self.last, (None, "short", "drop")),
            ("isa", self.isa, (None, *ISA_ENVIRONMENT)),
        ):
            if value not in known:
                names = ", ".join(repr(choice) for choice in known if choice is not None)
                raise JobError(f"{name}={value!r} is not known", fix=f"one of {names}")
        if self.sync_batchnorm:
            asked = {"microbatches": self.microbatches > 1, "compile": self.compile}
            asked["accumulate"] = self.accumulation != ONE_BATCH
            for name in (name for name, given in asked.items() if given):
                other = f"{name}={getattr(self, name)}"
                raise JobError(f"sync_batchnorm=True and {other} do not go together", fix="one of them")
        if self.passes:
            fields = ("compile", "ema", "loss_scale")
            refuse_pass_options({name: getattr(self, name) for name in fields if getattr(self, name)})
            if PRECISIONS[self.precision] not in ("fp32", "bf16-autocast"):
                refuse_pass_options({"precision": self.precision})
        if self.clip_norm is not None and not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise JobError(f"clip_norm={self.clip_norm!r} must be a number above 0")
        if self.freeze is not None:
            check_freeze(self.freeze)

    def _check_monitoring(self) -> None:
        check_callbacks(self.callbacks)
        if self.ema is not None and not (isinstance(self.ema, int | float) and 0 < self.ema < 1):
            raise JobError(f"ema={self.ema!r} must be a number between 0 and 1", fix="ema=0.999")
        if self.evaluate_ema and self.ema is None:
            raise JobError("evaluate_ema=True without ema: there is no average to evaluate", fix="ema=0.999")
        monitored = [("callbacks", each.metric) for each in self.callbacks if isinstance(each, EarlyStopping)]
        if self.patience is not None:
            _check_integer("patience", self.patience, minimum=1)
            named = "patience" if self.monitor is None else "monitor"
            monitored.append((named, MonitoredMetric.parse(self.monitored, named)))
        elif self.monitor is not None:
            raise JobError(f"monitor={self.monitor!r} without patience: nothing waits for it", fix="patience=3")
        if self.keep_best is not None:
            monitored.append(("keep_best", MonitoredMetric.parse(self.keep_best, "keep_best")))
        for field_name, metric in monitored:
            if self.evaluate is None:
                text = f"{field_name} watches '{metric.name}' without evaluate: nothing measures it"
                raise JobError(text, fix="evaluate=held_out_data")
            metric.check(self.measured, field_name)

    @property
    def passes(self) -> tuple[str, ...]:
        """The backward passes of a step by name, in order; empty: there is one, without a name."""
        return tuple(self.loss) if isinstance(self.loss, Mapping) else ()

    @property
    def measured(self) -> dict[str, Any]:
        """What an evaluation measures beside "loss": the losses of the passes before the last one, and the metrics."""
        return {f"loss {name}": None for name in self.passes[:-1]} | dict(self.metrics)

    @property
    def monitored(self) -> str:
        """What `patience` waits for."""
        return self.monitor or self.keep_best or "loss"

    @property
    def lane_count(self) -> int:
        assert self.lanes is not None
        return self.lanes

    @property
    def batch_size(self) -> int:
        assert self.batch is not None
        return self.batch

    def lanes_for(self, replicas: int) -> int | None:
        """So many lanes that each of so many replicas has one: a power of two, or the fewest that divide the batch."""
        power = 1 << (replicas - 1).bit_length()
        wanted = (power, *range(replicas, self.batch_size + 1))
        return next((lanes for lanes in wanted if self.batch_size % (lanes * self.microbatches) == 0), None)

    def open_data(self) -> DataSource:
        return open_data(self.data, seed=self.seed, shuffle=self.shuffle, collate_fn=self.collate_fn)

    def open_held_out(self) -> DataSource | None:
        if self.evaluate is None:
            return None
        return open_data(self.evaluate, seed=self.seed, shuffle=False, collate_fn=self.collate_fn)

    @property
    def autocast(self) -> bool:
        """Whether the model computes in the types that torch chooses for each operation."""
        return self.precision.endswith("-autocast")

    @property
    def loss_scaling(self) -> LossScale | None:
        """The loss scale in force: fp16 has one in any case."""
        return LossScale() if self.loss_scale is None and self.precision == "fp16-autocast" else self.loss_scale

    @property
    def accumulation(self) -> Accumulation:
        return parse_accumulation(self.accumulate)

    def schedule(self, samples: int, loader_last: str | None = None) -> SampleSchedule:
        if samples < self.batch_size:
            raise JobError(f"the data has {samples} samples, fewer than a batch of {self.batch}", fix="a smaller batch")
        return SampleSchedule(
            samples=samples,
            batch=self.batch_size,
            last=self.last or loader_last or "short",
            accumulate=self.accumulation,
        )

    def total_steps(self, schedule: SampleSchedule) -> int:
        return self.steps if self.steps is not None else schedule.first_step(self.epochs or 0)

    def arithmetic(self) -> dict[str, Any]:
        """Every field that decides the bits, as JSON to save and compare. A longer run begins with the same steps, so
        the length is not among them."""
        decisive = (
            "model loss optimizer scheduler batch lanes microbatches seed shuffle last blocks isa threads compile"
            " precision clip_norm"
        )
        # `tensor_rules` change the order of sums, but belong to the layout: any layout reads a checkpoint.
        found = {name: describe(getattr(self, name)) for name in decisive.split()}
        if self.passes:  # in their order
            found["loss"] = list(map(list, found["loss"].items()))
        # Fields of later versions count where they are used: checkpoints of before still fit.
        later = ("collate_fn", "sync_batchnorm", "ema", "freeze")
        found |= {name: describe(getattr(self, name)) for name in later if getattr(self, name)}
        if self.loss_scaling is not None:
            found["loss_scale"] = dataclasses.asdict(self.loss_scaling)
        if self.accumulation != ONE_BATCH:
            found["accumulate"] = describe(self.accumulation)
        return found

    def resolved(self) -> dict[str, Any]:
        """Every field in a form for readers."""
        return {item.name: readable(getattr(self, item.name)) for item in dataclasses.fields(self) if item.init}

    def unwatched(self) -> "Job":
        """The same training to its last step: without evaluations, callbacks, and what ends it before."""
        return self.changed(
            evaluate=None, target=None, callbacks=(), patience=None, monitor=None, keep_best=None, evaluate_ema=False
        )

    def changed(self, **changes: Any) -> "Job":
        # A new length replaces the old one, in steps or epochs.
        if "steps" in changes and "epochs" not in changes:
            changes["epochs"] = None
        elif "epochs" in changes and "steps" not in changes:
            changes["steps"] = None
        # Lanes that were only a default follow a new batch.
        if "lanes" not in changes and not self._lanes_given:
            changes["lanes"] = None
        return dataclasses.replace(self, **changes)


def _is_required(item: "dataclasses.Field[Any]") -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else "…"


def _default_lanes(batch: int) -> int:
    """4, or the largest power of two that divides the batch if 4 does not."""
    return min(4, batch & -batch)


def _check_integer(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise JobError(f"{name}={value!r} must be a whole number from {minimum} up")


def readable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): readable(item) for key, item in value.items()}
    if isinstance(value, MetricTarget):
        return str(value)
    if isinstance(value, LossScale):
        return dataclasses.asdict(value)
    if hasattr(value, "shape"):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return [readable(item) for item in value[:20]]
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__} ({value.__code__.co_filename}:{value.__code__.co_firstlineno})"
    return getattr(value, "__qualname__", type(value).__qualname__)
