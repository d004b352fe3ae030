"""A cluster in a box: real namespaces, real links, and nothing left of them. Most of it needs root, as CI has."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from helpers.command import Caller, write_job
from shoal.collectives.group import WorkerGroup
from shoal.driver.launchers import cleanup, lab_network, programs
from shoal.driver.launchers.lab import Lab, check_machine
from shoal.driver.launchers.lab_network import burst_bytes
from shoal.driver.launchers.namespaces import LabHost
from shoal.errors import InputError
from shoal.planner.cluster import even_cluster
from shoal.recovery.membership.process import start_ticks
from shoal.testing import ranks


def listed(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
NOBODY = 65534


def machine() -> tuple[str, set[str], set[str]]:
    """What the machine itself shows: its interfaces, names of namespaces, records of labs (not those of others)."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    interfaces = " ".join(sorted(line.split(":")[1] for line in links.splitlines()))
    records = [msgspec.json.decode(path.read_bytes()) for path in cleanup.RECORDS.glob("lab-*.json")]
    others = [one["id"] for one in records if one["owner"] != os.getpid() and start_ticks(one["owner"])]
    names, files = (
        {name for name in listed(folder) if not any(lab in name for lab in others)}
        for folder in (cleanup.NAMES, cleanup.RECORDS)
    )
    return interfaces, names, files


def holders(inodes: set[int]) -> list[str]:
    """Processes and descriptors that keep a network namespace in the kernel. Without one it is gone."""
    wanted = {f"net:[{inode}]" for inode in inodes}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        for link in ["ns/net", *(f"fd/{name}" for name in _names(entry / "fd"))]:
            with suppress(OSError):
                if os.readlink(entry / link) in wanted:
                    found.append(f"{entry}/{link}")
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def inodes(lab: Lab) -> set[int]:
    return {os.stat(host.namespace).st_ino for host in lab.hosts}


@pytest.fixture
def clean_after() -> Iterator[None]:
    """The machine's own network and /run are afterwards as they were."""
    before = machine()
    yield
    assert machine() == before


# -- up and down ------------------------------------------------------------------------------------------------------


@root
@pytest.mark.usefixtures("clean_after")
def test_hosts_of_two_racks_reach_each_other_and_leave_nothing() -> None:
    before = machine()[0]
    with Lab(even_cluster()) as lab:
        assert [host.address for host in lab.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2"]
        assert machine()[0] == before, "nothing of a lab is seen in the machine's own network"
        assert {f"shoal-{lab.id}-r1h0", f"shoal-{lab.id}_fabric"} <= listed(cleanup.NAMES)
        for far in lab.hosts[1:]:
            send, receive = connect(lab, lab.hosts[0], far)
            send.sendall(b"x")
            assert receive.recv(1) == b"x" and receive.getpeername()[0] == "10.77.0.1"
            send.close()
            receive.close()
        kept = inodes(lab)
        with lab.inside(lab.hosts[1]):
            stray = subprocess.Popen(["sleep", "600"])
        assert holders(kept)
    try:
        assert stray.wait(10) == -signal.SIGKILL, "what still ran on a host was ended"
    finally:
        stray.kill()
        stray.wait()
    assert holders(kept) == []


def connect(lab: Lab, here: LabHost, there: LabHost) -> tuple[socket.socket, socket.socket]:
    with lab.inside(there):
        listener = socket.create_server((there.address, 0))
    with lab.inside(here):
        near = socket.create_connection(listener.getsockname(), timeout=10)
    far, _ = listener.accept()
    listener.close()
    return near, far


@root
@pytest.mark.usefixtures("clean_after")
def test_two_labs_do_not_see_each_other() -> None:
    with Lab(even_cluster(hosts=1)) as one, Lab(even_cluster(hosts=1)) as other:
        with one.inside(one.hosts[0]):
            listener = socket.create_server((one.hosts[0].address, 0))
        with other.inside(other.hosts[1]), pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname(), timeout=10)
        listener.close()


@root
@pytest.mark.usefixtures("clean_after")
def test_links_and_uplinks_are_as_slow_as_they_should_be() -> None:
    link, uplink, size = 20e6, 10e6, 4 << 20  # bytes a second; bytes
    with Lab(even_cluster(link="160 Mbit/s", uplink="80 Mbit/s")) as lab:
        for here, there, rate in ((0, 1, link), (1, 0, link), (0, 2, uplink), (2, 0, uplink)):
            near, far = connect(lab, lab.hosts[here], lab.hosts[there])
            began = time.monotonic()
            sender = threading.Thread(target=near.sendall, args=(bytes(size),))
            sender.start()
            left = size
            while left:
                left -= len(far.recv(1 << 16))
            seconds = time.monotonic() - began
            sender.join()
            near.close()
            far.close()
            assert seconds >= (size - burst_bytes(rate)) / rate, f"{here} to {there} took {seconds:.3f} s"


