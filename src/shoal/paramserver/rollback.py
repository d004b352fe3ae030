"""In lockstep: whether the servers are at one step, and where they go back to if they are not. Pure.

    server 0   step 7, kept 4 6     one came back, with an older state than others have seen: back to 4, all of them,
    server 1   step 4, kept 4       in a new epoch; what is still under way of the old one is refused

A server that comes back may have been in later epochs than it knows. None of those may come again: workers that were in
one would go on as if their contributions were there. So every start of a server lifts the epochs above all before it.
Workers enter an epoch when all servers are in it: either one of those still is, or all have been started since.

Whoever looks may see some servers before another worker has made them go back, and some after that. If one of them is
in an epoch that counts all starts, somebody is at it, or done with it: then a look or two more show whether it is done.
The same goes for steps that differ because others are in the middle of an update. If that does not end, those who were
to end it are gone: then all go back, too.
"""

from collections.abc import Sequence

from shoal.paramserver.messages import RewindRequest, StatusReply

MAX_POLLS = 10  # looks at servers that are not at one step, before they are made to be
_GENERATION_BITS = 20  # epochs between two starts of a server


class NoCommonSnapshotError(Exception):
    """There is no step that all servers have kept."""


def are_consistent(statuses: Sequence[StatusReply]) -> bool:
    came_back = any(each.needs_rewind for each in statuses)
    return not came_back and len({(each.generation, each.step) for each in statuses}) == 1


def plan_rewind(statuses: Sequence[StatusReply], polls: int) -> list[RewindRequest]:
    """What to ask of servers that are not at one, of each. Empty: look again. `looks`: how many there were, with this
    one."""
    lifted = sum(each.server_incarnation - 1 for each in statuses) << _GENERATION_BITS
    epoch = max(lifted, *(each.generation for each in statuses))
    alone = epoch == lifted and any(each.needs_rewind for each in statuses)
    if polls < MAX_POLLS and not alone:
        return []
    common = set.intersection(*(set(each.snapshot_steps) for each in statuses))
    if not common:
        raise NoCommonSnapshotError(
            "; ".join(f"server {shard} has {each.snapshot_steps}" for shard, each in enumerate(statuses))
        )
    return [RewindRequest(epoch + 1, max(common), each.server_incarnation) for each in statuses]
