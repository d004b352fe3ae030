"""The kernels of a run: instruction set, threads, determinism, and their fingerprint (docs/exact.md, rules 6 to 9).

Two processes of equal fingerprint compute the same bits. A worker of another fingerprint is refused by name.
"""

import ctypes
import hashlib
import math
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.digest import tensor_bytes

ALIGNMENT = 64

# Environment variables that pin ATen, oneDNN and MKL to one level, for clusters of unlike CPUs.
ISA_ENVIRONMENT = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
ISA_IN_FORCE = "SHOAL_ISA"  # the pinned level, for a re-executed driver and the fingerprint


def isa_environment(isa: str) -> dict[str, str]:
    """The variables with which a process uses this instruction set."""
    return ISA_ENVIRONMENT[isa] | {ISA_IN_FORCE: isa}


def configure(*, threads: int, exact: bool = True) -> None:
    """Sets threads, determinism and memory allocation of this process."""
    torch.set_num_threads(threads)
    # Filling uninitialised memory makes a large `empty` a hundred times slower and changes no result of correct code.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(exact)
    keep_large_allocations()


def keep_large_allocations() -> None:
    """Lets the C library keep freed blocks: every step allocates gradients of tens of megabytes, and their page faults
    cost more than the copy."""
    try:
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
        libc.mallopt(m_mmap_threshold, 32 << 20)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_mmap_max, 0)
    except (OSError, AttributeError):  # not glibc
        return


def is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and starts on 64 bytes, else such a copy."""
    if tensor.layout != torch.strided or (tensor.is_contiguous() and is_aligned(tensor)):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def mkl_reproducibility() -> int | None:
    """The branch of MKL's conditional numerical reproducibility in this process; None without MKL."""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(ctypes.c_int(-1)))
    except (OSError, AttributeError):
        return None


def _probe() -> bytes:
    """A few milliseconds of the kernels that differ between CPUs, hashed."""
    # The inputs come from integer arithmetic: random kernels differ between instruction sets.
    numbers = ((torch.arange(20_000, dtype=torch.int64) * 7919 + 104729) % 10007).to(torch.float32) / 5003.5 - 1
    taken = 0

    def some(*shape: int) -> Tensor:
        nonlocal taken
        count = math.prod(shape)
        chosen = numbers[taken % 997 : taken % 997 + count].reshape(shape).clone()
        taken += count
        return chosen

    sha = hashlib.sha256()

    def note(*tensors: Tensor | None) -> None:
        for tensor in tensors:
            assert tensor is not None
            sha.update(tensor_bytes(tensor))

    x, weight = some(19, 67), some(31, 67).requires_grad_()
    out = F.gelu(F.linear(x, weight))
    note(out, torch.mv(weight.detach(), some(67)), torch.dot(some(257), some(257)))
    note(some(33, 41).sum(0), some(500).sum())
    loss = F.cross_entropy(out, torch.arange(19) % 31)
    loss.backward()
    note(loss, weight.grad)
    image, kernel = some(3, 4, 9, 9).requires_grad_(), some(6, 4, 3, 3).requires_grad_()
    F.conv2d(image, kernel, padding=1).relu().square().sum().backward()
    note(image.grad, kernel.grad)
    query = some(2, 3, 17, 8).requires_grad_()
    F.scaled_dot_product_attention(query, some(2, 3, 17, 8), some(2, 3, 17, 8)).sum().backward()
    note(query.grad)
    mean, variance = torch.zeros(4), torch.ones(4)
    note(F.batch_norm(some(3, 4, 9, 9), mean, variance, training=True), mean, variance)
    note(F.softmax(some(11, 37), 1), F.layer_norm(some(11, 37), (37,)), torch.exp(some(100)), torch.tanh(some(100)))
    note(some(8, 64).to(torch.bfloat16) @ some(64, 8).to(torch.bfloat16))
    # Without MKL's reproducible mode, some machines differ first on misaligned operands.
    note(torch.mv(some(9 * 65 + 1)[1:].view(9, 65), some(66)[1:]))
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(1)
    note(torch.randn(40), torch.rand(40), torch.randperm(40))
    torch.default_generator.set_state(state)
    return sha.digest()


def traits() -> dict[str, Any]:
    """The components of the fingerprint by name, so that an error can name the one that differs."""
    return {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "device": "cpu",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": str(torch.get_default_dtype()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "MKL reproducibility": mkl_reproducibility(),
        "pinned isa": os.environ.get(ISA_IN_FORCE),
        "kernels": _probe().hex()[:16],
    }


def fingerprint(named: dict[str, Any]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in named.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