@root
@pytest.mark.usefixtures("clean_after")
def test_an_exception_takes_the_lab_down() -> None:
    kept: set[int] = set()

    def fail() -> None:
        with Lab(even_cluster(hosts=1)) as lab:
            kept.update(inodes(lab))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert kept and holders(kept) == []


@root
@pytest.mark.usefixtures("clean_after")
def test_a_network_that_cannot_be_made_is_taken_down_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_network, "fabric_rates", lambda cluster: ["qdisc add dev up0 root nosuch"])
    with pytest.raises(Exception, match=r"could not be made: .*nknown") as error, Lab(even_cluster()):
        pass
    assert "tc qdisc add dev up0 root nosuch" in str(error.value)


def expect_signals() -> None:
    """As in a terminal. Under nohup, say, a signal comes ignored, and a lab leaves one alone that its user ignores."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Owner:
    """A forked process that has a lab and does something in it, until a signal comes."""

    def __init__(self, work: Callable[[Lab], None]) -> None:
        answer, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code: object = 1
            try:
                expect_signals()
                with Lab(even_cluster(hosts=1)) as lab:
                    os.write(theirs, json.dumps([lab.id, *inodes(lab)]).encode())
                    os.close(theirs)
                    work(lab)
            except KeyboardInterrupt:
                code = 130
            except SystemExit as leave:
                code = leave.code
            finally:
                os._exit(code if isinstance(code, int) else 1)
        os.close(theirs)
        with open(answer) as pipe:
            self.id, *found = json.load(pipe)
        self.inodes = set(found)

    def end(self, number: int) -> int:
        os.kill(self.pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@root
@pytest.mark.usefixtures("clean_after")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_takes_the_lab_down(number: int, code: int) -> None:
    owner = Owner(lambda lab: signal.pause())
    assert holders(owner.inodes)
    assert owner.end(number) == code
    assert holders(owner.inodes) == []


@root
@pytest.mark.usefixtures("clean_after")
def test_after_kill_9_only_what_the_dead_lab_left_is_removed(call: Caller) -> None:
    # The shell dies with its parent, the process that it put into the background does not.
    script = "sleep 600 & echo $! > stray-$RANK; wait"
    owner = Owner(lambda lab: programs.run_program(lab, ["sh", "-c", script]) and None)
    wait_until(lambda: all(Path(f"stray-{rank}").exists() and Path(f"stray-{rank}").read_text() for rank in (0, 1)))
    strays = [int(Path(f"stray-{rank}").read_text()) for rank in (0, 1)]
    with Lab(even_cluster(hosts=1)) as living:
        assert cleanup.clean() == [], "both owners live"
        assert owner.end(signal.SIGKILL) == -signal.SIGKILL
        assert start_ticks(strays[0]) is not None
        told = call.good("lab", "clean").out
        assert told == f"removed what was left of {owner.id}\n"
        wait_until(lambda: not any(start_ticks(pid) for pid in strays))
        assert holders(owner.inodes) == []
        assert f"shoal-{living.id}-r0h0" in listed(cleanup.NAMES)
        send, receive = connect(living, *living.hosts)
        send.close()
        receive.close()
    assert call.good("lab", "clean").out == "nothing was left\n"


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- commands in a lab ------------------------------------------------------------------------------------------------


@root
@pytest.mark.usefixtures("clean_after")
def test_the_same_bits_on_one_two_and_three_hosts(call: Caller) -> None:
    job = write_job(Path.cwd())
    alone = call.train(job, "--set", "steps=4").sha256
    found = call.good(
        "lab", "--racks", "1", "--hosts", "3", "--", "verify", job, "--workers", "2,3", "--steps", "4", "--json"
    )
    rows = found.value["rows"]
    assert [row["label"] for row in rows] == ["reference", "2 workers, 2 lab hosts", "3 workers, 3 lab hosts"]
    assert {row["weights_sha256"] for row in rows} == {alone}
    assert "lab: 1 rack, 3 hosts, links 1 Gbit/s" in found.err


TELLING = """\
import json, os, socket
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "SHOAL_HOST", "SHOAL_RACK", "SHOAL_ADDRESS")
told = [socket.gethostname(), socket.gethostbyname(socket.gethostname()), total.item(), [os.environ[n] for n in names]]
with open(f"told-{rank}.json", "w") as file:
    json.dump(told, file)
