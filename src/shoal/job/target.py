"""A metric target such as `accuracy >= 0.97`. Training ends at the first evaluation that reaches it."""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import JobError

_PATTERN = re.compile(r"^\s*([\w ./-]+?)\s*(>=|<=|>|<)\s*([-+\d.eE]+)\s*$")
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True, kw_only=True)
class MetricTarget:
    metric: str
    relation: str
    value: float

    @classmethod
    def parse(cls, text: Any, metrics: Mapping[str, Any]) -> "MetricTarget | None":
        """Reads "accuracy >= 0.97" or {"accuracy": 0.97}, which means at least (of the loss, at most)."""
        if text is None or isinstance(text, cls):
            return text
        if isinstance(text, Mapping) and len(text) == 1:
            ((metric, value),) = text.items()
            text = f"{metric} {'<=' if metric == 'loss' else '>='} {value}"
        found = _PATTERN.match(text) if isinstance(text, str) else None
        if not found:
            raise JobError(f"target {text!r} is not understood", fix='target="accuracy >= 0.97" or "loss <= 1.5"')
        metric, relation, number = found.groups()
        if metric != "loss" and metric not in metrics:
            known = ", ".join(["loss", *metrics])
            raise JobError(f"target '{text}' names the metric '{metric}', but the job measures {known}")
        try:
            return cls(metric=metric, relation=relation, value=float(number))
        except ValueError:
            raise JobError(f"target '{text}': {number} is not a number") from None

    def reached(self, metrics: Mapping[str, float | None]) -> bool:
        found = metrics[self.metric]
        return found is not None and bool(_COMPARE[self.relation](found, self.value))

    def __str__(self) -> str:
        return f"{self.metric} {self.relation} {self.value:g}"
