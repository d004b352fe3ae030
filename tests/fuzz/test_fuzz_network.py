"""Every parser of what comes from the network: no error but the documented one, bounded time and memory."""

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.fuzz_network import targets
from helpers.fuzzing import FuzzTarget, encoded, outcome, run_cases

CASES = int(os.environ.get("FUZZ_CASES", "2000"))  # of a cheap parser; `make fuzz` sets more, for all
SEED = int(os.environ.get("FUZZ_SEED", "0"))
TARGETS = {target.name: target for target in targets()}
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary()
TREES = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=9), inside, max_size=4),
    max_leaves=10,
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_do_harm(name: str) -> None:
    target = TARGETS[name]
    cases = CASES if "FUZZ_CASES" in os.environ else CASES // target.cost
    assert run_cases(target, cases, SEED) >= cases


@pytest.mark.parametrize("name", [name for name in TARGETS if TARGETS[name].form])
def test_no_value_does_harm(name: str) -> None:
    target: FuzzTarget = TARGETS[name]

    @settings(max_examples=20, deadline=None, database=None)
    @given(TREES)
    def holds(value: Any) -> None:
        assert outcome(target, encoded(value, target.form)) is None

    holds()
