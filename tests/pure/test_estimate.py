"""What a job costs, counted before it runs: operators, what backward keeps, what one device would need."""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.places import EXAMPLES
from shoal.cli.estimate_text import estimate, lane_seconds
from shoal.cli.main import main
from shoal.errors import InputError, JobError
from shoal.job.dataset import open_data
from shoal.job.job import Job
from shoal.job.load import load_job
from shoal.numerics import seeds
from shoal.parallel.blocks import find_blocks
from shoal.planner.cluster import find_cluster
from shoal.planner.cost.predict import predict
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.shoal_memory import gradient_sets, memory_bytes
from shoal.planner.cost.trace import TracedModel, fake_batch, fake_copy, fake_mode, trace
from shoal.planner.cost.transformer_shape import TransformerShape
from shoal.planner.cost.workload import Workload
from shoal.planner.trace_job import workload_of, workload_of_script
from shoal.testing import everything, job_for


@pytest.fixture(autouse=True)
def generators_stay() -> Iterator[None]:
    with seeds.preserve_generators():
        torch.manual_seed(0)
        yield


def traced(model: nn.Module, *inputs: Tensor) -> TracedModel:
    mode = fake_mode()
    stand, fakes = fake_copy(model, mode), fake_batch(inputs, mode)
    with mode:
        return trace(stand, find_blocks(stand), lambda: stand(*fakes).sum(), inputs=fakes)


def survey(job: Job) -> Workload:
    return workload_of(job, open_data(job.data, seed=job.seed, shuffle=job.shuffle))


def job_of(model: Callable[[], nn.Module], x: Tensor, loss: Any = None, **more: Any) -> Job:
    settings: dict[str, Any] = {"batch": len(x), "lanes": 1, "steps": 1} | more
    return Job(
        model=model,
        data=(x, torch.zeros(len(x))),
        loss=loss or (lambda output, target: output.sum()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        **settings,
    )


# -- operators --------------------------------------------------------------------------------------------------------


def test_a_linear_layer_costs_two_m_n_k_and_twice_that_backward() -> None:
    m, k, n = 32, 48, 64
    first, second = traced(nn.Sequential(nn.Linear(k, n), nn.Linear(n, k)), torch.zeros(m, k)).blocks
    assert first.flops(backward=False) == 2 * m * n * k == first.flops(backward=True)  # the input needs no gradient
    assert second.flops(backward=False) == 2 * m * n * k
    assert second.flops(backward=True) == 4 * m * n * k
    forward = next(op for op in second.ops if op.flops and not op.backward)
    weights, activations = 4 * (n * k + k), 4 * (m * n + m * k)
    assert (forward.bytes, forward.fixed) == (weights + activations, weights)
    backward = [op for op in second.ops if op.flops and op.backward]
    # Once for the input, once for the weight: either moves the weight or its gradient, which no sample makes larger.
    assert sum(op.fixed * op.times for op in backward) == 2 * 4 * n * k


def test_a_convolution_and_attention_are_counted() -> None:
    conv = traced(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), torch.zeros(2, 3, 10, 10)).blocks[0]
    assert conv.flops(backward=False) == 2 * (2 * 8 * 10 * 10) * (3 * 3 * 3)

    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    query = torch.zeros(2, 4, 16, 8, requires_grad=True)
    mixing = traced(nn.Sequential(Mixing()), query).blocks[0]
    assert mixing.flops(backward=False) == 2 * 2 * (2 * 4 * 16 * 16 * 8)  # scores, and values by them
    assert mixing.flops(backward=True) == 5 * 2 * (2 * 4 * 16 * 16 * 8)  # scores again, and four gradients
    assert all(op.core for op in mixing.ops if op.flops)


def test_what_only_reads_and_writes_has_bytes_and_views_cost_nothing() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.transpose(0, 1).reshape(-1, 4)).view(-1)

    (block,) = traced(nn.Sequential(Views()), torch.zeros(8, 4, requires_grad=True)).blocks
    forward = {op.name: op for op in block.ops if not op.backward}
    assert forward["relu"].bytes == 2 * 8 * 4 * 4
    assert {"transpose", "view", "t"}.isdisjoint(forward)
    table = traced(nn.Sequential(nn.Embedding(1000, 8)), torch.zeros(5, dtype=torch.int64)).blocks[0]
    lookup = next(op for op in table.ops if op.name == "embedding")
    assert lookup.bytes == 5 * 8 + 2 * (5 * 8 * 4)  # the rows that come out, not the table


