"""Models to sketch."""

from torch import nn


def linear_stack() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(70, 70), nn.ReLU(), nn.Dropout(0.1))))


def large() -> nn.Module:
    """12 layers of 9 MB; each is drawn twice."""
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(12)))
    for layer in model:
        nn.init.orthogonal_(layer.weight) if layer is model[11] else nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
    return model
