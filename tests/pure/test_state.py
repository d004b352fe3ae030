"""The live side: a run that is captured, written, and taken up again in fresh objects goes on with the same bits."""

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedulers

from shoal.errors import CheckpointError
from shoal.numerics.digest import quick_digest, tensor_digests, tensor_sha256
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.recovery.checkpoint.export import check_weights, export_weights, initial_weights, load_weights
from shoal.recovery.checkpoint.files import Snapshot
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.recovery.checkpoint.serialize import decode, encode
from shoal.recovery.checkpoint.state import (
    capture_extra,
    capture_optimizer,
    capture_scheduler,
    capture_weights,
    restore_extra,
    restore_optimizer,
    restore_scheduler,
    restore_weights,
    shapes_of,
)


@pytest.fixture(autouse=True)
def random_state_stays() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


MakeOptimizer = Callable[[nn.Module], optim.Optimizer]
MakeScheduler = Callable[[optim.Optimizer], Any]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 3))


def two_groups(kind: Callable[..., optim.Optimizer], **settings: Any) -> MakeOptimizer:
    def make(model: nn.Module) -> optim.Optimizer:
        parameters = list(model.parameters())
        return kind([{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}], **settings)

    return make


def in_half(epoch: int) -> float:
    return 0.5**epoch


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD momentum": two_groups(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": two_groups(optim.AdamW, lr=0.01, betas=(0.8, 0.95)),
    "AdamW fused": two_groups(optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": two_groups(optim.AdamW, lr=0.01, foreach=True),
    "AdamW tensor rate": two_groups(optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "AdamW numpy rate": two_groups(optim.AdamW, lr=np.float64(0.01)),
    "Adam amsgrad": two_groups(optim.Adam, lr=0.01, amsgrad=True),
    "Adagrad": two_groups(optim.Adagrad, lr=0.05, lr_decay=0.01),
    "RMSprop": two_groups(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "with names": lambda model: optim.AdamW(model.named_parameters(), lr=0.01),
    "LBFGS": lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4),
}

SCHEDULERS: dict[str, MakeScheduler] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2, gamma=0.3),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 5, 5, 7], gamma=0.3),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 7),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=3), schedulers.MultiStepLR(optimizer, [2, 4])],
        milestones=[3],
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, total_iters=5), schedulers.LambdaLR(optimizer, [in_half, in_half])]
    ),
}