# -- what backward keeps ----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Attention with a softmax of its own, dropout, a residual and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        x = x + self.attend(h, h, h, need_weights=True)[0]
        more: Tensor = self.down(F.gelu(self.up(self.second(x))))
        return x + more


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), (8, 16)),
    "norms": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2)), (4, 3, 12, 12)),
    "encoder": (Encoder, (2, 6, 16)),
    "recurrent": (lambda: First(nn.GRU(8, 8, batch_first=True)), (2, 5, 8)),
}


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


def really_kept(model: nn.Module, x: Tensor) -> int:
    """Of a run on real tensors: bytes of storages that autograd keeps, parameters and buffers left out."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        output = model(x)
    assert output.grad_fn is not None
    return sum(kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_kept_is_what_a_real_run_keeps(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    found = traced(model, x)
    # The sum at the end, and it alone, is the trace's own; it keeps nothing.
    assert sum(block.saved for block in found.blocks) == really_kept(model, x)


def test_the_most_that_is_alive_is_found_besides() -> None:
    """y = exp(2x) is kept; while it is made, 2x is there too, and while its gradient is, that."""

    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).exp()

    (block,) = traced(nn.Sequential(Exponential()), torch.zeros(1000, requires_grad=True)).blocks
    assert block.saved == 4000
    assert 4000 <= block.working <= 4000 + 16  # and a few single numbers


def test_autocast_keeps_weights_in_another_dtype_which_no_sample_makes_larger() -> None:
    model = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))  # noqa: E731
    job = job_of(model, torch.zeros(4, 64), precision="bf16")
    work = survey(job)
    assert work.dtype == "bf16" and work.weight_bytes == 4.0
    assert all(block.saved_fixed == 2 * 64 * 64 for block in work.blocks[1:])
    halved = survey(job_of(model, torch.zeros(4, 64), precision="bf16-weights"))
    assert (halved.weight_bytes, halved.gradient_bytes, halved.state_bytes) == (2.0, 2.0, 12.0)
    assert not any(block.saved_fixed for block in halved.blocks)


# -- jobs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt() -> Workload:
    with seeds.preserve_generators():
        return survey(load_job(str(EXAMPLES / "gpt.py")))


def test_a_gpt_agrees_with_the_formulas_of_its_shape(gpt: Workload) -> None:
    shape = TransformerShape(layers=4, hidden=128, heads=4, seq=64, vocab=256)
    last_norm = 2 * 128  # the formula leaves it out
    assert gpt.parameters == shape.parameters + last_norm
    assert (gpt.samples, gpt.lanes, gpt.microbatches, gpt.batch, gpt.tokens) == (4, 4, 2, 32, 64)
    flops = sum(block.flops(backward=way) for block in gpt.blocks for way in (False, True)) / gpt.samples
    core_again = 4 * shape.core_flops / 2  # attention in one kernel makes its scores again for backward
    assert flops - core_again == pytest.approx(shape.flops(), rel=0.01)
    assert gpt.state_bytes == 8.0 and gpt.tied == 256 * 128


def test_equal_blocks_are_one_object_and_know_what_slices_would_share(gpt: Workload) -> None:
    assert [block.name for block in gpt.blocks] == ["token", "place", "blocks.0", *["blocks.1–3"] * 3, "norm", "head"]
    layer = gpt.blocks[4]
    assert layer is gpt.blocks[3]
    assert layer.parameters == 12 * 128 * 128 + 13 * 128 and layer.tensors == 12
    # qkv, out, up and down; norms and the biases of out and down are whole everywhere.
    assert layer.sliced == layer.parameters - 4 * 128 - 2 * 128
    hidden = 4 * 64 * 128 * 4
    assert layer.output == layer.saved_input == layer.reduced == hidden
    assert layer.reductions == 2  # in forward, after attention and feed-forward, and two in backward
    assert 0 < layer.saved_core < layer.saved_sliced < layer.saved
    assert all(op.sliced for op in layer.ops if op.flops)
    assert not any(op.sliced for op in layer.ops if op.name == "native_layer_norm")
    assert gpt.blocks[-1].flops(backward=False) == 2 * 4 * 64 * 128 * 256


def test_what_the_loss_keeps_is_in_the_last_block(gpt: Workload) -> None:
    head = gpt.blocks[-1]
    assert head.output == 0
    assert head.saved >= 4 * 64 * 256 * 4  # log-probabilities


def test_a_block_that_works_with_what_others_made_knows_what_comes_in() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = self.a(x)
            last: Tensor = self.c(self.b(first))
            return last + first

    a, b, c = traced(Skips(), torch.zeros(4, 8)).blocks
    assert (a.output, b.output, c.output) == (4 * 8 * 4, 2 * 4 * 8 * 4, 0)  # what skips b goes through it
    assert c.saved_input == b.output


def test_a_model_with_everything_can_be_traced() -> None:
    """Two inputs, tied weights, buffers, random numbers, and a parameter that nothing uses."""
    work = survey(job_for(everything))
    model = everything()
    assert work.parameters == sum(each.numel() for each in model.parameters())
    assert work.buffers == sum(each.nbytes for each in model.buffers())
    assert work.tied == model.get_parameter("words.weight").numel() and not work.notes


def test_a_model_that_needs_values_is_run_once_if_it_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves no trace: generators are as before, and what it prints is for when it trains."""

    class Chooses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("chooses")
            found: Tensor = F.dropout(super().forward(x))
            return found * 2 if found.sum() > 0 else found

    state = torch.get_rng_state()
    work = survey(job_of(lambda: nn.Sequential(Chooses(8, 8)), torch.ones(4, 8)))
    assert torch.equal(torch.get_rng_state(), state) and capsys.readouterr().out == ""
    assert work.blocks[0].flops(backward=False) == 2 * 4 * 8 * 8
    assert "ran once" in work.notes[0]


