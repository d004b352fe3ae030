"""Commands to a run of a script that has not joined: it has no members at the store, only processes and a driver."""

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from shoal.collectives.handshake import host_identity
from shoal.driver.command_store import command_store
from shoal.driver.driver_claim import DriverRecord, living_driver
from shoal.driver.launch_spec import SITTING_FILES, read_driver_state
from shoal.errors import InputError, RunError, ShoalError
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.process import STOPPED_STATES, current_state, lives_since, process_state
from shoal.recovery.membership.store import StoreUnavailable
from shoal.report.events import ProcessPaused, RunStarted, ScriptStarted, WorkerStarted
from shoal.report.run_folder import RunFolder
from shoal.report.scripts import newest_scripts
from shoal.report.stacks import GONE, IN_SCRIPT, NO_DRIVER, RUNNING, STOPPED, WorkerActivity
from shoal.worker.stack_dump import ask_stack

ANSWER_SECONDS = 1.5  # in which a process writes its stack
STOP_SECONDS = 30.0  # in which a driver ends a script's workers
TICK_SECONDS = 0.05
PLAIN = "the run is a plain script's (no shoal.join)"


def never_joined(folder: RunFolder) -> bool:
    """Whether this sitting of the run executes a script, and no worker of it has joined."""
    joined = script = False
    for event in folder.read_events():
        if isinstance(event, RunStarted):
            script, joined = event.command == "run", False
        joined = joined or isinstance(event, WorkerStarted)
    return script and not joined


def script_activities(folder: RunFolder, joined: Collection[int] = ()) -> list[WorkerActivity]:
    """What each process of the script is doing. `joined`: workers that answer for themselves."""
    found = newest_scripts(folder.read_events())
    return [_activity(found[rank]) for rank in sorted(found) if rank not in joined and _is_alive(found[rank])]


def driverless_activities(folder: RunFolder) -> list[WorkerActivity]:
    """What the processes of a run without a driver show, which torchrun or plain `python` has started on this host."""
    known, now = folder.read_events(), time.time()
    newest = {event.rank: event for event in known if isinstance(event, WorkerStarted)}
    paused = {event.pid: now - event.time for event in known if isinstance(event, ProcessPaused)}
    here = [each for each in newest.values() if each.host == os.uname().nodename and lives_since(each.pid, each.time)]
    return [
        WorkerActivity(
            worker=event.rank,
            host=event.host,
            pid=event.pid,
            state=STOPPED if current_state(event.pid) in STOPPED_STATES else RUNNING,
            since=now - event.time,
            step=-1,
            phase=NO_DRIVER,
            silent_seconds=paused.get(event.pid, 0.0),
        )
        for event in sorted(here, key=lambda each: each.rank)
    ]


def _activity(event: ScriptStarted) -> WorkerActivity:
    state = process_state(event.pid, event.began)
    line, stack = "", list[str]()
    if state is not None and state != "T" and event.stack_file >= 0:
        line, stack = ask_stack(event.pid, event.stack_file, ANSWER_SECONDS)
    return WorkerActivity(
        worker=event.rank,
        incarnation=event.incarnation,
        host=event.host,
        pid=event.pid,
        state=GONE if state is None else STOPPED if state == "T" else RUNNING,
        since=time.time() - event.time,
        step=-1,
        phase=IN_SCRIPT,
        user_line=line,
        stack=stack,
    )


def _is_alive(event: ScriptStarted) -> bool:
    return process_state(event.pid, event.began) is not None


def refuse_attaching_script(folder: RunFolder) -> None:
    """Raises InputError for a run that a driver cannot take over, since no worker of it joined."""
    if not never_joined(folder) or folder.report.exists():
        return
    driver = _driver(folder)
    if driver is not None:
        fix = f"shoal why {folder.path} shows its lines, shoal stop {folder.path} ends it"
        raise InputError(f"{PLAIN}, and process {driver.pid} on {driver.name} watches over it already", fix=fix)
    _end_leftovers(folder)
    raise InputError(
        f"{PLAIN}: its workers ended with their driver, so nothing is left to take over", fix="run it again"
    )


def stop_script(folder: RunFolder) -> None:
    """Ends the workers as SIGTERM to the driver does, and returns when they are gone."""
    driver = _driver(folder)
    if driver is None:
        _end_leftovers(folder)
        raise InputError(f"no worker of run {folder.id} is alive", fix="it was a plain script: run it again")
    if driver.host != host_identity():
        raise InputError(f"the driver of run {folder.id} is on {driver.name}", fix=f"there: kill {driver.pid}")
    os.kill(driver.pid, signal.SIGTERM)
    if driver.stopped:
        os.kill(driver.pid, signal.SIGCONT)  # else it would never hear of the other
    deadline = time.monotonic() + STOP_SECONDS
    while process_state(driver.pid, driver.began) is not None and not folder.report.exists():
        if time.monotonic() > deadline:
            waited = f"waited {STOP_SECONDS:g} s for run {folder.id} to stop"
            raise RunError(waited, fix=f"kill -KILL {driver.pid}: its workers end with it")
        time.sleep(TICK_SECONDS)


def _driver(folder: RunFolder) -> DriverRecord | None:
    with suppress(StoreUnavailable), command_store(folder) as store:
        return living_driver(store)
    return None


def _end_leftovers(folder: RunFolder) -> None:
    """Removes what a killed driver left: the store that no worker of a plain script uses, and the sitting's files."""
    if any(_is_alive(event) for event in newest_scripts(folder.read_events()).values()):
        return  # they end within seconds, and the process that ends them removes its socket
    if read_driver_state(folder).config.failure.store is None:
        with suppress(ShoalError, OSError):
            sqlite_client.stop_server(folder.path)
    for name in SITTING_FILES:
        (folder.path / name).unlink(missing_ok=True)
