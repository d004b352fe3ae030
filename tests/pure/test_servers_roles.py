"""Who may send what to a parameter server, by token on one host and by certificate between hosts."""

import socket
import threading
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from helpers.shards import spec_of, values_of
from shoal.errors import InputError
from shoal.paramserver import messages
from shoal.paramserver.client import ParameterClient, RefusedError, ServerUnreachable
from shoal.paramserver.messages import (
    AckReply,
    ApplyRequest,
    EndRequest,
    PullRequest,
    PutRequest,
    RewindRequest,
    ServerRequest,
    SnapshotRequest,
    StatsRequest,
    StatusRequest,
    TableSlice,
    TaskRequest,
)
from shoal.paramserver.permissions import (
    MAY_SEND,
    ForbiddenRequest,
    claim_of_token,
    permitted,
    role_token,
    token_of,
    worker_token,
)
from shoal.paramserver.server import ParameterServer
from shoal.paramserver.shard import ParameterShard
from shoal.transport import unix_sockets
from shoal.transport.authority import RunAuthority
from shoal.transport.credentials import Credentials, self_issued
from shoal.transport.identity import NamedProcess, Role
from shoal.worker.server_worker.server_process import _Refusals

TOKEN = "the servers' own"
SHARED = "a secret of thirty-two characters or more"
SPEC = spec_of("sgd", {"w": [4]}, lr=1.0)


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_message_says_who_may_send_it() -> None:
    assert set(MAY_SEND) == set(typing.get_args(messages.AnyRequest))
    assert all(roles and Role.DRIVER in roles and Role.ADMIN in roles for roles in MAY_SEND.values())


def test_a_viewer_only_reads() -> None:
    may = {kind for kind, roles in MAY_SEND.items() if Role.VIEWER in roles}
    assert not may & set(messages.WRITES)
    assert SnapshotRequest not in may, "it writes to the disk"
    assert {StatsRequest, StatusRequest, PullRequest} <= may


def test_servers_and_stores_are_nobodys_clients() -> None:
    for role in (Role.SERVER, Role.STORE):
        assert all(role not in roles for roles in MAY_SEND.values())
        assert isinstance(permitted(role, StatusRequest()), ForbiddenRequest)


def test_a_message_that_the_table_does_not_know_is_forbidden_to_all() -> None:
    class SurpriseRequest(ServerRequest, frozen=True):
        pass

    assert all(isinstance(permitted(role, SurpriseRequest()), ForbiddenRequest) for role in Role)


def test_what_a_worker_sets_is_guarded_whatever_it_says() -> None:
    for request in (PutRequest([]), ApplyRequest(0, 1, [(0, 1)]), RewindRequest(1, 0)):
        assert permitted(Role.WORKER, request).guarded  # type: ignore[attr-defined]
        assert permitted(Role.ADMIN, request) is request


def test_tokens_of_roles_follow_from_the_servers_and_not_from_each_other() -> None:
    tokens = {role: role_token(TOKEN, role) for role in Role}
    assert len(set(tokens.values())) == len(Role) and all(TOKEN not in token for token in tokens.values())
    assert {claim_of_token(token) for token in tokens.values()} == set(Role)
    assert claim_of_token(TOKEN) == claim_of_token("worker:short") == claim_of_token("") == ""
    assert token_of(TOKEN, "viewer") == tokens[Role.VIEWER] and token_of(TOKEN, "") == TOKEN
    for claim in (
        "king",
        "worker/",
        "worker/3",
        "worker/3.",
        "worker/03.1",
        "worker/3.1/2",
        "viewer/3.1",
        "worker/\u0663.1",
    ):
        with pytest.raises(InputError, match="is no role"):
            token_of(TOKEN, claim)


def test_the_token_of_a_worker_names_its_process() -> None:
    tokens = [worker_token(TOKEN, NamedProcess(*each)) for each in ((0, 0), (0, 1), (1, 0), (10, 0))]
    assert len({*tokens, role_token(TOKEN, Role.WORKER)}) == 5
    assert [claim_of_token(token) for token in tokens] == ["worker/0.0", "worker/0.1", "worker/1.0", "worker/10.0"]
    assert all(token_of(TOKEN, claim_of_token(token)) == token for token in tokens)


# -- over a socket ----------------------------------------------------------------------------------------------------


@contextmanager
def serving(address: str, **more: object) -> Iterator[ParameterServer]:
    server = ParameterServer(ParameterShard(), [address], **more)  # type: ignore[arg-type]
    done = threading.Event()
    thread = threading.Thread(target=lambda: server.serve(done.is_set))
    thread.start()
    try:
        yield server
    finally:
        done.set()
        thread.join()
        server.close()


def refused_code(client: ParameterClient, request: ServerRequest, *tensors: torch.Tensor) -> str:
    try:
        client.request(0, request, list(tensors)).wait()
    except RefusedError as error:
        return error.code
    return ""


