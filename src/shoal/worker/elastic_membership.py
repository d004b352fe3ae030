"""The workers of a run, and this one's part among them: enters, recovers, lets others in, leaves.

What to do is decided by membership/protocol.py from what the store holds; here it is done. A step that fails is the
run's business (run.py): it asks `recover` for a group that stands, and learns whether to do the step again.

    Crew     workers come and go; they meet at the store
    Fixed    as many as there were at the start (torchrun, a process alone): a loss ends the run
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import TCPStore

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.collectives.handshake import abort_wait_if, host_identity
from shoal.collectives.options import CommOptions as Travelling
from shoal.errors import PeerLost, RunError
from shoal.numerics.user_frames import user_stack
from shoal.recovery.membership.heartbeat import Heartbeat, MembershipState, RunRequest, WorkerProcess, store_key
from shoal.recovery.membership.process import kill_process, start_ticks
from shoal.recovery.membership.protocol import (
    BoundaryChange,
    FormGroup,
    LeaveRun,
    MembershipObservation,
    MembershipView,
    MemberState,
    PostPosition,
    ProposeView,
    RecoveryPlan,
    WaitForStore,
    WorkerId,
    covers_model,
    may_join,
    model_shard_of,
    newcomers,
)
from shoal.recovery.membership.store import LeaseEnded, RunStore, StoreUnavailable
from shoal.report.events import Event, StoreOutage
from shoal.report.stacks import WorkerActivity
from shoal.worker.membership import ModelShardLost, RunAbandoned, RunCompleted, WorkerEvicted
from shoal.worker.requests import CHANGE, LEAVE, STOP

LOG_ONLY = "· "  # begins a line of a log that the driver does not show
POLL_SECONDS = 0.05  # between two looks at what the store does not tell: whether processes of this host live
STORE_RETRY_SECONDS = 0.2  # between two tries to reach it
FORMING_SECONDS = 5.0  # for all members to make their group; twice as long after each failure
STORE_RESTART_SECONDS = 2.0  # that the store is away before a worker starts it again
LEAVING_SECONDS = 5.0  # for the others to see that a worker has left


class ElasticMembership:
    elastic = True

    def __init__(
        self,
        worker_id: WorkerId,
        *,
        model_shards: int = 1,
        open_store: Callable[[], RunStore],
        lease_seconds: float,
        timeout: timedelta,
        options: Travelling,
        emit: Callable[[Event], None],
        should_stop: Callable[[], bool],
        should_leave: Callable[[], bool],
        restart_store: Callable[[], None] | None = None,
    ) -> None:
        """`parts`: that the model is cut into; this worker has one of them. `revive_store`: starts the run's own store
        again. The driver does that, unless it is gone, too."""
        self.worker_id, self.model_shards, self.timeout, self.options = worker_id, model_shards, timeout, options
        self.member = MemberState(worker_id=worker_id, model_shards=model_shards)
        self.view = MembershipView(generation=0, members=(worker_id,))
        self.group: WorkerGroup = SoloGroup(options)
        self.phase = "enters the run"  # for whoever asks what this worker is doing
        self.waiting_for: list[int] = []
        self.phase_since = time.monotonic()
        self._emit, self._should_stop, self._should_leave = emit, should_stop, should_leave
        self._watched: tuple[int, tuple[WorkerId, ...], WorkerGroup] | None = (
            None  # epoch, members, group: what the beat watches
        )
        self._rendezvous: TCPStore | None = None
        self._failed_attempts = 0
        self._waiting_since = (0, 0.0)  # an epoch, and since when its members are waited for
        self._records: dict[str, tuple[str, int]] = {}  # kind of record -> its key and revision
        self._stacks_answered = 0
        self._thread = threading.get_ident()
        self._newcomers: list[WorkerId] = []
        self._departed: set[WorkerId] = set()  # left as they should: they end by themselves
        alive = WorkerProcess(
            worker_id=worker_id,
            pid=os.getpid(),
            started=start_ticks(os.getpid()) or "",
            host=host_identity(),
            host_name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
        )
        self._store = open_store()
        self._restart_store = restart_store
        self._heartbeat = Heartbeat(
            open_store(),
            alive,
            lease_seconds=lease_seconds,
            on_state=self._on_state,
            on_away=self._on_store_away,
            on_retry=self._on_store_retry,
        )

    @property
    def generation(self) -> int:
        return self.member.generation

    # -- the step -----------------------------------------------------------------------------------------------------

    def vote(self) -> None:
        self.member.vote()

    def commit(self) -> None:
        self.member.commit()
        if self.view.members[0] == self.worker_id:
            self._heartbeat.committed = self.member.committed

    def drop(self) -> None:
        self.member.drop()

    def set_busy(self, busy: bool) -> None:
        self.member.can_donate = not busy

    def start_at(self, step: int) -> None:
        self.member.start_at(step)

    def state_received(self, recovery: RecoveryPlan) -> None:
        self.member.group_formed(recovery)

    def requests(self) -> int:
        wish = self._heartbeat.state.request
        asked = STOP if wish.stop or self._should_stop() else 0
        scaled = wish.workers is not None and self._replica_rank() >= wish.workers // self.model_shards
        if scaled or self._should_leave():
            asked |= LEAVE
        # What the beat has seen may be older than the group.
        return asked | CHANGE if any(who not in self.view.members for who in self._newcomers) else asked

    def _replica_rank(self) -> int:
        """This worker's rank among the members that have the same part."""
        part = model_shard_of(self.worker_id.worker, self.model_shards)
        return [who for who in self.view.members if model_shard_of(who.worker, self.model_shards) == part].index(
            self.worker_id
        )

    def known_committed(self) -> int:
        with suppress(StoreUnavailable):
            return self._read_state().committed
        return self._heartbeat.state.committed

    # -- membership ---------------------------------------------------------------------------------------------------

    def enter(self) -> RecoveryPlan:
        """From here on the others count on this worker: it should be ready to take part."""
        self._thread = threading.get_ident()
        self._heartbeat.start()
        return self._run_protocol(None)

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        with abort_wait_if(lambda: self._obsolete_reason(self.view)):
            return self.group.subgroup(ranks)

    def recover(self, error: PeerLost) -> RecoveryPlan:
        self.member.group_failed()
        self._watched = None
        _log(error.message)
        self.group.abandon(error.message)  # whoever still waits for this worker is told
        return self._run_protocol(None)

    def change_members(self, leaving: Sequence[int]) -> RecoveryPlan:
        gone = [self.view.members[rank] for rank in leaving]
        self._departed.update(gone)
        return self._run_protocol(BoundaryChange(leaving=gone))

    def leave(self) -> None:
        self._watched = None
        until = time.monotonic() + LEAVING_SECONDS
        with suppress(StoreUnavailable):
            while time.monotonic() < until:
                news = self._read_state()
                if self.worker_id not in news.view.members or len(news.view.members) == 1:
                    break
                self._store.wait("view", news.revision, POLL_SECONDS)

    def fail_run(self, reason: str) -> None:
        with suppress(StoreUnavailable):
            self._store.put("wish", msgspec.json.encode(RunRequest(stop=True, failed=reason)))

    def stop_watching(self) -> None:
        self._watched = None

    def finish_run(self) -> None:
        with suppress(StoreUnavailable):
            self._store.put("wish", msgspec.json.encode(RunRequest(done=True)))

    def close(self) -> None:
        self._watched = None
        lease = self._heartbeat.close()
        if lease is not None:
            with suppress(StoreUnavailable):
                self._store.revoke(lease)
        self._store.close()

    def _run_protocol(self, change: BoundaryChange | None) -> RecoveryPlan:
        """Does what the protocol says until a group stands."""
        told = False
        while True:
            try:
                news = self._read_state()
                if news.request.failed:
                    raise RunAbandoned(f"the run ends: {news.request.failed}")
                if self.member.committed < 0 and self._is_waiting(news.view) and self._is_unneeded(news):
                    raise WorkerEvicted(f"{self.worker_id} was asked to stop before it took part")
                if self.member.committed >= 0 and self.worker_id in news.view.members and news.request.done:
                    raise RunCompleted("the run is done")
                late = self._late_members(news)
                gone = self._gone(news) | late
                action = self.member.decide(self._observe(news, late), gone, change)
                match action:
                    case ProposeView(view):
                        value = msgspec.json.encode(view)
                        self._set_phase(f"proposes epoch {view.generation}: {view.reason}")
                        self._store.swap("view", value, news.view_revision)
                    case PostPosition(epoch, position):
                        self._put_record(f"position/{epoch}/{store_key(self.worker_id)}", msgspec.json.encode(position))
                    case WaitForStore():
                        self._report_waiting(news)
                        self._store.wait("", news.revision, POLL_SECONDS)
                    case LeaveRun(view, lost) if lost:
                        error = ModelShardLost(self._loss_reason(view, lost))
                        error.present = view.members
                        raise error
                    case LeaveRun(view):
                        raise WorkerEvicted(
                            f"the others went on without {self.worker_id}: epoch {view.generation}, {view.reason}"
                        )
                    case FormGroup(settlement):
                        if self._form(settlement, news):
                            return settlement
            except LeaseEnded:
                time.sleep(POLL_SECONDS)  # the beat gets another one
            except StoreUnavailable as error:
                if not told:
                    told = True
                    _log(error.message)
                self._set_phase("waits for the store")
                time.sleep(STORE_RETRY_SECONDS)

    def _form(self, recovery: RecoveryPlan, state: MembershipState) -> bool:
        view = recovery.view
        self._set_phase(f"forms the group of epoch {view.generation}")
        self.member.group_forming(recovery)
        self._kill_evicted(view)
        self._leave_group()
        try:
            self.group = self._make_group(view)
        except RunError as error:
            _log(f"epoch {view.generation}: {error.message}")
            self._failed_attempts += 1
            self.member.group_failed()
            return False
        self.view, self._failed_attempts = view, 0
        self._watched = (view.generation, view.members, self.group)
        if self.worker_id not in recovery.behind:
            self.member.group_formed(recovery)
        self._set_phase("works")
        return True

    def _make_group(self, view: MembershipView) -> WorkerGroup:
        rank, size = view.rank(self.worker_id), len(view.members)
        if size == 1:
            return SoloGroup(self.options)
        forming = timedelta(seconds=min(FORMING_SECONDS * 2**self._failed_attempts, self.timeout.total_seconds()))
        if rank == 0:
            store = self._open_rendezvous(view)
        else:
            host, _, port = self._await_rendezvous(view, forming).rpartition(":")
            try:
                store = TCPStore(host, int(port), is_master=False, timeout=forming)
            except RuntimeError as error:
                raise PeerLost(f"{view.members[0]} is not at {host}: {str(error).splitlines()[0]}") from None
        store.set_timeout(forming)
        with abort_wait_if(lambda: self._obsolete_reason(view)):
            return DistributedGroup(
                store, rank=rank, size=size, timeout=self.timeout, options=self.options, form_timeout=forming
            )

    def _obsolete_reason(self, view: MembershipView) -> str:
        """Why the group of this view need not be made any more."""
        news = self._heartbeat.state
        if news.view.generation > view.generation:
            return f"epoch {news.view.generation} has begun: {news.view.reason}"
        gone = self._heartbeat.gone(news)
        return "; ".join(f"{who} {gone[who]}" for who in view.members if who in gone)

    def _open_rendezvous(self, view: MembershipView) -> TCPStore:
        """Torch's own store, where the members of one epoch exchange what their connections need."""
        address = os.environ.get("SHOAL_ADDRESS", "127.0.0.1")
        listener = socket.create_server((address, 0), backlog=128)
        port = listener.getsockname()[1]
        self._rendezvous = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._put_record(f"meeting/{view.generation}", f"{address}:{port}".encode())
        return self._rendezvous

    def _put_record(self, key: str, value: bytes) -> None:
        """A record of one epoch; the one of the epoch before goes."""
        revision = self._store.put(key, value, self._heartbeat.lease)
        kind = key.split("/")[0]
        before, self._records[kind] = self._records.get(kind), (key, revision)
        if before is not None and before[0] != key:
            self._store.swap(before[0], None, before[1])

    def _await_rendezvous(self, view: MembershipView, limit: timedelta) -> str:
        until = time.monotonic() + limit.total_seconds()
        while True:
            news = self._read_state()
            if news.view.generation != view.generation:
                raise PeerLost(f"epoch {view.generation} is over: {news.view.reason}")
            if news.rendezvous is not None:
                return news.rendezvous
            gone = self._gone(news)
            lost = [f"{who} {gone[who]}" for who in view.members if who in gone]
            if lost or time.monotonic() > until:
                raise PeerLost("; ".join(lost) or f"{view.members[0]} did not say where to meet")
            self._store.wait("", news.revision, POLL_SECONDS)

    def _kill_evicted(self, view: MembershipView) -> None:
        """A stopped process that wakes up would still write into memory it shared with others: it is ended first."""
        if view.boundary:
            return
        for who, alive in self._heartbeat.known().items():
            evicted = who not in view.members and not may_join(view, who) and who not in self._departed
            if evicted and alive.host == self._heartbeat.process.host and alive.pid != os.getpid():
                kill_process(alive.pid, alive.started)

    def _leave_group(self) -> None:
        self._watched = None
        group, self.group = self.group, SoloGroup(self.options)
        with suppress(RuntimeError, RunError):
            group.close()
        self._rendezvous = None

    def _read_state(self) -> MembershipState:
        return MembershipState(self._store.read(""))

    def _gone(self, state: MembershipState) -> dict[WorkerId, str]:
        found = self._heartbeat.gone(state)
        if self.view.generation == state.view.generation:
            for rank in self.group.ended_ranks():
                who = self.view.members[rank]
                found.setdefault(who, "died: its connection was closed")
        return found

    def _observe(self, state: MembershipState, late: Collection[WorkerId]) -> MembershipObservation:
        """Where a model is cut, those who have some of the state drop a late member as one whose lease has run out."""
        seen = state.observation()
        if self.model_shards == 1 or self.member.committed < 0 or not late:
            return seen
        return replace(seen, alive=[who for who in seen.alive if who not in late])

    def _loss_reason(self, view: MembershipView, lost: Sequence[int]) -> str:
        parts = ("part " if len(lost) == 1 else "parts ") + " and ".join(map(str, lost))
        had = [
            who
            for who in self.view.members
            if model_shard_of(who.worker, self.model_shards) in lost and who not in view.members
        ]
        those = f" with {' and '.join(map(str, had))}" if had else ""
        was = "was" if len(lost) == 1 else "were"
        return f"{parts} of the model {was} lost{those}: the run goes on from the newest checkpoint"

    def _is_waiting(self, view: MembershipView) -> bool:
        """Whether this worker waits for others to come, or to let it in."""
        return self.worker_id not in view.members or not covers_model(view.members, self.model_shards)

    def _is_unneeded(self, state: MembershipState) -> bool:
        return state.request.done or state.request.stop or self._should_leave()

    def _late_members(self, state: MembershipState) -> dict[WorkerId, str]:
        """Members that live but have not come to this epoch for as long as a worker waits for others."""
        epoch, since = self._waiting_since
        if epoch != state.view.generation:
            self._waiting_since = epoch, since = state.view.generation, time.monotonic()
        limit = self.timeout.total_seconds()
        if time.monotonic() - since <= limit or self.worker_id not in state.positions:
            return {}
        return {who: f"has not come within {limit:g} s" for who in state.view.members if who not in state.positions}

    def _report_waiting(self, state: MembershipState) -> None:
        if self.worker_id not in state.view.members:
            self._set_phase("waits to be let in")
        else:
            missing = [who for who in state.view.members if who not in state.positions and who != self.worker_id]
            names = ", ".join(map(str, missing))
            phase = f"recovers: waits for {names}" if names else "recovers: waits for the next epoch"
            self._set_phase(phase, [who.worker for who in missing])

    def _set_phase(self, phase: str, waits_for: Sequence[int] = ()) -> None:
        if phase != self.phase:
            self.phase, self.waiting_for, self.phase_since = phase, list(waits_for), time.monotonic()

    # -- on the beat's thread -----------------------------------------------------------------------------------------

    def _on_state(self, state: MembershipState) -> None:
        gone = self._heartbeat.gone(state)
        current = self._watched
        # When the run is done all have come to its end: whoever goes now goes as it should.
        if current is not None and not state.request.done:
            epoch, members, group = current
            lost = [f"{who} {gone[who]}" for who in members if who in gone]
            if lost:
                group.abandon("; ".join(lost))
            elif state.view.generation > epoch and not (state.view.boundary and self.worker_id in state.view.members):
                group.abandon(f"epoch {state.view.generation} has begun: {state.view.reason}")
        self._newcomers = newcomers(state.view, state.alive, gone)
        if state.stacks_revision > self._stacks_answered:
            self._stacks_answered = state.stacks_revision
            with suppress(StoreUnavailable):
                self._heartbeat.put(f"where/{store_key(self.worker_id)}", msgspec.json.encode(self.activity()))

    def _on_store_away(self, seconds: float | None) -> None:
        event = StoreOutage(time=time.time(), rank=self.worker_id.worker, address=self._store.address, seconds=seconds)
        self._emit(event)

    def _on_store_retry(self, seconds: float) -> None:
        """The driver has had its time; then the members try, one after the other: the first may be gone."""
        place = (
            self.view.members.index(self.worker_id) if self.worker_id in self.view.members else len(self.view.members)
        )
        if self._restart_store is not None and seconds > STORE_RESTART_SECONDS * (1 + place):
            with suppress(RunError, OSError):
                self._restart_store()

    def activity(self) -> WorkerActivity:
        """What this worker is doing at this moment, for `shoal why`."""
        doing = self.group.status()
        user_line, stack = user_stack(self._thread)
        waits = self.waiting_for if doing is None else [self.view.members[rank].worker for rank in doing.missing_ranks]
        return WorkerActivity(
            worker=self.worker_id.worker,
            incarnation=self.worker_id.incarnation,
            host=self._heartbeat.process.host_name,
            pid=os.getpid(),
            state="waiting" if waits else "running",
            operation="" if doing is None else doing.operation,
            waits_for=waits,
            since=time.monotonic() - self.phase_since if doing is None else doing.seconds,
            step=self.member.committed,
            phase=self.phase,
            user_line=user_line,
            stack=stack,
            silent_seconds=0.0,
        )


def _log(text: str) -> None:
    """For the worker's log alone: the run's story is told by events."""
    print(f"{LOG_ONLY}{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)
