"""Models that the user has compiled (`torch.compile(model)`), and errors of the compiler in a sentence.

Blocks are seeded between graphs (parallel/replica.py), so a compiled model is compiled in pieces, at least one a block.
"""

import sys
from typing import Any

from torch import nn

from shoal.errors import JobError
from shoal.numerics.user_frames import user_line

RECOMPILE_LIMIT = 1024  # pieces of a model share code: torch's own limit of 8 would leave most of them uncompiled


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or one of its modules is compiled."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and any(
        isinstance(module, dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The model itself, whose tensors have the names that they have uncompiled."""
    if not is_compiled(model):
        return model
    dynamo = sys.modules["torch._dynamo"]
    # What a graph is compiled for must not depend on the shapes that a worker has seen before.
    dynamo.config.automatic_dynamic_shapes = False
    dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, dynamo.config.recompile_limit)
    dynamo.config.accumulated_recompile_limit = max(RECOMPILE_LIMIT, dynamo.config.accumulated_recompile_limit)
    inner: nn.Module = model._orig_mod if isinstance(model, dynamo.OptimizedModule) else model
    return inner


def compiler_error(error: BaseException) -> JobError | None:
    """The error of torch's compiler in a sentence; None: it is another error."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    text = _chain(error)
    where = user_line(error)
    if "compiler.disable()" in text:
        return JobError(
            "torch.compile(fullgraph=True): the model cannot be one graph, because blocks are seeded between graphs",
            where=where,
            fix="torch.compile(model) without fullgraph=True",
        )
    if "C++ compiler" in text or "Cxx" in text:
        return JobError(
            "torch.compile needs a C++ compiler for its default backend, and this machine has none that works",
            where=[*where, text.split("\n")[0][:200]],
            fix='install g++, or torch.compile(model, backend="aot_eager"), which needs none',
        )
    return JobError(
        f"torch.compile failed: {type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]}",
        where=where,
        fix='the model without torch.compile, or with torch.compile(model, backend="aot_eager")',
    )


def _chain(error: BaseException | None) -> str:
    parts: list[Any] = []
    while error is not None and len(parts) < 10:
        parts.append(f"{type(error).__name__} {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(map(str, parts))
