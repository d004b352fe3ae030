"""`shoal simulate` as a user meets it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import Caller, write_job

SHAPE = "layers=8,hidden=1024,heads=8,seq=512,vocab=8192"
GPT = ("simulate", "--gpt", SHAPE, "--batch", "64", "--cluster", "dgx-a100", "--hosts", "2")
STEP = (*GPT, "--layout", "data=4,pipeline=4")


def test_a_step_in_words(call: Caller) -> None:
    out = call.good(*STEP).out
    assert "layout data=4,pipeline=4: 16 devices, 1f1b, 16 microbatches of 1" in out
    for words in ("a step", "predicted", "stages busy", "host", "inside", "F forward, B backward", "next: shoal plan"):
        assert words in out
    drawn = [line for line in out.splitlines() if line.startswith("stage ")]
    assert len(drawn) == 4
    assert all(len(line) <= 100 for line in drawn)


def test_a_step_as_a_value_and_its_split_adds_up(call: Caller) -> None:
    step = call.good(*STEP, "--json").value["step"]
    assert sum(step["terms"].values()) == pytest.approx(step["seconds"])
    assert step["seconds"] == pytest.approx(step["predicted_seconds"], rel=0.1)
    assert all(0 < share <= 1 for share in step["stages_busy"])
    assert [link["tier"] for link in step["links"]] == ["host", "inside"], "the narrowest first"


def test_everything_at_once_is_deterministic_by_seed(call: Caller) -> None:
    words = (*STEP, "--stragglers", "lognormal:0.2", "--days", "20", "--mtbf", "2000h", "--steps", "30", "--json")
    first, again, other = (call.good(*words, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    value = msgspec.json.decode(first)
    assert value["stragglers"]["mean_seconds"] > value["step"]["seconds"]
    restart, redo = value["days"]
    assert (restart["policy"], redo["policy"]) == ("restart-all", "redo")
    assert 0 < restart["goodput"] < redo["goodput"] < 1
    assert restart["failures"] == redo["failures"] == pytest.approx(20 * 24 * 16 / 2000, abs=8)


def test_days_in_words_say_what_is_assumed(call: Caller) -> None:
    out = call.good(*STEP, "--days", "54", "--failures", "466", "--checkpoint", "30min", "--save", "10s").out
    for words in (
        "54 days with 466 failures",
        "goodput",
        "lost: repeated",
        "every 30 min",
        "assumed: restart-all: 60 s",
    ):
        assert words in out


def test_modes_of_servers_in_one_table(call: Caller) -> None:
    words = (*GPT, "--layout", "data=16", "--servers", "4", "--stragglers", "lognormal:0.3", "--compare-modes")
    told = call.good(*words, "--accuracy", "steps=5000,noise=512").out
    for mode in ("sync", "quorum:15", "stale:2", "async", "assumed: least updates 5000, noise batch 512"):
        assert mode in told
    rows = call.good(*words, "--sync", "quorum:12", "--json").value["servers"]
    assert [row["mode"] for row in rows] == [
        *("sync", "quorum:15", "stale:2", "async", "local:16", "groups:2"),
        "quorum:12",
    ]
    assert rows[3]["mean_staleness"] == pytest.approx(15, rel=0.1)


def test_a_trace_and_a_picture(call: Caller, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = call.good(*STEP, "--trace", "step.json", "--plot", "step.svg").out
    assert "trace in step.json" in out and "picture in step.svg" in out
    trace = msgspec.json.decode((tmp_path / "step.json").read_bytes())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) > 100
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")


def test_a_job_a_plan_of_it_and_the_best_layout(call: Caller, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    given = ("simulate", job, "--cluster", "lab-10g", "--hosts", "4")
    best = call.good(*given, "--json").value
    assert best["step"]["runtime"] == "shoal"
    assert best["next"].startswith(f"shoal train {job} --layout ")
    asked = call.good(*given, "--layout", "data=4", "--json").value
    assert asked["step"]["layout"] == "data=4"
    assert "as the runtime chooses" in asked["step"]["route"]
    uneven = call.good(*given, "--layout", "data=2", "--shares", "3,1", "--json").value
    assert uneven["step"]["stages_busy"][0] < 1
    (tmp_path / "plan.json").write_text('{"workers":2,"lanes":4,"assignment":[[0,2],[2,4]]}')
    planned = call.good("simulate", "plan.json", job, "--cluster", "lab-10g", "--hosts", "4", "--json").value
    assert planned["step"]["layout"] == "data=2"
    assert planned["step"]["microbatches"] == 2 * asked["step"]["microbatches"]
    assert uneven["step"]["seconds"] > planned["step"]["seconds"] > asked["step"]["seconds"]


def test_a_slow_device(call: Caller) -> None:
    even, slow = (call.good(*STEP, *more, "--json").value["step"]["seconds"] for more in ((), ("--slow", "3=4")))
    assert slow > 2 * even


def plan_file(text: str) -> Any:
    def write(folder: Path) -> tuple[str, ...]:
        (folder / "plan.json").write_text(text)
        return ("simulate", "plan.json", "--gpt", SHAPE, "--cluster", "dgx-a100", "--hosts", "2")

    return write


@pytest.mark.parametrize(
    ("words", "told", "fix"),
    [
        (("simulate",), "neither is given", "--gpt"),
        ((*GPT, "--layout", "data=64"), "64 workers, but the cluster has 16 devices", "--hosts 8"),
        ((*GPT, "--layout", "data=3"), "not divisible by data 3", "--batch 63 or 66"),
        ((*GPT, "--layout", "data=4,pipelin=2"), "'pipelin' is not known", "--layout"),
        ((*STEP, "--schedule", "1f2b"), "there is no schedule 1f2b", "did you mean 1f1b?"),
        ((*STEP, "--stragglers", "lognormel:0.1"), "there is no distribution 'lognormel'", "did you mean lognormal?"),
        ((*STEP, "--days", "54"), "how often does something fail?", "--mtbf 50000h"),
        ((*STEP, "--days", "-1", "--failures", "3"), "--days -1", "--days 54"),
        ((*STEP, "--days", "3", "--failures", "-3"), "--failures -3", "--failures 466"),
        ((*STEP, "--days", "54", "--mtbf", "50000"), "50000: a time with its unit is wanted", "--mtbf 50000h"),
        ((*STEP, "--days", "54", "--mtbf", "50000 hours"), "a time with its unit", "30min"),
        ((*STEP, "--days", "54", "--mtbf=-5h"), "above 0", "--mtbf 1h"),
        ((*STEP, "--days", "5", "--failures", "3", "--checkpoint", "600"), "600: a time with its unit is wanted", "--checkpoint 600h, or s"),
        ((*STEP, "--mtbf", "5h"), "it is not said how many", "--days 54"),
        ((*STEP, "--days", "5", "--mtbf", "5h", "--failures", "3"), "either says it", "leave one out"),
        ((*STEP, "--servers", "0"), "--servers 0: at least 1", "--servers 1"),
        ((*STEP, "--mode", "async"), "modes and accuracy are of parameter servers", "--servers 4"),
        ((*STEP, "--servers", "2", "--mode", "asink"), "there is no mode 'asink'", "did you mean async?"),
        ((*STEP, "--servers", "2", "--mode", "quorum:9"), "a quorum of 9, but there are 4 workers", "quorum:4"),
        ((*STEP, "--servers", "2", "--accuracy", "steps=5"), "noise is missing", "steps=5000,noise=512"),
        ((*STEP, "--steps", "0"), "--steps 0: at least 1", "--steps 1"),
        ((*STEP, "--slow", "3"), "'3' is not understood", "--slow 5=3,9=1.5"),
        ((*STEP, "--slow", "99=2"), "devices are 0 to 15", ""),
        ((*STEP, "--shares", "3,1"), "--shares 3,1 are of a job's lanes", "--layout data=2 --shares 3,1"),
        ((*STEP, "--plot", "step.txt"), "a picture is .svg", ".svg"),
        ((*STEP, "--trace", "no/such/step.json"), "there is no folder", "mkdir"),
        ((*STEP[:-2], "nothing.json"), "cannot be read", ""),
        (plan_file("[1, 2]"), "is not a plan: it holds list", "shoal plan"),
        (plan_file("{"), "is not JSON", "shoal plan"),
        (plan_file('{"workers": 2}'), "is not a plan", ""),
        (plan_file('{"best": []}'), "is not what shoal plan --json prints", ""),
        (plan_file('{"workers":2,"lanes":4,"assignment":[[0,2],[2,4]]}'), "deals 4 lanes of a job", "FILE.py"),
    ],
)  # fmt: skip
def test_bad_input_is_told_with_what_to_change(call: Caller, tmp_path: Path, words: Any, told: str, fix: str) -> None:
    result = call(*(words(tmp_path) if callable(words) else words))
    assert result.code == 2, result.out
    assert told in result.err
    assert fix in result.err
    assert "Traceback" not in result.err


def test_a_plan_of_other_lanes_is_told(call: Caller, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    (tmp_path / "plan.json").write_text('{"workers":2,"lanes":8,"assignment":[[0,4],[4,8]]}')
    result = call("simulate", "plan.json", job, "--cluster", "lab-10g", "--hosts", "2")
    assert result.code == 2
    assert "deals 8 lanes" in result.err


def test_a_layout_that_does_not_fit_the_memory_is_warned_of(call: Caller) -> None:
    large = "layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
    out = call.good("simulate", "--gpt", large, "--batch", "16", "--layout", "data=16", "--cluster", "dgx-a100",
                    "--hosts", "2").out  # fmt: skip
    assert "warning: it does not fit: stage 0 needs" in out
