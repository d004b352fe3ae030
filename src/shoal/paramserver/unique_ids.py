"""The unique ids of a batch. Makes few torch and numpy calls: between batches their code leaves the core's cache."""

from typing import NamedTuple

import torch
from torch import Tensor


class UniqueIds(NamedTuple):
    ids: Tensor  # unique, rising
    inverse: Tensor | None = None  # index in `ids` of each given id; None: the given ids were unique and rising

    def sum_rows(self, rows: Tensor, into: Tensor) -> Tensor:
        """Adds the rows of each unique id, in the order given."""
        return into.copy_(rows) if self.inverse is None else into.zero_().index_add_(0, self.inverse, rows)

    def expand(self, rows: Tensor) -> Tensor:
        """Repeats rows of unique ids to one for each given id."""
        return rows if self.inverse is None else rows.index_select(0, self.inverse)


def find_unique(ids: Tensor) -> UniqueIds:
    """`ids`: one-dimensional."""
    return UniqueIds(ids) if is_rising(ids) else UniqueIds(*torch.unique(ids, return_inverse=True))


def is_rising(ids: Tensor) -> bool:
    given = ids.numpy()  # numpy is faster than torch on small arrays
    return bool((given[1:] > given[:-1]).all())
