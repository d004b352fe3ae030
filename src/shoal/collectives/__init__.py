"""Moves tensors between ranks. Knows ranks, tensors and the lanes' tree; no job, no plan.

The standard collectives are torch.distributed's own with `backend="shoal"`. This module adds:

    prefix_sum            the sum over the ranks up to this one
    ordered_reduce        the sum of partial sums in the order of the lanes' tree: exact data parallelism needs it
    open_shared_buffers   memory of each rank that all ranks of the host can access, summed in place
    CommOptions           how a group's tensors travel: pg_options=CommOptions(compress="int8@host")
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.collectives.options import NAME, CommOptions
from shoal.errors import InputError
from shoal.numerics.lanes import Span

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.collectives.process_group import ShoalProcessGroup
    from shoal.collectives.shared_buffers import SharedBuffers

__all__ = ["CommOptions", "open_shared_buffers", "ordered_reduce", "prefix_sum"]


def prefix_sum(tensor: "Tensor", group: Any = None, *, exclusive: bool = False) -> "Tensor":
    """Returns the sum over the ranks up to this one (`exclusive`: below it; zeros on rank 0) as a new tensor.

    The bits equal those of an all-reduce over just these ranks.
    """
    return _shoal_group(group).prefix_sum(tensor, exclusive)


def ordered_reduce(
    lanes: int, assignment: Sequence[Span], partials: "Mapping[Span, Tensor]", group: Any = None
) -> "Tensor":
    """Returns the sum of `lanes` tensors that the ranks hold as partial sums, added in the order of the lanes' tree.

    `assignment` has the span of lanes of each rank. `partials` has this rank's sums by subtree
    (`shoal.numerics.lanes.subtrees(lanes, assignment[rank])`), flat and of one length. The result overwrites the first
    of them; its bits are the same for every assignment.
    """
    _shoal_group(group).ordered_reduce(lanes, assignment, partials).wait()
    return next(iter(partials.values()))


def open_shared_buffers(num_bytes: int, group: Any = None) -> "SharedBuffers | None":
    """Allocates memory of each rank that all ranks can access.

    In the result, `own` is this rank's buffer and `all_reduce(dtype)` sums all buffers in place. All ranks call this
    together. Returns None on all of them if they do not share a host or the host has too little memory.
    """
    from shoal.collectives import shared_buffers

    return shared_buffers.open_shared_buffers(_shoal_group(group), num_bytes)


def _shoal_group(group: Any) -> "ShoalProcessGroup":
    import torch.distributed as dist

    from shoal.collectives.process_group import ShoalProcessGroup

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ShoalProcessGroup):
        found = "there is none" if group is None else f"this is one of {dist.get_backend(group)}"
        fix = f'dist.init_process_group("{NAME}")'
        raise InputError(f"this call needs a group of the backend {NAME}, and {found}", fix=fix)
    return group
