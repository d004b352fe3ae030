"""Layouts that do not fit: one sentence with both sides and what to change, before any worker starts."""

import json
from pathlib import Path

import pytest

from helpers.command import Caller, Result, write_job
from helpers.job_files import LAYERS


def assert_plain(result: Result, *texts: str, code: int = 2) -> None:
    assert result.code == code, result.err
    assert "Traceback" not in result.out + result.err
    assert [line.startswith("error: ") for line in result.err.splitlines()].count(True) == 1, result.err
    for text in texts:
        assert text in result.err


# -- what was asked for -----------------------------------------------------------------------------------------------


GRAMMAR = "--layout data=2,pipeline=2,tensor=2,zero=1"
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "unknown axis": (["--layout", "pipelines=2"], ["'pipelines' is not known; it can have data, pipeline", GRAMMAR]),
    "axis twice": (["--layout", "data=2,data=2"], ["has data twice", GRAMMAR]),
    "not a number": (["--layout", "pipeline=two"], ["pipeline=two is not a whole number", GRAMMAR]),
    "no number": (["--layout", "pipeline"], ["pipeline= is not a whole number", GRAMMAR]),
    "nothing": (["--layout", ""], ["'' is not known", GRAMMAR]),
    "none of it": (["--layout", "tensor=0"], ["tensor=0: at least 1", GRAMMAR]),
    "zero=4": (["--layout", "data=2,zero=4"], ["zero=4 is not known", "zero=1 (optimizer), 2 (and gradients)"]),
    "zero=2 in a pipeline": (["--layout", "data=2,pipeline=2,zero=2"], ["zero=2 with pipeline=2", "zero=1, which"]),
    "other workers": (
        ["--layout", "data=2,pipeline=2", "--workers", "3"],
        ["data 2 × pipeline 2 × tensor 1 = 4, but there are 3 workers", "--workers 4"],
    ),
    "too many replicas": (
        ["--layout", "data=5,pipeline=2"],
        ["5 replicas but 4 lanes", "--workers 8, or --set lanes=8"],
    ),
    "a plan and a layout": (["--plan", "plan.json", "--layout", "data=2"], ["--plan plan.json and a layout", "one of"]),
    "a layout twice": (["--layout", "data=2", "--pipeline", "2"], ["--layout data=2 and --pipeline", "one of them"]),
    "unknown schedule": (
        ["--layout", "pipeline=2", "--schedule", "zvb"],
        ["there is no schedule zvb", "did you mean zbv?"],
    ),
    "unknown schedule of no pipeline": (["--schedule", "zvb"], ["there is no schedule zvb", "did you mean zbv?"]),
    "not exact": (
        ["--layout", "pipeline=2", "--schedule", "looped-bfs"],
        ["looped-bfs is not exact", "interleaved has as many stages"],
    ),
    "too few microbatches": (
        ["--layout", "data=2,pipeline=2", "--schedule", "dualpipe"],
        ["dualpipe on 2 ranks needs at least 4 microbatches, not 2", "2 of 4 lanes with 1 microbatch each", "or zbv"],
    ),
    "chunks": (["--layout", "pipeline=2", "--chunks", "3"], ["1f1b has 1 stage on each rank, not 3", "interleaved"]),
    "more stages than blocks": (["--layout", "pipeline=4"], ["4 stages but 3 blocks", "at most 3 stages"]),
    "a stage without parameters": (["--layout", "pipeline=3"], ["stage 1 of 3 would have no parameters to train (1)"]),
    "compiled slices": (
        ["--layout", "tensor=2", "--set", "compile=true"],
        ["compile=True does not go with tensor", "compile=False"],
    ),
    "recomputed and compiled": (["--recompute", "--set", "compile=true"], ["does not go with recompute"]),
    "an amount of memory": (["--memory", "much"], ["'much' is no amount of memory", "250MB"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"workers": 2, "lanes": 4, "deal": [[0, 2], [2, 4]]}))
    before = sorted(tmp_path.iterdir())
    arguments, texts = REFUSED[name]
    assert_plain(call("train", "job.py", *arguments), *texts)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


