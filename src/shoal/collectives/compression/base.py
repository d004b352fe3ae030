"""The contract of compressors: a flat tensor to bytes, whose number depends on its length alone, and back."""

from collections.abc import Hashable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import MismatchError


class Compressor(Protocol):
    @property
    def name(self) -> str:
        """As `--compress` takes it."""
        ...

    @property
    def cost_summary(self) -> str:
        """Its bytes and its error, in one line."""
        ...

    def payload_bytes(self, count: int) -> int:
        """The bytes of a payload of `count` elements, so that a receiver can allocate them."""
        ...

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        """Encodes a flat tensor of floats. Values that are not finite are not finite after decoding.

        `key` identifies the stream (tensor, piece, direction) for compressors with state. Its `repr` must be the same
        in every run, as that of numbers, strings and tuples of them is.
        """
        ...

    def decode(self, payload: Tensor, count: int) -> Tensor:
        """The values in fp32. The same bytes give the same bits."""
        ...

    def state(self) -> dict[str, Tensor]:
        """A copy of the state that one encode leaves for the next: part of the state of a training run."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the state by one that `state` returned; an empty mapping clears it."""
        ...


class StatelessCompressor:
    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        return


def as_fp32(flat: Tensor) -> Tensor:
    return flat.detach().to(torch.float32).contiguous()


def view_as(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers. Copies bytes that are not aligned in their buffer."""
    if payload.data_ptr() % dtype.itemsize or payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def check_length(compressor: Compressor, payload: Tensor, count: int) -> None:
    expected = compressor.payload_bytes(count)
    if payload.numel() != expected:
        raise MismatchError(
            f"{payload.numel():,} bytes came for {count:,} elements, but {compressor.name} makes {expected:,} of them",
            fix="give every worker the same --compress",
        )
