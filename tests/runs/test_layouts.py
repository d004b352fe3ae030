"""Every exact layout has the sha256 and the metrics of one worker; a split operator comes close enough."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.layout_models import LENGTH, SAMPLES, language_job, perceptron_job, winding_job
from shoal.driver.verify import layout_placements, verify
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.numerics.seeds import initialise
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES
from shoal.recovery.checkpoint.export import load_weights
from shoal.testing import attention, batch_norm_net, convolution, dropout_net, everything, job_for, tied_language_model

Result = tuple[str, float | None, dict[str, float]]


def train(job: shoal.Job, layout: str | None = None, **more: Any) -> Result:
    report = shoal.train(job, layout=layout, quiet=True, **more)
    return report.weights_sha256, report.final_loss, dict(report.value["metrics"] or {})


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def winding(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Batch norm, dropout, activations in place, skips, tuples, transposes; SGD with momentum, clipped."""
    return train(winding_job(), run_dir=tmp_path_factory.mktemp("winding") / "run")


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_model_that_is_hard_to_cut(schedule: str, winding: Result) -> None:
    assert train(winding_job(), "pipeline=2", schedule=schedule) == winding


@pytest.mark.parametrize("layout", ["pipeline=3", "pipeline=4", "data=2,pipeline=2", "data=2,zero=1"])
def test_on_more_workers(layout: str, winding: Result) -> None:
    assert train(winding_job(), layout) == winding


@pytest.mark.parametrize(
    ("layout", "schedule"), [(None, "1f1b"), ("data=2", "1f1b"), ("data=2,pipeline=2", "1f1b"), ("pipeline=2", "zbv")]
)
def test_recomputed(layout: str | None, schedule: str, winding: Result) -> None:
    """Dropout is drawn again as it was, batch norm counts a batch once, and what is changed in place was kept."""
    assert train(winding_job(), layout, schedule=schedule, recompute=True) == winding


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Tied words, a mask for every block, two microbatches, a loss with a count, AdamW in groups, a schedule."""
    return train(language_job(), run_dir=tmp_path_factory.mktemp("language") / "run")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("pipeline=2", {"schedule": "zbv"}),
        ("pipeline=3", {"schedule": "gpipe", "recompute": True}),
        ("data=2,pipeline=2,zero=1", {}),
        ("data=2,zero=2", {}),
        ("data=3,zero=3", {}),
        ("data=4,zero=1", {}),
    ],
    ids=str,
)
def test_a_language_model(layout: str, more: dict[str, Any], language: Result) -> None:
    assert train(language_job(), layout, **more) == language


@pytest.mark.parametrize(
    "build",
    [convolution, attention, dropout_net, batch_norm_net, tied_language_model, everything],
    ids=lambda build: build.__name__,
)
def test_tiny_models(build: Callable[[], nn.Module]) -> None:
    job = job_for(build, epochs=1)
    assert train(job, "pipeline=2") == train(job)


def test_an_encoder_of_torch_s_own() -> None:
    """In an evaluation its layers take a path of their own, in a pipeline too."""

    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(13, 8), stack, nn.Flatten(), nn.Linear(8 * LENGTH, 5))

    data = job_for(attention).data
    job = job_for(attention, model=encoder, epochs=1, evaluate=data)
    assert train(job, "pipeline=2") == train(job)


class Counting(nn.Module):
    """A counter and a parameter that belong to no block, used where a worker's second stage is; a weight of a module
    that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.table = nn.Linear(12, 5)
        self.gain = nn.Parameter(torch.ones(12))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.training:
            self.seen += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return F.linear((x - self.mean) * self.gain, self.table.weight, self.table.bias)


def test_what_belongs_to_no_block_is_where_it_is_used() -> None:
    job = perceptron_job(model=Counting, epochs=1, microbatches=2)
    alone = train(job)
    for schedule in ("1f1b", "zbv"):
        assert train(job, "pipeline=2", schedule=schedule) == alone


def test_a_step_that_is_left_out() -> None:
    rows, labels = perceptron_job().data
    rows = rows.clone()
    rows[5, 0] = torch.nan
    job = perceptron_job(data=(rows, labels), clip_norm=0.5)
    alone = train(job, nonfinite="skip")
    assert alone[0] != train(perceptron_job(clip_norm=0.5))[0]
    for layout in ("pipeline=2", "data=2,zero=1"):
        assert train(job, layout, nonfinite="skip") == alone


def test_an_instance_is_cut_and_stays_as_it_was() -> None:
    model = initialise(everything, 5)
    before = model_digest(tensor_digests(model.state_dict().items()))
    job = job_for(everything, model=model, epochs=1)
    assert len({train(job, layout)[0] for layout in (None, "pipeline=2", "data=2,zero=1")}) == 1
    assert model_digest(tensor_digests(model.state_dict().items())) == before


# -- bf16 -------------------------------------------------------------------------------------------------------------


def test_bf16_autocast() -> None:
    job = winding_job(precision="bf16")
    assert train(job, "pipeline=2", schedule="zero-bubble") == train(job)


def test_bf16_weights_are_an_arithmetic_of_their_own(language: Result) -> None:
    job = language_job(precision="bf16-weights")
    report = shoal.train(job, quiet=True, run_dir="alone")
    alone = report.weights_sha256, report.final_loss, dict(report.value["metrics"])
    assert alone[0] != language[0]
    assert alone[1] == pytest.approx(language[1], rel=0.05)
    for layout in ("data=2", "pipeline=2", "data=2,zero=1"):
        assert train(job, layout, run_dir=layout) == alone, layout
        weights, _ = load_weights(Path(layout) / "model.safetensors")
        assert {each.dtype for each in weights.values()} == {torch.float32}
    masters, _ = load_weights(report.folder / "model.safetensors")
    fp32, _ = load_weights(shoal.train(language_job(), quiet=True).folder / "model.safetensors")
    gap = sum((masters[name] - each).square().sum() for name, each in fp32.items()).sqrt()
    assert 0 < gap / sum(each.square().sum() for each in fp32.values()).sqrt() < 0.05
    assert any((each != each.bfloat16()).any() for each in masters.values()), "the masters are saved, not their shadows"


def test_bf16_weights_leave_the_statistics_of_norms_alone() -> None:
    job = winding_job(precision="bf16-weights")
    assert train(job, "pipeline=2") == train(job)


# -- split operators --------------------------------------------------------------------------------------------------


def textbook() -> nn.Module:
    """An MLP whose head has more classes than anything else."""
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 512))


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def classes_job(**changes: Any) -> shoal.Job:
    labels = torch.randint(512, (SAMPLES,), generator=torch.Generator().manual_seed(5))
    return perceptron_job(model=textbook, data=(perceptron_job().data[0], labels), **changes)


@pytest.mark.parametrize(("optimizer", "bound"), [(sgd, 1e-6), (adamw, 1e-4)], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("made", [language_job, classes_job], ids=["language", "classes"])
def test_split_operators_stay_close(made: Callable[..., shoal.Job], optimizer: Any, bound: float) -> None:
    job = made(optimizer=optimizer, microbatches=1)
    layouts = ["tensor=2", "data=2,tensor=2", "pipeline=2,tensor=2"] if optimizer is adamw else ["tensor=2"]
    reference, *rows = verify(job, layout_placements(layouts, "1f1b", False), 20, name="job")
    assert len(rows) == len(layouts)
    for row in rows:
        assert row.distance is not None and 0 < row.distance < bound == row.bound
        assert row.difference is None
    assert len({row.weights_sha256 for row in rows}) == 1, "but for the split they compute the same"
    assert rows[0].weights_sha256 != reference.weights_sha256
