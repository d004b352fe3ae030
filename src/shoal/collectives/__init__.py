"""How tensors travel between workers. Knows ranks, tensors and the lanes' tree; no job, no plan.

Beside the standard collectives, which are torch.distributed's own with `backend="shoal"`:

    prefix_sum      what the ranks up to this one add up to
    merge           the ordered sum of partial sums that exact data parallelism needs
    open_commons    memory of each rank that all ranks of the host can reach, summed in place
    Wish            how a group's tensors are to travel: pg_options=Wish(compress="int8@host")
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.collectives.options import CommOptions
from shoal.errors import InputError
from shoal.numerics.lanes import Span

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.collectives.process_group import ShoalProcessGroup
    from shoal.collectives.shared_buffers import SharedBuffers

__all__ = ["CommOptions", "open_shared_buffers", "ordered_reduce", "prefix_sum"]


def prefix_sum(tensor: "Tensor", group: Any = None, *, exclusive: bool = False) -> "Tensor":
    """The sum over the ranks up to this one (`exclusive`: below it, zeros on rank 0), as a new tensor.

    To the bit what an all-reduce of just those ranks would give.
    """
    return _shoal_group(group).prefix_sum(tensor, exclusive)


def ordered_reduce(
    lanes: int, assignment: Sequence[Span], partials: "Mapping[Span, Tensor]", group: Any = None
) -> "Tensor":
    """The sum of `lanes` tensors that ranks hold as partial sums, added in the order of the lanes' tree.

    `deal` says which lanes each rank holds, from and to; `parts` has this rank's sums by subtree
    (`shoal.numerics.lanes.subtrees(lanes, deal[rank])`), flat and of one length. The memory of the first one becomes
    the result, which is the same to the bit for every deal.
    """
    _shoal_group(group).ordered_reduce(lanes, assignment, partials).wait()
    return next(iter(partials.values()))


def open_shared_buffers(num_bytes: int, group: Any = None) -> "SharedBuffers | None":
    """Memory of each rank that all can reach: `commons.own` is this rank's, `commons.all_reduce(dtype)` sums in place.

    All ranks call it together. None, on all, where they do not share a host or it has no memory left.
    """
    from shoal.collectives import shared_buffers

    return shared_buffers.open_shared_buffers(_shoal_group(group), num_bytes)


def _shoal_group(group: Any) -> "ShoalProcessGroup":
    import torch.distributed as dist

    from shoal.collectives.process_group import NAME, ShoalProcessGroup

    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ShoalProcessGroup):
        named = "no process group" if group is None else f"a group of the backend {dist.get_backend(group)}"
        raise InputError(f"this is {named}, and needs one of {NAME}", fix=f'dist.init_process_group("{NAME}")')
    return group
