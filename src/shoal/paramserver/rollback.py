"""Lockstep modes: decides whether the servers are at one step, and which step they rewind to if they are not. Pure.

    server 0   step 7, snapshots 4 6     server 1 restarted from an older state than workers have seen: all rewind to
    server 1   step 4, snapshots 4       step 4 in a new generation, and requests of the old generation are refused

A restarted server may have been in later generations than its snapshot has. Such a generation must not come again: its
workers would go on as if their contributions were there. So every start of a server lifts the generation above all
earlier ones. Workers enter a generation when all servers are in it, so one of these servers is still in it, or all have
restarted since.

Another worker's rewind or update may be under way while this worker polls, so that it sees some servers before and some
after. If one server is in a generation that counts all starts, a rewind is under way or done: more polls show it. After
MAX_POLLS the worker in charge is presumed lost, and all servers rewind.

A shard cannot see whether another one was lost, so it takes a worker's word for that. What a worker may ask for is
bounded (`check_guarded`): it costs time, and in `sync` no bit, since the steps since are done again.
"""

from collections.abc import Sequence

from shoal.paramserver.messages import RewindRequest, StatusReply
from shoal.paramserver.request_checks import RequestRefused

MAX_POLLS = 10  # polls of inconsistent servers before a rewind
_GENERATION_BITS = 20  # of generations between two starts of a server
_MOST_STARTS = 1 << 10  # of servers, between two rewinds of a shard


class NoCommonSnapshotError(Exception):
    """No step has a snapshot on every server."""


def are_consistent(statuses: Sequence[StatusReply]) -> bool:
    restarted = any(each.needs_rewind for each in statuses)
    return not restarted and len({(each.generation, each.step) for each in statuses}) == 1


def plan_rewind(statuses: Sequence[StatusReply], polls: int) -> list[RewindRequest]:
    """Returns a request for each of the inconsistent servers; empty if the worker must poll again. `polls`: so far."""
    lifted = sum(each.server_incarnation - 1 for each in statuses) << _GENERATION_BITS
    generation = max(lifted, *(each.generation for each in statuses))
    no_rewind_yet = generation == lifted and any(each.needs_rewind for each in statuses)
    if polls < MAX_POLLS and not no_rewind_yet:
        return []
    common = set.intersection(*(set(each.snapshot_steps) for each in statuses))
    if not common:
        raise NoCommonSnapshotError(
            "; ".join(f"server {shard} has {each.snapshot_steps}" for shard, each in enumerate(statuses))
        )
    return [RewindRequest(generation + 1, max(common), each.server_incarnation) for each in statuses]


def check_guarded(request: RewindRequest, *, lockstep: bool, generation: int, kept: Sequence[int]) -> None:
    """Raises RequestRefused for a worker's request that no `plan_rewind` makes. `kept`: the steps with a snapshot that
    the shard has named to workers, each of which has values; `generation`: the shard's."""
    if not lockstep:  # updates that were acknowledged would be gone
        reason = "a worker may rewind servers in lockstep alone: --sync sync, quorum or local"
        raise RequestRefused("role", reason, "the servers' own token, or role admin, may rewind")
    if not request.server_incarnation:
        raise RequestRefused("role", "a worker may rewind a server process that it names, and none is named")
    if request.step not in kept:
        raise RequestRefused("snapshot", f"a worker may rewind to the steps {list(kept)}, not to step {request.step}")
    most = generation + (_MOST_STARTS << _GENERATION_BITS)
    if request.generation > most:
        reason = f"generation {request.generation} is too far: this one is {generation}, and the next is at most {most}"
        raise RequestRefused("rewind", reason)
