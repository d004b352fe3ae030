"""A failure as a story: with real processes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.report.oom import OomWatch, kill_counter

# -- out of memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group that may use 32 MB: below this process's own, in whichever tree counts memory."""
    if os.geteuid() != 0:
        pytest.skip("only root can make control groups")
    own = kill_counter(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    root = None if own is None else own.parent
    group = None if root is None else root / f"shoal-test-{os.getpid()}"
    try:
        if group is None:
            raise OSError("no control group for memory")
        group.mkdir()
        limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / limit).write_text(str(32 << 20))
    except OSError as error:
        if group is not None and group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_a_process_that_the_kernel_really_killed_for_memory(small_group: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/memory\n1:memory:/\n")  # found whichever of the two the machine has
    (tmp_path / "memory").symlink_to(small_group)
    by_count = OomWatch(kernel_log=tmp_path / "none", cgroup_root=tmp_path, own_cgroups=own)
    by_log = OomWatch()
    script = f"open({str(small_group / 'cgroup.procs')!r}, 'w').write('0')\nhold = b'x' * (256 << 20)\n"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    try:
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    if code != -9:
        pytest.skip(f"the limit of the control group did not bind here (exit code {code})")
    assert by_count.killed(process.pid)
    if by_log._kernel_log is not None:
        assert by_log.killed(process.pid)
        assert not by_log.killed(process.pid + 1)
