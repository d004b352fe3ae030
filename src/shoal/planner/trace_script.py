"""Runs a script with its own loop up to its first `run.backward`, without memory for its weights.

Parameters that modules register are fake: they have shapes and no memory. The data is real. `shoal.join` returns a
stand-in run that trains nothing; at the first `run.backward` a callback inspects the script, and the script ends.
Process-wide settings that the script changes (arguments, paths, generators, torch's settings) are restored, and its
prints are dropped. Files that the script writes before that point stay.
"""

import contextlib
import io
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import InputError, ShoalError
from shoal.job.dataset import DataSource, open_data
from shoal.job.job import Job
from shoal.numerics.seeds import preserve_generators
from shoal.numerics.user_frames import user_line
from shoal.planner.cost.trace import fake, fake_mode, needs_values
from shoal.worker.join import as_job, as_named, as_one_model
from shoal.worker.training_state import Batch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TracedScript:
    """A script's objects at its first `run.backward`."""

    job: Job  # its arithmetic: batch, lanes, microbatches
    model: nn.Module
    optimizer: Optimizer
    source: DataSource
    closure: Callable[[Any], Any]
    mode: Any  # of its fake tensors


def run_until_backward(path: str, arguments: Sequence[str], look: Callable[[TracedScript], T]) -> T:
    """Runs the script to its first `run.backward` and returns `look(script)`."""
    script = Path(path)
    if not script.is_file():
        near = get_close_matches(script.name, [other.name for other in script.parent.glob("*.py")], n=1)
        raise InputError(f"there is no file {path}", fix=f"did you mean {script.parent / near[0]}?" if near else None)
    mode = fake_mode()
    tracer = _ScriptTracer(mode, look)
    with _restored_process(), _fake_parameters(mode), _patched_join(tracer.join):
        try:
            sys.argv = [path, *arguments]
            sys.path.insert(0, str(script.parent.resolve()))
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(path, run_name="__main__")
        except _TraceComplete as seen:
            return seen.found  # type: ignore[no-any-return]
        except ShoalError:
            raise
        except SystemExit as error:
            if error.code not in (None, 0):
                raise InputError(f"{path} ended with exit code {error.code} before its first run.backward") from error
        except SyntaxError as error:
            where = f"{path}:{error.lineno}  {(error.text or '').strip()}"
            raise InputError(f"{path} is not valid Python: {error.msg}", where=where) from None
        except Exception as error:
            raise _failed(path, error) from error
    cause = "it joins, but its loop calls no run.backward" if tracer.joined else "it does not call shoal.join"
    raise InputError(
        f"{path} ended before a first run.backward: {cause}",
        fix="run = shoal.join(model, optimizer, loader), and loss = run.backward(batch, closure) in the loop",
    )


def _failed(path: str, error: Exception) -> InputError:
    text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if needs_values(error):
        return InputError(
            f"{path} cannot be traced without the values of its weights: {text}",
            where=user_line(error),
            fix="move what reads the values of weights behind the first run.backward",
        )
    return InputError(f"{path} fails before its first run.backward: {text}", where=user_line(error))


class _TraceComplete(BaseException):
    """Ends the script with its result. A BaseException, so that the script's `except Exception` does not catch it."""

    def __init__(self, found: Any) -> None:
        self.found = found


class _ScriptTracer:
    def __init__(self, mode: Any, look: Callable[[TracedScript], Any]) -> None:
        self.mode, self.look = mode, look
        self.joined = False

    def join(
        self, model: nn.Module | Mapping[str, nn.Module], optimizer: Optimizer | Mapping[str, Optimizer],
        loader: Any, *, scheduler: Any = None, state: Any = None,
        lanes: int | None = None, microbatches: int = 1, accumulate: Any = None, seed: int = 0,
        blocks: Sequence[str] | None = None, threads: int = 1, steps: int | None = None,
        checkpoint_every: int | None = None, run_dir: Any = None, resume: bool = False,
    ) -> "_FakeRun":  # fmt: skip
        self.joined = True
        model, optimizer = as_one_model(model), _largest(as_named(optimizer))
        source = open_data(loader, seed=seed)
        job = as_job(
            model, source, lanes=lanes, microbatches=microbatches, accumulate=accumulate, seed=seed, blocks=blocks,
            threads=threads,
        )  # fmt: skip

        def backward(closure: Callable[[Any], Any]) -> None:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else fake(buffer, self.mode)
            found = TracedScript(
                job=job, model=model, optimizer=optimizer, source=source, closure=closure, mode=self.mode
            )
            raise _TraceComplete(self.look(found))

        return _FakeRun(source, job, backward)


def _largest(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """Of several optimizers, the one with the most numbers: its state is what the estimate is made with."""
    return max(optimizers.values(), key=lambda each: sum(p.numel() for g in each.param_groups for p in g["params"]))


class _FakeRun:
    """Stands in for the run that a script's loop uses; trains nothing."""

    leader, rank, workers, step, epoch, loss, stopped = True, 0, 1, 0, 0, None, None

    def __init__(self, source: DataSource, job: Job, backward: Callable[[Callable[[Any], Any]], None]) -> None:
        self._source, self._job, self._backward = source, job, backward

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def batches(self) -> Iterator[Batch]:
        yield Batch(step=0, epoch=0, indices=self._source.order(0)[: self._job.batch_size])

    def backward(
        self, batch: Batch, closure: Callable[[Any], Any], *, optimizer: Any = None, same_noise: bool = False,
        scaler: Any = None,
    ) -> float:  # fmt: skip
        self._backward(closure)
        return 0.0

    def evaluate(self, data: Any, closure: Callable[[Any], Any]) -> float:
        return 0.0

    def clip(self, max_norm: float) -> float:
        return 0.0

    def save(self) -> None:
        return None

    def finish(self) -> None:
        return None


@contextlib.contextmanager
def _patched_join(join: Callable[..., Any]) -> Iterator[None]:
    package, module = sys.modules["shoal"], sys.modules["shoal.worker.join"]
    before = package.join, module.join
    package.join = module.join = join  # type: ignore[attr-defined]
    try:
        yield
    finally:
        package.join, module.join = before  # type: ignore[attr-defined]


@contextlib.contextmanager
def _fake_parameters(mode: Any) -> Iterator[None]:
    """Replaces each parameter by a fake one when a module registers it, and torch.compile by the identity."""
    register, compile_ = nn.Module.register_parameter, torch.compile
    known: dict[int, tuple[Any, nn.Parameter]] = {}  # a parameter that several modules share stays one

    def register_fake(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and type(param.data) is torch.Tensor:
            real, found = known.get(id(param), (lambda: None, None))
            if real() is not param:
                found = cast(nn.Parameter, fake(param, mode))
                known[id(param)] = weakref.ref(param), found
            param = found
        register(module, name, param)

    nn.Module.register_parameter = register_fake  # type: ignore[method-assign,assignment]
    torch.compile = lambda model=None, **_: (lambda each: each) if model is None else model  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter, torch.compile = register, compile_  # type: ignore[method-assign]


@contextlib.contextmanager
def _restored_process() -> Iterator[None]:
    argv, path, folder, variables = list(sys.argv), list(sys.path), os.getcwd(), dict(os.environ)
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with preserve_generators():
        try:
            yield
        finally:
            sys.argv[:], sys.path[:] = argv, path
            os.chdir(folder)
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
