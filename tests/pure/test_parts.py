"""Checkpoints in parts: written under one layout, read under any other, with the bits of the whole."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from helpers.checkpoint_parts import (
    ALL,
    SHAPES,
    Layout,
    Net,
    assert_same,
    cut,
    live_of,
    names,
    pipeline,
    sliced,
    trained,
    write,
)
from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_digests, tensor_sha256
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice, row_slice
from shoal.recovery.checkpoint import directory, manifest
from shoal.recovery.checkpoint import shards as sharding
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.export import export_stored, export_weights, initial_weights, load_weights
from shoal.recovery.checkpoint.files import ShardWriteTask, StateShard, StoredSlice, TensorEntry
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.recovery.checkpoint.reader import CheckpointMismatch, StoredTensors, index_of_files, open_weights
from shoal.recovery.checkpoint.safetensors_file import STORABLE_DTYPES
from shoal.recovery.checkpoint.shards import is_complete
from shoal.recovery.checkpoint.state import capture_weights, restore_weights
from shoal.report.events import CheckpointSaved, Event, SaveFailed
from shoal.worker.checkpointer import Checkpointer


@pytest.fixture(autouse=True)
def random_state_stays() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    yield
    torch.set_rng_state(before)


def empty(holding: StateShard | None) -> LiveState:
    """As a worker is before it has anything: other weights, no state."""
    torch.manual_seed(99)
    return live_of(Net()) if holding is None else cut(live_of(Net()), holding)


def sharded(parts: int = 3) -> Layout:
    """zero=1: weights are whole everywhere and the first writes them; of the optimizer's state each has some rows."""
    return [
        StateShard(
            shapes=SHAPES,
            optimizer_slices={name: row_slice(shape, parts, part) for name, shape in SHAPES.items()},
            writes=set(ALL) if part == 0 else (),
            optimizer_writes=set(ALL),
            shard_index=part,
            num_shards=parts,
        )
        for part in range(parts)
    ]


def both() -> Layout:
    """Two stages, of which each is cut in two, along two dimensions where there are two."""
    found = []
    for part in range(4):
        stage, number = divmod(part, 2)
        held = [n for n in ALL if n.startswith(("embed", "qkv")) == (stage == 0)]
        pieces = {
            "embed.weight": TensorSlice({0: ((number * 5, number * 5 + 5),)}),
            "qkv.bias": row_slice((12,), 2, number),
        }
        pieces |= {
            "qkv.weight": TensorSlice({1: ((number * 2, number * 2 + 2),)}),
            "out.weight": row_slice((4, 4), 2, number),
        }
        pieces = {name: piece for name, piece in pieces.items() if name in held}
        writes = set(held if number == 0 else pieces)
        found.append(
            StateShard(shapes=SHAPES, held=set(held), slices=pieces, writes=writes, shard_index=part, num_shards=4)
        )
    return found


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "pipeline": pipeline,
    "two stages": lambda: pipeline(2),
    "slices": sliced,
    "four slices": lambda: sliced(4),
    "rows of state": sharded,
    "stages of slices": both,
}


# ---- written under one layout, read under another
@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_make_up_the_whole_bit_for_bit(tmp_path: Path, name: str) -> None:
    whole, layout = trained(), LAYOUTS[name]()
    written = write(CheckpointDirectory(tmp_path), whole, layout, 7)
    parts = [f"{kind}-{part}.safetensors" for kind in ("model", "optimizer") for part in range(len(layout))]
    assert names(tmp_path) == ["step-00000007"], "nothing is left beside it"
    assert names(written.path) == sorted([*parts, "state.json", "extra.safetensors", "manifest.json"])
    assert written.num_bytes == sum(file.stat().st_size for file in written.path.iterdir())
    assert len({file.stat().st_mode for file in written.path.iterdir()}) == 1, "all readable by the same people"
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and newest.skipped == []
    assert_same(newest.snapshot, whole.capture(7, {"loss": 0.5}))
    fresh = empty(None)
    fresh.restore(newest.snapshot)
    assert_same(fresh.capture(7, {"loss": 0.5}), whole.capture(7, {"loss": 0.5}))


