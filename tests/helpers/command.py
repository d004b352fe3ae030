"""The command `shoal` as a user meets it: job files to give it, and ways to call it. Used by the tests."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from shoal.cli.main import main
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.recovery.checkpoint.directory import CheckpointDirectory, FoundCheckpoint
from shoal.worker.start import PROCESS_LINE

HASH = r"\b[0-9a-f]{64}\b"

# Samples come in order and each target says which sample it is, so the loss knows the step (0 to 9) and the lane.
TEMPLATE = """\
import os
import sys

import shoal
import torch
import torch.nn.functional as F
from torch import nn

{top}

generator = torch.Generator().manual_seed(1)
x = torch.randn(160, 8, generator=generator)
labels = torch.randint(3, (160,), generator=generator)


def loss(output, target):
    label, number = target.unbind(1)
    step, lane = int(number[0]) // 16, int(number[0]) % 16 // 4
    rank = os.environ.get("RANK")
    value = F.cross_entropy(output, label)
    {loss}
    return value


usual = dict(
    model=lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)),
    data=(x, torch.stack([labels, torch.arange(160)], 1)),
    loss=loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    batch=16,
    steps=8,
    lanes=4,
    shuffle=False,
)
job = shoal.Job(**usual | dict({fields}))
"""


def write_job(folder: Path, *, loss: str = "pass", fields: str = "", top: str = "", name: str = "job.py") -> Path:
    """A job file; `loss` is what its loss does beside its work, knowing `step`, `lane` and `rank`."""
    path = folder / name
    path.write_text(TEMPLATE.format(loss=loss.replace("\n", "\n    "), fields=fields, top=top))
    return path


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        return msgspec.json.decode(self.out)

    @property
    def sha256(self) -> str:
        return str(self.value["weights_sha256"])


class Caller:
    """The command in this process: an import of torch less."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Result:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        return Result(code=code, out=out, err=err)

    def good(self, *arguments: str | Path) -> Result:
        result = self(*arguments)
        assert result.code == 0, result.err
        return result

    def train(self, *arguments: str | Path) -> Result:
        return self.good("train", *arguments, "--json")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "shoal", *map(str, arguments)]


def shoal(*arguments: str | Path, **more: Any) -> Result:
    """The command in a process of its own."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **more)
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


class Running:
    """The command in a process of its own, at work. What it writes on stderr is read line by line."""

    def __init__(self, *arguments: str | Path, **more: Any) -> None:
        # A session of its own, so that a signal to its group is a Ctrl-C in its terminal.
        self.process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )
        self.seen = ""

    @property
    def stderr(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def wait_for(self, text: str) -> None:
        for line in self.stderr:
            self.seen += line
            if text in line:
                return
        raise AssertionError(f"ended without saying {text!r}:\n{self.seen}")

    def end(self) -> Result:
        self.seen += self.stderr.read()
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        return Result(code=self.process.wait(), out=out, err=self.seen)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the kernel ends its workers with it
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class Forked:
    """The command in a fork of this process: with what the test has patched, and without the seconds of an import.

    A process like any other: it has a session of its own, so that a signal to its group is a Ctrl-C in its terminal,
    and may be killed.
    """

    def __init__(
        self,
        *arguments: str | Path,
        call: Callable[[], object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`call`: something else than the command. `environment`: what it has beside ours."""
        self._environment = environment or {}
        self._output = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self.code: int | None = None
        if self.pid == 0:
            self._become(call or (lambda: main([str(argument) for argument in arguments])))

    def _become(self, call: Callable[[], object]) -> None:
        code = 1
        try:
            os.setsid()
            os.environ.update(self._environment)
            for number, file in zip((1, 2), self._output, strict=True):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)
            returned = call()
            code = returned if isinstance(returned, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def wait_for(self, text: str) -> None:
        """Until it has written this on stderr."""
        while True:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # Not `read`: the place in the file is that of the other process, too.
            seen = os.pread(self._output[1].fileno(), 1 << 20, 0).decode(errors="replace")
            if text in seen:
                return
            assert ended is None, f"ended without saying {text!r}:\n{seen}"
            time.sleep(0.005)

    def end(self) -> Result:
        """Waits for it. What it wrote is there also if it was killed."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Result(code=self.code, out=texts[0], err=texts[1])

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        if self.code is None:
            self.kill()
        for file in self._output:
            file.close()


def as_python(path: str | Path, *arguments: str | Path) -> int:
    """Runs a Python script here, as `python path arguments`; returns the exit code."""
    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def program(path: Path, *arguments: str | Path) -> Result:
    """A Python script in a fork: its import of torch is done."""
    with Forked(call=lambda: as_python(path, *arguments)) as child:
        return child.end()


def newest(run: Path) -> FoundCheckpoint:
    found = CheckpointDirectory(run / "checkpoints").newest()
    assert found is not None
    return found


def checkpoint_sha256(run: Path) -> str:
    return model_digest(tensor_digests(newest(run).snapshot.weights.items()))


def log_lines(run: Path | str, worker: int = 0) -> list[str]:
    """What a worker printed: its log without the line that names its process."""
    lines = Path(run, f"worker-{worker}.log").read_text().splitlines()
    assert lines[0].startswith(PROCESS_LINE), lines
    return [line for line in lines if not line.startswith(PROCESS_LINE)]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(msgspec.json.decode, (run / "events.jsonl").read_bytes().splitlines())
    return [line for line in lines if line["event"] == kind]


def forked(play: Callable[[], object]) -> int:
    """A process that does this and ends with 0, or with 1 after a traceback."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        play()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def in_child(play: Callable[[], object]) -> None:
    """In a fork, as workers are: what it does to its memory stays there."""
    assert os.waitstatus_to_exitcode(os.waitpid(forked(play), 0)[1]) == 0


def assert_plain(result: Result, *texts: str, code: int = 2) -> None:
    assert result.code == code, result.err
    assert "Traceback" not in result.out + result.err
    assert [line.startswith("error: ") for line in result.err.splitlines()].count(True) == 1, result.err
    for text in texts:
        assert text in result.err


def refused(call: Caller, *arguments: str | Path, code: int = 2) -> str:
    result = call(*arguments)
    assert result.code == code, result
    assert result.err.startswith("error: ") and "Traceback" not in result.err
    return result.err.removeprefix("error: ")
