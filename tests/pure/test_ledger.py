"""Every sample once: whoever holds which lanes, whatever is done again, and an audit that sees when it is not so."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.numerics.lanes import assign_lanes, cut_batch
from shoal.numerics.sampling import SampleSchedule, sequential_order, shuffled_order
from shoal.recovery.sample_audit import SampleAudit, SampleRecord, audit_steps, sample_digest, sample_records
from shoal.report.event_queries import audit_samples, committed_floor
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    MembershipChanged,
    RunResumed,
    StepsCommitted,
    TimeSpent,
    WorkerFinished,
    WorkerStarted,
    encode,
)
from shoal.report.run_folder import RunFolder

SCHEDULE = SampleSchedule(samples=50, batch=8, last="short")
ORDER = shuffled_order(50, seed=3)


def batch_of(step: int) -> list[int]:
    epoch, within = SCHEDULE.position(step)
    return list(ORDER(epoch))[within * SCHEDULE.batch : (within + 1) * SCHEDULE.batch]


def entry(step: int, indices: Sequence[int], *, listed: bool = False) -> SampleRecord:
    return SampleRecord(step=step, consumed=sample_digest(indices), indices=list(indices) if listed else None)


def whole(steps: int, *, listed: bool = False) -> list[SampleRecord]:
    return [entry(step, batch_of(step), listed=listed) for step in range(steps)]


def check(record: Sequence[SampleRecord], committed: int | None = None) -> SampleAudit:
    return audit_steps(record, SCHEDULE, ORDER, committed)


# ---- the digest


def test_a_digest_is_of_the_numbers_in_their_order_and_of_nothing_else() -> None:
    numbers = [5, 1, 1 << 40, 0]
    assert len(sample_digest(numbers)) == 16
    same = {
        sample_digest(each)
        for each in (numbers, tuple(numbers), np.array(numbers), np.array([9, *numbers])[1:], np.array(numbers * 2)[:4])
    }
    assert same == {sample_digest(numbers)}
    assert sample_digest(range(3, 9)) == sample_digest([3, 4, 5, 6, 7, 8])
    assert sample_digest(np.arange(16)[::2]) == sample_digest(range(0, 16, 2))
    others = [[1, 5, 1 << 40, 0], [5, 1, 1 << 40], [5, 1, 1 << 40, 0, 0], [5, 1, 1 << 41, 0], []]
    assert len({sample_digest(numbers), *map(sample_digest, others)}) == 6
    assert sample_digest([1, 2, 3]) == "77ba1ae68d5afbb4", "records of earlier runs are read too"


# ---- the audit


def test_a_whole_record_is_sound() -> None:
    report = check(whole(15), committed=15)
    assert report.sound and report.each_once
    assert (report.steps, report.epochs, report.repeated) == (15, 2, 0)
    assert str(report) == "15 steps, 2 whole passes: each sample once in a pass"
    assert check([]).sound


def test_steps_that_were_done_again_with_the_same_samples_are_counted_and_fine() -> None:
    record = whole(15)
    report = check([*record[:12], *record[7:]])
    assert report.sound
    assert report.repeated == 5
    assert "5 were done again, with the same samples" in str(report)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("doubled", "step 9 saw the samples of step 8"),
        ("swapped", "step 8 saw the samples of step 9; step 9 saw the samples of step 8"),
        ("missing", "steps 8 to 9 are not on record"),
        ("last missing", "step 14 is not on record"),
        ("shifted", "step 14 is on record, but 14 were committed"),
        ("of another pass", "step 9 saw other samples than the order says"),
        ("twice, unlike", "step 9 is on record twice, with different samples"),
    ],
)
def test_the_audit_finds(damage: str, expected: str) -> None:
    record, committed = whole(15), 15
    if damage == "doubled":
        record[9] = replace(record[8], step=9)
    elif damage == "swapped":
        record[8], record[9] = replace(record[9], step=8), replace(record[8], step=9)
    elif damage == "missing":
        del record[8:10]
    elif damage == "last missing":
        del record[14]
    elif damage == "shifted":
        committed = 14
    elif damage == "of another pass":
        record[9] = replace(record[2], step=9)
    else:
        record.insert(10, replace(record[8], step=9))
    report = check(record, committed)
    assert not report.sound
    assert expected in str(report)


def test_with_lists_the_audit_names_the_samples() -> None:
    record = whole(7, listed=True)
    assert check(record).sound
    own = batch_of(3)
    record[3] = entry(3, [*own[:-1], batch_of(4)[0]], listed=True)
    assert f"step 3 saw other samples than the order says: missed {own[-1]}, saw {batch_of(4)[0]} instead" in str(
        check(record)
    )
    record[3] = entry(3, own[::-1], listed=True)
    assert "step 3 saw other samples than the order says: in another order" in str(check(record))
    record[3] = replace(entry(3, own), indices=own[::-1])
    assert "step 3: its list of samples does not fit its digest" in str(check(record))


def test_an_order_that_repeats_samples_is_said_and_not_held_against_the_run() -> None:
    def drawn(epoch: int) -> list[int]:
        return [random.Random(epoch).randrange(50) for _ in range(50)]

    record = [entry(step, drawn(step // 7)[step % 7 * 8 : step % 7 * 8 + 8]) for step in range(7)]
    report = audit_steps(record, SCHEDULE, drawn)
    assert report.sound and not report.each_once
    assert "as the order says, some more than once" in str(report)


def test_many_defects_are_counted_and_the_first_are_listed() -> None:
    report = audit_steps([entry(step, [step]) for step in range(700)], SCHEDULE, sequential_order(50))
    assert (report.defect_count, len(report.defects)) == (700, 20)
    assert "and 680 more" in str(report)


# ---- any schedule, any members, any failures


@st.composite
def shapes(draw: st.DrawFn) -> tuple[SampleSchedule, int, int]:
    lanes, microbatches, size = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = lanes * microbatches * size
    last = draw(st.sampled_from(["short", "drop"]))
    samples = draw(st.integers(batch if last == "drop" else 1, 4 * batch + 3))
    return SampleSchedule(samples=samples, batch=batch, last=last), lanes, microbatches


@settings(max_examples=150)
@given(shapes(), st.integers(0, 1 << 20), st.booleans(), st.data())
def test_through_joins_leaves_and_redone_steps_every_sample_is_seen_once(
    shape: tuple[SampleSchedule, int, int], seed: int, mixed: bool, data: st.DataObject
) -> None:
    """What the workers really fetch, lane by lane, is gathered for each attempt at a step."""
    schedule, lanes, microbatches = shape
    order = shuffled_order(schedule.samples, seed) if mixed else sequential_order(schedule.samples)
    passes = 2
    target = passes * schedule.steps_per_epoch
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    workers = chance.randint(1, lanes)
    step, saved, attempts = 0, 0, 0
    record: list[SampleRecord] = []
    seen: dict[int, list[int]] = {}  # by step: what the last committed attempt fetched
    while step < target:
        attempts += 1
        epoch, within = schedule.position(step)
        indices = order(epoch)[within * schedule.batch : (within + 1) * schedule.batch]
        assert len(indices) == schedule.samples_in_step(step)
        speeds = [chance.choice((0.25, 1.0, 3.0)) for _ in range(workers)]
        positions = cut_batch(len(indices), schedule.batch, lanes, microbatches)
        fetched = [
            indices[position]
            for first, past in assign_lanes(lanes, speeds)
            for lane in positions[first:past]
            for microbatch in lane
            for position in microbatch
        ]
        assert fetched == list(indices), "each position once, in rank order even in place"
        fate = chance.random() if attempts < 10 * target + 10 else 1.0
        if fate < 0.2:  # somebody died, or came: the step is done again by others
            workers = chance.randint(1, lanes)
        elif fate < 0.25:  # everybody died: back to the checkpoint
            step, workers = saved, chance.randint(1, lanes)
        else:
            record.append(entry(step, fetched, listed=chance.random() < 0.5))
            seen[step] = fetched
            step += 1
            if fate > 0.7:
                saved = step
    report = audit_steps(record, schedule, order, committed=target)
    assert report.sound and report.each_once, report
    assert report.epochs == passes
    assert report.repeated == len(record) - target
    for epoch in range(passes):
        steps = range(epoch * schedule.steps_per_epoch, (epoch + 1) * schedule.steps_per_epoch)
        counts = Counter(sample for each in steps for sample in seen[each])
        assert set(counts.values()) == {1}
        assert len(counts) == (schedule.samples if schedule.last == "short" else len(steps) * schedule.batch)
    if target > 1:
        wrong = chance.randrange(target)
        other = (wrong + 1 + chance.randrange(target - 1)) % target
        if sample_digest(seen[wrong]) != sample_digest(seen[other]):
            bad = [
                replace(each, consumed=sample_digest(seen[other]), indices=None) if each.step == wrong else each
                for each in record
            ]
            assert not audit_steps(bad, schedule, order, committed=target).sound
        assert not audit_steps([each for each in record if each.step != wrong], schedule, order, committed=target).sound


# ---- read back from events


def steps(step: int, count: int, *, rank: int = 0, told: bool = True) -> StepsCommitted:
    first = step - count
    return StepsCommitted(
        time=1.0,
        rank=rank,
        step=step,
        count=count,
        samples=8 * count,
        epoch=0,
        loss=None,
        lanes=(0, 4),
        spent=TimeSpent(),
        leader=told,
        sample_digests=[sample_digest(batch_of(each)) for each in range(first, step)] if told else [],
    )


def test_the_record_is_read_from_the_events_of_whoever_led(tmp_path: Path) -> None:
    """Worker 0 led until it died; worker 1 had told of some of the same steps."""
    events: list[AnyEvent] = [
        WorkerStarted(time=1.0, rank=0, pid=1, host="a", fingerprint="f"),
        steps(5, 5),
        steps(5, 5, rank=1, told=False),
        steps(9, 6, rank=1),
        steps(14, 5, rank=1),
    ]
    (tmp_path / "events.jsonl").write_bytes(
        b"".join(encode(event) + b"\n" for event in events) + b'{"event":"steps-committed","ti'
    )
    report = audit_samples(RunFolder(tmp_path).read_events(), SCHEDULE, ORDER, committed=14)
    assert report.sound
    assert (report.steps, report.epochs, report.repeated) == (14, 2, 0), "two tell of the same step: it was done once"
    again = audit_samples([*events, steps(14, 2, rank=1)], SCHEDULE, ORDER, committed=14)
    assert (again.sound, again.repeated) == (True, 2), "one tells of it twice: it was done again"
    assert "steps 9 to 13 are not on record" in str(audit_samples(events[:-1], SCHEDULE, ORDER, committed=14))
    with_lists = StepsCommitted(
        **{
            **{name: getattr(events[1], name) for name in StepsCommitted.__struct_fields__},
            "sample_indices": [batch_of(s) for s in range(5)],
        }
    )
    assert [each.indices for each in sample_records([with_lists])] == [batch_of(s) for s in range(5)]


def test_how_many_steps_had_been_committed() -> None:
    saved = CheckpointSaved(time=1.0, step=6, path="p", num_bytes=1, seconds=0.1)
    resumed = RunResumed(time=1.0, step=6, path="p", repeated=8)
    ended = WorkerFinished(
        time=1.0, rank=0, step=30, samples=1, weights_sha256="", final_loss=None, metrics={}, stopped=None
    )
    changed = MembershipChanged(time=1.0, generation=4, members=[0], step=16, reason="")
    assert committed_floor([]) == 0
    assert committed_floor([], recorded=12) == 12
    assert committed_floor([steps(9, 9), saved, steps(14, 5), steps(12, 3, rank=1)]) == 14
    assert committed_floor([steps(14, 14)], recorded=15) == 15, "events are told a few times a second"
    assert committed_floor([saved]) == 6
    assert committed_floor([steps(14, 14), changed]) == 16
    assert committed_floor([steps(14, 14), ended]) == 30
    # A run that came back at 6 and was lost again at 9 repeats 3 steps of this life, not 8 of the one before.
    assert committed_floor([steps(14, 14), resumed]) == 6
    assert committed_floor([steps(14, 14), resumed, steps(9, 3)]) == 9
    lost = MembershipChanged(time=1.0, generation=5, members=[0], step=6, reason="", restart=1)
    assert (
        committed_floor(
            [
                steps(14, 14),
                lost,
                steps(8, 2),
                MembershipChanged(time=1.0, generation=6, members=[0], step=7, reason="", restart=1),
            ]
        )
        == 8
    )