def test_a_script_has_no_layout(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("pass\n")
    for option in ("--layout", "--schedule", "--memory"):
        assert_plain(call("run", option, "pipeline=2", "script.py"), f"unknown option {option}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--layouts", "data=2", "pipelines=2"], ["'pipelines' is not known"]),
        (["--layouts", "data=2", "pipeline=4"], ["4 stages but 3 blocks"]),
        (["--layouts", "data=2", "data=5"], ["5 workers but 4 lanes"]),
        (["--layouts", "pipeline=2", "--schedule", "zvb"], ["there is no schedule zvb", "did you mean zbv?"]),
    ],
)
def test_verify_says_it_before_the_first_run(
    arguments: list[str], texts: list[str], call: Caller, tmp_path: Path
) -> None:
    write_job(tmp_path)
    result = call("verify", "job.py", *arguments)
    assert_plain(result, *texts)
    assert "reference" not in result.out


# -- models -----------------------------------------------------------------------------------------------------------

UNCUT: dict[str, tuple[str, str, list[str]]] = {
    "a choice inside of a block": (
        "if x.sum() > 0:\n            x = -x",
        "pass",
        ["the model cannot be cut: in layers.0 it does what needs values", "job.py:", "if x.sum() > 0:", "torch.where"],
    ),
    "a choice in the model's own code": (
        "pass",
        "if x.mean() > 0:\n            x = -x",
        ["in the model's own forward, after block layers.1, it does what needs values", "if x.mean() > 0:"],
    ),
    "a shape by value": (
        "x = x[x[:, 0] > 0]",
        "pass",
        ["the model cannot be cut: in layers.0 it does what needs values", "x = x[x[:, 0] > 0]", "without pipeline"],
    ),
    "numpy": ("x = torch.from_numpy(x.detach().numpy())", "pass", ["in layers.0 it does what needs values"]),
    "a buffer that is replaced": (
        "pass",
        "self.count = self.count + 1",
        ["its own code puts another tensor in the place of count", "count.copy_(…)"],
    ),
    "a plain mistake": ("pass", "x = x @ x", ["the model fails in the model's own forward", "x = x @ x"]),
}


@pytest.mark.parametrize("name", UNCUT)
def test_models_that_cannot_be_cut(name: str, call: Caller, tmp_path: Path) -> None:
    inside, own, texts = UNCUT[name]
    write_job(tmp_path, top=LAYERS.format(inside=inside, own=own), fields="model=Model")
    assert_plain(call("train", "job.py", "--layout", "pipeline=2"), *texts)
    assert not (tmp_path / "runs").exists()


def test_other_blocks_in_an_evaluation(call: Caller, tmp_path: Path) -> None:
    own = "if not self.training:\n            x = self.layers[0](x)"
    fields = "model=Model, evaluate=(x, torch.stack([labels, torch.arange(160)], 1))"
    write_job(tmp_path, top=LAYERS.format(inside="pass", own=own), fields=fields)
    assert_plain(
        call("train", "job.py", "--layout", "pipeline=2"),
        "for an evaluation the model calls 4 blocks, and it is cut for 3; they part at layers.0",
    )
    assert not (tmp_path / "runs").exists()


def test_heads_that_cannot_be_shared(call: Caller, tmp_path: Path) -> None:
    top = "class Model(nn.Module):\n"
    top += "    def __init__(self):\n        super().__init__()\n"
    top += "        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)\n"
    top += "        self.up, self.head = nn.Linear(8, 9), nn.Linear(9, 3)\n"
    top += "    def forward(self, x):\n        x = self.up(x)[:, None]\n"
    top += "        return self.head(self.attention(x, x, x)[0][:, 0])\n"
    write_job(tmp_path, top=top, fields="model=Model")
    assert_plain(call("train", "job.py", "--layout", "tensor=2"), "attention", "3 heads", "2")
    assert not (tmp_path / "runs").exists()


# -- optimizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("torch.optim.Adafactor([p for _, p in named])", "the optimizer Adafactor cannot be cut"),
        ("torch.optim.Muon([p for _, p in named if p.ndim == 2])", "the optimizer Muon cannot be cut"),
        ("torch.optim.LBFGS([p for _, p in named])", "the optimizer LBFGS cannot be cut"),
        ("type('Mine', (torch.optim.SGD,), {})(named)", "the optimizer Mine cannot be cut"),
        ("torch.optim.AdamW(named, fused=True)", "AdamW(fused=True) cannot be cut"),
    ],
)
@pytest.mark.parametrize("layout", ["data=2,zero=1", "tensor=2"])
def test_optimizers_that_cannot_be_cut(layout: str, optimizer: str, text: str, call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields=f"optimizer=lambda named: {optimizer}")
    assert_plain(call("train", "job.py", "--layout", layout), text, f"layout {layout} cuts parameters", "fix: ")
    assert not (tmp_path / "runs").exists()
