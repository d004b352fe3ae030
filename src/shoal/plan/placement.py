"""The plan: which worker computes which lanes. A frozen value that is printed, saved and can be replayed."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.errors import PlanError
from shoal.partition.lanes import Span, deal, subtrees


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int
    lanes: int
    deal: tuple[Span, ...]  # per worker, in rank order: its first lane, and the one past its last
    shares: str = "even"  # how the lanes were dealt: even, auto (dealt anew when speeds drift), or as given: 3,1
    threads: int = 1  # per worker; part of the job's arithmetic, repeated here for the reader
    exact: bool = True
    algorithm: str = ""  # by which gradients travel between hosts; empty: the cost model chooses
    compress: str = ""  # what they travel in, as --compress has it
    version: int = 1

    def __post_init__(self) -> None:
        if self.version != 1:
            raise PlanError(f"the plan has version {self.version}; this Shoal reads version 1")
        if len(self.deal) != self.workers:
            raise PlanError(f"the plan has {self.workers} workers but deals lanes to {len(self.deal)}")
        expected = 0
        for rank, (start, stop) in enumerate(self.deal):
            if start != expected or stop <= start:
                raise PlanError(
                    f"the plan deals lanes {start} to {stop} to worker {rank}; they must begin at {expected}"
                )
            expected = stop
        if expected != self.lanes:
            raise PlanError(f"the plan deals {expected} lanes, but has {self.lanes}")

    @property
    def layout(self) -> str:
        return f"data={self.workers}"

    @property
    def partial_sums(self) -> int:
        """Gradients that travel in each step: one per worker where each holds a whole subtree."""
        return sum(len(subtrees(self.lanes, span)) for span in self.deal)

    def lines(self) -> list[str]:
        held = [f"worker {rank}: lanes {_range(span)}" for rank, span in enumerate(self.deal)]
        sums = f"{self.partial_sums} partial sums a step for {self.workers} workers"
        travel = [f"{name} {value}" for name in ("algorithm", "compress") if (value := getattr(self, name))]
        ways = [f"between hosts: {', '.join(travel)}"] if travel else []
        ways += [] if self.exact else ["not exact: other workers, or another run, can give other weights"]
        return [f"layout {self.layout}, {self.lanes} lanes, shares {self.shares}", *held, sums, *ways]


def make_plan(
    *,
    lanes: int,
    workers: int,
    shares: str | None = None,
    threads: int = 1,
    exact: bool = True,
    algorithm: str = "",
    compress: str = "",
) -> Plan:
    if workers < 1:
        raise PlanError(f"{workers} workers: at least 1 is needed", fix="--workers 1")
    if workers > lanes:
        raise PlanError(
            f"{workers} workers but {lanes} lanes: each worker needs a lane",
            fix=f"--workers {lanes}, or lanes={1 << (workers - 1).bit_length()} (other bits than before)",
        )
    if shares in (None, "even", "auto"):
        spans = deal(lanes, [1.0] * workers)
    else:
        assert shares is not None
        spans = deal(lanes, read_shares(shares, workers))
    return Plan(
        workers=workers,
        lanes=lanes,
        deal=spans,
        shares=shares or "even",
        threads=threads,
        exact=exact,
        algorithm=algorithm,
        compress=compress,
    )


def read_shares(text: str, workers: int) -> Sequence[float]:
    """`3,1`: worker 0 is given three times what worker 1 is given."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(
            f"shares '{text}' are not numbers", fix="--shares 3,1 (one per worker), or --shares auto"
        ) from None
    if len(shares) != workers:
        raise PlanError(
            f"{len(shares)} shares for {workers} workers", fix=f"--workers {len(shares)}, or one share each"
        )
    if not all(0 < share < float("inf") for share in shares):
        raise PlanError(f"shares '{text}': each must be above 0", fix="leave a worker out with a smaller --workers")
    return shares


def read_plan(path: Path) -> Plan:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise PlanError(f"{path} is not a plan: {error}") from None
    except msgspec.DecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from None


def _range(span: Span) -> str:
    start, stop = span
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"
