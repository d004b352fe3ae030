"""Registers `backend="shoal"` with torch.distributed. The backend's own modules are imported with its first group."""

import functools
from typing import Any

from shoal.collectives.options import NAME


def register() -> None:
    """Registers the backend, once. Imports torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    _patch_monitored_barrier()


def _create(options: Any, comm_options: Any) -> Any:
    from shoal.collectives.process_group import ShoalProcessGroup

    return ShoalProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, comm_options)


def _patch_monitored_barrier() -> None:
    """Torch's function accepts only the backend gloo. The patched one calls a Shoal group's own barrier."""
    import torch.distributed as dist

    original = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        from shoal.collectives.process_group import ShoalProcessGroup

        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, ShoalProcessGroup):
            return chosen.monitored_barrier(timeout, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = monitored_barrier
    dist.distributed_c10d.monitored_barrier = monitored_barrier