class Run:
    """A job of a few lines, whose step s always sees the same batch."""

    def __init__(self, model: Callable[[], nn.Module], optimizer: MakeOptimizer, scheduler: MakeScheduler) -> None:
        torch.default_generator.manual_seed(7)
        self.model = model()
        self.optimizer = optimizer(self.model)
        self.scheduler = scheduler(self.optimizer)

    def train(self, first: int, past: int) -> None:
        dtype = next(self.model.parameters()).dtype
        for step in range(first, past):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 6, generator=generator).to(dtype)
            targets = torch.randn(8, 3, generator=generator).to(dtype)

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                torch.autograd.backward(loss)
                return loss

            self.optimizer.step(closure)  # type: ignore[arg-type]
            arguments = [1.0] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []
            self.scheduler.step(*arguments)

    def capture(self, step: int) -> Snapshot:
        weights, aliases = capture_weights(self.model)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tensors, groups = capture_optimizer(self.optimizer, names)
        return Snapshot(
            step=step,
            weights=weights,
            aliases=aliases,
            optimizer=tensors,
            extra={},
            values={"optimizer": groups, "scheduler": capture_scheduler(self.scheduler)},
            arithmetic={},
            fingerprint="",
        )

    def restore(self, snapshot: Snapshot) -> None:
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        named = dict(self.model.named_parameters())
        restore_optimizer(self.optimizer, named, snapshot.optimizer, snapshot.values["optimizer"])
        restore_scheduler(self.scheduler, snapshot.values["scheduler"])

    def state(self, step: int) -> dict[str, Any]:
        """Everything, as comparable values: digests of tensors, and exact JSON."""
        now = self.capture(step)
        return {
            "weights": tensor_digests(now.weights.items()),
            "optimizer": tensor_digests(now.optimizer.items()),
            "values": json.dumps(now.values),
            "gradients": tensor_digests((n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None),
        }


def assert_resumes_exactly(
    folder: Path, model: Callable[[], nn.Module], optimizer: MakeOptimizer, scheduler: MakeScheduler
) -> Run:
    whole = Run(model, optimizer, scheduler)
    whole.train(0, 4)
    snapshot = whole.capture(4)
    whole.train(4, 9)  # before the write: the snapshot must not change with the run

    resumed = Run(model, optimizer, scheduler)
    resumed.train(20, 21)  # not fresh: whatever is there has to go
    resumed.restore(CheckpointDirectory(folder).read(CheckpointDirectory(folder).write(snapshot).path))
    after = resumed.capture(4)
    assert tensor_digests(after.weights.items()) == tensor_digests(snapshot.weights.items())
    assert tensor_digests(after.optimizer.items()) == tensor_digests(snapshot.optimizer.items())
    assert after.values == snapshot.values
    for state in resumed.optimizer.state.values():
        assert all(value.data_ptr() % 64 == 0 for value in state.values() if isinstance(value, Tensor))
    resumed.train(4, 9)
    assert resumed.state(9) == whole.state(9)

    unrestored = Run(model, optimizer, scheduler)
    unrestored.train(4, 9)
    assert unrestored.state(9)["weights"] != whole.state(9)["weights"], "this test would pass without restoring"
    return resumed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    resumed = assert_resumes_exactly(tmp_path, mlp, OPTIMIZERS[optimizer], SCHEDULERS["StepLR"])
    for group in resumed.optimizer.param_groups:
        assert isinstance(group["lr"], Tensor) == (optimizer == "AdamW tensor rate")
        assert isinstance(group.get("betas", ()), tuple)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_goes_on_with_the_same_bits(tmp_path: Path, scheduler: str) -> None:
    assert_resumes_exactly(tmp_path, mlp, OPTIMIZERS["SGD momentum"], SCHEDULERS[scheduler])


@pytest.mark.parametrize("scheduler", ["MultiStepLR", "SequentialLR", "ReduceLROnPlateau"])
def test_a_tensor_as_learning_rate_stays_the_same_tensor(tmp_path: Path, scheduler: str) -> None:
    rate = OPTIMIZERS["AdamW tensor rate"]
    run = Run(mlp, lambda model: rate(model), SCHEDULERS[scheduler])
    held = run.optimizer.param_groups[0]["lr"]
    held.fill_(0.5)
    snapshot = run.capture(0)
    held.fill_(0.25)
    run.restore(snapshot)
    assert run.optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_a_checkpoint_from_before_the_first_step_takes_state_away() -> None:
    run = Run(mlp, OPTIMIZERS["AdamW"], SCHEDULERS["StepLR"])
    start = run.capture(0)
    run.train(0, 2)
    run.restore(start)
    assert dict(run.optimizer.state) == {}


# ---- handing over: from a run that goes on to one that has not begun


def live(run: Run, **state: Any) -> LiveState:
    parameters = dict(run.model.named_parameters())
    return LiveState(
        model=run.model,
        parameters=parameters,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        state=state,
        arithmetic={"batch": 8},
        traits={"isa": "any"},
    )


def carried(lent: Snapshot) -> Snapshot:
    """What arrives at the other end of a wire: fresh tensors, and JSON."""
    parts = {part: {name: tensor.clone() for name, tensor in getattr(lent, part).items()} for part in PARTS}
    return Snapshot(**{**vars(lent), **parts, "values": json.loads(json.dumps(lent.values))})


PARTS = ("weights", "optimizer", "extra")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "SequentialLR"])
@pytest.mark.parametrize(
    "optimizer", ["SGD momentum", "Adam amsgrad", "AdamW", "AdamW fused", "AdamW foreach", "with names"]
)
def test_a_newcomer_whose_optimizer_never_stepped_goes_on_like_the_donor(
    optimizer: str, scheduler: str, own: bool
) -> None:
    donor = Run(mlp, OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    donor.train(0, 4)
    newcomer = Run(mlp, OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    assert not newcomer.optimizer.state
    shadow, mine = torch.arange(3.0), torch.zeros(3)
    lent = live(donor, shadow=shadow).live_snapshot(4, {"loss": 0.5})
    arrived = carried(lent)
    for part in PARTS:
        sent, received = getattr(lent, part), getattr(arrived, part)
        assert {name: quick_digest(tensor) for name, tensor in sent.items()} == {
            n: quick_digest(t) for n, t in received.items()
        }
    live(newcomer, shadow=mine).restore(arrived, own=own)
    assert mine.tolist() == [0.0, 1.0, 2.0]
    for run in (donor, newcomer):
        run.train(4, 9)
    assert newcomer.state(9) == donor.state(9)
    for state in newcomer.optimizer.state.values():
        assert all(value.data_ptr() % 64 == 0 for value in state.values() if isinstance(value, Tensor))


def test_what_is_lent_is_the_live_memory_and_what_is_captured_is_not() -> None:
    run = Run(mlp, OPTIMIZERS["AdamW"], SCHEDULERS["StepLR"])
    run.train(0, 2)
    donor = live(run)
    lent, captured = donor.live_snapshot(2, {}), donor.capture(2, {})
    moments = {id(value): value for state in run.optimizer.state.values() for value in state.values()}
    memory = {each.data_ptr() for each in (*run.model.state_dict().values(), *moments.values())}
    assert {tensor.data_ptr() for part in PARTS for tensor in getattr(lent, part).values()} == memory
    assert not {tensor.data_ptr() for part in PARTS for tensor in getattr(captured, part).values()} & memory
    assert (lent.values, lent.aliases) == (captured.values, captured.aliases)
    before = {part: tensor_digests(getattr(captured, part).items()) for part in PARTS}
    assert {part: tensor_digests(getattr(lent, part).items()) for part in PARTS} == before
    run.train(2, 3)
    assert {part: tensor_digests(getattr(captured, part).items()) for part in PARTS} == before
    assert tensor_digests(lent.weights.items()) != before["weights"]


def test_restoring_never_ties_two_runs_together_unless_the_tensors_are_its_own() -> None:
    run, other = (Run(mlp, OPTIMIZERS["AdamW"], SCHEDULERS["StepLR"]) for _ in range(2))
    run.train(0, 2)
    live(other).restore(live(run).live_snapshot(2, {}))
    before = other.state(2)
    run.train(2, 3)
    assert other.state(2) == before
    parts = torch.zeros(400)  # tensors cut from one buffer are not whole, so they are copied even so
    lent = live(run).live_snapshot(3, {})
    first = next(name for name in lent.optimizer if name.endswith("exp_avg"))
    lent.optimizer[first] = parts[: lent.optimizer[first].numel()].view_as(lent.optimizer[first])
    live(other).restore(lent, own=True)
    assert all(
        value.untyped_storage().data_ptr() != parts.data_ptr()
        for state in other.optimizer.state.values()
        for value in state.values()
    )


@pytest.mark.parametrize("count", [1, 3, 511, 1024, 1025, 2048 * 300 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_quick_digest_sees_every_kind_of_damage(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)
    right = quick_digest(tensor)
    assert -(1 << 63) <= right < 1 << 63
    assert quick_digest(tensor.clone()) == right
    seen = {right}

    def damaged(bad: Tensor) -> None:
        assert quick_digest(bad) not in seen
        seen.add(quick_digest(bad))

    for offset in sorted({0, 1, raw.numel() // 2, raw.numel() - 1} & set(range(raw.numel()))):
        for mask in (0x01, 0x80):
            bad = raw.clone()
            bad[offset] ^= mask
            damaged(bad.view(dtype))
    if count > 1:
        half = count // 2
        damaged(torch.cat([tensor[half:], tensor[:half]]))
        damaged(tensor[:-1])
        damaged(torch.cat([tensor[:-1], torch.zeros(1, dtype=dtype)]))
        damaged(torch.cat([tensor, torch.zeros(1, dtype=dtype)]))
        damaged(tensor.reshape(1, -1))
        swapped = raw.clone()
        swapped[0], swapped[-1] = raw[-1], raw[0]
        damaged(swapped.view(dtype))
    if dtype != torch.uint8:
        damaged(raw)


def test_the_quick_digest_goes_by_content_and_not_by_place() -> None:
    tensor = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    shifted = torch.cat([torch.zeros(1), tensor.reshape(-1)])[1:].view_as(tensor)  # not at a multiple of 8 bytes
    turned = tensor.t().contiguous().t()
    assert quick_digest(shifted) == quick_digest(turned) == quick_digest(tensor)
    assert quick_digest(torch.empty(0, 3)) == quick_digest(torch.zeros(0, 3)) != quick_digest(torch.empty(3, 0))


# ---- shapes that models come in


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.inner = nn.Linear(3, 6)
        self.decoder = nn.Linear(6, 3, bias=False)
        self.decoder.weight = self.encoder.weight
        scale = torch.rand(3)
        self.register_buffer("scale", scale)
        self.register_buffer("same_scale", scale)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("other_empty", torch.zeros(0))
        self.register_buffer("transient", torch.rand(2), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.inner(torch.tanh(self.encoder(inputs)))) * self.scale
        return out


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weights, aliases = capture_weights(Tied())
    assert aliases == {"same_scale": "scale", "decoder.weight": "encoder.weight"}
    assert set(weights) | set(aliases) == set(Tied().state_dict())
    assert list(weights) == [name for name in Tied().state_dict() if name not in aliases]
    resumed = assert_resumes_exactly(
        tmp_path, Tied, lambda model: optim.AdamW(model.parameters(), lr=0.01), SCHEDULERS["CosineAnnealingLR"]
    )
    assert isinstance(resumed.model, Tied)
    assert resumed.model.decoder.weight is resumed.model.encoder.weight


def test_exported_tied_weights_load_strictly(tmp_path: Path) -> None:
    trained, path, once = Tied(), tmp_path / "model.safetensors", tmp_path / "once.safetensors"
    weights, aliases = capture_weights(trained)
    export_weights(path, weights, aliases)
    loaded = load_file(path)
    fresh = Tied()
    fresh.load_state_dict(loaded, strict=True)
    assert tensor_digests(fresh.state_dict().items()) == tensor_digests(trained.state_dict().items())
    # Shoal 0.2 wrote a tied weight once, with its other names in the metadata.
    save_file(weights, once, {"format": "pt", "aliases": json.dumps(aliases)})
    for file in (path, once):
        check_weights(file, shapes_of(trained), trained.state_dict().keys())
        check_weights(file, shapes_of(trained))
        begun = initial_weights(file)
        assert tensor_digests(sorted(begun.items())) == tensor_digests(sorted(trained.state_dict().items()))
        found, other_names = load_weights(file)
        assert (set(found), other_names) == (set(weights), aliases)


def test_tying_that_differs_is_refused() -> None:
    untied = Tied()
    untied.decoder.weight = nn.Parameter(untied.encoder.weight.detach().clone())
    with pytest.raises(CheckpointError, match=r"decoder\.weight and encoder\.weight are one tensor in the checkpoint"):
        restore_weights(untied, *capture_weights(Tied()))
    with torch.no_grad():
        untied.decoder.weight.add_(1)
    with pytest.raises(CheckpointError, match=r"decoder\.weight and encoder\.weight are one tensor in the model"):
        restore_weights(Tied(), *capture_weights(untied))


def test_bf16_parameters_keep_fp32_state(tmp_path: Path) -> None:
    def fp32_state(model: nn.Module) -> optim.Optimizer:
        class Master(optim.Optimizer):
            """Momentum and a master copy in fp32, as mixed precision has them."""

            def __init__(self) -> None:
                super().__init__(list(model.parameters()), {"lr": 0.1})

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                with torch.enable_grad():
                    closure()
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        if not state:
                            state["master"], state["momentum"] = parameter.float(), torch.zeros(parameter.shape)
                            state["count"] = 0
                        state["count"] += 1
                        state["momentum"].mul_(0.9).add_(parameter.grad.float())
                        state["master"].sub_(group["lr"] * state["momentum"])
                        parameter.copy_(state["master"])

        return Master()

    resumed = assert_resumes_exactly(
        tmp_path,
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).bfloat16(),
        fp32_state,
        SCHEDULERS["StepLR"],
    )
    for parameter, state in resumed.optimizer.state.items():
        assert parameter.dtype == torch.bfloat16
        assert (state["master"].dtype, state["momentum"].dtype, state["count"]) == (torch.float32, torch.float32, 9)


def test_parameters_that_are_not_row_major_keep_their_layout_and_so_does_their_state(tmp_path: Path) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3).t())
            self.other = nn.Parameter(torch.randn(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, self.weight, self.other)

    resumed = assert_resumes_exactly(tmp_path, Transposed, OPTIMIZERS["AdamW"], SCHEDULERS["StepLR"])
    weight = resumed.model.get_parameter("weight")
    assert weight.stride() == (1, 3)
    assert resumed.optimizer.state[weight]["exp_avg"].stride() == (1, 3)


def test_restoring_copies_into_the_parameters_that_are_there() -> None:
    model = mlp()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    weights, aliases = capture_weights(mlp())
    restore_weights(model, weights, aliases)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert (tensor is before[name][0], tensor.data_ptr()) == (True, before[name][1])
        assert tensor_sha256(tensor) == tensor_sha256(weights[name])
        assert tensor.data_ptr() != weights[name].data_ptr()


# ---- what does not fit


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), r"1\.weight: 2×3 .*, 5×3 "),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).double()), r"1\.weight: .*float32 .*float64"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)), r"only in the checkpoint: 1\.bias"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.PReLU()), r"only in the job: 2\.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_copied(
    other: Callable[[], nn.Module], message: str
) -> None:
    weights, aliases = capture_weights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    model = other()
    before = tensor_digests(model.state_dict().items())
    with pytest.raises(CheckpointError) as caught:
        restore_weights(model, weights, aliases)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert tensor_digests(model.state_dict().items()) == before


