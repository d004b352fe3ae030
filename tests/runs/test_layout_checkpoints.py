"""A checkpoint belongs to a job, not to a layout: stopped under one, resumed under another, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from helpers.layout_models import Language, language_job, winding_job
from shoal.errors import InputError
from shoal.numerics.digest import model_digest, tensor_digests


def train(job: shoal.Job, layout: str | None = None, **more: Any) -> shoal.Report:
    return shoal.train(job, layout=layout, quiet=True, **more)


def travel(job: shoal.Job, layouts: list[str | None]) -> shoal.Report:
    """One more step under each layout, the rest under the last."""
    for step, layout in enumerate(layouts[:-1], start=1):
        with pytest.raises(shoal.Stopped, match=f"stopped after step {step}"):
            train(job, layout, run_dir="run", resume=step > 1, stop_after=step)
    return train(job, layouts[-1], run_dir="run", resume=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16-weights"])
def test_from_layout_to_layout(precision: str) -> None:
    job = language_job(precision=precision)
    alone = train(job, run_dir="alone")
    report = travel(job, ["pipeline=2", "data=2,zero=1", "data=2,pipeline=2", None])
    assert report.weights_sha256 == alone.weights_sha256
    assert report.final_loss == alone.final_loss
    assert report.value["metrics"] == alone.value["metrics"]


def test_buffers_go_along() -> None:
    job = winding_job()
    assert travel(job, [None, "pipeline=3", "data=2,zero=1"]).weights_sha256 == train(job).weights_sha256


def test_from_slices_to_one_worker() -> None:
    """No bits are promised, but it goes on from where it was."""
    job = language_job()
    report = travel(job, ["tensor=2", None, "pipeline=2,tensor=2"])
    assert report.steps == 6
    assert report.final_loss == pytest.approx(train(job).final_loss, rel=1e-3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("written") / "run"
    return folder / "model.safetensors", train(language_job(), "pipeline=2", run_dir=folder).weights_sha256


def test_the_model_s_file_is_for_any_program(written: tuple[Path, str]) -> None:
    path, sha256 = written
    alone = train(language_job())
    assert alone.weights_sha256 == sha256
    plain, own = Language(), load_file(path)
    assert "head.weight" in own, "a tied weight is there under each of its names"
    plain.load_state_dict(own, strict=True)
    assert model_digest(tensor_digests(plain.named_parameters())) == sha256
    other = load_file(alone.folder / "model.safetensors")
    assert list(own) == list(other)
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_training_begins_with_a_file(written: tuple[Path, str]) -> None:
    path, sha256 = written
    job = language_job(start_from=path, steps=1, epochs=None, optimizer=lambda named: torch.optim.SGD(named, lr=0.0))
    assert train(job).weights_sha256 == sha256, "a step of no length"
    job = language_job(start_from=str(path), steps=2, epochs=None)
    reports = [train(job), train(job, "pipeline=2"), train(job, "data=2,zero=1")]
    assert len({report.weights_sha256 for report in reports}) == 1
    assert reports[0].weights_sha256 != train(language_job(steps=2, epochs=None)).weights_sha256


class Wider(Language):
    def __init__(self) -> None:
        super().__init__()
        self.body.h[1].up, self.body.h[1].down = nn.Linear(16, 65), nn.Linear(65, 16)


@pytest.mark.parametrize("layout", [None, "pipeline=2"])
def test_a_file_that_does_not_fit(layout: str | None, written: tuple[Path, str]) -> None:
    path, _ = written
    Path("text.safetensors").write_text("hello")
    weights = load_file(path)
    weights.pop("body.norm.bias")
    save_file(weights, "less.safetensors")
    save_file(weights | {"body.norm.bias": torch.ones(16), "extra": torch.ones(3)}, "more.safetensors")
    for job, texts in (
        (language_job(start_from="none.safetensors"), ["none.safetensors"]),
        (language_job(start_from="text.safetensors"), ["text.safetensors"]),
        (language_job(start_from="less.safetensors"), ["less.safetensors", "body.norm.bias"]),
        (language_job(start_from="more.safetensors"), ["more.safetensors", "extra"]),
        (language_job(start_from=path, model=Wider), ["model.safetensors", "body.h.1.up", "65", "64"]),
    ):
        with pytest.raises(InputError) as caught:
            train(job, layout)
        for text in texts:
            assert text in caught.value.message, caught.value
        assert "\n" not in caught.value.message
    assert not Path("runs").exists()
