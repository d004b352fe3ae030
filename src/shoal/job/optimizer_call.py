"""How a job's optimizer is called: with the named parameters, or with the model and the named parameters."""

import inspect
from collections.abc import Callable
from typing import Any


def takes_model(optimizer: Callable[..., Any]) -> bool:
    """Whether it asks for (model, named): two parameters that must be given by position."""
    try:
        parameters = inspect.signature(optimizer).parameters.values()
    except (TypeError, ValueError):  # a callable that says nothing of itself
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([each for each in parameters if each.kind in positional and each.default is each.empty]) == 2