def test_modules_whose_state_would_be_lost_are_refused() -> None:
    class Own(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

    with pytest.raises(CheckpointError, match="module 0 keeps state of its own"):
        capture_weights(nn.Sequential(Own(2, 2)))
    with pytest.raises(CheckpointError, match=r"0\.weight has no shape yet"):
        capture_weights(nn.Sequential(nn.LazyLinear(2)))


def test_an_optimizer_that_does_not_fit_is_refused_and_left_alone() -> None:
    def captured(model: nn.Module, optimizer: optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return capture_optimizer(optimizer, {id(p): n for n, p in model.named_parameters()})

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    first, second = list(model[0].parameters()), list(model[1].parameters())
    tensors, values = captured(model, optim.SGD([{"params": first}, {"params": second}], lr=0.5))
    named = dict(model.named_parameters())
    wrong: list[tuple[optim.Optimizer, str]] = [
        (optim.AdamW(first), "is a SGD in the checkpoint, a AdamW in the job"),
        (optim.SGD([*first, *second]), "2 parameter groups in the checkpoint, 1 in the optimizer"),
        (optim.SGD([{"params": first[:1]}, {"params": second}]), "group 0: 2 parameters in the checkpoint, 1 in"),
        (optim.SGD([{"params": second}, {"params": first}]), r"0\.weight in the checkpoint, 1\.weight at its place"),
    ]
    for optimizer, message in wrong:
        before = json.dumps(captured(model, optimizer)[1])
        with pytest.raises(CheckpointError, match=message):
            restore_optimizer(optimizer, named, tensors, values)
        assert json.dumps(captured(model, optimizer)[1]) == before
    wider = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    optimizer = optim.SGD([{"params": wider[0].parameters()}, {"params": wider[1].parameters()}])
    with pytest.raises(CheckpointError, match=r"1\.weight: 2×3 in the checkpoint, 5×3 in the model"):
        restore_optimizer(optimizer, dict(wider.named_parameters()), tensors, values)
    with pytest.raises(CheckpointError, match="parameter 0 of group 0, 4, is not in the model"):
        captured(model, optim.SGD([nn.Parameter(torch.ones(4))]))


def test_a_scheduler_that_does_not_fit_is_refused() -> None:
    run = Run(mlp, OPTIMIZERS["SGD momentum"], SCHEDULERS["SequentialLR"])
    value = capture_scheduler(run.scheduler)
    with pytest.raises(CheckpointError, match=r"SequentialLR\(LinearLR, MultiStepLR\) in the checkpoint, a StepLR in"):
        restore_scheduler(SCHEDULERS["StepLR"](run.optimizer), value)
    with pytest.raises(CheckpointError, match="the scheduler did not take its state: KeyError"):
        restore_scheduler(run.scheduler, {**value, "state": {}})
    run.scheduler.hook = print
    with pytest.raises(CheckpointError, match=r"scheduler/hook is a builtins\.builtin_function_or_method"):
        capture_scheduler(run.scheduler)


def test_milestones_keep_their_integer_keys() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))])
    value = json.loads(json.dumps(capture_scheduler(schedulers.MultiStepLR(optimizer, [2, 5, 5]))))
    other = schedulers.MultiStepLR(optimizer, [1])
    restore_scheduler(other, value)
    assert other.milestones == Counter({2: 1, 5: 2})
    assert type(other.milestones) is Counter


