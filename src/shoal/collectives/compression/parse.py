"""Parses --compress: which compressor at which level.

    --compress int8@host,powersgd:4@rack        NAME[:PARAMETER][+feedback|-feedback][@LEVEL], several with commas

Error feedback is on if training needs it (int4, topk, onebit, powersgd) and otherwise off; the suffix changes that.
"""

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.error_feedback import ErrorFeedback
from shoal.collectives.compression.half import bf16, fp16
from shoal.collectives.compression.powersgd import PowerSGD
from shoal.collectives.compression.quantize import Int4Quantizer, Int8Quantizer, OneBitQuantizer
from shoal.collectives.compression.topk import TopK
from shoal.errors import InputError

LEVELS = {"host": "between hosts", "rack": "between racks"}
SETTING = "--compress"
MAX_RANK = 256  # more than useful: a rank of 4 already follows most gradients
EXAMPLE = f"{SETTING} int8@host,powersgd:4@rack"


def parse_compression(text: str) -> dict[str, Compressor]:
    """Level -> compressor, each with its own state. A name without a level is for the traffic between hosts."""
    where = f"{SETTING} {text}"
    found: dict[str, Compressor] = {}
    for part in text.split(","):
        word, at, level = part.strip().partition("@")
        level = level if at else "host"
        if level not in LEVELS:
            raise _unknown("level", level, LEVELS, where)
        if level in found:
            raise InputError(
                f"two compressors for the traffic {LEVELS[level]}: {found[level].name} and {word}",
                where=where,
                fix=f"one per level, as in {EXAMPLE}",
            )
        found[level] = parse_compressor(word, where)
    return found


def parse_compressor(word: str, where: str | None = None) -> Compressor:
    """One compressor by its name: "bf16", "topk:1%", "int8+feedback", "onebit-feedback"."""
    where = where or f"{SETTING} {word}"
    sign = next((sign for sign in ("+feedback", "-feedback") if word.endswith(sign)), "")
    name, colon, parameter = word.removesuffix(sign).partition(":")
    if name not in COMPRESSORS:
        raise _unknown("compressor", name, COMPRESSORS, where)
    compressor = COMPRESSORS[name](parameter if colon else None, where)
    if sign == "+feedback" or (not sign and compressor.name.endswith("-feedback")):
        return ErrorFeedback(compressor)
    return compressor


CompressorFactory = Callable[[str | None, str], Compressor]  # from the parameter or None, and the setting for errors


def _without_parameter(make: Callable[[], Compressor]) -> CompressorFactory:
    def made(parameter: str | None, where: str) -> Compressor:
        compressor = make()
        if parameter is not None:
            name = compressor.name.removesuffix("-feedback")
            raise InputError(
                f"{name} takes no parameter, but got '{parameter}'", where=where, fix=f"{name} without ':{parameter}'"
            )
        return compressor

    return made


def _topk(parameter: str | None, where: str) -> Compressor:
    if parameter is None:
        return TopK()
    try:
        share = float(parameter.removesuffix("%")) / (100 if parameter.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:  # also refuses NaN
        raise InputError(
            f"topk keeps a share above 0 and up to 1 (100%), not '{parameter}'", where=where, fix="topk:0.01 or topk:1%"
        )
    return TopK(share)


def _powersgd(parameter: str | None, where: str) -> Compressor:
    if parameter is None:
        return PowerSGD()
    if not (re.fullmatch("[0-9]{1,9}", parameter) and 1 <= int(parameter) <= MAX_RANK):
        raise InputError(
            f"powersgd takes a rank, a whole number from 1 to {MAX_RANK}, not '{parameter}'",
            where=where,
            fix="powersgd:4",
        )
    return PowerSGD(int(parameter))


COMPRESSORS: dict[str, CompressorFactory] = {
    "fp16": _without_parameter(fp16),
    "bf16": _without_parameter(bf16),
    "int8": _without_parameter(Int8Quantizer),
    "int4": _without_parameter(Int4Quantizer),
    "topk": _topk,
    "onebit": _without_parameter(OneBitQuantizer),
    "powersgd": _powersgd,
}


def _unknown(kind: str, name: str, known: Iterable[str], where: str) -> InputError:
    near = get_close_matches(name, list(known), n=1)
    fix = f"did you mean {near[0]}?" if near else f"for example {EXAMPLE}"
    return InputError(f"there is no {kind} '{name}'; there are {', '.join(known)}", where=where, fix=fix)
