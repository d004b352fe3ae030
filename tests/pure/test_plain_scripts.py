"""Scripts that never join: what is shown, said and decided about them. No process."""

import re
import signal

import pytest

from helpers.command import Caller, refused
from shoal.driver.outcome import first_cause, script_stopped
from shoal.driver.script_watch import observation_interval
from shoal.report import events
from shoal.report.aggregate import RunTally
from shoal.report.events import AnyEvent, decode, encode
from shoal.report.incident_lines import IncidentLines
from shoal.report.live_view import live_lines, progress_text
from shoal.report.scripts import newest_scripts
from shoal.worker.script_process import spawn_advice
from shoal.worker.stack_dump import script_stack


def begun(rank: int, time: float = 10.0) -> events.ScriptStarted:
    return events.ScriptStarted(time=time, rank=rank, pid=100 + rank, host="here", began="7")


def joined(rank: int) -> events.WorkerStarted:
    return events.WorkerStarted(time=20.0, rank=rank, pid=100 + rank, host="here", fingerprint="f")


STARTED = events.RunStarted(
    time=9.0, run="1f2e", job="s.py", command="run", workers=2, layout="data=2", lanes=0, exact=True, steps=None,
    steps_per_epoch=None,
)  # fmt: skip
USE = events.ProcessesObserved(
    time=12.0,
    workers=[
        events.ProcessUse(rank=0, cpu=0.98, memory_bytes=300_000_000),
        events.ProcessUse(rank=1, cpu=0.02, memory_bytes=200_000_000),
    ],
)


def tallied(*found: AnyEvent) -> RunTally:
    tally = RunTally()
    for event in found:
        tally.add(decode(encode(event)))
    return tally


def screen(tally: RunTally, height: int = 24) -> list[str]:
    return [line.plain for line in live_lines(tally, now=75.0, width=100, height=height)]


def test_the_screen_shows_what_processes_use() -> None:
    tally = tallied(STARTED, begun(0), begun(1), USE)
    assert screen(tally) == [
        "shoal run s.py   run 1f2e   2 workers",
        "2 workers alive, running 1:05",
        "",
        " worker  pid  running  cpu   memory",
        " 0       100  1:05     98 %  300 MB",
        " 1       101  1:05     2 %   200 MB",
    ]
    assert progress_text(tally, now=75.0) == (
        "2 workers alive, running 1:05    worker 0: cpu 98 %, 300 MB    worker 1: cpu 2 %, 200 MB"
    )
    tally.add(events.WorkerExited(time=13.0, rank=1, code=0))
    assert screen(tally)[1] == "1 of 2 workers alive, running 1:05"
    assert len(screen(tallied(STARTED, *(begun(rank) for rank in range(40))), height=12)) <= 12


def test_a_run_with_a_joined_worker_is_followed_by_its_steps() -> None:
    assert "starting 2 workers" in screen(tallied(STARTED))
    tally = tallied(STARTED, begun(0), begun(1), joined(0))
    assert tally.scripts.running.keys() == {1} and not tally.scripts.plain
    assert "starting 2 workers" in screen(tally)
    assert newest_scripts([STARTED, begun(0), begun(1), STARTED, begun(1)]).keys() == {1}, "a former sitting is gone"
    assert newest_scripts([STARTED, begun(0), joined(0)]) == {}


def test_processes_are_looked_at_less_often_later() -> None:
    assert observation_interval(1.0) < observation_interval(100.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_script_has_the_exit_code_of_the_signal(number: int, code: int) -> None:
    error = script_stopped(number, {})
    assert error.exit_code == code
    assert str(error).startswith(f"{signal.Signals(number).name}: the script's workers were ended")


def test_advice_about_spawned_processes() -> None:
    assert spawn_advice(2, 1, "s.py:3") is None, "as under plain python"
    assert "was asked for 0 processes" in str(spawn_advice(0, 1, ""))
    text = str(spawn_advice(4, 2, "s.py:3  in main:  mp.spawn(f)"))
    assert text.startswith("mp.spawn (s.py:3  in main:  mp.spawn(f)) starts 4 more processes in each of 2 workers")
    assert 'int(os.environ["RANK"])' in text and "--workers 1" in text


DUMP = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 10 in run

Current thread 0x00007f2 (most recent call first):
  File "{prefix}/lib/python3.11/site-packages/torch/distributed/c10d.py", line 99 in all_reduce
  File "/home/me/s.py", line 4 in step
  File "/home/me/s.py", line 9 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "{prefix}/shoal/worker/main.py", line 50 in run_script
  File "{prefix}/shoal/driver/launchers/fork_server.py", line 9 in _become_worker
"""


def test_the_stack_is_that_of_the_script() -> None:
    line, stack = script_stack(DUMP.format(prefix="/opt"))
    assert line == "s.py:4  in step:"
    assert stack == ["c10d.py:99  in all_reduce:", "s.py:4  in step:", "s.py:9  in <module>:"]
    assert script_stack("") == ("", [])


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["s.py", "3", "1"], "shoal run s.py -- 3 1"),
        (["s.py", "3", "--workers", "2", "a b"], "shoal run s.py --workers 2 -- 3 'a b'"),
        (["s.py", "--learning", "0.1"], "shoal run s.py -- --learning 0.1"),
    ],
)
def test_arguments_of_a_script_come_after_two_dashes(words: list[str], fix: str, call: Caller) -> None:
    error = refused(call, "run", *words)
    assert re.match(r"arguments of the script come after --, and \S+ comes before\n", error)
    assert f"fix: {fix}\n" in error


def test_a_misspelled_option_of_run_is_still_recognised(call: Caller) -> None:
    error = refused(call, "run", "s.py", "--worker", "2")
    assert "unknown option --worker" in error and "did you mean --workers?" in error


def test_a_killed_worker_is_the_cause_not_the_lost_connection_of_another() -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:52378"
    noticed = events.WorkerFailed(time=30.0, rank=0, kind="RuntimeError", message=lost)
    left = events.WorkerExited(time=30.2, rank=0, code=1)
    killed = tallied(STARTED, begun(0), begun(1), noticed, events.WorkerExited(time=30.1, rank=1, code=-9), left)
    cause = first_cause(killed)
    assert cause is not None and (cause.rank, "SIGKILL" in cause.message) == (1, True)
    own = events.WorkerFailed(time=30.1, rank=1, kind="ValueError", message="ValueError: no")
    raised = tallied(STARTED, begun(0), begun(1), noticed, own, left, events.WorkerExited(time=30.3, rank=1, code=1))
    assert first_cause(raised) == own
    alone = first_cause(tallied(STARTED, begun(0), begun(1), noticed, left))
    assert alone is not None and alone.message == lost


def test_an_exit_that_repeats_an_error_is_not_shown() -> None:
    telling, log = IncidentLines(), RunTally().incident_log
    telling.add(events.WorkerFailed(time=30.0, rank=0, kind="KeyError", message="KeyError: 1", exit_code=2), 0.0)
    telling.add(events.WorkerFailed(time=30.0, rank=2, kind="KeyError", message="KeyError: 1"), 0.0)
    for rank, code in enumerate((2, 5, -9)):  # said before, not said, and another end than was said
        telling.add(events.WorkerExited(time=30.1, rank=rank, code=code), 0.0)
    assert [line.partition("  ")[2][:8] for line in telling.rest(log)] == ["worker 1", "worker 2"]
