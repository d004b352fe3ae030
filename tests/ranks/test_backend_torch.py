"""What is built on torch.distributed works on the backend "shoal": DDP and its variants, sharding, DTensor, pipelines.

Each check compares with the same model trained in one process on the whole batch.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers import backend_ranks
from helpers.backend_ranks import BACKEND, Checks, Played, close, own_folder, report, same

check = Checks()
played = backend_ranks.played  # the fixture

STEPS = 4


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step: int, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 8, generator=generator), torch.randint(4, (count,), generator=generator)


def share(tensor: Tensor, rank: int, size: int) -> Tensor:
    return tensor.chunk(size)[rank]


def alone(model: nn.Module, steps: int = STEPS, lr: float = 0.1) -> nn.Module:
    """The truth: one process, whole batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(model: nn.Module, rank: int, size: int, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = (share(each, rank, size) for each in batch(step))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal_weights(found: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        close(whole, other, name, tolerance)


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


@check(2, 3)
def ddp_in_its_usual_forms(rank: int, size: int) -> None:
    truth = alone(net())
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},  # many buckets
        {"bucket_cap_mb": 0.0005, "static_graph": True},
        {"broadcast_buffers": False},
    ):
        model = DistributedDataParallel(net(seed=rank), **options)  # rank 0's weights win
        train(model, rank, size)
        if rank == 0:
            assert next(net(0).parameters()).shape == next(model.parameters()).shape
        equal_weights(model.module, truth)


