"""A parameter server's shard: cuts, tables, the bits of one process, what is refused, the state."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.shards import (
    OPTIMIZERS,
    Reference,
    Worker,
    factory,
    gradients_of,
    one_worker,
    refused,
    same,
    shards_of,
    spec_of,
    values_of,
)
from shoal.paramserver.messages import (
    AckReply,
    ApplyRequest,
    ContributeRequest,
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PushRequest,
    PutRequest,
    ServerRequest,
    SparseSpec,
    SquaresRequest,
    StatsReply,
    StatsRequest,
    StatusReply,
    StatusRequest,
    TableSlice,
    TableStateReply,
    TableStateRequest,
    ValuesReply,
)
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sharding import MIN_SPLIT_BYTES, balance, flat_layout, shard_dense

# -- cuts -------------------------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 400), max_size=3), max_size=8),
    shards=st.integers(1, 5),
    loads=st.lists(st.floats(0.1, 100), min_size=8, max_size=8),
)
def test_every_row_is_on_one_shard_and_parts_lie_on_64_bytes(
    shapes: list[list[int]], shards: int, loads: list[float]
) -> None:
    names = [f"t{index}" for index in range(len(shapes))]
    spec = DenseSpec(names, shapes, ["float32"] * len(shapes), loads=loads[: len(shapes)])
    cut = shard_dense(spec, shards)
    assert cut == shard_dense(spec, shards)
    rows: dict[str, list[int]] = {name: [] for name in names}
    for parts in cut:
        assert len({part.name for part in parts}) == len(parts), "one range of a tensor"
        assert [part.index for part in parts] == sorted(part.index for part in parts)
        laid = flat_layout(parts, spec)
        assert len(laid.totals) == 1
        end = 0
        for part, offset, shape, count in zip(parts, laid.offsets, laid.shapes, laid.counts, strict=True):
            rows[part.name] += range(part.start, part.stop)
            assert offset % 64 == 0 and offset >= end
            assert shape == ((part.stop - part.start, *shapes[part.index][1:]) if shapes[part.index] else ())
            end = offset + count
        assert end <= laid.totals[0] < end + 64
    for name, shape in zip(names, shapes, strict=True):
        assert sorted(rows[name]) == list(range(shape[0] if shape else 1))


def test_small_tensors_are_whole_and_large_ones_equal_shares() -> None:
    spec = spec_of(shapes={"large": [1000, 64], "small": [100], "alone": [1, 100_000]})
    cut = shard_dense(spec, 3)
    large = [(part.start, part.stop) for parts in cut for part in parts if part.name == "large"]
    assert sorted(stop - start for start, stop in large) == [333, 333, 334]
    assert [len([part for parts in cut for part in parts if part.name == name]) for name in ("small", "alone")] == [
        1,
        1,
    ]
    assert 1000 * 64 * 4 > MIN_SPLIT_BYTES > 100 * 4


def test_a_measured_load_moves_work() -> None:
    """Four equal tensors on two shards; when one is asked for as often as the others together, it has a shard alone."""
    shapes = {name: [100] for name in ("a", "b", "c", "d")}
    plain = spec_of(shapes=shapes)
    hot = DenseSpec(plain.names, plain.shapes, plain.dtypes, loads=[1.0, 1.0, 3.0, 1.0])
    assert [[part.name for part in parts] for parts in shard_dense(plain, 2)] == [["a", "c"], ["b", "d"]]
    assert [[part.name for part in parts] for parts in shard_dense(hot, 2)] == [["c"], ["a", "b", "d"]]
    assert balance([5, 1, 1, 1], [], 2) == [0, 1, 1, 1]
    # What a shard measures is what the next cut can be given.
    worker = Worker([ParameterShard()])
    worker.declare(plain, values_of(shapes))
    for _ in range(2):
        worker.push(plain, {"c": torch.zeros(100)})
    worker.push(plain, values_of(shapes))
    assert worker.shards[0].stats().loads == {"model": [1.0, 1.0, 3.0, 1.0]}


def test_each_dtype_has_a_flat_tensor() -> None:
    spec = DenseSpec(["a", "n", "b"], [[10], [3], [70]], ["float32", "int64", "float32"])
    laid = flat_layout(shard_dense(spec, 1)[0], spec)
    assert laid.dtypes == (torch.float32, torch.int64)
    assert (laid.buffers, laid.offsets, laid.totals) == ((0, 1, 0), (0, 0, 64), (192, 64))
    assert flat_layout([], spec).totals == (0,)


# -- the same bits as one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_get_the_bits_of_whole_tensors(name: str, count: int) -> None:
    reference = Reference(OPTIMIZERS[name])
    worker = Worker(shards_of(count, factories={"job": factory(OPTIMIZERS[name])}))
    spec = spec_of("job")
    worker.declare(spec, values_of())
    assert all(shard.tables.dense["model"].ranges for shard in worker.shards)
    for step in range(6):
        reference.step(gradients_of(step))
        for answer in worker.push(spec, gradients_of(step)):
            assert answer.reply == AckReply(step + 1)
        assert same(worker.pull(spec), reference.values), f"step {step}"
    held = sum(shard.held_bytes for shard in worker.shards)
    states = [
        value for state in reference.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
    ]
    exact = sum(value.nbytes for value in (*reference.values.values(), *states))
    assert exact <= held < exact * 1.02


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_named_optimizers_are_torchs_own(name: str) -> None:
    worker, spec = one_worker(name, lr=0.05)
    whole = {key: nn.Parameter(value) for key, value in values_of().items()}
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": lambda named, lr: torch.optim.SGD(named, lr=lr, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
    }
    optimizer = kinds[name](list(whole.values()), lr=0.05)
    for step in range(3):
        for key, parameter in whole.items():
            parameter.grad = gradients_of(step).get(key)
        optimizer.step()
        worker.push(spec, gradients_of(step))
    assert same(worker.pull(spec), {key: parameter.detach() for key, parameter in whole.items()})


def test_gradients_of_another_dtype_are_converted() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    gradients = {name: value.bfloat16() for name, value in values_of(seed=1).items()}
    worker.push(spec, gradients)
    assert same(worker.pull(spec), {name: before[name] - gradients[name].float() for name in before})


def test_a_pull_reads_the_tables_own_memory_and_a_push_leaves_the_gradient_alone() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    answer = worker.look(PullRequest([TableSlice("model")]))
    table = worker.shards[0].tables.dense["model"]
    assert [each.data_ptr() for each in answer.tensors] == [each.data_ptr() for each in table.flats]
    assert all(parameter.data_ptr() % 64 == 0 for parameter in table.parameters)
    keys, flats = worker.flats(spec, values_of(seed=1), 0)
    kept = flats[0].clone()
    worker.order(PushRequest([TableSlice("model", keys)]), flats)
    assert torch.equal(flats[0], kept)
    assert all(parameter.grad is None for parameter in table.parameters)
    some = worker.look(PullRequest([TableSlice("model", (3, 1))]))
    assert same(
        dict(
            zip(
                ("scale", "bias"),
                flat_layout([table.ranges[3], table.ranges[1]], spec).views(some.tensors),
                strict=True,
            )
        ),
        {name: worker.pull(spec)[name] for name in ("scale", "bias")},
    )


def test_compressed_gradients_are_read() -> None:
    from shoal.collectives.compression import parse_compressor

    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    keys, (whole,) = worker.flats(spec, values_of(seed=1), 0)
    codec = parse_compressor("bf16")
    slot = TableSlice("model", keys, codec="bf16", count=whole.numel())
    assert worker.order(PushRequest([slot]), [codec.encode(whole, 0)]).reply == AckReply(1)
    rounded = {name: value.bfloat16().float() for name, value in values_of(seed=1).items()}
    assert same(worker.pull(spec), {name: before[name] - rounded[name] for name in before})
    nine = [torch.zeros(9, dtype=torch.uint8)]
    refused(worker.order(PushRequest([TableSlice("model", codec="zip", count=whole.numel())]), nine), "codec")
    refused(worker.order(PushRequest([TableSlice("model", codec="bf16", count=10**12)]), nine), "shape")
    refused(worker.order(PushRequest([slot]), [torch.zeros(9, dtype=torch.uint8)]), "codec")


# -- what is refused --------------------------------------------------------------------------------------------------


def bad_pushes() -> dict[str, tuple[str, list[TableSlice], Callable[[Tensor], list[Tensor]]]]:
    """What -> code, slots, tensors made from a good flat gradient."""

    def nan(good: Tensor) -> list[Tensor]:
        good[7] = math.nan
        return [good]

    def infinities(good: Tensor) -> list[Tensor]:
        good[7], good[8] = math.inf, -math.inf
        return [good]

    model = TableSlice("model")
    words = TableSlice("words", sparse=True)
    ids = torch.tensor([1, 5])
    return {
        "unknown table": ("table", [TableSlice("modle")], lambda good: [good]),
        "dense as sparse": ("table", [TableSlice("model", sparse=True)], lambda good: [ids, torch.zeros(2, 4)]),
        "key out of range": ("key", [TableSlice("model", (0, 5))], lambda good: [good]),
        "key below 0": ("key", [TableSlice("model", (-1,))], lambda good: [good]),
        "key twice": ("key", [TableSlice("model", (1, 1))], lambda good: [good]),
        "too few numbers": ("shape", [model], lambda good: [good[:-64]]),
        "two dimensions": ("shape", [model], lambda good: [good.view(1, -1)]),
        "no tensor": ("shape", [model], lambda good: []),
        "one too many": ("shape", [model], lambda good: [good, good]),
        "integers": ("dtype", [model], lambda good: [good.long()]),
        "doubles": ("dtype", [model], lambda good: [good.double()]),
        "nan": ("nonfinite", [model], nan),
        "infinities": ("nonfinite", [model], infinities),
        "table twice": ("slice", [model, model], lambda good: [good, good]),
        "no optimizer": ("optimizer", [TableSlice("fixed")], lambda good: [torch.zeros(64)]),
        "unfilled": ("unfilled", [TableSlice("empty")], lambda good: [torch.zeros(64)]),
        "row out of range": ("row", [words], lambda good: [torch.tensor([1, 100]), torch.zeros(2, 4)]),
        "row below 0": ("row", [words], lambda good: [torch.tensor([-1, 1]), torch.zeros(2, 4)]),
        "row twice": ("row", [words], lambda good: [torch.tensor([1, 1]), torch.zeros(2, 4)]),
        "ids of floats": ("dtype", [words], lambda good: [ids.float(), torch.zeros(2, 4)]),
        "another dim": ("shape", [words], lambda good: [ids, torch.zeros(2, 5)]),
        "rows nan": ("nonfinite", [words], lambda good: [ids, torch.full((2, 4), math.nan)]),
        "good, then bad": ("shape", [model, words], lambda good: [good, ids, torch.zeros(3, 4)]),
    }


@pytest.mark.parametrize("what", bad_pushes())
@pytest.mark.parametrize("kind", ["push", "contribute"])
def test_what_does_not_fit_is_refused_and_changes_nothing(what: str, kind: str) -> None:
    code, slots, make = bad_pushes()[what]
    worker, spec = one_worker()
    small = DenseSpec(["t"], [[3]], ["float32"], optimizer="none")
    worker.declare(small, {"t": torch.ones(3)}, "fixed")
    worker.order(DeclareRequest("empty", DenseSpec(["t"], [[3]], ["float32"], optimizer="sgd")))
    worker.order(DeclareRequest("words", SparseSpec(rows=100, dim=4)))
    shard = worker.shards[0]
    before = shard.capture(copy=True).tensors
    _, (good,) = worker.flats(spec, values_of(seed=1), 0)
    request: ServerRequest = PushRequest(slots) if kind == "push" else ContributeRequest(0, (0, 1), slots)
    answer = worker.order(request, make(good.clone()))
    reason = refused(answer, code)
    assert any(slot.table in reason for slot in slots)
    assert same(shard.capture().tensors, before)
    assert shard.version == 0 and shard.stats().refused == {code: 1}
    assert not shard._pending_steps.contributions.steps.get(0)
    # The order has its number all the same, and the next one is taken.
    assert worker.push(spec, values_of(seed=1))[0].reply == AckReply(1)


def test_a_finite_gradient_whose_sum_is_too_large_is_taken() -> None:
    worker, spec = one_worker()
    assert worker.push(spec, {"bias": torch.full([300], 3e38)})[0].reply == AckReply(1)


def test_an_unfilled_table_can_be_filled_by_several_and_the_first_counts() -> None:
    worker, spec = Worker([ParameterShard()]), spec_of()
    assert worker.order(DeclareRequest("model", spec)).reply == AckReply(0)
    first, second = values_of(seed=1), values_of(seed=2)
    keys, flats = worker.flats(spec, {"wide": first["wide"]}, 0)
    worker.order(PutRequest([TableSlice("model", keys)], fill=True), flats)
    reason = refused(worker.look(PullRequest([TableSlice("model")])), "unfilled")
    assert "4 of its 5" in reason
    standing = worker.look(StatusRequest()).reply
    assert isinstance(standing, StatusReply) and not standing.filled
    worker.order(PutRequest([TableSlice("model")], fill=True), worker.flats(spec, second, 0)[1])
    assert same(worker.pull(spec), {**second, "wide": first["wide"]})
    worker.order(PutRequest([TableSlice("model")]), worker.flats(spec, first, 0)[1])
    assert same(worker.pull(spec), first)
    standing = worker.look(StatusRequest()).reply
    assert isinstance(standing, StatusReply) and standing.filled


def test_another_table_of_the_same_name_is_refused() -> None:
    worker, _ = one_worker("sgd", lr=0.1)
    assert worker.order(DeclareRequest("model", spec_of("sgd", lr=0.1))).reply == AckReply(0)
    reason = refused(worker.order(DeclareRequest("model", spec_of("adam", lr=0.1))), "declared")
    assert "optimizer=sgd" in reason and "optimizer=adam" in reason
    assert "sparse" in refused(worker.order(DeclareRequest("model", SparseSpec(rows=5, dim=2))), "declared")
    for spec, code in (
        (DenseSpec(["a", "a"], [[1], [1]], ["float32"] * 2), "spec"),
        (DenseSpec(["a"], [[1], [1]], ["float32"]), "spec"),
        (DenseSpec(["a"], [[-1]], ["float32"]), "spec"),
        (DenseSpec(["a"], [[1]], ["float31"]), "spec"),
        (DenseSpec(["a"], [[1]], ["float32"], optimizer="adan"), "spec"),
        (DenseSpec(["a"], [[1]], ["float32"], optimizer="job"), "optimizer"),
        (SparseSpec(rows=0, dim=1), "spec"),
    ):
        refused(worker.order(DeclareRequest("other", spec)), code)
    assert worker.shards[0].tables.names == ["model"]


# -- sparse tables ----------------------------------------------------------------------------------------------------


def test_rows_are_pushed_pulled_and_merged() -> None:
    shards = shards_of(2)
    worker = Worker(shards)
    spec = SparseSpec(rows=100, dim=2, scale=0.0, optimizer="sgd", settings={"lr": 1.0})
    words = TableSlice("words", sparse=True)
    for shard in range(2):
        worker.order(DeclareRequest("words", spec), shard=shard)
    assert worker.order(PushRequest([words]), [torch.tensor([2, 98]), torch.ones(2, 2)]).reply == AckReply(1)
    refused(worker.order(PushRequest([words]), [torch.tensor([2, 3]), torch.ones(2, 2)]), "row")
    answer = worker.look(PullRequest([words]), [torch.tensor([0, 2, 98])])
    assert isinstance(answer.reply, ValuesReply) and answer.tensors[0].tolist() == [[0, 0], [-1, -1], [-1, -1]]
    worker.order(ContributeRequest(0, (0, 1), [words]), [torch.tensor([2, 4]), torch.ones(2, 2)])
    worker.order(ContributeRequest(0, (1, 2), [words]), [torch.tensor([4, 6]), torch.ones(2, 2)])
    squares = worker.look(SquaresRequest(0, 2, [(0, 1), (1, 2)], 0.5))
    assert squares.tensors[0].tolist() == [2, 4, 6]
    assert squares.tensors[1].tolist() == pytest.approx([0.5, 2.0, 0.5])
    assert worker.order(ApplyRequest(0, 2, [(0, 1), (1, 2)], scale=0.5, pull=False)).reply == AckReply(2)
    answer = worker.look(PullRequest([words]), [torch.tensor([2, 4, 6])])
    assert answer.tensors[0][:, 0].tolist() == [-1.5, -1.0, -0.5]
    counted = worker.look(StatsRequest()).reply
    assert isinstance(counted, StatsReply) and counted.rows == {"words": 4}
    found = worker.look(TableStateRequest("words"))
    assert isinstance(found.reply, TableStateReply) and "ids" in found.reply.names
    fresh = Worker(shards_of(2))
    fresh.order(DeclareRequest("words", spec))
    state = {"table": "words", "names": found.reply.names}
    assert fresh.order(PutRequest([], state=state), found.tensors).reply == AckReply(0)
    assert torch.equal(fresh.look(PullRequest([words]), [torch.tensor([2, 4, 6])]).tensors[0], answer.tensors[0])
    refused(fresh.order(PutRequest([], state={"table": "words", "names": ["ids"]}), found.tensors[:1]), "shape")
    short = [found.tensors[0], *(each[:1] for each in found.tensors[1:])]
    refused(fresh.order(PutRequest([], state=state), short), "shape")
    odd = [found.tensors[0] + 1, *found.tensors[1:]]
    refused(fresh.order(PutRequest([], state=state), odd), "row")
    refused(fresh.order(PutRequest([words]), [torch.tensor([2]), torch.ones(1, 2)]), "sparse")
    assert fresh.shards[0].stats().rows == {"words": 4}


# -- the optimizer's state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_shards_goes_to_other_shards(name: str) -> None:
    """Through messages, as a checkpoint does; from two shards to three; the bits go on."""
    from shoal.paramserver.messages import decode_reply, decode_request, encode

    reference = Reference(OPTIMIZERS[name])
    make = {"job": factory(OPTIMIZERS[name])}
    spec = spec_of("job")
    old, new = Worker(shards_of(2, factories=make)), Worker(shards_of(3, factories=make))
    old.declare(spec, values_of())
    for step in range(3):
        reference.step(gradients_of(step))
        old.push(spec, gradients_of(step))
    rows: dict[str, dict[int, Tensor]] = {}
    values: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for shard in range(2):
        answer = old.look(TableStateRequest("model"), shard=shard)
        found = decode_reply(encode(answer.reply))
        assert isinstance(found, TableStateReply)
        parts = {part.name: part for part in shard_dense(spec, 2)[shard]}
        for field, tensor in zip(found.names, answer.tensors, strict=True):
            rows.setdefault(field, {})[parts[field.partition("\t")[0]].start] = tensor
        values = found.values
        steps |= found.values["steps"]
    state = {
        field: pieces[min(pieces)] if len(pieces) == 1 else torch.cat([pieces[at] for at in sorted(pieces)])
        for field, pieces in rows.items()
    }
    for key, parameter in reference.parameters.items():
        for field, value in reference.optimizer.state.get(parameter, {}).items():
            if field != "step" and torch.is_tensor(value):
                assert torch.equal(state[f"{key}\t{field}"], value)
    whole = old.pull(spec)
    for shard in range(3):
        new.order(DeclareRequest("model", spec), shard=shard)
        parts = {part.name: part for part in shard_dense(spec, 3)[shard]}
        mine = {
            field: tensor[parts[key].start : parts[key].stop] if tensor.dim() else tensor
            for field, tensor in state.items()
            if (key := field.partition("\t")[0]) in parts
        }
        told = {**values, "steps": steps, "names": list(mine)}
        put = decode_request(encode(PutRequest([TableSlice("model")], fill=True, state=told)))
        assert new.order(put, [*new.flats(spec, whole, shard)[1], *mine.values()], shard).reply == AckReply(0)
    for step in range(3, 6):
        reference.step(gradients_of(step))
        new.push(spec, gradients_of(step))
        assert same(new.pull(spec), reference.values), f"step {step}"


def test_a_table_that_was_filled_keeps_its_optimizers_state() -> None:
    """A worker that comes late says the same as the first did at the start."""
    worker, spec = one_worker("momentum")
    worker.push(spec, values_of(seed=1))
    before = worker.shards[0].capture(copy=True).tensors
    state = {"names": ["bias\tmomentum_buffer"], "groups": [], "steps": {}}
    put = PutRequest([TableSlice("model")], fill=True, state=state)
    assert worker.order(put, [*worker.flats(spec, values_of(), 0)[1], torch.zeros(300)]).reply == AckReply(1)
    assert same(worker.shards[0].capture().tensors, before)


def test_state_of_another_shape_is_refused() -> None:
    worker, spec = one_worker("momentum")
    before = worker.shards[0].capture(copy=True).tensors
    state = {"names": ["bias\tmomentum_buffer"], "groups": [], "steps": {}}
    flats = worker.flats(spec, values_of(seed=1), 0)[1]
    refused(worker.order(PutRequest([TableSlice("model")], state=state), [*flats, torch.zeros(7)]), "shape")
    refused(worker.order(PutRequest([TableSlice("model")], state=state), flats), "shape")
    assert same(worker.shards[0].capture().tensors, before)
