"""Makes one batch of samples, as PyTorch and Hugging Face do it: numbers, lists of numbers and arrays to tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shoal.errors import JobError

OWN_COLLATE = "collate_fn=…, which gets a list of samples and returns the batch"


def collate(samples: Sequence[Any]) -> Any:
    """Samples without a mapping in them: torch's `default_collate`. In a mapping a list is one row of numbers (torch
    would take it apart), a float becomes float32, and what cannot be a tensor is an error that names its key."""
    return _collate(list(samples), "") if _has_mapping(samples[0]) else default_collate(list(samples))


def _has_mapping(sample: Any) -> bool:
    if isinstance(sample, Mapping):
        return True
    return isinstance(sample, tuple | list) and any(_has_mapping(item) for item in sample)


def _collate(samples: list[Any], place: str) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: _collate(_column(samples, key, place), _inside(place, key)) for key in first}
    if isinstance(first, tuple | list) and _has_mapping(first):
        columns = zip(*samples, strict=True)
        parts = [_collate(list(column), f"{place}[{number}]") for number, column in enumerate(columns)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return _stack(samples, place) if place else default_collate(samples)


def _column(samples: list[Any], key: Any, place: str) -> list[Any]:
    without = next((number for number, sample in enumerate(samples) if key not in sample), None)
    if without is not None:
        keys = ", ".join(map(repr, samples[without]))
        raise JobError(
            f"samples of one batch have different keys: one has {_inside(place, key)!r}, another only {keys}",
            fix=OWN_COLLATE,
        )
    return [sample[key] for sample in samples]


def _inside(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _stack(values: list[Any], place: str) -> Tensor:
    """One tensor of what all samples have under a key."""
    unfit = next((value for value in values if not _is_numeric(value)), None)
    if unfit is not None or any(value is None for value in values):
        kind = "None" if unfit is None else "a string" if _is_text(unfit) else f"a {type(unfit).__name__}"
        raise JobError(
            f"a sample has {kind} under {place!r}, and a model computes with numbers",
            fix=f"make it a number, leave it out (a datasets.Dataset: remove_columns([{place!r}])), or {OWN_COLLATE}",
        )
    try:
        if isinstance(values[0], Tensor):
            return torch.stack(values)
        if isinstance(values[0], np.ndarray | np.generic):
            return torch.as_tensor(np.stack(values))
        return torch.tensor(values)
    except (ValueError, RuntimeError, TypeError):
        shapes = list(dict.fromkeys(_shape(value) for value in values))
        if len(shapes) < 2:
            raise
        raise JobError(
            f"samples of one batch differ in length under {place!r}: {shapes[0]} and {shapes[1]}",
            fix=f"pad them to one length, or {OWN_COLLATE} (of transformers: DataCollatorWithPadding(tokenizer))",
        ) from None


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    if isinstance(value, list | tuple):
        return all(map(_is_numeric, value))
    return isinstance(value, Tensor | bool | int | float | complex)


def _is_text(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = next((item for item in value if not _is_numeric(item)), None)
    return isinstance(value, str | bytes)


def _shape(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return "×".join(map(str, value.shape)) or "a number"
    if not isinstance(value, list | tuple):
        return "a number"
    inner = list(dict.fromkeys(_shape(item) for item in value))
    return str(len(value)) if inner in ([], ["a number"]) else f"{len(value)} of {' and '.join(inner[:2])}"
