"""Buckets leave during the backward pass, and a worker dies there: the step is dropped, and the bits are the same."""

import os
import shutil

import pytest
import torch

from helpers.faults import ASKS, LEFT, MET, Faults, kill, unheard, until
from helpers.passes_job import passes_job
from helpers.steps import sha256
from shoal.driver.launchers.lab import Lab
from shoal.parallel import overlapped_reduce
from shoal.planner.cluster import even_cluster
from shoal.recovery.membership.protocol import WorkerId
from shoal.testing import everything, job_for, samples_for

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_reduce, "LEAST_BUCKET_BYTES", 1)


def test_workers_die_within_the_backward_pass(faults: Faults) -> None:
    job = job_for(
        everything,
        data=samples_for(everything, 53),
        microbatches=2,
        lanes=4,
        epochs=4,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )
    expected = sha256(job)
    for step, worker, life, bucket in [(2, 0, 0, 0), (5, 1, 0, 2), (8, 0, 1, 1)]:  # worker 2 has every step on record
        faults.at(LEFT, kill, step=step, worker=worker, life=life, lane=bucket)
        faults.at(ASKS, until(WorkerId(worker, life + 1)), step=step + 1)
    faults.at(LEFT, unheard, step=11, worker=1, lane=1)  # its group is lost to it in the middle of autograd
    faults.at(MET, unheard, step=13, worker=2)  # the others have committed the step: its sums are whole
    report = faults.train(job, overlap="on")
    assert report.weights_sha256 == expected
    assert faults.audit(job).sound


def test_a_worker_dies_in_the_second_of_two_passes(faults: Faults) -> None:
    job = passes_job()
    expected = sha256(job)
    faults.at(LEFT, kill, step=3, worker=1, backward_pass=1, lane=0)
    faults.at(ASKS, until(WorkerId(1, 1)), step=4)
    assert faults.train(job, overlap="on", workers=2).weights_sha256 == expected


@root
def test_between_hosts_it_is_on_by_itself(faults: Faults) -> None:
    job = passes_job()
    expected = sha256(job)
    faults.at(LEFT, kill, step=3, worker=2, backward_pass=1, lane=0)
    faults.at(ASKS, until(WorkerId(2, 1)), step=4)
    with Lab(even_cluster(racks=1, hosts=2, workers=2)) as lab:
        report = faults.train(job, workers=4, lab=lab)
    assert report.weights_sha256 == expected
    assert report.value["traffic"]["overlapped"]
