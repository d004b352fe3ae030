"""Commands to a run that goes on, from any process: stop, scale, what its workers are doing, take over."""

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from shoal.driver.activities import run_activities
from shoal.driver.command_store import command_store
from shoal.driver.driver_claim import living_driver, refuse_second_driver
from shoal.driver.failure_policy import worker_count_error
from shoal.driver.launch import driver_class
from shoal.driver.launch_spec import DRIVER_PROCESS, DRIVER_STATE, DriverState, LaunchSpec, read_driver_state
from shoal.driver.launchers.base import LocalHost
from shoal.driver.launchers.local import LocalLauncher
from shoal.driver.script_control import (
    driverless_activities,
    never_joined,
    refuse_attaching_script,
    script_activities,
    stop_script,
)
from shoal.driver.store_monitor import StoreMonitor, living_workers
from shoal.errors import InputError, RunError, RunFolderError
from shoal.parallel.layout import ParallelLayout
from shoal.recovery.membership.decode_records import readable_since
from shoal.recovery.membership.heartbeat import MembershipState, RunRequest, store_key
from shoal.recovery.membership.process import STOPPED_STATES, current_state, process_state
from shoal.recovery.membership.store import RunStore, StoreSnapshot, StoreUnavailable
from shoal.report.event_queries import committed_floor
from shoal.report.events import ProcessPaused, WorkerStarted
from shoal.report.run_folder import RunFolder
from shoal.report.stacks import WorkerActivity
from shoal.report.wording import paused_text
from shoal.transport.decoding import decode_json
from shoal.worker.context import WorkerContext

ANSWER_SECONDS = 1.5  # in which a worker answers what it is doing
CHANGE_SECONDS = 60.0  # to wait for a change of the workers
TICK_SECONDS = 0.1


def attach(folder: RunFolder, *, quiet: bool = False, plain: bool = False) -> dict[str, Any]:
    """Takes over a run whose driver is gone, and returns its report when it has ended."""
    if server_driver_pid(folder) is not None:
        raise _served_error(folder, "its driver cannot be replaced")
    refuse_attaching_script(folder)
    state = read_driver_state(folder)
    _refuse_ended(folder, state)
    if not state.config.failure.detached and state.driver is not None:
        raise refuse_second_driver(state.driver, folder.path, outlives_it=False)
    config = state.config.changed(quiet=quiet, plain=plain, tensorboard=False, log="", detached=True)
    with folder:
        monitor = StoreMonitor(folder.path, folder.id, config.failure.store, LocalHost())
        monitor.claim()
        launcher, alive = LocalLauncher(), False
        try:
            launcher, alive = LocalLauncher.attach(folder.path), True
        except OSError:
            pass  # it is gone
        except RunError:
            monitor.close(stop=False)
            raise
        try:
            monitor.take_over(launcher_alive=alive)
        except BaseException:
            if alive:
                launcher.hang_up()
            raise
        launch = LaunchSpec(
            work=_no_work,
            started=state.started,
            launcher=launcher,
            threads=state.threads,
            target=state.target,
            resumed=state.resumed,
        )
        return driver_class(launch.servers)(launch, folder, config).take_over(monitor, alive)


def _no_work(context: WorkerContext) -> None:
    raise RunError("workers are started by the server of the first driver")


def stop(folder: RunFolder) -> int:
    """Asks the workers to finish their step, save and stop. Returns the last step that is known to be committed."""
    if (driver := server_driver_pid(folder)) is not None:
        return _stop_server_run(folder, driver)
    if never_joined(folder):
        stop_script(folder)
        return 0
    _refuse_ended(folder, read_driver_state(folder))
    with command_store(folder) as store:
        state = _running(folder, store)
        store.put("request", msgspec.json.encode(msgspec.structs.replace(state.request, stop=True)))
        state = _wait_until(store, lambda state: not living_workers(state), "the workers to stop")
        # Workers write that number to the store now and then, and save the step with which they stop.
        return max([committed_floor(folder.read_events(), state.committed), *folder.saved_steps()])


def scale(folder: RunFolder, workers: int) -> list[int]:
    """Changes the number of workers from the next step on. Returns the numbers of those that take part then."""
    driver = None if server_driver_pid(folder) is not None else read_driver_state(folder)
    if driver is None or driver.started.servers:
        raise _served_error(folder, "it has as many workers as it began with")
    layout = ParallelLayout.parse(driver.started.layout)
    refused = worker_count_error(workers, driver.config.failure, driver.started.lanes, layout.shards, layout.zero > 0)
    if refused is not None:
        raise refused
    _refuse_ended(folder, driver)
    with command_store(folder) as store:
        state = _running(folder, store)
        if workers > len(state.view.members) and living_driver(store) is None:
            raise RunError(
                f"the run's driver is gone, so no worker can be started: the run has {len(state.view.members)} now",
                fix=f"shoal attach {shlex.quote(str(folder.path))} takes its place; then scale",
            )
        store.put("request", msgspec.json.encode(RunRequest(stop=state.request.stop, workers=workers)))
        state = _wait_until(store, lambda state: len(state.view.members) == workers, f"{workers} workers to take part")
        return [who.worker for who in state.view.members]


