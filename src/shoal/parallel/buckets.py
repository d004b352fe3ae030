"""Tensors packed into flat buckets of one dtype, so that a reduction moves few large tensors.

A place that is empty (no gradient in this worker's lanes) is filled with minus zero: x + (-0.0) is x for every x, to
the bit, so "absent" needs no code of its own in the reduction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BUCKET_BYTES = 16 << 20
ALIGN_BYTES = 64  # bytes: every tensor of a bucket is aligned


@dataclass(frozen=True, kw_only=True)
class BucketSlot:
    index: int  # which tensor of the list
    offset: int
    like: Tensor  # shape, strides and dtype

    def view(self, flat: Tensor) -> Tensor:
        values = flat[self.offset : self.offset + self.like.numel()]
        if self.like.dtype == torch.bool:
            values = values.view(torch.bool)
        if self.like.is_contiguous():
            return values.view(self.like.shape)
        dense = self.like.dim() == 4 and self.like.is_contiguous(memory_format=torch.channels_last)
        return values.as_strided(self.like.shape, self.like.stride()) if dense else values.view(self.like.shape)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A layout: which tensors lie where in a flat one."""

    slots: tuple[BucketSlot, ...]
    dtype: torch.dtype
    length: int

    @property
    def num_bytes(self) -> int:
        return self.length * self.dtype.itemsize

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """What lies between its tensors and belongs to none of them."""
        ends = [slot.offset + slot.like.numel() for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.length]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    def has_any(self, present: Sequence[bool]) -> bool:
        """Whether any of its tensors is there."""
        return any(present[slot.index] for slot in self.slots)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The places of its tensors in a flat one, in the order of the slots."""
        return [slot.view(flat) for slot in self.slots]

    def fill(self, views: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
        places, sources = [], []
        with torch.no_grad():
            for slot, place in zip(self.slots, views, strict=True):
                tensor = tensors[slot.index]
                if tensor is None:
                    place.fill_(-0.0 if place.is_floating_point() or place.is_complex() else 0)
                elif tensor is not place:  # made in its place
                    places.append(place)
                    sources.append(tensor)
            if places:
                torch._foreach_copy_(places, sources)


def make_buckets(tensors: Sequence[tuple[int, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets for tensors like these (with their numbers), from the last to the first: backward fills those first."""
    buckets: list[Bucket] = []
    open_slots: dict[torch.dtype, tuple[list[BucketSlot], int]] = {}

    def close(dtype: torch.dtype) -> None:
        slots, length = open_slots.pop(dtype)
        if length:
            buckets.append(Bucket(slots=tuple(slots), dtype=dtype, length=length))

    for index, tensor in reversed(tensors):
        like = tensor.detach()
        dtype = torch.uint8 if like.dtype == torch.bool else like.dtype
        slots, length = open_slots.setdefault(dtype, ([], 0))
        slots.append(BucketSlot(index=index, offset=length, like=like))
        pad = max(1, ALIGN_BYTES // like.element_size())
        length += -(-like.numel() // pad) * pad
        open_slots[dtype] = (slots, length)
        if length * like.element_size() >= bucket_bytes:
            close(dtype)
    for dtype in list(open_slots):
        close(dtype)
    return buckets
