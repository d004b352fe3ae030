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
"""

from collections.abc import Sequence

from shoal.paramserver.messages import RewindRequest, StatusReply

MAX_POLLS = 10  # polls of inconsistent servers before a rewind
_GENERATION_BITS = 20  # of generations between two starts of a server


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
