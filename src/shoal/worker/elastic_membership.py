"""A membership of workers that come and go: this worker enters, recovers from losses, lets others in, leaves.

recovery/membership/protocol.py decides what to do from what the store holds; this module does it. What becomes of a
step that fails is decided in worker/run.py: `recover` gives it a group, and the plan that follows from all members'
positions.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.collectives.handshake import abort_wait_if, host_identity
from shoal.collectives.options import CommOptions
from shoal.errors import PeerLost, RunError
from shoal.numerics.user_frames import user_stack
from shoal.recovery.membership.heartbeat import Heartbeat, MembershipState, RunRequest, store_key
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.process import kill_process, pid_space, start_ticks
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
from shoal.transport.addresses import on_this_machine
from shoal.worker.membership import AFTER_SHARD_LOST, ModelShardLost, RunAbandoned, RunCompleted, WorkerEvicted
from shoal.worker.rendezvous import POLL_SECONDS, GroupRendezvous
from shoal.worker.requests import CHANGE, LEAVE, STOP

LOG_ONLY = "· "  # begins a line of a log that the driver does not show
STORE_RETRY_SECONDS = 0.2  # between two tries to reach the store
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
        folder: Path,
        lease_seconds: float,
        timeout: timedelta,
        options: CommOptions,
        emit: Callable[[Event], None],
        should_stop: Callable[[], bool],
        should_leave: Callable[[], bool],
        restart_store: Callable[[], None] | None = None,
    ) -> None:
        """`model_shards`: of the layout; this worker holds one of them. `restart_store`: starts the run's own store
        again, where the driver, which else does that, is gone."""
        self.worker_id, self.model_shards, self.timeout, self.options = worker_id, model_shards, timeout, options
        self.member = MemberState(worker_id=worker_id, model_shards=model_shards)
        self.view = MembershipView(generation=0, members=(worker_id,))
        self.group: WorkerGroup = SoloGroup(options)
        self.phase = "enters the run"  # for `shoal why`
        self.waiting_for: list[int] = []
        self.phase_since = time.monotonic()
        self._emit, self._should_stop, self._should_leave = emit, should_stop, should_leave
        self._watched: tuple[int, tuple[WorkerId, ...], WorkerGroup] | None = None  # generation, members, group
        self._waiting_since = (0, 0.0)  # a generation, and since when this worker waits for its members
        self._stacks_answered = 0
        self._thread = threading.get_ident()
        self._newcomers: list[WorkerId] = []
        self._departed: set[WorkerId] = set()  # left by request: they end by themselves
        alive = WorkerProcess(
            worker_id=worker_id,
            pid=os.getpid(),
            started=start_ticks(os.getpid()) or "",
            host=host_identity(),
            host_name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
            pid_space=pid_space(),
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
        self._rendezvous = GroupRendezvous(worker_id, self._store, self._heartbeat, timeout, options, folder)

    @property
    def generation(self) -> int:
        return self.member.generation

    # -- the step -----------------------------------------------------------------------------------------------------

    def vote(self, further: bool = False) -> None:
        self.member.vote(further)

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
        request = self._heartbeat.state.request
        requests = STOP if request.stop or self._should_stop() else 0
        scaled = request.workers is not None and self._replica_rank() >= request.workers // self.model_shards
        if scaled or self._should_leave():
            requests |= LEAVE
        # What the heartbeat has seen may be older than the group.
        return requests | CHANGE if any(who not in self.view.members for who in self._newcomers) else requests

    def _replica_rank(self) -> int:
        """This worker's rank among the members that hold the same model shard."""
        shards = [model_shard_of(member.worker, self.model_shards) for member in self.view.members]
        rank = self.view.rank(self.worker_id)
        return shards[:rank].count(shards[rank])

    def known_committed(self) -> int:
        with suppress(StoreUnavailable):
            return self._read_state().committed
        return self._heartbeat.state.committed

    # -- membership ---------------------------------------------------------------------------------------------------

    def enter(self) -> RecoveryPlan:
        """From here on the others wait for this worker: it must be ready to take part."""
        self._thread = threading.get_ident()
        self._heartbeat.start()
        return self._run_protocol(None)

    def subgroup(self, ranks: Sequence[int]) -> WorkerGroup:
        with abort_wait_if(lambda: self._rendezvous.obsolete_reason(self.view)):
            return self.group.subgroup(ranks)

    def recover(self, error: PeerLost) -> RecoveryPlan:
        self.member.group_failed()
        self._watched = None
        _log(error.message)
        self.group.abandon(error.message)  # ends the waits of others for this worker
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
                state = self._read_state()
                if self.worker_id not in state.view.members or len(state.view.members) == 1:
                    break
                self._store.wait("view", state.revision, POLL_SECONDS)

    def fail_run(self, reason: str) -> None:
        with suppress(StoreUnavailable):
            self._store.put("request", msgspec.json.encode(RunRequest(stop=True, failed=reason)))

    def claim_save(self, step: int) -> bool:
        try:
            key = f"saves/{self.generation}/{step}"
            return self._store.swap(key, str(self.worker_id).encode(), 0) is not None
        except StoreUnavailable:
            return True  # two writers at once do no harm

    def stop_watching(self) -> None:
        self._watched = None

    def finish_run(self) -> None:
        with suppress(StoreUnavailable):
            self._store.put("request", msgspec.json.encode(RunRequest(done=True)))

    def close(self) -> None:
        self._watched = None
        lease = self._heartbeat.close()
        if lease is not None:
            with suppress(StoreUnavailable):
                self._store.revoke(lease)
        self._store.close()

    def _run_protocol(self, change: BoundaryChange | None) -> RecoveryPlan:
        """Does what the protocol decides until a group is formed."""
        logged = False
        while True:
            try:
                state = self._read_state()
                if state.request.failed:
                    raise RunAbandoned(f"the run ends: {state.request.failed}")
                if self.member.committed < 0 and self._is_waiting(state.view) and self._is_unneeded(state):
                    raise WorkerEvicted(f"{self.worker_id} was asked to stop before it took part")
                if self.member.committed >= 0 and self.worker_id in state.view.members and state.request.done:
                    raise RunCompleted("the run is done")
                late = self._late_members(state)
                gone = self._gone(state) | late
                self._leave_unreachable(gone)
                action = self.member.decide(self._observe(state, late), gone, change)
                match action:
                    case ProposeView(view):
                        value = msgspec.json.encode(view)
                        self._set_phase(f"proposes generation {view.generation}: {view.reason}")
                        self._store.swap("view", value, state.view_revision)
                    case PostPosition(generation, position):
                        key = f"position/{generation}/{store_key(self.worker_id)}"
                        self._rendezvous.put_record(key, msgspec.json.encode(position))
                    case WaitForStore():
                        self._report_waiting(state)
                        self._store.wait("", state.revision, POLL_SECONDS)
                    case LeaveRun(view, lost) if lost:
                        error = ModelShardLost(self._loss_reason(view, lost))
                        error.present = view.members
                        raise error
                    case LeaveRun(view):
                        others = f"the others went on without {self.worker_id}"
                        raise WorkerEvicted(f"{others}: generation {view.generation}, {view.reason}")
                    case FormGroup(recovery):
                        if self._form(recovery):
                            return recovery
            except LeaseEnded:
                time.sleep(POLL_SECONDS)  # the heartbeat gets another lease
            except StoreUnavailable as error:
                if not logged:
                    logged = True
                    _log(error.message)
                self._set_phase("waits for the store")
                time.sleep(STORE_RETRY_SECONDS)

    def _leave_unreachable(self, gone: Mapping[WorkerId, str]) -> None:
        """A worker without state does not hold up those that have it, where its host's link is bad."""
        unreachable = self._rendezvous.unreachable()
        if self.member.committed < 0 and any(gone.get(who) == why for who, why in unreachable.items()):
            names = " and ".join(map(str, unreachable))
            raise WorkerEvicted(f"{self.worker_id} gives up: {names} {next(iter(unreachable.values()))}")

    def _form(self, recovery: RecoveryPlan) -> bool:
        view = recovery.view
        self._set_phase(f"forms the group of generation {view.generation}")
        self.member.group_forming(recovery)
        self._kill_evicted(view)
        self._leave_group()
        try:
            self.group = self._rendezvous.make_group(view)
        except RunError as error:
            _log(f"generation {view.generation}: {error.message}")
            self.member.group_failed()
            return False
        self.view = view
        self._watched = (view.generation, view.members, self.group)
        if self.worker_id not in recovery.behind:
            self.member.group_formed(recovery)
        self._set_phase("works")
        return True

    def _kill_evicted(self, view: MembershipView) -> None:
        """Kills removed members on this host: a stopped process that wakes up would write into shared memory."""
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
        self._rendezvous.close()

    def _read_state(self) -> MembershipState:
        return MembershipState(self._store.read(""))

    def _gone(self, state: MembershipState) -> dict[WorkerId, str]:
        found = self._heartbeat.gone(state)
        if self.view.generation == state.view.generation:
            for rank in self.group.ended_ranks():
                who = self.view.members[rank]
                found.setdefault(who, "died: its connection was closed")
        for who, why in self._rendezvous.unreachable().items():
            if who in state.view.members:
                found.setdefault(who, why)
        return found

    def _observe(self, state: MembershipState, late: Collection[WorkerId]) -> MembershipObservation:
        """Where the model is sharded, members with state drop a late one as if its lease had run out."""
        seen = state.observation()
        if self.model_shards == 1 or self.member.committed < 0 or not late:
            return seen
        return replace(seen, alive=[who for who in seen.alive if who not in late])

    def _loss_reason(self, view: MembershipView, lost: Sequence[int]) -> str:
        shards = ("part " if len(lost) == 1 else "parts ") + " and ".join(map(str, lost))
        gone = [who for who in self.view.members if who not in view.members]
        holders = [str(who) for who in gone if model_shard_of(who.worker, self.model_shards) in lost]
        those = f" with {' and '.join(holders)}" if holders else ""
        was = "was" if len(lost) == 1 else "were"
        return f"{shards} of the model {was} lost{those}: {AFTER_SHARD_LOST}"

    def _is_waiting(self, view: MembershipView) -> bool:
        """Whether this worker waits for others to enter, or to let it in."""
        return self.worker_id not in view.members or not covers_model(view.members, self.model_shards)

    def _is_unneeded(self, state: MembershipState) -> bool:
        return state.request.done or state.request.stop or self._should_leave()

    def _late_members(self, state: MembershipState) -> dict[WorkerId, str]:
        """Members that live but have not posted a position in this generation within `--timeout`."""
        generation, since = self._waiting_since
        if generation != state.view.generation:
            self._waiting_since = generation, since = state.view.generation, time.monotonic()
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
            phase = f"recovers: waits for {names}" if names else "recovers: waits for the next generation"
            self._set_phase(phase, [who.worker for who in missing])

    def _set_phase(self, phase: str, waits_for: Sequence[int] = ()) -> None:
        if phase != self.phase:
            self.phase, self.waiting_for, self.phase_since = phase, list(waits_for), time.monotonic()

    # -- on the heartbeat's thread ------------------------------------------------------------------------------------

    def _on_state(self, state: MembershipState) -> None:
        gone = self._heartbeat.gone(state)
        current = self._watched
        # When the run is done, all members have come to its end: one that ends now is not lost.
        if current is not None and not state.request.done:
            view, (generation, members, group) = state.view, current
            lost = [f"{who} {gone[who]}" for who in members if who in gone]
            if lost:
                group.abandon("; ".join(lost))
            elif view.generation > generation and not (view.boundary and self.worker_id in view.members):
                group.abandon(f"generation {view.generation} has begun: {view.reason}")
        self._newcomers = newcomers(state.view, state.alive, gone)
        if state.stacks_revision > self._stacks_answered:
            self._stacks_answered = state.stacks_revision
            with suppress(StoreUnavailable):
                self._heartbeat.put(f"where/{store_key(self.worker_id)}", msgspec.json.encode(self.activity()))

    def _on_store_away(self, seconds: float | None) -> None:
        address = self._store.address
        host = "" if on_this_machine(address) else self._heartbeat.process.host_name
        self._emit(StoreOutage(rank=self.worker_id.worker, address=address, host=host, seconds=seconds))

    def _on_store_retry(self, seconds: float) -> None:
        """Restarts the store if the driver has not. The members try one after the other: the first may be gone."""
        members = self.view.members
        place = members.index(self.worker_id) if self.worker_id in members else len(members)
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
    """For the worker's log alone: events report the story of the run."""
    print(f"{LOG_ONLY}{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)
