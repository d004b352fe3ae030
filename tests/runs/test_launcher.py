"""Processes: how workers start, stop, fail and die, and that nothing of them outlives the run."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import shoal
from helpers.command import Caller, Forked, Running, events, in_child, newest, write_job
from helpers.direct_launcher import DirectLauncher
from shoal.driver.launch import train_with
from shoal.driver.launchers.base import (
    Launcher,
    ProcessEvent,
    ProcessExit,
    ProcessLine,
    ProcessProgram,
    ProcessSpec,
    ProcessStarted,
    StarterFound,
)
from shoal.driver.launchers.local import LocalLauncher
from shoal.job.load import load_job
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.protocol import WorkerId
from shoal.testing import dropout_net, job_for
from shoal.worker.run_config import RunConfig
from shoal.worker.start import WorkerStartup

DEADLINE_SECONDS = 30.0


# -- launchers alone: the contract, as every launcher keeps it ---------------------------------------------------------


@pytest.fixture(params=[LocalLauncher, DirectLauncher], ids=["fork server", "direct"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    made: Launcher = request.param()
    return made


@contextmanager
def started(launcher: Launcher, work: Callable[[WorkerStartup], int], workers: int = 1, **more: str) -> Iterator[None]:
    launcher.open(ProcessProgram(main=work, folder=Path.cwd()))
    with closing(launcher):
        for rank, host in enumerate(launcher.hosts(workers)):
            log, environment = Path(f"worker-{rank}.log"), more | {"RANK": str(rank)}
            launcher.start(host, ProcessSpec(process=WorkerId(rank), environment=environment, log=log))
        yield


def all_events(launcher: Launcher, workers: int = 1) -> list[ProcessEvent]:
    """Everything until the last worker has ended."""
    found: list[ProcessEvent] = []
    while sum(isinstance(event, ProcessExit) for event in found) < workers:
        found += launcher.events(DEADLINE_SECONDS)
    return found


def exit_codes(found: list[ProcessEvent]) -> dict[int, int | None]:
    return {event.process.worker: event.code for event in found if isinstance(event, ProcessExit)}


def test_workers_send_lines_and_end(launcher: Launcher) -> None:
    def work(startup: WorkerStartup) -> int:
        startup.channel.sendall(f"worker {os.environ['RANK']}\nis here".encode())
        startup.channel.sendall(b"\nand gone\nwithout an end")
        return startup.rank

    with started(launcher, work, workers=2):
        found = all_events(launcher, workers=2)
    for who in (WorkerId(0), WorkerId(1)):
        own = [event for event in found if isinstance(event, ProcessLine | ProcessExit) and event.process == who]
        lines = [f"worker {who.worker}".encode(), b"is here", b"and gone"]  # the last line was never finished
        assert own == [
            *(ProcessLine(process=who, text=text) for text in lines),
            ProcessExit(process=who, code=who.worker),
        ]


def test_a_worker_receives_what_the_driver_sends(launcher: Launcher) -> None:
    def work(startup: WorkerStartup) -> int:
        startup.channel.sendall(startup.channel.recv(100) + b"\n")
        return 0

    who = WorkerId(0)
    with started(launcher, work):
        launcher.send(who, b"stop")
        found = all_events(launcher)
        assert [event.process for event in found if isinstance(event, ProcessStarted)] == [who]
        rest = [event for event in found if not isinstance(event, (ProcessStarted, StarterFound))]
        assert rest == [ProcessLine(process=who, text=b"stop"), ProcessExit(process=who, code=0)]
        launcher.send(who, b"to a process that is gone")


def test_a_worker_has_its_own_environment_log_and_input(launcher: Launcher, capfd: pytest.CaptureFixture[str]) -> None:
    def work(startup: WorkerStartup) -> int:
        print("printed", os.environ["WORD"], repr(sys.stdin.read()))
        print("complained", file=sys.stderr)
        os.write(1, b"written below Python\n")
        return 0

    with started(launcher, work, WORD="given"):
        all_events(launcher)
    assert Path("worker-0.log").read_text() == "printed given ''\ncomplained\nwritten below Python\n"
    assert capfd.readouterr() == ("", "")
    assert "WORD" not in os.environ


def test_a_worker_begins_with_everything_loaded() -> None:
    """Forked: the very module objects of the driver, so nothing is imported a second time."""

    def work(startup: WorkerStartup) -> int:
        startup.channel.sendall(f"{id(sys.modules['torch'])} {os.getppid()}\n".encode())
        return 0

    launcher = LocalLauncher()
    with started(launcher, work):
        (line,) = [event for event in all_events(launcher) if isinstance(event, ProcessLine)]
        identity, parent = map(int, line.text.split())
        assert identity == id(torch)
        assert parent != os.getpid()


def test_how_a_worker_ended_is_reported() -> None:
    def work(startup: WorkerStartup) -> int:
        if startup.rank == 0:
            raise ValueError("no good")
        if startup.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if startup.rank == 2:
            os._exit(7)
        return 5

    launcher = LocalLauncher()
    with started(launcher, work, workers=4):
        codes = exit_codes(all_events(launcher, workers=4))
    assert codes == {0: 1, 1: -signal.SIGKILL, 2: 7, 3: 5}
    assert "worker 0: ValueError('no good')" in Path("worker-0.log").read_text()


def test_closing_ends_all_processes_that_run(launcher: Launcher) -> None:
    def work(startup: WorkerStartup) -> int:
        startup.channel.sendall(b"here\n")
        signal.pause()
        return 0

    with started(launcher, work, workers=2):
        found: list[ProcessEvent] = []
        while sum(isinstance(event, ProcessStarted) for event in found) < 2:
            found += launcher.events(DEADLINE_SECONDS)
        watched = [os.pidfd_open(event.pid) for event in found if isinstance(event, ProcessStarted)]
    assert all_ended(watched)


def test_a_signal_reaches_the_worker_it_is_meant_for(launcher: Launcher) -> None:
    def work(startup: WorkerStartup) -> int:
        startup.channel.sendall(b"here\n")
        if startup.rank == 1:
            signal.pause()
        return 0

    who = WorkerId(1)
    with started(launcher, work, workers=2):
        found: list[ProcessEvent] = []
        while ProcessLine(process=who, text=b"here") not in found or not any(
            isinstance(event, ProcessStarted) and event.process == who for event in found
        ):
            found += launcher.events(DEADLINE_SECONDS)
        launcher.signal(who, signal.SIGTERM)
        while len(exit_codes(found)) < 2:
            found += launcher.events(DEADLINE_SECONDS)
        launcher.signal(who, signal.SIGTERM)  # it is gone: no other process is hit
    assert exit_codes(found) == {0: 0, 1: -signal.SIGTERM}


KILL_ONCE = """\
if step == 5 and lane == 2 and not os.path.exists("killed"):
    open("killed", "w").close()
    os.kill(os.getpid(), 9)"""


def test_the_driver_needs_only_the_contract_of_a_launcher(tmp_path: Path) -> None:
    """A launcher that the package does not know: workers start, one dies and is replaced, and the bits are the same."""
    job = load_job(str(write_job(tmp_path, loss=KILL_ONCE)))
    config = RunConfig().changed(workers=2, quiet=True, run_dir="run")
    found = train_with(job, config, launcher=DirectLauncher())
    assert Path("killed").exists()
    (lost,) = events(Path("run"), "worker-lost")
    assert (lost["rank"], lost["code"], lost["action"]) == (1, -signal.SIGKILL, "replaced")
    assert found.weights_sha256 == shoal.train(job, quiet=True).weights_sha256


def all_ended(descriptors: list[int]) -> bool:
    """Whether every process ends before the deadline; takes the descriptors over."""
    ended = []
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ended.append(bool(poll.poll(DEADLINE_SECONDS * 1000)))
        os.close(descriptor)
    return all(ended)


# -- runs in this process ---------------------------------------------------------------------------------------------


def test_a_job_file_is_loaded_once_for_all_workers(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, top="with open('loads', 'a') as file:\n    file.write('loaded\\n')")
    call.train("job.py", "--workers", "3")
    assert Path("loads").read_text() == "loaded\n"


def test_two_runs_in_one_process() -> None:
    first = shoal.train(job_for(dropout_net), workers=2, quiet=True)
    second = shoal.train(job_for(dropout_net), workers=1, quiet=True)
    assert first.weights_sha256 == second.weights_sha256
    assert first.folder != second.folder


def test_a_run_in_a_thread() -> None:
    expected = shoal.train(job_for(dropout_net), quiet=True).weights_sha256
    found: list[str] = []

    def train() -> None:
        found.append(shoal.train(job_for(dropout_net), workers=2, quiet=True).weights_sha256)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [expected]


def test_a_run_leaves_the_process_as_it_was() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    shoal.train(job_for(dropout_net), workers=2, quiet=True)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


def test_several_threads_after_the_driver_used_some() -> None:
    def play() -> None:
        torch.set_num_threads(2)
        torch.randn(400, 400).matmul(torch.randn(400, 400)).exp().sum()  # the driver has a pool of its own now
        data = (torch.randn(2048, 8), torch.zeros(2048, dtype=torch.int64))
        job = job_for(dropout_net, threads=2, data=data, batch=1024)
        found = {shoal.train(job, workers=workers, quiet=True).weights_sha256 for workers in (1, 2)}
        assert len(found) == 1, found

    in_child(play)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "workers", "rank"), [(2, 1, 0), (2, 2, 1), (0, 2, 0), (3, 3, 2)])
def test_an_error_names_worker_step_lane_and_the_users_line(
    lane: int, workers: int, rank: int, call: Caller, tmp_path: Path
) -> None:
    top = "def check(step, lane):\n    if (step, lane) == (5, LANE):\n        raise ValueError('bad label 7')"
    path = write_job(tmp_path, loss="check(step, lane)", top=top.replace("LANE", str(lane)))
    line = path.read_text().splitlines().index("        raise ValueError('bad label 7')") + 1
    result = call("train", "job.py", "--workers", str(workers), "--run-dir", "run", "--checkpoint-every", "2")
    assert result.code == 1
    said = result.err[result.err.index("error: ") :].splitlines()
    assert said == [
        f"error: worker {rank}, step 5, lane {lane}: ValueError: bad label 7",
        f"  job.py:{line}  in check:  raise ValueError('bad label 7')",
        "  the loss (loss) was called with (output, target): 4×3 float32, 4×2 int64",
        "  nothing of step 5 was applied",
        "  checkpoint: step 5",
        f"  log: run/worker-{rank}.log",
        "  fix: mend it, then go on with --resume run (and --accept loss, or model, if that is what you mend)",
    ]
    assert "Traceback" not in result.err
    assert "Traceback" in (tmp_path / "run" / f"worker-{rank}.log").read_text()
    assert newest(tmp_path / "run").snapshot.step == 5


def test_an_error_without_words(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss="assert step < 2")
    result = call("train", "job.py")
    assert result.code == 1
    assert "error: worker 0, step 2, lane 0: AssertionError\n" in result.err
    assert "in loss:  assert step < 2" in result.err


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("os.kill(os.getpid(), 9)", "killed (SIGKILL"),
        ("os.kill(os.getpid(), 11)", "killed (SIGSEGV"),
        ("os._exit(4)", "ended with code 4"),
        ("sys.exit(3)", "ended with code 3"),
        ("sys.exit('enough')", "ended with code 1"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_ends_is_named_and_not_its_peers(
    rank: int, ending: str, text: str, call: Caller, tmp_path: Path
) -> None:
    write_job(tmp_path, loss=f"if step == 5 and lane == {2 * rank}:\n    {ending}")
    result = call(
        "train", "job.py", "--workers", "2", "--run-dir", "run", "--checkpoint-every", "2", "--on-failure", "stop"
    )
    assert result.code == 1
    said = result.err[result.err.index("error: ") :].splitlines()
    assert said[0].startswith(f"error: worker {rank}: ")
    assert text in said[0]
    # Worker 0 writes the checkpoints: one that it was writing when it was killed is gone with it.
    killed = rank == 0 and "sys.exit" not in ending
    assert {"  checkpoint: step 4", "  checkpoint: step 2" if killed else ""} & set(said)
    assert f"  log: run/worker-{rank}.log" in said
    assert "Traceback" not in result.err


KILL_SERVER = """\
if step == 5 and lane == 2 and not os.path.exists("killed"):
    open("killed", "w").close()
    os.kill(os.getppid(), 9)
    os.kill(os.getpid(), 9)"""


def test_a_run_outlives_the_process_that_starts_its_workers(call: Caller, tmp_path: Path) -> None:
    """Whoever is lost after that cannot be replaced: the others go on without."""
    write_job(tmp_path, loss=KILL_SERVER)
    result = call.train("job.py", "--workers", "2", "--run-dir", "run", "--checkpoint-every", "2")
    assert Path("killed").exists()
    assert result.sha256 == call.train("job.py").sha256
    (lost,) = events(Path("run"), "worker-lost")
    assert lost["action"] == "the others go on, since the process that starts workers is gone"
    assert all_gone([event["pid"] for event in events(Path("run"), "worker-started")])


def all_gone(pids: list[int]) -> bool:
    watched = []
    for pid in pids:
        try:
            watched.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return all_ended(watched)


# -- the driver, in a process of its own ------------------------------------------------------------------------------

KILL_DRIVER = """\
if step == 5 and lane == 2 and "KILL" in os.environ:
    driver = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
    open("server", "w").write(str(os.getppid()))
    os.kill(driver, 9)"""


def test_a_run_outlives_its_driver_and_nothing_outlives_the_run(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss=KILL_DRIVER)
    shared = set(os.listdir("/dev/shm"))
    arguments = ["job.py", "--workers", "2", "--run-dir", "run", "--checkpoint-every", "2"]
    with Forked("train", *arguments, environment={"KILL": "driver"}) as running:
        assert running.end().code == -signal.SIGKILL
    workers = [event["pid"] for event in events(Path("run"), "worker-started")]
    assert len(workers) == 2
    assert all_gone([int(Path("server").read_text()), *workers]), "they end when they are done"
    assert not Path("run/report.json").exists()

    attached = call.good("attach", "run", "--json")
    assert attached.value["outcome"] == "done"
    assert attached.sha256 == call.train("job.py").sha256
    assert Path("run/report.json").exists()
    assert not sqlite_client.server_running(Path("run")), "the store has gone, too"
    assert set(os.listdir("/dev/shm")) <= shared


# Worker 0 waits at the gate, worker 1 for worker 0; both have said so.
GATE = """\
if step == 5 and lane in (0, 2) and "GATE" in os.environ:
    print("at the gate")
    if lane == 0:
        open(os.environ["GATE"]).read()"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


