"""Collectives of ranks on several hosts: routes (routes.py) played over messages, gloo between hosts, memory inside.

Every collective has tags of its own, made from its number and from what it is: ranks that do different things never
read each other's bytes. They wait, and the watch finds out why.
"""

import functools
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.collectives.choose_algorithm import AlgorithmChoice, choose_algorithm
from shoal.collectives.gloo_wait import GlooWaitPool
from shoal.collectives.handshake import GroupMember, left_midway_error
from shoal.collectives.liveness import open_peer_links
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import CommConfig
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.collectives.recv_any import AnySourceMatcher, AnySourceReceive
from shoal.collectives.reduction import SUM, Reduction, ScratchBuffers
from shoal.collectives.run_tree import ByteCounts, TensorPool, TreeExecutor, split_pieces
from shoal.collectives.shm_p2p import ANY_SOURCE, ShmMessenger
from shoal.collectives.shm_segment import ShmSegment
from shoal.collectives.single_host import check_lengths
from shoal.collectives.stats import CommStats, make_comm_stats, places_of
from shoal.errors import CollectiveError, PeerLost
from shoal.numerics.lanes import Span

USER_TAG_BITS, SIZE_BITS = 15, 14
LARGE_TAGS = 1 << (USER_TAG_BITS + SIZE_BITS)
FIRST_TAG = 1 << 30  # above those of users' own messages
TAG_BITS, TAGS_EACH = 16, 1 << 14
WHOLE_BYTES = 1 << 16  # messages below this come whole or not at all
BACKSTOP_SECONDS = 5.0  # after the deadline, which the watch keeps


