"""Models what a training system adds to the cost of a step. Few constants, each with its reason."""

from dataclasses import dataclass, replace
from typing import Literal

from shoal.planner.cost.runtime_overhead import RuntimeOverheads


@dataclass(frozen=True, kw_only=True)
class Runtime:
    name: str
    # Placement: the axis whose neighbours are nearest comes first.
    order: tuple[str, str, str] = ("tensor", "data", "pipeline")
    # Compute
    sustained: float = (
        1.0  # share of what a device's largest products reach alone: clocks fall under the load of a step
    )
    passes: float = 1.0  # bytes that operators without products move, over the least: kernels that are not fused
    dispatch: float = 1.0  # of the device's overhead for one operator: Python around each kernel
    concurrent: bool = True  # the host runs ahead of the device; False: its time adds up (a CPU)
    # Selective recomputation keeps all but attention's core (Megatron), or every second product (PyTorch's policy).
    selective: Literal["core", "products"] = "core"
    early_stop: bool = False  # recomputation ends when backward has its inputs, without the block's last product
    # Traffic
    wire_bytes: float | None = None  # of a parameter's gradient on a link; None: as in memory
    overlap: float = 0.0  # share of gradient traffic that may hide behind the backward pass of the last microbatch
    slowdown: float = 0.1  # of hidden traffic: compute and traffic slow each other down by this share
    buckets: float = 8.0  # gradients travel in this many buckets; the last one cannot hide
    overlap_tensor: float = 0.0  # share of backward's tensor-parallel all-reduces that hides behind weight gradients
    overlap_pipeline: float = 0.0  # share of a message between stages that hides behind compute
    scatter: bool = True  # each tensor-parallel worker sends its slice of a message between stages, not all of it
    # A step
    step_seconds: float = 0.0  # of every step, whatever its work: commit, bookkeeping
    microbatch_seconds: float = 0.0  # of every microbatch on every stage
    update_bytes: float = 28.0  # that the optimizer reads and writes for one parameter
    update_operators: float = 0.0  # for each parameter tensor: operators of an optimizer without fused kernels
    overheads: RuntimeOverheads | None = None  # of Python around kernels; None: negligible
    # Memory
    adds_lanes: bool = False  # gradients are added up lane by lane, and saved from a copy: shoal_memory.py
    allocator: float = 1.0  # peak over what is alive
    fragmentation: float = 0.0  # share of activations: freed memory that stays allocated and does not fit later tensors


# Shared by the accelerators' runtimes. 0.80: fitted to SC21 and vTrain (0.80) and separately to MPT on A100 and H100
# (0.81). 13.7: with 5 us an operator, a layer's forward costs the host about 1 ms, as measured.
SUSTAINED = 0.80
DISPATCH = 13.7

# Megatron-LM as of 2021, as in the tables of SC21 and vTrain: gradients travel in fp16, nothing overlaps. A microbatch
# costs a millisecond besides its layers (scaling, timers, the schedule), a step three.
MEGATRON_2021 = Runtime(
    name="megatron 2021",
    sustained=SUSTAINED,
    passes=1.08,
    dispatch=DISPATCH,
    wire_bytes=2.0,
    step_seconds=3e-3,
    microbatch_seconds=1e-3,
)
# As of 2022 (sequence parallelism, selective recomputation; Korthikanti et al.): all-reduces overlap weight gradients.
MEGATRON_2022 = replace(MEGATRON_2021, name="megatron 2022", overlap_tensor=0.5)
# Megatron-LM and similar systems since about 2023: gradients and messages between stages overlap with compute.
MEGATRON = replace(MEGATRON_2022, name="megatron", wire_bytes=None, overlap=0.9, overlap_pipeline=0.5)
# Fully sharded data parallelism (zero=3) in PyTorch: gathers ahead of time, gradients in fp32 on the wire; norms,
# activations and residuals are separate kernels, which move half as much again.
FSDP = Runtime(
    name="fsdp",
    sustained=SUSTAINED,
    passes=1.5,
    dispatch=DISPATCH,
    selective="products",
    early_stop=True,
    overlap=1.0,
    wire_bytes=4.0,
)
# Shoal on the cores of CPUs: one operator after the other, nothing overlaps. Adam without fused kernels reads and
# writes 84 bytes of a parameter in eight operators: decay, two moments, the root of one, the step.
SHOAL = Runtime(
    name="shoal",
    adds_lanes=True,
    allocator=1.02,
    fragmentation=0.3,
    order=("tensor", "pipeline", "data"),
    concurrent=False,
    scatter=False,
    update_bytes=84.0,
    update_operators=3.5,
    overheads=RuntimeOverheads(),
)
# The same under `--memory`: freed memory returns to the system.
SHOAL_CAPPED = replace(SHOAL, name="shoal --memory", allocator=1.0, fragmentation=0.0)
