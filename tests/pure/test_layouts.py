"""Layouts of a model that is no stack, or has one somewhere: what needs no process."""

from torch import nn

from helpers.layout_models import Language
from shoal.parallel.blocks import find_blocks

# -- blocks -----------------------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])


def test_stacks_of_layers_are_opened_wherever_they_are() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2, norm=nn.LayerNorm(8))
    assert find_blocks(nn.Sequential(nn.Embedding(5, 8), encoder)).names == (
        *("0", "1.layers.0", "1.layers.1"),
        "1.norm",
    )
    assert find_blocks(Language(2)).names == ("words", "body.h.0", "body.h.1", "body.norm", "head")
    # One level below another: a stage of layers is itself a stack.
    staged = nn.ModuleDict({"body": nn.Module()})
    staged["body"].stages = nn.ModuleList([Language(2).body for _ in range(2)])
    assert find_blocks(staged).names == (
        *("body.stages.0.h.0", "body.stages.0.h.1", "body.stages.0.norm"),
        *("body.stages.1.h.0", "body.stages.1.h.1", "body.stages.1.norm"),
    )


def test_what_is_no_stack_stays_whole() -> None:
    assert find_blocks(nn.ModuleDict({"layer": Chosen()})).names == ("layer",), "a layer chooses among experts"
    mixed = nn.Module()
    mixed.steps = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # one layer's own matrices
    alone = nn.Module()
    alone.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    assert find_blocks(nn.ModuleDict({"mixed": mixed, "alone": alone})).names == ("mixed", "alone")
