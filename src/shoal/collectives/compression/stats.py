"""Counts the bytes that compression saves and the error that it makes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback

ERROR_INTERVAL = 17  # one encode of so many is decoded to measure its error; a prime, so that all pieces have a turn


@dataclass
class CompressionStats:
    """Counts bytes at every encode, and the error at every 17th, since measuring costs about as much as a decode.

    The error is the difference between a message and its exact values. With error feedback these are the gradient and
    the error of earlier messages. So the figure compares with the compressor's `cost_summary`.
    """

    encodes: int = 0
    bytes_plain: int = 0
    bytes_sent: int = 0
    squared_error: float = 0.0
    squared_values: float = 0.0

    def encode(self, compressor: Compressor, flat: Tensor, key: Hashable) -> Tensor:
        payload = compressor.encode(flat, key)
        if self.encodes % ERROR_INTERVAL == 0:
            decoded = compressor.decode(payload, flat.numel())
            error = compressor.residual(key) if isinstance(compressor, ErrorFeedback) else flat.detach() - decoded
            self._add_error(error, decoded)
        self.encodes += 1
        self.bytes_plain += flat.nbytes
        self.bytes_sent += payload.nbytes
        return payload

    def _add_error(self, error: Tensor, decoded: Tensor) -> None:
        squared_error = float(torch.linalg.vector_norm(error)) ** 2
        squared_values = float(torch.linalg.vector_norm(decoded + error)) ** 2
        if isfinite(squared_error) and isfinite(squared_values):  # a step that is not finite is dropped
            self.squared_error += squared_error
            self.squared_values += squared_values

    def add(self, other: "CompressionStats") -> None:
        """Adds the figures of another rank or level."""
        self.encodes += other.encodes
        self.bytes_plain += other.bytes_plain
        self.bytes_sent += other.bytes_sent
        self.squared_error += other.squared_error
        self.squared_values += other.squared_values

    @property
    def relative_error(self) -> float:
        """Norm of the error over norm of the values; 0 without a measurement."""
        return sqrt(self.squared_error / self.squared_values) if self.squared_values else 0.0

    @property
    def saved_fraction(self) -> float:
        """Share of the bytes that compression saved."""
        return 1 - self.bytes_sent / self.bytes_plain if self.bytes_plain else 0.0


class MeteredCompressor:
    """A compressor that counts in `stats`."""

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
