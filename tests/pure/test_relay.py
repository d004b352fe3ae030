"""Routes played: by threads over a mail that does its worst, and by real processes over gloo. One sum, bit for bit."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.relay_lanes import Halves, add, held, lane, summed
from helpers.routes import LINKS, any_deal, any_places, at
from shoal.collectives.choose_algorithm import candidates
from shoal.collectives.cost_model import DirectedLink, collective_cost, links_between
from shoal.collectives.run_tree import ByteCounts, Messenger, TensorPool, TreeExecutor, TreeOptions, split_pieces
from shoal.collectives.topology import RankPlace
from shoal.collectives.trees import TreeRoute, direct, hierarchical, reroot, tree
from shoal.numerics.lanes import Span, fold

PATIENCE_SECONDS = 30.0


def tree_all_reduce(
    messenger: Messenger,
    route: TreeRoute,
    partials: Mapping[Span, torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Sums flat tensors over all ranks, into this rank's first partial sum or into `out`."""
    result = next(iter(partials.values())) if out is None else out
    pieces = {span: split_pieces(route, partial) for span, partial in partials.items()}
    TreeExecutor(messenger, route, pieces, split_pieces(route, result), TreeOptions(**options)).wait()
    return result


class Office:
    """Where the threads' messages meet. Each is copied once, at the worst possible time, and no tag is used twice.

    early    as soon as both ends are posted: a result may overwrite what is still to be read
    late     when the receiver waits, the last one first: a sender may have changed what it sent
    """

    def __init__(self, when: str, places: tuple[RankPlace, ...] | None = None) -> None:
        self.when, self.places = when, places
        self.changed = threading.Condition(threading.RLock())
        self.sent: dict[tuple[int, int, int], torch.Tensor] = {}
        self.asked: dict[tuple[int, int, int], torch.Tensor] = {}
        self.moved: set[tuple[int, int, int]] = set()
        self.carried: Counter[DirectedLink] = Counter()
        self.failed = False

    def post(
        self, box: dict[tuple[int, int, int], torch.Tensor], key: tuple[int, int, int], flat: torch.Tensor
    ) -> None:
        assert flat.dim() == 1 and flat.is_contiguous() and flat.numel()
        with self.changed:
            assert key not in box, f"{key} was used before"
            box[key] = flat
            if box is self.sent and self.places is not None:
                for wire in links_between(self.places, *key[:2]):
                    self.carried[wire] += flat.nbytes
            if self.when == "early":
                self.move(key)
            self.changed.notify_all()

    def move(self, key: tuple[int, int, int]) -> bool:
        if key not in self.moved and key in self.sent and key in self.asked:
            self.asked[key].copy_(self.sent[key])
            self.moved.add(key)
            self.changed.notify_all()
        return key in self.moved

    def finished(self, rank: int) -> int:
        with self.changed:
            return sum(rank in key[:2] for key in self.moved)

    def wait_news(self, rank: int, finished: int) -> None:
        """Moves one message to this rank, or waits until another rank has taken one from it."""

        def news() -> bool:
            if self.failed or self.finished(rank) != finished:
                return True
            return any(self.move(key) for key in sorted(self.asked.keys() - self.moved, reverse=True) if key[1] == rank)

        with self.changed:
            assert self.changed.wait_for(news, PATIENCE_SECONDS), f"rank {rank} waits for ever"
            assert not self.failed, "another rank failed"


class Errand:
    def __init__(self, office: Office, key: tuple[int, int, int]) -> None:
        self.office, self.key = office, key

    @property
    def done(self) -> bool:
        return self.key in self.office.moved

    def wait(self) -> None:
        assert self.done, "a rank waits for any message, not for a certain one"