class GlooMessage:
    """A message through gloo. `what` and `tag` where it is a user's own: it may be waited for at any time."""

    error: CollectiveError | None = None

    def __init__(
        self,
        router: "MessageRouter",
        work: Any,
        peer: int,
        num_bytes: int,
        op: CollectiveOp | None = None,
        tag: int = 0,
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
                assert self._router.active_monitor.error is not None
                raise self._router.active_monitor.error
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._router.explain_loss(self.source, error) from None
        self.done = True
        self._router.completed += 1


class MessageRouter:
    """Messages to any rank: through shared memory to those of this host, through gloo to others."""

    def __init__(
        self, gloo: Any, members: Sequence[GroupMember], rank: int, messenger: ShmMessenger | None, limit: float
    ) -> None:
        self.rank, self.size = rank, len(members)
        self.gloo, self.messenger, self.limit = gloo, messenger, limit
        self.completed = 0  # letters that have arrived
        self.op, self.op_number = CollectiveOp("none"), 0  # the collective that the letters belong to
        self.monitor: PeerMonitor | None = None
        self.wait_pool = GlooWaitPool(lambda: self.active_monitor.error is not None)
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
            return self.messenger.receive(
                tensor.view(torch.uint8), self._local_ranks[source], tag, self.op, self.op_number
            )
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
        """Ends every wait of this rank: gloo closes all connections when one wait runs out of time."""
        if self.messenger is not None:
            self.messenger.segment.fail(error)
        for other in range(self.size):
            if other != self.rank:
                with suppress(RuntimeError):  # closed already, or closed now
                    self.gloo.recv([torch.empty(1)], other, FIRST_TAG - 1).wait(timedelta(milliseconds=1))


class MultiHostTransport:
    def __init__(
        self,
        store: Store,
        members: list[GroupMember],
        rank: int,
        segment: ShmSegment | None,
        timeout: timedelta,
        config: CommConfig,
    ) -> None:
        self.members, self.rank, self.size = members, rank, len(members)
        self.places = places_of(members)
        self.sequence = 0
        self.config = config.restrict_to(self.places)
        self.move_bytes, self.reduce_bytes = ByteCounts(), ByteCounts()  # of moves, and of all-reduce and merge
        self._largest: tuple[int, AlgorithmChoice] | None = None  # of all sums: its bytes, and how it travelled last
        wires = open_peer_links(store, members, rank, timeout)
        try:
            self._gloo = _open_gloo(PrefixStore("gloo/", store), members, rank, timeout)
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise
        # Ranks that share no memory (there is no arena) are hosts of their own, as far as routes go.
        self._segment = segment if segment is not None and segment.size > 1 else None
        limit = timeout.total_seconds()
        mail = ShmMessenger(self._segment) if self._segment is not None else None
        self.router = MessageRouter(self._gloo, members, rank, mail, limit)
        self.monitor = PeerMonitor(members, rank, wires, limit, self.router.progress, self.router.abort_waits)
        self.router.monitor = self.monitor
        self._any_source = AnySourceMatcher(self.monitor)
        self.set_timeout(limit)
        self._pool, self._scratch = TensorPool(), ScratchBuffers()
        self._choices: dict[Any, AlgorithmChoice] = {}

    # -- order ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _collective(self, op: CollectiveOp) -> Iterator[int]:
        """One collective. Gives the first of its tags."""
        self.sequence += 1
        self.monitor.begin(op, self.sequence)
        self.router.op, self.router.op_number = op, self.sequence
        try:
            if self._segment is not None:
                self._segment.begin(op)
            yield self._tag(op)
        except CollectiveError as error:
            raise self.monitor.fail(error) from None
        except BaseException as error:
            self.monitor.fail(left_midway_error(self.members[self.rank], f"{op}, number {self.sequence}", error))
            raise
        self.monitor.end()
        if self._segment is not None:
            self._segment.end()

    def _tag(self, op: CollectiveOp) -> int:
        mark = zlib.crc32(op.record, self.sequence) & ((1 << TAG_BITS) - 1)
        return FIRST_TAG + mark * TAGS_EACH

    def _choose(self, num_bytes: int, itemsize: int, compressed: bool = False, **shape: Any) -> AlgorithmChoice:
        key = (num_bytes, itemsize, compressed, tuple(shape.items()))
        if key not in self._choices:
            exact = not compressed
            self._choices[key] = choose_algorithm(
                self.places,
                self.config.links,
                num_bytes,
                element_bytes=itemsize,
                exact=exact and not self.config.inexact,
                algorithm=self.config.algorithm_for(self.size, **shape),
                compress=self.config.compress if compressed else None,
                **shape,
            )
        return self._choices[key]

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = reduction.prepare(flat)
            self._reduce_into({(self.rank, self.rank + 1): work}, work, reduction, base, (op.dtype, op.count))
            reduction.finish(work, self.size)
            if work.data_ptr() != flat.data_ptr():
                flat.copy_(work.view(flat.dtype))

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> Tensor:
        """The sum of partial sums, by lanes, in the memory of this rank's first part. `key` names the tensor; without
        a name it is not compressed."""
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
        TreeExecutor(
            self.router,
            choice.route,
            {span: split_pieces(choice.route, part) for span, part in partials.items()},
            split_pieces(choice.route, result),
            base=base,
            combine=reduction.combine,
            ordered=choice.ordered,
            places=self.places,
            compress=self.config.compress if compressed else None,
            key=key,
            byte_counts=self.reduce_bytes,
            pool=self._pool,
            **lanes,
        ).wait()
        return None

    def _sync(self, base: int) -> None:
        """Everybody is here."""
        token = torch.zeros(1, dtype=torch.uint8)
        route = self._choose(1, 1).route
        pieces = split_pieces(route, token)
        TreeExecutor(
            self.router, route, {(self.rank, self.rank + 1): pieces}, pieces, base=base, pool=self._pool
        ).wait()

    def barrier(self, name: str = "barrier") -> None:
        with self._collective(CollectiveOp(name)) as base:
            self._sync(base)

    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = reduction.prepare(flat)
            if not work.numel():
                return self._sync(base)
            choice = self._choose(work.nbytes, work.element_size(), root=root, down=False)
            pieces = split_pieces(choice.route, work)
            TreeExecutor(
                self.router,
                choice.route,
                {(self.rank, self.rank + 1): pieces},
                pieces if self.rank == root else [None] * len(pieces),
                base=base,
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=self.rank != root,
                places=self.places,
                byte_counts=self.move_bytes,
                pool=self._pool,
            ).wait()
            if self.rank == root:
                reduction.finish(work, self.size)
                if work.data_ptr() != flat.data_ptr():
                    flat.copy_(work.view(flat.dtype))
        return None

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            work = [reduction.prepare(each) for each in inputs]
            target = output if reduction.dtype is None else output.view(reduction.dtype)
            total = sum(each.nbytes for each in work)
            if not total:
                return self._sync(base)
            choice = self._choose(total, target.element_size(), own_pieces=True, down=False)
            TreeExecutor(
                self.router,
                choice.route,
                {(self.rank, self.rank + 1): work},
                [target if rank == self.rank else None for rank in range(self.size)],
                base=base,
                down=False,
                combine=reduction.combine,
                ordered=choice.ordered,
                keep=True,
                places=self.places,
                byte_counts=self.move_bytes,
                pool=self._pool,
            ).wait()
            reduction.finish(target, self.size)
        return None

    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor:
        everyone = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
        self.all_gather(list(everyone.view(torch.uint8).unbind(0)), flat.view(torch.uint8), op)
        result = torch.zeros_like(flat)
        counted = self.rank if exclusive else self.rank + 1
        if counted:
            reduction.fold(list(everyone[:counted].unbind(0)), result, self._scratch)
        return result

    # -- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not flat.numel():
                return self._sync(base)
            route = self._choose(flat.nbytes, 1, root=root, up=False).route
            self._broadcast_down(route, split_pieces(route, flat), base)
        return None

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not source.numel():
                return self._sync(base)
            if outputs[self.rank].data_ptr() != source.data_ptr():
                outputs[self.rank].copy_(source)
            route = self._choose(source.nbytes * self.size, 1, own_pieces=True, up=False).route
            self._broadcast_down(route, list(outputs), base)
        return None

    def _broadcast_down(self, route: Any, pieces: list[Tensor], base: int) -> None:
        TreeExecutor(
            self.router,
            route,
            {},
            pieces,
            base=base,
            up=False,
            places=self.places,
            byte_counts=self.move_bytes,
            pool=self._pool,
        ).wait()

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not source.numel():
                return self._sync(base)
            if outputs is None:
                self.router.send(source, root, base).wait()
            else:
                others = [rank for rank in range(self.size) if rank != root]
                coming = [self.router.receive(outputs[rank], rank, base) for rank in others]
                outputs[root].copy_(source)
                for letter in coming:
                    letter.wait()
        return None

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None:
        with self._collective(op) as base:
            if not output.numel():
                return self._sync(base)
            if sources is None:
                self.router.receive(output, root, base).wait()
            else:
                others = [rank for rank in range(self.size) if rank != root]
                going = [self.router.send(sources[rank], rank, base) for rank in others]
                output.copy_(sources[root])
                for letter in going:
                    letter.wait()
        return None

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None:
        lengths = torch.tensor([*[each.numel() for each in inputs], *[each.numel() for each in outputs]])
        table = torch.empty(self.size, 2 * self.size, dtype=torch.int64)
        self.all_gather(list(table.view(torch.uint8).unbind(0)), lengths.view(torch.uint8), op)
        check_lengths(table.tolist(), self.members, self.sequence)
        with self._collective(op) as base:
            others = [(self.rank + step) % self.size for step in range(1, self.size)]
            letters = [self.router.receive(outputs[rank], rank, base) for rank in others if outputs[rank].numel()]
            letters += [self.router.send(inputs[rank], rank, base) for rank in others if inputs[rank].numel()]
            if outputs[self.rank].numel():
                outputs[self.rank].copy_(inputs[self.rank])
            for letter in letters:
                letter.wait()

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> GlooMessage:
        """Users' own messages all go through gloo: a receive from anyone must see those of every host."""
        kind = (tag, flat.numel())
        letter = self.router.begin(lambda: self._gloo.send([flat], to, user_tag(*kind)), to, flat.nbytes, op, tag)
        self._any_source.record_send(to, kind)
        return letter

    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> GlooMessage | AnySourceReceive:
        kind = (tag, flat.numel())

        def begin(source: int) -> GlooMessage:
            start = functools.partial(self._gloo.recv, [flat], source, user_tag(*kind))
            return self.router.begin(start, source, flat.nbytes, op, tag)

        if source != ANY_SOURCE:
            self._any_source.record_receive(source, kind)
            return begin(source)
        receive = AnySourceReceive(self._any_source, op, kind, begin)
        self._any_source.add_receive(receive)
        return receive

    # -- the end --------------------------------------------------------------------------------------------------

    def comm_stats(self) -> CommStats:
        """How the largest sum travelled, and what all of them came to on this rank."""
        way, reason, asked = "messages", "no sum has travelled yet", self.config.algorithm or ""
        if self._largest is not None:
            choice = self._largest[1]
            way, reason = choice.name, choice.reason
            if asked in choice.refused:
                reason = f"{choice.refused[asked]}; {reason}"
        return make_comm_stats(
            way,
            self.places,
            self.members[0].options,
            reason=reason,
            exact=self.config.exact,
            sent_bytes=dict(self.reduce_bytes.sent),
            uncompressed_bytes=dict(self.reduce_bytes.uncompressed),
            squared_errors={
                where: (each.stats.squared_error, each.stats.squared_values)
                for where, each in self.config.compress.items()
            },
        )

    def set_timeout(self, seconds: float) -> None:
        """The watch keeps the deadline, since it can say who is late; gloo and the arena only if it cannot."""
        self.monitor.limit = self.router.limit = seconds
        if self._segment is not None:
            self._segment.timeout = seconds + BACKSTOP_SECONDS

    def abandon(self, error: BaseException) -> None:
        return  # `_doing` has seen to it

    def announce_exit(self, cause: CollectiveError) -> None:
        """This process is about to end, and the others are told why."""
        self.monitor.fail(cause)

    def status(self) -> tuple[str, list[int], float] | None:
        return self.monitor.status()

    def failure(self) -> CollectiveError | None:
        return self.monitor.error

    def ended_ranks(self) -> list[int]:
        return self.monitor.ended_ranks()

    def close(self) -> None:
        self.monitor.close()
        if self._segment is not None:
            self._segment.leave()
        if self.router.messenger is not None:
            self.router.messenger.close()
        self.router.wait_pool.close()
        self._gloo.shutdown()


def user_tag(tag: int, num_bytes: int) -> int:
    """The tag under which a user's message travels. Those of different sizes do not meet: gloo would end the process.
    Tags that are too large for that travel as they are."""
    if 0 <= tag < 1 << USER_TAG_BITS:
        return zlib.crc32(num_bytes.to_bytes(8, "little")) >> (32 - SIZE_BITS) << USER_TAG_BITS | tag
    return LARGE_TAGS | tag & (LARGE_TAGS - 1)


def _describe_error(error: Exception) -> str:
    text = str(error).split("] ", 1)[-1].splitlines()[0]
    if "Connection closed" in text or "Connection reset" in text or "pair closure" in text or "Broken pipe" in text:
        return "the connection to it was closed"
    if "imed out" in text:
        return "no sign of it until the deadline"
    return text


def _open_gloo(store: Store, members: Sequence[GroupMember], rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=members[rank].address)]
    options._timeout = timeout
    options._threads = 2
    try:
        return dist.ProcessGroupGloo(store, rank, len(members), options)
    except RuntimeError as error:
        raise PeerLost(f"{members[rank]} could not connect to the others: {_describe_error(error)}") from None
