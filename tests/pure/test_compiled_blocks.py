"""Compiled blocks: compiled for each of their shapes, however many there are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.worker.collective_worker import compile_blocks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def test_no_shape_is_left_to_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives up after eight compilations of one function. Which shapes those are would depend on the placement."""
    compiled = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model = nn.Sequential(Layer(4), Layer(4))
    limits = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "fail_on_recompile_limit_hit": False}
    with torch._dynamo.config.patch(limits), torch.no_grad():
        compile_blocks(model, ("0", "1"))
        for rows in range(2, 14):
            model(torch.ones(rows, 4))
    assert len(compiled) == 12
    torch._dynamo.reset()
