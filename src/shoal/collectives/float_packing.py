"""Floats in fewer bytes without losing a bit, for slow links. Pure.

Signs and mantissas of gradients are noise, but their exponents differ little: those of fp32 carry about 3 of 8 bits.
A number is rotated by one bit, so that its exponent fills a byte, and cut into planes:

    fp32   sign │ exponent │ mantissa             exponent │ mantissa, sign
           1    │ 8        │ 23           ──►     8        │ 8 │ 16
    bf16   sign │ exponent │ mantissa             exponent │ mantissa, sign
           1    │ 8        │ 7            ──►     8        │ 8

    message   header │ the lower 16 bits of each (fp32) │ the 8 bits above them │ the exponents, compressed by zstd

A message of fp32 becomes about a sixth shorter, one of bf16 a third. Both ends together take about 1.5 ms for a MB.
"""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

LEAST_BYTES = 32 << 10  # of a message that is worth it
MOST_SHARE = 0.95  # of its bytes: otherwise it travels as it is
SLOW_LINK = 1e8  # bytes per second: below, what both ends save on the link is more than what they spend
MEDIUM_LINK = 2e8  # below, it is worth it where a core has nothing else to do (spare_time.py)
_LEVEL = 1  # of zstd: higher ones look for repetitions, of which there are none
_HEADER = struct.Struct("<BxxxI")  # bytes of a number; numbers
_FORMATS: dict[torch.dtype, tuple[int, Any]] = {torch.float32: (4, np.uint32), torch.bfloat16: (2, np.uint16)}

Bytes = npt.NDArray[np.uint8]


class PackingDamaged(ValueError):
    """Bytes that are no packed floats, or not those that were asked for."""


class FloatPacker:
    """Keeps memory and contexts from one message to the next: one thread at a time."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()
        self._scratch = np.empty(0, np.uint8)

    def _numbers(self, count: int, dtype: Any, place: int = 0) -> Any:
        """Memory for numbers, in one of two places."""
        size = count * np.dtype(dtype).itemsize
        if self._scratch.size < 2 * size:
            self._scratch = np.empty(2 * size, np.uint8)
        return self._scratch[place * size : (place + 1) * size].view(dtype)

    def pack(self, flat: Tensor) -> Tensor | None:
        """The bytes of a contiguous tensor of fp32 or bf16. None: it has another type, or they would not be fewer."""
        found = _FORMATS.get(flat.dtype)
        if found is None or flat.nbytes < LEAST_BYTES:
            return None
        size, dtype = found
        count = flat.numel()
        numbers = flat.detach().view(-1).view(torch.uint8).numpy().view(dtype)
        rotated, signs = self._numbers(count, dtype), self._numbers(count, dtype, 1)
        np.left_shift(numbers, 1, out=rotated)
        np.right_shift(numbers, 8 * size - 1, out=signs)
        np.bitwise_or(rotated, signs, out=rotated)
        planes = rotated.view(np.uint8)
        exponents = signs.view(np.uint8)[:count]  # the signs are in their places
        exponents[:] = planes[size - 1 :: size]
        compressed = self._compressor.compress(exponents.data)
        start = _HEADER.size + count * (size - 1)
        if start + len(compressed) > MOST_SHARE * flat.nbytes:
            return None
        payload = torch.empty(start + len(compressed), dtype=torch.uint8)
        packed: Bytes = payload.numpy()
        packed[: _HEADER.size] = np.frombuffer(_HEADER.pack(size, count), np.uint8)
        if size == 4:
            packed[_HEADER.size : _HEADER.size + 2 * count].view(np.uint16)[:] = rotated.view(np.uint16)[::2]
        packed[start - count : start] = planes[size - 2 :: size]
        packed[start:] = np.frombuffer(compressed, np.uint8)
        return payload

    def unpack(self, payload: memoryview, into: memoryview) -> None:
        """Writes the numbers of a payload to memory of just their length."""
        packed: Bytes = np.frombuffer(payload, np.uint8)
        if packed.size < _HEADER.size:
            raise PackingDamaged(f"packed floats begin with {_HEADER.size} bytes, and {packed.size} came")
        size, count = _HEADER.unpack_from(payload)
        start = _HEADER.size + count * (size - 1)
        if size not in (2, 4) or size * count != len(into) or start >= packed.size:
            raise PackingDamaged(f"{count} packed floats of {size} bytes came for memory of {len(into)} bytes")
        dtype = np.uint32 if size == 4 else np.uint16
        numbers = np.frombuffer(into, dtype)
        planes = numbers.view(np.uint8)
        planes[size - 1 :: size] = self._exponents(payload[start:], count)
        planes[size - 2 :: size] = packed[start - count : start]
        if size == 4:
            numbers.view(np.uint16)[::2] = packed[_HEADER.size : _HEADER.size + 2 * count].view(np.uint16)
        signs = self._numbers(count, dtype)
        np.left_shift(numbers, 8 * size - 1, out=signs)
        np.right_shift(numbers, 1, out=numbers)
        np.bitwise_or(numbers, signs, out=numbers)

    def _exponents(self, compressed: memoryview, count: int) -> Bytes:
        try:
            # Without this, a frame decides by its own words how much memory it gets.
            if zstandard.frame_content_size(compressed) != count:
                raise PackingDamaged(f"the exponents of {count} packed floats are not as many")
            found: Bytes = np.frombuffer(self._decompressor.decompress(compressed), np.uint8)
        except zstandard.ZstdError as error:
            raise PackingDamaged(f"the exponents of packed floats cannot be read: {error}") from None
        if found.size != count:
            raise PackingDamaged(f"{found.size} exponents came for {count} packed floats")
        return found
