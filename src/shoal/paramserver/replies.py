"""Replies with their addressees, as shard and step coordinator return them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.paramserver.messages import AnyReply, ClientId, EndReply

if TYPE_CHECKING:
    from torch import Tensor


class ReplyAddress(NamedTuple):
    """The request that a reply answers. `sequence` is 0 for a read."""

    client: ClientId
    tag: int
    sequence: int


class ShardReply(NamedTuple):
    client: ClientId
    tag: int
    reply: AnyReply
    tensors: "Sequence[Tensor]" = ()


class CoordinatorReply(NamedTuple):
    """Answers the client's one open request to the step coordinator."""

    client: ClientId
    reply: AnyReply
    tensors: "Sequence[Tensor]" = ()


def end_to_plain(end: EndReply | None) -> list[Any] | None:
    return None if end is None else [end.reason, end.resumable, end.steps_done]


def end_from_plain(values: Sequence[Any] | None) -> EndReply | None:
    return None if values is None else EndReply(*values)
