"""A model built without its weights: whatever is filled in has the bits of the whole."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.sketched_models import large, linear_stack
from shoal.errors import JobError
from shoal.numerics import init_tape as module
from shoal.numerics import kernels
from shoal.numerics.meta_init import MetaModel, build_meta_model
from shoal.numerics.seeds import initialise


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def same_bits(left: Tensor, right: Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(*(each.detach().contiguous().view(-1).view(torch.uint8) for each in (left, right)))


# -- models ---------------------------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 3)


class Block(nn.Module):
    def __init__(self, width: int, length: int, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        for part in range(3):
            nn.init.xavier_uniform_(self.qkv.weight[part * width : (part + 1) * width])
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        angles = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.drop = nn.Dropout(drop)


class Gpt(nn.Module):
    """Tied, with a loop over its modules, stochastic depth, and tables of its own."""

    def __init__(self, width: int = 40, length: int = 64, words: int = 90, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=3), nn.Embedding(length, width)
        drops = [x.item() for x in torch.linspace(0, 0.1, layers)]
        self.blocks = nn.ModuleList(Block(width, length, drop) for drop in drops)
        self.head = nn.Linear(width, words, bias=False)
        self.apply(self.start)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.words.weight
        self.table = torch.rand(60, 60)  # neither parameter nor buffer
        self.tables = [torch.arange(3000), {"deep": torch.ones(50, 50).expand(2, 50, 50)}]

    def start(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Conv2d(40, 40, 3, groups=2), nn.GroupNorm(4, 40))
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out")
    return model


def channels_last() -> nn.Module:
    return convolutions().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def recurrent() -> nn.Module:
    return nn.ModuleDict({"lstm": nn.LSTM(40, 40, 2, bidirectional=True), "gru": nn.GRU(40, 40)})


def initialisations() -> nn.Module:
    layers = nn.ModuleList(nn.Linear(60, 60) for _ in range(8))
    weights: list[Any] = [layer.weight for layer in layers]
    nn.init.orthogonal_(weights[0])
    nn.init.trunc_normal_(weights[1], std=0.02)
    nn.init.trunc_normal_(weights[2], std=2.0)  # draws again what is outside, as often as it takes
    nn.init.sparse_(weights[3], 0.1)
    weights[4].data.copy_(weights[3].data.t())
    weights[5].data[torch.randperm(60)[:10]] = 0
    weights[6].data.div_(weights[6].std().item()).to("cpu").add_(1)
    with torch.no_grad():
        weights[7][weights[7] < 0] *= 0.5
    return layers


class Old(nn.Module):
    """As models were written once; and what others put in from outside of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(50, 50))
        self.weight.data.uniform_(-1, 1)
        self.other = nn.Parameter(torch.FloatTensor(50, 50).normal_())
        self.given = nn.Parameter(torch.from_numpy(numpy.random.randn(50, 50)))
        self.register_buffer("mixed", torch.full((40, 40), random.random()))
        self.frozen = nn.Parameter(torch.randn(40, 40), requires_grad=False)
        self.frozen.note = "kept"  # type: ignore[attr-defined]
        self.rates = torch.linspace(0, 1, 2000).tolist()[5:7]


def moved() -> nn.Module:
    model = nn.Linear(60, 60, dtype=torch.float32)
    extra = torch.zeros(50, 50, device=model.weight.device)
    extra[:, ::2] = torch.randn(50, 25)
    model.register_buffer("extra", extra)
    model.register_buffer("like", torch.randn_like(extra).type_as(extra))
    return model.to("cpu").to(torch.bfloat16)


def other_default() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Linear(60, 60)
    finally:
        torch.set_default_dtype(torch.float32)


DEFERRED = [
    linear_stack, encoder, Gpt, convolutions, channels_last, recurrent, initialisations, Old, moved, other_default,
]  # fmt: skip


