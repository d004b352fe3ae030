"""Which modules are split, and how: found by find_rules.py, or given by the user in `Job.tensor_rules`.

column     Linear: rows of the weight, so slices of its output        ┐ together: one sum forward,
row        Linear: columns of the weight; products are summed         ┘ one backward
vocab      Embedding: rows of the weight; lookups are summed
attention  MultiheadAttention: some of its heads
sequence   LayerNorm, RMSNorm: some places of the sequence (only if asked for)
whole      every worker has all of it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from shoal.errors import JobError
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice, even_slice

KINDS = ("column", "row", "vocab", "attention", "sequence", "whole")
_IN_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_CUT = {  # the dimension of each parameter that is cut
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "vocab": {"weight": 0},
    "attention": dict.fromkeys(_IN_PROJECTIONS, 0),
}
_FORWARDS: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.Linear, ("column", "row", "whole")),
    (nn.Embedding, ("vocab", "whole")),
    (nn.MultiheadAttention, ("attention", "whole")),
    (nn.LayerNorm, ("sequence", "whole")),
    (nn.RMSNorm, ("sequence", "whole")),
)


@dataclass(frozen=True)
class TensorRule:
    kind: str
    segments: int = 1  # 3: a fused projection of queries, keys and values, each of them cut

    def __str__(self) -> str:
        return self.kind if self.segments == 1 else f"{self.kind}, {self.segments} segments"


@dataclass(frozen=True)
class TensorRules:
    """By module name; a module without a rule is whole."""

    size: int
    modules: Mapping[str, TensorRule] = field(default_factory=dict)

    @property
    def sequence(self) -> bool:
        return any(rule.kind == "sequence" for rule in self.modules.values())

    def slice_of(self, parameter: str, shape: tuple[int, ...], rank: int) -> TensorSlice:
        """What a worker holds of a parameter whose whole shape is this."""
        owner, _, leaf = parameter.rpartition(".")
        rule = self.modules.get(owner)
        dim = None if rule is None else _CUT.get(rule.kind, {}).get(leaf)
        if rule is None or dim is None or self.size == 1:
            return FULL_SLICE
        fused = rule.segments if rule.kind != "attention" or leaf.startswith("in_proj") else 1
        return even_slice(shape, dim, self.size, rank, fused)

    def lines(self) -> list[str]:
        width = max(map(len, self.modules), default=0)
        return [f"{name:<{width}}  {rule}" for name, rule in self.modules.items()]


def kinds_of(module: nn.Module) -> tuple[str, ...]:
    """What a module can be; nothing for those that are always whole, as all are that have a forward of their own."""
    for kind, choices in _FORWARDS:
        if isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module):
            return choices if _splittable(module) else ("whole",)
    return ()


def _splittable(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return module.bias_k is None and not module.add_zero_attn
    if isinstance(module, nn.Embedding):  # these look at more than the rows they fetch
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return plain and "weight" in module._parameters
    return "weight" in module._parameters  # not one that is computed from others


def check_fits(name: str, module: nn.Module, rule: TensorRule, size: int) -> None:
    """Raises where a module's numbers cannot be cut so."""
    if rule.kind == "attention":
        assert isinstance(module, nn.MultiheadAttention)
        check_heads(module.num_heads, size, name)
        return
    sizes = {"column": "out_features", "row": "in_features", "vocab": "num_embeddings"}
    if rule.kind not in sizes:
        return
    number = int(getattr(module, sizes[rule.kind]))
    if number % (size * rule.segments):
        into = f"tensor={size}" + (f" in {rule.segments} segments" if rule.segments > 1 else "")
        raise JobError(f"{name}: {sizes[rule.kind]}={number} cannot be split over {into}", fix=f'"{name}": "whole"')


def check_heads(heads: int, size: int, name: str) -> None:
    if heads % size:
        raise JobError(
            f"{heads} heads cannot be split over tensor={size}",
            where=name,
            fix=f'tensor= a number that divides {heads}, or tensor_rules={{"{name}": "whole"}}',
        )


def parse_rules(wanted: Mapping[str, str], model: nn.Module, size: int) -> dict[str, TensorRule]:
    """The user's patterns as rules of modules; of two that match, the first one counts."""
    modules = {name: module for name, module in model.named_modules() if name}
    rules: dict[str, TensorRule] = {}
    for pattern, text in wanted.items():
        rule = _parse_rule(pattern, text)
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            near = get_close_matches(pattern, modules, n=1, cutoff=0.0)
            fix = f"the nearest is '{near[0]}'" if near else "the model has no modules"
            raise JobError(f"tensor_rules: '{pattern}' matches no module", fix=fix)
        if rule.kind == "whole":  # of a block: all that is in it
            matching = [n for n in modules if any(n == m or n.startswith(f"{m}.") for m in matching)]
            fitting = [name for name in matching if kinds_of(modules[name])]
        else:
            fitting = [name for name in matching if rule.kind in kinds_of(modules[name])]
        if not fitting and rule.kind != "whole":
            one, module = matching[0], modules[matching[0]]
            choices, kind = ", ".join(kinds_of(module)) or "whole", type(module).__name__
            message = f"tensor_rules: '{pattern}' is {rule.kind}, but {one} is a {kind}"
            raise JobError(message, fix=f"it can be {choices}")
        for name in fitting:
            check_fits(name, modules[name], rule, size)
            rules.setdefault(name, rule)
    return rules


def _parse_rule(pattern: str, text: str) -> TensorRule:
    """`column`, or `column:3` for one that is three in one."""
    kind, _, count = text.partition(":")
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        message = f"tensor_rules: '{pattern}' is '{text}', which is not known; the nearest is '{near}'"
        raise JobError(message, fix=f"one of {', '.join(KINDS)}")
    if count and (kind not in ("column", "row") or not count.isdigit() or int(count) < 1):
        raise JobError(f"tensor_rules: '{pattern}' is '{text}'", fix="column:3, for three projections in one")
    return TensorRule(kind, int(count) if count else 3 if kind == "attention" else 1)
