"""The norm of a gradient that is sharded over the workers, with the bits of one worker (docs/exact.md rule 11).

Every worker sums squares row by row for the rows that it holds. All workers gather these sums, put them in the order of
the model's parameters, and add them up as one worker does. A slice along another dimension than rows adds to every row:
that changes the order of sums, as splitting an operator does anyway.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.numerics.grad_norm import row_squares, total_norm
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.replica import ModelReplica


class NormShare(msgspec.Struct, frozen=True):
    """What one worker contributes to the norm of one parameter."""

    name: str
    rows: int  # of the whole parameter
    tensor_slice: TensorSlice


class ShardedNorm:
    def __init__(self, group: WorkerGroup, replica: ModelReplica, groups: ParallelGroups) -> None:
        """All workers make it together. Each contributes the slices that no rank before it has."""
        self.group = group
        slices = replica.slices
        own = [
            NormShare(name, _rows(replica.shapes.get(name, tuple(parameter.shape))), slices.get(name, FULL_SLICE))
            for name, parameter in replica.parameters
        ]
        tables = [
            msgspec.json.decode(text, type=list[NormShare]) for text in gather_bytes(group, msgspec.json.encode(own))
        ]
        self.parameter_order = replica.parameter_order
        first: dict[tuple[str, bytes], int] = {}
        for rank, shares in enumerate(tables):
            for share in shares:
                first.setdefault((share.name, msgspec.json.encode(share.tensor_slice)), rank)
        self.tables = [
            [share if first[share.name, msgspec.json.encode(share.tensor_slice)] == rank else None for share in shares]
            for rank, shares in enumerate(tables)
        ]
        self.width = max(sum(1 + _length(share) for share in shares if share is not None) for shares in self.tables)

    def norm(self, gradients: Sequence[Tensor | None], scale: float) -> float:
        row = torch.zeros(self.width, dtype=torch.float64)
        at = 0
        for share, gradient in zip(self.tables[self.group.rank], gradients, strict=True):
            if share is None:
                continue
            if gradient is not None:
                row[at] = 1.0
                squares = row_squares(gradient if scale == 1.0 else gradient * scale)
                row[at + 1 : at + 1 + squares.numel()] = squares
            at += 1 + _length(share)
        found: dict[str, Tensor] = {}
        for table, sums in zip(self.tables, self.group.gather_rows(row), strict=True):
            at = 0
            for share in table:
                if share is None:
                    continue
                length = _length(share)
                if float(sums[at]):
                    whole = found.setdefault(share.name, torch.zeros(share.rows, dtype=torch.float64))
                    _add(whole, share.tensor_slice, sums[at + 1 : at + 1 + length])
                at += 1 + length
        return total_norm([found[name] for name in self.parameter_order if name in found])


def _rows(shape: Sequence[int]) -> int:
    return int(shape[0]) if shape else 1


def _length(share: NormShare) -> int:
    ranges = share.tensor_slice.cuts.get(0)
    return share.rows if ranges is None else sum(stop - start for start, stop in ranges)


def _add(whole: Tensor, tensor_slice: TensorSlice, squares: Tensor) -> None:
    at = 0
    for start, stop in tensor_slice.cuts.get(0, ((0, whole.numel()),)):
        whole[start:stop] += squares[at : at + stop - start]
        at += stop - start


def gather_bytes(group: WorkerGroup, text: bytes) -> list[bytes]:
    """Every worker's text, by rank."""
    lengths = group.gather_rows(torch.tensor([len(text)], dtype=torch.int64)).flatten().tolist()
    row = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    if text:
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.gather_rows(row)
    return [bytes(rows[rank, :length].tolist()) for rank, length in enumerate(lengths)]
