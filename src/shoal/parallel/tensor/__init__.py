"""Operators of one replica split over the workers of a team; the model's own code is left as it is.

`find_rules` looks once, without data, how a model's modules can be split; `install` makes them work on slices;
`Sliced` stands for the whole tensor in the code between them.
"""

from shoal.parallel.tensor.find_rules import find_rules, on_meta
from shoal.parallel.tensor.group import DryTeam, Team
from shoal.parallel.tensor.install import Installed, install
from shoal.parallel.tensor.rules import Rule, Rules
from shoal.parallel.tensor.sharded_tensor import Sliced, gathered

__all__ = ["DryTeam", "Installed", "Rule", "Rules", "Sliced", "Team", "find_rules", "gathered", "install", "on_meta"]
