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

from shoal.collectives.choose_algorithm import Choice, choose
from shoal.collectives.gloo_wait import Waiters
from shoal.collectives.handshake import Member, stumbled
from shoal.collectives.liveness import open_wires
from shoal.collectives.operation import Operation
from shoal.collectives.options import Traffic
from shoal.collectives.peer_monitor import Watch
from shoal.collectives.recv_any import Anyone, Receive
from shoal.collectives.reduction import SUM, Reduction, Scratch
from shoal.collectives.run_tree import Pool, Relay, Tally, pieces_of
from shoal.collectives.shm_p2p import ANYONE, Mail
from shoal.collectives.shm_segment import Arena
from shoal.collectives.single_host import check_lengths
from shoal.collectives.stats import Travel, places_of, travel
from shoal.errors import CollectiveError, PeerLost
from shoal.numerics.lanes import Span

USERS_TAG_BITS, SIZE_BITS = 15, 14
LARGE_TAGS = 1 << (USERS_TAG_BITS + SIZE_BITS)
FIRST_TAG = 1 << 30  # above those of users' own messages
TAG_BITS, TAGS_EACH = 16, 1 << 14
WHOLE_BYTES = 1 << 16  # messages below this come whole or not at all
BACKSTOP_SECONDS = 5.0  # after the deadline, which the watch keeps


class Letter:
    """A message through gloo. `what` and `tag` where it is a user's own: it may be waited for at any time."""

    error: CollectiveError | None = None

    def __init__(
        self, post: "Post", work: Any, peer: int, num_bytes: int, what: Operation | None = None, tag: int = 0
    ) -> None:
        self._post, self._work, self.source, self._num_bytes = post, work, peer, num_bytes
        self._what, self._tag = what, tag
        self.done = False

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        if self.done:
            return
        if self._what is None:
            self._await(self._post.limit)
            return
        try:
            with self._post.watching.message(self._what, self._tag, timeout):
                self._await(timeout or self._post.limit)
        except CollectiveError as error:
            self.error, self.done = error, True
            raise

    def _await(self, limit: float) -> None:
        work, timeout = self._work, timedelta(seconds=limit + BACKSTOP_SECONDS)
        try:
            if self._num_bytes < WHOLE_BYTES:
                work.wait(timeout)
            elif not self._post.waiters.wait(lambda: work.wait(timeout)):
                assert self._post.watching.error is not None
                raise self._post.watching.error
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._post.lost(self.source, error) from None
        self.done = True
        self._post.moved += 1


class Post:
    """Messages to any rank: through shared memory to those of this host, through gloo to others."""

    def __init__(self, gloo: Any, members: Sequence[Member], rank: int, mail: Mail | None, limit: float) -> None:
        self.rank, self.size = rank, len(members)
        self.gloo, self.mail, self.limit = gloo, mail, limit
        self.moved = 0  # letters that have arrived
        self.what, self.number = Operation("none"), 0  # the collective that the letters belong to
        self.watch: Watch | None = None
        self.waiters = Waiters(lambda: self.watching.error is not None)
        local = mail.arena.members if mail is not None else []
        self._inside = {member.rank: place for place, member in enumerate(local)}

    @property
    def watching(self) -> Watch:
        assert self.watch is not None
        return self.watch

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        if self.mail is not None and to in self._inside:
            return self.mail.send(tensor.view(torch.uint8), self._inside[to], tag, self.what, self.number)
        return self.begin(lambda: self.gloo.send([tensor], to, tag), to, tensor.nbytes)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        if self.mail is not None and source in self._inside:
            return self.mail.receive(tensor.view(torch.uint8), self._inside[source], tag, self.what, self.number)
        return self.begin(lambda: self.gloo.recv([tensor], source, tag), source, tensor.nbytes)

    def begin(
        self, start: Callable[[], Any], peer: int, num_bytes: int, what: Operation | None = None, tag: int = 0
    ) -> Letter:
        try:
            return Letter(self, start(), peer, num_bytes, what, tag)
        except RuntimeError as error:
            raise self.lost(peer, error) from None

    def progress(self) -> int:
        return self.moved + (self.mail.moved if self.mail is not None else 0)

    def lost(self, peer: int, error: Exception) -> CollectiveError:
        return self.watching.explain(peer, _in_words(error))

    def trip(self, error: CollectiveError) -> None:
        """Ends every wait of this rank: gloo closes all connections when one wait runs out of time."""
        if self.mail is not None:
            self.mail.arena.fail(error)
        for other in range(self.size):
            if other != self.rank:
                with suppress(RuntimeError):  # closed already, or closed now
                    self.gloo.recv([torch.empty(1)], other, FIRST_TAG - 1).wait(timedelta(milliseconds=1))