@pytest.mark.parametrize("first", [*LAYOUTS, "whole"])
def test_every_layout_reads_every_other(tmp_path: Path, first: str) -> None:
    """Its first worker and its last. Also one that was written whole, as by a run before there were layouts."""
    whole = trained()
    if first == "whole":
        path = CheckpointDirectory(tmp_path).write(whole.capture(7, {"loss": 0.5})).path
        assert "model.safetensors" in names(path)
    else:
        write(CheckpointDirectory(tmp_path), whole, LAYOUTS[first](), 7)
    for second in LAYOUTS.values():
        for holding in (second()[0], second()[-1]):
            newest = CheckpointDirectory(tmp_path).newest(holding)
            assert newest is not None
            mine, fresh = cut(whole, holding), empty(holding)
            assert_same(newest.snapshot, mine.capture(7, {"loss": 0.5}))
            fresh.restore(newest.snapshot, own=True)
            assert_same(fresh.capture(7, {"loss": 0.5}), mine.capture(7, {"loss": 0.5}))
            for tensor in (*newest.snapshot.weights.values(), *newest.snapshot.optimizer.values()):
                assert tensor.data_ptr() % 64 == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("name", ["slices", "whole"])
def test_a_checkpoint_of_version_1_is_read(tmp_path: Path, name: str) -> None:
    """Version 1 has other names in state.json, and is the same otherwise."""
    whole = trained()
    if name == "whole":
        path = CheckpointDirectory(tmp_path).write(whole.capture(7, {"loss": 0.5})).path
    else:
        path = write(CheckpointDirectory(tmp_path), whole, LAYOUTS[name](), 7).path
    state = json.loads((path / "state.json").read_bytes())
    state["values"]["told"] = state["values"].pop("progress")
    state["values"]["aside"] = {}
    for entries in state.get("index", {}).values():
        for entry in entries.values():
            entry["pieces"] = entry.pop("slices")
            for piece in entry["pieces"]:
                if "ranges" in piece:
                    piece["cuts"] = piece.pop("ranges")
    (path / "state.json").write_text(json.dumps(state))
    names = manifest.read_manifest(path).files
    manifest.write_manifest(path, step=7, names=tuple(names))
    sealed = msgspec.structs.replace(manifest.read_manifest(path), version=1)
    (path / "manifest.json").write_bytes(sealed.encode())
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and newest.skipped == []
    assert newest.snapshot.values.pop("extra_optimizers") == {}
    assert_same(newest.snapshot, whole.capture(7, {"loss": 0.5}))
    stored, found_aliases = open_weights(path)
    with stored:
        export_stored(tmp_path / "w.safetensors", stored, found_aliases)
    weights, aliases = capture_weights(whole.model)
    loaded, other_names = load_weights(tmp_path / "w.safetensors")
    assert tensor_digests(sorted(loaded.items())) == tensor_digests(sorted(weights.items())) and other_names == aliases


def test_the_values_are_those_of_the_whole_on_every_worker(tmp_path: Path) -> None:
    whole = trained()
    groups = whole.capture(1, {}).values["optimizer"]["groups"]
    for layout in LAYOUTS.values():
        for holding in layout():
            values = cut(whole, holding).live_snapshot(1, {}).values
            assert values["optimizer"]["groups"] == groups
            assert values["scheduler"] == whole.capture(1, {}).values["scheduler"]


def test_before_the_first_step_and_with_a_rate_that_is_a_tensor(tmp_path: Path) -> None:
    for steps in (0, 2):
        whole = trained(steps, rate=torch.tensor(0.01))
        layout = sliced()
        checkpoints = CheckpointDirectory(tmp_path / str(steps))
        shares = [ShardWriteTask(state_shard=holding, token="t") for holding in layout]
        parts = [cut(whole, each.state_shard, torch.tensor(0.01)).capture(3, {}, task=each) for each in shares]
        assert checkpoints.write_shard(parts[1], shares[1]) is None
        assert checkpoints.write_shard(parts[0], shares[0]) is not None
        newest = checkpoints.newest()
        assert newest is not None
        assert_same(newest.snapshot, whole.capture(3, {}))
        assert any("param_groups" in name for name in newest.snapshot.optimizer)


