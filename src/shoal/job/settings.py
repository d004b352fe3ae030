"""Fields of a job that `--set NAME=VALUE` changes, and how their values are read. Imports no torch: the parser of
commands uses it for mistakes."""

from difflib import get_close_matches
from typing import Any

from shoal.errors import InputError, JobError

EVERY = ("evaluate_every", "checkpoint_every")
WHOLE = ("batch", "steps", "epochs", "lanes", "microbatches", "accumulate", "seed", "threads", "patience", "tokens")
INTEGERS = (*WHOLE, *EVERY)
NUMBERS = ("clip_norm", "loss_scale", "ema")
SWITCHES = ("shuffle", "compile", "sync_batchnorm", "evaluate_ema")
STRINGS = ("last", "isa", "precision", "target", "monitor", "keep_best", "name")
SETTABLE = INTEGERS + NUMBERS + SWITCHES + STRINGS


def parse_setting(text: str) -> tuple[str, Any]:
    """Splits `steps=50` into a field's name and its value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: a name and a value are needed", fix="--set steps=50")
    if name not in SETTABLE:
        near = get_close_matches(name, SETTABLE, n=1)
        hint = f"did you mean --set {near[0]}={value}?" if near else f"one of {', '.join(SETTABLE)}"
        raise JobError(f"--set {name}: a job has no such setting", fix=hint)
    if value.lower() == "none":
        return name, None
    if name in SWITCHES:
        if value.lower() not in ("true", "false"):
            raise JobError(f"--set {text}: '{value}' is neither true nor false", fix=f"--set {name}=true")
        return name, value.lower() == "true"
    try:
        return name, int(value) if name in INTEGERS else float(value) if name in NUMBERS else value
    except ValueError:
        raise JobError(f"--set {text}: '{value}' is not a {'whole ' if name in INTEGERS else ''}number") from None
