"""The same kills for everyone: Shoal, torchrun's restart of all, torchft.

Each trains the same model on two workers. A kill comes a number of steps after everybody takes part again; which worker
and how many steps is one schedule for all contenders. When it is felt is read from what the workers say (notes.py).
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import cases
import shoal
from notes import COMMITTED, STARTED, Fault, Note, Tail, judge
from shoal.driver.launch import train_with
from shoal.errors import ShoalError
from shoal.report.events import MembershipChanged, RunRecovered, StateTransferred, StepsCommitted, WorkerStarted, decode
from shoal.worker.run_config import RunConfig

HERE = Path(__file__).parent
WORKERS = 2
LOOK_SECONDS = 0.01
PATIENCE_SECONDS = 60.0  # for one kill to be over


@dataclass(frozen=True, kw_only=True)
class Kill:
    worker: int
    rest: int  # steps with everybody, before it
    signal: int = signal.SIGKILL


def schedule(count: int, rest: tuple[int, int], number: int = signal.SIGKILL) -> list[Kill]:
    chance = random.Random(1)
    return [Kill(worker=chance.randrange(WORKERS), rest=chance.randint(*rest), signal=number) for _ in range(count)]


class Running(Protocol):
    def notes(self) -> list[Note]:
        """What was said since the last look."""
        ...

    def tend(self) -> None:
        """Does what this contender leaves to others: starting a process again."""
        ...


Start = Callable[[str, bool, Path], AbstractContextManager[Running]]  # case, quick, folder


def suffer(running: Running, kills: Sequence[Kill]) -> list[Fault]:
    """Plays the kills, one after the other."""
    notes: list[Note] = []

    def listen(found: Callable[[], Any], what: str) -> Any:
        """Until there is something."""
        patience = time.monotonic() + PATIENCE_SECONDS
        while (value := found()) is None:
            if time.monotonic() > patience:
                last = "\n".join(map(str, notes[-5:]))
                raise RuntimeError(f"waited {PATIENCE_SECONDS:.0f} s in vain for {what}; said last:\n{last}")
            time.sleep(LOOK_SECONDS)
            running.tend()
            notes.extend(running.notes())
        return value

    faults: list[Fault] = []
    for kill in kills:
        group = listen(partial(rested, notes, kill.rest), "everybody to take part for some steps")
        pid = [note.pid for note in notes if note.kind == STARTED and note.worker == kill.worker][-1]
        at = time.time()
        os.kill(pid, kill.signal)
        hit = partial(judge, notes, worker=kill.worker, at=at, group=group, workers=WORKERS)
        faults.append(listen(hit, "everybody to be back after a kill"))
        notes[:] = [note for note in notes if note.kind == STARTED or note.group > group]
    return faults


def rested(notes: Sequence[Note], rest: int) -> int | None:
    """The newest group, once everybody has taken part in it for so many steps."""
    commits = [note for note in notes if note.kind == COMMITTED]
    newest = max((note.group for note in commits), default=0)
    steps = [note.step for note in commits if note.group == newest and note.members == WORKERS]
    return newest if steps and max(steps) - min(steps) >= rest else None


# -- Shoal ----------------------------------------------------------------------------------------------------------


@dataclass
class Shoal:
    """Reads a run's events as notes."""

    events: Tail
    group: int = 1
    members: int = WORKERS
    redone: int = 0
    handed: list[StateTransferred] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)  # with everybody
    changing: bool = True  # nothing was told of steps since the members changed

    def tend(self) -> None:
        return

    def notes(self) -> list[Note]:
        return [note for line in self.events.lines() for note in self._read(line)]

    def _read(self, line: bytes) -> Iterator[Note]:
        match decode(line):
            case WorkerStarted() as event:
                yield Note(time=event.time, kind=STARTED, worker=event.rank, pid=event.pid)
            case MembershipChanged() as event:
                self.group, self.members, self.redone = event.generation, len(event.members), event.redone
                self.changing = True
            case RunRecovered() as event:
                yield self._commit(event.time, event.step, self.redone)
                self.redone = 0
            case StepsCommitted(leader=True) as event:
                if self.members == WORKERS and not self.changing:
                    self.step_seconds.append(event.spent.total / event.count)
                self.changing = False
                yield self._commit(event.time, event.step, 0)
            case StateTransferred() as event:
                self.handed.append(event)
            case _:
                pass

    def _commit(self, at: float, step: int, redone: int) -> Note:
        members, group = self.members, self.group
        return Note(time=at, kind=COMMITTED, worker=0, step=step, group=group, members=members, redone=redone)


