"""A group whose workers share one host: small gathers go through shared memory, the rest as before.

A gather through sockets and their threads costs a few hundred microseconds on busy cores; here it is a store, a look
and a copy. Each worker has two slots, used in turn, and a counter per slot; a slot is written again only when everybody
has posted the turn in between, which they do after reading it.
"""

import os
import platform
import select
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from shoal.collectives.group import Group, PeerLost, Pending
from shoal.collectives.shared import open_segments
from shoal.partition.lanes import Span

SLOT_BYTES = 1 << 16
COUNTER_BYTES = 64  # a cache line of its own
SPIN_SECONDS = 0.0003  # look again and again, letting others run; then sleep between looks
NAP_SECONDS = 0.0001
LONG_WAIT_SECONDS = 0.05  # after that, nap longer
LOOK_AFTER_SECONDS = 0.02  # how often to look whether the others are alive


def on_one_host(group: Group, timeout: timedelta) -> Group:
    """The same group, faster, if its workers share memory and the processor keeps stores in order (x86)."""
    if group.size == 1 or platform.machine() not in ("x86_64", "AMD64"):
        return group
    segments = open_segments(group, 2 * (COUNTER_BYTES + SLOT_BYTES))
    if segments is None:
        return group
    processes = group.gather(torch.tensor([os.getpid()], dtype=torch.int64)).flatten().tolist()
    return HostGroup(group, segments, processes, timeout)


class HostGroup:
    def __init__(self, inner: Group, segments: list[Tensor], processes: list[int], timeout: timedelta) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.timeout = timeout
        self.turn = 0
        size = COUNTER_BYTES + SLOT_BYTES
        slots = [[segment[turn * size : (turn + 1) * size] for segment in segments] for turn in range(2)]
        self._counters = [[slot[:8].view(torch.int64).numpy() for slot in turn] for turn in slots]
        self._rows = [[slot[COUNTER_BYTES:] for slot in turn] for turn in slots]
        self._alive = {os.pidfd_open(process): rank for rank, process in enumerate(processes) if rank != inner.rank}
        self._poll = select.poll()
        for descriptor in self._alive:
            self._poll.register(descriptor, select.POLLIN)

    def gather(self, row: Tensor) -> Tensor:
        if row.nbytes > SLOT_BYTES or not row.numel():
            return self.inner.gather(row)
        self.turn += 1
        counters, rows = self._counters[self.turn % 2], self._rows[self.turn % 2]
        num_bytes = row.nbytes
        rows[self.rank][:num_bytes].copy_(row.contiguous().reshape(-1).view(torch.uint8))
        counters[self.rank][0] = self.turn
        for rank in range(self.size):
            if counters[rank][0] < self.turn:
                self._wait(rank)
        found = torch.stack([each[:num_bytes] for each in rows])
        return found.view(row.dtype).reshape(self.size, *row.shape)

    def _wait(self, rank: int) -> None:
        counter, turn = self._counters[self.turn % 2][rank], self.turn
        began = looked = time.monotonic()
        while counter[0] < turn:
            now = time.monotonic()
            if now - began < SPIN_SECONDS:
                os.sched_yield()
                continue
            time.sleep(NAP_SECONDS if now - began < LONG_WAIT_SECONDS else 10 * NAP_SECONDS)
            if now - looked > LOOK_AFTER_SECONDS:
                looked = now
                # Whoever posted before it ended is not missed: only one that is waited for can be lost.
                gone = [self._alive[descriptor] for descriptor, _ in self._poll.poll(0)]
                if rank in gone and counter[0] < turn:
                    raise PeerLost(f"worker {self.rank} lost worker {rank}: its process has ended")
                if now - began > self.timeout.total_seconds():
                    waited = f"{self.timeout.total_seconds():g} s"
                    raise PeerLost(f"worker {self.rank} waited {waited} for worker {rank} in gather {turn}")

    def merge(self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor]) -> Pending:
        return self.inner.merge(lanes, deal, parts)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.inner.broadcast(tensor, source)

    def close(self) -> None:
        for descriptor in self._alive:
            os.close(descriptor)
        self._alive.clear()
        self.inner.close()
