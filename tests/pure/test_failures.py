"""What happens to a group when one of its ranks does not do its part: what needs no process."""

import importlib
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from shoal.collectives.transport import open_transport
from shoal.errors import PeerLost

Words = dict[str, list[Any]]  # by call: the error's type, its text, seconds since the fact


@pytest.fixture(scope="module", autouse=True)
def torch_is_warm() -> None:
    """What DistributedDataParallel imports when it is made, once instead of in every rank."""
    importlib.import_module("torch._dynamo")


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_who_does_not_join_is_named() -> None:
    with pytest.raises(PeerLost, match=r"rank 1 of 4 waited 0.2 s for ranks 0, 2, 3 to join the group"):
        open_transport(HashStore(), 1, 4, timedelta(seconds=0.2))
