"""Jobs through parameter servers: the same bits in lockstep, and faults in every mode."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import shoal
from helpers.command import events
from shoal.driver.launch import train_with
from shoal.driver.launchers.lab import Lab
from shoal.paramserver.client import ParameterClient, ReplyFuture
from shoal.paramserver.messages import (
    ApplyRequest,
    ServerRequest,
    SnapshotRequest,
    SquaresRequest,
    StatusRequest,
    TableStateRequest,
)
from shoal.planner.cluster import even_cluster
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.report.closing_report import rows
from shoal.report.events import ServerStarted, decode
from shoal.worker.run_config import RunConfig
from shoal.worker.server_worker import synchronous
from shoal.worker.server_worker.base import ServerWorker

SAMPLES, BATCH, STEPS = 150, 16, 24


class Net(nn.Module):
    """Batch statistics, dropout, a tied weight, a scalar, a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 160)
        self.norm = nn.BatchNorm1d(160)
        self.drop = nn.Dropout(0.2)
        self.back = nn.Linear(160, 160, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(160, 3)
        self.also = nn.Linear(160, 160, bias=False)
        self.also.weight = self.back.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(self.also(torch.relu(self.back(x))) * self.scale)  # type: ignore[no-any-return]


def mean_over_some(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A mean with a count of its own."""
    chosen = target > 0
    return nn.functional.cross_entropy(output[chosen], target[chosen], reduction="sum"), int(chosen.sum())


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 12, generator=generator)
    return x, (x[:, :4].sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def job(**more: Any) -> shoal.Job:
    settings: dict[str, Any] = {
        "model": Net,
        "data": data(),
        "loss": mean_over_some,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=3e-3),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5),
        "clip_norm": 0.4,
        "batch": BATCH,
        "steps": STEPS,
        "evaluate": data(1),
    }
    return shoal.Job(**(settings | more))


def plain_job(**more: Any) -> shoal.Job:
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))  # noqa: E731
    settings = {"model": model, "loss": nn.functional.cross_entropy, "clip_norm": None, "scheduler": None}
    settings["optimizer"] = lambda named: torch.optim.AdamW(named, lr=0.02)
    return job(**(settings | more))


def train(this: shoal.Job, folder: Path, **how: Any) -> shoal.Report:
    return shoal.train(this, run_dir=folder, quiet=True, **how)


# -- the same bits ----------------------------------------------------------------------------------------------------


def test_sync_has_the_bits_of_one_process_through_stops_and_other_numbers_of_servers(tmp_path: Path) -> None:
    expected = train(job(), tmp_path / "alone")
    found = train(job(), tmp_path / "served", workers=3, servers=2)
    assert found.weights_sha256 == expected.weights_sha256
    assert found.metrics == expected.metrics and found.final_loss == expected.final_loss

    run = tmp_path / "switched"
    with pytest.raises(shoal.Stopped):
        train(job(), run, workers=2, servers=2, stop_after=7)
    with pytest.raises(shoal.Stopped):
        shoal.train(job(), resume=str(run), workers=2, servers=1, stop_after=15, quiet=True)
    last = shoal.train(job(), resume=str(run), workers=2, servers=0, quiet=True)
    assert last.weights_sha256 == expected.weights_sha256


def test_there_may_be_more_servers_than_tensors(tmp_path: Path) -> None:
    this = plain_job(model=lambda: nn.Linear(12, 3))
    run = tmp_path / "run"
    with pytest.raises(shoal.Stopped):
        train(this, run, workers=2, servers=3, stop_after=4)
    found = shoal.train(this, resume=str(run), workers=2, servers=4, quiet=True)
    assert found.weights_sha256 == train(this, tmp_path / "alone").weights_sha256


def test_bf16_weights_have_their_masters_on_the_servers(tmp_path: Path) -> None:
    this = plain_job(precision="bf16-weights", clip_norm=0.4, steps=8)
    expected = train(this, tmp_path / "alone")
    assert train(this, tmp_path / "served", workers=2, servers=2).weights_sha256 == expected.weights_sha256


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = shoal.Embedding(10_000, 4, ids=lambda batch: batch[0], lr=0.1)
        self.top = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.words(ids).mean(1))  # type: ignore[no-any-return]


def table_job(**more: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(3)
    ids = (torch.rand(128, 5, generator=generator) ** 3 * 10_000).long()
    return shoal.Job(
        model=Clicks,
        data=(ids, ids[:, 0] % 2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.Adam(named, lr=0.01),
        batch=16,
        steps=12,
        **more,
    )


def test_tables_are_in_the_norm_on_any_number_of_servers(tmp_path: Path) -> None:
    one = train(table_job(clip_norm=0.05), tmp_path / "one", workers=1, servers=1)
    more = train(table_job(clip_norm=0.05), tmp_path / "more", workers=2, servers=3)
    assert more.weights_sha256 == one.weights_sha256
    for mine, others in zip(one.rows("words"), more.rows("words"), strict=True):
        assert torch.equal(mine, others)
    free = train(table_job(), tmp_path / "free", workers=1, servers=1)
    assert free.weights_sha256 != one.weights_sha256


def test_tables_have_the_same_rows_on_any_number_of_servers_and_after_a_resume(tmp_path: Path) -> None:
    expected = train(table_job(), tmp_path / "one", workers=1, servers=1)
    found = train(table_job(), tmp_path / "more", workers=2, servers=3)
    assert found.weights_sha256 == expected.weights_sha256
    told = [event["tensors"] for event in events(tmp_path / "more", "worker-finished") if event.get("tensors")]
    assert len(told) == 1 and "words.rows" in told[0]
    run = tmp_path / "resumed"
    with pytest.raises(shoal.Stopped):
        train(table_job(), run, workers=2, servers=2, stop_after=5)
    assert shoal.train(table_job(), resume=str(run), servers=1, quiet=True).weights_sha256 == expected.weights_sha256
    ids, rows = found.rows("words")
    assert len(ids) == len(rows) > 100 and rows.shape[1] == 4
    assert torch.equal(found.model().words(ids[:7]), rows[:7])


class Infinite(torch.autograd.Function):
    """Harmless on the way there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("inf")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_gradient_that_is_not_finite_ends_the_run_with_a_word(mode: str, tmp_path: Path) -> None:
    this = plain_job(loss=lambda output, target: Infinite.apply(nn.functional.cross_entropy(output, target)))
    with pytest.raises(shoal.RunError, match="not finite"):
        train(this, tmp_path / "run", workers=2, servers=1, sync=mode)


def test_a_table_needs_servers(tmp_path: Path) -> None:
    with pytest.raises(shoal.RunError, match=r"words is a shoal\.Embedding.*this run has none"):
        train(table_job(), tmp_path / "run")


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
def test_servers_on_other_hosts_are_reached_with_a_token(tmp_path: Path) -> None:
    this = plain_job(steps=6)
    with Lab(even_cluster(racks=1, hosts=2)) as lab:
        config = RunConfig().changed(workers=2, servers=2, run_dir=tmp_path / "lab", quiet=True, predict=False)
        found = train_with(this, config, launcher=lab.launcher)
    addresses = [event["addresses"][0] for event in events(tmp_path / "lab", "server-started")]
    assert all(each.startswith("tcp://10.") for each in addresses) and len(set(addresses)) == 2
    assert found.weights_sha256 == train(this, tmp_path / "alone").weights_sha256


# -- faults -----------------------------------------------------------------------------------------------------------


class Fatal:
    """A loss that once, in one worker's n-th call, kills that worker, or a server. The others do not get far before."""

    def __init__(
        self,
        run: Path,
        *,
        worker: int,
        call: int,
        server: int | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    ) -> None:
        self.run, self.worker, self.call, self.server, self.calls = run, worker, call, server, 0
        self.loss = loss

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        mark = self.run.with_suffix(".killed")
        mine = torch.is_grad_enabled() and int(os.environ.get("RANK", "-1")) == self.worker
        if mine and self.calls >= self.call and not mark.exists():
            mark.write_text("once")
            os.kill(os.getpid() if self.server is None else self.pid(), signal.SIGKILL)
        until = time.monotonic() + 60
        while torch.is_grad_enabled() and self.calls >= self.call + 12 and not mark.exists():
            assert time.monotonic() < until, "nobody was killed"
            time.sleep(0.005)
        return self.loss(output, target)

    def pid(self) -> int:
        assert self.server is not None
        return server_pid(self.run, self.server)


def server_pid(run: Path, shard: int) -> int:
    lines = (run / "events.jsonl").read_bytes().splitlines()
    started = [event for event in map(decode, lines) if isinstance(event, ServerStarted)]
    return next(event.pid for event in started if event.shard == shard)


@pytest.mark.parametrize("mode", ["sync", "quorum:0.6", "stale:2", "async", "groups:2"])
def test_a_killed_worker_is_replaced(mode: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    this = plain_job(loss=Fatal(run, worker=1, call=2))
    found = train(this, run, workers=3, servers=1, sync=mode)
    assert found.steps == STEPS and found.value["outcome"] == "done"
    assert [event["rank"] for event in events(run, "worker-lost")] == [1]
    assert found.metrics["loss"] < 1.0
    if mode == "sync":
        assert found.weights_sha256 == train(plain_job(), tmp_path / "alone").weights_sha256


class Counter(nn.Module):
    """The gradient of a row is how often it was looked up, over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = shoal.Embedding(500, 2, ids=lambda batch: batch[0], scale=0.0, optimizer="sgd", lr=0.5)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).sum((1, 2)) + self.bias


@pytest.mark.parametrize(
    ("mode", "workers", "other"), [("async", 3, "sync"), ("groups:2", 3, "groups:2"), ("local:3", 2, "async")]
)
def test_every_batch_counts_once_for_a_table_though_a_worker_was_killed(
    mode: str, workers: int, other: str, tmp_path: Path
) -> None:
    """Also when the run is stopped, and goes on in another mode."""
    run, epochs, batch = tmp_path / "run", 3, 16
    ids = torch.randint(500, (128, 5), generator=torch.Generator().manual_seed(3))
    this = shoal.Job(
        model=Counter,
        data=(ids, ids[:, 0]),
        loss=Fatal(run, worker=1, call=2, loss=lambda output, target: output.mean()),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
        batch=batch,
        epochs=epochs,
    )
    with pytest.raises(shoal.Stopped):
        train(this, run, workers=workers, servers=2, sync=mode, stop_after=14)
    assert [event["rank"] for event in events(run, "worker-lost")] == [1]
    found = shoal.train(this, resume=str(run), workers=workers, servers=1, sync=other, quiet=True)
    touched, rows = found.rows("words")
    counts = torch.bincount(ids.view(-1), minlength=500)
    assert torch.equal(touched, counts.nonzero().view(-1))
    assert torch.equal(rows[:, 0], -0.5 / batch * epochs * counts[touched].float())


@pytest.mark.parametrize("shard", [0, 1])
def test_after_a_server_was_killed_lockstep_has_the_same_bits(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronous, "SNAPSHOT_SECONDS", 1e9)  # on any machine only the first step is kept
    run = tmp_path / "run"
    this = job(loss=Fatal(run, worker=1, call=20, server=shard), clip_norm=0.4)
    found = train(this, run, workers=2, servers=2)
    assert found.weights_sha256 == train(job(loss=nn.functional.cross_entropy), tmp_path / "alone").weights_sha256
    assert [event["shard"] for event in events(run, "server-lost")] == [shard]
    # A worker that is refused once more, before its servers are all back, goes back again and has nothing to repeat.
    rolled_back = events(run, "servers-rolled-back")
    assert {event["step"] for event in rolled_back} == {0}
    assert {event["rank"] for event in rolled_back if event["repeated"] > 0} == {0, 1}
    assert found.value["servers"]["steps_repeated"] == max(event["repeated"] for event in rolled_back)


def test_servers_that_were_left_at_different_steps_go_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one worker dies when the first server has applied its step, and the second has not heard of it."""
    real, mark = ParameterClient.request, tmp_path / "killed"

    def request(
        self: ParameterClient, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[Any]:
        future = real(self, shard, request, tensors)
        if isinstance(request, ApplyRequest) and request.step == 6 and not mark.exists():
            future.wait()
            mark.write_text("once")
            os.kill(os.getpid(), signal.SIGKILL)
        return future

    monkeypatch.setattr(ParameterClient, "request", request)
    this = plain_job(steps=10)
    found = train(this, tmp_path / "run", workers=1, servers=2)
    assert mark.exists() and found.weights_sha256 == train(this, tmp_path / "alone").weights_sha256
    assert events(tmp_path / "run", "servers-rolled-back")[0]["step"] == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_is_lost_before_it_has_kept_anything_is_filled_again(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when it has acknowledged the first values, and no snapshot of them stands."""
    real, run = ParameterClient.request, tmp_path / "run"
    mark = run.with_suffix(".killed")

    def request(
        self: ParameterClient, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[Any]:
        if isinstance(request, SnapshotRequest) and not mark.exists():
            mark.write_text("once")
            os.kill(server_pid(run, 0), signal.SIGKILL)
        return real(self, shard, request, tensors)

    monkeypatch.setattr(ParameterClient, "request", request)
    found = train(job(steps=6), run, workers=2, servers=2, sync=mode)
    assert mark.exists() and found.steps == 6 and found.value["outcome"] == "done"
    assert [event["shard"] for event in events(run, "server-lost")] == [0]
    if mode == "sync":
        assert found.weights_sha256 == train(job(steps=6), tmp_path / "alone").weights_sha256


@pytest.mark.parametrize(("mode", "shard"), [("sync", 0), ("sync", 1), ("quorum:0.5", 1), ("local:4", 0), ("async", 1)])
def test_a_server_may_be_lost_while_the_result_is_written(
    mode: str, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers have done their steps; the others wait for the one that writes."""
    real, run = ServerWorker.write_result, tmp_path / "run"
    mark = run.with_suffix(".killed")

    def write_result(self: ServerWorker, *given: Any) -> None:
        if not mark.exists():
            mark.write_text("once")
            os.kill(server_pid(run, shard), signal.SIGKILL)
        real(self, *given)

    monkeypatch.setattr(ServerWorker, "write_result", write_result)
    this = plain_job(steps=8)
    found = train(this, run, workers=2, servers=2, sync=mode)
    assert mark.exists() and found.steps == 8 and found.value["outcome"] == "done"
    if mode == "sync":
        assert found.weights_sha256 == train(this, tmp_path / "alone").weights_sha256


def test_a_checkpoint_has_nothing_of_a_server_that_came_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would tell the optimizer's state of an older step."""
    real, run, mark = ParameterClient.request, tmp_path / "run", tmp_path / "killed"
    server = Fatal(run, worker=0, call=0, server=1)

    def request(
        self: ParameterClient, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[Any]:
        if isinstance(request, TableStateRequest) and not mark.exists():
            mark.write_text("once")
            os.kill(server.pid(), signal.SIGKILL)
        return real(self, shard, request, tensors)

    monkeypatch.setattr(ParameterClient, "request", request)
    with pytest.raises(shoal.Stopped):
        train(plain_job(steps=12), run, workers=2, servers=2, stop_after=7)
    assert mark.exists() and events(run, "servers-rolled-back")
    last = shoal.train(plain_job(steps=12), resume=str(run), quiet=True)
    assert last.weights_sha256 == train(plain_job(steps=12), tmp_path / "alone").weights_sha256


def is_first(mark: Path) -> bool:
    """Of several processes that ask, one is."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_a_worker_of_a_quorum_that_asks_for_a_norm_when_the_others_have_gone_on_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, mark = ParameterClient.request, tmp_path / "late"

    def request(
        self: ParameterClient, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[Any]:
        """Whoever is the first to come to the norm of step 3 waits until the others are two steps further."""
        if isinstance(request, SquaresRequest) and request.step == 3 and is_first(mark):
            until = time.monotonic() + 60
            while real(self, shard, StatusRequest()).wait()[0].step < 6:
                assert time.monotonic() < until, "the others wait, too"
        return real(self, shard, request, tensors)

    monkeypatch.setattr(ParameterClient, "request", request)
    run = tmp_path / "run"
    found = train(plain_job(clip_norm=0.4, steps=10), run, workers=3, servers=2, sync="quorum:0.6")
    assert mark.exists() and found.steps == 10 and not events(run, "worker-lost")


def test_what_a_killed_server_had_acknowledged_is_told_as_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    this = plain_job(loss=Fatal(run, worker=0, call=9, server=1))
    found = train(this, run, workers=2, servers=2, sync="async")
    lost = events(run, "pushes-lost")
    assert found.value["outcome"] == "done" and {event["shard"] for event in lost} == {1}
    assert sum(event["number"] for event in lost) == found.value["servers"]["pushes_lost"] > 0


def test_local_steps_are_averaged(tmp_path: Path) -> None:
    # Of short batches worker 1 has nothing, and buffers all the same.
    this = job(loss=nn.functional.cross_entropy, evaluate_every=5)
    found = train(this, tmp_path / "run", workers=2, servers=1, sync="local:8,outer=nesterov")
    assert found.steps == STEPS and found.metrics["loss"] < 1.0
    evaluated = [event["step"] for event in events(tmp_path / "run", "model-evaluated")]
    assert evaluated == [8, 16, 24], "what was due at 5, 10, 15 and 20, each at its round's end"
    (served,) = {event["updates"] for event in events(tmp_path / "run", "server-reported") if event.get("final")}
    assert served == STEPS // 8
    consumed = found.value["samples"]
    assert (
        sum(event["samples"] for event in events(tmp_path / "run", "steps-committed") if event.get("leader"))
        == consumed
    )


def simple_job(**more: Any) -> shoal.Job:
    """Its optimizer has no state, but a schedule."""
    settings: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8),
        "loss": nn.functional.cross_entropy,
        "steps": 16,
    }
    return job(**(settings | more))


def test_a_resumed_run_has_its_outer_optimizer_back_on_any_number_of_servers(tmp_path: Path) -> None:
    how: dict[str, Any] = {"workers": 2, "sync": "local:4,outer=nesterov"}
    expected = train(simple_job(), tmp_path / "whole", servers=1, **how)
    stopped = tmp_path / "stopped"
    with pytest.raises(shoal.Stopped):  # within a round: that is ended first
        train(simple_job(), stopped, servers=2, stop_after=7, **how)
    assert [event["step"] for event in events(stopped, "checkpoint-saved")] == [8]

    def resumed(name: str, **other: Any) -> shoal.Report:
        shutil.copytree(stopped, tmp_path / name)
        return shoal.train(simple_job(), resume=str(tmp_path / name), quiet=True, **(how | other))

    for servers in (2, 3):
        assert resumed(f"servers-{servers}", servers=servers).weights_sha256 == expected.weights_sha256

    # Whoever trains otherwise leaves it aside, and whoever has none begins anew.
    assert list(aside(stopped)) == ["outer=nesterov"]
    with pytest.raises(shoal.Stopped):
        resumed("without", servers=0, sync="", stop_after=9)
    assert not aside(tmp_path / "without")
    assert shoal.train(simple_job(), resume=str(tmp_path / "without"), servers=1, quiet=True, **how).steps == 16
    assert resumed("mean", servers=1, sync="local:4").weights_sha256 != expected.weights_sha256
    assert list(aside(tmp_path / "mean")) == ["outer=average"]


def aside(run: Path) -> dict[str, Any]:
    found = CheckpointDirectory(run / "checkpoints").newest()
    assert found is not None
    kept: dict[str, Any] = found.snapshot.values.get("extra_optimizers", {})
    return kept


def test_all_workers_go_on_with_the_optimizer_of_the_checkpoint(tmp_path: Path) -> None:
    """All samples are the same, so that the leader's optimizer is as good as everybody's own."""
    same = (torch.ones(128, 12), torch.ones(128, dtype=torch.long))
    this = plain_job(data=same, evaluate=None, steps=16, lanes=2)
    how: dict[str, Any] = {"workers": 2, "servers": 1, "quiet": True, "sync": "local:4,outer=nesterov"}
    expected, run = shoal.train(this, run_dir=tmp_path / "whole", **how), tmp_path / "run"
    with pytest.raises(shoal.Stopped):
        shoal.train(this, run_dir=run, stop_after=8, **how)
    assert shoal.train(this, resume=str(run), **how).weights_sha256 == expected.weights_sha256


def test_a_round_that_is_begun_in_its_middle_is_the_same_for_all_workers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(shoal.Stopped):
        train(simple_job(), run, workers=2, servers=1, sync="local:3", stop_after=6)
    shoal.train(simple_job(), resume=str(run), workers=2, servers=1, sync="local:4", quiet=True)
    counts = {
        rank: sum(each["count"] for each in events(run, "steps-committed") if each["rank"] == rank) for rank in (0, 1)
    }
    assert counts == {0: 16, 1: 16}


@pytest.mark.parametrize("server", [None, 1])
def test_local_steps_have_the_same_bits_when_somebody_was_killed(server: int | None, tmp_path: Path) -> None:
    """Where the optimizer of the workers has no state: the schedule of theirs is a matter of the step."""
    how: dict[str, Any] = {"workers": 2, "servers": 2, "sync": "local:4,outer=nesterov"}
    run = tmp_path / "run"
    found = train(simple_job(loss=Fatal(run, worker=1, call=11, server=server), lanes=2), run, **how)
    assert events(run, "worker-lost" if server is None else "server-lost")
    assert found.weights_sha256 == train(simple_job(lanes=2), tmp_path / "whole", **how).weights_sha256


@pytest.mark.parametrize("killed", [False, True])
def test_local_steps_go_on_from_any_step_at_its_rate(killed: bool, tmp_path: Path) -> None:
    """Also those of a worker that neither read the checkpoint nor did the steps before."""
    run = tmp_path / "run"
    loss = Fatal(run, worker=1, call=14 if killed else 1000)
    with pytest.raises(shoal.Stopped):
        train(job(loss=loss), run, workers=2, servers=1, stop_after=5)
    shoal.train(job(loss=loss), resume=str(run), workers=2, servers=1, sync="local:4", quiet=True)
    assert run.with_suffix(".killed").exists() == killed
    told = [event for event in events(run, "steps-committed") if event["step"] > 5]
    last = {event["rank"]: event["learning_rate"] for event in told if event["step"] == STEPS}
    assert last == {0: 3e-3 * 0.5**3, 1: 3e-3 * 0.5**3}
    for rank in (0, 1):
        own = [event for event in told if event["rank"] == rank]
        assert killed or sum(event["count"] for event in own) == STEPS - 5, "each step once"


def test_what_goes_on_from_an_inexact_run_is_not_exact(tmp_path: Path) -> None:
    run, this = tmp_path / "run", plain_job(steps=9)
    with pytest.raises(shoal.Stopped):
        train(this, run, workers=2, servers=1, sync="async", stop_after=3)
    with pytest.raises(shoal.Stopped):
        shoal.train(this, resume=str(run), workers=2, servers=1, sync="sync", stop_after=6, quiet=True)
    found = shoal.train(this, resume=str(run), workers=1, servers=0, quiet=True)
    assert not found.exact and found.value["inexact_sync_mode"] == "async"
    assert any("goes on from a checkpoint of --sync async" in text for _, text in rows(found.value))


def test_servers_with_a_queue_are_kept_with_every_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkpoint holds is not lost with a server."""
    real, told = ParameterClient.request, tmp_path / "kept"

    def request(
        self: ParameterClient, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[Any]:
        if isinstance(request, SnapshotRequest):
            with told.open("a") as file:
                file.write("once\n")
        return real(self, shard, request, tensors)

    monkeypatch.setattr(ParameterClient, "request", request)
    train(plain_job(checkpoint_every=8, steps=16), tmp_path / "run", workers=1, servers=1, sync="async")
    saved = events(tmp_path / "run", "checkpoint-saved")
    assert len(told.read_text().split()) == 1 + len(saved) == 3, "the first values, and each of these"


def test_checkpoints_are_written_on_the_way_in_every_mode(tmp_path: Path) -> None:
    for mode in ("sync", "async"):
        train(plain_job(checkpoint_every=8), tmp_path / mode, workers=2, servers=1, sync=mode)
        saved = [event["step"] for event in events(tmp_path / mode, "checkpoint-saved")]
        assert len(saved) >= 2 and saved[-1] == STEPS


def test_a_report_tells_of_servers(tmp_path: Path) -> None:
    found = train(plain_job(), tmp_path / "run", workers=2, servers=2, sync="stale:3")
    told = msgspec.json.decode((tmp_path / "run" / "report.json").read_bytes())["servers"]
    assert told["sync_mode"] == "stale:3" and sum(told["staleness"]["histogram"].values()) >= STEPS
    assert found.value["exact"] is False
