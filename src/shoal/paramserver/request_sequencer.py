"""Applies each worker's writes once and in order, and answers repeated writes with their first reply. Pure.

    handle(client, tag, sequence, …) ──► seen before?    the first reply; nothing changes
                                     └─► the next write  checked, applied, answered or parked

A refused write has used up its number, except for the codes "gap" and "incarnation". A parked request is answered later
by the request that it waits for.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from shoal.paramserver.messages import WRITES, AckReply, AnyReply, ClientId, RefusedReply, ServerRequest, ValuesReply
from shoal.paramserver.replies import ReplyAddress, ShardReply
from shoal.paramserver.request_checks import RequestRefused
from shoal.paramserver.request_log import ClientRecord

Tensors: TypeAlias = Sequence[Tensor]
HandlerResult: TypeAlias = tuple[AnyReply, Tensors] | None  # None: parked


class RequestSequencer(ABC):
    def __init__(self) -> None:
        self.version = 0  # updates applied
        self.duplicates = 0
        self.bytes_in = self.bytes_out = 0
        self.refused: Counter[str] = Counter()  # by code
        self._records: dict[int, ClientRecord] = {}  # by worker
        self._replies: list[ShardReply] = []  # to requests that were parked

    @abstractmethod
    def _execute(
        self, address: ReplyAddress, generation: int, request: ServerRequest, tensors: Tensors
    ) -> HandlerResult:
        """Does a request."""

    @abstractmethod
    def _values(self, tables: Sequence[str] = ()) -> tuple[AnyReply, Tensors]:
        """The current values of dense tables."""

    @abstractmethod
    def _is_waiting(self, address: ReplyAddress) -> bool:
        """Whether the request is parked."""

    @abstractmethod
    def _drop_worker(self, worker: int) -> None:
        """Forgets the parked requests of a worker whose process was replaced."""

    def take_replies(self) -> list[ShardReply]:
        """Returns replies to parked requests. `handle` returns them too."""
        replies, self._replies = self._replies, []
        return replies

    def handle(
        self, client: ClientId, tag: int, sequence: int, generation: int, request: ServerRequest, tensors: Tensors = ()
    ) -> list[ShardReply]:
        """Handles a request; returns the replies that can be sent now. Their tensors are valid until the next call."""
        address = ReplyAddress(client, tag, sequence)
        result: HandlerResult
        try:
            record = self._records.get(client.worker)
            if record is None or record.incarnation != client.incarnation:
                record = self._record(client)
            if sequence == record.sequence + 1:
                record.sequence = sequence
                try:
                    result = self._execute(address, generation, request, tensors)
                except BaseException:  # a bug, or an error of the job's optimizer: must not run again
                    record.remember(sequence, RefusedReply("failed", f"write {sequence} failed when it came first"))
                    raise
                if result is not None:
                    record.remember(sequence, result[0])
            elif sequence:
                result = self._repeat(record, address, generation, request, tensors)
            elif isinstance(request, WRITES):
                reason = f"{type(request).__name__} is a write, and has no sequence number"
                raise RequestRefused("sequence", reason, "number it")
            else:
                result = self._execute(address, generation, request, tensors)
        except RequestRefused as error:
            result = self._refuse(error)
        parked, self._replies = self._replies, []
        replies = parked if result is None else [ShardReply(client, tag, *result), *parked]
        for tensor in tensors:
            self.bytes_in += tensor.nbytes
        for reply in replies:
            for tensor in reply.tensors:
                self.bytes_out += tensor.nbytes
        return replies

    def _record(self, client: ClientId) -> ClientRecord:
        record = self._records.get(client.worker)
        if record is None or record.incarnation < client.incarnation:
            record = self._records[client.worker] = ClientRecord(client.incarnation)
            self._drop_worker(client.worker)
        elif record.incarnation > client.incarnation:
            reason = f"this is an older process of worker {client.worker}: another has replaced it"
            raise RequestRefused("incarnation", reason, "end this process")
        return record

    def _repeat(
        self, record: ClientRecord, address: ReplyAddress, generation: int, request: ServerRequest, tensors: Tensors
    ) -> HandlerResult:
        """Handles a write that is not the next one: a repeated one, or one too far."""
        sequence, last = address.sequence, record.sequence
        if sequence > last:
            reason = f"write {sequence} of worker {address.client.worker} came after write {last}"
            raise RequestRefused("gap", reason, f"resend from write {last + 1} on")
        self.duplicates += 1
        if record.is_forgotten(sequence):
            return AckReply(self.version), ()
        reply = record.replies.get(sequence)
        if isinstance(reply, ValuesReply):
            return self._values([each.table for each in reply.slices])
        if reply is not None:
            return reply, ()
        if self._is_waiting(address):
            return None
        return self._execute(address, generation, request, tensors)  # Apply, Barrier, Lease: these are idempotent

    def _refuse(self, error: RequestRefused) -> tuple[AnyReply, Tensors]:
        self.refused[error.reply.code] += 1
        return error.reply, ()

    def _queue_reply(self, address: ReplyAddress, reply: AnyReply, tensors: Tensors = ()) -> None:
        """Answers a parked request."""
        record = self._records.get(address.client.worker)
        if address.sequence and record is not None and record.incarnation == address.client.incarnation:
            record.remember(address.sequence, reply)
        self._replies.append(ShardReply(address.client, address.tag, reply, tensors))
