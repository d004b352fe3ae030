"""Collectives of ranks on several hosts: trees (trees.py) over messages, through TCP between hosts, memory inside.

The tags of a collective are derived from its number and its record. So ranks in different collectives never read each
other's bytes: they wait, and the monitor finds the mismatch.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.choose_algorithm import AlgorithmChoice, choose_algorithm
from shoal.collectives.connect_peers import connect_peers
from shoal.collectives.cost_model import slowest_bandwidth
from shoal.collectives.handshake import GroupMember, left_midway_error
from shoal.collectives.liveness import PeerLink
from shoal.collectives.message_router import BACKSTOP_SECONDS, MessageRouter, UserMessage, first_tag
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import CommConfig
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.collectives.reduction import SUM, Reduction, ScratchBuffers
from shoal.collectives.run_tree import ByteCounts, TensorPool, TreeExecutor, TreeOptions, split_pieces
from shoal.collectives.shm_p2p import ShmMessenger
from shoal.collectives.shm_segment import ShmSegment
from shoal.collectives.single_host import check_lengths, own_lengths
from shoal.collectives.stats import CommStats, make_comm_stats, places_of
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.collectives.topology import link_level
from shoal.collectives.trees import TreeRoute, least_chunk
from shoal.errors import CollectiveError
from shoal.numerics.lanes import Span


class MultiHostTransport:
    def __init__(
        self, store: Store, members: list[GroupMember], rank: int, segment: ShmSegment | None, timeout: timedelta
    ) -> None:
        self.members, self.rank, self.size = members, rank, len(members)
        self._own_span = (rank, rank + 1)
        self._others = [(rank + step) % self.size for step in range(1, self.size)]
        self.places = places_of(members)
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
        self.router = MessageRouter(TcpMessenger(members, rank, connections.tensors), messenger, limit)
        links = {peer: PeerLink(peer, connection) for peer, connection in connections.status.items()}
        self.health = PeerMonitor(members, rank, links, limit, self.router.progress, self.router.abort_waits)
        self.router.monitor = self.health
        self.health.streamed = frozenset(connections.tensors)
        self.set_timeout(limit)
        self._pool, self._scratch = TensorPool(), ScratchBuffers()
        self._choices: dict[Any, AlgorithmChoice] = {}

    # -- order ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _collective(self, op: CollectiveOp) -> Iterator[int]:
        """Runs one collective. Yields its first tag."""
        self.sequence += 1
        self.health.begin(op, self.sequence)
        self.router.op, self.router.op_number = op, self.sequence
        try:
            if self._segment is not None:
                self._segment.begin(op)
            yield first_tag(op, self.sequence)
        except CollectiveError as error:
            raise self.health.fail(error) from None
        except BaseException as error:
            self.health.fail(left_midway_error(self.members[self.rank], f"{op}, number {self.sequence}", error))
            raise
        self.health.end()
        if self._segment is not None:
            self._segment.end()

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

    def _run_tree(
        self, route: TreeRoute, partials: Mapping[Span, Sequence[Tensor]], out: Sequence[Tensor | None], **options: Any
    ) -> None:
        given = TreeOptions(places=self.places, pool=self._pool, least_chunk=self._least_chunk, **options)
        TreeExecutor(self.router, route, partials, out, given).wait()

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = reduction.prepare(flat)
            self._reduce_into({self._own_span: work}, work, reduction, base, (op.dtype, op.count))
            reduction.finish_into(flat, work, self.size)

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> Tensor:
        with self._collective(op) as base:
            result = next(iter(partials.values()))
            self._reduce_into(partials, result, SUM, base, key, lanes=lanes, assignment=tuple(assignment))
        return result

    def _reduce_into(
        self,
        partials: Mapping[Span, Tensor],
        result: Tensor,
        reduction: Reduction,
        base: int,
        key: Hashable,
        **lanes: Any,
    ) -> None:
        if not result.numel():
            return self._sync(base)
        adding = result.is_floating_point() and reduction.combine is torch.add
        compressed = bool(self.config.compress) and adding and key is not None
        choice = self._choose(result.nbytes, result.element_size(), compressed, **lanes)
        if self._largest is None or result.nbytes >= self._largest[0]:
            self._largest = result.nbytes, choice
        self._run_tree(
            choice.route,
            {span: split_pieces(choice.route, partial) for span, partial in partials.items()},
            split_pieces(choice.route, result),
            base=base,
            combine=reduction.combine,
            ordered=choice.ordered,
            compress=self.config.compress if compressed else None,
            key=key,
            byte_counts=self.reduce_bytes,
            **lanes,
        )
        return None

    def _sync(self, base: int) -> None:
        """Returns when all ranks have called it."""
        route = self._choose(1, 1).route
        pieces = split_pieces(route, torch.zeros(1, dtype=torch.uint8))
        self._run_tree(route, {self._own_span: pieces}, pieces, base=base)

    def barrier(self) -> None:
        with self._collective(CollectiveOp("barrier")) as base:
            self._sync(base)

    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = reduction.prepare(flat)
            if not work.numel():
                return self._sync(base)
            choice = self._choose(work.nbytes, work.element_size(), root=root, down=False)
            pieces = split_pieces(choice.route, work)
            self._run_tree(
                choice.route,
                {self._own_span: pieces},
                pieces if self.rank == root else [None] * len(pieces),
                base=base,
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=self.rank != root,
            )
            if self.rank == root:
                reduction.finish_into(flat, work, self.size)
        return None

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = [reduction.prepare(each) for each in inputs]
            target = output if reduction.dtype is None else output.view(reduction.dtype)
            total = sum(each.nbytes for each in work)
            if not total:
                return self._sync(base)
            choice = self._choose(total, target.element_size(), own_pieces=True, down=False)
            self._run_tree(
                choice.route,
                {self._own_span: work},
                [target if rank == self.rank else None for rank in range(self.size)],
                base=base,
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=True,
            )
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
        with self._collective(op) as base:
            if not flat.numel():
                return self._sync(base)
            route = self._choose(flat.nbytes, 1, root=root, up=False).route
            self._run_tree(route, {}, split_pieces(route, flat), base=base, up=False)
        return None

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not source.numel():
                return self._sync(base)
            if outputs[self.rank].data_ptr() != source.data_ptr():
                outputs[self.rank].copy_(source)
            route = self._choose(source.nbytes * self.size, 1, own_pieces=True, up=False).route
            self._run_tree(route, {}, outputs, base=base, up=False)
        return None

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not source.numel():
                return self._sync(base)
            if outputs is None:
                self.router.send(source, root, base).wait()
            else:
                messages = [self.router.receive(outputs[rank], rank, base) for rank in self._others]
                outputs[root].copy_(source)
                for message in messages:
                    message.wait()
        return None

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not output.numel():
                return self._sync(base)
            if sources is None:
                self.router.receive(output, root, base).wait()
            else:
                messages = [self.router.send(sources[rank], rank, base) for rank in self._others]
                output.copy_(sources[root])
                for message in messages:
                    message.wait()
        return None

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None:
        table = torch.empty(self.size, 2 * self.size, dtype=torch.int64)
        self.all_gather(list(table.view(torch.uint8).unbind(0)), own_lengths(outputs, inputs), op)
        check_lengths(table.tolist(), self.members, self.sequence)
        with self._collective(op) as base:
            others = self._others
            messages = [self.router.receive(outputs[rank], rank, base) for rank in others if outputs[rank].numel()]
            messages += [self.router.send(inputs[rank], rank, base) for rank in others if inputs[rank].numel()]
            if outputs[self.rank].numel():
                outputs[self.rank].copy_(inputs[self.rank])
            for message in messages:
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
            traffic=self.router.traffic(
                {peer: link_level(self.places[self.rank], place) for peer, place in enumerate(self.places)}
            ),
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
