"""Which role may send which request to the embedded store, and write which records: checked for each request.

    driver, admin   everything
    worker          reads; its own leases; what the members of a run agree on and say of themselves; requests
    server          reads; its own leases; what it says of itself
    viewer          reads

Imported like sqlite_messages.py: only the standard library, msgspec and light modules.
"""

import hmac

from shoal.recovery.membership.sqlite_messages import (
    StoreGrant,
    StoreHello,
    StorePut,
    StoreRead,
    StoreRenew,
    StoreRequest,
    StoreRevoke,
    StoreStop,
    StoreSwap,
    StoreWait,
)
from shoal.transport.identity import Role

EVERYONE = frozenset({Role.DRIVER, Role.ADMIN, Role.WORKER, Role.SERVER, Role.VIEWER})
MEMBERS = EVERYONE - {Role.VIEWER}  # processes that write
MASTERS = frozenset({Role.DRIVER, Role.ADMIN})

REQUESTS: dict[type, frozenset[Role]] = {
    StoreHello: EVERYONE,
    StoreRead: EVERYONE,
    StoreWait: EVERYONE,
    StoreGrant: MEMBERS,
    StoreRenew: MEMBERS,
    StoreRevoke: MEMBERS,
    StorePut: MEMBERS,
    StoreSwap: MEMBERS,
    StoreStop: MASTERS,
}

# Records that a role may write: whole keys, and beginnings of keys, which end with a slash.
WRITES: dict[Role, tuple[str, ...]] = {
    Role.WORKER: ("view", "committed", "request", "alive/", "position/", "rendezvous/", "saves/", "where/"),
    Role.SERVER: ("committed", "alive/", "where/"),
}


def refusal(role: Role, request: StoreRequest) -> str:
    """Why a process of this role may not send the request; empty: it may."""
    kind = type(request)
    if role not in REQUESTS.get(kind, frozenset()):
        return f"a {role} may not send {kind.__name__}"
    if isinstance(request, StorePut | StoreSwap) and role not in MASTERS and not may_write(role, request.key):
        return f"a {role} may not write the record {request.key[:100]}"
    return ""


def may_write(role: Role, key: str) -> bool:
    return any(key.startswith(name) if name.endswith("/") else key == name for name in WRITES.get(role, ()))


def hello(secret: str, role: Role) -> StoreHello:
    """What a process shows for its role on one machine. The secret is in store.json, which this user alone can read: so
    the roles of one machine keep processes from mistakes, not their user."""
    return StoreHello(hmac.new(secret.encode(), f"shoal store {role}".encode(), "sha256").hexdigest(), role)


def is_genuine(shown: StoreHello, secret: str) -> bool:
    return hmac.compare_digest(shown.token.encode(), hello(secret, shown.role).token.encode())
