"""The plan: which worker computes which lanes of which model shard. A frozen value that is printed, saved and can
be replayed."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import PlanError
from shoal.numerics.lanes import Span, assign_lanes, subtrees
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import default_chunks
from shoal.transport.decoding import decode_json

VERSION = 2  # of plan.json


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int
    lanes: int
    assignment: tuple[Span, ...]  # per replica, in order: its first lane, and the one past its last
    pipeline: int = 1  # stages of a replica
    tensor: int = 1  # slices of a stage
    zero: int = 0  # what is cut among replicas: 1 optimizer state, 2 gradients too, 3 weights too
    schedule: str = "1f1b"  # the order of a pipeline's work
    chunks: int = 1  # stages of a pipeline's worker
    recompute: bool = False  # blocks keep their inputs alone
    stages: tuple[float, ...] = ()  # relative speeds of a pipeline's workers: stages are as large; empty: equal ones
    shares: str = "even"  # how lanes are assigned: even, auto (anew when speeds drift), or as given: 3,1
    threads: int = 1  # per worker; belongs to the job's arithmetic, repeated here for the reader
    exact: bool = True
    algorithm: str = ""  # by which gradients travel between hosts; empty: the cost model chooses
    compress: str = ""  # what they travel in, as --compress has it
    servers: int = 0  # parameter servers that hold the weights; 0: the workers do
    sync: str = ""  # how servers keep workers in step, as --sync has it
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise PlanError(f"the plan has version {self.version}; this Shoal reads version {VERSION}")
        if len(self.assignment) * self.pipeline * self.tensor != self.workers:
            each = f" replicas of {self.layout.replica_size} each" if self.splits_replica else ""
            whom = f"{len(self.assignment)}{each}"
            raise PlanError(f"the plan has {self.workers} workers but assigns lanes to {whom}")
        if self.stages and (len(self.stages) != self.pipeline or min(self.stages) <= 0):
            weights = ", ".join(f"{weight:g}" for weight in self.stages)
            raise PlanError(f"the plan has {self.pipeline} stages, of the weights {weights}: one above 0 for each")
        expected = 0
        for rank, (start, stop) in enumerate(self.assignment):
            if start != expected or stop <= start:
                whom = f"{self.holder} {rank}"
                raise PlanError(f"the plan assigns lanes {start} to {stop} to {whom}; they must begin at {expected}")
            expected = stop
        if expected != self.lanes:
            raise PlanError(f"the plan assigns {expected} lanes, but has {self.lanes}")

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(data=len(self.assignment), pipeline=self.pipeline, tensor=self.tensor, zero=self.zero)

    @property
    def splits_replica(self) -> bool:
        """A replica is more than one worker."""
        return self.pipeline * self.tensor > 1

    @property
    def holder(self) -> str:
        """What a span of lanes is assigned to."""
        return "replica" if self.splits_replica else "worker"

    @property
    def partial_sums(self) -> int:
        """Gradients that travel in each step: one per worker where each holds a whole subtree."""
        return sum(len(subtrees(self.lanes, span)) for span in self.assignment)

    def lines(self) -> list[str]:
        held = [f"{self.holder} {rank}: lanes {_range(span)}" for rank, span in enumerate(self.assignment)]
        sums = f"{self.partial_sums} partial sums a step for {self.workers} workers"
        travel = [f"{name} {value}" for name in ("algorithm", "compress") if (value := getattr(self, name))]
        ways = [f"between hosts: {', '.join(travel)}"] if travel else []
        if self.servers:
            held.append(f"{self.servers} server{'s' * (self.servers > 1)} with the weights, {self.sync}")
        ways += [] if self.exact else ["not exact: other workers, or another run, can give other weights"]
        order = [f"schedule {self.schedule}, {self.chunks} stages a worker"] if self.pipeline > 1 else []
        order += [f"stages as {', '.join(f'{weight:g}' for weight in self.stages)}"] if self.stages else []
        order += ["blocks are recomputed"] if self.recompute else []
        return [f"layout {self.layout}, {self.lanes} lanes, shares {self.shares}", *held, *order, sums, *ways]


def make_plan(
    *,
    lanes: int,
    workers: int,
    shares: str | None = None,
    threads: int = 1,
    exact: bool = True,
    algorithm: str = "",
    compress: str = "",
    layout: ParallelLayout | None = None,
    schedule: str = "1f1b",
    chunks: int | None = None,
    recompute: bool = False,
    stages: Sequence[float] = (),
) -> Plan:
    if workers < 1:
        raise PlanError(f"{workers} workers: at least 1 is needed", fix="--workers 1")
    layout = ParallelLayout(data=workers) if layout is None else layout
    replicas = layout.data
    if replicas > lanes:
        raise too_few_lanes(lanes, layout, f"lanes={1 << (replicas - 1).bit_length()}")
    if layout.zero >= 2 and shares is not None:
        same = f"zero={layout.zero} gives every worker the same lanes"
        raise PlanError(f"{same}, and --shares {shares} others", fix="zero=1")
    if shares in (None, "even", "auto"):
        spans = assign_lanes(lanes, [1.0] * replicas)
    else:
        assert shares is not None
        spans = assign_lanes(lanes, parse_shares(shares, replicas))
    return Plan(
        workers=layout.workers,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        schedule=schedule,
        chunks=chunks or default_chunks(schedule),
        recompute=recompute,
        stages=tuple(stages),
        lanes=lanes,
        assignment=spans,
        shares=shares or "even",
        threads=threads,
        exact=exact,
        algorithm=algorithm,
        compress=compress,
    )


def too_few_lanes(lanes: int, layout: ParallelLayout, more: str) -> PlanError:
    """`more`: what to type for more lanes."""
    what = "replica" if layout.replica_size > 1 else "worker"
    return PlanError(
        f"{layout.data} {what}s but {lanes} lanes: each {what} needs a lane",
        fix=f"--workers {lanes * layout.replica_size}, or {more}: another job than with {lanes} lanes, with other bits",
    )


def parse_shares(text: str, workers: int) -> Sequence[float]:
    """`3,1`: worker 0 is given three times what worker 1 is given."""
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        fix = "--shares 3,1 (one per worker), or --shares auto"
        raise PlanError(f"shares '{text}' are not numbers", fix=fix) from None
    if len(shares) != workers:
        count = len(shares)
        raise PlanError(f"{count} shares for {workers} workers", fix=f"--workers {count}, or one share each")
    if not all(0 < share < float("inf") for share in shares):
        raise PlanError(f"shares '{text}': each must be above 0", fix="leave a worker out with a smaller --workers")
    return shares


def read_plan(path: Path) -> Plan:
    try:
        text = path.read_bytes()
        found = decode_json(text)
        if isinstance(found, dict) and found.get("version") == 1:
            raise PlanError(
                f"{path} was written by Shoal 0.1, which named the fields of a plan differently",
                fix="shoal plan FILE -o plan.json writes a new one",
            )
        return msgspec.convert(found, Plan)
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise PlanError(f"{path} is not a plan: {error}") from None
    except msgspec.DecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None


def _range(span: Span) -> str:
    start, stop = span
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"
