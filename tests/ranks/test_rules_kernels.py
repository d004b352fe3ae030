"""Rules of arithmetic, one by one: MKL's mode, fingerprints, threads, bf16, torch.compile, by real processes.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from helpers.command import in_child
from helpers.steps import mlp, mlp_data, sha256
from shoal.numerics import kernels
from shoal.numerics.digest import tensor_sha256
from shoal.testing import cross_entropy, dropout_net, everything, job_for, samples_for

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 7: MKL's reproducible mode ---------------------------------------------------------------------------------------


def fresh(*programs: tuple[str, dict[str, str]]) -> list[Any]:
    """What new interpreters print as JSON, each with its code and environment, all at once: they mostly import."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "ATEN_", "SHOAL_"))}

    def run(program: tuple[str, dict[str, str]]) -> Any:
        code, environment = program
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=clean | environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(len(programs)) as pool:
        return list(pool.map(run, programs))


MKL_MODE = """
import json, os
{first}
import shoal, torch
from shoal.numerics.kernels import mkl_reproducibility
torch.ones(64, 64) @ torch.ones(64, 64)
print(json.dumps([os.environ["MKL_CBWR"], mkl_reproducibility()]))
"""


@pytest.mark.skipif(kernels.mkl_reproducibility() is None, reason="this torch is built without MKL")
def test_7_mkl_computes_reproducibly_from_the_first_kernel_on() -> None:
    (setting, mode), (_, too_late), (chosen, _) = fresh(
        (MKL_MODE.format(first=""), {}),
        (MKL_MODE.format(first="import torch; torch.ones(64, 64) @ torch.ones(64, 64)"), {}),
        (MKL_MODE.format(first=""), {"MKL_CBWR": "COMPATIBLE"}),
    )
    assert setting == "AUTO"
    assert mode != too_late, "without the setting, or after a kernel, MKL is in another mode"
    assert chosen == "COMPATIBLE", "the user's own choice stays"


# -- 8: the fingerprint -----------------------------------------------------------------------------------------------


TRAITS = """
import json, torch
from shoal.numerics import kernels
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    found.append([kernels.fingerprint(kernels.traits()), kernels.traits()])
print(json.dumps(found, default=str))
"""


def test_8_a_fingerprint_tells_kernels_apart() -> None:
    first, second, other = fresh((TRAITS, {}), (TRAITS, {}), (TRAITS, {"ATEN_CPU_CAPABILITY": "default"}))
    (mine, traits), (threads, with_threads) = first
    assert [fingerprint for fingerprint, _ in second] == [mine, threads], "the same in two processes"
    assert threads != mine
    assert with_threads["threads"] == 2
    default, with_default = other[0]
    if traits["cpu capability"] != "DEFAULT":
        assert default != mine
        assert with_default["cpu capability"] == "DEFAULT"
        assert with_default["kernels"] != traits["kernels"], "the kernels themselves compute other bits"


def test_8_a_worker_with_other_kernels_is_refused_by_name() -> None:
    def build() -> nn.Module:
        if os.environ.get("RANK") == "1":
            torch.set_float32_matmul_precision("high")
        return mlp()

    with pytest.raises(shoal.RunError, match="worker 1 computes other bits than worker 0") as caught:
        shoal.train(job_for(dropout_net, model=build), workers=2, quiet=True)
    assert "worker 0 has matmul precision: highest; worker 1 has matmul precision: high" in str(caught.value)


def test_8_a_checkpoint_of_other_kernels_is_refused() -> None:
    job = job_for(dropout_net)
    with pytest.raises(shoal.Stopped):
        shoal.train(job, workers=1, run_dir="run", stop_after=2, quiet=True)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(shoal.ShoalError, match="made by kernels that compute other bits") as caught:
            shoal.train(job, workers=1, run_dir="run", resume=True, quiet=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "matmul precision: highest then, high now" in str(caught.value)


# -- 9: threads and deterministic kernels -----------------------------------------------------------------------------


def checked_loss(output: Tensor, target: Tensor) -> Tensor:
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    return cross_entropy(output, target)


def test_9_workers_train_with_the_job_s_threads() -> None:
    assert shoal.train(job_for(dropout_net, loss=checked_loss, threads=2, steps=2, epochs=None), workers=2, quiet=True)
    assert job_for(dropout_net).arithmetic() != job_for(dropout_net, threads=2).arithmetic()


def test_9_indexing_with_repeats_has_one_gradient_with_several_threads() -> None:
    def play() -> None:
        kernels.configure(threads=2)
        table, index = torch.randn(500, 64, requires_grad=True), torch.randint(500, (20_000,))
        weights = torch.randn(20_000, 64)
        once = (torch.autograd.grad((table[index] * weights).sum(), table)[0] for _ in range(8))
        assert len({tensor_sha256(gradient) for gradient in once}) == 1

    in_child(play)  # where threads are its own


# -- 12: bf16 ---------------------------------------------------------------------------------------------------------


class Watching(nn.Module):
    """Fails when it is not run under autocast to bf16 without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
        out: Tensor = self.inner(x)
        assert out.dtype == torch.bfloat16
        return out


def test_12_autocast_runs_without_a_cache_and_keeps_fp32_weights() -> None:
    job = job_for(dropout_net, model=Watching, precision="bf16", evaluate=mlp_data(9))
    report = shoal.train(job, workers=2, quiet=True)
    assert {parameter.dtype for parameter in report.model().parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_12_autocast_gives_the_same_bits_on_any_number_of_workers() -> None:
    # Lanes of two samples: the matrices stay below the size from which oneDNN uses AMX, which some virtual machines
    # announce and do not have (plain torch fails there).
    job = job_for(everything, precision="bf16", batch=8, evaluate=samples_for(everything, 21))
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 2)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].weights_sha256 != sha256(job.changed(precision="fp32")), "an arithmetic of its own"
    assert job.arithmetic() != job.changed(precision="fp32").arithmetic()


# -- 13: torch.compile ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.dropout(torch.tanh(self.inner(x)).softmax(-1), 0.2, self.training)
        return out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_13_compiled_blocks_give_the_same_bits_on_any_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    job = job_for(dropout_net, model=lambda: nn.Sequential(Small()), compile=True, steps=3, epochs=None)

    def play() -> None:
        importlib.import_module("torch._inductor.compile_fx")  # once, and not in each worker
        # Not by environment variables: they are read when torch is imported.
        torch._inductor.config.compile_threads = 1
        torch._inductor.config.cpp.vec_isa_ok = True  # it need not try what the processor says that it has

        assert sha256(job, 1) == sha256(job, 2)

    in_child(play)
    assert job.arithmetic() != job.changed(compile=False).arithmetic()