# ---- what the user adds


class Average:
    def __init__(self) -> None:
        self.shadow = {"w": torch.zeros(3, dtype=torch.float64)}
        self.history: list[Any] = []

    def state_dict(self) -> dict[Any, Any]:
        return {"shadow": self.shadow, "history": self.history, 3: ("three", float("inf"))}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[3] == ("three", float("inf"))
        self.shadow, self.history = state["shadow"], state["history"]


def extra_state() -> dict[str, Any]:
    torch.default_generator.manual_seed(3)
    discriminator = nn.Linear(2, 2).bfloat16()
    return {
        "average": Average(),
        "model": discriminator,
        "its optimizer": optim.Adam(discriminator.parameters()),
        "counts": torch.zeros(2, dtype=torch.int64),
        "best": {"loss": None, "inner": {"list": [1, 2]}, "tensor": torch.zeros(2)},
        "log": [],
        "seen": Counter(),
    }


def test_extra_state_comes_back_in_place() -> None:
    state = extra_state()
    state["average"].shadow["w"] += 0.1
    state["average"].history.append((1, torch.ones(2)))
    state["model"](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    state["its optimizer"].step()
    for adam in state["its optimizer"].state.values():
        adam["exp_avg"] = adam["exp_avg"].float() + 1e-6  # more bits than load_state_dict would keep
    state["counts"] += 5
    state["best"]["loss"] = 0.1 + 0.2
    state["best"]["inner"]["list"].append(float("nan"))
    state["best"]["tensor"] += 0.3
    state["log"].append({"step": 1 << 100})
    state["seen"].update([4, 4, "four"])
    tensors, values = capture_extra(state)
    expected = json.dumps(values), tensor_digests(tensors.items())
    state["counts"] += 1  # a snapshot is a copy
    state["average"].shadow["w"] += 1
    assert (json.dumps(values), tensor_digests(tensors.items())) == expected

    fresh = extra_state()
    held = {"inner": fresh["best"]["inner"], "tensor": fresh["best"]["tensor"], **fresh}
    restore_extra(fresh, tensors, json.loads(expected[0]))
    again = capture_extra(fresh)
    assert (json.dumps(again[1]), tensor_digests(again[0].items())) == expected
    assert all(fresh[name] is held[name] for name in fresh)
    assert fresh["best"]["inner"] is held["inner"]
    assert fresh["best"]["tensor"] is held["tensor"]
    assert fresh["counts"].tolist() == [5, 5]
    assert fresh["seen"] == Counter({4: 2, "four": 1})
    for adam in fresh["its optimizer"].state.values():
        assert adam["exp_avg"].dtype == torch.float32


def test_extra_state_that_does_not_fit_is_refused_by_name() -> None:
    for item, kind in ((0.5, "float"), ((1, 2), "tuple"), (torch.Generator(), "Generator"), ({1}, "set")):
        with pytest.raises(CheckpointError, match=f"extra state 'mine' is a {kind}"):
            capture_extra({"mine": item})
    with pytest.raises(CheckpointError, match=r"mine/deep/1 is a builtins\.set"):
        capture_extra({"mine": {"deep": [1, {2}]}})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="does it contain itself"):
        capture_extra({"mine": loop})

    tensors, values = capture_extra({"a": {"x": 1}, "b": torch.ones(2)})
    live: dict[str, Any] = {"a": {"x": 2}, "b": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"b: 2 torch\.float32 in the checkpoint, 3 torch\.float32"):
        restore_extra(live, tensors, values)
    assert live["a"] == {"x": 2}, "nothing is restored if something does not fit"
    with pytest.raises(CheckpointError, match="holds other extra state than the job") as caught:
        restore_extra({"a": {}, "c": {}}, tensors, values)
    assert caught.value.where == ("1 only in the job: c", "1 only in the checkpoint: b")
    with pytest.raises(CheckpointError, match="extra state 'a' is a dict in the checkpoint, a list in the job"):
        restore_extra({"a": [], "b": torch.ones(2)}, tensors, values)
    with pytest.raises(CheckpointError, match="name a tensor 'b' that it does not hold"):
        restore_extra({"a": {}, "b": torch.ones(2)}, {}, values)


