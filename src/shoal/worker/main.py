"""What one worker process does: trains a job, or runs the user's script; and how it reports a failure."""

import signal
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path

from shoal.errors import ShoalError
from shoal.numerics.seeds import MODULE_LOAD, seed_everything
from shoal.report.events import WorkerLeft
from shoal.worker.collective_worker import CollectiveWorker
from shoal.worker.context import WorkerContext, install_context
from shoal.worker.failure_report import failure_event
from shoal.worker.job_setup import OpenJob
from shoal.worker.join import finish_joined, joined_run
from shoal.worker.membership import MODEL_SHARD_LOST, ModelShardLost, WorkerEvicted
from shoal.worker.run import Run
from shoal.worker.save_on_error import save_on_error
from shoal.worker.script_process import begin_script, refuse_idle_job
from shoal.worker.trainer import train

TRACEBACK_FOLLOWS = "--- traceback ---"  # the driver shows nothing of a log from here on: the error has its own message


def train_job(opened: OpenJob, context: WorkerContext) -> None:
    """Trains a job in a run with collectives."""
    worker = CollectiveWorker(opened, context)
    _job_workers.append(worker)
    train(worker)


def run_script(script: Path, arguments: list[str], context: WorkerContext) -> None:
    """Runs any script as `__main__`. One that joins finds this context; another finds what torchrun would have set."""
    install_context(context)
    begin_script(context)
    seed_everything(0, MODULE_LOAD)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    loader = SourceFileLoader("__main__", str(script))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    # It stays until the process ends: torch can deadlock when a DDP model is freed while its gloo thread still runs
    # (freeing joins that thread under the interpreter's lock, which the thread waits for).
    sys.modules["__main__"] = module
    try:
        loader.exec_module(module)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
    except KeyboardInterrupt:  # of a script that has not joined: the driver passes Ctrl-C on
        print(TRACEBACK_FOLLOWS, file=sys.stderr)
        traceback.print_exc()
        raise SystemExit(128 + signal.SIGINT) from None
    finish_joined()
    run = joined_run()
    if run is not None:
        run.group.close()
    else:
        refuse_idle_job(script, vars(module))


# -- failures -------------------------------------------------------------------------------------------------------

_job_workers: list[CollectiveWorker] = []  # of this process: one, or none


def own_run() -> Run | None:
    """The run that this process has entered."""
    return joined_run() or next((worker.run for worker in _job_workers if worker.entered), None)


@contextmanager
def reporting_failures(context: WorkerContext, log: str) -> Iterator[list[int]]:
    """Makes any error inside one plain message to the driver and a traceback in the log."""
    code = [0]
    try:
        yield code
    except SystemExit as leave:
        code[0] = leave.code if isinstance(leave.code, int) else 1
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        _finish_saving()
    except ModelShardLost as error:
        run = own_run()
        step = 0 if run is None else run.step
        if run is not None:
            run.checkpoints.drop_missing_writers(error.present)
        left = WorkerLeft(rank=context.rank, incarnation=context.incarnation, step=step, reason=MODEL_SHARD_LOST)
        context.channel.emit(left)
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
        _finish_saving()
    except WorkerEvicted as error:
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
    except BaseException as error:
        run = own_run()
        code[0] = error.exit_code if isinstance(error, ShoalError) else 1
        event = failure_event(error, context.rank, run, log, limit=context.config.parallel.memory_bytes)
        if run is not None:
            event.where.extend(save_on_error(run, error, f"worker {context.rank}: {event.message}"))
        context.channel.emit(event)
        print(TRACEBACK_FOLLOWS, file=sys.stderr)
        traceback.print_exc()
        _finish_saving("" if event.kind == "PeerLost" else f"worker {context.rank}: {event.message}")


def _finish_saving(failed: str = "") -> None:
    """Waits for a checkpoint that is being written: its event reaches the user."""
    run = own_run()
    if run is not None:
        run.close(failed)
