"""A model that one worker cannot hold is trained by four that cannot either: what needs no process."""

import pytest

import shoal
from helpers.large_job import CAP, job
from shoal.errors import MemoryNeeded

pytestmark = pytest.mark.clean_heap


def test_one_worker_is_refused_before_it_starts() -> None:
    with pytest.raises(MemoryNeeded) as caught:
        shoal.train(job(), memory=CAP, quiet=True)
    assert caught.value.exit_code == 2
    assert "one worker needs 113 MB (weights 28" in caught.value.message
    assert "and has 80 MB (--memory 80 MB)" in caught.value.message
    assert "pipeline=2" in (caught.value.fix or "")


@pytest.mark.parametrize("layout", [None, "pipeline=2", "tensor=2"])
def test_what_it_needs_by_layout(layout: str | None) -> None:
    """Half of a model is half of the need."""
    with pytest.raises(MemoryNeeded, match=r"one worker needs (113|56|57)"):
        shoal.train(job(), layout=layout, memory="50MB", quiet=True)