def check_roles(admin: ParameterClient, worker: ParameterClient, viewer: ParameterClient) -> None:
    """Each does what its role permits; a refusal costs nothing else."""
    table = worker.dense("model", {"w": torch.ones(4)}, spec=SPEC)
    over = PutRequest([TableSlice("model")])
    assert refused_code(worker, over, torch.zeros(4)) == "role"
    assert refused_code(worker, PutRequest([], state={"table": "model", "names": []})) == "role"
    assert refused_code(worker, TaskRequest("save")) == "role"
    assert table.push({"w": torch.full((4,), 0.5)}).wait() == 1, "its next write has the next number"
    assert refused_code(worker, over, torch.zeros(4)) == "role"
    # A table that is only put (buffers) is a worker's to set.
    buffers = worker.dense("buffers", {"b": torch.ones(2)}, optimizer="none")
    buffers.put({"b": torch.zeros(2)}).wait()
    for request in (over, EndRequest("enough"), SnapshotRequest(), messages.DeclareRequest("more", SPEC)):
        assert refused_code(viewer, request, *([torch.zeros(4)] if request is over else [])) == "role"
    reply, tensors = viewer.request(0, PullRequest([TableSlice("model")])).wait()
    assert reply.version == 1 and tensors[0][:4].tolist() == [0.5] * 4
    assert viewer.request(0, StatsRequest()).wait()[0].refused["role"] >= 8
    assert admin.request(0, over, [torch.full((64,), 7.0)]).wait()[0] == AckReply(1)
    assert worker.request(0, StatusRequest()).wait()[0].version == 1, "the viewer has not taken its place"


def test_roles_by_token(tmp_path: Path) -> None:
    with serving(f"unix:{tmp_path / 's'}", token=TOKEN) as server:
        with (
            ParameterClient(server.addresses, worker=1, token=TOKEN) as admin,
            ParameterClient(server.addresses, token=role_token(TOKEN, Role.WORKER)) as worker,
            ParameterClient(server.addresses, token=role_token(TOKEN, Role.VIEWER)) as viewer,
        ):
            check_roles(admin, worker, viewer)
        forged = Role.ADMIN + role_token(TOKEN, Role.WORKER).removeprefix("worker")
        with pytest.raises(RefusedError, match="a wrong token"):
            ParameterClient(server.addresses, token=forged)
        with pytest.raises(RefusedError, match="nobody's client"):
            ParameterClient(server.addresses, token=role_token(TOKEN, Role.STORE))


def process_token(worker: int, incarnation: int) -> str:
    return worker_token(TOKEN, NamedProcess(worker, incarnation))


def test_a_worker_speaks_for_itself_alone_by_token(tmp_path: Path) -> None:
    """On one host, as its certificate has it between hosts; and a process that was replaced for nobody."""
    with serving(f"unix:{tmp_path / 's'}", token=TOKEN) as server:
        addresses = server.addresses
        with (
            ParameterClient(addresses, worker=9, token=TOKEN) as admin,
            ParameterClient(addresses, worker=0, token=process_token(0, 0)) as first,
            ParameterClient(addresses, token=role_token(TOKEN, Role.VIEWER)) as viewer,
        ):
            check_roles(admin, first, viewer)
            with pytest.raises(RefusedError, match=r"worker 3\.0 came as worker 0"):
                ParameterClient(addresses, worker=0, token=process_token(3, 0))
            assert first.request(0, StatusRequest()).wait()[0].version == 1, "nobody has taken its place"
            forged = "worker/0.1:" + process_token(3, 0).rpartition(":")[2]
            with pytest.raises(RefusedError, match="a wrong token"):
                ParameterClient(addresses, worker=0, token=forged)
            with ParameterClient(addresses, worker=0, token=process_token(0, 1)) as replacement:
                with pytest.raises(RefusedError, match=r"worker 0\.0 came after worker 0\.1, which has replaced it"):
                    ParameterClient(addresses, worker=0, token=process_token(0, 0))
                assert replacement.request(0, StatusRequest()).wait()[0].version == 1


def test_roles_by_certificate() -> None:
    authority = RunAuthority.new("7f3a")
    issue = authority.issue
    with serving("tcp://0.0.0.0:0", credentials=issue(Role.SERVER, "0.0")) as server:
        here = [server.addresses[0].replace("0.0.0.0", "127.0.0.1")]
        with (
            ParameterClient(here, worker=9, credentials=issue(Role.ADMIN, "me")) as admin,
            ParameterClient(here, worker=0, credentials=issue(Role.WORKER, "0.0")) as worker,
            ParameterClient(here, credentials=issue(Role.VIEWER, "eve")) as viewer,
        ):
            check_roles(admin, worker, viewer)
            with pytest.raises(RefusedError, match=r"worker 3\.0 of run 7f3a came as worker 0"):
                ParameterClient(here, worker=0, credentials=issue(Role.WORKER, "3.0"))
        large = {"w": torch.arange(1 << 20, dtype=torch.float32)}
        with ParameterClient(here, worker=0, credentials=issue(Role.WORKER, "0.1")) as worker:
            table = worker.dense("large", large)
            assert torch.equal(table.pull().wait()["w"], large["w"])
        with pytest.raises(
            RefusedError, match=r"worker 0\.0 of run 7f3a came after worker 0\.1, which has replaced it"
        ):
            ParameterClient(here, worker=0, credentials=issue(Role.WORKER, "0.0"))
        assert "another run" in disbelieved(here, RunAuthority.new("7f3a").issue(Role.WORKER, "0.0"))
        assert "does not speak TLS" in server_reasons(server, here)


