"""The work of a job, operator by operator, traced from a model or derived from a shape. Estimates start from it.

Sizes are those of one microbatch of `Workload.samples` samples on one device that holds the whole model. Another
microbatch size scales what is not `fixed`; tensor parallelism divides what is `sliced`.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Op(NamedTuple):
    """One operator, or `times` equal ones."""

    name: str
    flops: float  # of matrix products (2 m n k); 0 for others
    bytes: float  # that it reads and writes
    fixed: float = 0.0  # of the bytes: those that do not grow with the samples, such as weights
    backward: bool = False
    sliced: bool = False  # tensor parallelism divides it
    core: bool = False  # of attention's core, which selective recomputation repeats
    times: float = 1.0  # number of equal operators; the sizes above are of one
    rate: float = 1.0  # its speed over that of a plain matrix product of as many FLOPs
    fused: bool = False  # products inside a larger kernel, such as flash attention
    half: bool = False  # in bf16 even where others are in fp8
    last: bool = False  # gives the block's output, which recomputation does not need


@dataclass(frozen=True, kw_only=True)
class Block:
    """A consecutive part of the model: the unit that stages are made of."""

    name: str
    ops: tuple[Op, ...]
    parameters: float  # numbers, not bytes
    sliced: float = 0.0  # of the parameters: those that tensor parallelism divides
    tensors: int = 0  # parameter tensors: an optimizer pays for each
    # Bytes that one microbatch keeps for backward:
    saved: float = 0.0  # by all ops, as without recomputation
    saved_sliced: float = 0.0  # of those: what tensor parallelism divides
    saved_core: float = 0.0  # of those: attention's core, which selective recomputation does not keep (it is sliced)
    saved_fixed: float = 0.0  # of those: what does not grow with the samples, such as weights in another dtype
    saved_input: float = 0.0  # the block's input: all that full recomputation keeps
    working: float = 0.0  # besides: the most that is alive at once inside of forward or backward
    output: float = 0.0  # bytes to the next block
    reduced: float = 0.0  # bytes of one all-reduce of tensor parallelism
    reductions: float = 0.0  # all-reduces of that size in forward; as many in backward
    recomputed: bool = True  # whether full recomputation repeats this block

    def flops(self, *, backward: bool) -> float:
        return sum(op.flops * op.times for op in self.ops if op.backward == backward)


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    blocks: tuple[Block, ...]  # in order; equal ones are one object many times
    samples: int = 1  # of the microbatch that the sizes are for
    dtype: str = "fp32"  # of matrix products
    tied: float = 0.0  # parameters of the last block that are those of the first
    # Bytes of one parameter on a device that cuts nothing (zero=0):
    weight_bytes: float = 4.0  # as computed with
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0  # of the optimizer, master weights included
    buffers: float = 0.0  # bytes of buffers
    tokens: float = 1.0  # of a sample
    model_flops: float | None = None  # of one sample, forward and backward, by the shape's formula; None: as in ops
    # The job's arithmetic; None for a shape, which may be cut in any way.
    lanes: int | None = None
    microbatches: int | None = None
    batch: int | None = None
    clips: bool = False  # every step computes the gradient's norm
    notes: tuple[str, ...] = ()  # sentences about what the trace had to assume

    @property
    def parameters(self) -> float:
        return sum(block.parameters for block in self.blocks) - self.tied
