"""The context of a script: the one that its driver installed; else torchrun's environment, or a process alone.

Without a driver the first rank opens the run's folder and writes the record (worker/own_record.py). Under torchrun
that is a fresh folder in `runs` unless `run_dir` names one; alone with plain `python`, only what `run_dir` names.
"""

import os
import sys
from functools import cache
from pathlib import Path

from torch._C._distributed_c10d import Store

from shoal.collectives.options import options_from_environment
from shoal.errors import InputError, RunError, RunFolderError
from shoal.report.event_queries import committed_floor
from shoal.report.events import RunResumed, RunStarted
from shoal.report.live_view import event_line
from shoal.report.run_folder import FORMAT, RunFolder
from shoal.worker.context import WorkerContext, installed_context
from shoal.worker.event_channel import EventChannel
from shoal.worker.own_record import OwnRecord, RecordChannel, StoreChannel, StoreMailbox
from shoal.worker.rank_watch import RankWatch
from shoal.worker.run_config import RunConfig
from shoal.worker.stop_notice import StopNotice
from shoal.worker.torchrun_store import rank_and_size, torchrun_store

HELD = ("checkpoints", "events.jsonl", "report.json")  # what a folder has that already holds a run


def current_context(folder: Path | None = None, resume: bool = False) -> WorkerContext:
    found = installed_context()
    if found is not None:
        return found
    if resume and folder is None:
        raise InputError("resume=True without run_dir: it is not known which run goes on", fix='run_dir="runs/…"')
    config = RunConfig().with_comm_options(options_from_environment())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _launched(folder, resume, config)
    if folder is None:
        return WorkerContext(config=config)
    opened = _open_folder(folder, resume)
    before, goes_on = committed_floor(opened.read_events()), resume and not opened.never_saved
    channel = RecordChannel(_open_record(opened, config, 1, None), lambda: False, shows_report=False)
    if resume and not goes_on:
        _begin_again(channel, before)
    return WorkerContext(folder=folder, config=config, resumed=goes_on, committed_before=before, channel=channel)


def _launched(folder: Path | None, resume: bool, config: RunConfig) -> WorkerContext:
    """One of the ranks that torchrun has started. SIGTERM and Ctrl-C, which torchrun passes on, stop the run after its
    step, with a checkpoint."""
    open_store = cache(torchrun_store)
    rank, size = rank_and_size()
    if size > 1:
        open_store()  # before anything is written; SIGTERM and Ctrl-C end a rank that waits for others here
    notice = StopNotice()
    notice.install(interrupts=True)
    prefix = f"shoal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    opened, before = None, 0
    goes_on = resume
    if rank == 0:
        opened = _open_folder(folder, resume)
        folder, before = opened.path, committed_floor(opened.read_events())
        goes_on = resume and not opened.never_saved
    if size > 1:
        own = None if opened is None else (opened.path, goes_on)
        folder, goes_on = _agree_on_folder(open_store(), f"{prefix}/folder", own)
    mailbox = StoreMailbox(_second_connection(open_store()), f"{prefix}/events") if size > 1 else None
    channel: EventChannel
    if opened is not None:
        channel = RecordChannel(_open_record(opened, config, size, mailbox), notice.claim, shows_report=True)
        if resume and not goes_on:
            _begin_again(channel, before)
    else:
        assert mailbox is not None
        channel = StoreChannel(rank, mailbox, notice.claim)
    if size > 1:
        watch = RankWatch(rank, size, _second_connection(open_store()), prefix, channel.emit)
        watch.start()
        channel.before_close = watch.close
    return WorkerContext(
        rank=rank,
        size=size,
        folder=folder,
        config=config,
        resumed=goes_on,
        committed_before=before,
        channel=channel,
        open_torch_store=open_store,
    )


def _agree_on_folder(store: Store, key: str, own: tuple[Path, bool] | None) -> tuple[Path, bool]:
    """The folder that the first rank has opened, and whether the run goes on from a checkpoint there, on every rank."""
    if own is not None:
        store.set(key, f"{own[1]:d}{own[0].resolve()}")
        return own
    try:
        found = bytes(store.get(key)).decode()
    except RuntimeError as error:
        raise RunError(
            f"rank 0 has not said where the run's folder is: {str(error).splitlines()[0]}",
            fix="what rank 0 has printed says why it ended",
        ) from None
    return Path(found[1:]), found[0] == "1"


def _begin_again(channel: EventChannel, committed: int) -> None:
    """The run to go on with ended before its first checkpoint."""
    event = RunResumed(step=0, path="", repeated=committed)
    channel.emit(event)
    print(event_line(event, routine=False), file=sys.stderr)


def _second_connection(store: Store) -> Store:
    """The same store, for events: the group's own connection may be waiting for other ranks."""
    clone = getattr(store, "clone", None)  # torch's stubs do not have it
    found: Store = store if clone is None else clone()
    return found


def _open_record(folder: RunFolder, config: RunConfig, size: int, mailbox: StoreMailbox | None) -> OwnRecord:
    script, *arguments = sys.argv or [""]
    described = {"script": script, "arguments": arguments, "workers": size}
    folder.write_json(folder.config, {"format": FORMAT, **described, "run_config": config})
    started = RunStarted.of_script(folder.id, script or "python", arguments, workers=size, exact=config.exact)
    return OwnRecord(folder, started, mailbox)


def _open_folder(folder: Path | None, resume: bool) -> RunFolder:
    """Opens or creates the run's folder, as the driver does for its workers."""
    if resume and folder is not None:
        return RunFolder.open(folder)
    if folder is not None and any((folder / name).exists() for name in HELD):
        raise RunFolderError(f"{folder} already holds a run", fix="resume=True to go on with it, or another run_dir")
    return RunFolder.create(folder)
