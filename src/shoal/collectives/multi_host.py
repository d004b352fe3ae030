"""Collectives of ranks on several hosts: trees (trees.py) over messages, through TCP between hosts, memory inside.

The tags of a collective are derived from its number and its record. So ranks in different collectives never read each
other's bytes: they wait, and the monitor finds the mismatch.

Sums and gathers are one tree each, and several of them can be under way (`begin_all_reduce` and the like). They are
finished in the order in which they were begun, and the monitor sees the oldest.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.choose_algorithm import AlgorithmChoice, choose_algorithm, readable_bytes
from shoal.collectives.connect_peers import connect_peers
from shoal.collectives.cost_model import complete_assignment, slowest_bandwidth
from shoal.collectives.float_packing import MEDIUM_LINK, SLOW_LINK
from shoal.collectives.handshake import GroupMember, left_midway_error
from shoal.collectives.liveness import PeerLink
from shoal.collectives.message_router import BACKSTOP_SECONDS, CollectiveMessages, MessageRouter, UserMessage, first_tag
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import CommConfig
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.collectives.reduction import SUM, Reduction, ScratchBuffers, fold_partials
from shoal.collectives.run_tree import ByteCounts, TensorPool, TreeExecutor, TreeOptions, split_pieces
from shoal.collectives.shm_p2p import ShmMessenger
from shoal.collectives.shm_segment import ShmSegment
from shoal.collectives.single_host import check_lengths, own_lengths
from shoal.collectives.small_exchange import SMALL_BYTES, SMALL_RANKS, SmallExchange
from shoal.collectives.stats import CommStats, make_comm_stats, places_of
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.collectives.topology import level_setting, link_level
from shoal.collectives.trees import TreeRoute, least_chunk
from shoal.errors import CollectiveError
from shoal.numerics.lanes import Span, subtrees

Messages = tuple[CollectiveMessages, int]  # of one collective, and its first tag


class LaneSpread(TypedDict, total=False):
    """Which rank has which lanes; without it, rank r has lane r."""

    lanes: int
    assignment: tuple[Span, ...]


@dataclass(frozen=True)
class SumRequest:
    """What is added: this rank's partial sums, where the result goes, and how."""

    partials: Mapping[Span, Tensor]
    result: Tensor
    reduction: Reduction
    key: Hashable  # for compressors with state; None: not compressed
    spread: LaneSpread = field(default_factory=LaneSpread)


