"""How a training system goes about a step, as far as that costs something. Few constants, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Runtime:
    name: str
    overlap: float = 0.0  # share of gradient traffic that may hide behind the backward pass of the last microbatch
    step_seconds: float = 0.0  # of every step, whatever is in it: commit, bookkeeping
    microbatch_seconds: float = 0.0  # of every microbatch on every stage
    update_bytes: float = 28.0  # that the optimizer reads and writes for one parameter
    gradient_copies: float = 1.0  # whole sets of gradients that a worker holds
    allocator: float = 1.0  # peak over what is alive


MEGATRON = Runtime(name="megatron")  # Megatron-LM and its like on accelerators: what published tables are made with
SHOAL = Runtime(name="shoal")  # this runtime
