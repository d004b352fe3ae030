"""Floats in fewer bytes: every bit comes back, and bytes that are none cost an error alone."""

import struct
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.float_packing import LEAST_BYTES, FloatPacker, PackingDamaged

COUNT = 1 << 15
ODD_ONES = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, -1e-45, 3.4e38]


def gradient(count: int, dtype: torch.dtype = torch.float32, scale: float = 1e-3) -> torch.Tensor:
    values = scale * torch.randn(count, generator=torch.Generator().manual_seed(count))
    values[: len(ODD_ONES)] = torch.tensor(ODD_ONES)
    return values.to(dtype)


def as_memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def unpacked(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(like, 7)
    FloatPacker().unpack(as_memory(payload), as_memory(result))
    return result


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.87), (torch.bfloat16, 0.73)])
@pytest.mark.parametrize("count", [COUNT, COUNT + 1, 3 * COUNT + 7])
def test_gradients_are_shorter_and_come_back_to_the_bit(dtype: torch.dtype, share: float, count: int) -> None:
    packer = FloatPacker()
    for scale in (1e-3, 1e-30, 1e30):
        values = gradient(count, dtype, scale)
        payload = packer.pack(values)
        assert payload is not None and payload.nbytes < share * values.nbytes
        assert torch.equal(unpacked(payload, values).view(torch.uint8), values.view(torch.uint8))


def test_a_packer_keeps_nothing_of_the_message_before() -> None:
    packer = FloatPacker()
    first, second = gradient(2 * COUNT), gradient(COUNT, scale=3.0)
    payloads = [packer.pack(first), packer.pack(second), packer.pack(first)]
    assert payloads[0] is not None and payloads[1] is not None and payloads[2] is not None
    assert torch.equal(payloads[0], payloads[2])
    result = torch.empty_like(second)
    packer.unpack(as_memory(payloads[0]), as_memory(torch.empty_like(first)))
    packer.unpack(as_memory(payloads[1]), as_memory(result))
    assert torch.equal(result.view(torch.uint8), second.view(torch.uint8))


def test_what_would_not_be_shorter_travels_as_it_is() -> None:
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (COUNT,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    others = [gradient(LEAST_BYTES // 4 - 1), gradient(COUNT).double(), torch.arange(COUNT), bits]
    assert [FloatPacker().pack(each) for each in others] == [None] * 4


@given(st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_a_changed_message_is_refused_or_is_other_numbers(changes: list[tuple[int, int]], short: bool) -> None:
    """It is sealed on its way, so only a member of the group can send one: that must not do harm either."""
    values = gradient(COUNT)
    payload = FloatPacker().pack(values)
    assert payload is not None
    for place, byte in changes:
        payload[place % payload.numel()] = byte
    if short:
        payload = payload[: changes[0][0] % payload.numel()]
    try:
        unpacked(payload, values)
    except PackingDamaged:
        return


def frame(exponents: bytes, **how: Any) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(exponents)


def header(size: int, count: int, layout: int = 2) -> bytes:
    return struct.pack("<BBxxI", layout, size, count)


@pytest.mark.parametrize(
    ("begins", "exponents", "problem"),
    [
        (b"\2", b"", "8 bytes, and 1 came"),
        (header(4, 8, layout=4), frame(bytes(8)), "came in layout 4, and this version of Shoal has 2"),
        (header(4, 9), frame(bytes(9)), "9 packed floats of 4 bytes came for memory of 32"),
        (header(3, 8), frame(bytes(8)), "8 packed floats of 3 bytes"),
        (header(4, 8), b"", "8 packed floats of 4 bytes"),  # nothing behind the planes
        (header(4, 8), frame(bytes(1 << 24)), "the exponents of 8 packed floats are not as many"),
        (header(4, 8), frame(bytes(8), write_content_size=False), "are not as many"),
        (header(4, 8), b"none", "are not as many|cannot be read"),
        (header(4, 8), frame(bytes(range(8)))[:-3], "cannot be read"),
    ],
)
def test_what_is_no_packed_message_is_refused_before_it_gets_memory(
    begins: bytes, exponents: bytes, problem: str
) -> None:
    data = begins + (bytes(8 * 3) if len(begins) == 8 else b"") + exponents
    with pytest.raises(PackingDamaged, match=problem):
        FloatPacker().unpack(memoryview(data), memoryview(np.zeros(8, np.float32).view(np.uint8)))