class Across:
    def __init__(
        self, store: Store, members: list[Member], rank: int, arena: Arena | None, timeout: timedelta, traffic: Traffic
    ) -> None:
        self.members, self.rank, self.size = members, rank, len(members)
        self.places = places_of(members)
        self.sequence = 0
        self.traffic = traffic.between(self.places)
        self.tally, self.sums = Tally(), Tally()  # of moves, and of all-reduce and merge
        self._largest: tuple[int, Choice] | None = None  # of all sums: its bytes, and how it travelled last
        wires = open_wires(store, members, rank, timeout)
        try:
            self._gloo = _open_gloo(PrefixStore("gloo/", store), members, rank, timeout)
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise
        # Ranks that share no memory (there is no arena) are hosts of their own, as far as routes go.
        self._arena = arena if arena is not None and arena.size > 1 else None
        limit = timeout.total_seconds()
        mail = Mail(self._arena) if self._arena is not None else None
        self.post = Post(self._gloo, members, rank, mail, limit)
        self.watch = Watch(members, rank, wires, limit, self.post.progress, self.post.trip)
        self.post.watch = self.watch
        self._anyone = Anyone(self.watch)
        self.set_timeout(limit)
        self._pool, self._scratch = Pool(), Scratch()
        self._choices: dict[Any, Choice] = {}

    # -- order ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _doing(self, what: Operation) -> Iterator[int]:
        """One collective. Gives the first of its tags."""
        self.sequence += 1
        self.watch.begin(what, self.sequence)
        self.post.what, self.post.number = what, self.sequence
        try:
            if self._arena is not None:
                self._arena.begin(what)
            yield self._tag(what)
        except CollectiveError as error:
            raise self.watch.fail(error) from None
        except BaseException as error:
            self.watch.fail(stumbled(self.members[self.rank], f"{what}, number {self.sequence}", error))
            raise
        self.watch.end()
        if self._arena is not None:
            self._arena.end()

    def _tag(self, what: Operation) -> int:
        mark = zlib.crc32(what.record, self.sequence) & ((1 << TAG_BITS) - 1)
        return FIRST_TAG + mark * TAGS_EACH

    def _choose(self, num_bytes: int, itemsize: int, compressed: bool = False, **shape: Any) -> Choice:
        key = (num_bytes, itemsize, compressed, tuple(shape.items()))
        if key not in self._choices:
            exact = not compressed
            self._choices[key] = choose(
                self.places,
                self.traffic.links,
                num_bytes,
                element_bytes=itemsize,
                exact=exact and not self.traffic.inexact,
                algorithm=self.traffic.fitting(self.size, **shape),
                compress=self.traffic.compress if compressed else None,
                **shape,
            )
        return self._choices[key]

    # -- reductions -----------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, how: Reduction, what: Operation) -> None:
        with self._doing(what) as base:
            work = how.before(flat)
            self._sum({(self.rank, self.rank + 1): work}, work, how, base, (what.dtype, what.count))
            how.after(work, self.size)
            if work.data_ptr() != flat.data_ptr():
                flat.copy_(work.view(flat.dtype))

    def merge(
        self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor], key: Hashable, what: Operation
    ) -> Tensor:
        """The sum of partial sums, by lanes, in the memory of this rank's first part. `key` names the tensor; without
        a name it is not compressed."""
        with self._doing(what) as base:
            result = next(iter(parts.values()))
            self._sum(parts, result, SUM, base, key, lanes=lanes, deal=tuple(deal))
        return result

    def _sum(
        self,
        parts: Mapping[Span, Tensor],
        result: Tensor,
        how: Reduction,
        base: int,
        key: Hashable,
        **lanes: Any,
    ) -> None:
        if not result.numel():
            return self._meet(base)
        adding = result.is_floating_point() and how.combine is torch.add
        compressed = bool(self.traffic.compress) and adding and key is not None
        choice = self._choose(result.nbytes, result.element_size(), compressed, **lanes)
        if self._largest is None or result.nbytes >= self._largest[0]:
            self._largest = result.nbytes, choice
        Relay(
            self.post,
            choice.route,
            {span: pieces_of(choice.route, part) for span, part in parts.items()},
            pieces_of(choice.route, result),
            base=base,
            combine=how.combine,
            ordered=choice.ordered,
            places=self.places,
            compress=self.traffic.compress if compressed else None,
            key=key,
            tally=self.sums,
            pool=self._pool,
            **lanes,
        ).wait()
        return None

    def _meet(self, base: int) -> None:
        """Everybody is here."""
        token = torch.zeros(1, dtype=torch.uint8)
        route = self._choose(1, 1).route
        pieces = pieces_of(route, token)
        Relay(self.post, route, {(self.rank, self.rank + 1): pieces}, pieces, base=base, pool=self._pool).wait()

    def barrier(self, name: str = "barrier") -> None:
        with self._doing(Operation(name)) as base:
            self._meet(base)

    def reduce(self, flat: Tensor, root: int, how: Reduction, what: Operation) -> None:
        with self._doing(what) as base:
            work = how.before(flat)
            if not work.numel():
                return self._meet(base)
            choice = self._choose(work.nbytes, work.element_size(), root=root, down=False)
            pieces = pieces_of(choice.route, work)
            Relay(
                self.post,
                choice.route,
                {(self.rank, self.rank + 1): pieces},
                pieces if self.rank == root else [None] * len(pieces),
                base=base,
                down=False,
                combine=how.combine,
                ordered=choice.ordered,
                keep=self.rank != root,
                places=self.places,
                tally=self.tally,
                pool=self._pool,
            ).wait()
            if self.rank == root:
                how.after(work, self.size)
                if work.data_ptr() != flat.data_ptr():
                    flat.copy_(work.view(flat.dtype))
        return None

    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, how: Reduction, what: Operation) -> None:
        with self._doing(what) as base:
            work = [how.before(each) for each in inputs]
            target = output if how.dtype is None else output.view(how.dtype)
            total = sum(each.nbytes for each in work)
            if not total:
                return self._meet(base)
            choice = self._choose(total, target.element_size(), own_pieces=True, down=False)
            Relay(
                self.post,
                choice.route,
                {(self.rank, self.rank + 1): work},
                [target if rank == self.rank else None for rank in range(self.size)],
                base=base,
                down=False,
                combine=how.combine,
                ordered=choice.ordered,
                keep=True,
                places=self.places,
                tally=self.tally,
                pool=self._pool,
            ).wait()
            how.after(target, self.size)
        return None

    def prefix_sum(self, flat: Tensor, how: Reduction, what: Operation, exclusive: bool) -> Tensor:
        everyone = torch.empty(self.size, flat.numel(), dtype=flat.dtype)
        self.all_gather(list(everyone.view(torch.uint8).unbind(0)), flat.view(torch.uint8), what)
        result = torch.zeros_like(flat)
        counted = self.rank if exclusive else self.rank + 1
        if counted:
            how.fold(list(everyone[:counted].unbind(0)), result, self._scratch)
        return result

    # -- moves ----------------------------------------------------------------------------------------------------

    def broadcast(self, flat: Tensor, root: int, what: Operation) -> None:
        with self._doing(what) as base:
            if not flat.numel():
                return self._meet(base)
            route = self._choose(flat.nbytes, 1, root=root, up=False).route
            self._down(route, pieces_of(route, flat), base)
        return None

    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, what: Operation) -> None:
        with self._doing(what) as base:
            if not source.numel():
                return self._meet(base)
            if outputs[self.rank].data_ptr() != source.data_ptr():
                outputs[self.rank].copy_(source)
            route = self._choose(source.nbytes * self.size, 1, own_pieces=True, up=False).route
            self._down(route, list(outputs), base)
        return None

    def _down(self, route: Any, pieces: list[Tensor], base: int) -> None:
        Relay(
            self.post, route, {}, pieces, base=base, up=False, places=self.places, tally=self.tally, pool=self._pool
        ).wait()

    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, what: Operation) -> None:
        with self._doing(what) as base:
            if not source.numel():
                return self._meet(base)
            if outputs is None:
                self.post.send(source, root, base).wait()
            else:
                others = [rank for rank in range(self.size) if rank != root]
                coming = [self.post.receive(outputs[rank], rank, base) for rank in others]
                outputs[root].copy_(source)
                for letter in coming:
                    letter.wait()
        return None

    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, what: Operation) -> None:
        with self._doing(what) as base:
            if not output.numel():
                return self._meet(base)
            if sources is None:
                self.post.receive(output, root, base).wait()
            else:
                others = [rank for rank in range(self.size) if rank != root]
                going = [self.post.send(sources[rank], rank, base) for rank in others]
                output.copy_(sources[root])
                for letter in going:
                    letter.wait()
        return None

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: Operation) -> None:
        lengths = torch.tensor([*[each.numel() for each in inputs], *[each.numel() for each in outputs]])
        table = torch.empty(self.size, 2 * self.size, dtype=torch.int64)
        self.all_gather(list(table.view(torch.uint8).unbind(0)), lengths.view(torch.uint8), what)
        check_lengths(table.tolist(), self.members, self.sequence)
        with self._doing(what) as base:
            others = [(self.rank + step) % self.size for step in range(1, self.size)]
            letters = [self.post.receive(outputs[rank], rank, base) for rank in others if outputs[rank].numel()]
            letters += [self.post.send(inputs[rank], rank, base) for rank in others if inputs[rank].numel()]
            if outputs[self.rank].numel():
                outputs[self.rank].copy_(inputs[self.rank])
            for letter in letters:
                letter.wait()

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, flat: Tensor, to: int, tag: int, what: Operation) -> Letter:
        """Users' own messages all go through gloo: a receive from anyone must see those of every host."""
        kind = (tag, flat.numel())
        letter = self.post.begin(lambda: self._gloo.send([flat], to, users_tag(*kind)), to, flat.nbytes, what, tag)
        self._anyone.send(to, kind)
        return letter

    def receive(self, flat: Tensor, source: int, tag: int, what: Operation) -> Letter | Receive:
        kind = (tag, flat.numel())

        def begin(source: int) -> Letter:
            start = functools.partial(self._gloo.recv, [flat], source, users_tag(*kind))
            return self.post.begin(start, source, flat.nbytes, what, tag)

        if source != ANYONE:
            self._anyone.take(source, kind)
            return begin(source)
        receive = Receive(self._anyone, what, kind, begin)
        self._anyone.receive(receive)
        return receive

    # -- the end --------------------------------------------------------------------------------------------------

    def how(self) -> Travel:
        """How the largest sum travelled, and what all of them came to on this rank."""
        way, reason, asked = "messages", "no sum has travelled yet", self.traffic.algorithm or ""
        if self._largest is not None:
            choice = self._largest[1]
            way, reason = choice.name, choice.reason
            if asked in choice.refused:
                reason = f"{choice.refused[asked]}; {reason}"
        return travel(
            way,
            self.places,
            self.members[0].wish,
            reason=reason,
            exact=self.traffic.exact,
            sent=dict(self.sums.sent),
            plain=dict(self.sums.plain),
            errors={
                where: (each.meter.squared_error, each.meter.squared_values)
                for where, each in self.traffic.compress.items()
            },
        )

    def set_timeout(self, seconds: float) -> None:
        """The watch keeps the deadline, since it can say who is late; gloo and the arena only if it cannot."""
        self.watch.limit = self.post.limit = seconds
        if self._arena is not None:
            self._arena.timeout = seconds + BACKSTOP_SECONDS

    def abandon(self, error: BaseException) -> None:
        return  # `_doing` has seen to it

    def depart(self, cause: CollectiveError) -> None:
        """This process is about to end, and the others are told why."""
        self.watch.fail(cause)

    def doing(self) -> tuple[str, list[int], float] | None:
        return self.watch.doing()

    def failure(self) -> CollectiveError | None:
        return self.watch.error

    def ended(self) -> list[int]:
        return self.watch.ended()

    def close(self) -> None:
        self.watch.close()
        if self._arena is not None:
            self._arena.leave()
        if self.post.mail is not None:
            self.post.mail.close()
        self.post.waiters.close()
        self._gloo.shutdown()


def users_tag(tag: int, num_bytes: int) -> int:
    """The tag under which a user's message travels. Those of different sizes do not meet: gloo would end the process.
    Tags that are too large for that travel as they are."""
    if 0 <= tag < 1 << USERS_TAG_BITS:
        return zlib.crc32(num_bytes.to_bytes(8, "little")) >> (32 - SIZE_BITS) << USERS_TAG_BITS | tag
    return LARGE_TAGS | tag & (LARGE_TAGS - 1)


def _in_words(error: Exception) -> str:
    text = str(error).split("] ", 1)[-1].splitlines()[0]
    if "Connection closed" in text or "Connection reset" in text or "pair closure" in text or "Broken pipe" in text:
        return "the connection to it was closed"
    if "imed out" in text:
        return "no sign of it until the deadline"
    return text


def _open_gloo(store: Store, members: Sequence[Member], rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=members[rank].address)]
    options._timeout = timeout
    options._threads = 2
    try:
        return dist.ProcessGroupGloo(store, rank, len(members), options)
    except RuntimeError as error:
        raise PeerLost(f"{members[rank]} could not connect to the others: {_in_words(error)}") from None
