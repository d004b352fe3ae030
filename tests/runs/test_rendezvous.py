"""Where processes find each other: torch's own client at our server, and strangers at a run's."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from helpers.command import Running, write_job
from helpers.etcd import free_ports
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.transport.key_value_server import KeyValueServer
from shoal.transport.peer_process import process_tree
from shoal.transport.secure_socket import Connection

# Every method of torch's client, at our server and at torch's own two.
CLIENT = """
import json, sys, threading
from datetime import timedelta
import torch.distributed as dist

def tell(act):
    try:
        found = act()
    except Exception as error:
        return type(error).__name__
    if isinstance(found, list):
        return sorted(each.decode() if isinstance(each, bytes) else each for each in found)
    return found.decode() if isinstance(found, bytes) else found

def play(store, other):
    short = timedelta(milliseconds=50)
    store.set_timeout(timedelta(seconds=20))
    told = [
        tell(lambda: store.set("k", "v")), tell(lambda: store.get("k")),
        tell(lambda: store.set("large", "x" * 1_000_000)), tell(lambda: len(store.get("large"))),
        tell(lambda: store.add("n", 5)), tell(lambda: store.add("n", -7)), tell(lambda: store.get("n")),
        tell(lambda: store.check(["k", "none"])), tell(lambda: store.check(["k"])), tell(lambda: store.check([])),
        tell(lambda: store.wait(["k", "n"], short)), tell(lambda: store.wait(["none"], short)),
        tell(lambda: store.compare_set("c", "", "d")), tell(lambda: store.compare_set("c", "x", "e")),
        tell(lambda: store.compare_set("c", "d", "e")), tell(lambda: store.compare_set("absent", "d", "e")),
        tell(lambda: store.num_keys()), tell(lambda: store.delete_key("c")), tell(lambda: store.delete_key("c")),
        tell(lambda: store.append("a", "1")), tell(lambda: store.append("a", "2")),
        tell(lambda: store.multi_get(["a", "k"])), tell(lambda: store.multi_set(["a", "k"], ["x", "y"])),
        tell(lambda: store.multi_get(["a", "k"])), tell(lambda: dist.PrefixStore("p", store).add("n", 3)),
        tell(lambda: store.clone().get("k")), tell(lambda: store.timeout.total_seconds()),
    ]
    waiter = threading.Timer(0.1, lambda: other.set("late", "now"))
    waiter.start()
    told.append(tell(lambda: store.get("late")))
    waiter.join()
    return told

def play_more(store):
    short = timedelta(milliseconds=50)
    return [
        tell(lambda: store.list_keys()), tell(lambda: store.queue_push("q", "x")), tell(lambda: store.queue_len("q")),
        tell(lambda: store.check(["q"])), tell(lambda: store.num_keys()), tell(lambda: store.queue_pop("q")),
        tell(lambda: store.queue_len("none")), tell(lambda: store.check(["q"])),
        tell(lambda: store.queue_pop("q", False)), tell(lambda: store.barrier("b", 1, timedelta(seconds=9))),
        tell(lambda: store.barrier("two", 2, short)), tell(lambda: store.barrier("two", 2, short)),
        tell(lambda: store.list_keys()), tell(lambda: store.set("text", "abc")), tell(lambda: store.add("text", 1)),
    ]

def told_at(port):
    store, other = (dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)) for _ in "12")
    return play(store, other), store

ours, first = told_at(int(sys.argv[1]))
servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=uv) for uv in (True, False)]
libuv, second = told_at(servers[0].port)
plain, _ = told_at(servers[1].port)
print(json.dumps([ours, libuv, plain, play_more(first), play_more(second)]))
"""


def test_torch_finds_in_our_server_what_it_finds_in_its_own() -> None:
    def admit(connection: socket.socket) -> Connection:
        connection.setblocking(False)
        return connection

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with closing(KeyValueServer(listener, admit)) as serving:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(port)], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        assert serving.broken == 1, "what is no number ends the connection of who adds to it, as in torch's"
    ours, libuv, plain, ours_more, libuv_more = json.loads(done.stdout)
    assert ours == libuv == plain
    assert ours_more == libuv_more


# A script with a group, whose processes wait for the file `go`; a child in a session of its own has a word, too.
SCRIPT = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    line = "import torch.distributed as d, os; d.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False)"
    subprocess.run([sys.executable, "-c", line + ".set('child', 'came')"], check=True, start_new_session=True)
    with open("port.part", "w") as file:
        file.write(os.environ["MASTER_PORT"])
    os.rename("port.part", "port")
store = dist.distributed_c10d._get_default_store()
while isinstance(store, dist.PrefixStore):
    store = store.underlying_store
while not os.path.exists("go"):
    time.sleep(0.02)
print("keys", sorted(key for key in store.list_keys() if "child" in key or "stranger" in key))
total = torch.ones(1)
dist.all_reduce(total)
group = dist.new_group()  # through the store again
assert total.item() == 2
"""