# ---- the encoding under all of it


VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1 << 200, 0.1, -0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf")),
    *("", "ß\ud800\n", [], (), {}, [[]], ((),), {"": {}}, {"$tensor": 1}, {"a": 1, "$": 2}),
    {1: "a", "1": "b", None: "c", (1, 2): "d", 0.5: "e", True + 1: "f"},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({30: 1, 80: 2}),
    *(np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True)),
]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value: Any, inline: bool) -> None:
    tensors: dict[str, Tensor] | None = None if inline else {}
    back = decode(json.loads(json.dumps(encode(value, "v", tensors), allow_nan=False)), tensors or {})
    assert repr(back) == repr(value)
    assert type(back) is type(value)


@pytest.mark.parametrize("inline", [False, True])
def test_tensors_inside_values_come_back_fresh_and_aligned(inline: bool) -> None:
    base = torch.randn(9)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = {"view": base[1:4], "scalar": torch.tensor(True), "empty": torch.zeros(0, 3).bfloat16(), "c": channels_last}
    tensors: dict[str, Tensor] | None = None if inline else {}
    text = json.dumps(encode(value, "v", tensors))
    expected = tensor_digests(value.items())
    base.zero_()
    back = decode(json.loads(text), tensors or {})
    assert tensor_digests(back.items()) == expected
    for name, tensor in back.items():
        assert tensor.data_ptr() % 64 == 0
        assert all(tensor.data_ptr() != stored.data_ptr() for stored in (tensors or {}).values() if tensor.numel()), (
            name
        )
    if not inline:
        assert back["c"].stride() == channels_last.stride()


def test_names_that_would_meet_are_kept_apart() -> None:
    tensors: dict[str, Tensor] = {}
    value = {"a/b": {"c": torch.ones(1)}, "a": {"b/c": torch.zeros(1)}}
    back = decode(encode(value, "v", tensors), tensors)
    assert (back["a/b"]["c"].item(), back["a"]["b/c"].item()) == (1.0, 0.0)
