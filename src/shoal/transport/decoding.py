"""Decodes bytes that others wrote: whatever they hold, the only error is msgspec.DecodeError.

msgspec raises UnicodeDecodeError for text that is no UTF-8, RecursionError for values nested a thousand deep, and
TypeError for a map whose keys cannot be hashed: a reader that expects DecodeError alone would end with them.

Imported by the embedded store's server, too: only the standard library and msgspec.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
_OTHERS = (ValueError, TypeError, RecursionError, OverflowError)


def guarded(decode: Callable[[Bytes], T]) -> Callable[[Bytes], T]:
    """The same function, which raises nothing but DecodeError."""

    def call(raw: Bytes) -> T:
        try:
            return decode(raw)
        except msgspec.MsgspecError:
            raise
        except _OTHERS as error:
            raise msgspec.DecodeError(reason(error)) from None

    return call


@overload
def decode_json(raw: Bytes, kind: type[T]) -> T: ...
@overload
def decode_json(raw: Bytes, kind: Any = Any) -> Any: ...
def decode_json(raw: Bytes, kind: Any = Any) -> Any:
    return guarded(lambda text: msgspec.json.decode(text, type=kind))(raw)


def decode_msgpack(raw: Bytes, kind: Any = Any) -> Any:
    return guarded(lambda text: msgspec.msgpack.decode(text, type=kind, strict=False))(raw)


def decode_plain_json(raw: Bytes) -> Any:
    """As Python's json reads it: with NaN and infinite numbers, which checkpoints may hold."""
    return guarded(lambda text: json.loads(bytes(text)))(raw)


def reason(error: Exception) -> str:
    """In a few words, why bytes cannot be decoded."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return str(error)
