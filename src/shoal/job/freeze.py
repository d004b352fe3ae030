"""Parameters that are not trained before some step: `freeze={"encoder.*": 100, "embed": None}`. Pure.

A pattern is the name of a parameter or of a module, with `*` and `?`; the number is the first step that trains it, None
means never. What is frozen follows from the step alone, so a resumed run and a replacement find it again.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from shoal.errors import JobError

EXAMPLE = 'freeze={"encoder.*": 100}: not trained before step 100; None: never'


def check_freeze(given: Any) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise JobError(f"freeze={given!r} must map names of parameters or modules to steps", fix=EXAMPLE)
    for pattern, until in given.items():
        if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
            raise JobError(f"freeze: {pattern!r} has {until!r}, not a step from 1 up or None", fix=EXAMPLE)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def active_patterns(freeze: Mapping[str, int | None], step: int) -> tuple[str, ...]:
    return tuple(pattern for pattern, until in freeze.items() if until is None or step < until)


def is_frozen(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a parameter is frozen; a tied one has several names."""
    known = tuple(names)
    return any(matches(pattern, name) for pattern in patterns for name in known)


def check_names(freeze: Mapping[str, int | None], names: Sequence[str]) -> None:
    """Refuses a pattern that no parameter has."""
    for pattern in freeze:
        if not any(matches(pattern, name) for name in names):
            modules = {name.rpartition(".")[0] for name in names} - {""}
            near = get_close_matches(pattern.removesuffix(".*"), [*modules, *names], n=1, cutoff=0.4)
            shown = near[0] if near else ", ".join(names[:3])
            raise JobError(f"freeze: no parameter of the model is called {pattern!r}", fix=f"{shown!r}, for example")
