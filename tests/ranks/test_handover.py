"""State handed from one process to others: the same bits whichever way it goes, and never a changed one."""

from typing import Any

import pytest
import torch
import torch._dynamo  # the optimizer loads it at its first step: here once, not in every process
from torch import nn

from shoal.collectives.group import WorkerGroup
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.testing import RanksFailed, ranks
from shoal.worker import state_transfer
from shoal.worker.state_transfer import preallocate, receive_state, send_state


def live(seed: int, steps: int) -> LiveState:
    """A model with tensors above and below the size from which they travel alone, a buffer and two moments each."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(160, 160), nn.BatchNorm1d(160), nn.Linear(160, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 160)).square().sum().backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    return LiveState(
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        scheduler=None,
        state={"seen": {"samples": 8 * steps}},
        arithmetic={},
        traits={},
    )


def state(run: LiveState) -> str:
    snapshot = run.live_snapshot(0, {})
    parts = {"weights": snapshot.weights, "optimizer": snapshot.optimizer}
    return model_digest(
        tensor_digests([(f"{part}/{name}", each) for part, named in parts.items() for name, each in named.items()])
    )


def hand_over(group: WorkerGroup) -> list[Any]:
    if group.rank == 0:
        donor = live(seed=1, steps=3)
        send_state(group, [1, 2], donor.live_snapshot(3, {"loss": 0.5}))
        return [state(donor), donor.state["seen"]["samples"]]
    newcomer = live(seed=2, steps=0)
    preallocate(newcomer.parameters.values())
    snapshot, _ = receive_state(group, 0)
    newcomer.restore(snapshot, own=True)
    assert snapshot.step == 3 and snapshot.values["progress"] == {"loss": 0.5}
    return [state(newcomer), newcomer.state["seen"]["samples"]]


def test_newcomers_have_the_bits_of_the_donor() -> None:
    donor, *newcomers = ranks(3, hand_over)
    assert newcomers == [donor, donor]


def test_whoever_may_not_read_the_memory_of_the_donor_gets_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "can_read", lambda process, row: False)
    donor, *newcomers = ranks(3, hand_over)
    assert newcomers == [donor, donor]


def test_a_changed_tensor_is_named_and_nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    read = state_transfer.read_memory

    def flipped(process: int, address: int, into: torch.Tensor) -> None:
        read(process, address, into)
        into[5] ^= 1

    monkeypatch.setattr(state_transfer, "read_memory", flipped)
    with pytest.raises(RanksFailed) as caught:
        ranks(3, hand_over)
    assert all(
        "rank 0 handed over arrived changed, first in weights 0.weight" in caught.value.failures[rank]
        for rank in (1, 2)
    )


def test_a_donor_that_ends_meanwhile_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(process: int, address: int, into: torch.Tensor) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(state_transfer, "read_memory", gone)
    with pytest.raises(RanksFailed) as caught:
        ranks(3, hand_over)
    assert "PeerLost: rank 0 ended or went on while it handed its state over" in caught.value.failures[1]
