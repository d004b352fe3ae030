"""Operators of one replica split over the workers of a team; the model's own code is left as it is.

`find_rules` looks once, without data, how a model's modules can be split; `install` makes them work on slices;
`Sliced` stands for the whole tensor in the code between them.
"""

from shoal.strategies.tensor.find import find_rules, on_meta
from shoal.strategies.tensor.install import Installed, install
from shoal.strategies.tensor.rules import Rule, Rules
from shoal.strategies.tensor.sliced import Sliced, gathered
from shoal.strategies.tensor.team import DryTeam, Team

__all__ = ["DryTeam", "Installed", "Rule", "Rules", "Sliced", "Team", "find_rules", "gathered", "install", "on_meta"]