STRANGER = """
import sys
from datetime import timedelta
import torch.distributed as dist
try:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=2))
    store.set("stranger", "was here")
    print(store.num_keys())
except dist.DistError as error:
    print("refused")
"""


def test_strangers_at_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the same user that are none of the run's: torch's client, garbage, a flood, many connections."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    with Running("run", "script.py", "--workers", "2", "--run-dir", "run") as running:
        until = time.monotonic() + 60
        while not Path("port").exists() and time.monotonic() < until and running.process.poll() is None:
            time.sleep(0.05)
        port = int(Path("port").read_text())
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
        assert f"0100007F:{port:04X}" in listening, "on loopback alone"
        came = subprocess.run([sys.executable, "-c", STRANGER, str(port)], capture_output=True, text=True, check=False)
        assert came.stdout.strip() == "refused"
        for sent in (os.urandom(24), b"\x01" + b"\xff" * 8, bytes(1 << 20)):
            with closing(socket.create_connection(("127.0.0.1", port))) as stranger:
                stranger.settimeout(20)
                try:
                    stranger.sendall(sent)
                    assert stranger.recv(1) == b""
                except ConnectionError:
                    pass
        Path("go").touch()
        done = running.end()
    assert done.code == 0, done.err
    assert "keys ['child']" in Path("run/worker-1.log").read_text()
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if event["event"] == "training-note"]
    assert 1 <= len(told) <= 5 and "is none of the run's" in told[0], "who was refused is in the record, a few times"


def listening(pids: set[int]) -> list[str]:
    """Ports on which any of these processes listens."""
    held = {os.readlink(found) for pid in pids for found in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]


def test_a_run_on_one_machine_has_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, fork server, store and workers talk through Unix sockets that this user alone can open."""
    monkeypatch.chdir(tmp_path)
    loss = "import pathlib, time\nwhile step == 3 and not pathlib.Path('go').exists(): time.sleep(0.02)"
    job = write_job(tmp_path, loss=loss)
    with Running("train", job, "--workers", "2", "--run-dir", "run") as running:
        sockets = [Path("run", name) for name in ("store.sock", "rendezvous-0.sock", "launcher.sock")]
        until = time.monotonic() + 60
        while not sockets[1].exists() and time.monotonic() < until and running.process.poll() is None:
            time.sleep(0.05)
        serving = read_server_info(Path("run"))
        assert serving is not None and serving.address == "unix"
        pids = {*process_tree([running.process.pid]), serving.pid}
        assert len(pids) >= 5 and listening(pids) == []
        assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600] * 3
        Path("go").touch()
        done = running.end()
    assert done.code == 0, done.err
    assert not [path for path in Path("run").iterdir() if path.suffix == ".sock"]


# Groups of one, as scripts make them, one after the other; after each the process waits until it was looked at.
ONE = """
import os, sys, time
import torch, torch.distributed as dist
ways = {"env": {}, "own port": {"rank": 0, "world_size": 1}, "tcp": {"rank": 0, "world_size": 1}}
for number, (way, given) in enumerate(ways.items()):
    if way == "own port":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    if way == "tcp":
        given["init_method"] = "tcp://127.0.0.1:" + sys.argv[1]
    dist.init_process_group("gloo", **given)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.new_group().barrier()
    assert total.item() == 1
    open(f"made-{number}", "w").close()
    while not os.path.exists(f"seen-{number}"):
        time.sleep(0.02)
    dist.destroy_process_group()
"""


def test_a_script_with_one_worker_listens_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store for a group of one would listen on all addresses, for anybody; gloo's pairs listen on loopback."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(ONE)
    (port,) = free_ports(1)
    with Running("run", "script.py", "--run-dir", "run", "--", str(port)) as running:
        for number in range(3):
            until = time.monotonic() + 60
            while not Path(f"made-{number}").exists() and time.monotonic() < until and running.process.poll() is None:
                time.sleep(0.05)
            assert Path(f"made-{number}").exists()
            found = listening(set(process_tree([running.process.pid])))
            assert all(address.startswith("0100007F:") for address in found), found
            assert f"0100007F:{port:04X}" not in found
            Path(f"seen-{number}").touch()
        done = running.end()
    assert done.code == 0, done.err