@check(2)
def ddp_in_half_precision_and_double(rank: int, size: int) -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.1), (torch.float64, 1e-12)):
        truth, model = net().to(dtype), DistributedDataParallel(net().to(dtype))
        for each, part in ((truth, lambda t: t), (model, lambda t: share(t, rank, size))):
            x, y = (part(t) for t in batch(0))
            F.cross_entropy(each(x.to(dtype)), y).backward()
        for one, other in zip(model.module.parameters(), truth.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            close(one.grad, other.grad, str(dtype), tolerance)


@check(2)
def ddp_accumulates_without_synchronising(rank: int, size: int) -> None:
    truth, model = net(), DistributedDataParallel(net())
    for step in range(3):
        x, y = batch(step)
        F.cross_entropy(truth(x), y).backward()
        x, y = (share(each, rank, size) for each in (x, y))
        if step < 2:
            with model.no_sync():
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
    for one, other in zip(model.module.parameters(), truth.parameters(), strict=True):
        close(one.grad, other.grad)


class Branches(nn.Module):
    """Uses one of two layers, by rank; the third by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


@check(2)
def ddp_with_parameters_that_not_every_rank_uses(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    x, y = batch(0)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x, rank), y).backward()
        for number in range(2):
            truth = copy.deepcopy(model.module.layers[number])
            truth.zero_grad()
            (F.cross_entropy(truth(x), y) / 2).backward()
            close(model.module.layers[number].weight.grad, truth.weight.grad, f"layer {number}")
        assert model.module.layers[2].weight.grad is None  # unused everywhere: left alone


@check(2)
def ddp_broadcasts_buffers(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    for step in range(2):
        x, y = (share(each, rank, size) for each in batch(step))
        F.cross_entropy(model(x), y).backward()
    model(batch(9)[0])  # begins with rank 0's buffers; all see the same batch
    mean = model.module[1].running_mean
    every = [torch.zeros_like(mean) for _ in range(size)]
    dist.all_gather(every, mean)
    same(every[0], every[1])


@check(2)
def ddp_communication_hooks(rank: int, size: int) -> None:
    truth = alone(net())

    def doubled(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hooks: list[tuple[Any, Any, float]] = [
        (None, default_hooks.allreduce_hook, 1e-5),
        (None, default_hooks.fp16_compress_hook, 1e-2),
        (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 1e-2),
        (None, doubled, 1e-5),
        (dist.group.WORLD, default_hooks.allreduce_hook, 1e-5),
    ]
    for state, hook, tolerance in hooks:
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, hook)
        train(model, rank, size)
        equal_weights(model.module, truth, tolerance)
    for start, hook in ((2, powerSGD_hook.powerSGD_hook), (1000, powerSGD_hook.powerSGD_hook)):
        model = DistributedDataParallel(net())
        options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": start, "min_compression_rate": 1}
        model.register_comm_hook(powerSGD_hook.PowerSGDState(dist.group.WORLD, **options), hook)
        train(model, rank, size, steps=8)
        first = next(iter(model.module.parameters())).detach()
        every = [torch.zeros_like(first) for _ in range(size)]
        dist.all_gather(every, first.contiguous())
        same(every[0], every[1], f"powerSGD from {start}: the ranks agree")
    equal_weights(model.module, alone(net(), steps=8), 1e-4)  # it never began to compress


@check(2, 3)
def ddp_joins_ranks_with_uneven_inputs(rank: int, size: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    with Join([model]):
        for step in range(3 + rank):
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    assert done == 3 + rank
    weight = model.module[0].weight.detach()
    every = [torch.zeros_like(weight) for _ in range(size)]
    dist.all_gather(every, weight)
    for other in every:
        same(other, every[-1])  # those that ended early got the last one's weights

    def until_the_first_ends() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + 2 * rank):
                F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        until_the_first_ends()
    dist.barrier()


@check(2)
def ddp_with_sparse_gradients(rank: int, size: int) -> None:
    def words(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.EmbeddingBag(10, 3, sparse=True))

    torch.manual_seed(7)
    x, y = torch.randint(0, 10, (4, 2)), torch.randint(0, 3, (4,))
    for options in ({}, {"gradient_as_bucket_view": True}):
        truth, model = words(), DistributedDataParallel(words(), **options)
        F.cross_entropy(truth(x), y).backward()
        F.cross_entropy(model(share(x, rank, size)), share(y, rank, size)).backward()
        found, expected = model.module[0].weight.grad, truth[0].weight.grad
        assert found.is_sparse
        close(found.to_dense(), expected.to_dense())


@contextmanager
def debugging() -> Iterator[None]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        yield
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level_from_env()


@check(2, beyond_gloo=True)  # there, torch 2.13 ends with a segmentation fault
def init_with_debugging_in_detail(rank: int, size: int) -> None:
    with debugging():
        store = dist.PrefixStore("debug", backend_ranks.own_store)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
        model = DistributedDataParallel(net())
        train(model, rank, size)
        equal_weights(model.module, alone(net()))
        found: list[Any] = [None] * size
        dist.all_gather_object(found, rank)
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        dist.destroy_process_group()


@check(2)
def ddp_beside_groups_of_its_own(rank: int, size: int) -> None:
    models = [DistributedDataParallel(net(), process_group=dist.new_group()) for _ in range(2)]
    for model in models:
        train(model, rank, size)
        equal_weights(model.module, alone(net()))
    models[0].zero_grad()
    # both networks in one graph: their buckets are reduced in an order that the graph decides
    x, y = (share(each, rank, size) for each in batch(0))
    F.cross_entropy(models[0](x) + models[1](x), y).backward()


# -- sharded --------------------------------------------------------------------------------------------------------


def _sharded(size: int, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@check(2, 3)
def fully_sharded_training(rank: int, size: int) -> None:
    truth = alone(net())
    for options in ({}, {"reshard_after_forward": False}):
        model = _sharded(size, **options)
        train(model, rank, size)
        equal_weights(model, truth)
        assert isinstance(next(model.parameters()), DTensor)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert total is not None
    state = get_model_state_dict(model, options=checkpoint.state_dict.StateDictOptions(full_state_dict=True))
    if rank == 0:
        for name, value in truth.state_dict().items():
            close(state[name], value, name)


@check(4)
def sharded_and_replicated(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(net(), mesh=mesh)
    train(model, rank, size)
    equal_weights(model, alone(net()))


@check(2)
def the_older_fully_sharded_wrapper(rank: int, size: int) -> None:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, rank, size)
    truth = alone(net())
    with FullyShardedDataParallel.summon_full_params(model):
        equal_weights(model, truth)


@check(2)
def sharded_optimizer_state(rank: int, size: int) -> None:
    truth = net()
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    plain = torch.optim.AdamW(truth.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        for one, how, part in ((truth, plain, (x, y)), (model, optimizer, tuple(share(t, rank, size) for t in (x, y)))):
            how.zero_grad()
            F.cross_entropy(one(part[0]), part[1]).backward()
            how.step()
    equal_weights(model.module, truth, 1e-4)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(truth.parameters()))


# -- DTensor and tensor parallelism ---------------------------------------------------------------------------------


@check(2, 3, 4)
def distributed_tensors(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).view(7, 5)  # divides by none of the sizes
    for first in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole, mesh, [first])
        same(tensor.full_tensor(), whole, str(first))
        for second in (Shard(1), Replicate(), Shard(0)):
            same(tensor.redistribute(mesh, [second]).full_tensor(), whole, f"{first} to {second}")
    partial = DTensor.from_local(whole, mesh, [Partial()])
    same(partial.redistribute(mesh, [Replicate()]).to_local(), size * whole, "partial to replicated")
    same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), size * whole, "partial to sharded")
    left, right = (
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)]),
    )
    close((left @ right).full_tensor(), whole @ whole.t(), "product")


@check(4)
def distributed_tensors_on_two_dimensions(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(24.0).view(4, 6)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    same(tensor.full_tensor(), whole)
    same(tensor.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    same(tensor.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), whole)


@check(2)
def tensor_parallel_layers(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    truth, model = net(), net()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for step in range(3):
        x, y = batch(step)
        for one in (truth, model):
            one.zero_grad()
            loss = F.cross_entropy(one(x), y)
            loss.backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
    equal_weights(model, truth)


@check(4)
def tensor_parallel_and_sharded(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = net()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = (share(each, mesh["data"].get_local_rank(), 2) for each in batch(step))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    equal_weights(model, alone(net()))


# -- pipelines ------------------------------------------------------------------------------------------------------


@check(2)
def pipelines(rank: int, size: int) -> None:
    x, y = batch(0, count=16)
    truth = net()
    expected = truth(x)
    F.cross_entropy(expected, y).backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        layers = list(net())
        part = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        plan = schedule(stage, n_microbatches=4, loss_fn=F.cross_entropy)
        for _ in range(2):
            part.zero_grad()
            losses: list[Tensor] = []
            if rank == 0:
                plan.step(x)
            else:
                out = plan.step(target=y, losses=losses)
                close(out, expected, "output")
                close(torch.stack(losses).mean(), F.cross_entropy(expected, y), "loss")
        theirs = list(truth.parameters())[:2] if rank == 0 else list(truth.parameters())[2:]
        for one, other in zip(part.parameters(), theirs, strict=True):
            close(one.grad, other.grad, schedule.__name__)


# -- checkpoints ----------------------------------------------------------------------------------------------------


@check(2, 3)
def checkpoints_of_sharded_models(rank: int, size: int) -> None:
    folder = own_folder(f"checkpoint-{size}")
    model = _sharded(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x, y = (share(each, rank, size) for each in batch(step))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state, "step": 2}, checkpoint_id=folder)
    expected = [parameter.full_tensor().clone() for parameter in model.parameters()]

    torch.manual_seed(5)
    other = _sharded(size)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.01)
    weights, state = get_state_dict(other, fresh)
    loaded = {"model": weights, "optimizer": state, "step": 0}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(other, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert loaded["step"] == 2
    for one, two in zip(other.parameters(), expected, strict=True):
        same(one.full_tensor(), two)


@check(2)
def checkpoints_saved_in_the_background(rank: int, size: int) -> None:
    folder, other = own_folder("checkpoint-async"), dist.new_group()
    tensor = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (size,)), [Shard(0)])
    future = checkpoint.async_save({"tensor": tensor}, checkpoint_id=folder)
    dist.all_reduce(torch.ones(1000), group=other)  # meanwhile: the thread that saves has the world to itself
    future.result()
    found = {"tensor": distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (size,)), [Replicate()])}
    dist.barrier()
    checkpoint.load(found, checkpoint_id=folder)
    same(found["tensor"].to_local(), torch.arange(8.0))


# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), check.cases)
def test_on_top_of_the_backend(played: Played, size: int, name: str) -> None:
    report(played(size), name)
