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
from shoal.errors import InputError, RunFolderError
from shoal.report.event_queries import committed_floor
from shoal.report.events import RunStarted
from shoal.report.run_folder import FORMAT, RunFolder
from shoal.worker.context import WorkerContext, installed_context, torchrun_store
from shoal.worker.event_channel import EventChannel
from shoal.worker.own_record import OwnRecord, RecordChannel, StoreChannel, StoreMailbox
from shoal.worker.rank_watch import RankWatch
from shoal.worker.run_config import RunConfig
from shoal.worker.stop_notice import StopNotice

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
    before = committed_floor(opened.read_events())
    channel = RecordChannel(_open_record(opened, config, 1, None), lambda: False, shows_report=False)
    return WorkerContext(folder=folder, config=config, resumed=resume, committed_before=before, channel=channel)


def _launched(folder: Path | None, resume: bool, config: RunConfig) -> WorkerContext:
    """One of the ranks that torchrun has started. SIGTERM and Ctrl-C, which torchrun passes on, stop the run after its
    step, with a checkpoint."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    open_store = cache(torchrun_store)
    notice = StopNotice()
    notice.install(interrupts=True)
    prefix = f"shoal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    opened, before = None, 0
    if rank == 0:
        opened = _open_folder(folder, resume)
        folder, before = opened.path, committed_floor(opened.read_events())
    if size > 1:
        folder = _agree_on_folder(open_store(), f"{prefix}/folder", None if opened is None else opened.path)
    mailbox = StoreMailbox(_second_connection(open_store()), f"{prefix}/events") if size > 1 else None
    channel: EventChannel
    if opened is not None:
        channel = RecordChannel(_open_record(opened, config, size, mailbox), notice.claim, shows_report=True)
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
        resumed=resume,
        committed_before=before,
        channel=channel,
        open_torch_store=open_store,
    )


def _agree_on_folder(store: Store, key: str, own: Path | None) -> Path:
    """The folder that the first rank has opened, on every rank."""
    if own is not None:
        store.set(key, str(own.resolve()))
        return own
    return Path(bytes(store.get(key)).decode())


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
