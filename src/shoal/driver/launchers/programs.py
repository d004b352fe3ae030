"""Any program on the hosts of a lab: one process per worker, with the variables that torchrun sets."""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TextIO

from shoal.driver.launchers.base import torchrun_environment
from shoal.driver.launchers.fork_server import die_with_parent
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.namespaces import enter
from shoal.errors import InputError
from shoal.planner.cluster import WorkerSlot

MASTER_PORT = 29500  # free: the host is new
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
TICK_SECONDS = 0.1
LONGEST_LINE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ProgramFailure:
    """The first program that failed."""

    slot: WorkerSlot
    code: int  # negative: the signal that ended it

    @property
    def exit_code(self) -> int:
        return self.code if self.code > 0 else 128 - self.code

    def __str__(self) -> str:
        how = f"with exit code {self.code}" if self.code > 0 else f"by {signal.Signals(-self.code).name}"
        return f"rank {self.slot.rank} on {self.slot.host.name} ended {how}"


def run_program(lab: Lab, command: Sequence[str]) -> ProgramFailure | None:
    """Runs the command once per worker of the cluster, and prints their output line by line with the host's name.

    After the first failure the others are asked to end (SIGTERM), then made to. None is left when this returns.
    """
    check_program(command[0])
    programs: list[_HostProgram] = []
    try:
        for slot in lab.slots():
            programs.append(_HostProgram(lab, slot, command))
        return _watch(programs)
    finally:
        _end_all(programs)


def check_program(name: str) -> None:
    if shutil.which(name) is None:
        python = os.path.isfile(name) and name.endswith(".py")
        fix = f"python {name}" if python else "a program in PATH, or train, run or verify of shoal"
        raise InputError(f"{name} cannot be run: {'it is not executable' if python else 'no such program'}", fix=fix)


def _watch(programs: Sequence["_HostProgram"]) -> ProgramFailure | None:
    failure: ProgramFailure | None = None
    with selectors.DefaultSelector() as selector:
        for program in programs:
            for pipe in program.pipes:
                selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        while failure is None and any(program.running for program in programs):
            for key, _ in selector.select(TICK_SECONDS):
                if not key.data.pass_on():
                    selector.unregister(key.fd)
            for program in programs:
                if failure is None and not program.running and program.code != 0:
                    failure = ProgramFailure(slot=program.slot, code=program.code)
    return failure


def _end_all(programs: Sequence["_HostProgram"]) -> None:
    try:
        for program in programs:
            program.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(program.running for program in programs) and time.monotonic() < deadline:
            for program in programs:
                program.pass_on()  # a full pipe would keep it from ending
            time.sleep(0.01)
    finally:
        for program in programs:
            program.signal(signal.SIGKILL)
            program.process.wait()
            program.pass_on()
            program.close()


class _HostProgram:
    """One process and its two streams."""

    def __init__(self, lab: Lab, slot: WorkerSlot, command: Sequence[str]) -> None:
        self.slot = slot
        hosts, parent = lab.rank_hosts(), os.getpid()
        host = hosts[slot.rank]

        def move() -> None:
            die_with_parent(parent)
            enter(host)

        ranks = torchrun_environment(hosts, slot.rank)
        ranks |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(MASTER_PORT)}
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | ranks | host.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the processes that it starts are ended with it
            preexec_fn=move,
        )
        output, errors = self.process.stdout, self.process.stderr
        assert output is not None and errors is not None
        prefix = host.name if slot.local_size == 1 else f"{host.name}:{slot.local_rank}"
        self.pipes = [_PrefixedPipe(output, sys.stdout, prefix), _PrefixedPipe(errors, sys.stderr, prefix)]

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        return self.process.returncode

    def signal(self, number: int) -> None:
        if self.running:  # not reaped, so the process id is still its own
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def pass_on(self) -> None:
        for pipe in self.pipes:
            pipe.pass_on()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


class _PrefixedPipe:
    """Prints whole lines, each with the name of the host it came from."""

    def __init__(self, source: IO[bytes], target: TextIO, prefix: str) -> None:
        self.source, self.target, self.prefix = source, target, prefix
        self.descriptor = source.fileno()
        self.partial = b""
        os.set_blocking(self.descriptor, False)

    def pass_on(self) -> bool:
        """Prints all lines that have arrived; returns False at the end of the stream."""
        try:
            while found := os.read(self.descriptor, LONGEST_LINE):
                *lines, self.partial = (self.partial + found).split(b"\n")
                if len(self.partial) > LONGEST_LINE:
                    lines, self.partial = [*lines, self.partial], b""
                self._write(lines)
        except BlockingIOError:
            return True
        return False

    def _write(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            print(f"{self.prefix} | {line.decode(errors='replace')}", file=self.target)
        self.target.flush()

    def close(self) -> None:
        if self.partial:
            self._write([self.partial])
        self.source.close()
