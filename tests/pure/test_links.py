"""What follows when hosts do not reach each other: who is named, who is given up. No process is needed."""

from datetime import timedelta

import pytest

from shoal.collectives.handshake import exchange_notes
from shoal.driver.store_monitor import living_workers
from shoal.errors import PeerLost
from shoal.recovery.membership.heartbeat import EMPTY_STATE
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.process import pid_space, start_ticks
from shoal.recovery.membership.protocol import MembershipView, WorkerId
from shoal.report.events import StoreOutage, WorkerLost
from shoal.report.incidents import Incident, IncidentLog
from shoal.report.wording import full_text
from shoal.transport.addresses import on_this_machine
from shoal.worker.rendezvous import MOST_ABSENCES, count_absences

STORE = "10.77.0.1:4000"


def away(rank: int | None, time: float, seconds: float | None = None) -> StoreOutage:
    host = "" if rank is None else f"r0h{rank}"
    return StoreOutage(time=time, rank=rank, address=STORE, host=host, seconds=seconds)


def lost(rank: int, time: float) -> WorkerLost:
    host = f"r0h{rank}"
    return WorkerLost(time=time, rank=rank, incarnation=0, host=host, pid=7, detected_by="", code=-9, action="replaced")


def outages(*events: StoreOutage | WorkerLost) -> list[Incident]:
    log = IncidentLog()
    for event in events:
        log.add(event)
    return [each for each in log.incidents if each.kind == "store-outage"]


def test_a_worker_that_is_cut_off_is_named_with_both_ends() -> None:
    (one,) = outages(away(1, 1.0))
    assert full_text(one) == (
        f"worker 1 on r0h1 cannot reach the store at {STORE}: look at the link between them; "
        "the others go on without it while it is away longer than a lease (--lease)"
    )
    (back,) = outages(away(1, 1.0), away(1, 3.0, seconds=2.0))
    assert full_text(back).endswith("; back after 2.0 s")


def test_several_that_are_cut_off_are_one_outage() -> None:
    (several,) = outages(away(1, 1.0), away(2, 1.1), away(1, 3.0, seconds=2.0), away(2, 3.0, seconds=1.9))
    assert full_text(several).startswith(f"workers 1 2 cannot reach the store at {STORE}: look at the links")


def test_a_store_that_the_driver_does_not_reach_either_is_away_for_all() -> None:
    (all_of_them,) = outages(away(1, 1.0), away(None, 1.2))
    assert full_text(all_of_them).startswith(f"store {STORE} cannot be reached: training goes on")


def test_the_replacement_of_a_lost_worker_has_an_outage_of_its_own() -> None:
    first, second = outages(away(1, 1.0), lost(1, 6.0), away(1, 7.0), away(1, 9.0, seconds=2.0))
    assert (first.seconds, second.seconds) == (None, 2.0), "the first never came back"


@pytest.mark.parametrize(
    ("address", "near"),
    [
        ("unix:/runs/7f3a/store.sock", True),
        ("/runs/7f3a/store.json", True),
        ("127.0.0.1:4000", True),
        ("etcd://localhost:2379", True),
        ("tcp://[::1]:4000", True),
        (STORE, False),
        ("etcds://store.example:2379", False),
    ],
)
def test_which_addresses_need_a_network(address: str, near: bool) -> None:
    assert on_this_machine(address) is near


class Notes:
    """A store in which the notes of some ranks are missing."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing

    def set(self, key: str, value: str) -> None: ...

    def wait(self, keys: list[str], timeout: object) -> None:
        raise RuntimeError("timeout")

    def check(self, keys: list[str]) -> bool:
        return not any(int(key.rpartition("/")[2]) in self.missing for key in keys)


def test_the_first_rank_knows_who_did_not_come() -> None:
    for rank, expected in ((0, (2,)), (1, ())):
        with pytest.raises(PeerLost, match="for rank 2 to join the group") as error:
            exchange_notes(Notes({2}), rank, 3, "member", "", timedelta(seconds=1))  # type: ignore[arg-type]
        assert error.value.missing == expected


def test_a_member_is_given_up_after_three_groups_in_a_row() -> None:
    view = MembershipView(generation=1, members=(WorkerId(0), WorkerId(1), WorkerId(2)))
    found: dict[WorkerId, int] = {}
    for _ in range(MOST_ABSENCES - 1):
        found = count_absences(found, view, [2])
    assert count_absences(found, view, [1, 2]) == {WorkerId(1): 1, WorkerId(2): MOST_ABSENCES}
    assert count_absences(found, view, []) == {}, "it came to another one"


def test_dead_processes_of_a_labs_hosts_are_known_to_be_dead() -> None:
    def worker(pid: int, space: str) -> WorkerProcess:
        started = start_ticks(pid) or "1"
        return WorkerProcess(
            worker_id=WorkerId(0), pid=pid, started=started, host="a lab's", host_name="r0h0", pid_space=space
        )

    for one, alive in (
        (worker(1, pid_space()), True),
        (worker((1 << 22) - 1, pid_space()), False),
        (worker((1 << 22) - 1, "another machine"), True),
        (worker((1 << 22) - 1, ""), True),
    ):
        state = type("State", (), {"alive": {one.worker_id: one}})()
        assert bool(living_workers(state)) is alive
    assert living_workers(EMPTY_STATE) == []
