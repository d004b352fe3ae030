"""What every compressor is: a flat tensor into bytes whose number is known beforehand, and back."""

from collections.abc import Hashable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import MismatchError


class Compressor(Protocol):
    @property
    def name(self) -> str:
        """As on the command line: what is printed can be pasted."""
        ...

    @property
    def cost_summary(self) -> str:
        """One line: what it costs in bytes and in error."""
        ...

    def payload_bytes(self, count: int) -> int:
        """Depends on the number of elements alone, so that a receiver knows it before it allocates."""
        ...

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        """A flat tensor of floats as `payload_bytes` bytes. What is not finite arrives as not finite.

        `key` names the stream (which tensor, which piece, which way) for compressors that remember; its `repr` must
        be the same in every run, as that of numbers, strings and tuples of them is.
        """
        ...

    def decode(self, payload: Tensor, count: int) -> Tensor:
        """The values in fp32; the same bytes give the same bits."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of what is remembered from one encode to the next: part of the state of a training run."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state` returned and forgets the rest; an empty mapping starts afresh."""
        ...


class StatelessCompressor:
    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        return


def as_fp32(flat: Tensor) -> Tensor:
    return flat.detach().to(torch.float32).contiguous()


def view_as(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. A piece that starts at an odd place in its buffer is copied first."""
    if piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype)


def check_length(compressor: Compressor, payload: Tensor, count: int) -> None:
    expected = compressor.payload_bytes(count)
    if payload.numel() != expected:
        raise MismatchError(
            f"{payload.numel():,} bytes came for {count:,} elements, but {compressor.name} makes {expected:,} of them",
            fix="the same --compress on every worker",
        )