def test_a_worker_copies_only_what_it_writes() -> None:
    whole = trained()
    for holding in sharded():
        share = ShardWriteTask(state_shard=holding, token="t")
        snapshot = cut(whole, holding).capture(1, {}, task=share)
        assert bool(snapshot.weights) == bool(snapshot.extra) == holding.is_leader
        assert {len(snapshot.optimizer[f"{name}/exp_avg"]) for name in ("embed.weight",)} <= {3, 4}


def test_any_piece_of_any_dtype(tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (60 * 8,), dtype=torch.uint8)
    tensors = {
        name: (raw[:60] % 2 == 0 if dtype == torch.bool else raw.view(dtype)[:60]).reshape(5, 4, 3).clone()
        for name, dtype in STORABLE_DTYPES.items()
    }
    export_weights(tmp_path / "w.safetensors", tensors, {})
    pieces = [
        TensorSlice({0: ((1, 3),)}),
        TensorSlice({1: ((0, 1), (2, 4))}),
        TensorSlice({0: ((0, 1), (4, 5)), 2: ((1, 2),)}),
        TensorSlice({2: ((2, 2),)}),
        TensorSlice({0: ()}),
        FULL_SLICE,
    ]
    with StoredTensors(tmp_path, index_of_files(tmp_path, {"weights": "w.safetensors"})) as stored:
        for name, tensor in tensors.items():
            for piece in pieces:
                wanted = FULL_SLICE.extract(tensor)
                for dim, ranges in piece.cuts.items():
                    wanted = wanted.index_select(dim, torch.tensor([i for a, b in ranges for i in range(a, b)]).long())
                assert tensor_sha256(stored.read("weights", name, piece)) == tensor_sha256(wanted), (name, piece)


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four slices, read by one of two: the files of two of them, and never the whole of a tensor that is cut."""
    whole = trained()
    path = write(CheckpointDirectory(tmp_path), whole, sliced(4), 7).path
    opened: list[str] = []
    sizes: list[int] = []
    open_file, make = StoredTensors._file, torch.empty

    def opens(self: StoredTensors, name: str) -> Any:
        opened.append(name)
        return open_file(self, name)

    def makes(*args: Any, **settings: Any) -> Tensor:
        made = make(*args, **settings)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(StoredTensors, "_file", opens)
    monkeypatch.setattr(torch, "empty", makes)
    first = sliced(2)[0]
    only = StateShard(shapes=SHAPES, slices=first.slices, held={"qkv.weight"}, shard_index=None, num_shards=2)
    assert set(CheckpointDirectory(tmp_path).read(path, only).weights) == {"qkv.weight"}
    assert max(sizes) == 24, "half of 12×4"
    parts = {f"{kind}-{part}.safetensors" for kind in ("model", "optimizer") for part in (0, 1)}
    assert set(opened) == {*parts, "extra.safetensors"}


def test_pieces_have_to_make_up_the_whole() -> None:
    def of(*cuts: Any, shape: tuple[int, ...] = (4, 6)) -> bool:
        return is_complete(TensorEntry(shape, "float32", [StoredSlice("f", each) for each in cuts]))

    top, bottom = ((0, ((0, 2),)),), ((0, ((2, 4),)),)
    assert of(()) and of(top, bottom) and of((), shape=()) and of((), shape=(0, 3)) and of(top, ((0, ()),), bottom)
    assert of(top, ((0, ((2, 4),)), (1, ((0, 5),))), ((0, ((2, 4),)), (1, ((5, 6),))))
    assert of(((1, ((0, 1), (2, 3), (4, 5))),), ((1, ((1, 2), (3, 4), (5, 6))),))
    assert not of() and not of(top) and not of(top, bottom, ()) and not of(top, ((0, ((1, 4),)),))
    assert not of(top, ((0, ((2, 3),)),), ((0, ((2, 3),)),)), "the number of elements alone says nothing"
    assert not of(((0, ((0, 9),)),))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    whole = trained()
    checkpoints = CheckpointDirectory(tmp_path)
    write(checkpoints, whole, sliced(), 1)
    first, second = sliced()
    lazy = StateShard(shapes=SHAPES, slices=second.slices, writes={"qkv.weight"}, shard_index=1, num_shards=2)
    with pytest.raises(CheckpointError, match=r"embed\.weight: the shards' slices do not make up \(10, 4\)"):
        write(checkpoints, whole, [first, lazy], 2)
    shy = StateShard(shapes=SHAPES, slices=first.slices, writes=set(ALL) - {"scale"}, shard_index=0, num_shards=2)
    with pytest.raises(CheckpointError, match="the shards do not make up the weights: scale"):
        write(checkpoints, whole, [shy, second], 3)
    assert names(tmp_path) == ["step-00000001"]


def test_what_is_whole_beside_a_cut_parameter_has_to_be_the_same(tmp_path: Path) -> None:
    """As the step is. What an optimizer keeps in another shape than its parameter's cannot be put together."""
    whole, layout = trained(), sliced()
    shares = [ShardWriteTask(state_shard=holding, token="t") for holding in layout]
    lives = [cut(whole, holding) for holding in layout]
    lives[1].optimizer.state[lives[1].parameters["qkv.weight"]]["step"] += 1
    checkpoints = CheckpointDirectory(tmp_path)
    checkpoints.write_shard(lives[1].capture(1, {}, task=shares[1]), shares[1])
    with pytest.raises(CheckpointError, match=r"qkv\.weight/step is kept whole beside a parameter that is sliced"):
        checkpoints.write_shard(lives[0].capture(1, {}, task=shares[0]), shares[0])
    assert names(tmp_path) == []


