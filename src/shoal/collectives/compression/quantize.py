"""Few bits per element and one scale per block of 256: int8, int4, and signs alone.

    payload   scale scale … scale │ codes codes … codes
              fp32, one per block │ 8, 4 or 1 bit per element, in order; zeros fill the last byte

A value is its code times its block's scale. If a value of a block is not finite, the scale is NaN and so are all its
decoded values: the step's check for finite numbers finds them.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator

import numpy as np
import torch
from torch import Tensor

from shoal.collectives.compression.base import StatelessCompressor, as_fp32, check_length, view_as

BLOCK = 256
SCALE_BYTES = 4
CHUNK = 1 << 17  # elements at a time: 512 KB stay in the second-level cache between passes
TINY = 1e-35  # the least maximum of a block: the inverse of a smaller scale could be infinite


class BlockQuantizer(StatelessCompressor, ABC):
    """The layout of the payload, and how codes become values."""

    name: str
    cost_summary: str
    values_per_byte: int

    def payload_bytes(self, count: int) -> int:
        return SCALE_BYTES * _blocks(count) + self._bytes(count)

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        values = as_fp32(flat)
        count = values.numel()
        payload = torch.empty(self.payload_bytes(count), dtype=torch.uint8)
        scales, codes = self._scales_and_codes(payload, count)
        scratch = torch.empty(min(count, CHUNK))
        for begin, rows in _chunks(values):
            block, byte = begin // BLOCK, begin // self.values_per_byte
            packed = codes[byte : byte + self._bytes(rows.numel())]
            self.quantize(rows, scales[block : block + len(rows)], packed, scratch[: rows.numel()].view(rows.shape))
        scales.add_(scales - scales)  # infinity - infinity is NaN; a finite scale stays as it is
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        check_length(self, payload, count)
        scales, codes = self._scales_and_codes(payload, count)
        values = torch.empty(count)
        for begin, rows in _chunks(values):
            block, byte = begin // BLOCK, begin // self.values_per_byte
            packed = codes[byte : byte + self._bytes(rows.numel())]
            rows.copy_(self.unpack(packed)[: rows.numel()].view(rows.shape))
            rows.mul_(scales[block : block + len(rows)].unsqueeze(1))
        return values

    def _bytes(self, count: int) -> int:
        return -(-count // self.values_per_byte)

    def _scales_and_codes(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        end = SCALE_BYTES * _blocks(count)
        return view_as(payload[:end], torch.float32), payload[end:]

    @abstractmethod
    def quantize(self, rows: Tensor, scales: Tensor, packed: Tensor, scratch: Tensor) -> None:
        """Writes the scales and codes of some blocks, one per row. `scratch` has the shape of `rows`."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> Tensor:
        """The codes of these bytes as int8."""


class Int8Quantizer(BlockQuantizer):
    name = "int8"
    cost_summary = "1 byte per element + 4 per 256; error <= 1/254 of the block's largest"
    values_per_byte = 1

    def quantize(self, rows: Tensor, scales: Tensor, packed: Tensor, scratch: Tensor) -> None:
        _scale_rows(rows, 127, scales, scratch)
        packed.view(torch.int8).view(rows.shape).copy_(scratch.round_())

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.view(torch.int8)


class Int4Quantizer(BlockQuantizer):
    name = "int4-feedback"
    cost_summary = "1/2 byte per element + 4 per 256; error <= 1/14 of the block's largest"
    values_per_byte = 2

    def quantize(self, rows: Tensor, scales: Tensor, packed: Tensor, scratch: Tensor) -> None:
        _scale_rows(rows, 7, scales, scratch)
        # The payload has codes -7 … 7 as 1 … 15. A further half makes the truncation to an integer a rounding.
        codes = torch.zeros(2 * packed.numel(), dtype=torch.int8)
        codes[: rows.numel()].view(rows.shape).copy_(scratch.add_(8.5))
        pairs = codes.view(torch.int16)  # the first of a pair in the lower byte, the second in the higher
        packed.copy_(pairs.bitwise_or(pairs >> 4))

    def unpack(self, packed: Tensor) -> Tensor:
        pairs = packed.to(torch.int16)
        return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)


class OneBitQuantizer(BlockQuantizer):
    name = "onebit-feedback"
    cost_summary = "1/8 byte per element + 4 per 256; error <= the values themselves (norm; 0.6 of it on normal noise)"
    values_per_byte = 8

    def quantize(self, rows: Tensor, scales: Tensor, packed: Tensor, scratch: Tensor) -> None:
        torch.mean(torch.abs(rows, out=scratch), 1, out=scales)
        # NumPy compares and packs several times faster than torch, in the same memory.
        packed.numpy()[:] = np.packbits(np.signbit(rows.numpy()))

    def unpack(self, packed: Tensor) -> Tensor:
        negative = torch.from_numpy(np.unpackbits(packed.numpy()))
        return negative.view(torch.int8).mul_(-2).add_(1)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields the start of each chunk and its blocks as rows; a last block that is not full by itself."""
    end = values.numel() // BLOCK * BLOCK
    for begin in range(0, end, CHUNK):
        yield begin, values[begin : min(begin + CHUNK, end)].view(-1, BLOCK)
    if end < values.numel():
        yield end, values[end:].view(1, -1)


def _scale_rows(rows: Tensor, levels: int, scales: Tensor, steps: Tensor) -> None:
    """Writes the scales, and each row divided by its scale, not yet rounded: its largest becomes `levels`."""
    largest = torch.maximum(rows.amax(1), rows.amin(1).neg_()).clamp_min_(TINY)
    torch.div(largest, levels, out=scales)
    torch.mul(rows, (levels / largest).unsqueeze(1), out=steps)
