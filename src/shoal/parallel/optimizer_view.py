"""From reduced gradients to weights: what the optimizer sees of them.

    plain      the model's own parameters
    masters    fp32 copies of weights that the model has in bf16: gradients go over in fp32, weights come back rounded
    rows       this worker's rows of each parameter (zero=1): the other rows come back from those who have them

Whatever the optimizer sees is also what is saved, handed over and hashed, apart from rows of weights that all have.
"""

import copy
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from shoal.collectives.group import WorkerGroup
from shoal.errors import JobError
from shoal.numerics.grad_norm import clip_to_norm
from shoal.numerics.tensor_slice import TensorSlice, even_range

ELEMENTWISE = {*("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta", "Rprop", "ASGD")}
PACK_BYTES = 8 << 20  # of rows that travel together


class OptimizerView:
    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        rows: Mapping[str, TensorSlice] | None = None,
        masters: bool = False,
        get_group: Callable[[], WorkerGroup] | None = None,
    ) -> None:
        """`parameters`: what the model computes with. `rows`: which of each this worker updates."""
        self.model_params = dict(parameters)
        self.rows, self.masters = rows, masters
        self.get_group = get_group
        self.optimizer_params: dict[str, nn.Parameter] = {}  # by the optimizer
        for name, parameter in parameters:
            if parameter.is_meta or (rows is None and not masters):
                self.optimizer_params[name] = parameter
                continue
            own = _own_rows(parameter.detach(), rows, name)
            value = own.float().clone(memory_format=torch.contiguous_format) if masters else own
            self.optimizer_params[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)

    @property
    def passthrough(self) -> bool:
        return self.rows is None and not self.masters

    def before_step(self) -> None:
        """Gradients are in the model's `.grad`: the optimizer finds its own."""
        if self.passthrough:
            return
        for name, parameter in self.model_params.items():
            if not parameter.is_meta:
                gradient = parameter.grad
                if gradient is not None:
                    gradient = _own_rows(gradient, self.rows, name)
                    gradient = gradient.float() if self.masters else gradient
                self.optimizer_params[name].grad = gradient

    def after_step(self) -> None:
        """The optimizer is done: the model gets what it made."""
        if self.passthrough:
            return
        with torch.no_grad():
            held = [(name, each) for name, each in self.model_params.items() if not each.is_meta]
            for name, parameter in held:
                parameter.grad = None
                if self.masters:
                    _own_rows(parameter.data, self.rows, name).copy_(self.optimizer_params[name])
        if self.rows is not None and self.get_group is not None:
            all_gather_rows([each for _, each in held], self.get_group())

    def clip(
        self, max_norm: float, norm: float | None, extra: Sequence[Tensor] = (), only: Container[str] | None = None
    ) -> float:
        """`extra`: gradients of what is not in the model. `only`: the parameters whose gradients count."""
        clipped = [each for name, each in self.optimizer_params.items() if only is None or name in only]
        gradients = [each.grad for each in clipped if each.grad is not None]
        return clip_to_norm([*gradients, *extra], max_norm, norm)


def _own_rows(tensor: Tensor, rows: Mapping[str, TensorSlice] | None, name: str) -> Tensor:
    """A view of the rows that are this worker's."""
    if rows is None or not rows[name]:
        return tensor
    ((start, stop),) = rows[name].cuts[0]
    return tensor[start:stop]


def all_gather_rows(parameters: Sequence[Tensor], group: WorkerGroup) -> None:
    """Gives all workers all rows of each tensor. Workers have even shares of rows (numerics/tensor_slice.py)."""
    if group.size == 1:
        return
    pack: list[Tensor] = []
    for parameter in parameters:
        if parameter.dim() == 0:
            continue  # whole everywhere
        if pack and (sum(each.nbytes for each in pack) >= PACK_BYTES or pack[0].dtype != parameter.dtype):
            _all_gather_pack(pack, group)
            pack = []
        pack.append(parameter.data)
    if pack:
        _all_gather_pack(pack, group)


def _all_gather_pack(tensors: Sequence[Tensor], group: WorkerGroup) -> None:
    size = group.size
    shares = [[tensor[slice(*even_range(len(tensor), size, rank))] for tensor in tensors] for rank in range(size)]
    lengths = [sum(each.numel() for each in own) for own in shares]
    row = torch.zeros(max(lengths), dtype=tensors[0].dtype)
    row[: lengths[group.rank]] = torch.cat([each.reshape(-1) for each in shares[group.rank]])
    for rank, received in enumerate(group.gather_rows(row)):
        if rank != group.rank:
            at = 0
            for each in shares[rank]:
                each.copy_(received[at : at + each.numel()].view(each.shape))
                at += each.numel()


def clone_with_params(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """The model's tree with other parameters in the places of its own; buffers are the same ones."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, dict(shared))
    first: dict[int, str] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        known = first.setdefault(id(parameter), name)
        path, _, leaf = name.rpartition(".")
        other.get_submodule(path)._parameters[leaf] = parameters[known]
    return other


def to_bfloat16(model: nn.Module) -> None:
    """Weights and tables in bf16. Norms that keep statistics stay as they are: a mean over many batches has no room
    there, and their kernels take bf16 beside it."""
    for module in model.modules():
        if not isinstance(module, _NormBase):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.bfloat16()


def check_elementwise(optimizer: Optimizer, why: str) -> None:
    """Refuses optimizers that look at several numbers at a time: they need whole parameters (docs/exact.md rule 10)."""
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