def test_another_users_process_is_sent_away_unheard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the socket's mode not keep it out: the kernel says whose process it is."""
    stranger = unix_sockets.PeerCredentials(pid=4242, user=65534, group=65534)
    monkeypatch.setattr(unix_sockets, "peer_credentials", lambda connection: stranger)
    with serving(f"unix:{tmp_path / 's'}") as server:
        with pytest.raises(ServerUnreachable, match="closed"):
            ParameterClient(server.addresses, timeout=0.2)
        assert "process 4242 of user 65534" in server.close_reasons[0] and not server.dispatcher.connections


def test_who_has_the_shared_secret_may_do_all() -> None:
    own = self_issued(SHARED, Role.WORKER, "0@a")
    with serving("tcp://127.0.0.1:0", credentials=own) as server:
        with ParameterClient(server.addresses, credentials=self_issued(SHARED, Role.WORKER, "1@b")) as client:
            client.dense("model", {"w": torch.ones(4)}, spec=SPEC).put({"w": torch.zeros(4)}).wait()
        assert "another secret" in disbelieved(server.addresses, self_issued(SHARED + "!", Role.WORKER, "2@c"))


def test_a_revoked_worker_gets_no_further(tmp_path: Path) -> None:
    authority = RunAuthority.new("7f3a")
    authority.save(tmp_path)
    worker = authority.issue(Role.WORKER, "0.0")
    with serving("tcp://127.0.0.1:0", credentials=authority.issue(Role.SERVER, "0.0")) as server:
        with ParameterClient(server.addresses, credentials=worker) as client:
            assert client.request(0, StatusRequest()).wait()[0].version == 0
        authority.revoke(worker.serial)
        with pytest.raises(ServerUnreachable, match="it closed"):
            ParameterClient(server.addresses, credentials=worker, timeout=0.2)
        assert any("is revoked" in reason for reason in server.close_reasons)


def disbelieved(addresses: list[str], credentials: Credentials) -> str:
    """What a client says at once, long before its timeout, of a server with a foreign certificate."""
    with pytest.raises(InputError, match="was not believed") as error:
        ParameterClient(addresses, credentials=credentials, timeout=3600)
    assert addresses[0] in str(error.value) and str(credentials.identity) in str(error.value)
    return str(error.value)


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(ServerUnreachable, match=r"no-such-host\.invalid:7470 .*the host's name is unknown"):
        ParameterClient(["tcp://no-such-host.invalid:7470"], timeout=0.1)


def server_reasons(server: ParameterServer, addresses: list[str]) -> str:
    """What the server notes about a client without TLS: it hears nothing from the server, which goes on."""
    host, port = addresses[0].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        plain.sendall(b"\x82\xa4type\xa5Hello" * 20)
        heard = b""
        with suppress(ConnectionResetError):
            while piece := plain.recv(100):
                heard += piece
        assert heard[:1] in (b"", b"\x15"), "an alert of TLS at most"
    until = time.monotonic() + 5
    while not any("TLS" in reason for reason in server.close_reasons) and time.monotonic() < until:
        time.sleep(0.01)
    return " ".join(server.close_reasons)


def test_the_environment_gives_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", SHARED)
    with serving("tcp://0.0.0.0:0") as server:
        assert server.credentials is not None
        here = [server.addresses[0].replace("0.0.0.0", "127.0.0.1")]
        with ParameterClient(here) as client:
            table = client.dense("model", values_of({"w": [4]}), spec=SPEC)
            assert table.push({"w": torch.zeros(4)}).wait() == 1


def test_the_log_of_a_server_has_a_line_for_all_who_were_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals = _Refusals()
    with serving(f"unix:{tmp_path / 's'}", token=TOKEN) as server:
        refusals.note(server)
        for _ in range(3):
            with pytest.raises(RefusedError):
                ParameterClient(server.addresses, token="guess")
        until = time.monotonic() + 5
        while server.close_counts["refused"] < 3 and time.monotonic() < until:  # it answers, then counts
            time.sleep(0.01)
        refusals.note(server)
        refusals.note(server)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("3 connections refused; the last was ") and "a wrong token" in line
