"""Records of the store that cannot be read: a plain error where the run cannot go on, else left out and counted."""

from pathlib import Path

import msgspec
import pytest

from shoal.driver import control
from shoal.driver.control import _answers
from shoal.driver.driver_claim import living_driver
from shoal.driver.launchers.base import LocalHost
from shoal.driver.store_monitor import StoreMonitor
from shoal.errors import RunError
from shoal.recovery.membership.heartbeat import MembershipState, RunRequest
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.protocol import MemberPosition, MembershipView, WorkerId
from shoal.recovery.membership.store import StoreEntry, StoreSnapshot
from shoal.report.events import TrainingNote
from shoal.report.stacks import WorkerActivity

BAD = {
    "no JSON": b"{",
    "no UTF-8": b'{"generation": 1, "members": [], "reason": "\xff", "failed": "\xff", "pid": "\xff"}',
    "deep": b"[" * 100_000,
    "another type": b'"view"',
    "nothing": b"",
    "numbers too large": b'{"generation": 1e400, "pid": 1e400, "workers": 1e400}',
}
MEMBER = WorkerId(0, 1)
GOOD = {
    "view": msgspec.json.encode(MembershipView(generation=3, members=(MEMBER,))),
    "alive/0.1": msgspec.json.encode(
        WorkerProcess(worker_id=MEMBER, pid=1, started="", host="elsewhere", host_name="elsewhere")
    ),
    "position/3/0.1": msgspec.json.encode(MemberPosition(worker_id=MEMBER, committed=7)),
    "request": msgspec.json.encode(RunRequest(workers=3)),
    "rendezvous/3": b"127.0.0.1:1",
    "committed": b"7",
    "where/0.1": msgspec.json.encode(
        WorkerActivity(worker=0, incarnation=1, host="", pid=1, state="computes", phase="forward")
    ),
}


class Kept:
    """A store that always gives one reading."""

    address = "etcd://one:1/shoal"

    def __init__(self, **changed: bytes) -> None:
        values = {**GOOD, **changed}
        self.reading = StoreSnapshot(
            9, {key: StoreEntry(value, at) for at, (key, value) in enumerate(values.items(), 1)}, self.address
        )

    def read(self, prefix: str = "") -> StoreSnapshot:
        found = {key: entry for key, entry in self.reading.entries.items() if key.startswith(prefix)}
        return msgspec.structs.replace(self.reading, entries=found)

    def wait(self, prefix: str, after: int, seconds: float) -> None: ...

    def renew(self, lease: int) -> bool:
        return True


@pytest.mark.parametrize("bad", BAD)
def test_a_view_that_cannot_be_read_is_a_plain_error(bad: str) -> None:
    with pytest.raises(RunError) as caught:
        MembershipState(Kept(view=BAD[bad]).read())
    text = str(caught.value)
    assert text.startswith("the record view of the store at etcd://one:1/shoal cannot be read: "), text
    assert "--resume" in text and "Traceback" not in text


@pytest.mark.parametrize("key", [key for key in GOOD if key not in ("view", "where/0.1")])
def test_other_records_are_left_out_and_counted(key: str) -> None:
    whole = MembershipState(Kept().read())
    assert whole.unreadable == {} and MEMBER in whole.alive and whole.positions[MEMBER].committed == 7
    assert (whole.request.workers, whole.rendezvous, whole.committed) == (3, "127.0.0.1:1", 7)
    values = [*BAD.values(), b'{"workers": 100000000}'] if key != "rendezvous/3" else [b"\xff"]
    for bad in values:
        state = MembershipState(Kept(**{key: bad}).read())
        assert list(state.unreadable) == [key] and state.view.generation == 3
        found = [bool(state.alive), bool(state.positions), state.request.workers == 3, bool(state.rendezvous)]
        assert [*found, bool(state.committed)].count(False) == 1


def test_commands_and_the_driver_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_SECONDS", 0.01)
    for bad in BAD.values():
        assert living_driver(Kept(driver=bad)) is None  # type: ignore[arg-type]
        assert _answers(Kept(**{"where/0.1": bad}), {"0.1"}, 0) == {}  # type: ignore[arg-type]
    assert _answers(Kept(), {"0.1"}, 0)["0.1"].phase == "forward"  # type: ignore[arg-type]
    monitor = StoreMonitor(tmp_path, "run", "etcd://one:1", LocalHost())
    monitor.store = monitor._claim._store = Kept(request=b"{")  # type: ignore[assignment]
    monitor._claim._lease = 1
    (note,) = monitor.poll()
    assert isinstance(note, TrainingNote) and "the record request of the store at etcd://one:1" in note.text
    assert list(monitor.unreadable) == ["request"]
    monitor._polled = 0.0
    assert monitor.poll() == [], "it says so once"
