"""A model in parts, by stages and by rows, and checkpoints that its parts write together."""

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from shoal.numerics.digest import tensor_digests
from shoal.numerics.tensor_slice import TensorSlice, even_slice, row_slice
from shoal.recovery.checkpoint import directory
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.files import ShardWriteTask, Snapshot, StateShard
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.recovery.checkpoint.state import shapes_of

TENSORS = ("weights", "optimizer", "extra")


# ---- a run, whole and cut
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
        found: Tensor = self.head(self.norm(self.out(q * k + v)) * self.scale)
        return found


def live_of(model: nn.Module, rate: Any = 0.01) -> LiveState:
    named = dict(model.named_parameters())
    first = [named[name] for name in ("out.weight", "scale")]
    rest = [parameter for parameter in named.values() if all(parameter is not each for each in first)]
    groups: list[dict[str, Any]] = [{"params": first, "weight_decay": 0.1}, {"params": rest}]
    optimizer = optim.AdamW(groups, lr=rate, foreach=False)
    return LiveState(
        model=model,
        parameters=named,
        optimizer=optimizer,
        scheduler=optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
        state={"shadow": torch.zeros(3)},
        arithmetic={"lanes": 4},
        traits={"isa": "any"},
    )


def trained(steps: int = 3, rate: Any = 0.01) -> LiveState:
    live = live_of(Net(), rate)
    live.state["shadow"].fill_(steps)
    for _ in range(steps):
        live.optimizer.zero_grad()
        nn.functional.cross_entropy(live.model(torch.arange(10)), torch.arange(10)).backward()
        live.optimizer.step()
        live.scheduler.step()
    return live


SHAPES = shapes_of(Net())
ALL = list(SHAPES)


def cut(whole: LiveState, holding: StateShard, rate: Any = 0.01) -> LiveState:
    """A worker's live objects: its pieces, and all else on meta. Without state if the whole has none."""
    model = copy.deepcopy(whole.model)
    made: dict[int, Tensor] = {}
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if name in SHAPES}

    def mine(tensor: Tensor) -> Tensor:
        name = names[id(tensor)]
        held = holding.held is None or name in holding.held
        data = holding.slice_of(name).extract(tensor) if held else torch.empty_like(tensor, device="meta")
        fresh = nn.Parameter(data) if isinstance(tensor, nn.Parameter) else data
        return made.setdefault(id(tensor), fresh)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = mine(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mine(buffer)
    live = live_of(model, rate)
    live.state_shard = holding
    live.scheduler.load_state_dict(whole.scheduler.state_dict())
    for group, other in zip(live.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
    for name, parameter in live.parameters.items():
        state = whole.optimizer.state.get(whole.parameters[name])
        if state and not parameter.is_meta:
            piece, shape = holding.optimizer_slice_of(name), SHAPES[name]
            live.optimizer.state[parameter] = {
                key: piece.extract(value) if tuple(value.shape) == shape else value.clone()
                for key, value in state.items()
            }
    live.state["shadow"].copy_(whole.state["shadow"])
    return live


Layout = list[StateShard]


def pipeline(parts: int = 3) -> Layout:
    """The tied embedding is held by the first stage and the last; the first writes it."""
    stages = [["embed.weight", "qkv.weight", "qkv.bias"], [n for n in ALL if n.startswith(("norm", "out"))], ["scale"]]
    if parts == 2:
        stages = [stages[0] + stages[1], stages[2]]
    return [
        StateShard(
            shapes=SHAPES,
            held={*names, "embed.weight"} if part == parts - 1 else set(names),
            writes=set(names),
            shard_index=part,
            num_shards=parts,
        )
        for part, names in enumerate(stages)
    ]


def sliced(parts: int = 2) -> Layout:
    """Fused rows in three ranges, columns, and rows; norms and scale whole on all."""

    def pieces(part: int) -> dict[str, TensorSlice]:
        return {
            "embed.weight": row_slice(SHAPES["embed.weight"], parts, part),
            "qkv.weight": even_slice((12, 4), 0, parts, part, segments=3),
            "qkv.bias": even_slice((12,), 0, parts, part, segments=3),
            "out.weight": even_slice((4, 4), 1, parts, part),
        }

    return [
        StateShard(
            shapes=SHAPES,
            slices=pieces(part),
            writes=set(ALL if part == 0 else pieces(part)),
            shard_index=part,
            num_shards=parts,
        )
        for part in range(parts)
    ]


def write(
    checkpoints: CheckpointDirectory, whole: LiveState, layout: Layout, step: int, token: str = "t"
) -> directory.WrittenCheckpoint:
    """Every worker on a thread of its own, the leader last to begin."""
    found: list[Any] = []

    def play(holding: StateShard) -> None:
        share = ShardWriteTask(state_shard=holding, token=token)
        snapshot = cut(whole, holding).capture(step, {"loss": 0.5}, task=share)
        try:
            found.append(checkpoints.write_shard(snapshot, share))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=play, args=(holding,)) for holding in reversed(layout)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise errors[0]
    (written,) = [each for each in found if each is not None]
    assert isinstance(written, directory.WrittenCheckpoint)
    return written


def assert_same(left: Snapshot, right: Snapshot) -> None:
    for part in TENSORS:
        assert list(getattr(left, part)) == list(getattr(right, part)), "order is part of a digest"
        assert tensor_digests(getattr(left, part).items()) == tensor_digests(getattr(right, part).items())
    for part in ("step", "aliases", "values", "arithmetic", "fingerprint"):
        assert getattr(left, part) == getattr(right, part), part
    assert list(left.values["optimizer"]["state"]) == list(right.values["optimizer"]["state"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
