"""Floats in fewer bytes without losing a bit, for slow links. Pure.

Signs and mantissas of gradients are noise, but exponents differ little: those of fp32 carry less than 3 of 8 bits.

    bf16   sign │ exponent │ mantissa                     exponents │ signs and mantissas
           1    │ 8        │ 7                    ──►     8         │ 8
    fp32   sign │ exponent │ mantissa │ lower bits        exponents │ signs and mantissas │ lower bits
           1    │ 8        │ 7        │ 16        ──►     8         │ 8                   │ 16

    message   header │ the lower 16 bits of each (fp32) │ signs and mantissas │ the exponents, compressed by zstd

A message of fp32 becomes a sixth shorter, one of bf16 a third. Both ends together take 0.8 ms for a MB of fp32.
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
SLOW_LINK = 1e8  # bytes per second: below, the link saves twice the time that both ends spend
MEDIUM_LINK = 2e8  # below, it still saves more, and it is worth it where there is a core to spare (spare_time.py)
# Of zstd: exponents are worth an entropy coder (Huffman) and have few repetitions, so the search for those is as short
# as it can be. Level 1 takes three times as long and its messages are longer.
_SEARCH = {"strategy": zstandard.STRATEGY_FAST, "hash_log": 6, "min_match": 7, "window_log": 18}
_HEADER = struct.Struct("<BBxxI")  # the layout; bytes of a number; numbers
_LAYOUT = 2  # of a message: another version of this file may have another
_SIZES = {torch.float32: 4, torch.bfloat16: 2}  # bytes
_SIGN, _MANTISSA = 0x80, 0x7F  # in the byte that they share

Bytes = npt.NDArray[np.uint8]


class PackingDamaged(ValueError):
    """Bytes that are no packed floats, or not those that were asked for."""


class FloatPacker:
    """Keeps memory and contexts from one message to the next: one thread at a time."""

    def __init__(self) -> None:
        search = zstandard.ZstdCompressionParameters(**_SEARCH)
        self._compressor = zstandard.ZstdCompressor(compression_params=search)
        self._decompressor = zstandard.ZstdDecompressor()
        self._scratch = np.empty((4, 0), np.uint16)

    def _halves(self, count: int) -> list[Any]:
        """Memory for four times so many numbers of 16 bits."""
        if self._scratch.shape[1] < count:
            self._scratch = np.empty((4, count), np.uint16)
        return [each[:count] for each in self._scratch]

    def _words(self, count: int) -> Any:
        """Memory for so many numbers of 32 bits: the last two of the four."""
        return self._scratch[2:].reshape(-1)[: 2 * count].view(np.uint32)

    def pack(self, flat: Tensor) -> Tensor | None:
        """The bytes of a contiguous tensor of fp32 or bf16. None: it has another type, or they would not be fewer."""
        size = _SIZES.get(flat.dtype)
        if size is None or flat.nbytes < LEAST_BYTES:
            return None
        count = flat.numel()
        numbers = flat.detach().view(-1).view(torch.uint8).numpy()
        upper, other, spare, _ = self._halves(count)
        if size == 4:
            words = self._words(count)
            np.right_shift(numbers.view(np.uint32), 16, out=words)
            np.copyto(upper, words, casting="unsafe")
        else:
            upper[:] = numbers.view(np.uint16)
        exponents = spare.view(np.uint8)[:count]
        np.right_shift(upper, 7, out=other)
        np.copyto(exponents, other, casting="unsafe")  # without the sign above them
        compressed = self._compressor.compress(exponents.data)
        start = _HEADER.size + count * (size - 1)
        if start + len(compressed) > MOST_SHARE * flat.nbytes:
            return None
        payload = torch.empty(start + len(compressed), dtype=torch.uint8)
        packed: Bytes = payload.numpy()
        packed[: _HEADER.size] = np.frombuffer(_HEADER.pack(_LAYOUT, size, count), np.uint8)
        if size == 4:
            lower = packed[_HEADER.size : start - count].view(np.uint16)
            np.copyto(lower, numbers.view(np.uint32), casting="unsafe")
        np.right_shift(upper, 8, out=other)
        np.bitwise_and(other, _SIGN, out=other)
        np.bitwise_and(upper, _MANTISSA, out=upper)
        np.bitwise_or(upper, other, out=upper)
        np.copyto(packed[start - count : start], upper, casting="unsafe")
        packed[start:] = np.frombuffer(compressed, np.uint8)
        return payload

    def unpack(self, payload: memoryview, into: memoryview) -> None:
        """Writes the numbers of a payload to memory of just their length."""
        packed: Bytes = np.frombuffer(payload, np.uint8)
        if packed.size < _HEADER.size:
            raise PackingDamaged(f"packed floats begin with {_HEADER.size} bytes, and {packed.size} came")
        layout, size, count = _HEADER.unpack_from(payload)
        if layout != _LAYOUT:
            raise PackingDamaged(f"packed floats came in layout {layout}, and this version of Shoal has {_LAYOUT}")
        start = _HEADER.size + count * (size - 1)
        if size not in (2, 4) or size * count != len(into) or start >= packed.size:
            raise PackingDamaged(f"{count} packed floats of {size} bytes came for memory of {len(into)} bytes")
        exponents = self._exponents(payload[start:], count)
        upper, other, signs, _ = self._halves(count)
        upper[:] = exponents
        np.left_shift(upper, 7, out=upper)
        other[:] = packed[start - count : start]
        np.bitwise_and(other, _SIGN, out=signs)
        np.left_shift(signs, 8, out=signs)
        np.bitwise_and(other, _MANTISSA, out=other)
        np.bitwise_or(upper, other, out=upper)
        np.bitwise_or(upper, signs, out=upper)
        if size == 2:
            np.frombuffer(into, np.uint16)[:] = upper
            return
        numbers, words = np.frombuffer(into, np.uint32), self._words(count)
        numbers[:] = upper
        np.left_shift(numbers, 16, out=numbers)
        words[:] = packed[_HEADER.size : start - count].view(np.uint16)
        np.bitwise_or(numbers, words, out=numbers)

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
