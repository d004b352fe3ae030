"""Messages between ranks of a group across hosts: through shared memory on one host, through gloo between hosts."""

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.gloo_wait import GlooWaitPool
from shoal.collectives.handshake import GroupMember
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.collectives.shm_p2p import ShmMessenger
from shoal.errors import CollectiveError, PeerLost

USER_TAG_BITS, SIZE_BITS = 15, 14
LARGE_TAGS = 1 << (USER_TAG_BITS + SIZE_BITS)
FIRST_TAG = 1 << 30  # above those of users' messages
TAG_BITS, TAGS_EACH = 16, 1 << 14
WHOLE_BYTES = 1 << 16  # messages below this arrive whole or not at all
BACKSTOP_SECONDS = 5.0  # after the deadline, which the monitor keeps


class GlooMessage:
    """A message through gloo. `op` and `tag` are given for a user's message, which may be awaited at any time."""

    error: CollectiveError | None = None

    def __init__(
        self, router: "MessageRouter", work: Any, peer: int, num_bytes: int, op: CollectiveOp | None, tag: int
    ) -> None:
        self._router, self._work, self.source, self._num_bytes = router, work, peer, num_bytes
        self._op, self._tag = op, tag
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        if self.done:
            return
        if self._op is None:
            self._await(self._router.limit)
            return
        try:
            with self._router.active_monitor.message_wait(self._op, self._tag, timeout):
                self._await(timeout or self._router.limit)
        except CollectiveError as error:
            self.error, self.done = error, True
            raise

    def _await(self, limit: float) -> None:
        work, timeout = self._work, timedelta(seconds=limit + BACKSTOP_SECONDS)
        try:
            if self._num_bytes < WHOLE_BYTES:
                work.wait(timeout)
            elif not self._router.wait_pool.wait(lambda: work.wait(timeout)):
                assert self._router.active_monitor.failure is not None
                raise self._router.active_monitor.failure
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._router.explain_loss(self.source, error) from None
        self.done = True
        self._router.completed += 1


class MessageRouter:
    """Sends to and receives from any rank: through shared memory on this host, through gloo elsewhere."""

    def __init__(
        self, gloo: Any, members: Sequence[GroupMember], rank: int, messenger: ShmMessenger | None, limit: float
    ) -> None:
        self.rank, self.size = rank, len(members)
        self.gloo, self.messenger, self.limit = gloo, messenger, limit
        self.completed = 0  # gloo messages
        self.op, self.op_number = CollectiveOp("none"), 0  # the collective that the messages belong to
        self.monitor: PeerMonitor | None = None
        self.wait_pool = GlooWaitPool(lambda: self.active_monitor.failure is not None)
        local = messenger.segment.members if messenger is not None else []
        self._local_ranks = {member.rank: place for place, member in enumerate(local)}

    @property
    def active_monitor(self) -> PeerMonitor:
        assert self.monitor is not None
        return self.monitor

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        if self.messenger is not None and to in self._local_ranks:
            return self.messenger.send(tensor.view(torch.uint8), self._local_ranks[to], tag, self.op, self.op_number)
        return self.begin(lambda: self.gloo.send([tensor], to, tag), to, tensor.nbytes)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        if self.messenger is not None and source in self._local_ranks:
            flat = tensor.view(torch.uint8)
            return self.messenger.receive(flat, self._local_ranks[source], tag, self.op, self.op_number)
        return self.begin(lambda: self.gloo.recv([tensor], source, tag), source, tensor.nbytes)

    def begin(
        self, start: Callable[[], Any], peer: int, num_bytes: int, op: CollectiveOp | None = None, tag: int = 0
    ) -> GlooMessage:
        try:
            return GlooMessage(self, start(), peer, num_bytes, op, tag)
        except RuntimeError as error:
            raise self.explain_loss(peer, error) from None

    def progress(self) -> int:
        return self.completed + (self.messenger.moved if self.messenger is not None else 0)

    def explain_loss(self, peer: int, error: Exception) -> CollectiveError:
        return self.active_monitor.explain(peer, _describe_error(error))

    def abort_waits(self, error: CollectiveError) -> None:
        """Ends every wait of this rank: gloo closes all connections when one wait times out."""
        if self.messenger is not None:
            self.messenger.segment.fail(error)
        for other in range(self.size):
            if other != self.rank:
                with suppress(RuntimeError):  # closed before, or by this wait
                    self.gloo.recv([torch.empty(1)], other, FIRST_TAG - 1).wait(timedelta(milliseconds=1))


def first_tag(op: CollectiveOp, sequence: int) -> int:
    """The first of the TAGS_EACH tags of a collective."""
    return FIRST_TAG + (zlib.crc32(op.record, sequence) & ((1 << TAG_BITS) - 1)) * TAGS_EACH


def user_tag(tag: int, num_bytes: int) -> int:
    """The gloo tag of a user's message. It depends on the size, since gloo ends the process if sender and receiver
    differ in size. Tags too large for that are not changed."""
    if 0 <= tag < 1 << USER_TAG_BITS:
        return zlib.crc32(num_bytes.to_bytes(8, "little")) >> (32 - SIZE_BITS) << USER_TAG_BITS | tag
    return LARGE_TAGS | tag & (LARGE_TAGS - 1)


def _describe_error(error: Exception) -> str:
    text = str(error).split("] ", 1)[-1].splitlines()[0]
    if "Connection closed" in text or "Connection reset" in text or "pair closure" in text or "Broken pipe" in text:
        return "the connection to it was closed"
    if "imed out" in text:
        return "no message from it until the deadline"
    return text


def open_gloo(store: Store, members: Sequence[GroupMember], rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=members[rank].address)]
    options._timeout = timeout
    options._threads = 2
    try:
        return dist.ProcessGroupGloo(store, rank, len(members), options)
    except RuntimeError as error:
        raise PeerLost(f"{members[rank]} could not connect to the others: {_describe_error(error)}") from None
