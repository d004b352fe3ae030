"""Jobs from Python files: `digits.py`, or `digits.py:small` where a file holds several."""

import importlib.util
import shlex
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shoal.errors import InputError, ShoalError
from shoal.job.cuda_errors import explain_cuda_error
from shoal.job.job import Job
from shoal.job.missing_package import install_command
from shoal.job.read_source import file_kind
from shoal.job.settings import parse_setting
from shoal.numerics.seeds import MODULE_LOAD, seed_everything


def nearest_file(path: Path) -> str | None:
    """A question that names the Python file whose name is most like one that is missing."""
    near = get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
    return f"did you mean {shlex.quote(str(path.parent / near[0]))}?" if near else None


def load_job(spec: str, settings: list[str] | None = None) -> Job:
    """The job that `path.py[:name]` names, with `--set` applied."""
    path_text, _, name = spec.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise InputError(f"there is no file {path}", fix=nearest_file(path) or "shoal train path/to/file.py")
    if not name and file_kind(path) in ("joins", "script"):
        fix = f"shoal run {shlex.quote(path_text)}"
        raise InputError(f"{path} has no shoal.Job but a loop of its own, which only shoal run starts", fix=fix)
    module = _load(path)
    jobs = {key: value for key, value in vars(module).items() if isinstance(value, Job)}
    job = _choose(path, name, jobs, module)
    changes = dict(parse_setting(text) for text in settings or ())
    return job.changed(**changes) if changes else job


def _load(path: Path) -> Any:
    # A file that builds a model at import builds the same one in every process.
    seed_everything(0, MODULE_LOAD)
    spec = importlib.util.spec_from_file_location(f"shoal_job_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file", fix="a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the processes of a DataLoader look it up here
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except ShoalError as error:
        line = _failing_line(path, error)
        error.where = (line, *error.where) if line else error.where
        raise
    except SyntaxError as error:
        where = f"{path}:{error.lineno}  {(error.text or '').strip()}"
        raise InputError(f"{path} is not valid Python: {error.msg}", where=where) from None
    except (Exception, SystemExit) as error:
        line = _failing_line(path, error)
        message = f"{path} could not be loaded: {type(error).__name__}: {error}"
        explained, fix = explain_cuda_error(error, line or "") or (message, install_command(error))
        raise InputError(explained, where=[line] if line else [], fix=fix) from error
    return module


def _failing_line(path: Path, error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) in (path, path.resolve())]
    return f"{path}:{own[-1].lineno}  {own[-1].line}" if own else None


def _choose(path: Path, name: str, jobs: dict[str, Job], module: Any) -> Job:
    if name:
        if name in jobs:
            return jobs[name]
        found = getattr(module, name, None)
        if callable(found):
            made = found()
            if isinstance(made, Job):
                return made
        held = ", ".join(jobs) or "none"
        near = get_close_matches(name, jobs, n=1)
        raise InputError(
            f"{path} has no job named '{name}'; it has {held}", fix=shlex.quote(f"{path}:{near[0]}") if near else None
        )
    if "job" in jobs:
        return jobs["job"]
    if len(jobs) == 1:
        return next(iter(jobs.values()))
    if not jobs:
        fix = f"job = shoal.Job(model=…, data=…, …); a script: shoal run {shlex.quote(str(path))}"
        raise InputError(f"{path} has no shoal.Job", fix=fix)
    raise InputError(f"{path} has several jobs: {', '.join(jobs)}", fix=shlex.quote(f"{path}:{next(iter(jobs))}"))