class ThreadMail:
    def __init__(self, office: Office, rank: int, size: int) -> None:
        self.office, self.rank, self.size = office, rank, size

    @property
    def finished(self) -> int:
        return self.office.finished(self.rank)

    def wait_news(self, finished: int) -> None:
        self.office.wait_news(self.rank, finished)

    def send(self, tensor: torch.Tensor, to: int, tag: int, like: object = None) -> Errand:
        self.office.post(self.office.sent, (self.rank, to, tag), tensor)
        return Errand(self.office, (self.rank, to, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Errand:
        self.office.post(self.office.asked, (source, self.rank, tag), tensor)
        return Errand(self.office, (source, self.rank, tag))


def in_threads(office: Office, size: int, work: Callable[[ThreadMail], Any]) -> list[Any]:
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadMail(office, rank, size))
        except BaseException as error:
            errors.append(error)
            with office.changed:
                office.failed = True
                office.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# -- threads ----------------------------------------------------------------------------------------------------------


@given(any_places(), st.data())
@settings(max_examples=120)
def test_every_route_gives_the_bits_of_one_process(places: tuple[RankPlace, ...], data: st.DataObject) -> None:
    size = len(places)
    lanes, deal = data.draw(any_deal(size))
    route = data.draw(st.sampled_from([*candidates(places, exact=False)[0].values()]))
    length = data.draw(st.sampled_from([1, 64, 65, 500, 3000]))
    keep, elsewhere = data.draw(st.booleans()), data.draw(st.booleans())
    office = Office(data.draw(st.sampled_from(["early", "late"])), places)

    def work(mail: ThreadMail) -> torch.Tensor:
        parts = held(lanes, deal[mail.rank], length)
        before = {span: part.clone() for span, part in parts.items()}
        out = torch.full((length,), 7.0) if elsewhere else None
        # Chunks of 64 elements: many turns, many messages under way.
        found = tree_all_reduce(mail, route, parts, lanes=lanes, assignment=deal, out=out, keep=keep, chunk_bytes=256)
        if keep and elsewhere:
            assert all(torch.equal(before[span], part) for span, part in parts.items())
        return found

    expected = summed((0, lanes), length)
    for found in in_threads(office, size, work):
        assert torch.equal(found, expected)
    assert office.carried == collective_cost(route, places, LINKS, 4 * length, lanes=lanes, assignment=deal).traffic


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("text", ["a0 b0 a1 b1", "a0 a0 a1 b0 b0", "a0 a0 a0"])
def test_sums_that_need_not_be_exact_are_still_the_same_everywhere(text: str, when: str) -> None:
    places = at(text)
    size, length = len(places), 2000
    for route in candidates(places, exact=False)[0].values():
        office = Office(when, places)

        def work(mail: ThreadMail, route: TreeRoute = route) -> torch.Tensor:
            return tree_all_reduce(mail, route, {(mail.rank, mail.rank + 1): lane(mail.rank, length)}, ordered=False)

        first, *others = in_threads(office, size, work)
        assert all(torch.equal(first, other) for other in others)
        exact = sum(lane(rank, length).double() for rank in range(size))
        torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-2)
        assert office.carried == collective_cost(route, places, LINKS, 4 * length, ordered=False).traffic


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_combination_is_called_in_the_order_of_the_lanes(size: int) -> None:
    """A difference tells left from right."""

    def work(mail: ThreadMail) -> torch.Tensor:
        return tree_all_reduce(
            mail, direct(size), {(mail.rank, mail.rank + 1): lane(mail.rank, 300)}, combine=torch.sub
        )

    expected = summed((0, size), 300, lambda left, right: left - right)
    assert all(torch.equal(found, expected) for found in in_threads(Office("early"), size, work))


@pytest.mark.parametrize("combine", [torch.mul, torch.minimum, torch.maximum, torch.bitwise_xor])
def test_other_combinations_and_types(combine: Any) -> None:
    dtype = torch.int64 if combine is torch.bitwise_xor else torch.bfloat16

    def work(mail: ThreadMail) -> torch.Tensor:
        return tree_all_reduce(
            mail, tree(3), {(mail.rank, mail.rank + 1): lane(mail.rank, 100).to(dtype)}, combine=combine
        )

    values = [lane(rank, 100).to(dtype) for rank in range(3)]
    expected = combine(combine(values[0], values[1]), values[2])
    assert all(torch.equal(found, expected) for found in in_threads(Office("late"), 3, work))


def test_up_only_is_a_reduce_scatter() -> None:
    """Pieces of any length, each in a tensor of its own; other ranks' pieces need no room."""
    places = at("a0 b0 a0 b1 a1")
    size, lengths = 5, [70, 0, 200, 1, 64]
    route = hierarchical(places, roots=range(size))

    def work(mail: ThreadMail) -> torch.Tensor:
        parts = {(mail.rank, mail.rank + 1): [lane(10 * mail.rank, length) for length in lengths]}
        out = [torch.empty(length) if piece == mail.rank else None for piece, length in enumerate(lengths)]
        found = TreeExecutor(mail, route, parts, out, TreeOptions(down=False, keep=True, chunk_bytes=256)).wait()[
            mail.rank
        ]
        assert found is not None
        assert all(torch.equal(part, lane(10 * mail.rank, part.numel())) for part in next(iter(parts.values())))
        return found

    for rank, found in enumerate(in_threads(Office("late"), size, work)):
        parts = {(each, each + 1): lane(10 * each, lengths[rank]) for each in range(size)}
        assert torch.equal(found, fold(size, parts, add))


def test_down_only_is_an_all_gather_or_a_broadcast() -> None:
    places = at("a0 b0 a0 b1 a1")
    own = hierarchical(places, roots=range(5))
    from_three = reroot(hierarchical(places), 3)

    def work(mail: ThreadMail) -> list[torch.Tensor]:
        gathered = [lane(piece, 100) if piece == mail.rank else torch.empty(100) for piece in range(5)]
        relay = TreeExecutor(mail, own, {}, gathered, TreeOptions(up=False, chunk_bytes=256))
        flat = lane(9, 1000) if mail.rank == 3 else torch.empty(1000)
        options = TreeOptions(up=False, chunk_bytes=256, base=relay.tags)
        TreeExecutor(mail, from_three, {}, split_pieces(from_three, flat), options).wait()
        relay.wait()
        return [*gathered, flat]

    for *gathered, flat in in_threads(Office("early"), 5, work):
        assert all(torch.equal(found, lane(piece, 100)) for piece, found in enumerate(gathered))
        assert torch.equal(flat, lane(9, 1000))


