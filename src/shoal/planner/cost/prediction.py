"""The result of a prediction: seconds by cause, and memory by stage."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.planner.cost.setup import Setup

# Seconds of a step by cause; their sum is the step.
TERMS = ("compute", "recompute", "tensor", "bubble", "data", "optimizer", "host")
# Bytes of a worker by use; their sum is its peak.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "other")


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One rank of a pipeline (the only one, without), of the replica with the most work."""

    blocks: tuple[int, ...]  # number of blocks in each of its chunks
    forward: float  # seconds of one microbatch through all of its chunks, tensor traffic and host included
    backward: float  # recomputation included
    tensor: float  # of both: all-reduces of tensor parallelism
    parameters: float  # on this device
    output: float  # bytes to the next stage for each microbatch
    memory: Mapping[str, float]  # by MEMORY_PARTS

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    setup: Setup
    seconds: float
    terms: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    flops: float  # per device and second, recomputation included
    hidden: float = 0.0  # seconds of data traffic behind backward: not part of the step

    @property
    def peak(self) -> float:
        """Bytes of the worker that needs most."""
        return max(stage.peak for stage in self.stages)

    @property
    def binds(self) -> tuple[int, str]:
        """The stage that needs most memory, and the largest part of it: what to change first."""
        stage = max(range(len(self.stages)), key=lambda each: self.stages[each].peak)
        memory = self.stages[stage].memory
        return stage, max(memory, key=lambda each: memory[each])
