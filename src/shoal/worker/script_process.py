"""A process that executes any script, until it joins: its signals, its stack for `shoal why`, advice to its user."""

import functools
import importlib
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore, Store

from shoal.errors import InputError, JobError
from shoal.job.job import Job
from shoal.numerics.user_frames import user_stack
from shoal.recovery.membership.process import start_ticks
from shoal.report.events import ScriptAdvised, ScriptStarted
from shoal.transport.addresses import read_address
from shoal.transport.credentials import credentials_from_environment
from shoal.transport.identity import Role
from shoal.transport.loopback_relay import LoopbackRelay
from shoal.worker.context import WorkerContext, trained_in_script
from shoal.worker.rendezvous import RENDEZVOUS_VARIABLE
from shoal.worker.stack_dump import offer_stack
from shoal.worker.stop_notice import use_script_signals


def begin_script(context: WorkerContext) -> None:
    """Prepares the process, and reports it: a script that never joins is known by this alone."""
    use_script_signals()
    open_relay()
    if context.size == 1:
        keep_store_inside()
    event = ScriptStarted(
        rank=context.rank,
        pid=os.getpid(),
        host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
        began=start_ticks(os.getpid()) or "",
        incarnation=context.incarnation,
        stack_file=offer_stack(),
    )
    context.channel.emit(event)
    _watch_spawn(context)


def open_relay() -> None:
    """Between hosts: torch's store finds the driver's server behind a port on this host's loopback, for this process
    and those that it starts."""
    address = os.environ.get(RENDEZVOUS_VARIABLE, "")
    if not address.startswith("tcp:"):
        return
    _, place = read_address(address)
    credentials = credentials_from_environment()
    if credentials is None:
        raise InputError(f"this process has no credentials, and the rendezvous at {address} asks for them")
    relay = LoopbackRelay(place, credentials, (Role.DRIVER,))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(relay.port)}


def keep_store_inside() -> None:
    """Of a script's only worker: a group of one finds its store inside the process. torch would open a server for it,
    on all addresses and for anybody.

    Groups of more members, with processes that the script starts itself, are left to torch, as under plain `python`."""
    module = importlib.import_module("torch.distributed.rendezvous")
    create: Callable[..., Store] = module._create_c10d_store

    @functools.wraps(create)
    def create_store(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any, **given: Any
    ) -> Store:
        if world_size != 1 or rank != 0:
            return create(hostname, port, rank, world_size, timeout, *more, **given)
        store = HashStore()
        store.set_timeout(timeout)
        return store

    module._create_c10d_store = create_store  # type: ignore[attr-defined]


def refuse_idle_job(script: Path, names: Mapping[str, Any]) -> None:
    """Raises JobError where a script has ended that defines a job and trains nothing."""
    jobs = [name for name, value in names.items() if isinstance(value, Job)]
    if jobs and not trained_in_script():
        fix = f"shoal train {shlex.quote(str(script))}"
        raise JobError(
            f"{script} defines a job, {jobs[0]}, and trains nothing: shoal run only executes the file", fix=fix
        )


# -- mp.spawn ---------------------------------------------------------------------------------------------------------


def spawn_advice(processes: int, workers: int, line: str) -> str | None:
    """A sentence about processes that a script starts itself; None: they are what they are under plain `python`."""
    at = f" ({line})" if line else ""
    if processes == 0:
        return (
            f"mp.spawn{at} was asked for 0 processes, so nothing is trained (without CUDA, torch.cuda.device_count()"
            " is 0): give a number, or call the function itself and let shoal run start the workers"
        )
    if workers > 1:
        return (
            f"mp.spawn{at} starts {processes} more processes in each of {workers} workers, which find another group or"
            f' none: call the function itself with int(os.environ["RANK"]), or use --workers 1'
        )
    return None


def _watch_spawn(context: WorkerContext) -> None:
    """Advises the user when the script starts processes of its own, and starts them."""
    module = importlib.import_module("torch.multiprocessing.spawn")
    package = sys.modules["torch.multiprocessing"]
    start: Callable[..., Any] = module.start_processes

    @functools.wraps(start)
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **given: Any) -> Any:
        line, _ = user_stack(threading.get_ident())
        advice = spawn_advice(nprocs, context.size, line)
        if advice is not None:
            context.channel.emit(ScriptAdvised(rank=None, text=advice))
        return start(fn, args, nprocs, *more, **given)

    module.start_processes = package.start_processes = start_processes  # type: ignore[attr-defined]
