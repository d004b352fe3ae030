"""Sparse tables: rows from (seed, row), torch's bits, eviction, snapshots; the module that looks rows up; the cache."""

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from helpers.sparse_tables import DIM, table
from shoal.errors import InputError
from shoal.paramserver.client import ParameterClient
from shoal.paramserver.embedding import Embedding, tables_of
from shoal.paramserver.growable_memory import GrowableRows
from shoal.paramserver.hot_rows import HotRowTracker
from shoal.paramserver.messages import SparseSpec, StatsRequest
from shoal.paramserver.optimizers import make_optimizer
from shoal.paramserver.row_cache import RowCache, wait_result
from shoal.paramserver.row_index import DirectRowIndex, HashRowIndex
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sparse_table import RowError, SparseTable, combine, initial_rows


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- new rows ---------------------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_on_any_shards_and_in_any_batch() -> None:
    whole = table().pull(torch.arange(50))
    for shards in (1, 2, 3, 7):
        for shard in range(shards):
            part = table(shard=shard, shards=shards)
            own = torch.arange(shard, 50, shards)
            assert torch.equal(part.pull(own), whole[own])
            assert torch.equal(part.pull(own[1:2]), whole[own[1:2]])
            part.push(own[:2], torch.zeros(2, DIM), 1)
            assert torch.equal(part.pull(own), whole[own]), "held or not, it is the same"


def test_these_very_bits() -> None:
    """Whole numbers, written down once more: what a run began with can be made again by any later version."""
    mask = (1 << 64) - 1

    def mixed(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
        return word ^ (word >> 31)

    factor = np.float32(2.0 / math.sqrt(((1 << 32) - 1) / 3))
    expected = []
    for row in (0, 1, 123_456_789_012):
        seed = mixed((row + mixed(7)) & mask)
        for column in range(4):
            word = mixed((seed + (column + 1) * 0x9E3779B97F4A7C15) & mask)
            total = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
            expected.append(np.float32(total - 131070) * factor)
    spec = SparseSpec(rows=1 << 40, dim=4, seed=7, scale=2.0)
    assert initial_rows(np.array([0, 1, 123_456_789_012]), spec).view(-1).tolist() == expected


def test_new_rows_are_near_to_normal_and_independent() -> None:
    rows = initial_rows(np.arange(5000), SparseSpec(rows=5000, dim=64, seed=1, scale=0.5))
    assert rows.mean().abs() < 0.005 and rows.std() == pytest.approx(0.5, rel=0.01)
    inside = (rows.abs() < 0.5).float().mean().item()
    assert inside == pytest.approx(0.683, abs=0.02), "as many within one standard deviation"
    off = torch.corrcoef(rows.T) - torch.eye(64)
    assert off.abs().max() < 0.08
    other = initial_rows(np.arange(5000), SparseSpec(rows=5000, dim=64, seed=2, scale=0.5))
    assert torch.corrcoef(torch.stack([rows.view(-1), other.view(-1)]))[0, 1].abs() < 0.01
    assert not initial_rows(np.arange(3), SparseSpec(rows=3, dim=2, scale=0)).any()


def test_a_pull_makes_nothing_and_a_push_does() -> None:
    held = table()
    held.pull(torch.arange(50))
    assert held.num_rows == 0 and held.nbytes == 0
    held.push(ids(4, 9), torch.ones(2, DIM), 1)
    assert held.num_rows == 2 and held.nbytes == 2 * DIM * 4


# -- the optimizers ---------------------------------------------------------------------------------------------------


SETTINGS: dict[str, list[dict[str, float | bool]]] = {
    "sgd": [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.03}],
    "momentum": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.01}],
    "adam": [{"lr": 0.01}, {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.02}],
    "adamw": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.2}],
    "adagrad": [{"lr": 0.1}, {"lr": 0.1, "initial": 0.2, "eps": 1e-8, "weight_decay": 0.02}],
}
CASES = [(name, each) for name, some in SETTINGS.items() for each in some]


