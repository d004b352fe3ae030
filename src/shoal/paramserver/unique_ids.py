"""A batch's ids, each once. Few calls: between two batches a core has forgotten how to do any of them quickly."""

from typing import NamedTuple

import torch
from torch import Tensor


class UniqueIds(NamedTuple):
    ids: Tensor  # each once, rising
    inverse: Tensor | None = None  # where each of the given is among them; None: they were given so

    def sum_rows(self, rows: Tensor, into: Tensor) -> Tensor:
        """A row for each id: the sum of those that were given for it, in the order in which they stand."""
        return into.copy_(rows) if self.inverse is None else into.zero_().index_add_(0, self.inverse, rows)

    def expand(self, rows: Tensor) -> Tensor:
        """A row for each that was given, of one for each id."""
        return rows if self.inverse is None else rows.index_select(0, self.inverse)


def find_unique(ids: Tensor) -> UniqueIds:
    """Of ids in one dimension."""
    return UniqueIds(ids) if is_rising(ids) else UniqueIds(*torch.unique(ids, return_inverse=True))


def is_rising(ids: Tensor) -> bool:
    """Each once, in order. By numpy, which is quick about small arrays."""
    given = ids.numpy()
    return bool((given[1:] > given[:-1]).all())
