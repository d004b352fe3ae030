"""The context of a worker process: its rank, configuration, plan, stores, and its channel to the driver.

The driver makes it for workers that it starts; a script started by torchrun or plain `python` makes its own
(worker/own_context.py).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.collectives.rendezvous_store import RendezvousStore
from shoal.errors import InputError
from shoal.parallel.plan import Plan
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.store import RunStore as Records
from shoal.transport.credentials import credentials_from_environment
from shoal.worker.elastic_membership import ElasticMembership
from shoal.worker.event_channel import EventChannel
from shoal.worker.membership import FixedMembership, RunMembership
from shoal.worker.rendezvous import RENDEZVOUS_VARIABLE
from shoal.worker.run_config import RunConfig
from shoal.worker.torchrun_store import torchrun_store


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    rank: int = 0  # the worker's number
    size: int = 1
    incarnation: int = 0  # how many earlier processes had this rank
    folder: Path | None = None
    config: RunConfig = field(default_factory=RunConfig)
    resumed: bool = False  # the run goes on from a checkpoint
    committed_before: int = 0  # steps that are known to have been committed before this sitting
    plan: Plan | None = None
    channel: EventChannel = field(default_factory=lambda: EventChannel(None))
    open_torch_store: Callable[[], Store] | None = None  # torch's store, for a group that never changes
    open_run_store: Callable[[], Records] | None = None  # the run's store, for elastic membership
    should_leave: Callable[[], bool] = lambda: False
    before_join: Callable[[], None] = lambda: None  # a script calls it before it enters the run
    restart_store: Callable[[], None] | None = None
    servers: tuple[str, ...] = ()  # addresses of parameter servers

    def membership(self) -> RunMembership:
        """The members of the run. A script that has made torch's default group itself has a fixed membership."""
        if self.open_run_store is None or self.folder is None or dist.is_initialized():
            return FixedMembership(self.group(), self.channel.should_stop)
        return ElasticMembership(
            WorkerId(self.rank, self.incarnation),
            open_store=self.open_run_store,
            folder=self.folder,
            lease_seconds=self.config.failure.lease,
            timeout=timedelta(seconds=self.config.communication.timeout),
            options=self.config.comm_options,
            emit=self.channel.emit,
            should_stop=self.channel.should_stop,
            should_leave=self.should_leave,
            restart_store=self.restart_store,
            model_shards=1 if self.plan is None else self.plan.layout.shards,
        )

    def group(self) -> WorkerGroup:
        timeout, options = timedelta(seconds=self.config.communication.timeout), self.config.comm_options
        if self.size == 1:
            return SoloGroup(options)
        if self.open_torch_store is None:
            raise InputError(f"worker {self.rank} of {self.size} has no store to find the other workers")
        store = self.open_torch_store()
        return DistributedGroup(store, rank=self.rank, size=self.size, timeout=timeout, options=options)


_installed: WorkerContext | None = None  # set once, by the driver, in a worker process
_trained = False  # this process has called shoal.train


def install_context(context: WorkerContext) -> None:
    global _installed, _trained
    _installed, _trained = context, False


def note_training() -> None:
    """This process trains a job with `shoal.train`."""
    global _trained
    _trained = True


def trained_in_script() -> bool:
    return _trained


def installed_context() -> WorkerContext | None:
    """None: no driver has started this process."""
    return _installed


def rendezvous_store() -> Store:
    """The store of the driver that has started this process."""
    address = os.environ.get(RENDEZVOUS_VARIABLE)
    if address is None:
        return torchrun_store()
    return RendezvousStore(address, credentials=credentials_from_environment() if address.startswith("tcp:") else None)
