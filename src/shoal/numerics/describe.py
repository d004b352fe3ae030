"""Describes values as JSON. Two descriptions are equal exactly when the values are; a resumed job is compared by them.

A function's description is a digest of its bytecode and of what it refers to in its own module: constants, helper
functions, classes. File and line do not count, so code may move.
"""

import hashlib
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

PLAIN = bool | int | float | str | bytes | None


def describe(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, nn.Module):
        shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in value.state_dict().items()]
        return f"instance of {type(value).__qualname__} {_short([str(value), shapes])}"
    if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        return [describe(value.func), describe(value.args), describe(value.keywords)]
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, types.FunctionType | type) and not _is_library(value):
        return f"{name.rpartition('.')[2]} {_short(_source(value, value.__module__, set()))}"
    return f"{getattr(value, '__module__', type(value).__module__)}.{name}"


def _is_library(value: Any) -> bool:
    """Whether a value comes from an installed package: its name then describes it."""
    code = getattr(value, "__code__", None)
    file = code.co_filename if code is not None else ""
    return str(value.__module__).partition(".")[0] in ("torch", "builtins", "numpy") or "site-packages" in file


def _source(value: Any, module: str, seen: set[int]) -> Any:
    """A nested list of what a function or class does, followed through its own module."""
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_source(item, module, seen) for item in value[:100]]
    if id(value) in seen or getattr(value, "__module__", None) != module:
        return getattr(value, "__qualname__", type(value).__qualname__)
    seen.add(id(value))
    if isinstance(value, type):
        return [_source(item, module, seen) for _, item in sorted(vars(value).items()) if callable(item)]
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        referred = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        parts = (value.__defaults__, cells, referred)
        return [_code(value.__code__), *(_source(part, module, seen) for part in parts)]
    return type(value).__qualname__


def _names(code: types.CodeType) -> list[str]:
    inner = [name for item in code.co_consts if isinstance(item, types.CodeType) for name in _names(item)]
    return [*code.co_names, *inner]


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code(code: types.CodeType) -> list[Any]:
    constants = [_code(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _short(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
