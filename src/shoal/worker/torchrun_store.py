"""The store where ranks find each other that torchrun, or a user by hand, has started: what MASTER_ADDR and MASTER_PORT
name is looked at first, so that what is wrong with it is said in one line, and Ctrl-C works while a rank waits."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore

from shoal.errors import InputError
from shoal.report.human import plural
from shoal.transport.key_value_wire import MAGIC, KeyValueQuery, KeyValueRequest, encode_nonce, encode_request

WAIT_SECONDS = 300.0  # for the first rank, and for the others: as torch waits
ANSWER_SECONDS = 5.0  # in which a store answers
SAY_SECONDS = 3.0  # of waiting, before it is said; again after twice as long
POLL_SECONDS = 0.05
MOST_RANKS = 1 << 20
NAMED = "(MASTER_ADDR, MASTER_PORT)"
NONCE = 1849


@dataclass(frozen=True, kw_only=True)
class StorePlace:
    """What a rank's variables say."""

    rank: int
    size: int
    address: str
    port: int
    hosts: bool  # this rank's process holds the store

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {os.environ.get('SHOAL_HOST') or socket.gethostname()}"

    def __str__(self) -> str:
        return f"{self.address}:{self.port} {NAMED}"


def rank_and_size() -> tuple[int, int]:
    """Of this process. Raises InputError, which is shown without a traceback."""
    try:
        return _rank_and_size(os.environ)
    except InputError as error:
        _show_plainly(error)
        raise


def _rank_and_size(variables: Mapping[str, str]) -> tuple[int, int]:
    size = _number(variables, "WORLD_SIZE", 1, MOST_RANKS)
    return _number(variables, "RANK", 0, size - 1), size


def read_place(variables: Mapping[str, str]) -> StorePlace:
    rank, size = _rank_and_size(variables)
    port = _number(variables, "MASTER_PORT", 1, 65535)
    address = variables.get("MASTER_ADDR", "")
    if not address:
        raise InputError(f"MASTER_ADDR is not set, and rank {rank} of {size} looks there for the others", fix=LAUNCH)
    agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return StorePlace(rank=rank, size=size, address=address, port=port, hosts=rank == 0 and not agent)


LAUNCH = "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; by hand: the last three equal on every rank"


def _number(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = variables.get(name, "")
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        found = f"is {text!r}" if text else "is not set"
        raise InputError(f"{name} {found}; it has to be a number from {least} to {most}", fix=LAUNCH)
    return int(text)


def torchrun_store(prefix: str = "shoal") -> Store:
    """The store that MASTER_ADDR and MASTER_PORT name. Raises InputError where it is not to be had, which is shown
    without a traceback: nothing is wrong with the script. `prefix`: of the keys by which the first rank counts."""
    try:
        place = read_place(os.environ)
        _resolve(place)
        store = _open(place)
        _await_ranks(place, store, prefix)
    except InputError as error:
        _show_plainly(error)
        raise
    return store


def _resolve(place: StorePlace) -> None:
    try:
        socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{place.who} does not find the host {place.address!r} (MASTER_ADDR): {why}",
            fix="an address of rank 0's host, or a name of it that every host knows "
            f"(getent hosts {place.address}): MASTER_ADDR=…, torchrun --master-addr …",
        ) from None


def _open(place: StorePlace) -> Store:
    if not place.hosts:
        _await_store(place)
    try:
        return TCPStore(place.address, place.port, place.size, is_master=place.hosts, wait_for_workers=False)
    except distributed.DistError as error:
        taken = "EADDRINUSE" in str(error)
        why = "the port is taken" if taken else str(error).splitlines()[0]
        does = "cannot hold the store of this run at" if place.hosts else "cannot reach the store of rank 0 at"
        other = f"ss -ltnp 'sport = :{place.port}' shows who has it; " if taken else ""
        fix = f"{other}another port, the same on every rank: MASTER_PORT=…, torchrun --master-port …"
        raise InputError(f"{place.who} {does} {place}: {why}", fix=fix) from None


def _await_store(place: StorePlace) -> None:
    """Returns when a store of torch's answers there."""
    waited = _Wait()
    while (why := _unreachable(place)) is not None:
        if waited.over(WAIT_SECONDS):
            raise InputError(
                f"{place.who} has waited {WAIT_SECONDS:g} s for rank 0 at {place}: {why}",
                fix="start rank 0, on the host that MASTER_ADDR names; is a firewall between them?",
            )
        waited.say(f"{place.who} waits for rank 0 at {place}: {why}")
        time.sleep(POLL_SECONDS)


def _unreachable(place: StorePlace) -> str | None:
    """Why nothing can be reached there; None: a store answers. Raises InputError where something else does."""
    try:
        connection = socket.create_connection((place.address, place.port), timeout=ANSWER_SECONDS)
    except OSError as error:
        return error.strerror or str(error)
    with connection:
        try:
            greeting = KeyValueRequest(KeyValueQuery.VALIDATE, number=MAGIC)
            connection.sendall(encode_request(greeting))
            connection.sendall(encode_request(KeyValueRequest(KeyValueQuery.PING, number=NONCE)))
            answer = connection.recv(4, socket.MSG_WAITALL)
        except TimeoutError:
            why = f"it did not answer within {ANSWER_SECONDS:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if answer == encode_nonce(NONCE):
                return None
            why = "it answered something else" if answer else "it closed the connection"
    raise InputError(
        f"{place.who} looks for the store of rank 0 at {place}, and another program is there: {why}",
        fix="another port, the same on every rank: MASTER_PORT=…, torchrun --master-port …",
    )


def _await_ranks(place: StorePlace, store: Store, prefix: str) -> None:
    """The process that holds the store waits until all ranks have come."""
    key = f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/came"
    store.set(f"{key}/{place.rank}", "")
    waited = _Wait()
    missing = list(range(1, place.size)) if place.hosts else []
    while missing := [rank for rank in missing if not store.check([f"{key}/{rank}"])]:
        if waited.over(WAIT_SECONDS):
            raise InputError(
                f"{place.who} has waited {WAIT_SECONDS:g} s at {place} for {_ranks(missing)} of {place.size}",
                fix="start them with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT; is a firewall between them?",
            )
        waited.say(f"{place.who} waits at {place} for {_ranks(missing)} of {place.size}")
        time.sleep(POLL_SECONDS)


def _ranks(missing: Sequence[int]) -> str:
    return f"rank {missing[0]}" if len(missing) == 1 else f"{plural(len(missing), 'rank')}, the first is {missing[0]},"


class _Wait:
    def __init__(self) -> None:
        self._began = time.monotonic()
        self._say_after = SAY_SECONDS

    def over(self, seconds: float) -> bool:
        return time.monotonic() - self._began > seconds

    def say(self, text: str) -> None:
        """Now and then."""
        if self.over(self._say_after):
            print(text, file=sys.stderr, flush=True)
            self._say_after *= 2


def _show_plainly(error: InputError) -> None:
    """If nobody catches the error, it is shown without a traceback."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if found is error:
            print(f"error: {error}", file=sys.stderr)
        else:
            usual(kind, found, trace)

    sys.excepthook = hook
