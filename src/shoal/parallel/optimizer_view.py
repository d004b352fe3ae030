"""From merged gradients to weights: what the optimizer sees of them.

    plain      the model's own parameters
    masters    fp32 copies of weights that the model has in bf16: gradients go over in fp32, weights come back rounded
    rows       this worker's rows of each parameter (zero=1): the other rows come back from those who have them

Whatever the optimizer sees is also what is saved, handed over and hashed, apart from rows of weights that all have.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from shoal.collectives.group import Group
from shoal.errors import JobError
from shoal.numerics.grad_norm import clip
from shoal.numerics.tensor_slice import Piece, share

ELEMENTWISE = {
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD"),
}
PACK_BYTES = 8 << 20  # of rows that travel together


class Update:
    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        rows: Mapping[str, Piece] | None = None,
        masters: bool = False,
        team: Callable[[], Group] | None = None,
    ) -> None:
        """`parameters`: what the model computes with. `rows`: which of each this worker updates; `team`: whoever
        updates the others."""
        self.full = dict(parameters)
        self.rows, self.masters = rows, masters
        self.team = team
        self.seen: dict[str, nn.Parameter] = {}  # by the optimizer
        for name, parameter in parameters:
            if parameter.is_meta or (rows is None and not masters):
                self.seen[name] = parameter
                continue
            own = _part(parameter.detach(), rows, name)
            value = own.float().clone(memory_format=torch.contiguous_format) if masters else own
            self.seen[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)

    @property
    def plain(self) -> bool:
        return self.rows is None and not self.masters

    def before(self) -> None:
        """Gradients are in the model's `.grad`: the optimizer finds its own."""
        if self.plain:
            return
        for name, parameter in self.full.items():
            if not parameter.is_meta:
                gradient = parameter.grad
                if gradient is not None:
                    gradient = _part(gradient, self.rows, name)
                    gradient = gradient.float() if self.masters else gradient
                self.seen[name].grad = gradient

    def after(self) -> None:
        """The optimizer is done: the model gets what it made."""
        if self.plain:
            return
        with torch.no_grad():
            held = [(name, each) for name, each in self.full.items() if not each.is_meta]
            for name, parameter in held:
                parameter.grad = None
                if self.masters:
                    _part(parameter.data, self.rows, name).copy_(self.seen[name])
        if self.rows is not None and self.team is not None:
            spread_rows([each for _, each in held], self.team())

    def clip(self, max_norm: float, norm: float | None, beside: Sequence[Tensor] = ()) -> float:
        """`beside`: gradients of what is not in the model."""
        gradients = [each.grad for each in self.seen.values() if each.grad is not None]
        return clip([*gradients, *beside], max_norm, norm)


def _part(tensor: Tensor, rows: Mapping[str, Piece] | None, name: str) -> Tensor:
    """A view of the rows that are this worker's."""
    if rows is None or not rows[name]:
        return tensor
    ((start, stop),) = rows[name].cuts[0]
    return tensor[start:stop]


def spread_rows(parameters: Sequence[Tensor], team: Group) -> None:
    """Everybody's rows of each tensor, to everybody. All have equal shares of rows (pieces.rows)."""
    if team.size == 1:
        return
    pack: list[Tensor] = []
    for parameter in parameters:
        if parameter.dim() == 0:
            continue  # whole everywhere
        if pack and (sum(each.nbytes for each in pack) >= PACK_BYTES or pack[0].dtype != parameter.dtype):
            _spread(pack, team)
            pack = []
        pack.append(parameter.data)
    if pack:
        _spread(pack, team)


def _spread(tensors: Sequence[Tensor], team: Group) -> None:
    shares = [[tensor[slice(*share(len(tensor), team.size, rank))] for tensor in tensors] for rank in range(team.size)]
    lengths = [sum(each.numel() for each in own) for own in shares]
    row = torch.zeros(max(lengths), dtype=tensors[0].dtype)
    row[: lengths[team.rank]] = torch.cat([each.reshape(-1) for each in shares[team.rank]])
    for rank, told in enumerate(team.gather(row)):
        if rank != team.rank:
            at = 0
            for each in shares[rank]:
                each.copy_(told[at : at + each.numel()].view(each.shape))
                at += each.numel()


def shadow(model: nn.Module, seen: Mapping[str, nn.Parameter]) -> nn.Module:
    """The model's tree with other parameters in the places of its own; buffers are the same ones."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, dict(shared))
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        known = first.setdefault(id(parameter), name)
        path, _, leaf = name.rpartition(".")
        other.get_submodule(path)._parameters[leaf] = seen[known]
    return other


def halve(model: nn.Module) -> None:
    """Weights and tables in bf16. Norms that keep statistics stay as they are: a mean over many batches has no room
    there, and their kernels take bf16 beside it."""
    for module in model.modules():
        if not isinstance(module, _NormBase):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.bfloat16()


def check_elementwise(optimizer: Optimizer, why: str) -> None:
    """Optimizers that look at more than one number at a time cannot work on pieces of a parameter (EXACT rule 10)."""
    name = type(optimizer).__name__
    if name not in ELEMENTWISE or type(optimizer).__module__.partition(".")[0] != "torch":
        raise JobError(
            f"the optimizer {name} cannot be cut: {why}, and it may use more of a parameter than its own element",
            fix=f"one of {', '.join(sorted(ELEMENTWISE))}; or a layout that leaves parameters whole (data, pipeline)",
        )
    if any(group.get("fused") for group in optimizer.param_groups):
        raise JobError(
            f"{name}(fused=True) cannot be cut: {why}, and the fused kernel rounds by where an element lies",
            fix="fused=False, or a layout that leaves parameters whole (data, pipeline)",
        )
