"""How a batch becomes the arguments of a model, and what the loss is of what the model returned.

batch                    loss=function                              loss="model"
(input, …, target)       model(input, …), loss(output, target)      model(input, …, target)
{key: value, …}          model(key=value, …), loss(output, batch)   model(key=value, …)
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.errors import JobError

LABELS = ("labels", "label", "label_ids", "target", "targets")  # for the loss: a model with a loss function gets none
SAME_AS_LABELS = ("label", "label_ids")  # what transformers renames to `labels`


class ModelCall(NamedTuple):
    """The arguments of a model for one batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def example(self) -> Any:
        """As a tuple, or as a dict by name."""
        return self.kwargs or self.args

    def __str__(self) -> str:
        named = [_shown(each) for each in self.args] + [f"{key}={_shown(each)}" for key, each in self.kwargs.items()]
        return ", ".join(named)


def split_sample(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """(inputs, target) of a batch. The last of a tuple is the target; anything else is input and target at once."""
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    return (batch,), batch


def target_of(batch: Any, *, model_has_loss: bool) -> Any:
    """What a loss function and metrics get beside the model's output."""
    return batch if model_has_loss else split_sample(batch)[1]


def model_call(model: nn.Module, batch: Any, *, model_has_loss: bool) -> ModelCall:
    """`model_has_loss`: the model gets all of the batch, its labels, too."""
    if isinstance(batch, tuple | list) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, Mapping):
        return _by_name(model, batch, model_has_loss)
    if model_has_loss:
        return ModelCall(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})
    return ModelCall(split_sample(batch)[0], {})


def _by_name(model: nn.Module, batch: Mapping[str, Any], model_has_loss: bool) -> ModelCall:
    """A forward that takes none of the keys by name, and no `**`, gets the mapping itself."""
    parameters = _parameters(model)
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    batch = dict(batch)
    if model_has_loss and "labels" in named and "labels" not in batch:
        batch = {"labels" if key in SAME_AS_LABELS and key not in named else key: each for key, each in batch.items()}
    known = [key for key in batch if key in named]
    if not known and not takes_any:
        return ModelCall((batch,), {})
    if model_has_loss:
        unknown = [key for key in batch if key not in named and not takes_any]
        if unknown:
            raise JobError(
                f"samples have {_listed(unknown)}, which forward of {type(model).__name__} does not take; it takes"
                f" {_listed(named)}",
                fix=f"leave it out (a datasets.Dataset: remove_columns({unknown!r})), or collate_fn=…",
            )
        found = batch
    else:
        found = {key: batch[key] for key in known or batch if key not in LABELS}
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named]
    missing = [name for name in needed if name not in found]
    if missing:
        raise JobError(
            f"forward of {type(model).__name__} needs {_listed(missing)}, and samples have {_listed(list(batch))}",
            fix="samples with the names that forward has",
        )
    return ModelCall((), found)


def _parameters(model: nn.Module) -> Sequence[inspect.Parameter]:
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile(model)
        model = model._orig_mod  # type: ignore[assignment]
    return list(inspect.signature(model.forward).parameters.values())


def loss_of(output: Any) -> Any:
    """The loss of what a model returned: `.loss`, ["loss"], the first of a tuple, or the tensor itself. It is a scalar
    mean, or (sum, count)."""
    found: Any = None
    if isinstance(output, Tensor):
        found = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, tuple | list) and output:
        found = output[0]
    scalar = isinstance(found, Tensor) and found.numel() == 1
    if scalar or (isinstance(found, tuple) and len(found) == 2):
        return found
    got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else "none"
    raise JobError(
        f'loss="model": the model returned {type(output).__name__}, and its loss is {got}',
        fix="labels among the keys of a sample, or a model that returns .loss, {'loss': …} or (loss, …); or"
        " loss=function(output, target)",
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{'×'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list) and value:
        return f"{type(value).__name__} of {len(value)} {type(value[0]).__name__}"
    return type(value).__name__


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
