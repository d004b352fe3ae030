"""Errors of a machine without CUDA, as torch itself raises them here."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from helpers.command import Caller, refused
from shoal.job import cuda_errors
from shoal.job.cuda_errors import DEVICE, DEVICE_IDS, GLOO, GUARD, LOAD, cuda_fix, explain_cuda_error
from shoal.worker.failure_report import child_line, failure_event

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


@pytest.mark.parametrize(
    ("ask", "fix"),
    [
        (lambda: torch.cuda.set_device(0), GUARD),
        (lambda: torch.ones(1).cuda(), DEVICE),
        (lambda: torch.ones(1).to("cuda:0"), DEVICE),
        (lambda: nn.Linear(1, 1).cuda(0), DEVICE),
        (lambda: torch.Generator("cuda"), DEVICE),
        (lambda: torch.cuda.Stream(), GUARD),
        (lambda: torch.cuda.Event(), GUARD),
        (lambda: torch.cuda.device(0).__enter__(), GUARD),
    ],
)
def test_torch_s_own_errors_are_recognised(ask: Callable[[], object], fix: str) -> None:
    with pytest.raises((RuntimeError, AssertionError, AttributeError)) as raised:
        ask()
    event = failure_event(raised.value, 0, None, "log")
    assert event.message.startswith("the script asks for CUDA, and this machine has none (")
    assert event.fix == fix
    assert "test_cuda_errors.py" in event.where[0], "the user's own line"


def test_messages_that_need_a_group_or_a_file() -> None:
    assert cuda_fix("Distributed package doesn't have NCCL built in") == GLOO
    assert (
        cuda_fix("DistributedDataParallel device_ids and output_device arguments only work with single-") == DEVICE_IDS
    )
    assert cuda_fix("Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False") == LOAD
    assert cuda_fix("Torch not compiled with CUDA enabled", "torch.cuda.synchronize()") == GUARD
    assert cuda_fix("division by zero") is None


def test_a_machine_with_cuda_has_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_errors, "_has_cuda", lambda: True)
    assert explain_cuda_error(AssertionError("Torch not compiled with CUDA enabled"), "") is None


SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/opt/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 12, in main
    torch.cuda.set_device(rank)
  File "/opt/site-packages/torch/cuda/__init__.py", line 400, in set_device
    torch._C._cuda_setDevice(device)
AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'
"""


def test_an_error_in_a_spawned_process_names_its_line() -> None:
    assert child_line(SPAWNED) == ["train.py:12  in main:  torch.cuda.set_device(rank)"]
    event = failure_event(RuntimeError(SPAWNED), 0, None, "log")
    assert (event.where, event.fix) == (child_line(SPAWNED), GUARD)
    other = failure_event(RuntimeError(SPAWNED.replace("torch._C", "them")), 0, None, "log")
    assert other.message == "RuntimeError: AttributeError: module 'them' has no attribute '_cuda_setDevice'"


def test_a_job_file_that_asks_for_cuda(call: Caller) -> None:
    with open("job.py", "w") as file:
        file.write("import torch\nweights = torch.zeros(2).cuda()\n")
    error = refused(call, "train", "job.py:job", "--dry-run")
    assert error.startswith("the script asks for CUDA, and this machine has none")
    assert "job.py:2  weights = torch.zeros(2).cuda()" in error and f"fix: {DEVICE}" in error