@pytest.mark.parametrize("build", DEFERRED)
def test_each_tensor_by_itself_has_the_bits_of_the_whole(build: Callable[[], nn.Module]) -> None:
    whole, found = named(initialise(build, 3)), build_meta_model(build, 3)
    assert found.deferred, found.reason
    assert list(named(found.model)) == list(whole)
    assert all(tensor.is_meta for tensor in named(found.model).values())
    for name in random.Random(0).sample(list(whole), len(whole)):
        filled = found.materialize(name)
        assert same_bits(filled, whole[name]), name
        assert kernels.is_aligned(filled) and filled.untyped_storage().nbytes() == filled.nbytes
        assert filled.stride() == whole[name].stride() or filled.is_contiguous()
        assert same_bits(found.materialize(name, lambda value: value[1:]), whole[name][1:]) if filled.dim() else True


@pytest.mark.parametrize("build", DEFERRED)
def test_what_is_installed_is_of_the_same_kind(build: Callable[[], nn.Module]) -> None:
    model, found = initialise(build, 3), build_meta_model(build, 3)
    whole = named(model)
    found.install(reversed(whole))
    found.drop_unused()
    installed = named(found.model)
    assert list(installed) == list(whole)
    for name, tensor in installed.items():
        assert same_bits(tensor, whole[name]) and type(tensor) is type(whole[name])
        assert (tensor.requires_grad, vars(tensor)) == (whole[name].requires_grad, vars(whole[name]))
    ties = [[left is right for left in held.values() for right in held.values()] for held in (whole, installed)]
    assert ties[0] == ties[1]
    assert list(found.model.state_dict()) == list(model.state_dict())


def test_plain_attributes_are_real() -> None:
    whole, found = initialise(Gpt, 1), build_meta_model(Gpt, 1).model
    assert isinstance(found, Gpt)
    assert same_bits(found.table, whole.table) and same_bits(found.tables[0], whole.tables[0])
    assert same_bits(found.tables[1]["deep"], whole.tables[1]["deep"])
    assert [block.drop.p for block in found.blocks] == [block.drop.p for block in whole.blocks]


def test_an_installed_model_computes() -> None:
    model, found = initialise(recurrent, 2), build_meta_model(recurrent, 2)
    found.install(named(model))
    data = torch.randn(5, 2, 40)
    for name in ("lstm", "gru"):
        assert same_bits(found.model[name](data)[0], model[name](data)[0])
    found.model["lstm"](data)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in found.model["lstm"].parameters())


def test_only_some_are_installed_and_only_a_part_of_each() -> None:
    whole, found = named(initialise(Gpt, 3)), build_meta_model(Gpt, 3)
    found.install(["blocks.1.qkv.weight", "head.weight"], lambda name, value: value[:7] if "qkv" in name else value)
    found.drop_unused()
    tensors = named(found.model)
    real = {name for name, tensor in tensors.items() if not tensor.is_meta}
    assert real == {"blocks.1.qkv.weight", "head.weight", "words.weight"}
    assert tensors["head.weight"] is tensors["words.weight"]
    assert same_bits(tensors["blocks.1.qkv.weight"], whole["blocks.1.qkv.weight"][:7])
    with pytest.raises(KeyError):
        found.materialize("places.weight")


def test_hooks_on_parameters_come_along() -> None:
    def build() -> nn.Module:
        model = nn.Linear(60, 60)
        model.weight.register_hook(lambda gradient: gradient * 2)
        return model

    model, found = initialise(build, 0), build_meta_model(build, 0)
    found.install(named(model))
    for each in (model, found.model):
        each(torch.ones(2, 60)).sum().backward()
    assert torch.equal(found.model.weight.grad, model.weight.grad)


def test_generators_are_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = state()
    build_meta_model(Gpt, 1).materialize("blocks.0.qkv.weight")
    assert state() == before


# -- what cannot be recorded ------------------------------------------------------------------------------------------


def shared_memory() -> nn.Module:
    first, second = nn.Linear(60, 60), nn.Linear(60, 60)
    second.weight = nn.Parameter(first.weight.data)
    return nn.Sequential(first, second)


def called() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 20, 5), nn.BatchNorm2d(20), nn.Flatten())
    size = model(torch.rand(2, 3, 12, 12)).shape[1]
    return nn.Sequential(model, nn.Linear(size, 10))


def own_generator() -> nn.Module:
    model = nn.Linear(60, 60)
    generator = torch.Generator().manual_seed(7)
    nn.init.normal_(model.weight, generator=generator)
    nn.init.normal_(model.bias, generator=generator)
    return model