def test_a_backward_that_needs_values_counts_as_twice_forward() -> None:
    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient if gradient.sum().item() >= 0 else -gradient

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = Peeks.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return found

    found = traced(nn.Sequential(nn.Linear(8, 8), Layer(8, 8)), torch.zeros(4, 8))
    assert "twice forward" in found.notes[0]
    assert found.blocks[0].flops(backward=True) == 2 * found.blocks[0].flops(backward=False)


def test_a_model_that_fails_is_told_with_the_line() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)
            self.down = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.down(self.up(x))  # the user's line
            return found

    with pytest.raises(JobError, match="the model fails: RuntimeError") as told:
        survey(job_of(Wrong, torch.zeros(4, 8)))
    assert "the user's line" in str(told.value)


# -- large ones -------------------------------------------------------------------------------------------------------


def test_a_hundred_billion_parameters_cost_no_memory() -> None:
    """And come to the textbook's numbers: 400 GB of weights, 1.2 TB with gradients and as much of activations."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    width = 2**17
    samples = width  # so that the activations of a layer are as large as its weights
    layers = lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)])  # noqa: E731
    work = survey(job_of(layers, torch.zeros(1, width)))
    assert work.parameters == pytest.approx(1e11, rel=0.04)
    weights = work.parameters * work.weight_bytes
    assert weights == pytest.approx(400e9, rel=0.04)
    scale = samples / work.samples
    activations = scale * sum(block.saved for block in work.blocks)
    together = weights + work.parameters * work.gradient_bytes + activations
    assert together == pytest.approx(1.2e12, rel=0.05)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


# -- scripts with their own loop --------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoal
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
print("not to be seen")
model = nn.Sequential(nn.Linear(8, 4000), nn.Dropout(0.5), nn.Linear(4000, 4))
optimizer = torch.optim.{optimizer}
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), batch_size=32)
run = shoal.join(model, optimizer, loader, lanes=2, run_dir="runs/mine")
for epoch in run.epochs(1):
    for batch in run.batches():
        {body}
        open("trained", "w").close()
"""
BACKWARD = "run.backward(batch, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]))"


def script(tmp_path: Path, body: str = BACKWARD, optimizer: str = "AdamW(model.parameters())") -> str:
    path = tmp_path / "loop.py"
    path.write_text(SCRIPT.format(body=body, optimizer=optimizer))
    return str(path)


def test_a_script_with_several_optimizers(tmp_path: Path) -> None:
    path = Path(script(tmp_path, body=BACKWARD[:-1] + ", optimizer=optimizer)"))
    joined = 'shoal.join({"a": model, "b": other}, {"a": optimizer, "b": torch.optim.SGD(other.parameters())}, loader,'
    text = path.read_text().replace("shoal.join(model, optimizer, loader,", joined)
    path.write_text(text.replace("optimizer = torch", "other = nn.Linear(2, 2)\noptimizer = torch", 1))
    work = workload_of_script(str(path), ["7"])
    assert work.parameters == 8 * 4000 + 4000 + 4000 * 4 + 4 + 6
    assert work.state_bytes == 8.0, "of the larger optimizer"


