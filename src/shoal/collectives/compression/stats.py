"""What compression saved and what error it made, added up while it encodes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback

ERROR_INTERVAL = (
    17  # one encode in so many is decoded again to see its error; a prime, so that every piece has its turn
)


@dataclass
class CompressionStats:
    """Bytes are counted at every encode, the error at every 17th: looking costs about as much as a decode.

    The error is what a message left out of what it was to carry: with error feedback that is the gradient and what
    former messages left out, and later ones make it good. So the figure can be held against the compressor's price.
    """

    encodes: int = 0
    bytes_plain: int = 0
    bytes_sent: int = 0
    squared_error: float = 0.0
    squared_values: float = 0.0

    def encode(self, compressor: Compressor, flat: Tensor, key: Hashable) -> Tensor:
        """What the compressor makes of it, counted."""
        payload = compressor.encode(flat, key)
        if self.encodes % ERROR_INTERVAL == 0:
            decoded = compressor.decode(payload, flat.numel())
            left_out = compressor.residual(key) if isinstance(compressor, ErrorFeedback) else flat.detach() - decoded
            self._measure_error(decoded, left_out)
        self.encodes += 1
        self.bytes_plain += flat.nbytes
        self.bytes_sent += payload.nbytes
        return payload

    def _measure_error(self, decoded: Tensor, left_out: Tensor) -> None:
        error = float(torch.linalg.vector_norm(left_out)) ** 2
        values = float(torch.linalg.vector_norm(decoded + left_out)) ** 2
        if isfinite(error) and isfinite(values):  # a step that is not finite is dropped, and so is its error
            self.squared_error += error
            self.squared_values += values

    def add(self, other: "CompressionStats") -> None:
        """Another rank's or level's figures on top of these."""
        self.encodes += other.encodes
        self.bytes_plain += other.bytes_plain
        self.bytes_sent += other.bytes_sent
        self.squared_error += other.squared_error
        self.squared_values += other.squared_values

    @property
    def relative_error(self) -> float:
        """Length of the error over length of the values; 0 while nothing was seen."""
        return sqrt(self.squared_error / self.squared_values) if self.squared_values else 0.0

    @property
    def saved_fraction(self) -> float:
        """Share of the bytes that did not have to travel."""
        return 1 - self.bytes_sent / self.bytes_plain if self.bytes_plain else 0.0


class MeteredCompressor:
    """A compressor with a meter at it, and with the compressor's own face."""

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.name, self.cost_summary = inner.name, inner.cost_summary
        self.stats = CompressionStats()

    def payload_bytes(self, count: int) -> int:
        return self.inner.payload_bytes(count)

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        return self.stats.encode(self.inner, flat, key)

    def decode(self, payload: Tensor, count: int) -> Tensor:
        return self.inner.decode(payload, count)

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.inner.restore(state)