def job_of(case: cases.Case, steps: int) -> shoal.Job:
    return shoal.Job(
        name=case.name,
        model=case.model,
        data=case.data,
        loss=case.loss,
        optimizer=case.optimizer,
        batch=case.batch,
        steps=steps,
        shuffle=False,
        checkpoint_every=steps,  # the last one only
    )


@contextmanager
def start_shoal(name: str, quick: bool, folder: Path) -> Iterator[Shoal]:
    """A run that goes on until it is told to stop, with what a user gets who sets nothing."""
    job = job_of(cases.make(name, quick), 1_000_000)
    driver = os.fork()
    if driver == 0:
        code = 1
        try:
            train_with(job, RunConfig().changed(workers=WORKERS, run_dir=folder / "run", quiet=True, predict=False))
        except ShoalError:
            code = 0  # stopped, as asked; if it failed before, nobody was there to kill
        finally:
            os._exit(code)
    try:
        yield Shoal(Tail(folder / "run" / "events.jsonl"))
    finally:
        os.kill(driver, signal.SIGTERM)
        os.waitpid(driver, 0)


# -- peers ----------------------------------------------------------------------------------------------------------


class Peers:
    """Processes whose workers write notes. Those in `again` are started, and started again when they end."""

    def __init__(
        self,
        folder: Path,
        again: Mapping[int, Callable[[], subprocess.Popen[bytes]]],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises when it makes no sense to go on."""
        self._again, self._check = again, check
        self._tails = [Tail(folder / f"notes-{worker}.jsonl") for worker in range(WORKERS)]
        self.running = {worker: start() for worker, start in again.items()}

    def notes(self) -> list[Note]:
        return [Note(**json.loads(line)) for tail in self._tails for line in tail.lines()]

    def tend(self) -> None:
        self._check()
        for worker, process in self.running.items():
            if process.poll() is not None:
                self.running[worker] = self._again[worker]()


@contextmanager
def start_torchrun(name: str, quick: bool, folder: Path) -> Iterator[Peers]:
    """All start again from the last checkpoint when one of them dies."""
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    call += ["--max-restarts=1000", str(HERE / "peer_torchrun.py"), name, str(folder), str(checkpoint_every(name))]
    # Else Gloo's workers of the next attempt find the addresses of the last one in torchrun's store, and it fails.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with _started([*call, _size(quick)], folder / "torchrun.log", own_store) as agent:
        yield Peers(folder, {}, check=lambda: _check(agent, folder / "torchrun.log"))


def checkpoint_every(name: str) -> int:
    """Steps between the checkpoints of torchrun's script."""
    return 50 if name == "small" else 5


def torchft_with(python: Path, *lighthouse_options: str) -> Start:
    """torchft's lighthouse, with the settings of its README, and one process per replica group."""

    @contextmanager
    def start(name: str, quick: bool, folder: Path) -> Iterator[Peers]:
        port = _free_port()
        lighthouse = [str(python.parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
        lighthouse += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000", *lighthouse_options]
        there = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

        def replica(worker: int) -> subprocess.Popen[bytes]:
            call = [str(python), str(HERE / "peer_torchft.py"), name, str(folder), str(worker), str(WORKERS)]
            return _open([*call, _size(quick)], folder / f"torchft-{worker}.log", there)

        with _started(lighthouse, folder / "lighthouse.log"):
            peers = Peers(folder, {worker: partial(replica, worker) for worker in range(WORKERS)})
            try:
                yield peers
            finally:
                for process in peers.running.values():
                    process.kill()
                    process.wait()

    return start


def why_no_torchft(python: Path | None) -> str:
    """Empty if it can be imported there."""
    if python is None:
        return "no Python that has it was named: --torchft, see benchmarks/README.md"
    try:
        done = subprocess.run([str(python), "-c", "import torchft"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{python}: {error.strerror}"
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


@contextmanager
def _started(
    call: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = _open(call, log, variables or {})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _open(call: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}  # Shoal's setting
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    with open(log, "ab") as file:
        return subprocess.Popen(call, stdout=file, stderr=file, env=environment, cwd=log.parent)


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{log.stem} ended with exit code {process.returncode}:\n{last}")


def _size(quick: bool) -> str:
    return "quick" if quick else "full"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
