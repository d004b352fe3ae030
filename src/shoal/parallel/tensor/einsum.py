"""Products of tensors. Dimensions have letters; the letter that is cut decides what a worker's product is.

bhid,bhjd->bhij    h cut in both: slices of the result
ij,jk->ik          j sliced in both: summands of the result
ij,jk->ik          k sliced in the second: slices; each worker makes a summand of the first one's gradient
"""

from collections.abc import Callable, Sequence
from string import ascii_lowercase
from typing import Any

from torch import Tensor

from shoal.parallel.tensor import collective_ops
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, handles

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def contract(product: Func, operands: Sequence[Tensor], letters: Sequence[str], result: str) -> Any:
    """`product(*operands)` with the letters of each operand's dimensions; "." is a dimension that is broadcast."""
    first = next(operand for operand in operands if isinstance(operand, ShardedTensor))
    letter = letters[_place(operands, first)][first.shard_dim]
    if letter == "." or any(each.count(letter) > 1 for each in letters):
        return NotImplemented
    local_operands = []
    for operand, names in zip(operands, letters, strict=True):
        if isinstance(operand, ShardedTensor):
            if names[operand.shard_dim] == letter and operand.segments == first.segments:
                operand.mark_consumed()
                local_operands.append(operand.local)
                continue
            operand = operand.full_tensor()
        if letter in names:
            local_operands.append(collective_ops.take_shard(operand, names.index(letter), first.group, first.segments))
        else:
            local_operands.append(collective_ops.copy_to_shards(operand, first.group))
    found = product(*local_operands)
    if letter in result:
        return first.with_local(found, result.index(letter))
    return collective_ops.all_reduce(found, first.group)


def _place(operands: Sequence[Tensor], wanted: Tensor) -> int:
    return next(place for place, operand in enumerate(operands) if operand is wanted)


@handles("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
def matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    left, right = args[:2] if len(args) > 1 else (args[0], next(iter(kwargs.values())))
    if func.__name__ == "__rmatmul__":
        left, right = right, left
    if left.dim() < 2 or right.dim() < 2 or "out" in kwargs:
        return NotImplemented
    batch = max(left.dim(), right.dim()) - 2
    names = ascii_lowercase[:batch]

    def lettered(operand: Tensor, last: str) -> str:
        own = names[batch - (operand.dim() - 2) :]
        sizes = operand.shape[:-2]
        other = left if operand is right else right
        alone = len(own) > other.dim() - 2  # has dimensions that the other one lacks
        return "".join(name if size > 1 or alone else "." for name, size in zip(own, sizes, strict=True)) + last

    letters = [lettered(left, "yz"), lettered(right, "zx")]
    return contract(lambda a, b: a @ b, (left, right), letters, names + "yx")


@handles("baddbmm", "addmm")
def baddbmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or set(kwargs) - {"beta", "alpha"}:
        return NotImplemented
    found = args[1] @ args[2]
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    found = found if alpha == 1 else found * alpha
    return found if beta == 0 else found + (args[0] if beta == 1 else args[0] * beta)


@handles("einsum")
def einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, result = equation.replace(" ", "").split("->")
    return contract(lambda *local_operands: func(equation, *local_operands), operands, inputs.split(","), result)
