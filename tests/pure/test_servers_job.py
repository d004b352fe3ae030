"""Jobs through parameter servers: what needs no process."""

import shoal
from shoal.paramserver.messages import LeaseReply, LeaseRequest
from shoal.paramserver.sync_mode import SyncMode
from shoal.worker.server_worker.asynchronous import AsyncServerWorker

# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_worker_asks_for_the_rows_of_its_next_step() -> None:
    asked: list[tuple[int, bool]] = []
    worker = object.__new__(AsyncServerWorker)
    worker.prefetch = lambda step, keep_previous=False: asked.append((step, keep_previous))  # type: ignore[method-assign]
    for ticket, then in ((0, 2), (2, 3), (5, 3), (3, -1), (7, -1)):
        worker.prefetch_next(LeaseReply(lease=ticket, next_lease=then))
    assert asked == [(0, False), (2, True), (3, True), (5, False), (3, True), (7, False)]
    worker.worker, worker.sync_mode = 1, SyncMode.parse("async")
    for table, knows in ((shoal.Embedding(5, 2, ids=lambda batch: batch), True), (shoal.Embedding(5, 2), False)):
        worker.tables = [("words", table)]
        assert worker.next_lease(done=3) == LeaseRequest(1, finished=3, wants_next=knows)
