"""Handles of issued messages and of several works together. Those of collectives are in work_queue.py."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.arguments import FlatTensor
from shoal.collectives.transport import TransportMessage


class MessageWork(dist.Work):
    """An issued send or receive."""

    def __init__(
        self, message: TransportMessage, tensors: list[Tensor], flat: FlatTensor | None, timeout: float
    ) -> None:
        super().__init__()
        self._message, self._tensors, self._flat, self._timeout = message, tensors, flat, timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout else 0.0
        self._message.wait(limit if limit > 0 else self._timeout)
        if self._flat is not None:
            self._flat.close()
            self._flat = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._message.done

    def is_success(self) -> bool:
        return self._message.done and self._message.error is None

    def exception(self) -> Any:
        return self._message.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def _source_rank(self) -> int:
        return self._message.source

    source_rank = _source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class CombinedWork(dist.Work):
    """Several works, issued together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