def test_relays_that_are_under_way_together_do_not_mix() -> None:
    lanes, deal = 7, ((0, 1), (1, 4), (4, 6), (6, 7))
    routes = [*candidates(at("a0 b0 a0 b0"), exact=False)[0].values()]

    def work(mail: ThreadMail) -> list[torch.Tensor]:
        base, started, found = 0, [], []
        for number, route in enumerate(routes):
            parts = held(lanes, deal[mail.rank], 500 + number)
            flat = next(iter(parts.values()))
            pieces = {span: split_pieces(route, part) for span, part in parts.items()}
            options = TreeOptions(lanes=lanes, assignment=deal, base=base, chunk_bytes=256)
            relay = TreeExecutor(mail, route, pieces, split_pieces(route, flat), options)
            base += relay.tags
            started.append(relay)
            found.append(flat)
        for relay in started:
            relay.wait()
        return found

    for results in in_threads(Office("late"), 4, work):
        assert all(torch.equal(found, summed((0, lanes), 500 + number)) for number, found in enumerate(results))


class Counted(TensorPool):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def acquire(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self.made += not self._free.get((count, dtype))
        return super().acquire(count, dtype)


@pytest.mark.parametrize("keep", [True, False])
def test_memory_on_the_way_is_used_again(keep: bool) -> None:
    """Fresh memory for each of 200 chunks would cost more than adding it."""

    def work(mail: ThreadMail) -> int:
        pool, part = Counted(), lane(mail.rank, 64 * 200)
        parts = {(mail.rank, mail.rank + 1): part}
        tree_all_reduce(mail, tree(4), parts, out=torch.empty_like(part), keep=keep, chunk_bytes=256, pool=pool)
        return pool.made

    made = in_threads(Office("late"), 4, work)
    assert 0 < max(made) <= 40


@pytest.mark.parametrize("levels", [("host",), ("rack",), ("host", "rack")])
@pytest.mark.parametrize("text", ["a0 b0 a1 b1", "a0 a0 a1 b0 b0", "a0 a0"])
def test_compressed_ways_leave_the_same_bits_on_all_ranks(text: str, levels: tuple[str, ...]) -> None:
    places = at(text)
    size, length = len(places), 1200
    for route in candidates(places, exact=False)[0].values():
        office = Office("late", places)

        def work(mail: ThreadMail, route: TreeRoute = route) -> tuple[torch.Tensor, list[Hashable], ByteCounts]:
            codec, tally = Halves(), ByteCounts()
            parts = {(mail.rank, mail.rank + 1): lane(mail.rank, length).clamp(-100, 100)}
            compress = dict.fromkeys(levels, codec)
            found = tree_all_reduce(
                mail,
                route,
                parts,
                ordered=False,
                places=places,
                compress=compress,
                key="w",
                byte_counts=tally,
                chunk_bytes=512,
            )
            return found, codec.keys, tally

        results = in_threads(office, size, work)
        assert all(torch.equal(found, results[0][0]) for found, _, _ in results)
        exact = sum(lane(rank, length).clamp(-100, 100).double() for rank in range(size))
        torch.testing.assert_close(results[0][0].double(), exact, rtol=0.01, atol=0.5)
        for _, keys, _ in results:
            assert len(set(keys)) == len(keys), "what a compressor remembers has a slot for each message"
        if len(set(places)) == 1:
            assert not any(keys for _, keys, _ in results), "memory is not compressed"
        predicted = collective_cost(
            route, places, LINKS, 4 * length, ordered=False, compress=dict.fromkeys(levels, Halves())
        ).traffic
        assert office.carried == predicted
        if len({place.rack for place in places}) > 1:
            tallies = [tally for _, _, tally in results]
            sent = sum(tally.sent["rack"] for tally in tallies)
            assert sent * 2 == sum(tally.uncompressed["rack"] for tally in tallies)
            assert sent == sum(
                num for wire, num in predicted.items() if wire.level == "rack" and wire.direction == "out"
            )


def test_integers_are_never_compressed_and_exact_sums_refuse() -> None:
    places = at("a0 b0")

    def work(mail: ThreadMail) -> torch.Tensor:
        parts = {(mail.rank, mail.rank + 1): torch.full((100,), mail.rank + 1)}
        return tree_all_reduce(mail, direct(2), parts, ordered=False, places=places, compress={"host": Halves()})

    assert all(found.tolist() == [3] * 100 for found in in_threads(Office("late"), 2, work))

    def refused(mail: ThreadMail) -> None:
        with pytest.raises(ValueError, match="compressed sums are not exact"):
            tree_all_reduce(mail, direct(2), {(mail.rank, mail.rank + 1): torch.ones(9)}, compress={"host": Halves()})

    in_threads(Office("late"), 2, refused)
