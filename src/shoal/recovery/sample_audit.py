"""Every sample once: each committed step records a digest of its samples; an audit compares it with the job's order.

    step 811   9f31c6a2e07b54d8    blake2b of the 512 sample numbers of its global batch, in their order

A step that is repeated, after a failure or from a checkpoint, has the same samples: the order belongs to the job. So
the record of a whole run has one digest for each step, and it is the expected one. Pure.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.numerics.sampling import SampleSchedule

_SHOWN = 20  # defects that are listed


def sample_digest(indices: Sequence[int] | NDArray[np.int64]) -> str:
    """16 hexadecimal digits for the samples of a step. An array of int64 is the quickest input."""
    if isinstance(indices, np.ndarray):
        numbers = np.ascontiguousarray(indices, dtype="<i8")
    else:
        numbers = np.fromiter(indices, dtype="<i8", count=len(indices))
    return hashlib.blake2b(numbers.data, digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    step: int  # counted from 0
    consumed: str
    indices: Sequence[int] | None = None  # if the user requested them


class ConsumedSteps(Protocol):
    """A message about the last of `step` committed steps (report/events.py: StepsCommitted)."""

    @property
    def step(self) -> int: ...
    @property
    def sample_digests(self) -> list[str]: ...
    @property
    def sample_indices(self) -> list[list[int]]: ...


def sample_records(messages: Iterable[ConsumedSteps]) -> Iterator[SampleRecord]:
    """One record for each step that a message has a digest of."""
    for message in messages:
        first = message.step - len(message.sample_digests)
        for position, digest in enumerate(message.sample_digests):
            indices = message.sample_indices[position] if message.sample_indices else None
            yield SampleRecord(step=first + position, consumed=digest, indices=indices)


@dataclass(frozen=True, kw_only=True)
class SampleAudit:
    steps: int  # that should have a record
    epochs: int  # whole passes over the data among them
    repeated: int  # records beyond the first of a step, with the same samples
    each_once: bool  # the order has no sample twice in a pass (an order of the user's may)
    defects: tuple[str, ...]
    defect_count: int  # in all; `defects` lists the first of them

    @property
    def sound(self) -> bool:
        return self.defect_count == 0

    def __str__(self) -> str:
        if not self.sound:
            more = f" and {self.defect_count - len(self.defects)} more" if self.defect_count > len(self.defects) else ""
            return f"samples: {'; '.join(self.defects)}{more}"
        again = f"; {self.repeated:,} were done again, with the same samples" if self.repeated else ""
        seen = "each sample once in a pass" if self.each_once else "each sample as the order says, some more than once"
        return f"{self.steps:,} steps, {self.epochs:,} whole passes: {seen}{again}"


def audit_steps(
    records: Iterable[SampleRecord],
    schedule: SampleSchedule,
    order: Callable[[int], Sequence[int]],
    committed: int | None = None,
) -> SampleAudit:
    """Compares the records with the order of the job. `committed`: the number of steps, if it is known."""
    defects: list[str] = []
    by_step: dict[int, SampleRecord] = {}
    repeated = 0
    for entry in records:
        before = by_step.get(entry.step)
        if before is not None and before.consumed != entry.consumed:
            defects.append(f"step {entry.step} is on record twice, with different samples")
        elif before is not None:
            repeated += 1
        if entry.indices is not None and sample_digest(entry.indices) != entry.consumed:
            defects.append(f"step {entry.step}: its list of samples does not fit its digest")
        by_step[entry.step] = entry
    steps = max(by_step, default=-1) + 1 if committed is None else committed
    defects += [f"step {step} is on record, but {steps} were committed" for step in sorted(by_step) if step >= steps]
    defects += _missing_steps(by_step, steps)
    once = True
    for epoch in range(schedule.epochs_of(steps)):
        numbers = np.asarray(order(epoch), dtype="<i8")
        used = numbers[: schedule.samples_per_epoch]
        once = once and len(np.unique(used)) == len(used)
        defects += _wrong_steps(by_step, schedule, numbers, epoch, steps)
    return SampleAudit(
        steps=steps,
        epochs=schedule.position(steps)[0],
        repeated=repeated,
        each_once=once,
        defects=tuple(defects[:_SHOWN]),
        defect_count=len(defects),
    )


def _missing_steps(by_step: dict[int, SampleRecord], steps: int) -> list[str]:
    missing = [step for step in range(steps) if step not in by_step]
    spans: list[list[int]] = []
    for step in missing:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return [
        f"step {first} is not on record" if first == last else f"steps {first} to {last} are not on record"
        for first, last in spans
    ]


def _wrong_steps(
    by_step: dict[int, SampleRecord], schedule: SampleSchedule, numbers: NDArray[np.int64], epoch: int, steps: int
) -> list[str]:
    """The defects of one pass."""
    first, within = schedule.first_step(epoch), range(schedule.steps_in(epoch))
    expected = [sample_digest(numbers[schedule.slice_of(epoch, step)]) for step in within]
    owners = {digest: first + step for step, digest in reversed(list(enumerate(expected)))}
    found = []
    for step, digest in enumerate(expected, start=first):
        entry = by_step.get(step)
        if entry is None or step >= steps or entry.consumed == digest:
            continue
        owner = owners.get(entry.consumed)
        if owner is not None:
            found.append(f"step {step} saw the samples of step {owner}")
        elif entry.indices is not None:
            place = step - first
            own = numbers[schedule.slice_of(epoch, place)].tolist()
            lost, foreign = sorted(set(own) - set(entry.indices)), sorted(set(entry.indices) - set(own))
            what = (
                f"missed {_shortened(lost)}, saw {_shortened(foreign)} instead"
                if lost or foreign
                else "in another order"
            )
            found.append(f"step {step} saw other samples than the order says: {what}")
        else:
            found.append(f"step {step} saw other samples than the order says")
    return found


def _shortened(numbers: list[int]) -> str:
    return (", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")) or "none"
