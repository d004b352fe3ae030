"""How a model is cut into a pipeline's stages: which segments, which tensors, which weights are shared. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal.errors import JobError
from shoal.numerics.lanes import Span
from shoal.parallel.balance import cut_stages
from shoal.parallel.block_graph import BlockGraph
from shoal.parallel.blocks import BlockList
from shoal.parallel.pipeline_schedule import PipelineSchedule, fit_schedule
from shoal.parallel.plan import Plan

KINDS = (nn.Module.named_parameters, nn.Module.named_buffers)


@dataclass(frozen=True, kw_only=True)
class PipelineStages:
    """How the blocks of a model are divided into stages, and the order in which the stages are computed."""

    spans: tuple[Span, ...]  # segments of each stage
    blocks: tuple[str, ...]  # of each segment
    costs: tuple[float, ...]  # of each stage, as a share of all
    ranks: int
    schedule: str
    chunks: int
    names: tuple[frozenset[str], ...]  # tensors by rank, by their first names
    stage_by_tensor: Mapping[str, int]  # the stage of each tensor, by any of its names
    tied: Mapping[str, tuple[int, ...]]  # weights that several ranks use -> those ranks, in block order

    def schedule_for(self, microbatches: int) -> PipelineSchedule:
        return fit_schedule(self.schedule, ranks=self.ranks, microbatches=microbatches, chunks=self.chunks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.schedule_for(1).stages_of(rank)

    @property
    def last_rank(self) -> int:
        """The rank that has the last stage, and with it the loss."""
        return self.schedule_for(1).rank_of(len(self.spans) - 1)

    def blocks_of(self, rank: int) -> list[str]:
        return [block for stage in self.stages_of(rank) for block in self.blocks[slice(*self.spans[stage])]]


def cut_model(model: nn.Module, blocks: BlockList, graph: BlockGraph, plan: Plan) -> PipelineStages:
    """Stages of about equal cost, or as large as the plan has them. `model` may be on meta."""
    ranks, stages = plan.pipeline, plan.pipeline * plan.chunks
    order = fit_schedule(plan.schedule, ranks=ranks, microbatches=1, chunks=plan.chunks)
    by_stage = [plan.stages[order.rank_of(stage)] for stage in range(stages)] if plan.stages else None
    spans = cut_stages(graph.costs(), stages, by_stage, joined=graph.inseparable)
    stage_of_block: dict[int, int] = {}
    stage_of_held: dict[tuple[int, int], int] = {}  # what the model's own code uses -> where
    tensors = {name: tensor for kind in KINDS for name, tensor in kind(model, remove_duplicate=False)}
    for stage, span in enumerate(spans):
        for segment in graph.segments[slice(*span)]:
            stage_of_block.setdefault(blocks.names.index(segment.block) + 1, stage)
        for name in graph.tensors_used(span):
            stage_of_held.setdefault((id(tensors[name]), blocks.block_of(name)), stage)
    homes: dict[str, int] = {}
    for name, tensor in tensors.items():  # a tensor without a user is with the first
        block = blocks.block_of(name)
        homes[name] = stage_of_block.get(block, stage_of_held.get((id(tensor), block), 0))
    names: list[set[str]] = [set() for _ in range(ranks)]
    uses: dict[str, dict[int, int]] = {}  # first name of a parameter -> block -> rank
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        known = first.setdefault(id(tensor), name)
        rank = order.rank_of(homes[name])
        names[rank].add(known)
        if isinstance(tensor, nn.Parameter):
            uses.setdefault(known, {})[blocks.block_of(name)] = rank
    tied = {name: tuple(found[block] for block in sorted(found)) for name, found in uses.items()}
    for rank in range(ranks):
        if not any(name in names[rank] for name in uses):
            number = next(stage for stage in range(stages) if order.rank_of(stage) == rank)
            inside = ", ".join(graph.segments[index].block for index in range(*spans[number]))
            raise JobError(
                f"stage {number} of {stages} would have no parameters to train ({inside})",
                fix="fewer stages, or blocks=[…] that go together",
            )
    total = sum(graph.costs()) or 1.0
    return PipelineStages(
        spans=spans,
        blocks=tuple(segment.block for segment in graph.segments),
        costs=tuple(sum(graph.costs()[slice(*span)]) / total for span in spans),
        ranks=ranks,
        schedule=plan.schedule,
        chunks=plan.chunks,
        names=tuple(frozenset(each) for each in names),
        stage_by_tensor=homes,
        tied={name: found for name, found in tied.items() if len(set(found)) > 1},
    )