def test_a_checkpoint_of_another_model_is_refused_and_not_skipped(tmp_path: Path) -> None:
    write(CheckpointDirectory(tmp_path), trained(), sliced(), 1)
    wider = StateShard(shapes=SHAPES | {"out.weight": (8, 4)}, shard_index=None)
    with pytest.raises(CheckpointMismatch, match=r"out\.weight: 4×4 in the checkpoint, 8×4 in the model"):
        CheckpointDirectory(tmp_path).newest(wider)
    other = StateShard(shapes={"a": (1,)}, shard_index=None)
    with pytest.raises(CheckpointMismatch, match="holds other tensors than the job"):
        CheckpointDirectory(tmp_path).newest(other)


def test_weights_on_meta_are_neither_captured_nor_restored() -> None:
    whole = trained()
    first, middle, last = [cut(whole, holding) for holding in pipeline()]
    weights, aliases = capture_weights(middle.model)
    assert set(weights) == {n for n in ALL if n.startswith(("norm", "out"))}
    assert aliases == {"head.weight": "embed.weight"}, "tied on meta, too; other tensors of one shape are not"
    assert set(capture_weights(last.model)[0]) == {"embed.weight", "scale"}
    restore_weights(middle.model, *capture_weights(whole.model))
    assert all(tensor.is_meta for name, tensor in middle.model.state_dict().items() if name not in weights)
    with pytest.raises(CheckpointError, match="other tensors than the job"):
        restore_weights(first.model, weights, aliases)
    with pytest.raises(CheckpointError, match="1 only in the checkpoint: odd"):
        restore_weights(first.model, capture_weights(first.model)[0] | {"odd": torch.ones(1)}, aliases)


def test_a_part_is_handed_over_to_one_that_holds_the_same() -> None:
    whole = trained()
    for layout in LAYOUTS.values():
        holding = layout()[-1]
        donor, newcomer = cut(whole, holding), empty(holding)
        newcomer.restore(donor.live_snapshot(3, {}))
        assert_same(newcomer.live_snapshot(3, {}), donor.live_snapshot(3, {}))