def dense(held: SparseTable, settings: Mapping[str, float | bool]) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(held.pull(torch.arange(held.spec.rows)))
    return weight, make_optimizer(held.spec.optimizer, settings, [("weight", weight)])


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_touched_in_every_step_have_torchs_bits(name: str, settings: dict[str, float], dtype: str) -> None:
    held = table(optimizer=name, settings=settings, dtype=dtype, rows=300)
    weight, optimizer = dense(held, settings)
    for step in range(30):
        gradient = noise(300, DIM, seed=step).to(weight.dtype)
        weight.grad = gradient.clone()
        optimizer.step()
        for start in (0, 100, 101):  # in parts, as they come from several requests
            stop = {0: 100, 100: 101, 101: 300}[start]
            held.push(torch.arange(start, stop), gradient[start:stop], step)
    assert torch.equal(held.pull(torch.arange(300)), weight)


@pytest.mark.parametrize(("name", "settings"), [("sgd", {"lr": 0.1}), ("adagrad", {"lr": 0.1, "initial": 0.1})])
def test_sgd_and_adagrad_are_dense_also_where_rows_are_left_out(name: str, settings: dict[str, float]) -> None:
    held = table(optimizer=name, settings=settings)
    weight, optimizer = dense(held, settings)
    for step in range(20):
        some = torch.randperm(50, generator=torch.Generator().manual_seed(step))[:7].sort()[0]
        gradient = noise(7, DIM, seed=step)
        weight.grad = torch.zeros(50, DIM).index_copy(0, some, gradient)
        optimizer.step()
        held.push(some, gradient, step)
    assert torch.equal(held.pull(torch.arange(50)), weight)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_lazy_row_is_a_tensor_of_its_own(name: str) -> None:
    """It stands still while it is not touched, and its steps are its own."""
    held = table(optimizer=name, settings={"lr": 0.05})
    alone = {row: nn.Parameter(held.pull(ids(row))) for row in (3, 8)}
    optimizers = {row: make_optimizer(name, {"lr": 0.05}, [("row", each)]) for row, each in alone.items()}
    for step in range(12):
        touched = ids(3, 8) if step % 3 == 0 else ids(3)
        gradient = noise(len(touched), DIM, seed=step)
        for row, part in zip(touched.tolist(), gradient, strict=True):
            alone[row].grad = part[None].clone()
            optimizers[row].step()
        held.push(touched, gradient, step)
    assert torch.equal(held.pull(ids(3, 8)), torch.cat([alone[3], alone[8]]).detach())


@pytest.mark.parametrize("dim", [1, 2, 7, 64])
def test_row_adagrad_has_one_sum_for_a_row(dim: int) -> None:
    held = table(optimizer="row_adagrad", settings={"lr": 0.1, "eps": 1e-8}, dim=dim, rows=2000, dtype="float64")
    value, total = held.pull(ids(5)), torch.zeros(1, 1, dtype=torch.float64)
    for step in range(5):
        gradient = noise(1, dim, seed=step).double()
        total += (gradient * gradient).mean()
        value -= 0.1 * gradient / (total.sqrt() + 1e-8)
        others = torch.arange(400 * step + 6, 400 * step + 300)
        held.push(torch.cat([ids(5), others]), torch.cat([gradient, noise(len(others), dim).double()]), step)
    torch.testing.assert_close(held.pull(ids(5)), value)
    assert held.row_bytes == 8 * (dim + 1)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad", "row_adagrad"])
def test_it_does_not_matter_what_a_row_is_pushed_with(name: str) -> None:
    together, apart = (table(optimizer=name, settings={"lr": 0.1}, dim=33, rows=4000) for _ in range(2))
    everybody = torch.arange(4000)
    for step in range(3):
        gradient = noise(4000, 33, seed=step)
        together.push(everybody, gradient, step)
        for first in range(3):
            apart.push(everybody[first::3], gradient[first::3], step)
    assert torch.equal(together.pull(everybody), apart.pull(everybody))