TO_THE_GATE = ("train", "job.py", "--workers", "2", "--run-dir", "run", "--checkpoint-every", "2")


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupted_run_finishes_its_step_and_can_be_resumed(
    how: str, call: Caller, tmp_path: Path, gate: Path
) -> None:
    """Ctrl-C in a new interpreter, as a user has it."""
    write_job(tmp_path, loss=GATE)
    running: Running | Forked
    if how == "Ctrl-C":
        running = Running(*TO_THE_GATE, env=os.environ | {"GATE": str(gate)})
    else:
        running = Forked(*TO_THE_GATE, environment={"GATE": str(gate)})
    with running:
        running.wait_for("at the gate")
        if isinstance(running, Running):
            os.killpg(running.process.pid, signal.SIGINT)
        else:
            os.kill(running.pid, signal.SIGTERM)
        running.wait_for("stopping: the step at work is finished and saved; Ctrl-C again ends at once")
        gate.write_text("")  # opens it
        result = running.end()
    assert result.code == 3
    assert result.err.endswith(
        "stopped after step 7: asked to stop\n  checkpoint: step 7\n  fix: go on with --resume run\n"
    )
    assert "Traceback" not in result.err
    resumed = call.train("job.py", "--resume", "run", "--workers", "1")
    assert resumed.sha256 == call.train("job.py").sha256


def test_a_second_interrupt_ends_at_once_and_loses_no_checkpoint(call: Caller, tmp_path: Path, gate: Path) -> None:
    write_job(tmp_path, loss=GATE)
    with Forked(*TO_THE_GATE, environment={"GATE": str(gate)}) as running:
        running.wait_for("at the gate")
        os.killpg(running.pid, signal.SIGINT)
        running.wait_for("stopping")
        os.killpg(running.pid, signal.SIGINT)
        result = running.end()
    assert result.code == 3
    assert "Traceback" not in result.err
    assert "stopped after step " in result.err
    assert all_gone([event["pid"] for event in events(Path("run"), "worker-started")])
    assert call.train("job.py", "--resume", "run").sha256 == call.train("job.py").sha256
