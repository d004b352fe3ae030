"""Operators of one replica split over a tensor-parallel group; the model's own code is left as it is.

`find_rules` finds once, without data, how a model's modules can be split; `install` makes them work on slices;
`ShardedTensor` stands for the whole tensor in the code between them.
"""

from shoal.parallel.tensor.find_rules import copy_to_meta, find_rules
from shoal.parallel.tensor.group import MetaTensorGroup, TensorGroup
from shoal.parallel.tensor.install import InstalledForwards, install
from shoal.parallel.tensor.rules import TensorRule, TensorRules
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, gather_tree

__all__ = [
    "InstalledForwards",
    "MetaTensorGroup",
    "ShardedTensor",
    "TensorGroup",
    "TensorRule",
    "TensorRules",
    "copy_to_meta",
    "find_rules",
    "gather_tree",
    "install",
]