def test_repeated_ids_are_added_in_their_order() -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [5.0]])
    unique, total = combine(ids(4, 4, 4, 2), rows)
    assert unique.tolist() == [2, 4]
    assert total.tolist() == [[5.0], [((torch.tensor(1e8) + 1) - 1e8).item()]]
    counter = table(scale=0.0, settings={"lr": 1.0}, dim=1)
    counter.push(ids(7, 3, 7, 7), torch.ones(4, 1), 1)
    assert counter.pull(ids(3, 7)).tolist() == [[-1.0], [-3.0]]


@pytest.mark.parametrize(
    ("name", "settings", "says", "fix"),
    [
        ("adagard", {}, "there is no optimizer 'adagard'", "adagrad"),
        ("zzz", {}, "there is no optimizer 'zzz'", "one of sgd, momentum"),
        ("adam", {"beta": 0.9}, "adam has no setting 'beta'", "did you mean beta"),
        ("sgd", {"momentum": 0.9}, "sgd has no setting 'momentum'", "the optimizer momentum has it"),
        ("sgd", {"lr": -1.0}, "sgd: lr is a number from 0 on, and got -1.0", "lr=0.001"),
        ("sgd", {"lr": float("nan")}, "sgd: lr is a number from 0 on, and got nan", "lr="),
        ("adam", {"beta2": 1.0}, "from 0 up to, not including, 1", "beta2=0.999"),
        ("momentum", {"nesterov": 2.0}, "nesterov is True or False", "nesterov=True"),
        ("row_adagrad", {}, "row_adagrad is for sparse tables only", "adagrad"),
    ],
)
def test_an_optimizer_that_there_is_not(name: str, settings: dict[str, Any], says: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        make_optimizer(name, settings, [("weight", nn.Parameter(torch.zeros(2)))])
    assert says in caught.value.message
    assert fix in (caught.value.fix or "")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_row_out_of_range_changes_nothing() -> None:
    held = table(shard=1, shards=2, settings={"lr": 1.0})
    held.push(ids(1, 49), torch.ones(2, DIM), 1)
    before = held.capture()
    for wrong, says in [(50, "words: row 50, but it has rows 0 to 49"), (-1, "row -1"), (4, "row 4 is on shard 0")]:
        for call in (lambda w=wrong: held.pull(ids(w)), lambda w=wrong: held.push(ids(1, w), torch.ones(2, DIM), 2)):
            with pytest.raises(ValueError, match=says) as caught:
                call()
            assert isinstance(caught.value, RowError)
    after = held.capture()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "gradient", [torch.ones(1, DIM), torch.ones(2, DIM + 1), torch.ones(2 * DIM), torch.ones(2, DIM, dtype=torch.int64)]
)
def test_a_gradient_of_another_shape(gradient: Tensor) -> None:
    with pytest.raises(RowError, match="for 2 rows of 10"):
        table().push(ids(1, 2), gradient, 1)


@pytest.mark.parametrize("fields", [{}, {"evict_age": 2, "optimizer": "adam"}])
def test_nothing_is_no_mistake(fields: dict[str, Any]) -> None:
    held, empty = table(**fields), torch.empty(0, dtype=torch.int64)
    assert held.pull(empty).shape == (0, DIM)
    held.push(empty, torch.empty(0, DIM), 1)
    other = table(**fields)
    other.restore(held.capture())
    assert other.num_rows == 0
    module = shoal.Embedding(9, 2)
    assert module(torch.empty(0, 4, dtype=torch.int64)).shape == (0, 4, 2) and module(torch.tensor(3)).shape == (2,)


@pytest.mark.parametrize(
    "wrong", [{"rows": 0}, {"dim": 0}, {"dtype": "bfloat16"}, {"scale": -1.0}, {"evict_age": -1}, {"optimizer": "adma"}]
)
def test_a_table_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        table(**wrong)


