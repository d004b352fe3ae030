"""Simulated processes, as the world and the invariants see them."""

from typing import Any

from shoal.recovery.membership.protocol import MembershipView, MemberState, WorkerId, model_shard_of
from shoal.testing.simulation.store import SimReading

Key = tuple[int, str, int]  # generation, kind and step of a message
VOID = -1  # weights that are being overwritten


class SimProcess:
    """A process that can be paused, woken and killed."""

    def __init__(self) -> None:
        self.ended = ""  # how
        self.paused = False
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []  # events that arrived during a pause
        self.storeless = 0.0  # until when it cannot reach the store

    def on_exit(self, who: WorkerId) -> None:
        """Called when the process of another worker ends."""
        raise NotImplementedError


class SimMember(SimProcess):
    """A worker's state, and what the world calls on it."""

    def __init__(self, who: WorkerId, host: int, member: MemberState, shards: int) -> None:
        super().__init__()
        self.who, self.host, self.member = who, host, member
        self.shards, self.shard = shards, model_shard_of(who.worker, shards)
        self.weights, self.rounds = VOID, 0  # rounds: passes of all steps that the weights have seen
        self.view: MembershipView | None = None  # of the newest group
        self.leaving = False  # it was asked to leave
        self.watching = False  # waits for a change in the store

    def receive(self, key: Key, sender: WorkerId, body: Any) -> None:
        raise NotImplementedError

    def disconnected(self, generation: int, other: WorkerId, gave_up: bool) -> None:
        raise NotImplementedError

    def on_store_reading(self, reading: SimReading) -> None:
        raise NotImplementedError

    def on_store_reply(self, number: int, answer: Any) -> None:
        raise NotImplementedError

    def notify(self) -> None:
        raise NotImplementedError