print("done", flush=True)
dist.destroy_process_group()
"""


def told(size: int) -> list[object]:
    return [json.loads(Path(f"told-{rank}.json").read_text()) for rank in range(size)]


@root
@pytest.mark.usefixtures("clean_after")
def test_workers_of_a_script_are_on_the_labs_hosts(call: Caller) -> None:
    Path("script.py").write_text(TELLING)
    shape = ["--racks", "2", "--hosts", "1", "--workers-per-host", "2", "--order", "interleaved"]
    found = call.good("lab", *shape, "--", "shoal", "run", "script.py", "--run-dir", "run")
    assert told(4) == [
        ["r0h0", "10.77.0.1", 10.0, ["0", "2", "0", "127.0.0.1", "r0h0", "r0", "10.77.0.1"]],
        ["r1h0", "10.77.1.1", 10.0, ["0", "2", "1", "127.0.0.1", "r1h0", "r1", "10.77.1.1"]],
        ["r0h0", "10.77.0.1", 10.0, ["1", "2", "0", "127.0.0.1", "r0h0", "r0", "10.77.0.1"]],
        ["r1h0", "10.77.1.1", 10.0, ["1", "2", "1", "127.0.0.1", "r1h0", "r1", "10.77.1.1"]],
    ]
    assert msgspec.json.decode(Path("run/config.json").read_bytes())["hosts"] == ["r0h0", "r1h0", "r0h0", "r1h0"]
    assert "cannot be retrieved" not in found.err, "hosts of a lab know each other's names"
    assert socket.gethostname() != "r0h0"


@root
@pytest.mark.usefixtures("clean_after")
def test_any_program_finds_what_torchrun_sets(call: Caller) -> None:
    Path("script.py").write_text(TELLING)
    found = call.good("lab", "--hosts", "1", "--", sys.executable, "script.py")
    assert told(2) == [
        ["r0h0", "10.77.0.1", 3.0, ["0", "1", "0", "10.77.0.1", "r0h0", "r0", "10.77.0.1"]],
        ["r1h0", "10.77.1.1", 3.0, ["0", "1", "1", "10.77.0.1", "r1h0", "r1", "10.77.1.1"]],
    ]
    assert sorted(found.out.splitlines()) == ["r0h0 | done", "r1h0 | done"]


@root
@pytest.mark.usefixtures("clean_after")
def test_the_first_failure_ends_the_others(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.2)
    script = "trap '' TERM; echo up >&2; printf last; [ $RANK = 1 ] && exit 7; sleep 600 & while :; do sleep 0.1; done"
    found = call("lab", "--racks", "1", "--workers-per-host", "2", "--", "sh", "-c", script)
    assert found.code == 7
    assert "rank 1 on r0h0 ended with exit code 7; the others were ended" in found.err
    assert "r0h0:1 | up" in found.err and "r0h0:1 | last" in found.out


@root
@pytest.mark.usefixtures("clean_after")
def test_ctrl_c_ends_the_programs(call: Caller) -> None:
    def interrupt() -> None:
        wait_until(lambda: all(Path(f"up-{rank}").exists() for rank in (0, 1)))
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=interrupt)
    user.start()
    found = call("lab", "--racks", "1", "--", "sh", "-c", "touch up-$RANK; sleep 600")
    user.join()
    assert found.code == 130 and "stopped: interrupted" in found.err


@root
@pytest.mark.usefixtures("clean_after")
def test_ranks_of_a_test_can_be_on_hosts() -> None:
    def where(group: WorkerGroup) -> list[object]:
        return [socket.gethostname(), os.environ["SHOAL_RACK"], group.gather_rows(torch.tensor([group.rank])).flatten()]

    with Lab(even_cluster(hosts=1)) as lab:
        found = ranks(2, where, places=lab.rank_hosts(2))
        with pytest.raises(InputError, match="3 ranks, but 2 places"):
            ranks(3, where, places=lab.rank_hosts(2))
    assert [row[:2] for row in found] == [["r0h0", "r0"], ["r1h0", "r1"]]
    assert all(row[2].tolist() == [0, 1] for row in found)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_without_root_it_says_so() -> None:
    if os.geteuid() != 0:
        with pytest.raises(InputError, match="a lab needs root"):
            check_machine()
        return
    answer, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(NOBODY)
        try:
            Lab(even_cluster())
        except InputError as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(answer) as pipe:
        assert f"a lab needs root to make network namespaces, and this is user {NOBODY}" in pipe.read()
