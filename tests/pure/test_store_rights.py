"""Which role may ask the run's store for what: the whole table, against a drawn one."""

from typing import get_args

import pytest

from shoal.recovery.membership import sqlite_messages as messages
from shoal.recovery.membership.store_rights import REQUESTS, hello, is_genuine, may_write, refusal
from shoal.transport.identity import Role

EXAMPLES: list[messages.StoreRequest] = [
    hello("secret", Role.WORKER),
    messages.StoreRead(""),
    messages.StoreWait("", 0, 1.0),
    messages.StoreGrant(1.0),
    messages.StoreRenew(1),
    messages.StoreRevoke(1),
    messages.StorePut("alive/0.0", b"", None),
    messages.StoreSwap("alive/0.0", None, 0, None),
    messages.StoreStop(),
]

# Rows: the requests above. d: driver, a: admin, w: worker, s: server, v: viewer.
DRAWN = ["daws v", "daws v", "daws v", "daws", "daws", "daws", "daws", "daws", "da"]
LETTERS = {Role.DRIVER: "d", Role.ADMIN: "a", Role.WORKER: "w", Role.SERVER: "s", Role.VIEWER: "v", Role.STORE: "-"}


def test_every_request_has_its_row() -> None:
    kinds = set(get_args(messages.StoreRequest))
    assert {type(example) for example in EXAMPLES} == kinds == set(REQUESTS)


@pytest.mark.parametrize(("request_", "allowed"), list(zip(EXAMPLES, DRAWN, strict=True)))
def test_requests(request_: messages.StoreRequest, allowed: str) -> None:
    for role in Role:
        assert (refusal(role, request_) == "") == (LETTERS[role] in allowed), role


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("view", "daw"),
        ("request", "daw"),
        ("committed", "daws"),
        ("alive/0.0", "daws"),
        ("where/0.0", "daws"),
        ("position/1/0.0", "daw"),
        ("rendezvous/1", "daw"),
        ("saves/1/3", "daw"),
        ("driver", "da"),
        ("why", "da"),
        ("views", "da"),
        ("alive", "da"),
    ],
)
def test_records(key: str, allowed: str) -> None:
    for role in Role:
        for written in (messages.StorePut(key, b"", None), messages.StoreSwap(key, None, 1, None)):
            refused = refusal(role, written)
            assert (refused == "") == (LETTERS[role] in allowed), role
        assert may_write(role, key) == (role in (Role.WORKER, Role.SERVER) and LETTERS[role] in allowed)


def test_a_token_is_for_one_role() -> None:
    shown = hello("secret", Role.VIEWER)
    assert is_genuine(shown, "secret") and not is_genuine(shown, "another")
    assert not is_genuine(messages.StoreHello(shown.token, Role.DRIVER), "secret")
    assert "secret" not in shown.token
