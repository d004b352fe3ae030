"""What a prediction says."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.planner.cost.setup import Setup

# Seconds of a step by cause; they add up to the step.
TERMS = ("compute", "recompute", "tensor", "bubble", "data", "optimizer", "host")
# Bytes of a worker by what they are for; they add up to its peak.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "other")


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One worker of a pipeline (the only one, without), of the replica that has most to do."""

    blocks: tuple[int, ...]  # how many blocks its chunks have
    forward: float  # seconds of one microbatch through all of its chunks, tensor traffic and host included
    backward: float  # recomputation included
    tensor: float  # of both: all-reduces of tensor parallelism
    parameters: float  # on this device
    output: float  # bytes that go to the next stage with each microbatch
    memory: Mapping[str, float]  # by HOLDS

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    setup: Setup
    seconds: float
    terms: Mapping[str, float]
    stages: tuple[StagePrediction, ...]
    flops: float  # per device and second: what is computed, recomputation included
    hidden: float = 0.0  # seconds of data traffic behind backward: not in the step

    @property
    def peak(self) -> float:
        """Bytes of the worker that needs most."""
        return max(stage.peak for stage in self.stages)

    @property
    def binds(self) -> tuple[int, str]:
        """The stage and the part of its memory that is largest: what to change first."""
        stage = max(range(len(self.stages)), key=lambda each: self.stages[each].peak)
        memory = self.stages[stage].memory
        return stage, max(memory, key=lambda each: memory[each])