# -- where rows are ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["insert", "remove"]), st.lists(st.integers(0, 400), unique=True)), max_size=12)
)
def test_an_index_is_a_dictionary(orders: list[tuple[str, list[int]]]) -> None:
    direct, hashed = DirectRowIndex(401), HashRowIndex()
    known: dict[int, int] = {}
    for order, keys in orders:
        if order == "insert":
            new = np.array([key for key in keys if key not in known], dtype=np.int64)
            slots = np.arange(len(new)) + max(known.values(), default=-1) + 1
            known |= dict(zip(new.tolist(), slots.tolist(), strict=True))
            for each in (direct, hashed):
                each.insert(new, slots)
        else:
            old = np.array([key for key in keys if key in known], dtype=np.int64)
            for key in old.tolist():
                del known[key]
            for each in (direct, hashed):
                each.remove(old)
    everybody = np.arange(401)
    expected = [known.get(key, -1) for key in range(401)]
    for each in (direct, hashed):
        assert each.find(everybody).tolist() == expected
        assert [part.tolist() for part in each.entries()] == [sorted(known), [known[key] for key in sorted(known)]]


def test_a_hashed_table_is_the_same_as_a_direct_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> dict[str, Tensor]:
        held = table(rows=100_000, optimizer="adagrad", evict_age=4)
        for step in range(20):
            some = torch.unique(torch.randint(100_000, (500,), generator=torch.Generator().manual_seed(step)))
            held.push(some, noise(len(some), DIM, seed=step), step)
        assert held.evicted > 0
        return held.capture()

    direct = train()
    monkeypatch.setattr("shoal.paramserver.row_index.DIRECT_KEYS", 0)
    hashed = train()
    assert direct.keys() == hashed.keys() and all(torch.equal(direct[key], hashed[key]) for key in direct)


def test_ids_from_any_range() -> None:
    """Ids that are hashes of something."""
    held = table(rows=1 << 62, shard=1, shards=2)
    far = ids(1, (1 << 62) - 1, 12345678901234567)
    held.push(far, torch.ones(3, DIM), 1)
    assert held.num_rows == 3 and held.capture()["ids"].tolist() == sorted(far.tolist())


