"""A worker of a job that speaks for another at the servers, on one host."""

from pathlib import Path

import pytest

from helpers.command import Caller, write_job

# With what it finds in its environment, in the middle of a step.
ATTACK = """\
if rank == '1' and step == 3 and not os.path.exists('told'):
    from shoal.paramserver.local_servers import connect
    try:
        connect(worker=0, timeout=5).close()
        told = 'taken for worker 0'
    except Exception as error:
        told = str(error)
    open('told', 'w').write(told)
"""


def test_a_worker_cannot_take_anothers_place(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the run: each worker had the token of all."""
    monkeypatch.chdir(tmp_path)
    whole = call.train(write_job(Path.cwd(), name="plain.py")).sha256
    job = write_job(Path.cwd(), loss=ATTACK)
    found = call.train(job, "--workers", "2", "--servers", "1", "--run-dir", "run")
    assert "worker 1.0 came as worker 0" in Path("told").read_text()
    assert found.sha256 == whole
    assert "worker 1.0 came as worker 0" in Path("run/server-0.log").read_text(), "the server's log has the reason"
