"""One configuration to predict: how the model is spread over devices, and how a batch goes through it."""

from dataclasses import dataclass

RECOMPUTE = ("none", "selective", "full")
EXCHANGES = ("collectives", "servers")
SYNC_MODES = ("sync", "quorum", "stale", "async", "local", "groups")  # of servers
SEARCHED_MODES = SYNC_MODES[:4]
DEFAULT_NUMBERS = {"quorum": "0.9", "stale": "2", "local": "16", "groups": "2"}  # of modes that take a number


@dataclass(frozen=True, kw_only=True)
class Setup:
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0
    batch: int = 1  # samples of a step, over all replicas
    microbatch: int = 1  # samples
    chunks: int = 1  # stages on each worker of a pipeline
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False  # with tensor: tensors that are not sliced are cut along the sequence
    lanes: int | None = None  # of a job: replicas get whole lanes
    exchange: str = "collectives"
    servers: int = 0
    mode: str = "sync"
    number: int = -1  # of the mode: workers of a quorum, steps, groups; -1: the default

    @property
    def sync(self) -> str:
        """The mode in the form of `--sync`."""
        if self.exchange != "servers":
            return ""
        number = str(self.number) if self.number >= 0 else DEFAULT_NUMBERS.get(self.mode, "")
        return f"{self.mode}:{number}" if self.mode in DEFAULT_NUMBERS else self.mode

    @property
    def devices(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def microbatches(self) -> int:
        """Microbatches of the replica that has most of them."""
        if self.lanes is None:
            return max(1, -(-self.batch // (self.data * self.microbatch)))
        per_lane = max(1, self.batch // (self.lanes * self.microbatch))
        return -(-self.lanes // self.data) * per_lane

    def __str__(self) -> str:
        """The layout in the form of `--layout`."""
        axes = [f"{axis}={n}" for axis in ("data", "pipeline", "tensor") if (n := getattr(self, axis)) > 1]
        return ",".join([*axes, *([f"zero={self.zero}"] if self.zero else [])]) or "data=1"