def test_memory_grows_without_a_copy() -> None:
    arena = GrowableRows(3, torch.float32)
    arena.grow(5)
    arena.write(np.array([1, 4]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    arena.grow(100_000)
    assert len(arena) >= 100_000
    assert arena.read(np.array([4, 99_999, 1])).tolist() == [[4, 5, 6], [0, 0, 0], [1, 2, 3]]


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_old_rows_are_forgotten_and_come_back_as_new() -> None:
    held = table(evict_age=3, settings={"lr": 1.0})
    new = held.pull(ids(7))
    held.push(ids(7), torch.ones(1, DIM), 1)
    for version in range(2, 5):
        held.push(ids(8), torch.ones(1, DIM), version)
        assert held.num_rows == 2, "its age is 3 at the most"
    held.push(ids(8), torch.ones(1, DIM), 5)
    assert held.num_rows == 1 and held.evicted == 1
    assert torch.equal(held.pull(ids(7)), new)
    held.push(ids(7), torch.ones(1, DIM), 6)
    assert held.num_rows == 2 and torch.equal(held.pull(ids(7)), new - 1)


def test_what_was_touched_often_enough_stays() -> None:
    held = table(evict_age=2, evict_least=3)
    for version in range(1, 4):
        held.push(ids(1), torch.ones(1, DIM), version)
    held.push(ids(2), torch.ones(1, DIM), 4)
    for version in range(5, 10):
        held.push(ids(3), torch.ones(1, DIM), version)
    assert held.capture()["ids"].tolist() == [1, 3]


def test_a_full_table_loses_the_least_touched_then_the_oldest() -> None:
    held = table(capacity=3)
    for version, row in enumerate([10, 10, 11, 12, 13], start=1):
        held.push(ids(row), torch.ones(1, DIM), version)
    assert held.capture()["ids"].tolist() == [10, 12, 13], "10 was touched twice, 11 is the oldest of the others"
    held.push(ids(1, 2, 3, 4), torch.ones(4, DIM), 9)
    assert held.num_rows == 3, "a bound is a bound, whatever comes at once"


def test_a_repeated_history_evicts_the_same_rows() -> None:
    """Also when it begins from a snapshot in the middle."""

    def play(held: SparseTable, first: int, last: int) -> None:
        for version in range(first, last):
            some = torch.randint(1000, (40,), generator=torch.Generator().manual_seed(version)).unique()
            held.push(some, noise(len(some), DIM, seed=version), version)

    fields: dict[str, Any] = {"rows": 1000, "optimizer": "adam", "evict_age": 9, "evict_least": 4, "capacity": 250}
    whole, half = table(**fields), table(**fields)
    play(whole, 1, 60)
    play(half, 1, 31)
    restored = table(**fields)
    restored.push(ids(3), torch.ones(1, DIM), 1)  # what it had before is gone
    restored.restore(half.capture())
    play(restored, 31, 60)
    one, other = whole.capture(), restored.capture()
    assert whole.evicted > 100 and one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_rows_are_as_old_on_any_number_of_shards() -> None:
    """A shard looks for old rows when rows of its own are pushed; what is too old is as new before that."""
    spec = SparseSpec(rows=16, dim=1, scale=0.0, optimizer="momentum", settings={"lr": 1.0}, evict_age=2)
    whole, odd = SparseTable(spec), SparseTable(spec, shard=1, shards=2)
    generator = np.random.default_rng(0)
    for version in range(60):
        ids = torch.from_numpy(np.unique(generator.integers(16, size=2)))
        mine = ids[ids % 2 == 1]
        assert torch.equal(whole.pull(mine, version=version), odd.pull(mine, version=version))
        whole.push(ids, torch.ones(len(ids), 1), version + 1)
        if len(mine):
            odd.push(mine, torch.ones(len(mine), 1), version + 1)
    assert whole.evicted > odd.evicted > 0


# -- hot rows ---------------------------------------------------------------------------------------------------------


def zipf(count: int, rows: int, generator: np.random.Generator) -> Tensor:
    weights = np.arange(1, rows + 1) ** -1.1
    return torch.from_numpy(generator.choice(rows, size=count, p=weights / weights.sum()))


def test_hot_rows_and_ranges_are_found() -> None:
    generator = np.random.default_rng(0)
    held = table(rows=100_000, dim=1, shard=1, shards=2)
    for _ in range(80):
        some = zipf(2000, 50_000, generator).unique() * 2 + 1
        held.pull(some)
    hot = held.hot_rows(5)
    assert [row for row, _ in hot] == [1, 3, 5, 7, 9]
    assert all(share == pytest.approx(1.0, abs=0.05) for _, share in hot)
    loads = held.loads
    assert len(loads) == 64 and loads[0] > 3 * max(loads[1:]), "its rows are those with small numbers"
    assert table(rows=3, dim=1).loads == [0.0, 0.0, 0.0]


def test_evenly_used_rows_are_not_hot() -> None:
    heat = HotRowTracker(1_000_000)
    generator = np.random.default_rng(0)
    for _ in range(400):
        heat.record(np.unique(generator.integers(1_000_000, size=5000)))
    assert all(share < 0.35 for _, share in heat.hottest(10))


# -- the cache --------------------------------------------------------------------------------------------------------


class Source:
    """A table that counts what it is asked for."""

    def __init__(self, **fields: Any) -> None:
        self.table = table(**fields)
        self.asked: list[list[int]] = []

    def pull(self, rows: Tensor) -> Tensor:
        self.asked.append(rows.tolist())
        return self.table.pull(rows)

    def push(self, rows: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> str:
        self.table.push(rows, gradients, base_version)
        return "acknowledged by the table"


def test_a_cached_row_is_at_most_as_old_as_its_bound() -> None:
    source = Source(settings={"lr": 1.0}, scale=0.0, dim=1)
    cached = RowCache(source, rows=4, bound=2)
    seen = []
    for step in range(7):
        cached.begin_step(step)
        seen.append(cached.pull(ids(5)).wait().item())
        assert cached.push(ids(5), torch.full((1, 1), -1.0)) == "acknowledged by the table"
    assert seen == [0, 0, 0, 3, 3, 3, 6], "what is pushed shows when the row is next fetched"
    assert source.asked == [[5]] * 3
    assert (cached.lookups, cached.hits) == (7, 4)


def test_only_what_is_missing_is_asked_for() -> None:
    source = Source()
    cached = RowCache(source, rows=3, bound=10)
    wanted = torch.tensor([[4, 2], [2, 9]])
    assert torch.equal(cached.pull(wanted).wait(), source.table.pull(wanted.view(-1)).view(2, 2, DIM))
    assert torch.equal(cached.pull(ids(9, 1, 4)).wait(), source.table.pull(ids(9, 1, 4)))
    assert source.asked == [[2, 4, 9], [1]]


def test_hot_rows_stay_in_a_full_cache() -> None:
    source = Source(rows=1000)
    cached = RowCache(source, rows=2, bound=1000)
    for cold in range(100, 200):
        future = cached.pull(ids(1, 2, cold, cold + 300))
        assert torch.equal(future.wait(), source.table.pull(ids(1, 2, cold, cold + 300)))
    assert all(1 not in asked and 2 not in asked for asked in source.asked[3:])


def test_a_cache_that_serves_nothing_steps_aside_for_a_while() -> None:
    source = Source(rows=100_000, dim=1)
    cached = RowCache(source, rows=16, bound=10)
    for number in range(400):
        cached.begin_step(number)
        looked = ids(9 * number + 5, 9 * number + 3)
        assert torch.equal(wait_result(cached.pull(looked)), source.table.pull(looked))
    through = [asked[0] > asked[1] for asked in source.asked]  # as they were given
    assert not any(through[:31]) and sum(through) > 250
    for _ in range(400):
        wait_result(cached.pull(ids(7)))
    assert len(source.asked) < 700, "rows that became hot are found in the next trial"


def test_a_cache_that_cannot_be() -> None:
    with pytest.raises(InputError, match="a cache of 0 rows"):
        RowCache(Source(), rows=0, bound=1)


# -- the module -------------------------------------------------------------------------------------------------------


def test_it_is_an_embedding() -> None:
    """Against torch's own, with plain sgd: the same bits, through several forwards and repeated ids."""
    ours = shoal.Embedding(40, DIM, optimizer="sgd", lr=0.5, scale=0.3)
    theirs = nn.Embedding(40, DIM)
    with torch.no_grad():
        theirs.weight.copy_(ours(torch.arange(40)))
    assert ours.table.num_rows == 0, "a look makes no rows"
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(6):
        first = torch.randint(40, (5, 3), generator=torch.Generator().manual_seed(step))
        target = noise(5, 3, DIM, seed=step)
        outputs = [each(first) for each in (ours, theirs)]
        assert outputs[0].shape == (5, 3, DIM) and torch.equal(*outputs)
        for output in outputs:
            F.mse_loss(output, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        ours.update(step)
    assert torch.equal(ours(torch.arange(40)), theirs.weight)
    assert not list(ours.parameters()) and not ours.state_dict()


def test_gradients_of_several_calls_are_added_in_the_order_of_the_calls() -> None:
    module = shoal.Embedding(40, 1)
    module.attach("words", Source(dim=1))
    first, second, third = module(ids(3, 3, 9)), module(ids(9, 1)), module(ids(9))
    (third * -1e8).sum().backward()  # the last call's comes first
    (second * torch.tensor([[1.0], [7.0]])).sum().backward()
    (first * torch.tensor([[1.0], [1.0], [1e8]])).sum().backward()
    with torch.no_grad():
        module(ids(20))
    taken = module.take_gradient()
    assert taken is not None
    assert taken[0].tolist() == [1, 3, 9]
    assert taken[1].tolist() == [[7.0], [2.0], [0.0]], "(1e8 + 1) - 1e8, and not 1 + (1e8 - 1e8)"
    assert module.take_gradient() is None


def test_a_recomputed_block_sees_the_same_rows_and_counts_once() -> None:
    from torch.utils.checkpoint import checkpoint

    source = Source()
    module = shoal.Embedding(50, DIM)
    module.attach("words", source)

    def block(rows: Tensor) -> Tensor:
        return module(rows).sin().square()

    checkpoint(block, ids(1, 2, 1), use_reentrant=False).sum().backward()
    recomputed = module.take_gradient()
    block(ids(1, 2, 1)).sum().backward()
    plain = module.take_gradient()
    assert recomputed is not None and plain is not None
    assert source.asked == [[1, 2]] * 2, "once in each step"
    assert all(torch.equal(*pair) for pair in zip(recomputed, plain, strict=True))


def test_rows_are_asked_for_ahead() -> None:
    source = Source()
    module = shoal.Embedding(50, DIM, ids=lambda batch: batch["words"])
    module.attach("words", source)
    assert module.prefetch({"words": torch.tensor([[7, 3], [5, 3]])})
    module.begin_step(1)
    assert torch.equal(module(ids(3, 7)), source.table.pull(ids(3, 7)))
    assert torch.equal(module(ids(5)), source.table.pull(ids(5)))
    assert source.asked == [[3, 5, 7]]
    module(ids(5, 6))
    assert source.asked == [[3, 5, 7], [5, 6]], "not covered: asked for"
    module.begin_step(2, keep_prefetched=False)
    module(ids(5))
    assert len(source.asked) == 3
    assert not shoal.Embedding(5, 2).prefetch({})


def test_rows_of_two_batches_are_asked_for_ahead() -> None:
    source = Source()
    module = shoal.Embedding(50, DIM, ids=lambda batch: batch)
    module.attach("words", source)
    module.prefetch(ids(1, 2))
    module.prefetch(ids(2, 3), keep_last=True)
    module(ids(1, 2))
    module.begin_step(2)
    module.prefetch(ids(4, 5), keep_last=True)
    module(ids(2, 3))
    module(ids(4, 5))
    assert source.asked == [[1, 2], [2, 3], [4, 5]]
    module(ids(1, 2))
    assert len(source.asked) == 4, "too old"
    module.prefetch(ids(6))
    module.begin_step(3)
    module(ids(4, 5))
    assert len(source.asked) == 6, "after an update all is asked for anew"


def test_a_cached_module_asks_less() -> None:
    source = Source()
    module = shoal.Embedding(50, DIM, cache=8, bound=1)
    module.attach("words", source)
    for step in range(4):
        module.begin_step(step)
        module(ids(5, 6)).sum().backward()
        assert module.take_gradient() is not None
    assert source.asked == [[5, 6]] * 2


def test_an_id_out_of_range_is_named_before_anything_is_asked_for() -> None:
    source = Source()
    module = shoal.Embedding(50, DIM, ids=lambda batch: batch)
    module.attach("tower.words", source)
    for call in (module, module.prefetch):
        with pytest.raises(InputError, match=r"table tower.words: row 50, but it has rows 0 to 49 \(rows=50\)"):
            call(torch.tensor([[3, 50]]))
    with pytest.raises(InputError, match=r"ids are torch.float32"):
        module(torch.ones(3))
    assert source.asked == []


def test_where_nothing_is_computed() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = shoal.Embedding(1 << 50, DIM)
    meta = module(torch.zeros(4, 2, dtype=torch.int64, device="meta"))
    assert meta.shape == (4, 2, DIM) and meta.is_meta and meta.requires_grad
    with FakeTensorMode() as mode:
        fake = module(mode.from_tensor(torch.zeros(4, 2, dtype=torch.int64)))
        fake.sum().backward()
    assert fake.shape == (4, 2, DIM) and module.take_gradient() is None
    with torch.no_grad():
        assert not module(torch.zeros(1, dtype=torch.int64, device="meta")).requires_grad


def test_tables_have_the_names_of_their_modules_and_seeds_of_their_own() -> None:
    model = nn.ModuleDict(
        {"user": shoal.Embedding(9, 2), "item": nn.Sequential(shoal.Embedding(9, 2), nn.Linear(2, 2))}
    )
    found = tables_of(model)
    assert [name for name, _ in found] == ["user", "item.0"]
    for name, module in found:
        module.attach(name, Source())
    specs = [module.spec(5) for _, module in found]
    assert specs[0].seed != specs[1].seed and specs[0] == found[0][1].spec(5) != found[0][1].spec(6)
    assert (specs[0].rows, specs[0].dim, specs[0].optimizer) == (9, 2, "adagrad")


def test_a_copy_has_the_rows_and_no_connection() -> None:
    module = shoal.Embedding(9, 2, lr=1.0)
    module(ids(1, 2)).sum().backward()
    module.update()
    other = copy.deepcopy(module)
    assert torch.equal(other(torch.arange(9)), module(torch.arange(9))) and other.table.num_rows == 2
    module(ids(1)).sum().backward()
    module.update()
    assert not torch.equal(other(ids(1)), module(ids(1)))
    module.attach("words", Source())
    assert not copy.deepcopy(module).attached


def test_a_module_that_cannot_be() -> None:
    for wrong, says in [
        ({"optimizer": "adagard"}, "adagard"),
        ({"learning_rate": 0.1}, "adagrad has no setting 'learning_rate'"),
        ({"cache": -1}, "a cache of -1 rows"),
        ({"capacity": -5}, "capacity is -5"),
    ]:
        with pytest.raises(InputError, match=says):
            Embedding(10, 2, **wrong)


# -- on servers -------------------------------------------------------------------------------------------------------


def test_rows_on_servers_are_the_rows_of_one_table() -> None:
    """Three shards, two modules of two workers, in one process: the bits of a table of its own."""
    alone, shards = shoal.Embedding(500, DIM, lr=0.1), [ParameterShard(shard=each, shards=3) for each in range(3)]
    with ParameterClient(shards, worker=0) as first, ParameterClient(shards, worker=1) as second:
        modules = []
        for client in (first, second):
            module = shoal.Embedding(500, DIM, lr=0.1)
            module.attach("", client.sparse("words", module.spec()))
            modules.append(module)
        for step in range(6):
            looked = torch.randint(500, (8, 5), generator=torch.Generator().manual_seed(step))
            target = noise(8, 5, DIM, seed=step)
            for module in (alone, modules[step % 2]):
                module.begin_step(step)
                F.mse_loss(module(looked), target).backward()
            taken = modules[step % 2].take_gradient()
            assert taken is not None
            (first, second)[step % 2].sparse("words", alone.spec()).push(*taken).wait()
            alone.update(step)
        assert torch.equal(modules[0](torch.arange(500)), alone(torch.arange(500)))
        counted = [first.request(shard, StatsRequest()).wait()[0] for shard in range(3)]
    assert sum(each.rows["words"] for each in counted) == alone.table.num_rows
    assert all(sum(each.loads["words"]) > 0 and each.evicted == {"words": 0} for each in counted)
    assert all(row % 3 == shard for shard, each in enumerate(counted) for row, _ in each.hot_rows["words"])