def test_a_script_is_played_up_to_its_first_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, argv, path = torch.get_rng_state(), list(sys.argv), list(sys.path)
    work = workload_of_script(script(tmp_path), ["7"])
    assert work.parameters == 8 * 4000 + 4000 + 4000 * 4 + 4
    assert (work.lanes, work.batch, work.samples, work.state_bytes) == (2, 32, 16, 8.0)
    assert [block.flops(backward=False) for block in work.blocks] == [2 * 16 * 8 * 4000, 0, 2 * 16 * 4000 * 4]
    assert not (tmp_path / "trained").exists() and not (tmp_path / "runs").exists()
    assert capsys.readouterr().out == ""
    assert torch.equal(torch.get_rng_state(), state) and (sys.argv, sys.path) == (argv, path)
    assert shoal.join.__module__ == "shoal.worker.join"
    assert type(nn.Linear(2, 2).weight.data) is Tensor  # modules have real weights again


def test_the_scripts_optimizer_counts(tmp_path: Path) -> None:
    settings = "SGD(model.parameters(), lr=0.1, momentum=0.9)"
    assert workload_of_script(script(tmp_path, optimizer=settings), ["1"]).state_bytes == 4.0
    plain = "SGD(model.parameters(), lr=0.1)"
    assert workload_of_script(script(tmp_path, optimizer=plain), ["1"]).state_bytes == 0.0


def test_a_script_that_is_wrong_is_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its loop calls no run"):
        workload_of_script(script(tmp_path, body="break"), ["1"])
    with pytest.raises(InputError, match="IndexError") as told:
        workload_of_script(script(tmp_path), [])
    assert "sys.argv[1]" in str(told.value)
    with pytest.raises(InputError, match="cannot be traced without the values of its weights") as told:
        workload_of_script(script(tmp_path, body="print(float(model[0].weight.sum())); " + BACKWARD), ["1"])
    assert "loop.py" in str(told.value)
    with pytest.raises(InputError, match="there is no file"):
        workload_of_script(str(tmp_path / "lop.py"))


# -- what one device needs --------------------------------------------------------------------------------------------


def needs(**changes: Any) -> dict[str, float]:
    """A worker with 100 parameters of 4 bytes, Adam, 4 lanes alone, in bytes without what any process has."""
    given: dict[str, Any] = {"parameters": 100.0, "largest": 10.0, "activations": 1.0, "working": 0.0, "data": 1}
    given |= {"zero": 0, "cut": True, "lanes": 4, "microbatches": 1} | changes
    numbers = {"weight": 4.0, "gradient": 4.0, "state": given.pop("state", 8.0), "buffers": 0.0}
    keeps = given.pop("keeps", 0.0)
    arrays: dict[str, Any] = {name: np.array([[value]]) for name, value in given.items()}
    parts = memory_bytes(**arrays, **numbers, fragmentation=keeps)
    found = {name: float(part[0, 0]) for name, part in parts.items()}
    return found | {"other": found["other"] - 7e6}


def test_sums_of_lanes_take_log2_sets_and_one_of_the_step_before() -> None:
    assert gradient_sets(np.array([1, 2, 3, 4, 8])).tolist() == [1, 2, 2, 3, 4]
    step = needs(state=0.0)
    # 2 partial sums, the last set but for what its activations still take, and the last step's
    assert step["gradients"] == 2 * 400 + (400 - 1) + 400
    assert step["weights"] == 400 and step["other"] == 0
    assert needs(state=0.0, microbatches=2)["gradients"] == 4 * 400  # the lane goes on: its set stays whole
    two = needs(state=0.0, data=2, lanes=2)
    assert two["gradients"] == 400 + 399 + 1.5 * 400  # 2 sets, and in shared memory its own and half of the other's


def test_a_save_takes_a_copy_of_weights_and_state_and_one_for_export() -> None:
    save = needs(lanes=1, cut=False)
    assert save["other"] == (400 + 800) + 400
    assert save["gradients"] == 400  # the last step's
    assert needs(lanes=1)["other"] == 1200  # a model that is cut is exported from the checkpoint
    rows = needs(lanes=2, data=2, zero=3)
    assert rows["weights"] == 200 and rows["optimizer"] == 400
    assert rows["other"] == 600 + 10 * 4 * 1.5  # its rows and their state, and a block's rows on their way


def test_activations_leave_holes_where_freed_memory_is_kept() -> None:
    kept, returned = needs(activations=1e4, keeps=0.5), needs(activations=1e4)
    assert kept["other"] - returned["other"] == 0.5 * 1e4


def test_one_device_is_held_against_what_it_has(gpt: Workload) -> None:
    cluster = find_cluster("dgx-a100")
    found = estimate(gpt, cluster)
    assert found.fits
    assert found.single_device.seconds == predict(gpt, Setup(batch=32, microbatch=4, lanes=4), cluster).seconds
    assert sum(line.times for line in found.lines) == len(gpt.blocks)
    layer = found.lines[3]
    assert (layer.block, layer.times, layer.data) == ("blocks.1–3", 3, 4 * layer.parameters)
    assert layer.tensor == 4 * gpt.blocks[4].reduced  # two sums forward, two backward
    assert layer.zero3 == layer.gradients == 4 * layer.parameters