class StartedTree:
    """A collective of one tree or exchange that has begun. `complete` is what is left when that is done."""

    tree: TreeExecutor | SmallExchange

    def __init__(
        self, transport: "MultiHostTransport", op: CollectiveOp, number: int, complete: Callable[[], None]
    ) -> None:
        self._transport, self.op, self.number, self.complete = transport, op, number, complete

    def finish(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        return self._transport.finish(self, interrupted)


class MultiHostTransport:
    def __init__(
        self, store: Store, members: list[GroupMember], rank: int, segment: ShmSegment | None, timeout: timedelta
    ) -> None:
        self.members, self.rank, self.size = members, rank, len(members)
        self._own_span = (rank, rank + 1)
        self._others = [(rank + step) % self.size for step in range(1, self.size)]
        self.places = places_of(members)
        self._levels = [link_level(self.places[rank], place) for place in self.places]
        self.sequence = 0
        self.config = CommConfig.from_options(members[0].options).restrict_to(self.places)
        self._least_chunk = least_chunk(slowest_bandwidth(self.places, self.config.links))
        self.reduce_bytes = ByteCounts()  # of all-reduce and ordered reduce
        self._largest: tuple[int, AlgorithmChoice] | None = None  # of all sums: its bytes and its last route
        self._segment = segment if segment is not None and segment.size > 1 else None
        shared = [member.rank for member in self._segment.members] if self._segment is not None else []
        connections = connect_peers(store, members, rank, shared, timeout)
        limit = timeout.total_seconds()
        messenger = ShmMessenger(self._segment) if self._segment is not None else None
        slow, medium = self._behind(0, SLOW_LINK), self._behind(SLOW_LINK, MEDIUM_LINK)
        if self.config.compress:  # cores have that to do, and links wait for them
            medium = frozenset()
        self.router = MessageRouter(TcpMessenger(members, rank, connections.tensors, slow, medium), messenger, limit)
        links = {peer: PeerLink(peer, connection) for peer, connection in connections.status.items()}
        self.health = PeerMonitor(members, rank, links, limit, self.router.progress, self.router.abort_waits)
        self.router.monitor = self.health
        self.health.streamed = frozenset(connections.tensors)
        self.set_timeout(limit)
        self._pool, self._scratch = TensorPool(), ScratchBuffers()
        self._started: deque[StartedTree] = deque()
        self._choices: dict[Any, AlgorithmChoice] = {}

    def _behind(self, least: float, most: float) -> frozenset[int]:
        """The ranks behind links of this many bytes per second."""
        speeds = [level_setting(self.config.links, level) for level in self._levels]
        return frozenset(
            rank for rank, speed in enumerate(speeds) if speed is not None and least <= speed.bandwidth < most
        )

    # -- order ----------------------------------------------------------------------------------------------------

    @property
    def overlapping(self) -> "MultiHostTransport | None":
        """Where ranks share memory, its segment knows of one collective at a time."""
        return self if self._segment is None else None

    @contextmanager
    def _collective(self, op: CollectiveOp) -> Iterator[Messages]:
        """Runs one collective to its end. Yields its messages and its first tag."""
        self.sequence += 1
        with self._reporting(op, self.sequence):
            self._watch(op, self.sequence)
            yield self._messages(op)
        self._unwatch()

    def _messages(self, op: CollectiveOp) -> Messages:
        return self.router.messages_of(op, self.sequence), first_tag(op, self.sequence)

    @contextmanager
    def _reporting(self, op: CollectiveOp, number: int) -> Iterator[None]:
        """Reports an exception of this block to the other ranks."""
        try:
            yield
        except CollectiveError as error:
            raise self.health.fail(error) from None
        except BaseException as error:
            self.health.fail(left_midway_error(self.members[self.rank], f"{op}, number {number}", error))
            raise

    def _watch(self, op: CollectiveOp, number: int) -> None:
        """From here on the monitor and the segment know of this collective."""
        self.health.begin(op, number)
        if self._segment is not None:
            self._segment.begin(op)

    def _unwatch(self) -> None:
        self.health.end()
        if self._segment is not None:
            self._segment.end()

    def _begin(
        self,
        op: CollectiveOp,
        make: Callable[[Messages], TreeExecutor | SmallExchange],
        complete: Callable[[], None] = lambda: None,
    ) -> StartedTree:
        """Begins a collective. `make` begins its tree or exchange."""
        self.sequence += 1
        started = StartedTree(self, op, self.sequence, complete)
        with self._reporting(op, self.sequence):
            if not self._started:
                self._watch(op, self.sequence)
            started.tree = make(self._messages(op))
        self._started.append(started)
        return started

    def finish(self, started: StartedTree, interrupted: Callable[[], bool]) -> bool:
        """Goes on with all trees that have begun until this one, the oldest, is done. False: interrupted before."""
        with self._reporting(started.op, started.number):
            while not started.tree.done:
                if interrupted():
                    return False
                finished, advanced = self.router.finished, False
                for each in self._started:
                    advanced = each.tree.advance() or advanced
                if not advanced:
                    self.router.wait_news(finished, interrupted)
            started.complete()
            self._started.remove(started)
            self._unwatch()
            if self._started:
                self._watch(self._started[0].op, self._started[0].number)
        return True

    def call_each_tick(self, action: Callable[[], None]) -> None:
        self.health.each_tick = action

    def wake(self) -> None:
        """Lets a thread in `finish` look whether it is interrupted."""
        self.router.tcp.wake()

    def _choose(self, num_bytes: int, itemsize: int, compressed: bool = False, **shape: Any) -> AlgorithmChoice:
        key = (num_bytes, itemsize, compressed, tuple(shape.items()))
        if key not in self._choices:
            self._choices[key] = choose_algorithm(
                self.places,
                self.config.links,
                num_bytes,
                element_bytes=itemsize,
                exact=not compressed and not self.config.inexact,
                algorithm=self.config.algorithm_for(self.size, **shape),
                compress=self.config.compress if compressed else None,
                **shape,
            )
        return self._choices[key]

    def _tree(
        self,
        messages: Messages,
        route: TreeRoute,
        partials: Mapping[Span, Sequence[Tensor]],
        out: Sequence[Tensor | None],
        **options: Any,
    ) -> TreeExecutor:
        messenger, base = messages
        pool, places, least = self._pool, self.places, self._least_chunk
        given = TreeOptions(base=base, places=places, pool=pool, least_chunk=least, **options)
        return TreeExecutor(messenger, route, partials, out, given)

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        self.begin_all_reduce(flat, reduction, op).finish()

    def begin_all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> StartedTree:
        work = reduction.prepare(flat)
        total = SumRequest({self._own_span: work}, work, reduction, (op.dtype, op.count))
        return self._begin_sum(op, total, lambda: reduction.finish_into(flat, work, self.size))

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> None:
        self.begin_ordered_reduce(lanes, assignment, partials, key, op).finish()

    def begin_ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> StartedTree:
        spread: LaneSpread = {"lanes": lanes, "assignment": tuple(assignment)}
        return self._begin_sum(op, SumRequest(partials, next(iter(partials.values())), SUM, key, spread))

    def _begin_sum(
        self, op: CollectiveOp, total: SumRequest, complete: Callable[[], None] = lambda: None
    ) -> StartedTree:
        result = total.result
        if not result.numel():
            return self._begin(op, self._meeting, complete)
        adding = result.is_floating_point() and total.reduction.combine is torch.add
        compressed = bool(self.config.compress) and adding and total.key is not None
        if self.goes_straight(result.nbytes) and not compressed:
            return self._begin_small_sum(op, total, complete)
        return self._begin(op, lambda messages: self._sum_tree(messages, total, compressed), complete)

    def _sum_tree(self, messages: Messages, total: SumRequest, compressed: bool) -> TreeExecutor:
        result = total.result
        choice = self._choose(result.nbytes, result.element_size(), compressed, **total.spread)
        self._note_route(result.nbytes, choice)
        return self._tree(
            messages,
            choice.route,
            {span: split_pieces(choice.route, partial) for span, partial in total.partials.items()},
            split_pieces(choice.route, result),
            combine=total.reduction.combine,
            ordered=choice.ordered,
            compress=self.config.compress if compressed else None,
            key=total.key,
            byte_counts=self.reduce_bytes,
            **total.spread,
        )

    def _begin_small_sum(self, op: CollectiveOp, total: SumRequest, complete: Callable[[], None]) -> StartedTree:
        """Every rank gets the partial sums of all, and adds them up itself: one message on the way instead of two."""
        lanes, assignment = complete_assignment(self.size, total.spread.get("lanes"), total.spread.get("assignment"))
        held, count = [subtrees(lanes, span) for span in assignment], total.result.numel()
        rows = [torch.empty(len(spans), count, dtype=total.result.dtype) for spans in held]
        for place, span in enumerate(held[self.rank]):
            rows[self.rank][place].copy_(total.partials[span])

        def gather(messages: Messages) -> SmallExchange:
            if self._largest is None or total.result.nbytes >= self._largest[0]:
                choice = self._choose(total.result.nbytes * self.size, 1, own_pieces=True, up=False)
                size = readable_bytes(total.result.nbytes)
                reason = f"gather: {size} are few: each of {self.size} ranks sends its sums to all, which add them up"
                self._largest = total.result.nbytes, replace(choice, name="gather", reason=reason)
            for rank in self._others:
                self.reduce_bytes.count(self._levels[rank], rows[self.rank].nbytes)
            return self._exchange_rows(messages, [row.view(-1) for row in rows])

        def add() -> None:
            found = {
                span: row for spans, own in zip(held, rows, strict=True) for span, row in zip(spans, own, strict=True)
            }
            fold_partials(lanes, found, total.result, total.reduction, self._scratch)
            complete()

        return self._begin(op, gather, add)

    def _note_route(self, num_bytes: int, choice: AlgorithmChoice) -> None:
        if self._largest is None or num_bytes >= self._largest[0]:
            self._largest = num_bytes, choice

    def goes_straight(self, num_bytes: int) -> bool:
        return num_bytes <= SMALL_BYTES and self.size <= SMALL_RANKS and self.config.algorithm is None

    def _exchange_rows(self, messages: Messages, rows: Sequence[Tensor]) -> SmallExchange:
        """Sends this rank's row to all others, and receives theirs."""
        messenger, tag = messages
        own = rows[self.rank]
        return SmallExchange(
            messenger, tag, [(rows[rank], rank) for rank in self._others], [(own, rank) for rank in self._others]
        )

    def _meeting(self, messages: Messages) -> TreeExecutor | SmallExchange:
        """Is done when all ranks have begun it."""
        if self.goes_straight(1):
            return self._exchange_rows(messages, torch.zeros(self.size, 1, dtype=torch.uint8).unbind(0))
        route = self._choose(1, 1).route
        pieces = split_pieces(route, torch.zeros(1, dtype=torch.uint8))
        return self._tree(messages, route, {self._own_span: pieces}, pieces)

    def _sync(self, messages: Messages) -> None:
        """Returns when all ranks have called it."""
        self._meeting(messages).wait()

    def barrier(self) -> None:
        with self._collective(CollectiveOp("barrier")) as messages:
            self._sync(messages)

    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as messages:
            work = reduction.prepare(flat)
            if not work.numel():
                return self._sync(messages)
            choice = self._choose(work.nbytes, work.element_size(), root=root, down=False)
            pieces = split_pieces(choice.route, work)
            self._tree(
                messages,
                choice.route,
                {self._own_span: pieces},
                pieces if self.rank == root else [None] * len(pieces),
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=self.rank != root,
            ).wait()
            if self.rank == root:
                reduction.finish_into(flat, work, self.size)
        return None

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as messages:
            work = [reduction.prepare(each) for each in inputs]
            target = output if reduction.dtype is None else output.view(reduction.dtype)
            total = sum(each.nbytes for each in work)
            if not total:
                return self._sync(messages)
            choice = self._choose(total, target.element_size(), own_pieces=True, down=False)
            self._tree(
                messages,
                choice.route,
                {self._own_span: work},
                [target if rank == self.rank else None for rank in range(self.size)],
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=True,
            ).wait()
            reduction.finish(target, self.size)
        return None

    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor:
        rows = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
        self.all_gather(list(rows.view(torch.uint8).unbind(0)), flat.view(torch.uint8), op)
        result = torch.zeros_like(flat)
        counted = self.rank if exclusive else self.rank + 1
        if counted:
            reduction.fold(list(rows[:counted].unbind(0)), result, self._scratch)
        return result

    # -- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None:
        self.begin_broadcast(flat, root, op).finish()

    def begin_broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> StartedTree:
        def make(messages: Messages) -> TreeExecutor | SmallExchange:
            if not flat.numel():
                return self._meeting(messages)
            if self.goes_straight(flat.nbytes):
                others = [(flat, rank) for rank in self._others] if self.rank == root else []
                return SmallExchange(*messages, [] if self.rank == root else [(flat, root)], others)
            route = self._choose(flat.nbytes, 1, root=root, up=False).route
            return self._tree(messages, route, {}, split_pieces(route, flat), up=False)

        return self._begin(op, make)

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None:
        self.begin_all_gather(outputs, source, op).finish()

    def begin_all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> StartedTree:
        def make(messages: Messages) -> TreeExecutor | SmallExchange:
            if not source.numel():
                return self._meeting(messages)
            if outputs[self.rank].data_ptr() != source.data_ptr():
                outputs[self.rank].copy_(source)
            if self.goes_straight(source.nbytes):
                return self._exchange_rows(messages, outputs)
            route = self._choose(source.nbytes * self.size, 1, own_pieces=True, up=False).route
            return self._tree(messages, route, {}, outputs, up=False)

        return self._begin(op, make)

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as messages:
            if not source.numel():
                return self._sync(messages)
            messenger, tag = messages
            if outputs is None:
                messenger.send(source, root, tag).wait()
            else:
                receives = [messenger.receive(outputs[rank], rank, tag) for rank in self._others]
                outputs[root].copy_(source)
                for receive in receives:
                    receive.wait()
        return None

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as messages:
            if not output.numel():
                return self._sync(messages)
            messenger, tag = messages
            if sources is None:
                messenger.receive(output, root, tag).wait()
            else:
                sends = [messenger.send(sources[rank], rank, tag) for rank in self._others]
                output.copy_(sources[root])
                for send in sends:
                    send.wait()
        return None

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None:
        table = torch.empty(self.size, 2 * self.size, dtype=torch.int64)
        self.all_gather(list(table.view(torch.uint8).unbind(0)), own_lengths(outputs, inputs), op)
        check_lengths(table.tolist(), self.members, self.sequence)
        with self._collective(op) as messages:
            (messenger, tag), others = messages, self._others
            pending = [messenger.receive(outputs[rank], rank, tag) for rank in others if outputs[rank].numel()]
            pending += [messenger.send(inputs[rank], rank, tag) for rank in others if inputs[rank].numel()]
            if outputs[self.rank].numel():
                outputs[self.rank].copy_(inputs[self.rank])
            for message in pending:
                message.wait()

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> UserMessage:
        return self.router.user_send(flat, to, tag, op)

    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> UserMessage:
        return self.router.user_receive(flat, source, tag, op)

    # -- the end --------------------------------------------------------------------------------------------------

    def comm_stats(self) -> CommStats:
        """The route of the largest sum, and the bytes of all sums of this rank."""
        algorithm, reason, asked = "messages", "no sum has travelled yet", self.config.algorithm or ""
        if self._largest is not None:
            choice = self._largest[1]
            algorithm, reason = choice.name, choice.reason
            if asked in choice.refused:
                reason = f"{choice.refused[asked]}; {reason}"
        return make_comm_stats(
            algorithm,
            self.places,
            self.members[0].options,
            reason,
            exact=self.config.exact,
            sent_bytes=dict(self.reduce_bytes.sent),
            uncompressed_bytes=dict(self.reduce_bytes.uncompressed),
            traffic=self.router.traffic(self._levels),
            squared_errors={
                level: (each.stats.squared_error, each.stats.squared_values)
                for level, each in self.config.compress.items()
            },
        )

    def set_timeout(self, seconds: float) -> None:
        """The monitor keeps the deadline, since it can name the late rank; the segment is a backstop."""
        self.health.limit = self.router.limit = seconds
        if self._segment is not None:
            self._segment.timeout = seconds + BACKSTOP_SECONDS

    def abandon(self, error: BaseException) -> None:
        return  # `_collective` has reported it

    def close(self) -> None:
        self.health.close()
        if self._segment is not None:
            self._segment.leave()
        if self.router.messenger is not None:
            self.router.messenger.close()
        self.router.tcp.close()