def through_numpy() -> nn.Module:
    model = nn.Linear(60, 60)
    model.weight.data.numpy()[:] = 3
    return model


def swallowed() -> nn.Module:
    model = nn.Linear(60, 60)
    try:
        model.weight.data.numpy()[:] = 3
    except Exception:
        return nn.Linear(5, 5)
    return model


def view_kept() -> nn.Module:
    model = nn.Linear(60, 60)
    model.half = model.weight.data[:30]  # type: ignore[assignment]
    return model


def batch_norm_function() -> nn.Module:
    model = nn.BatchNorm1d(2000)
    F.batch_norm(torch.randn(4, 2000), model.running_mean, model.running_var, training=True)
    return model


WHOLE = [shared_memory, called, own_generator, through_numpy, swallowed, view_kept, batch_norm_function]


@pytest.mark.parametrize("build", WHOLE)
def test_what_cannot_be_recorded_is_built_whole(build: Callable[[], nn.Module]) -> None:
    whole, found = named(initialise(build, 3)), build_meta_model(build, 3)
    assert not found.deferred and found.reason
    assert all(tensor.is_meta for tensor in named(found.model).values())
    assert all(same_bits(found.materialize(name), tensor) for name, tensor in whole.items())
    found.install(list(whole)[:1])
    found.drop_unused()
    first, *rest = named(found.model).values()
    assert same_bits(first, next(iter(whole.values()))) and all(tensor.is_meta for tensor in rest)


def test_memory_that_is_shared_stays_shared() -> None:
    found = build_meta_model(shared_memory, 3)
    found.install(named(found.model))
    assert found.model[0].weight.data_ptr() == found.model[1].weight.data_ptr()


def test_a_kernel_that_is_not_as_its_shadow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, found = named(initialise(linear_stack, 3)), build_meta_model(linear_stack, 3)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("another geometry")

    monkeypatch.setattr(module.OpTape, "replay", refuse)
    assert all(same_bits(found.materialize(name), tensor) for name, tensor in whole.items())
    assert not found.deferred


def test_a_cache_is_not_poisoned() -> None:
    cache: list[Tensor] = []

    def build(fails: bool) -> nn.Module:
        if not cache:
            cache.append(torch.arange(5000).float())
        model = nn.Linear(60, 60)
        model.register_buffer("table", cache[0] * 2)
        return through_numpy() if fails else model

    for fails in (True, False):
        cache.clear()
        build_meta_model(lambda fails=fails: build(fails), 0)  # type: ignore[misc]
        assert torch.equal(cache[0], torch.arange(5000).float())


def test_the_users_own_mistake_is_the_users_own_error() -> None:
    def build() -> nn.Module:
        return nn.Linear(60, 60)(torch.randn(4, 61))  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        build_meta_model(build, 0)
    with pytest.raises(JobError, match="returned int"):
        build_meta_model(lambda: 3, 0)  # type: ignore[arg-type,return-value]


# -- instances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_a_model_that_is_there(copy: bool) -> None:
    whole, instance = named(initialise(Gpt, 3)), initialise(Gpt, 3)
    found = MetaModel.from_model(instance, copy)
    assert (found.model is instance) == (not copy)
    assert all(tensor.is_meta for tensor in named(found.model).values())
    found.install(["head.weight", "blocks.0.mask"])
    tensors = named(found.model)
    assert tensors["head.weight"] is tensors["words.weight"]
    tensors["head.weight"].data.zero_()
    assert same_bits(tensors["blocks.0.mask"], whole["blocks.0.mask"])
    assert same_bits(found.materialize("places.weight"), whole["places.weight"])
    if copy:
        assert all(same_bits(tensor, whole[name]) for name, tensor in named(instance).items())


# -- memory -----------------------------------------------------------------------------------------------------------


def test_only_what_a_tensor_depends_on_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = build_meta_model(large, 0)
    drawn: list[int] = []
    monkeypatch.setattr(module, "seed_torch", lambda *path: drawn.append(path[-1]))
    found.materialize("3.weight")
    assert drawn == [24 + 3]  # two draws of each layer first, then the loop; what it overwrites is not drawn