def test_more_lanes_cost_more_of_a_small_model(gpt: Workload) -> None:
    seconds = lane_seconds(gpt, find_cluster("laptop"))
    assert list(seconds) == [1, 2, 4, 8]
    assert sorted(seconds.values()) == list(seconds.values()) and seconds[8] > seconds[1]


# -- the command ------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["estimate", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def small(tmp_path: Path, model: str = "nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))") -> str:
    path = tmp_path / "small.py"
    path.write_text(
        "import shoal, torch\nfrom torch import nn\n"
        f"job = shoal.Job(model=lambda: {model}, data=(torch.zeros(32, 8), torch.zeros(32, dtype=torch.int64)),\n"
        "    loss=nn.functional.cross_entropy, optimizer=lambda named: torch.optim.AdamW(named), batch=16, steps=1)\n"
    )
    return str(path)


def test_a_job_is_told_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, small(tmp_path), "--set", "lanes=2", "--cluster", "dgx-a100")
    assert code == 0
    assert "108 parameters" in out and "2 lanes × 1 microbatch of 8" in out and "fits" in out
    assert out.splitlines()[-1] == f"next: shoal plan {tmp_path}/small.py --cluster dgx-a100"
    code, out, _ = run(capsys, small(tmp_path), "--json")
    value = json.loads(out)
    assert value["parameters"] == 108 and value["one_device"]["fits"] is True
    assert [block["forward"] for block in value["blocks"]] == [2 * 4 * 8 * 8, 0, 2 * 4 * 8 * 4]
    assert value["lane_seconds"].keys() == {"1", "2", "4", "8"}


def test_a_save_that_needs_more_than_a_step_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, small(tmp_path, "nn.Linear(8, 4000)"), "--set", "lanes=1", "--set", "batch=1")
    assert "most while it saves" in out
    _, out, _ = run(capsys, small(tmp_path), "--set", "lanes=1")
    assert "most while it saves" not in out and "+ activations" in out


def test_a_shape_needs_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"
    code, out, _ = run(capsys, "--gpt", shape, "--cluster", "dgx-a100", "--batch", "8", "--microbatch", "2")
    assert code == 0
    assert "175" in out and "does not fit: optimizer 2.1 TB of 7" in out
    assert out.splitlines()[-1].startswith(f"next: shoal plan --gpt {shape} --batch 8")
    _, out, _ = run(capsys, "--gpt", shape, "--json")
    _, doubled, _ = run(capsys, "--gpt", shape, "--json", "--microbatch", "2")
    kept = [json.loads(text)["blocks"][1]["kept"] for text in (out, doubled)]
    assert kept[1] == 2 * kept[0]


def test_a_script_is_found_out_by_what_it_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, script(tmp_path), "--", "3")
    assert code == 0
    assert "16 samples" not in out and "2 lanes × 1 microbatch of 16" in out
    assert out.splitlines()[-1] == f"next: shoal run {tmp_path}/loop.py --workers 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "neither is given"),
        (("{small}", "--gpt", "layers=2"), "both are given"),
        (("smal.py",), "there is no file smal.py"),
        (("{empty}",), "has no shoal.Job"),
        (("{small}", "--batch", "8"), "--batch is a shape's"),
        (("{small}", "--set", "lanse=2"), "did you mean --set lanes=2"),
        (("{small}", "--cluster", "dgx-a10"), "dgx-a100"),
        (("--gpt", "layers=2,hidden=10,heads=4,seq=8,vocab=16"), "not divisible"),
        (("--gpt", "layers=2,hidden=8,heads=4,seq=8,vocab=16", "--microbatch", "0"), "at least 1"),
        (("--gpt", "layers=2,hidden=8,heads=4,seq=8,vocab=16", "--microbatch", "3", "--batch", "8"), "not divisible"),
        (("{small}", "--", "3"), "belong to a script"),
        (("{wrong}",), "in 0 (Linear)"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n")
    wrong = "nn.Sequential(nn.Linear(9, 4))" if "{wrong}" in arguments else "nn.Linear(8, 4)"
    files = {"small": small(tmp_path, wrong), "empty": str(tmp_path / "empty.py")}
    files["wrong"] = files["small"]
    code, out, err = run(capsys, *(each.format(**files) for each in arguments))
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err
