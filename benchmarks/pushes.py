"""What every contender of paramserver.py does: sizes, batches, and the clock. It needs numpy alone: peers live in
environments of their own.

An update is one gradient of everything on its way to the server, applied there by SGD, and the values on their way
back. A worker has at most one gradient under way while it computes the next. Both workers count what they have done
between the same two moments; whatever is slow at first is over by then.
"""

import argparse
import ctypes
import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WORKERS = 2
CASES = ("mlp", "fixed", "sparse")

IN, HIDDEN, OUT, BATCH = 64, 256, 10, 64  # mlp: forward and backward are real
SHAPES: dict[str, tuple[int, ...]] = {  # fixed: gradients that are there already
    "0.weight": (512, 1024),
    "0.bias": (1024,),
    "2.weight": (1024, 512),
    "2.bias": (512,),
}
ROWS, DIM, LOOKUPS = 100_000, 64, 1024  # sparse
PREPARED = 32  # batches that a worker has; it starts over after the last

LEARNING_RATE = 2.0**-6
GRADIENT = 2.0**-14  # of "fixed" and "sparse": steps of 2^-20, so a sum of them is exact and can be counted
STEP = LEARNING_RATE * GRADIENT

WARM_UP, SECONDS = 1.0, 3.0
QUICK_WARM_UP, QUICK_SECONDS = 0.05, 0.1
PR_SET_PDEATHSIG = 1


def mlp_shapes() -> dict[str, tuple[int, ...]]:
    return {"0.weight": (HIDDEN, IN), "0.bias": (HIDDEN,), "2.weight": (OUT, HIDDEN), "2.bias": (OUT,)}


def mlp_values() -> dict[str, np.ndarray]:
    """The same first values for everybody."""
    random = np.random.default_rng(0)
    return {
        name: (random.standard_normal(shape) / np.sqrt(IN)).astype(np.float32) for name, shape in mlp_shapes().items()
    }


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes.values())


def batches(worker: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1 + worker)
    return [
        (random.standard_normal((BATCH, IN)).astype(np.float32), random.integers(OUT, size=BATCH))
        for _ in range(PREPARED)
    ]


def lookups(worker: int) -> list[np.ndarray]:
    """Rows of each batch; some come up twice."""
    random = np.random.default_rng(101 + worker)
    return [random.integers(ROWS, size=LOOKUPS) for _ in range(PREPARED)]


def counted(step: Callable[[], object], start: float, seconds: float) -> float:
    """Steps per second from a moment of this machine's clock on, which is one for all processes. There is always one
    before, which is not counted."""
    step()
    while time.monotonic() < start:
        step()
    began, done = time.monotonic(), 0
    while (now := time.monotonic()) < began + seconds:
        step()
        done += 1
    return done / (now - began)


def cycle(items: Sequence[Any]) -> Callable[[], Any]:
    """One after the other, for ever."""
    at = -1

    def following() -> Any:
        nonlocal at
        at = (at + 1) % len(items)
        return items[at]

    return following


# -- scripts of peers -------------------------------------------------------------------------------------------------


def options(what: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--only", default=",".join(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each case, after the warm-up")
    parser.add_argument("--warm-up", type=float, default=WARM_UP, help="seconds")
    found = parser.parse_args(arguments)
    found.only = found.only.split(",")
    return found


def end_with_parent() -> None:
    """This process is killed when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def say(contender: str, version: str, rates: dict[str, float], applied: dict[str, float]) -> None:
    """The one line that a peer's script prints. `rates`: updates per second by case, of both workers together; sparse:
    rows. `applied`: updates over those that were pushed, as far as the server's values tell."""
    print(json.dumps({"contender": contender, "version": version, "rates": rates, "applied": applied}), flush=True)
