"""Error feedback around any compressor: adds the error of one message to the next (Karimireddy et al., 2019,
arXiv:1901.09847). So values are late but not lost: the sum of decoded values follows the sum of exact ones."""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from shoal.collectives.compression.base import Compressor

RESIDUAL_PREFIX = "residual of "


class ErrorFeedback:
    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        # The name of a compressor with feedback by default ends in "-feedback" if it is used without.
        plain = inner.name.removesuffix("-feedback")
        self.name = plain if plain != inner.name else f"{plain}+feedback"
        self.cost_summary = f"{inner.cost_summary}; the error goes into the next message, 4 bytes of memory per element"
        self._residuals: dict[str, Tensor] = {}

    def payload_bytes(self, count: int) -> int:
        return self.inner.payload_bytes(count)

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        residual = self._residuals.get(repr(key))
        if residual is None or residual.numel() != flat.numel():  # new, or of another length
            residual = self._residuals[repr(key)] = torch.zeros(flat.numel())
        residual.add_(flat.detach())
        payload = self.inner.encode(residual, key)
        residual.sub_(self.inner.decode(payload, flat.numel()))
        # A step that is not finite is not applied, and its residual would spoil every later step.
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        return self.inner.decode(payload, count)

    def residual(self, key: Hashable) -> Tensor:
        """The error of the last message of this stream."""
        return self._residuals[repr(key)]

    def state(self) -> dict[str, Tensor]:
        own = {RESIDUAL_PREFIX + key: residual.clone() for key, residual in self._residuals.items()}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._residuals = {
            name.removeprefix(RESIDUAL_PREFIX): residual.clone()
            for name, residual in state.items()
            if name.startswith(RESIDUAL_PREFIX)
        }
        self.inner.restore(state)