def why(folder: RunFolder) -> list[WorkerActivity]:
    """What every worker of a run is doing. Of a worker that does not answer: what its process shows."""
    if server_driver_pid(folder) is not None:
        newest = {event.rank: event for event in folder.read_events() if isinstance(event, WorkerStarted)}
        plain = script_activities(folder)
        return plain or [_activity_of(event, "works with parameter servers") for event in newest.values()]
    if never_joined(folder) and (plain := script_activities(folder)):
        return plain
    if not (folder.path / DRIVER_STATE).exists() and (own := driverless_activities(folder)):
        return own
    _refuse_ended(folder, read_driver_state(folder))
    try:
        with command_store(folder) as store:
            state = _running(folder, store)
            asked = store.put("why", str(time.time()).encode())
            answers = _answers(store, {store_key(who) for who in state.alive}, asked)
            found = run_activities(state, answers, ANSWER_SECONDS)
            return [*found, *script_activities(folder, joined={who.worker for who in state.alive})]
    except StoreUnavailable:
        newest = {event.rank: event for event in folder.read_events() if isinstance(event, WorkerStarted)}
        return [_activity_of(event) for event in newest.values()]


def why_notes(folder: RunFolder) -> list[str]:
    """Processes beside the workers that are stopped: the driver, and the one that starts workers."""
    notes = []
    paused = {event.rank: event for event in folder.read_events() if isinstance(event, ProcessPaused)}
    starter = paused.get(None)
    if starter is not None and starter.seconds is None and current_state(starter.pid) in STOPPED_STATES:
        notes.append(paused_text(starter))
    with suppress(StoreUnavailable, InputError, RunFolderError), command_store(folder) as store:
        driver = living_driver(store)
        if driver is not None and driver.stopped:
            costs = "workers go on, and nothing is shown or replaced meanwhile"
            notes.append(f"the driver ({driver}) is stopped: {costs}; kill -CONT {driver.pid} continues it")
    return notes


def _refuse_ended(folder: RunFolder, state: DriverState) -> None:
    """Raises InputError for a run that ends with its driver, as in a lab, where that is gone."""
    if state.config.failure.detached or state.driver is None or not state.driver.gone:
        return
    raise InputError(
        f"no worker of run {folder.id} is alive: the run ended with its driver, {state.driver.process}",
        fix=f"--resume {shlex.quote(str(folder.path))} goes on with it",
    )


def _running(folder: RunFolder, store: RunStore) -> MembershipState:
    state = MembershipState(store.read(""))
    if not living_workers(state):
        fix = f"--resume {shlex.quote(str(folder.path))} goes on with it, if it was not done"
        raise InputError(f"no worker of run {folder.id} is alive", fix=fix)
    return state


def _wait_until(store: RunStore, done: Callable[[MembershipState], bool], what: str) -> MembershipState:
    deadline = time.monotonic() + CHANGE_SECONDS
    state = MembershipState(store.read(""))
    while not done(state):
        if time.monotonic() > deadline:
            raise RunError(f"waited {CHANGE_SECONDS:g} s for {what}", fix="shoal why says what the run is doing")
        with suppress(StoreUnavailable):
            store.wait("", state.revision, TICK_SECONDS)
            state = MembershipState(store.read(""))
    return state


def _answers(store: RunStore, expected: set[str], asked: int) -> dict[str, WorkerActivity]:
    deadline = time.monotonic() + ANSWER_SECONDS
    found: dict[str, WorkerActivity] = {}
    while expected - found.keys() and (left := deadline - time.monotonic()) > 0:
        reading: StoreSnapshot = store.read("where/")
        answers = readable_since(asked, reading.entries, WorkerActivity)
        found = {key.removeprefix("where/"): answer for key, answer in answers.items()}
        if expected - found.keys():
            store.wait("where/", reading.revision, min(left, TICK_SECONDS))
    return found


def _activity_of(event: WorkerStarted, phase: str = "the store is away") -> WorkerActivity:
    return WorkerActivity(
        worker=event.rank, incarnation=event.incarnation, host=event.host, pid=event.pid, state="silent", phase=phase
    )


# -- scripts with parameter servers, whose runs have no store ---------------------------------------------------------


class DriverProcess(msgspec.Struct, frozen=True):
    """The content of the file in which such a run's driver says which process it is."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 22)]  # the kernel has no larger ones
    began: str


def server_driver_pid(folder: RunFolder) -> int | None:
    """The driver's process id of a script's run with parameter servers; None: it is another run, or is over."""
    with suppress(OSError, msgspec.MsgspecError):
        found = decode_json((folder.path / DRIVER_PROCESS).read_bytes(), DriverProcess)
        if process_state(found.pid, found.began) is not None:
            return found.pid
    return None


def _served_error(folder: RunFolder, why_not: str) -> InputError:
    path = shlex.quote(str(folder.path))
    fix = f"shoal stop {path}, then --resume {path} with other --workers or --servers"
    return InputError(f"run {folder.id} has parameter servers: {why_not}", fix=fix)


def _stop_server_run(folder: RunFolder, pid: int) -> int:
    """Stops the run as Ctrl-C does."""
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + CHANGE_SECONDS
    while server_driver_pid(folder) is not None:
        if time.monotonic() > deadline:
            waited = f"waited {CHANGE_SECONDS:g} s for run {folder.id} to stop"
            raise RunError(waited, fix=f"kill {pid}: its driver ends at once")
        time.sleep(TICK_SECONDS)
    return committed_floor(folder.read_events())
