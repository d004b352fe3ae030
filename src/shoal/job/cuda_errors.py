"""Errors of scripts and jobs that ask for CUDA where there is none: recognised, with what to write instead. Pure."""

import re

DEVICE = 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu"), then .to(device) instead of .cuda()'
GUARD = "if torch.cuda.is_available(): before that line; on the CPU it is not needed"
GLOO = 'init_process_group("gloo"), or backend="nccl" if torch.cuda.is_available() else "gloo"'
DEVICE_IDS = "DistributedDataParallel(model) without device_ids where torch.cuda.is_available() is False"
LOAD = 'map_location="cpu" in that call: the file was written on a machine with CUDA'

# What torch says, and what to write instead; the line of code decides where several things lead to one message.
MESSAGES = (
    (r"module 'torch\._C' has no attribute '_cuda_", GUARD),
    (r"NCCL built in|ProcessGroupNCCL is only supported with GPUs", GLOO),
    (r"device_ids and output_device arguments only work with", DEVICE_IDS),
    (r"Attempting to deserialize object on a CUDA device", LOAD),
    (r"torch\.cuda\.Stream requires CUDA|dummy base class (Event|Stream)|compiled without CUDA support", GUARD),
    (r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available", DEVICE),
    (r"Cannot access accelerator device when none is available|Cannot get CUDA generator", DEVICE),
)
QUERIES = re.compile(r"torch\.cuda\.(?!is_available)\w+\(")  # calls that do not place a tensor


def cuda_fix(text: str, line: str = "") -> str | None:
    """What to write instead, where an error's text is that of a machine without CUDA; `line`: the user's code."""
    for pattern, fix in MESSAGES:
        if re.search(pattern, text):
            return GUARD if fix is DEVICE and QUERIES.search(line) else fix
    return None


def explain_cuda_error(error: BaseException, line: str) -> tuple[str, str] | None:
    """One sentence about an error, and what to write instead; None: the error has nothing to do with CUDA, or this
    machine has it."""
    fix = cuda_fix(str(error), line)
    if fix is None or _has_cuda():
        return None
    said = next((each.strip() for each in reversed(str(error).splitlines()) if each.strip()), "")
    said = said if len(said) <= 120 else f"{said[:120]}…"
    return f"the script asks for CUDA, and this machine has none ({said})", fix


def _has_cuda() -> bool:
    import torch  # commands that load no job do without it

    return torch.cuda.is_available()
