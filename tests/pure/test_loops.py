"""What a joined loop is checked and explained with: compiled models, checks of weights, what an error leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from shoal.errors import JobError, MismatchError, NonFiniteError, PeerLost
from shoal.numerics.seeds import derive, pass_seed
from shoal.worker.compiled_model import compiler_error, is_compiled, unwrap_compiled
from shoal.worker.consistency import is_early_check
from shoal.worker.join import as_one_model
from shoal.worker.membership import RunAbandoned
from shoal.worker.run import Run
from shoal.worker.run_config import RunConfig
from shoal.worker.save_on_error import save_on_error
from shoal.worker.training_state import Batch


@pytest.fixture
def dynamo_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    for name in ("automatic_dynamic_shapes", "recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, name, getattr(torch._dynamo.config, name))


@pytest.mark.usefixtures("dynamo_settings")
def test_a_compiled_model_has_the_names_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert not is_compiled(model) and unwrap_compiled(model) is model
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    assert is_compiled(compiled) and unwrap_compiled(compiled) is model
    assert not torch._dynamo.config.automatic_dynamic_shapes, "a graph must not depend on the shapes seen before"
    assert list(as_one_model({"a": compiled}).state_dict()) == ["a.0.weight", "a.0.bias"]


def test_errors_of_the_compiler_are_sentences() -> None:
    from torch._dynamo.exc import InternalTorchDynamoError, Unsupported
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    whole = compiler_error(Unsupported("Skip calling `torch.compiler.disable()`d function"))
    assert whole is not None and "cannot be one graph" in whole.message and "without fullgraph=True" in str(whole.fix)
    missing = compiler_error(InductorError(InvalidCxxCompiler(), None))
    assert missing is not None and "needs a C++ compiler" in missing.message and "aot_eager" in str(missing.fix)
    other = compiler_error(InternalTorchDynamoError("RecursionError: too deep\nmore"))
    assert other is not None and other.message.endswith("InternalTorchDynamoError: RecursionError: too deep")
    assert compiler_error(ValueError("C++ compiler")) is None


def test_the_first_steps_are_checked_more_often() -> None:
    assert [step for step in range(1, 70) if is_early_check(step)] == [1, 2, 4, 8, 16, 32, 64]


def test_a_batch_is_not_its_tensors() -> None:
    batch = Batch(step=0, epoch=0, indices=[1, 2])
    assert len(batch) == 2
    with pytest.raises(JobError, match="not its tensors") as caught:
        _, _ = batch
    assert "run.backward(batch, lambda b:" in str(caught.value.fix)


# -- what an error leaves ---------------------------------------------------------------------------------------------


class Recorder:
    """A run as `save_on_error` sees it."""

    def __init__(self, applied: int | None, *, sharded: bool = False, claims: bool = True, saves: bool = True) -> None:
        self.did: list[str] = []
        self.step, self.applied_step, self.finished = 5, applied, False
        self.config = RunConfig().changed(save_on_error=saves)
        self.layout = SimpleNamespace(sharded=sharded)
        self.strategy = SimpleNamespace(drop=lambda: self.did.append("drop"))
        self.membership = SimpleNamespace(
            elastic=True, claim_save=lambda step: claims, fail_run=lambda reason: self.did.append("fail")
        )
        self.group = SimpleNamespace(abandon=lambda reason: self.did.append("abandon"))
        self.checkpoints = SimpleNamespace(
            directory=SimpleNamespace(of_step=lambda step: Path()),
            saved_step=-1,
            save=lambda step, progress, token: self.did.append(f"shard {step}"),
            save_alone=lambda step, progress: self.did.append(f"save {step}"),
        )

    def note_pending_stop(self) -> None:
        self.did.append("note stop")

    def report(self) -> None:
        self.did.append("report")

    def progress(self) -> dict[str, Any]:
        return {}

    def checkpoint_token(self, step: int) -> str:
        return ""


def left(run: Recorder, error: BaseException) -> tuple[list[str], list[str]]:
    return run.did, save_on_error(cast(Run, run), error, "worker 1: KeyError")


@pytest.mark.parametrize("error", [KeyError("label"), NonFiniteError("nan"), KeyboardInterrupt(), JobError("loss")])
def test_a_whole_step_is_saved_by_the_worker_with_the_error(error: BaseException) -> None:
    assert left(Recorder(5), error) == (["drop", "note stop", "report", "save 5"], [])
    assert left(Recorder(5, claims=False), error) == (["drop", "note stop", "report"], []), "another one has written it"
    shards = ["drop", "note stop", "report", "shard 5", "fail", "abandon"]
    assert left(Recorder(5, sharded=True), error) == (shards, [])


def test_what_is_not_saved() -> None:
    bug = KeyError("label")
    assert left(Recorder(None), bug) == ([], ["step 5 was being applied: it could not be saved"])
    assert left(Recorder(0), bug) == ([], []), "there is nothing to lose yet"
    assert left(Recorder(5, saves=False), bug) == ([], [])
    assert left(Recorder(5), MismatchError("weights differ")) == ([], [])
    assert left(Recorder(5), PeerLost("worker 1 is gone")) == ([], [])
    assert left(Recorder(5, sharded=True), PeerLost("worker 1 is gone")) == ([], [])
    # Whoever ends because of another's error writes its shard, and says nothing to the others.
    assert left(Recorder(5, sharded=True), RunAbandoned("the run ends"))[0] == [
        "drop",
        "note stop",
        "report",
        "shard 5",
    ]


def test_a_failed_save_does_not_hide_the_error() -> None:
    run = Recorder(5)

    def full(step: int, progress: dict[str, Any]) -> None:
        raise OSError("No space left")

    run.checkpoints.save_alone = full
    assert left(run, KeyError("label"))[1] == ["step 5 could not be saved: OSError: No space left"]


def test_the_streams_of_further_passes() -> None:
    assert pass_seed(3, 0) == 3
    assert len({pass_seed(3, number) for number in range(5)} | {derive(3, 1)}) == 6