# ---- damage, absence
@pytest.mark.parametrize("file", ["model-1.safetensors", "optimizer-2.safetensors", "state.json", "extra.safetensors"])
def test_a_torn_part_is_found_and_the_older_one_loads(tmp_path: Path, file: str) -> None:
    whole = trained()
    write(CheckpointDirectory(tmp_path), whole, pipeline(), 10)
    path = write(CheckpointDirectory(tmp_path), whole, pipeline(), 20).path / file
    good = path.read_bytes()
    bad = bytearray(good)
    bad[-1] ^= 1
    for harm in (bytes(bad), good[: len(good) // 2], good + b"\n", None):
        path.unlink()
        if harm is not None:
            path.write_bytes(harm)
        for holding in (None, sliced()[1]):
            newest = CheckpointDirectory(tmp_path).newest(holding)
            assert newest is not None and newest.snapshot.step == 10
            assert len(newest.skipped) == 1 and newest.skipped[0].startswith(f"step-00000020: {file}")
        path.write_bytes(good)
    newest = CheckpointDirectory(tmp_path).newest()
    assert newest is not None and newest.snapshot.step == 20


def test_one_writer_and_several_keep_and_sweep_alike(tmp_path: Path) -> None:
    whole = trained()
    checkpoints = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        write(checkpoints, whole, sliced(), step)
    checkpoints.write(whole.capture(3, {}))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    write(CheckpointDirectory(tmp_path), whole, pipeline(), 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    write(CheckpointDirectory(tmp_path), whole, sharded(), 4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_a_dead_leader_left_under_the_same_name_is_not_used(tmp_path: Path) -> None:
    whole, layout = trained(), sliced()
    left = sharding.shared_folder(tmp_path, 5, "t")
    left.mkdir()
    (left / "owner").write_text("0123abcd-1-1")
    (left / "shard-1.json").write_text(json.dumps({"shard_index": 1, "num_shards": 2}))
    share = ShardWriteTask(state_shard=layout[0], token="t")
    share.cancelled.set()
    with pytest.raises(sharding.CheckpointAbandoned, match=r"without shard 1 of 2"):
        CheckpointDirectory(tmp_path).write_shard(cut(whole, layout[0]).capture(5, {}, task=share), share)
    assert names(tmp_path) == []


def test_a_part_that_comes_after_the_leader_gave_up_is_nobodys_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, layout = trained(), sliced()
    checkpoints = CheckpointDirectory(tmp_path)
    real = sharding.save_tensors

    def late(tensors: dict[str, Tensor], path: Path) -> None:
        checkpoints._discard(path.parent)
        real(tensors, path)

    monkeypatch.setattr(sharding, "save_tensors", late)
    share = ShardWriteTask(state_shard=layout[1], token="t")
    with pytest.raises(directory.CheckpointOvertaken):
        checkpoints.write_shard(cut(whole, layout[1]).capture(5, {}, task=share), share)
    assert names(tmp_path) == []


# ---- the keepers of several workers
class Crew:
    """A keeper for each worker, as the run calls them."""

    def __init__(self, folder: Path, whole: LiveState, layout: Sequence[StateShard], late: float = 30.0) -> None:
        self.events: list[list[Event]] = [[] for _ in layout]
        self.keepers = []
        for holding, told in zip(layout, self.events, strict=True):
            live = cut(whole, holding)
            keeper = Checkpointer(folder, live, told.append)
            keeper.writes = holding.shard_index is not None
            keeper.directory.stall_seconds = late
            self.keepers.append(keeper)

    def save(self, step: int, token: str = "t", without: Sequence[int] = ()) -> None:
        for number, keeper in enumerate(self.keepers):
            if number not in without:
                keeper.save(step, {"loss": 1.0}, token)

    def wait(self) -> None:
        for keeper in self.keepers:
            keeper._wait()

    def told(self) -> list[list[tuple[str, int]]]:
        kinds = (CheckpointSaved, SaveFailed)
        return [[(type(e).__name__, e.step) for e in told if isinstance(e, kinds)] for told in self.events]

    def close(self) -> None:
        for keeper in self.keepers:
            keeper.close()


class Alike:
    """A group whose members all find the same."""

    def gather_rows(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor])


def test_keepers_save_resume_and_export(tmp_path: Path) -> None:
    whole = trained()
    follower = StateShard(shapes=SHAPES, held=pipeline()[1].held, num_shards=3)  # of another replica: it writes nothing
    crew = Crew(tmp_path, whole, [*pipeline(), follower])
    crew.save(4)
    crew.save(4)  # once more at the end of the run: nothing to do
    for keeper in crew.keepers:
        keeper.export()
    crew.close()
    assert crew.told() == [[("CheckpointSaved", 4)], [], [], []]
    assert [keeper.saved_step for keeper in crew.keepers] == [4, -1, -1, -1]
    assert names(tmp_path) == ["checkpoints", "model.safetensors"]
    assert_same(CheckpointDirectory(tmp_path / "checkpoints").newest().snapshot, whole.capture(4, {"loss": 1.0}))  # type: ignore[union-attr]
    for holding in (*sliced(), None):
        keeper = Checkpointer(tmp_path, empty(holding), lambda event: None)
        assert keeper.resume(Alike()).snapshot.values["progress"] == {"loss": 1.0}  # type: ignore[arg-type]
        mine = whole if holding is None else cut(whole, holding)
        assert_same(keeper.live.capture(4, {}), mine.capture(4, {}))


def test_an_export_from_parts_is_that_of_the_whole(tmp_path: Path) -> None:
    whole = trained()
    weights, aliases = capture_weights(whole.model)
    export_weights(tmp_path / "whole.safetensors", weights, aliases)
    for name in ("pipeline", "slices", "rows of state", "stages of slices"):
        crew = Crew(tmp_path / name, whole, LAYOUTS[name]())
        crew.save(1)
        for keeper in crew.keepers:
            keeper.export()
        crew.close()
        path = tmp_path / name / "model.safetensors"
        every = weights | {name: weights[target] for name, target in aliases.items()}
        assert aliases and tensor_digests(sorted(load_file(path).items())) == tensor_digests(sorted(every.items()))
        Net().load_state_dict(load_file(path), strict=True)
        loaded, other_names = load_weights(path)
        assert tensor_digests(sorted(loaded.items())) == tensor_digests(sorted(weights.items()))
        assert other_names == aliases
        with (
            safe_open(path, framework="pt") as mine,
            safe_open(tmp_path / "whole.safetensors", framework="pt") as other,
        ):
            assert mine.metadata() == other.metadata()
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "tensors are aligned in the file"
        assert names(tmp_path / name) == ["checkpoints", "model.safetensors"]
        restore_weights(Net(), *load_weights(path))


def test_a_file_of_weights_is_read_piece_by_piece(tmp_path: Path) -> None:
    whole = trained()
    path = tmp_path / "start.safetensors"
    export_weights(path, *capture_weights(whole.model))
    everything = initial_weights(path)
    assert set(everything) == {*ALL, "head.weight"}
    assert everything["head.weight"] is everything["embed.weight"]
    for layout in LAYOUTS.values():
        for holding in layout():
            mine = capture_weights(cut(whole, holding).model)[0]
            assert tensor_digests(sorted(initial_weights(path, holding).items())) == tensor_digests(
                sorted(mine.items())
            )
    last = initial_weights(
        path, StateShard(shapes=SHAPES, held=["head.weight"], slices={"head.weight": row_slice((10, 4), 2, 1)})
    )
    assert tensor_sha256(last["head.weight"]) == tensor_sha256(everything["embed.weight"][5:])
    with pytest.raises(CheckpointError, match=r"have no odd"):
        initial_weights(path, StateShard(shapes={"odd": (1,)}))
    with pytest.raises(CheckpointError, match=r"scale: \(\) in the weights .*, \(3,\) in the model"):
        initial_weights(path, StateShard(shapes={"scale": (3,)}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        initial_weights(tmp_path / "none.safetensors")


def test_a_part_that_never_comes_is_told_once_and_what_stands_stays(tmp_path: Path) -> None:
    whole = trained()
    crew = Crew(tmp_path, whole, sliced())
    crew.save(1)
    crew.wait()
    crew.keepers[0].directory.stall_seconds = 0.05
    for step in (2, 3):
        crew.save(step, without=[1])
        crew.wait()
        assert crew.keepers[0].policy.failing and crew.keepers[0].saved_step == 1
    assert crew.told() == [[("CheckpointSaved", 1), ("SaveFailed", 2)], []]
    (event,) = [e for e in crew.events[0] if isinstance(e, SaveFailed)]
    assert "the checkpoint of step 2 was not written: shard 1 of 2 did not come" in event.reason
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
    crew.keepers[0].export()
    assert isinstance(crew.events[0][-1], SaveFailed) and not (tmp_path / "model.safetensors").exists()
    crew.keepers[0].directory.stall_seconds = 30.0
    crew.save(4)
    crew.close()
    assert crew.told()[0][-1] == ("CheckpointSaved", 4) and not crew.keepers[0].policy.failing
    newest = CheckpointDirectory(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert_same(newest.snapshot, whole.capture(4, {"loss": 1.0}))


def test_a_leader_that_failed_is_given_the_part_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step, asked for once more: at the end of a run whose last checkpoint failed."""
    crew = Crew(tmp_path, trained(), sliced())

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_manifest", fail)
        crew.save(1)
        crew.wait()
    assert crew.told() == [[("SaveFailed", 1)], []] and names(tmp_path / "checkpoints") == []
    crew.save(1)
    crew.close()
    assert crew.told() == [[("SaveFailed", 1), ("CheckpointSaved", 1)], []]


def test_a_part_that_the_leader_has_taken_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is asked for twice. The second time comes while the leader, which has merged and removed the
    receipts, completes the folder: nobody may write there any more."""
    crew, real, seen = Crew(tmp_path, trained(), sliced()), directory.write_manifest, []

    def asked_again(partial: Path, **how: Any) -> None:
        files = {path.name: path.stat().st_mtime_ns for path in partial.iterdir()}
        crew.keepers[1].save(1, {"loss": 1.0}, "t")
        crew.keepers[1]._wait()
        seen.append(files == {path.name: path.stat().st_mtime_ns for path in partial.iterdir()})
        real(partial, **how)

    monkeypatch.setattr(directory, "write_manifest", asked_again)
    crew.save(1)
    crew.wait()
    crew.close()
    assert seen == [True] and crew.told() == [[("CheckpointSaved", 1)], []]


def test_a_part_that_cannot_be_written_is_told_by_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(tmp_path, trained(), sliced())
    real = sharding.save_tensors

    def full(tensors: dict[str, Tensor], path: Path) -> None:
        if path.name == "optimizer-1.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)

    monkeypatch.setattr(sharding, "save_tensors", full)
    for step in (1, 2):
        crew.save(step)
        crew.wait()
    assert crew.told() == [[("SaveFailed", 1)], []]
    reason = crew.events[0][0].reason  # type: ignore[attr-defined]
    assert "step 1 was not written: No space left on device (shard 1)" in reason and "free some space" in reason
    assert names(tmp_path / "checkpoints") == []
    crew.close()


def test_roles_change_with_the_members(tmp_path: Path) -> None:
    """The second stage's writer is lost while the leader waits for it: given up, not told, and done anew by another."""
    whole, layout = trained(), pipeline(2)
    idle = StateShard(shapes=SHAPES, held=layout[1].held, num_shards=2)
    crew = Crew(tmp_path, whole, [*layout, idle])
    for keeper, holding in zip(crew.keepers, [*layout, idle], strict=True):
        keeper.regroup(2, is_leader=holding.is_leader, state_shard=holding, writers=("a", "b"))
    crew.save(1, without=[1])
    for number, holding in ((0, layout[0]), (2, layout[1])):
        crew.keepers[number].regroup(2, is_leader=holding.is_leader, state_shard=holding, writers=("a", "c"))
    crew.wait()
    assert crew.keepers[0].policy.failing and crew.told() == [[], [], []]
    crew.save(2, token="u", without=[1])
    crew.wait()
    assert crew.told() == [[("CheckpointSaved", 2)], [], []]
    assert names(tmp_path / "checkpoints") == ["step-00000002"]
    # The leader is lost, too, and the third worker is alone with everything: the format of one.
    alone = StateShard(shapes=SHAPES, writes=set(ALL), shard_index=0, num_shards=1)
    keeper = Checkpointer(tmp_path, cut(whole, alone), crew.events[2].append)
    keeper.regroup(1, is_leader=True)
    keeper.save(3, {"loss": 1.0}, "v")
    keeper.export()
    keeper.close()
    assert crew.told()[2] == [("CheckpointSaved", 3)]
    assert "model.safetensors" in names(tmp_path / "checkpoints" / "step-00000003")
    assert (tmp_path / "model.safetensors").exists()
    crew.close()


def test_the_same_step_is_written_anew_by_other_members(tmp_path: Path) -> None:
    """At the end of a run: a writer is lost while its part is waited for, and all save the last step once more."""
    layout = pipeline(2)
    crew = Crew(tmp_path, trained(), [*layout, layout[1]])
    crew.save(1, without=[1, 2])
    for number, holding in ((0, layout[0]), (2, layout[1])):
        crew.keepers[number].regroup(2, is_leader=holding.is_leader, state_shard=holding, writers=("a", "c"))
    crew.save(1, token="u", without=[1])
    crew.keepers[0].export()
    crew.close()
    assert crew.told() == [[("CheckpointSaved", 1)], [], []]
    assert names(tmp_path) == ["checkpoints", "model.safetensors"]


def test_a_result_is_written_again_when_the_leader_is_lost_at_the_very_end(tmp_path: Path) -> None:
    """The others have closed their keepers by then: what they wrote is gone with the leader's folder."""
    layout = pipeline(2)
    crew = Crew(tmp_path, trained(), [layout[0], layout[1], layout[0]])
    crew.save(1, without=[0, 2])
    crew.keepers[1].close()
    crew.save(1, token="u", without=[0])
    crew.keepers[2].export()
    crew.close()
    assert crew.told() == [[], [], [("CheckpointSaved", 1)]]
    left = [name for name in names(tmp_path / "checkpoints") if name.startswith(".")]
    assert len(left) == 1, "of the leader that never came nothing is known: swept when it is old"
    assert load_file(tmp_path / "model.safetensors")


def test_a_run_that_ends_does_not_wait_for_the_others(tmp_path: Path) -> None:
    crew = Crew(tmp_path, trained(), sliced(), late=600)
    crew.save(1, without=[1])
    began = time.monotonic()
    crew.keepers[0].close(give_up=True)
    assert time.monotonic() - began < 30
    assert crew.told() == [[("SaveFailed", 1)], []]
    assert names(tmp_path / "checkpoints") == []


def test_training_goes_on_while_parts_are_written(tmp_path: Path) -> None:
    """What is written is the state of the step, whatever comes after it."""
    whole = trained()
    crew = Crew(tmp_path, whole, sliced())
    crew.save(1, without=[1])
    for live in (crew.keepers[0].live, crew.keepers[1].live):
        saved: Mapping[str, Tensor] = dict(live.parameters)
        if live is crew.keepers[1].live:
            crew.keepers[1].save(1, {"loss": 1.0}, "t")
        with torch.no_grad():
            for parameter in saved.values():
                parameter.fill_(7.0)
    crew.close()
    newest = CheckpointDirectory(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert_same(newest.snapshot, whole.capture(1, {"loss": 1.0}))
