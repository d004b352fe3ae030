"""Which role may send which message to a parameter server, and the token of each role. Pure.

    viewer   reads what is there, and is no worker: it takes part in no barrier and takes no lease
    worker   trains: gradients, barriers, leases, first values; cannot set a trained table's values
    admin    all; also who has the server's own token (a client without a job), or reaches a server without one
    driver   all

A connection's role is proved by a token (`role_token`), or named by the certificate of its other end. Both may name a
worker's process, which then speaks for that worker alone (`worker_token`). Servers and the store are nobody's clients
here.
"""

import hmac
from collections.abc import Mapping

import msgspec

from shoal.errors import InputError
from shoal.paramserver import messages
from shoal.paramserver.messages import ServerRequest
from shoal.transport.identity import NamedProcess, Role, named_worker

OWNERS = frozenset({Role.DRIVER, Role.ADMIN})
WORKERS = OWNERS | {Role.WORKER}
READERS = WORKERS | {Role.VIEWER}

MAY_SEND: Mapping[type[ServerRequest], frozenset[Role]] = {
    messages.HelloRequest: READERS,
    # writes
    messages.DeclareRequest: WORKERS,  # another spec under the same name is refused
    messages.PutRequest: WORKERS,  # of a worker: `guarded`
    messages.PushRequest: WORKERS,
    messages.ContributeRequest: WORKERS,
    messages.ApplyRequest: WORKERS,  # of a worker: `guarded`
    messages.BarrierRequest: WORKERS,
    messages.LeaseRequest: WORKERS,
    messages.TaskRequest: OWNERS,
    messages.EndRequest: WORKERS,  # a worker has reached the target, or was asked to stop
    messages.RewindRequest: WORKERS,  # to a snapshot that every server has, after one was lost; of a worker: `guarded`
    # reads
    messages.PullRequest: READERS,
    messages.SquaresRequest: WORKERS,  # of a step under way
    messages.TableStateRequest: READERS,
    messages.StatusRequest: READERS,
    messages.StatsRequest: READERS,
    messages.SnapshotRequest: WORKERS,
}
GUARDED = (messages.PutRequest, messages.ApplyRequest, messages.RewindRequest)  # do less for a worker
TOKEN_VARIABLE = "SHOAL_SERVERS_TOKEN"  # in the environment of a run's processes: what each may prove
FIRST_VIEWER = 1 << 32  # viewers have numbers from here on, so that none is taken for a worker


class ForbiddenRequest(ServerRequest, frozen=True):
    """What a shard gets in the place of a request that the client's role does not permit. Never sent."""

    reason: str


def permitted(role: Role, request: ServerRequest) -> ServerRequest:
    """The request as the shard gets it."""
    kind = type(request)
    allowed = MAY_SEND.get(kind, frozenset())
    if role not in allowed:
        who = " and ".join(sorted(allowed)) or "nobody"
        return ForbiddenRequest(f"a {role} may not send {kind.__name__}; who may: {who}")
    if role not in OWNERS and isinstance(request, GUARDED):
        return msgspec.structs.replace(request, guarded=True)
    return request


# -- tokens -----------------------------------------------------------------------------------------------------------


def role_token(secret: str, role: Role) -> str:
    """The token of a role, from the token of the servers. It does not show that token, nor those of other roles."""
    return _token(secret, role)


def worker_token(secret: str, process: NamedProcess) -> str:
    """The token of one process of a worker: that of its role, for no other worker."""
    return _token(secret, f"{Role.WORKER}/{process}")


def _token(secret: str, claim: str) -> str:
    return f"{claim}:{hmac.digest(secret.encode(), f'shoal role {claim}'.encode(), 'sha256').hex()}"


def read_claim(claim: str) -> tuple[Role, NamedProcess | None]:
    """Who a token is for: the role, and for "worker/3.1" the process. Raises InputError where it is nobody."""
    name, slash, rest = claim.partition("/")
    process = named_worker(rest) if slash and name == Role.WORKER else None
    if name not in set(Role) or (slash and (process is None or rest != str(process))):
        raise InputError(f"{claim[:40]!r} is no role")
    return Role(name), process


def claim_of_token(token: str) -> str:
    """Whom a token names; empty: it is the servers' own."""
    claim, colon, rest = token.rpartition(":")
    try:
        read_claim(claim)
    except InputError:
        return ""
    return claim if colon and len(rest) == 64 else ""


def token_of(secret: str, claim: str) -> str:
    """The token that a client must know for what it claims to be. Raises InputError for a claim that is none."""
    if not claim:
        return secret
    read_claim(claim)
    return _token(secret, claim)
